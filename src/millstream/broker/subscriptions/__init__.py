"""Queues with leases: each message of a subscription goes to one worker at a time.

A queue is a pure state machine (`queue.py`) over a fold of deltas (`fold.py`); `delivery.py` runs it on the leader of a
partition, and `state_shard.py` stores it in `__subscriptions`. May import `replication`, `coordination`, `cluster` and
everything below the broker, but not `kafka`. Start at `delivery.py`.
"""
