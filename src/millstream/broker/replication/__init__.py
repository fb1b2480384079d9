"""The replicas of a partition: appends, the high watermark, the in-sync set, and what a follower does.

Consumers see only what every in-sync replica has. May import `log`, `protocol` and `core`, and uses neither the network
nor the coordination store. Start reading at `partition.py`, then `in_sync.py` (the rules) and `replica.py` (following).
"""
