"""The jobs of pipelines, one folder per kind: `land/`, `transform/`, `route/`, `ledger/`.

`job.py` has their interface and the table of kinds; `batch_loop.py` commits batches from topics to topics.
"""
