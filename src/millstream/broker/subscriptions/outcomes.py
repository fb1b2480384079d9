"""How messages of a queue ended, for their publishers and for traces.

Before the end a message is `waiting` for a worker (also if it is not scanned yet), `blocked` behind an earlier message
of its key, `delayed` until a time (as published, or for a retry), `leased` to a worker until a time, or `rejected` and
on its way to the dead letter topic.

At the end it is `accepted`, `dead-lettered`, `dropped` (out of attempts, without a dead letter topic), `filtered`,
`skipped` (the subscription started after it, was moved, or retention deleted it), `absent` (the offset holds no message
that the subscription could deliver), or `done` if the outcome is no longer known.

Outcomes are found in the last frames of each queue, within a memory limit for all queues of the node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from millstream.broker.subscriptions.columns import AVAILABLE, BLOCKED, DONE, LEASED, PARKED, REJECTING, Columns
from millstream.broker.subscriptions.frame import Frame, FrameHeader, read_frame
from millstream.broker.subscriptions.lease import POSITION, Delta, DeltaKind
from millstream.core.errors import MillstreamError, PolicyViolation
from millstream.core.ids import Offset
from millstream.protocol.private.subscriptions import DeadLetterPosition, MessageDelivery, SubscriptionTrace, TraceEvent

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery
    from millstream.broker.subscriptions.fold import Fold


NODE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The limit for all queues together, of which there may be very many."""


class OutcomeHolder(Protocol):
    """A queue's outcomes."""

    def clear(self) -> int:
        """Discard everything; return how many bytes that freed."""


class OutcomeBudget:
    """Limits the memory of outcomes; beyond it, the least recently written queues lose theirs."""

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # The most recently written comes last.
        self._holders: dict[OutcomeHolder, None] = {}
        self.bytes = 0

    def resize(self, holder: OutcomeHolder, size: int) -> None:
        """Record that a queue's outcomes grew or shrank."""
        self._holders.pop(holder, None)
        self._holders[holder] = None
        self.bytes += size
        while self.bytes > self._bytes_max and self._holders:
            self.release(next(iter(self._holders)))

    def release(self, holder: OutcomeHolder) -> None:
        """Discard a queue's outcomes."""
        if holder in self._holders:
            del self._holders[holder]
            self.bytes -= holder.clear()


FRAMES_BYTES_MAX: Final = 32 * 1024

LEDGER_FRAMES_BYTES_MAX: Final = 1024 * 1024

WATCHERS_MAX: Final = 256

FINAL_KINDS: Final = frozenset(
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
_PASSING_KINDS: Final = (DeltaKind.SOUGHT, DeltaKind.RETENTION_CUT)


class OutcomeHistory:
    """The last frames of one queue, and the callers that wait for a message to end."""

    __slots__ = ("_budget", "_bytes", "_frames", "_watchers", "bytes_max")

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self.bytes_max = FRAMES_BYTES_MAX
        self._budget: OutcomeBudget | None = None
        # By future, the message that a caller waits for.
        self._watchers: dict[asyncio.Future[Delta | None], int] = {}

    def share(self, budget: OutcomeBudget) -> None:
        """Count the frames towards a budget shared with other queues."""
        self._budget = budget
        budget.resize(self, self._bytes)

    def clear(self) -> int:
        self._frames.clear()
        freed, self._bytes = self._bytes, 0
        return freed

    def add_frame(self, frame: bytes) -> None:
        """Add a frame, dropping the oldest ones, and notify callers whose message it ends."""
        before = self._bytes
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > self.bytes_max:
            self._bytes -= len(self._frames.popleft())
        if self._budget is not None:
            self._budget.resize(self, self._bytes - before)
        if self._watchers:
            deltas = read_frame(frame).deltas
            for watcher, offset in self._watchers.items():
                ended = _find_final(offset, reversed(deltas))
                if ended is not None and not watcher.done():
                    watcher.set_result(ended)

    def check_finished(self, fold: Fold) -> None:
        """Wake callers whose message is done although the frame is not written yet."""
        for watcher, offset in self._watchers.items():
            if offset < fold.window.end and fold.state_of(offset) == DONE and not watcher.done():
                watcher.set_result(None)

    def close(self) -> None:
        """Wake all callers: the queue was closed."""
        if self._budget is not None:
            self._budget.release(self)
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def wait_for(self, offset: int) -> asyncio.Future[Delta | None]:
        """Return a future for the delta that ends a message; None if it is not written yet or the queue is closed."""
        self._watchers = {watcher: outcome for watcher, outcome in self._watchers.items() if not watcher.done()}
        if len(self._watchers) >= WATCHERS_MAX:
            raise PolicyViolation(f"{WATCHERS_MAX} callers already wait for messages of this queue; ask without a wait")
        watcher: asyncio.Future[Delta | None] = asyncio.get_running_loop().create_future()
        self._watchers[watcher] = offset
        return watcher

    def frames(self) -> Iterator[Frame]:
        """Yield the remembered frames, the oldest first."""
        return map(read_frame, list(self._frames))

    def find(self, offset: int) -> Delta | None:
        """Find the delta that ended a message, if it is still known."""
        frames = map(read_frame, reversed(self._frames))
        return _find_final(offset, (delta for frame in frames for delta in reversed(frame.deltas)))


def _find_final(offset: int, newest_first: Iterable[Delta]) -> Delta | None:
    """Find the delta that ended a message: a move past it, or a deletion, ends it only if nothing else had before."""
    passed: Delta | None = None
    for delta in newest_first:
        if not concerns(delta, offset):
            continue
        if delta.kind == DeltaKind.REVIVED or (delta.kind == DeltaKind.SOUGHT and delta.first <= offset):
            # What was before no longer applies.
            break
        if delta.kind in _PASSING_KINDS:
            passed = delta
        elif delta.kind in FINAL_KINDS:
            return delta
    return passed


def concerns(delta: Delta, offset: int) -> bool:
    """Whether a delta is about a message; the queue's own moves are about all of them."""
    if delta.kind == DeltaKind.SOUGHT:
        # The queue was moved: earlier deltas no longer apply to the message.
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


async def message_state(delivery: Delivery, offset: int, *, start: int | None, wait_s: float) -> MessageDelivery:
    """Return the state of a message; with a wait, once it is final or the wait is over.

    The result is durable. `start` is where the subscription started on the partition, if known.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        state = _current_state(delivery, offset, start)
        if state is None:
            # The outcome may not be written yet, and only the written frame has it.
            await delivery.durable(is_all=True)
            return _recalled_state(delivery, offset)
        left_s = deadline - asyncio.get_running_loop().time()
        if state.is_final or left_s <= 0:
            await delivery.durable()
            return state
        waiter = delivery.outcomes.wait_for(offset)
        try:
            await asyncio.wait([waiter], timeout=left_s)
            final = waiter.result() if waiter.done() else None
        finally:
            # Make room for other callers.
            waiter.cancel()
        if final is not None or delivery.is_closed:
            # If the queue is closed, this raises the reason.
            await delivery.durable()
        if final is not None:
            return _final_state(final)


def _current_state(delivery: Delivery, offset: int, start: int | None) -> MessageDelivery | None:
    """Return the current state; None if the message has ended."""
    fold = delivery.queue.fold
    if start is not None and offset < start and not fold.counters[DeltaKind.SOUGHT]:
        return MessageDelivery("skipped", is_final=True)
    if offset >= fold.window.end:
        return MessageDelivery("waiting")
    place = fold.place(offset)
    state = DONE if place is None else place[0].states[place[1]]
    if place is None or state == DONE:
        return None
    columns, index = place
    next_ms = columns.dues[index] if state in (LEASED, PARKED) else 0
    return MessageDelivery(_STATES[state], columns.attempts[index], next_ms)


def _recalled_state(delivery: Delivery, offset: int) -> MessageDelivery:
    final = delivery.outcomes.find(offset)
    if final is not None:
        return _final_state(final)
    counters = delivery.queue.fold.counters
    # If no message ever ended in another way, this one was accepted.
    is_certain = not any(counters[kind] for kind in _OTHER_FINAL_KINDS)
    return MessageDelivery("accepted" if is_certain else "done", is_final=True)


def _final_state(final: Delta) -> MessageDelivery:
    return MessageDelivery(_FINAL_STATES[final.kind], final.attempt, is_final=True)


# The history of a message in one queue, from its delivery state and the last frames of deltas.
#
# The state knows everything about unfinished messages except earlier deliveries, and nothing about finished ones; the
# frames that `OutcomeHistory` holds know the rest for a while, and with a ledger those in `__subscriptions` do until
# they have landed. `unknown` says what is missing.

_ENDS: Final = {
    DeltaKind.ACCEPTED: "accepted",
    DeltaKind.DEAD_LETTERED: "dead-lettered",
    DeltaKind.DROPPED: "dropped",
    DeltaKind.FILTERED: "filtered",
    DeltaKind.ABSENT: "absent",
    DeltaKind.SOUGHT: "skipped",
    DeltaKind.RETENTION_CUT: "expired",
}
_TRACED_STATES: Final = {LEASED: "leased", PARKED: "delayed", BLOCKED: "blocked", REJECTING: "rejected"}
_SHOWN: Final = frozenset(
    {
        DeltaKind.ACQUIRED,
        DeltaKind.RELEASED,
        DeltaKind.EXPIRED,
        DeltaKind.EXTENDED,
        DeltaKind.REJECTING,
        DeltaKind.REVIVED,
        DeltaKind.PARKED,
        *_ENDS,
    }
)
_WITH_LEASE: Final = (DeltaKind.ACQUIRED, DeltaKind.EXTENDED, DeltaKind.RELEASED, DeltaKind.EXPIRED, DeltaKind.PARKED)

_FORGOTTEN: Final = "the outcome is no longer known"
_ADVICE: Final = "create the subscription with --ledger to keep the life of every message"


async def trace_message(delivery: Delivery, offset: int, *, subscription: str, start: int | None) -> SubscriptionTrace:
    """Return the life of a message, once all of it is durable; `start` is where the subscription began, if known."""
    # Only written frames are remembered.
    await delivery.durable(is_all=True)
    trace = _trace_in_queue(delivery, offset, list(delivery.outcomes.frames()), subscription=subscription, start=start)
    if trace.is_complete or not trace.ledger:
        return trace
    try:
        stored = list(map(read_frame, await delivery.stored_frames(offset)))
    except MillstreamError as error:
        return replace(trace, unknown=f"its stored events were not searched: {error}; {_advice(delivery)}")
    # Meanwhile more may have happened.
    await delivery.durable(is_all=True)
    last = max((frame.header.sequence for frame in stored), default=-1)
    newer = [frame for frame in delivery.outcomes.frames() if frame.header.sequence > last]
    return _trace_in_queue(delivery, offset, [*stored, *newer], subscription=subscription, start=start)


def _trace_in_queue(
    delivery: Delivery, offset: int, frames: Sequence[Frame], *, subscription: str, start: int | None
) -> SubscriptionTrace:
    fold = delivery.queue.fold
    about = [(frame.header, delta) for frame in frames for delta in frame.deltas if concerns(delta, offset)]
    history = [(header, delta) for header, delta in about if delta.kind in _SHOWN]
    known: dict[str, Any] = {
        "subscription": subscription,
        "subscription_id": str(delivery.key.subscription_id),
        "ledger": delivery.settings.ledger,
        "events": tuple(_trace_event(header, delta) for header, delta in history),
    }
    if start is not None and offset < start and not fold.counters[DeltaKind.SOUGHT]:
        reason = f"the subscription started after it, at offset {start}"
        return SubscriptionTrace(**known, state="skipped", is_final=True, reason=reason, is_complete=True)
    if offset >= fold.window.end:
        unknown = "" if not delivery.settings.filter else "the filter has not evaluated it yet"
        return SubscriptionTrace(**known, state="waiting", is_final=False, is_complete=True, unknown=unknown)
    # A ledger has every event since the message was scanned.
    begins = not delivery.settings.ledger or any(delta.kind == DeltaKind.SCANNED for _header, delta in about)
    place = fold.place(offset)
    if place is not None and place[0].states[place[1]] != DONE:
        return _trace_unfinished(delivery, *place, known, begins=begins)
    return _trace_finished(delivery, offset, [delta for _header, delta in history], known, begins=begins)


def _trace_event(header: FrameHeader, delta: Delta) -> TraceEvent:
    return TraceEvent(
        kind=delta.kind.name.lower(),
        time_ms=delta.time_ms,
        attempt=delta.attempt,
        worker=delta.worker,
        until_ms=delta.due_ms if delta.kind in _WITH_LEASE and delta.due_ms > delta.time_ms else 0,
        reason=delta.reason,
        leader_epoch=header.leader_epoch,
        sequence=header.sequence,
    )


def _trace_unfinished(
    delivery: Delivery, columns: Columns, index: int, known: dict[str, Any], *, begins: bool
) -> SubscriptionTrace:
    fold, events = delivery.queue.fold, known["events"]
    state, attempts = columns.states[index], columns.attempts[index]
    # A redriven message starts to count again.
    is_complete = begins and attempts <= sum(event.kind == "acquired" for event in events)
    worker = reason = ""
    if state == LEASED:
        worker = fold.workers.texts[columns.holders[index]]
    elif state == REJECTING:
        reason = fold.reasons.texts[columns.holders[index]]
    elif events:
        reason = events[-1].reason
    origin = delivery.origin_of(worker)
    return SubscriptionTrace(
        **known,
        state=_TRACED_STATES.get(state, "waiting"),
        is_final=False,
        attempts=attempts,
        worker=worker,
        client_id=origin.client_id,
        address=origin.address,
        until_ms=columns.dues[index] if state in (LEASED, PARKED) else 0,
        first_delivery_ms=columns.first_delivered[index] if attempts else 0,
        reason=reason,
        is_complete=is_complete,
        unknown="" if is_complete else f"earlier deliveries are no longer known; {_advice(delivery)}",
    )


def _advice(delivery: Delivery) -> str:
    return "the ledger's table has it once it has landed" if delivery.settings.ledger else _ADVICE


def _trace_finished(
    delivery: Delivery, offset: int, history: list[Delta], known: dict[str, Any], *, begins: bool
) -> SubscriptionTrace:
    final = _find_final(offset, reversed(history))
    if final is None:
        counters = delivery.queue.fold.counters
        # If no message ever ended in another way, this one was accepted.
        is_accepted = not any(counters[kind] for kind in _ENDS if kind != DeltaKind.ACCEPTED)
        unknown = "the time and the worker are no longer known" if is_accepted else _FORGOTTEN
        state = "accepted" if is_accepted else "done"
        return SubscriptionTrace(**known, state=state, is_final=True, unknown=f"{unknown}; {_advice(delivery)}")
    deliveries = [delta for delta in history if delta.kind == DeltaKind.ACQUIRED]
    is_complete = final.kind in (DeltaKind.FILTERED, DeltaKind.ABSENT) or (begins and final.attempt <= len(deliveries))
    letter = None
    if final.kind == DeltaKind.DEAD_LETTERED and len(final.extra) > POSITION.size:
        partition, at = POSITION.unpack_from(final.extra)
        letter = DeadLetterPosition(final.extra[POSITION.size :].decode("utf-8", "replace"), partition, at)
    rejected = None
    if final.kind in (DeltaKind.DEAD_LETTERED, DeltaKind.DROPPED):
        rejected = next((delta for delta in reversed(history) if delta.kind == DeltaKind.REJECTING), None)
    worker = final.worker or (rejected.worker if rejected is not None else "")
    origin = delivery.origin_of(worker)
    return SubscriptionTrace(
        **known,
        state=_ENDS[final.kind],
        is_final=True,
        attempts=final.attempt,
        worker=worker,
        client_id=origin.client_id,
        address=origin.address,
        first_delivery_ms=deliveries[0].time_ms if deliveries and deliveries[0].attempt == 1 else 0,
        ended_ms=final.time_ms,
        reason=final.reason or _reason_of(final, offset, rejected),
        dead_letter=letter,
        is_complete=is_complete,
        unknown="" if is_complete else f"earlier deliveries are no longer known; {_advice(delivery)}",
    )


def _reason_of(final: Delta, offset: Offset | int, rejected: Delta | None) -> str:
    if rejected is not None:
        return rejected.reason
    if final.kind == DeltaKind.SOUGHT:
        return f"the subscription was moved to offset {final.first}" if offset < final.first else ""
    if final.kind == DeltaKind.RETENTION_CUT:
        return "retention deleted it before it was accepted"
    return ""
