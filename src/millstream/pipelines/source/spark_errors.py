"""Short errors: Spark shows the whole traceback of a data source, so it is cut to the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

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
