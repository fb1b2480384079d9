"""Share groups (KIP-932): membership and assignments. Their messages are delivered by `broker/subscriptions`.

Start at `shard.py`.
"""
