"""Consumer groups (KIP-848), whose partitions the coordinator assigns.

A heartbeat produces records; the group changes when they are replayed. Start at `shard.py`, then `reconciliation.py`
for what one heartbeat does and `assignor.py` for how partitions are assigned.
"""
