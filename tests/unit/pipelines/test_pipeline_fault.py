"""Classifying the failures of pipelines."""

from __future__ import annotations

import json
import sqlite3
import traceback
from collections.abc import Iterable, Iterator
from errno import ENOSPC, EROFS
from typing import Any

import pytest

from millstream.core.errors import (
    BrokerUnreachable,
    ColumnMismatch,
    InvalidSetting,
    LostData,
    ProducerFenced,
    RequestTimedOut,
    StorageFailure,
)
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.runtime.fault import Fault, MarkedTask, fault_of, kind_in, marked_function


class AnalysisException(Exception):
    """Named as in Spark."""


class Py4JNetworkError(Exception):
    """Named as in py4j."""


def in_task(error: str) -> RuntimeError:
    """Spark's report of an error in one of its tasks."""
    return RuntimeError(
        "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: org.apache.spark.api.python."
        f'PythonException: Traceback (most recent call last):\n  File "task.py", line 3, in f\n    g()\n{error}\n'
        "\n\tat org.apache.spark.X.y(X.scala:1)\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError("Kernel error -> Generic S3 error"),
        OSError(ENOSPC, "No space left on device"),
        OSError(EROFS, "Read-only file system"),
        PermissionError("403 Forbidden"),
        ConnectionResetError(),
        TimeoutError(),
        BrokerUnreachable("nobody responds"),
        RequestTimedOut("too late"),
        StorageFailure("the disk is full"),
        Py4JNetworkError("Response from Java side is empty"),
        in_task("OSError: [Errno 28] No space left on device"),
        in_task("millstream.core.errors.BrokerUnreachable: nobody responds"),
        RuntimeError("Failed to commit: Generic S3 error: error sending request"),
        RuntimeError("Job aborted: ExecutorLostFailure (executor 1 exited)"),
        RuntimeError("java.io.IOException: No space left on device"),
    ],
)
def test_unavailable_services_are_transient(error: Exception) -> None:
    assert fault_of(error) is Fault.OUTSIDE


@pytest.mark.parametrize(
    "error",
    [
        InvalidSetting("unknown setting"),
        LostData([("orders", 0, 1, 5)]),
        ColumnMismatch("a column has another type"),
        AnalysisException("[UNRESOLVED_COLUMN] a column `Connection refused` cannot be resolved"),
        in_task("millstream.core.errors.InvalidSetting: no such column"),
    ],
)
def test_declaration_errors_are_permanent(error: Exception) -> None:
    assert fault_of(error) is Fault.DECLARED


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), NotADirectoryError("a file is there"), in_task("ValueError: wrong"), RuntimeError()]
)
def test_other_errors_are_unclassified(error: Exception) -> None:
    assert fault_of(error) is Fault.UNKNOWN


def raised_in_task(error: Exception) -> RuntimeError:
    """The classification of an error raised in one of Millstream's tasks, as reported by Spark."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches
        raise error

    try:
        list(MarkedTask(task)([]))
    except Exception as raised:
        return in_task("".join(traceback.format_exception_only(raised)).rstrip())
    raise AssertionError


class LibraryError(Exception):
    """An error of a library that only tasks have."""


@pytest.mark.parametrize(
    ("error", "fault", "kind"),
    [
        (BrokerUnreachable("ValueError: is no kind of this"), Fault.OUTSIDE, BrokerUnreachable),
        (ProducerFenced("Connection refused"), Fault.UNKNOWN, ProducerFenced),
        (InvalidSetting("OSError: [Errno 28]\nTimeoutError: said a message"), Fault.DECLARED, InvalidSetting),
        (OSError(ENOSPC, "No space left on device"), Fault.OUTSIDE, OSError),
        (ConnectionResetError(), Fault.OUTSIDE, ConnectionResetError),
        (LibraryError("Generic S3 error: error sending request"), Fault.OUTSIDE, Exception),
        (LibraryError("an unknown meaning"), Fault.UNKNOWN, Exception),
        (ValueError("[millstream fault: outside, OSError]\nsaid a payload"), Fault.UNKNOWN, ValueError),
    ],
)
def test_tasks_classify_their_errors_themselves(error: Exception, fault: Fault, kind: type[Exception]) -> None:
    reported = raised_in_task(error)
    assert (fault_of(reported), kind_in(reported)) == (fault, kind)
    assert "millstream fault" not in reason_of(raised_in_task(BrokerUnreachable("away")))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("no number"), Fault.DECLARED),
        (KeyError("total"), Fault.DECLARED),
        (LibraryError("an unknown meaning"), Fault.UNKNOWN),
        (sqlite3.OperationalError("database is locked"), Fault.UNKNOWN),
        (json.JSONDecodeError("Expecting value", "<h1>502 Bad Gateway</h1>", 0), Fault.UNKNOWN),
        (RuntimeError("502 Bad Gateway"), Fault.UNKNOWN),
        (ConnectionResetError(), Fault.OUTSIDE),
        (MemoryError(), Fault.UNKNOWN),
    ],
)
def test_only_program_errors_of_functions_are_the_declarations(error: Exception, fault: Fault) -> None:
    def double(number: int, *, fails: bool = False) -> int:
        if fails:
            raise error
        return number * 2

    called = marked_function(double)
    assert (called(2), called.__name__) == (4, "double")
    with pytest.raises(type(error)) as raised:
        called(2, fails=True)
    assert fault_of(in_task("".join(traceback.format_exception_only(raised.value)).rstrip())) is fault


def test_the_kind_of_an_error_is_its_own_or_that_of_a_task() -> None:
    assert kind_in(ProducerFenced("no")) is ProducerFenced
    assert kind_in(ValueError("no")) is None
    batch: Any = "a batch"
    assert list(MarkedTask(iter)([batch])) == [batch]
