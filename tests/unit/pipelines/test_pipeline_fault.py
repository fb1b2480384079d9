"""Where failures of pipelines come from."""

from __future__ import annotations

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
from millstream.pipelines.runtime.fault import Fault, Marked, fault_of, kind_in


class AnalysisException(Exception):
    """As Spark names it."""


class Py4JNetworkError(Exception):
    """As py4j names it."""


def in_task(error: str) -> RuntimeError:
    """What Spark says of an error in one of its tasks."""
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
def test_what_is_away_comes_back(error: Exception) -> None:
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
def test_what_is_declared_stays_as_it_is(error: Exception) -> None:
    assert fault_of(error) is Fault.DECLARED


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), NotADirectoryError("a file is there"), in_task("ValueError: wrong"), RuntimeError()]
)
def test_of_others_it_is_not_known(error: Exception) -> None:
    assert fault_of(error) is Fault.UNKNOWN


def raised_in_task(error: Exception) -> RuntimeError:
    """The outcome of an error that one of Millstream's tasks raises, as Spark reports it."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches
        raise error

    try:
        list(Marked(task)([]))
    except Exception as raised:
        return in_task("".join(traceback.format_exception_only(raised)).rstrip())
    raise AssertionError


class LibraryError(Exception):
    """Of a library that only tasks have."""


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
def test_tasks_say_themselves_where_their_errors_come_from(
    error: Exception, fault: Fault, kind: type[Exception]
) -> None:
    reported = raised_in_task(error)
    assert (fault_of(reported), kind_in(reported)) == (fault, kind)
    assert "millstream fault" not in reason_of(raised_in_task(BrokerUnreachable("away")))


def test_the_kind_of_an_error_is_its_own_or_that_of_a_task() -> None:
    assert kind_in(ProducerFenced("no")) is ProducerFenced
    assert kind_in(ValueError("no")) is None
    batch: Any = "a batch"
    assert list(Marked(iter)([batch])) == [batch]
