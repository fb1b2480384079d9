"""The interface between the runtime and a state machine: records, operations, deferred responses and timers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar, cast

from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.primitives import Writer

S = TypeVar("S")
T = TypeVar("T")


class Deferred(Generic[T]):
    """The response of a parked request.

    A state machine creates one, returns it as the response of the operation, and resolves it in the same or in any
    later operation. The runtime listens, and releases the response when the log has everything that it depends on. Only
    the first response counts.
    """

    __slots__ = ("_error", "_listener", "_value", "completed")

    def __init__(self) -> None:
        self.completed = False
        self._value: T | None = None
        self._error: MillstreamError | None = None
        self._listener: Callable[[Deferred[T]], None] | None = None

    @classmethod
    def refused(cls, error: MillstreamError) -> Self:
        later = cls()
        later.refuse(error)
        return later

    def resolve(self, value: T) -> None:
        if not self.completed:
            self._value = value
            self._notify()

    def refuse(self, error: MillstreamError) -> None:
        if not self.completed:
            self._error = error
            self._notify()

    def listen(self, listener: Callable[[Deferred[T]], None]) -> None:
        """Call `listener` once the response is available, immediately if it already is."""
        self._listener = listener
        if self.completed:
            listener(self)

    @property
    def error(self) -> MillstreamError | None:
        return self._error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def _notify(self) -> None:
        self.completed = True
        if self._listener is not None:
            self._listener(self)


class StateRecord(NamedTuple):
    """A change of state in the log; a value of None deletes the key."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def record_key(kind: int, *names: str) -> bytes:
    """Encode a key as in Kafka's internal topics: the kind of the record, and the names that identify it."""
    writer = Writer(flexible=False)
    writer.int16(kind)
    for name in names:
        writer.string(name)
    return bytes(writer.buffer)


Outcome = tuple[Sequence[StateRecord], T | Deferred[T]]
"""The result of an operation: the records that make it durable, and its response, immediate or deferred."""

Operation = Callable[[S], Outcome[T]]
"""A synchronous function of the state. It raises a `MillstreamError` only before it has changed anything."""


class Confirmation(NamedTuple):
    """Errors that only a current leader may send: they are released once the log has accepted one more record.

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


Action = Callable[[], Sequence[StateRecord]]
"""An operation without a response, which runs when a timer is due."""

_STALE_ENTRIES_MAX = 64


@dataclass(slots=True, eq=False)
class Timer:
    """A deadline. `pure` means that the action only returns records and does not change the state."""

    deadline: float
    action: Action
    pure: bool
    queued_for: float
    """The heap entry of the timer; it may be earlier than the deadline, which costs one extra check."""


class Timers:
    """Named deadlines. Postponing one, as every heartbeat does, is one dictionary look-up and no heap work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[Hashable, Timer] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._timers

    def schedule(self, key: Hashable, delay_ms: int, action: Action, *, pure: bool = False) -> None:
        deadline = self._clock.monotonic() + delay_ms / 1000
        timer = self._timers.get(key)
        if timer is None:
            timer = self._timers[key] = Timer(deadline, action, pure, queued_for=deadline)
            self._push(deadline, key)
            return
        timer.deadline = deadline
        timer.action = action
        timer.pure = pure
        if deadline < timer.queued_for:
            timer.queued_for = deadline
            self._push(deadline, key)

    def cancel(self, key: Hashable) -> None:
        self._timers.pop(key, None)

    def clear(self) -> None:
        self._timers.clear()
        self._heap.clear()

    @property
    def next_deadline(self) -> float | None:
        """Return the time of the next check, by the monotonic clock; possibly before anything is due."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, limit: int) -> list[Timer]:
        """Remove and return at most `limit` timers that are due, the earliest first."""
        now = self._clock.monotonic()
        due: list[Timer] = []
        while self._heap and self._heap[0][0] <= now and len(due) < limit:
            queued_for, _, key = heapq.heappop(self._heap)
            timer = self._timers.get(key)
            if timer is None or timer.queued_for != queued_for:
                continue
            if timer.deadline > now:
                timer.queued_for = timer.deadline
                self._push(timer.deadline, key)
                continue
            del self._timers[key]
            due.append(timer)
        return due

    def _push(self, deadline: float, key: Hashable) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (deadline, self._sequence, key))
        if len(self._heap) > 2 * len(self._timers) + _STALE_ENTRIES_MAX:
            self._drop_stale()

    def _drop_stale(self) -> None:
        live = {(timer.queued_for, key) for key, timer in self._timers.items()}
        self._heap = [entry for entry in self._heap if (entry[0], entry[2]) in live]
        heapq.heapify(self._heap)
