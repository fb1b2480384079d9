"""The jobs of pipelines, one folder per kind: `land/`, `transform/`, `route/`.

`job.py` is their interface and `kinds.py` the table of kinds; `batch_loop.py` commits batches from topics to topics.
"""
