"""A worker that asks several queues at once: what is there now, or what comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import Any, Final, NamedTuple

from millstream.broker.net.budget import Budget
from millstream.broker.subscriptions.delivery import Delivery, Received, Wanted
from millstream.broker.subscriptions.lease import Settle
from millstream.core.errors import MillstreamError
from millstream.core.subscription import AT_MOST_ONCE
from millstream.core.verb import Verb

NOWHERE_S: Final = 1.0
"""How long an answer is held back at most when no queue of the subscription is here."""
FILTER_S: Final = 5.0
"""How long a worker that does not wait for messages waits for a filter."""


class Given(NamedTuple):
    """What one queue gives."""

    delivery: Delivery
    received: Received
    granted_at: float
    """By the monotonic clock, when the leases began, or a moment before."""
    lease_ms: int | None
    """How long they last from then on, whatever the subscription declares since; None if nothing is leased."""

    @classmethod
    def now(cls, delivery: Delivery, received: Received, granted_at: float) -> Given:
        """With the length of leases that were granted just now."""
        settings = delivery.settings
        return cls(delivery, received, granted_at, None if settings.delivery == AT_MOST_ONCE else settings.lease_ms)


class _Room:
    """What an answer takes of the memory for all clients, until it is with the connection, which counts on."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._taken_bytes = 0

    def fit(self, wanted: Wanted) -> Wanted | None:
        """So much of what is wanted as there is room for now; None when there is none."""
        share_bytes = self.budget.share_bytes
        return wanted._replace(max_bytes=min(wanted.max_bytes, share_bytes)) if share_bytes else None

    def take(self, received: Received) -> int:
        """Count what is given."""
        size = sum(map(len, received.batches))
        self.budget.take(size)
        self._taken_bytes += size
        return size

    def give_back(self) -> None:
        """Everything is sent, or given up."""
        self.budget.give_back(self._taken_bytes)


class _Waiting:
    """One worker's wait. The first queue that has something ends it."""

    def __init__(self, wanted: Wanted, deliveries: Sequence[Delivery], room: _Room) -> None:
        self.wanted = wanted
        self.found: asyncio.Future[Given | None] = asyncio.get_running_loop().create_future()
        self._deliveries = deliveries
        self._room = room
        self._asked_at = monotonic()

    @property
    def is_done(self) -> bool:
        return self.found.done()

    def wanted_now(self) -> Wanted | None:
        self._asked_at = monotonic()
        fitting = self._room.fit(self.wanted)
        if fitting is None:
            self._room.budget.wait(self, self._room_again)
        return fitting

    def give(self, delivery: Delivery, received: Received) -> None:
        self._room.take(received)
        self.found.set_result(Given.now(delivery, received, self._asked_at))

    def refuse(self, reason: MillstreamError) -> None:
        # Others may go on; whoever asks again is told.
        if not self.found.done():
            self.found.set_result(None)

    def end(self) -> None:
        """Nobody is told any more."""
        self._room.budget.stop_waiting(self)
        for delivery in self._deliveries:
            delivery.forget(self)

    def _room_again(self) -> None:
        for delivery in self._deliveries:
            delivery.look_again()


async def receive(
    deliveries: Sequence[Delivery],
    wanted: Wanted,
    budget: Budget,
    *,
    wait_s: float,
    first: int = 0,
    until: asyncio.Future[None] | None = None,
    beside: asyncio.Future[Any] | None = None,
) -> list[Given]:
    """Lease messages to a worker, beginning with one of the queues; wait for some when there are none, or `until`.

    `beside` is something else that the answer waits for, after them. What comes back may be told to the worker: where
    the subscription promises it, the leases are durable. A queue that cannot give anything now does not keep others
    from it; an error is raised when no queue can. The messages count as memory of clients until the loop's next turn:
    whoever encodes and sends them does so before.
    """
    if not deliveries:
        # Nothing is led here yet. Whoever asks again and again is not answered again and again.
        if until is None:
            await asyncio.sleep(min(wait_s, NOWHERE_S))
        else:
            await asyncio.wait([until], timeout=wait_s)
        return []
    room = _Room(budget)
    try:
        given = _look_round(deliveries, wanted, first, room)
        if not given and wait_s > 0:
            given = await _wait(deliveries, _Waiting(wanted, deliveries, room), wait_s, until)
        elif not given:
            # A filter may just be looking at what is there.
            for delivery in deliveries:
                await delivery.looked(patience_s=FILTER_S)
            given = _look_round(deliveries, wanted, first, room)
        return await _certain(given, wanted.worker, beside)
    finally:
        asyncio.get_running_loop().call_soon(room.give_back)


def _look_round(deliveries: Sequence[Delivery], asked: Wanted, first: int, room: _Room) -> list[Given]:
    wanted = room.fit(asked)
    if wanted is None:
        return []
    given: list[Given] = []
    errors: list[MillstreamError] = []
    granted_at = monotonic()
    for delivery in chain(deliveries[first:], deliveries[:first]):
        try:
            received = delivery.try_receive(wanted)
        except MillstreamError as error:
            errors.append(error)
            continue
        if received.leases:
            given.append(Given.now(delivery, received, granted_at))
            records = wanted.max_records - sum(lease.last - lease.first + 1 for lease in received.leases)
            left_bytes = wanted.max_bytes - room.take(received)
            if records <= 0 or left_bytes <= 0:
                break
            wanted = wanted._replace(max_records=records, max_bytes=left_bytes, at_least_one=False)
    if len(errors) == len(deliveries):
        raise errors[0]
    return given


async def _wait(
    deliveries: Sequence[Delivery], waiting: _Waiting, wait_s: float, until: asyncio.Future[None] | None
) -> list[Given]:
    try:
        for delivery in deliveries:
            # Some may be closed; if all were, it has been told.
            with suppress(MillstreamError):
                delivery.park(waiting)
        # Without room nothing was looked at yet, and it is heard of when there is some.
        waiting.wanted_now()
        ends: list[asyncio.Future[Any]] = [waiting.found] if until is None else [waiting.found, until]
        await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if waiting.found.done() and (found := waiting.found.result()) is not None:
            give_back([found], waiting.wanted.worker)
        raise
    finally:
        waiting.end()
    # Also after the time is over: it may have come in the very moment.
    found = waiting.found.result() if waiting.found.done() else None
    return [] if found is None else [found]


async def _certain(given: list[Given], worker: str, beside: asyncio.Future[Any] | None) -> list[Given]:
    """Wait until what is given may be told; of several queues, some may lose their partition meanwhile."""
    certain: list[Given] = []
    errors: list[MillstreamError] = []
    try:
        if beside is not None:
            await asyncio.wait([beside])
        for one in given:
            try:
                await one.delivery.handed_out()
            except MillstreamError as error:
                errors.append(error)
            else:
                certain.append(one)
    except asyncio.CancelledError:
        give_back(given, worker)
        raise
    if errors and not certain:
        raise errors[0]
    return certain


def give_back(given: Sequence[Given], worker: str) -> None:
    """Return leases whose worker never learns of them; that does not count as a delivery."""
    for one in given:
        verbs = [Settle(lease.first, lease.last, Verb.RETURN, 0, "", lease.attempt) for lease in one.received.leases]
        with suppress(MillstreamError):
            one.delivery.settle_now(worker, verbs)
