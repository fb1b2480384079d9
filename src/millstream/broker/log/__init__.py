"""The log: segments of record batches on disk, made durable by group commits and recovered after a crash.

What is acknowledged is durable as the topic's `flush` promises; damage is recorded and never served. May import
`protocol` and `core`. Start reading at `log.py` (one partition), then `append.py` (the way in), `reader.py` (the way
out) and `store.py` (commits, checkpoints, retention, compaction and scrubbing in the background).
"""
