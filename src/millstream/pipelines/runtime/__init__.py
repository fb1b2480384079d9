"""The driver process that runs pipelines, and the broker's side of it.

Start reading at `driver.py` and `runner.py`; `child.py` is what the broker runs.
"""
