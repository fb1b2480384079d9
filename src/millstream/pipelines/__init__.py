"""Everything on Spark: the data source, lake tables, the jobs and the driver process that runs them.

The lake table is the source of truth for what has landed; a batch's offsets are committed with its files. May import
`client`, `broker` (only for what `runtime/child.py` starts), `protocol` and `core`. Start reading at
`runtime/driver.py`, then at `jobs/land/job.py`; the data source starts at `source/source.py`.
"""
