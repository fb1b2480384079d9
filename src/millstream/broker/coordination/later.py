"""A response that comes later: a request is parked in the state, and another operation answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from millstream.core.errors import MillstreamError

T = TypeVar("T")


class Deferred(Generic[T]):
    """The place where a parked request's answer goes.

    A state machine makes one, returns it as the response of the operation, and gives the answer in the same or in
    any later operation. The runtime listens, and lets the answer out when the log has everything it rests on.
    The first answer counts; a second one is ignored, so clearing up twice does no harm.
    """

    __slots__ = ("_error", "_listener", "_value", "answered")

    def __init__(self) -> None:
        self.answered = False
        self._value: T | None = None
        self._error: MillstreamError | None = None
        self._listener: Callable[[Deferred[T]], None] | None = None

    def resolve(self, value: T) -> None:
        """Answer with a value."""
        if not self.answered:
            self._value = value
            self._notify()

    def refuse(self, error: MillstreamError) -> None:
        """Answer with an error."""
        if not self.answered:
            self._error = error
            self._notify()

    def listen(self, listener: Callable[[Deferred[T]], None]) -> None:
        """Be told when the answer is there; at once if it is there already."""
        self._listener = listener
        if self.answered:
            listener(self)

    @property
    def error(self) -> MillstreamError | None:
        """Why the request was refused, if it was."""
        return self._error

    def result(self) -> T:
        """The answer, or raise the error that stands for it."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def _notify(self) -> None:
        self.answered = True
        if self._listener is not None:
            self._listener(self)
