"""The life of a message in one queue, as far as its delivery state and the last frames of deltas know it.

The state knows everything about unfinished messages except earlier deliveries, and nothing about finished ones; the
frames that `OutcomeHistory` holds know the rest for a while. What neither knows is said in `unknown`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.broker.subscriptions.columns import BLOCKED, DONE, LEASED, PARKED, REJECTING, Columns
from millstream.broker.subscriptions.delta import Delta, DeltaKind
from millstream.broker.subscriptions.frame import FrameHeader
from millstream.broker.subscriptions.lease import POSITION
from millstream.broker.subscriptions.outcomes import FINAL_KINDS, concerns
from millstream.core.ids import Offset
from millstream.protocol.private.message_trace import DeadLetterPosition, SubscriptionTrace, TraceEvent

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery

_ENDS: Final = {
    DeltaKind.ACCEPTED: "accepted",
    DeltaKind.DEAD_LETTERED: "dead-lettered",
    DeltaKind.DROPPED: "dropped",
    DeltaKind.FILTERED: "filtered",
    DeltaKind.ABSENT: "absent",
    DeltaKind.SOUGHT: "skipped",
    DeltaKind.RETENTION_CUT: "expired",
}
_STATES: Final = {LEASED: "leased", PARKED: "delayed", BLOCKED: "blocked", REJECTING: "rejected"}
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

_FORGOTTEN: Final = "how it ended is no longer known"
_ADVICE: Final = "create the subscription with --ledger to keep the life of every message"


async def trace_message(delivery: Delivery, offset: int, *, subscription: str, start: int | None) -> SubscriptionTrace:
    """Return the life of a message, once all of it is durable; `start` is where the subscription began, if known."""
    # Only written frames are remembered.
    await delivery.durable(is_all=True)
    fold = delivery.queue.fold
    history = [
        (header, delta)
        for header, deltas, _names in delivery.outcomes.frames()
        for delta in deltas
        if delta.kind in _SHOWN and concerns(delta, offset)
    ]
    known: dict[str, Any] = {
        "subscription": subscription,
        "subscription_id": str(delivery.key.subscription_id),
        "ledger": delivery.settings.ledger,
        "events": tuple(_event(header, delta) for header, delta in history),
    }
    if start is not None and offset < start and not fold.counters[DeltaKind.SOUGHT]:
        reason = f"the subscription started after it, at offset {start}"
        return SubscriptionTrace(**known, state="skipped", is_final=True, reason=reason, is_complete=True)
    if offset >= fold.window.end:
        unknown = "" if not delivery.settings.filter else "the filter has not seen it yet"
        return SubscriptionTrace(**known, state="waiting", is_final=False, is_complete=True, unknown=unknown)
    place = fold.place(offset)
    if place is not None and place[0].states[place[1]] != DONE:
        return _unfinished(delivery, *place, known)
    return _ended(delivery, offset, [delta for _header, delta in history], known)


def _event(header: FrameHeader, delta: Delta) -> TraceEvent:
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


def _unfinished(delivery: Delivery, columns: Columns, index: int, known: dict[str, Any]) -> SubscriptionTrace:
    fold, events = delivery.queue.fold, known["events"]
    state, attempts = columns.states[index], columns.attempts[index]
    is_complete = attempts == sum(event.kind == "acquired" for event in events)
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
        state=_STATES.get(state, "waiting"),
        is_final=False,
        attempts=attempts,
        worker=worker,
        client_id=origin.client_id,
        address=origin.address,
        until_ms=columns.dues[index] if state in (LEASED, PARKED) else 0,
        first_delivery_ms=columns.first_delivered[index] if attempts else 0,
        reason=reason,
        is_complete=is_complete,
        unknown="" if is_complete else f"earlier deliveries are no longer known; {_ADVICE}",
    )


def _ended(delivery: Delivery, offset: int, history: list[Delta], known: dict[str, Any]) -> SubscriptionTrace:
    final = next((delta for delta in reversed(history) if delta.kind in FINAL_KINDS), None)
    if final is None:
        counters = delivery.queue.fold.counters
        # If no message ever ended in another way, this one was accepted.
        is_accepted = not any(counters[kind] for kind in _ENDS if kind != DeltaKind.ACCEPTED)
        unknown = "when and by whom is no longer known" if is_accepted else _FORGOTTEN
        advice = "the ledger's table has it once it has landed" if delivery.settings.ledger else _ADVICE
        state = "accepted" if is_accepted else "done"
        return SubscriptionTrace(**known, state=state, is_final=True, unknown=f"{unknown}; {advice}")
    deliveries = [delta for delta in history if delta.kind == DeltaKind.ACQUIRED]
    is_complete = final.attempt <= len(deliveries) or final.kind in (DeltaKind.FILTERED, DeltaKind.ABSENT)
    letter = None
    if final.kind == DeltaKind.DEAD_LETTERED and len(final.extra) > POSITION.size:
        partition, at = POSITION.unpack_from(final.extra)
        letter = DeadLetterPosition(final.extra[POSITION.size :].decode("utf-8", "replace"), partition, at)
    rejected = next((delta for delta in reversed(history) if delta.kind == DeltaKind.REJECTING), None)
    origin = delivery.origin_of(final.worker)
    return SubscriptionTrace(
        **known,
        state=_ENDS[final.kind],
        is_final=True,
        attempts=final.attempt,
        worker=final.worker or (rejected.worker if rejected is not None else ""),
        client_id=origin.client_id,
        address=origin.address,
        first_delivery_ms=deliveries[0].time_ms if deliveries and deliveries[0].attempt == 1 else 0,
        ended_ms=final.time_ms,
        reason=final.reason or _reason_of(final, offset, rejected),
        dead_letter=letter,
        is_complete=is_complete,
        unknown="" if is_complete else f"earlier deliveries are no longer known; {_ADVICE}",
    )


def _reason_of(final: Delta, offset: Offset | int, rejected: Delta | None) -> str:
    if rejected is not None:
        return rejected.reason
    if final.kind == DeltaKind.SOUGHT:
        return f"the subscription was moved to offset {final.first}" if offset < final.first else ""
    if final.kind == DeltaKind.RETENTION_CUT:
        return "retention deleted it before it was accepted"
    return ""
