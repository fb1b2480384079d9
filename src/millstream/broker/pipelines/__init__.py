"""The broker's side of pipelines: what is declared, which node runs it, and what drivers report.

May import the rest of `broker`, `protocol` and `core`; never `millstream.pipelines`, which runs in a driver process.
Start with `declared.py`; the private requests are in `broker/kafka/apis/pipeline_*.py`.
"""
