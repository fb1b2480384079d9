"""Workers of Spark whose socket Java has closed."""

from __future__ import annotations

import socket

import pytest

from millstream.pipelines.source import worker_daemon


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_a_worker_that_java_needs_no_more_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def flush_fails(_sock: socket.socket, _authenticated: bool) -> int:
        raise error

    mine, other = socket.socketpair()
    with mine, other:
        monkeypatch.setattr(worker_daemon, "_worker", flush_fails)
        assert worker_daemon.worker(mine, True) == 1
        monkeypatch.setattr(worker_daemon, "_worker", lambda _sock, _authenticated: 0)
        assert worker_daemon.worker(mine, True) == 0
