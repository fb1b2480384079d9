"""A worker that asks several queues at once: what is there now, or what comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from millstream.model.errors import MillstreamError
from millstream.subscriptions.delivery import Delivery, Received, Wanted
from millstream.subscriptions.lease import Settle, Verb


class Given(NamedTuple):
    """What one queue gives."""

    delivery: Delivery
    received: Received


class _Waiting:
    """One worker's wait. The first queue that has something ends it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.found: asyncio.Future[Given | None] = asyncio.get_running_loop().create_future()

    @property
    def is_done(self) -> bool:
        return self.found.done()

    def give(self, delivery: Delivery, received: Received) -> None:
        self.found.set_result(Given(delivery, received))

    def refuse(self, reason: MillstreamError) -> None:
        # Others may go on; whoever asks again is told.
        if not self.found.done():
            self.found.set_result(None)


async def receive(deliveries: Sequence[Delivery], wanted: Wanted, *, wait_s: float, first: int = 0) -> list[Given]:
    """Lease messages to a worker, beginning with one of the queues; wait for some when there are none.

    What comes back may be told to the worker: where the subscription promises it, the leases are durable.
    """
    given = _look_round(deliveries, wanted, first)
    if not given:
        # A filter may just be looking at what is there.
        for delivery in deliveries:
            await delivery.looked()
        given = _look_round(deliveries, wanted, first)
    if not given and wait_s > 0 and deliveries:
        given = await _wait(deliveries, _Waiting(wanted), wait_s)
    for delivery, _ in given:
        await delivery.handed_out()
    return given


def _look_round(deliveries: Sequence[Delivery], wanted: Wanted, first: int) -> list[Given]:
    given: list[Given] = []
    for delivery in chain(deliveries[first:], deliveries[:first]):
        received = delivery.try_receive(wanted)
        if received.leases:
            given.append(Given(delivery, received))
            records = wanted.max_records - sum(lease.last - lease.first + 1 for lease in received.leases)
            left_bytes = wanted.max_bytes - sum(map(len, received.batches))
            if records <= 0 or left_bytes <= 0:
                break
            wanted = wanted._replace(max_records=records, max_bytes=left_bytes)
    return given


async def _wait(deliveries: Sequence[Delivery], waiting: _Waiting, wait_s: float) -> list[Given]:
    found: Given | None = None
    try:
        for delivery in deliveries:
            delivery.park(waiting)
        async with asyncio.timeout(wait_s):
            await asyncio.wait([waiting.found])
    except TimeoutError:
        pass
    except asyncio.CancelledError:
        if waiting.found.done():
            _give_back(waiting)
        raise
    finally:
        for delivery in deliveries:
            delivery.forget(waiting)
    # Also after the time is over: it may have come in the very moment.
    found = waiting.found.result() if waiting.found.done() else None
    return [] if found is None else [found]


def _give_back(waiting: _Waiting) -> None:
    """The worker went in the moment in which it was served; nobody will ever settle these leases."""
    found = waiting.found.result()
    if found is not None and not found.delivery.is_closed:
        verbs = [Settle(lease.first, lease.last, Verb.RELEASE, 0) for lease in found.received.leases]
        found.delivery.settle_now(waiting.wanted.worker, verbs)
