"""The cluster: membership, the controller, topics and their placement, and following the leaders.

Every decision is a compare-and-swap on the coordination store, fenced by revisions. May import `replication`, `log`,
`catalog`, `protocol` and `core`. Start reading at `cluster_node.py` (the parts), then `store.py` (the coordination
store), `view.py` (what a node knows), `controller.py` (decisions) and `replicas.py` (replication).
"""
