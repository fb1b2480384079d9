"""Starts the Python workers of a Spark session: PySpark's own daemon, without a traceback that means nothing.

Spark closes the connection to a worker as soon as it has what it asked for. A worker that is slower, and flushes its
last bytes after that, fails with a broken pipe, and the daemon would print it. `spark.python.daemon.module` names this
module.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

_work = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve one task; end the process if Spark no longer listens."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
