"""The interface between the runtime and a state machine: records, operations and deferred responses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from millstream.core.errors import MillstreamError

S = TypeVar("S")
T = TypeVar("T")


class Deferred(Generic[T]):
    """The response of a parked request.

    A state machine creates one, returns it as the response of the operation, and resolves it in the same or in any
    later operation. The runtime listens, and releases the response when the log has everything that it depends on. Only
    the first response counts.
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
        """Call `listener` once the response is available, immediately if it already is."""
        self._listener = listener
        if self.answered:
            listener(self)

    @property
    def error(self) -> MillstreamError | None:
        """Return why the request was refused, if it was."""
        return self._error

    def result(self) -> T:
        """Return the response, or raise the error."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def _notify(self) -> None:
        self.answered = True
        if self._listener is not None:
            self._listener(self)


class StateRecord(NamedTuple):
    """One change of state in the log; a value of None deletes the key."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


Outcome = tuple[Sequence[StateRecord], T | Deferred[T]]
"""What an operation returns: the records that make it durable, and its response, immediate or deferred."""

Operation = Callable[[S], Outcome[T]]
"""A synchronous function of the state. It raises a `MillstreamError` only before it has changed anything."""


class Confirmation(NamedTuple):
    """Errors that a leader must be certain of: it sends them once the log has accepted one more record.

    A node that was replaced and does not know it still has its old state. Its appends are never acknowledged, so it
    cannot end the session of a live client.
    """

    refusals: tuple[type[MillstreamError], ...]
    record: StateRecord
    """A record that changes nothing."""


class LateRecords(Protocol):
    """Records of a key that take too long to build on the loop."""

    async def make(self) -> None:
        """Build the records outside the loop."""

    def records(self) -> Sequence[StateRecord]:
        """Return the records with later changes, to be appended at once; none if the key was deleted."""


class StateMachine(Protocol):
    """The state of one partition of an internal topic: a fold over the records of that partition.

    Durable state changes only in `replay`; an operation may change state that may be lost with the process, such as
    timers and waiting requests.
    """

    def replay(self, record: StateRecord) -> None:
        """Apply one record, in the order of the log, while loading and after each append."""

    def loaded(self) -> None:
        """Called once the whole log has been replayed, before the first operation; timers may be set here."""

    def unload(self) -> None:
        """Refuse every parked request: this copy of the state is discarded."""

    def durable_keys(self) -> list[Hashable]:
        """Return a key for every record that the log must hold, for a rewrite."""

    def durable_record(self, key: Hashable) -> StateRecord | LateRecords | None:
        """Return the current record of a key, or None if it was deleted."""
