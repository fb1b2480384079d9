"""Spark's Python workers, started by our daemon: what they do when Spark has stopped listening."""

from __future__ import annotations

import os
import socket
from typing import Any, NoReturn

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed")

from millstream.pipelines.source.session import _SETTINGS
from millstream.spark import daemon


class Ended(BaseException):
    """The process would have ended."""


NOWHERE: Any = None


def test_a_worker_ends_without_a_word_when_spark_has_hung_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def end(code: int) -> NoReturn:
        codes.append(code)
        raise Ended

    def work(_connection: socket.socket, _authenticated: bool) -> int:
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"too late")
        finally:
            os.close(write)
        return 0

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(daemon, "_work", work)
    with pytest.raises(Ended):
        daemon.worker(NOWHERE, True)
    assert codes == [1]
    assert capfd.readouterr() == ("", "")


def test_a_worker_reports_any_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_connection: socket.socket, _authenticated: bool) -> int:
        raise ValueError("a defect")

    monkeypatch.setattr(daemon, "_work", fail)
    with pytest.raises(ValueError, match="a defect"):
        daemon.worker(NOWHERE, True)
    monkeypatch.setattr(daemon, "_work", lambda _connection, _authenticated: 3)
    assert daemon.worker(NOWHERE, False) == 3


def test_sessions_start_their_workers_by_it() -> None:
    assert _SETTINGS["spark.python.daemon.module"] == daemon.__name__
