"""HTTP: health, metrics and the API in one child process, push to webhooks in another.

Both are clients of the broker over the Kafka protocol, so a slow or dead gateway never delays the log. May import
`pipelines`, `client`, `broker` (only for what `child.py` starts), `protocol` and `core`. Start reading at `app.py`,
`api/dispatch.py` and `api/table.py`; push starts at `push/process.py`.
"""
