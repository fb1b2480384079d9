"""Short errors: Spark shows the whole traceback of a data source, so it is cut to the message.

In Python workers of Spark, importing this module also hides the tracebacks of workers that Spark disconnected from.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

from millstream.core.errors import MillstreamError

P = ParamSpec("P")
R = TypeVar("R")


def without_traceback(method: Callable[P, R]) -> Callable[P, R]:
    """Drop the traceback of Millstream's own errors raised by a method."""

    @wraps(method)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return called


def iterate_without_traceback(method: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """Drop the traceback of Millstream's own errors raised by a generator method."""

    @wraps(method)
    def called(*arguments: P.args, **named: P.kwargs) -> Iterator[R]:
        try:
            yield from method(*arguments, **named)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return called


_DISCONNECTED: Final = (BrokenPipeError, ConnectionResetError)


class _Tracebacks:
    """The module `traceback`, except that it does not print that Spark has disconnected."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not isinstance(sys.exc_info()[1], _DISCONNECTED):
            traceback.print_exc()


def hide_disconnects(daemon: ModuleType) -> None:
    """Make workers of PySpark's daemon end silently when Spark has disconnected.

    Spark disconnects from a worker as soon as it has what it asked for, after a minute without work, and when it ends.
    The worker then fails to flush its output, and the daemon would print that.
    """
    daemon.traceback = _Tracebacks()  # type: ignore[attr-defined]


_main = sys.modules["__main__"]
# `spark.python.daemon.module` has no effect on the workers that plan and commit, nor in sessions that do not set it.
if getattr(_main.__spec__, "name", "") == "pyspark.daemon":
    hide_disconnects(_main)
