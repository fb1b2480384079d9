"""Push: delivers the messages of subscriptions to HTTP endpoints, from a child process of each node.

Start reading at `process.py`, then `pusher.py` (one subscription) and `endpoint.py` (how much an endpoint can take).
"""
