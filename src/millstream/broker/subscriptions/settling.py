"""Settling several ranges of one queue together: all of them, or none when one of them is refused."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.queue import Queue
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import AT_MOST_ONCE
from millstream.core.verb import Verb


def settle_all(delivery: Delivery, worker: str, verbs: Sequence[Settlement], gaps: Sequence[Settlement] = ()) -> None:
    """Carry out what a worker says of its leases, or raise and change nothing; no range is named twice.

    Gaps are what the worker has found no message in: whether it holds these does not matter. `durable` of the delivery
    tells when it may be answered.
    """
    end = delivery.partition.high_watermark
    if any(verb.last >= end for verb in (*verbs, *gaps)):
        raise InvalidRequest(f"{delivery.partition.log.partition} ends at {end}; nothing beyond it was handed out")
    if len(verbs) > 1:
        # Leases whose time is over end first, so that what is found to be held is.
        delivery.settle_now(worker, ())
        for verb in verbs:
            if not holds(delivery.queue, worker, verb):
                raise verb.not_held_by(worker)
    results = delivery.settle_now(worker, [*verbs, *gaps])
    refused = next((error for error in results[: len(verbs)] if error is not None), None)
    if refused is not None:
        raise refused


def holds(queue: Queue, worker: str, settle: Settlement) -> bool:
    """Whether a worker may settle a range now."""
    if settle.verb == Verb.ACCEPT and queue.settings.delivery == AT_MOST_ONCE:
        return True
    number = queue.fold.workers.number(worker)
    if number is None:
        return False
    parts = queue.fold.parts(settle.first, settle.last)
    if sum(end - start for _, start, end in parts) != settle.last - settle.first + 1:
        return False
    return all(
        columns.is_leased_to(start, end, number)
        and (settle.attempt is None or set(columns.attempts[start:end]) == {settle.attempt})
        for columns, start, end in parts
    )
