"""Errors that people read: Spark shows the whole traceback of a source, so it is cut to the sentence that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from millstream.core.errors import MillstreamError

P = ParamSpec("P")
R = TypeVar("R")


def without_traceback(method: Callable[P, R]) -> Callable[P, R]:
    """Have what a method raises of Millstream's own errors say where it was called, and nothing of what lies below."""

    @wraps(method)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return called


def iterate_without_traceback(method: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """The same for a method that yields."""

    @wraps(method)
    def called(*arguments: P.args, **named: P.kwargs) -> Iterator[R]:
        try:
            yield from method(*arguments, **named)
        except MillstreamError as error:
            raise error.with_traceback(None) from None

    return called
