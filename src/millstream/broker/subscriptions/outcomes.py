"""How much the queues of a node keep of how their messages have ended, all of them together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from millstream.broker.subscriptions.columns import AVAILABLE, BLOCKED, DONE, LEASED, PARKED, REJECTING
from millstream.broker.subscriptions.delta import Delta, DeltaKind
from millstream.broker.subscriptions.frame import read_frame
from millstream.core.errors import PolicyViolation

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery
    from millstream.broker.subscriptions.fold import Fold

NODE_BYTES_MAX: Final = 64 * 1024 * 1024
"""There may be very many queues, so each of them keeping a little would be too much."""


class OutcomeHolder(Protocol):
    """A queue's share."""

    def clear(self) -> int:
        """Keep nothing any more; how many bytes that were."""


class OutcomeBudget:
    """Counts what is kept; beyond the limit, queues that have written nothing for longest forget."""

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # The one that has written last comes last.
        self._holders: dict[OutcomeHolder, None] = {}
        self.bytes = 0

    def resize(self, holder: OutcomeHolder, size: int) -> None:
        """A queue keeps so much more than before, or less."""
        self._holders.pop(holder, None)
        self._holders[holder] = None
        self.bytes += size
        while self.bytes > self._bytes_max and self._holders:
            self.release(next(iter(self._holders)))

    def release(self, holder: OutcomeHolder) -> None:
        """A queue keeps nothing any more."""
        if holder in self._holders:
            del self._holders[holder]
            self.bytes -= holder.clear()


FRAMES_BYTES_MAX: Final = 32 * 1024

"""How much is remembered of one queue."""

WATCHERS_MAX: Final = 256

"""How many may wait to be told of messages of one queue."""


_FINAL_KINDS: Final = frozenset(
    {
        DeltaKind.ACCEPTED,
        DeltaKind.DEAD_LETTERED,
        DeltaKind.DROPPED,
        DeltaKind.FILTERED,
        DeltaKind.ABSENT,
        DeltaKind.SOUGHT,
        DeltaKind.RETENTION_CUT,
    }
)


class OutcomeHistory:
    """The last frames of one queue."""

    __slots__ = ("_budget", "_bytes", "_frames", "_watchers")

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._budget: OutcomeBudget | None = None
        # Who waits, and for which message.
        self._watchers: dict[asyncio.Future[Delta | None], int] = {}

    def share(self, budget: OutcomeBudget) -> None:
        """Let what is kept count together with that of other queues."""
        self._budget = budget
        budget.resize(self, self._bytes)

    def clear(self) -> int:
        """Keep no frame any more."""
        self._frames.clear()
        freed, self._bytes = self._bytes, 0
        return freed

    def add_frame(self, frame: bytes) -> None:
        """Keep a frame; the oldest ones go. Whoever waits for one of its messages is told how that has ended."""
        before = self._bytes
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > FRAMES_BYTES_MAX:
            self._bytes -= len(self._frames.popleft())
        if self._budget is not None:
            self._budget.resize(self, self._bytes - before)
        if self._watchers:
            deltas = read_frame(frame).deltas
            for watcher, offset in self._watchers.items():
                ended = _final_delta(offset, deltas)
                if ended is not None and not watcher.done():
                    watcher.set_result(ended)

    def check_finished(self, fold: Fold) -> None:
        """Something has happened: have those look again whose message has ended, although that is not written yet."""
        for watcher, offset in self._watchers.items():
            if offset < fold.window.end and fold.state_of(offset) == DONE and not watcher.done():
                watcher.set_result(None)

    def close(self) -> None:
        """The queue has gone: tell everybody who waits."""
        if self._budget is not None:
            self._budget.release(self)
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def wait_for(self, offset: int) -> asyncio.Future[Delta | None]:
        """Done when a message has ended, with how, if that is written already; or when the queue has gone."""
        self._watchers = {watcher: one for watcher, one in self._watchers.items() if not watcher.done()}
        if len(self._watchers) >= WATCHERS_MAX:
            raise PolicyViolation(f"{WATCHERS_MAX} wait to be told of messages of this queue already; ask without wait")
        watcher: asyncio.Future[Delta | None] = asyncio.get_running_loop().create_future()
        self._watchers[watcher] = offset
        return watcher

    def find(self, offset: int) -> Delta | None:
        """How a message has ended, if that is remembered."""
        for frame in reversed(self._frames):
            ended = _final_delta(offset, read_frame(frame).deltas)
            if ended is not None:
                return ended
        return None


def _final_delta(offset: int, deltas: Sequence[Delta]) -> Delta | None:
    """The last of some events that ends a message."""
    for delta in reversed(deltas):
        if delta.kind in _FINAL_KINDS and _concerns(delta, offset):
            return delta
    return None


def _concerns(delta: Delta, offset: int) -> bool:
    if delta.kind == DeltaKind.SOUGHT:
        # The queue went on elsewhere: nothing before says anything of what it does with the message now.
        return True
    if not delta.first <= offset <= delta.last:
        return False
    if delta.kind in (DeltaKind.FILTERED, DeltaKind.ABSENT) and delta.extra:
        place = offset - delta.first
        return bool(delta.extra[place // 8] >> place % 8 & 1)
    return True


_STATES: Final = {
    AVAILABLE: "waiting",
    BLOCKED: "blocked",
    LEASED: "leased",
    PARKED: "delayed",
    REJECTING: "rejected",
}
_FINAL_STATES: Final = {
    DeltaKind.ACCEPTED: "accepted",
    DeltaKind.DEAD_LETTERED: "dead-lettered",
    DeltaKind.DROPPED: "dropped",
    DeltaKind.FILTERED: "filtered",
    DeltaKind.ABSENT: "absent",
    DeltaKind.SOUGHT: "skipped",
    DeltaKind.RETENTION_CUT: "skipped",
}
_OTHER_FINAL_KINDS: Final = [kind for kind in _FINAL_STATES if kind != DeltaKind.ACCEPTED]


class MessageState(NamedTuple):
    """Where a message is: the state, the number of its last delivery, and the time that it waits for, or 0."""

    state: str
    attempt: int = 0
    next_ms: int = 0
    is_final: bool = False


async def message_state(delivery: Delivery, offset: int, *, start: int | None, wait_s: float) -> MessageState:
    """Where a message is; with a wait, answered when that is final, or the wait is over.

    What is told is durable. `start` is where the subscription began on the partition, if that is known.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        found = _current_state(delivery, offset, start)
        if found is None:
            # What was decided of it may not be written yet, and only what is written says how it ended.
            await delivery.durable(is_all=True)
            return _recalled_state(delivery, offset)
        left_s = deadline - asyncio.get_running_loop().time()
        if found.is_final or left_s <= 0:
            await delivery.durable()
            return found
        waiter = delivery.outcomes.wait_for(offset)
        try:
            await asyncio.wait([waiter], timeout=left_s)
            final = waiter.result() if waiter.done() else None
        finally:
            # Whoever gives up makes room for others.
            waiter.cancel()
        if final is not None or delivery.is_closed:
            # If it is closed, this raises why.
            await delivery.durable()
        if final is not None:
            return _final_state(final)


def _current_state(delivery: Delivery, offset: int, start: int | None) -> MessageState | None:
    """Where it is; None when it has ended."""
    fold = delivery.queue.fold
    if start is not None and offset < start and not fold.counters[DeltaKind.SOUGHT]:
        return MessageState("skipped", is_final=True)
    if offset >= fold.window.end:
        return MessageState("waiting")
    place = fold.place(offset)
    state = DONE if place is None else place[0].states[place[1]]
    if place is None or state == DONE:
        return None
    columns, index = place
    next_ms = columns.dues[index] if state in (LEASED, PARKED) else 0
    return MessageState(_STATES[state], columns.attempts[index], next_ms)


def _recalled_state(delivery: Delivery, offset: int) -> MessageState:
    final = delivery.outcomes.find(offset)
    if final is not None:
        return _final_state(final)
    counters = delivery.queue.fold.counters
    # Where nothing has ever ended in another way, this has not either.
    is_certain = not any(counters[kind] for kind in _OTHER_FINAL_KINDS)
    return MessageState("accepted" if is_certain else "done", is_final=True)


def _final_state(final: Delta) -> MessageState:
    return MessageState(_FINAL_STATES[final.kind], final.attempt, is_final=True)
