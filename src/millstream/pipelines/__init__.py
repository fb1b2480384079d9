"""Everything on Spark: the data source, lake tables, the jobs and the driver process that runs them.

The lake table is the source of truth for what has landed; a batch's offsets are committed with its files. May import
`client`, `protocol` and `core`; `broker` only in the parent sides of its processes (`runtime/child.py`,
`runtime/jobs_child.py`) and in `jobs/ledger/`, which reads the stored state of queues. Start reading at
`runtime/driver.py`, then at `jobs/land/job.py`; the data source starts at `source/source.py`.
"""
