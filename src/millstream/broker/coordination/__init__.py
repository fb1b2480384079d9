"""The runtime of everything whose state is a fold over an internal topic: groups, transactions, queue states.

`shard.py` appends the records of an operation, replays them, and releases the response once they are acknowledged. May
import `replication` and everything below the broker; imports no state machine. Start at `state_machine.py`, then
`shard.py`.
"""
