"""Receive messages from several queues at once: those that are available now, or the first to become available."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, Final, NamedTuple, cast

from millstream.broker.net.budget import Budget
from millstream.broker.net.presence import Presence
from millstream.broker.net.response import Buffers, Parked
from millstream.broker.subscriptions.delivery import Delivery, Demand, ReceivedMessages
from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.state_store import PendingWrite
from millstream.core.errors import MillstreamError
from millstream.core.subscription import AT_MOST_ONCE, Verb

_logger = logging.getLogger(__name__)

NO_QUEUE_WAIT_S: Final = 1.0
"""How long a response is delayed at most if this node has no queue of the subscription."""
FILTER_WAIT_S: Final = 5.0
"""How long a request without a wait still waits for a filter."""
_turns: Final = count(1)


class Grant(NamedTuple):
    """The messages that one queue has leased to a worker."""

    delivery: Delivery
    received: ReceivedMessages
    granted_at: float
    """When the leases started, or a moment before, by the monotonic clock."""
    lease_ms: int | None
    """How long they last from then on, as granted; None if nothing is leased."""

    @classmethod
    def now(cls, delivery: Delivery, received: ReceivedMessages, granted_at: float) -> Grant:
        """Build a grant with the current lease length."""
        settings = delivery.settings
        return cls(delivery, received, granted_at, None if settings.delivery == AT_MOST_ONCE else settings.lease_ms)


class _BudgetShare:
    """The memory that a response takes from the budget of all clients until the connection accounts for it."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._taken_bytes = 0

    def fit(self, demand: Demand) -> Demand | None:
        """Limit a demand to the available memory; None if there is none."""
        share_bytes = self.budget.share_bytes
        if not share_bytes:
            return None
        return demand if demand.max_bytes <= share_bytes else demand._replace(max_bytes=share_bytes)

    def take(self, received: ReceivedMessages) -> int:
        """Account for received messages; return their size."""
        size = sum(map(len, received.batches))
        self.budget.reserve(size)
        self._taken_bytes += size
        return size

    def release_soon(self) -> None:
        """Release the memory in the loop's next turn: the response is sent or abandoned by then."""
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        if taken_bytes:
            asyncio.get_running_loop().call_soon(self.budget.release, taken_bytes)


class Wait:
    """The wait of one worker, which ends with the first queue that has messages, or without any.

    It ends with `cancel`, or with a single call of `finish`.
    """

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        demand: Demand,
        share: _BudgetShare,
        finish: Callable[[Grant | None], object],
    ) -> None:
        self.demand = demand
        self.is_done = False
        self._deliveries = deliveries
        self._share = share
        self._finish = finish
        self._requested_at = monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._interrupt: asyncio.Future[None] | None = None

    def begin(self, wait_s: float, interrupt: asyncio.Future[None] | None) -> None:
        """Wait on all queues for this long, or until `interrupt`."""
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.give_up)
        if interrupt is not None:
            self._interrupt = interrupt
            interrupt.add_done_callback(self.give_up)
        for delivery in self._deliveries:
            # Some may be closed; if all were, an error was raised before.
            with suppress(MillstreamError):
                delivery.park(self)
        # Without memory nothing was read yet; ask to be notified when there is some.
        self.current_demand()

    def current_demand(self) -> Demand | None:
        self._requested_at = monotonic()
        fitting = self._share.fit(self.demand)
        if fitting is None:
            self._share.budget.wait(self, self._budget_freed)
        return fitting

    def deliver(self, delivery: Delivery, received: ReceivedMessages) -> None:
        self._share.take(received)
        self._complete(Grant.now(delivery, received, self._requested_at))

    def reject(self, reason: MillstreamError) -> None:
        # Other queues may still deliver; the next request gets the error.
        self.give_up()

    def give_up(self, _reason: object = None) -> None:
        """End the wait without messages."""
        if not self.is_done:
            self._complete(None)

    def cancel(self) -> None:
        self.is_done = True
        if self._timer is not None:
            self._timer.cancel()
        if self._interrupt is not None:
            self._interrupt.remove_done_callback(self.give_up)
        self._share.budget.stop_waiting(self)
        for delivery in self._deliveries:
            delivery.forget(self)

    def _complete(self, grant: Grant | None) -> None:
        self.cancel()
        self._finish(grant)

    def _budget_freed(self) -> None:
        for delivery in self._deliveries:
            delivery.wake_waiting()


class ParkedLease(Parked):
    """A request that leases messages, or waits for some and until writes are durable, without a task.

    It owns what was leased until the connection has the response: the memory, the return of leases that do not reach
    their worker, and every error on the way, which becomes the response. For leases that need not be durable.
    """

    __slots__ = (
        "_deliveries",
        "_error",
        "_grants",
        "_presence",
        "_refuse",
        "_respond",
        "_response_task",
        "_share",
        "_unstored",
        "_wait",
        "_worker",
    )

    def __init__(
        self,
        budget: Budget,
        worker: str,
        presence: Presence,
        respond: Callable[[list[Grant], Exception | None], Buffers | Coroutine[Any, Any, Buffers]],
        refuse: Callable[[BaseException], Buffers],
    ) -> None:
        """`respond` encodes the leases or the error, or continues in a task if nothing is leased."""
        super().__init__()
        self._share = _BudgetShare(budget)
        self._worker = worker
        self._presence = presence
        self._respond = respond
        self._refuse = refuse
        self._grants: list[Grant] | None = None
        self._error: Exception | None = None
        self._deliveries: Sequence[Delivery] = ()
        self._unstored = 0
        self._wait: Wait | None = None
        self._response_task: asyncio.Task[Buffers] | None = None

    def begin(
        self,
        deliveries: Sequence[Delivery],
        demand: Demand,
        *,
        wait_s: float,
        interrupt: asyncio.Future[None] | None = None,
        writes: Sequence[PendingWrite] = (),
    ) -> Buffers | ParkedLease:
        """Lease what is available, or wait for something; return the response if nothing is left to wait for."""
        self._unstored = len(writes)
        self._deliveries = deliveries = _rotate(deliveries)
        try:
            self._grants = _receive_from_any(deliveries, demand, self._share) or None
            if self._grants is None:
                self._wait = Wait(deliveries, demand, self._share, self._on_granted)
                self._wait.begin(wait_s, interrupt)
        except Exception as error:
            self._log_unexpected(error)
            if self._wait is not None:
                self._wait.cancel()
            if self._grants is None and self._response_task is None and not self.is_resolved:
                self._grants, self._error = [], error
        for write in writes:
            write.listen(self._on_stored)
        if self._grants is not None:
            self._respond_or_hasten()
        return cast("Buffers", self.buffers) if self.is_resolved else self

    def abandon(self) -> None:
        """Stop waiting: the client has left."""
        if self.is_resolved or (self._response_task is not None and self._response_task.done()):
            return
        grants, self._grants = self._grants, None
        try:
            if self._wait is not None:
                self._wait.cancel()
            if self._response_task is not None:
                self._response_task.cancel()
            return_leases(grants or (), self._worker)
        finally:
            self._finish(None)

    def _on_granted(self, grant: Grant | None) -> None:
        self._wait = None
        self._grants = [] if grant is None else [grant]
        self._respond_or_hasten()

    def _on_stored(self, _error: MillstreamError | None) -> None:
        self._unstored -= 1
        self._respond_if_done()

    def _respond_or_hasten(self) -> None:
        """Respond to a request that no longer waits for messages, or begin the writes that it waits for."""
        if self._unstored:
            for delivery in self._deliveries:
                delivery.hasten_write()
        self._respond_if_done()

    def _respond_if_done(self) -> None:
        if self._grants is None or self._unstored:
            return
        grants, self._grants = self._grants, None
        try:
            response = self._respond(grants, self._error)
        except Exception as error:
            return_leases(grants, self._worker)
            self._fail(error)
            return
        if isinstance(response, list):
            if grants:
                self._presence.on_undelivered(partial(return_leases, grants, self._worker))
            self._finish(response)
        else:
            self._response_task = asyncio.get_running_loop().create_task(response)
            self._response_task.add_done_callback(self._response_ready)

    def _response_ready(self, later: asyncio.Task[Buffers]) -> None:
        if later.cancelled():
            return
        error = later.exception()
        if error is None:
            self._finish(later.result())
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if error is not self._error:
            self._log_unexpected(error)
        refusal = None
        try:
            refusal = self._refuse(error)
        except Exception:
            _logger.exception("cannot respond to a failed request", extra={"worker": self._worker})
        self._finish(refusal)

    def _log_unexpected(self, error: BaseException) -> None:
        if not isinstance(error, MillstreamError):
            _logger.error("request failed unexpectedly", exc_info=error, extra={"worker": self._worker})

    def _finish(self, buffers: Buffers | None) -> None:
        self._share.release_soon()
        self.resolve(buffers)


async def receive(
    deliveries: Sequence[Delivery],
    demand: Demand,
    budget: Budget,
    *,
    wait_s: float,
    interrupt: asyncio.Future[None] | None = None,
    also_after: Callable[[], Awaitable[object]] | None = None,
) -> list[Grant]:
    """Lease messages to a worker; wait up to `wait_s` for some, or until `interrupt`.

    `also_after` is a further condition of the response. Leases are durable on return where the delivery mode requires
    it. A queue that fails is skipped; an error is raised only when all of them fail. The messages count towards the
    memory of clients until the loop's next turn, so the caller encodes and sends them before that.
    """
    if not deliveries:
        # This node leads nothing yet; do not let the client poll in a tight loop.
        if interrupt is None:
            await asyncio.sleep(min(wait_s, NO_QUEUE_WAIT_S))
        else:
            await asyncio.wait([interrupt], timeout=wait_s)
        return []
    share = _BudgetShare(budget)
    deliveries = _rotate(deliveries)
    try:
        grants = _receive_from_any(deliveries, demand, share)
        if not grants and wait_s > 0:
            grants = await _wait(deliveries, demand, share, wait_s, interrupt)
        elif not grants:
            # A filter may be evaluating the available messages.
            for delivery in deliveries:
                await delivery.scan_settled(patience_s=FILTER_WAIT_S)
            grants = _receive_from_any(deliveries, demand, share)
        return await _await_durable(grants, demand.worker, also_after)
    finally:
        share.release_soon()


def _rotate(deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
    """Start with the queue that led the order longest ago, so that full responses starve none."""
    turns = [delivery.turn for delivery in deliveries]
    first = turns.index(min(turns))
    deliveries[first].turn = next(_turns)
    return [*deliveries[first:], *deliveries[:first]]


def _receive_from_any(deliveries: Sequence[Delivery], requested: Demand, share: _BudgetShare) -> list[Grant]:
    demand = share.fit(requested)
    if demand is None:
        return []
    grants: list[Grant] = []
    errors: list[MillstreamError] = []
    granted_at = monotonic()
    for delivery in deliveries:
        try:
            received = delivery.try_receive(demand)
        except MillstreamError as error:
            errors.append(error)
            continue
        except Exception:
            return_leases(grants, requested.worker)
            raise
        if received.leases:
            grants.append(Grant.now(delivery, received, granted_at))
            records = demand.max_records - sum(lease.last - lease.first + 1 for lease in received.leases)
            left_bytes = demand.max_bytes - share.take(received)
            if records <= 0 or left_bytes <= 0:
                break
            demand = demand._replace(max_records=records, max_bytes=left_bytes, at_least_one=False)
    if len(errors) == len(deliveries):
        raise errors[0]
    return grants


async def _wait(
    deliveries: Sequence[Delivery],
    demand: Demand,
    share: _BudgetShare,
    wait_s: float,
    interrupt: asyncio.Future[None] | None,
) -> list[Grant]:
    finished: asyncio.Future[Grant | None] = asyncio.get_running_loop().create_future()

    def finish(grant: Grant | None) -> None:
        if not finished.done():
            finished.set_result(grant)
        elif grant is not None:
            # The worker has left; its task is about to notice.
            return_leases([grant], demand.worker)

    wait = Wait(deliveries, demand, share, finish)
    try:
        wait.begin(wait_s, interrupt)
        grant = await finished
    except asyncio.CancelledError:
        # Messages may have arrived at that very moment; otherwise the cancellation has ended the wait.
        if not finished.cancelled() and finished.done() and (late := finished.result()) is not None:
            return_leases([late], demand.worker)
        raise
    finally:
        wait.cancel()
    return [] if grant is None else [grant]


async def _await_durable(
    grants: list[Grant], worker: str, also_after: Callable[[], Awaitable[object]] | None
) -> list[Grant]:
    """Wait until grants may be delivered; leave out queues that lost their partition in between."""
    durable: list[Grant] = []
    errors: list[MillstreamError] = []
    try:
        if also_after is not None:
            for grant in grants:
                grant.delivery.hasten_write()
            await also_after()
        for grant in grants:
            try:
                await grant.delivery.leases_durable()
            except MillstreamError as error:
                errors.append(error)
            else:
                durable.append(grant)
    except asyncio.CancelledError:
        return_leases(grants, worker)
        raise
    if errors and not durable:
        raise errors[0]
    return durable


def return_leases(grants: Sequence[Grant], worker: str) -> None:
    """Return leases that their worker will never learn of; that does not count as a delivery."""
    for grant in grants:
        verbs = [
            Settlement(lease.first, lease.last, Verb.RETURN, 0, "", lease.attempt) for lease in grant.received.leases
        ]
        try:
            grant.delivery.settle_now(worker, verbs)
        except MillstreamError:
            # The queue is closed; after it is opened again, the messages are delivered once their leases expire.
            continue
        except Exception:
            _logger.exception("leases could not be returned; they expire", extra={"worker": worker})
