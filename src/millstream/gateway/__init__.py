"""HTTP: health, metrics and the API in one child process, push to webhooks in another.

Both are clients of the broker over the Kafka protocol, so a slow or dead gateway never delays the log. May import
`pipelines`, `client`, `protocol` and `core`; `broker` only in `push/child.py`, the parent side of push, and for its
filter process and TLS files. Start reading at `app.py` and `api/dispatch.py`; push starts at `push/process.py`.
"""
