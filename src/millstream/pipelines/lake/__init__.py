"""Lake tables, Delta or plain Parquet: commits that carry the next offset of every partition.

Start reading at `table.py`.
"""
