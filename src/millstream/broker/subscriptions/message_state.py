"""Where one message of a subscription is, as its publisher is told.

Before its end: `waiting` for a worker (also while it is not looked at yet), `blocked` behind an earlier message of its
key, `delayed` until a time (it was published so, or it failed and will be tried again), `leased` to a worker until a
time, `rejected` and on its way to the dead letter topic.

At its end: `accepted`, `dead-lettered`, `dropped` (it failed for good, and there is no dead letter topic), `filtered`,
`skipped` (the subscription began after it, was set to go on elsewhere, or retention has taken it), `absent` (no message
stands there that the subscription could deliver), or `done` when it is not remembered how it ended.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from millstream.broker.subscriptions.columns import AVAILABLE, BLOCKED, DONE, LEASED, PARKED, REJECTING
from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.delta import Delta, DeltaKind

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
