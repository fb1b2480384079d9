"""PySpark's daemon of Python workers, without the tracebacks of workers that Java needs no more.

Java closes the socket of a worker as soon as it has read what it needs, for example when a plan is made or a LIMIT is
reached. The worker's last flush then fails, and PySpark's daemon prints a traceback of a BrokenPipeError that means
nothing. Imported before workers are forked, so it starts no thread and imports nothing else.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_DONE = 1
"""Tells the daemon to let the worker end: its socket is closed."""

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve Java until it closes the socket, which is no error."""
    try:
        return int(_worker(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return _DONE


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
