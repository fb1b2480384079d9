"""`format("millstream")`: topics as Spark DataFrames, read and written.

Start reading at `source.py`; `rows.py` fetches, `writer.py` and `batch_commit.py` write exactly once.
"""
