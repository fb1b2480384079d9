"""The group coordinator: classic groups, consumer groups (KIP-848), share groups (KIP-932) and committed offsets.

Groups are folds over `__consumer_offsets`. Operations are plain functions of the state that return records and a
response; they do no I/O. May import `coordination` and everything below the broker. Start at `coordinator.py` for the
requests, and at `shard.py`, `consumer/shard.py` and `share/shard.py` for the state machines.
"""
