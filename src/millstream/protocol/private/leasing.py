"""Leases from the worker's point of view, and requests that lose no granted leases.

The clocks of broker and worker differ, so a lease is never compared with the broker's wall clock. The broker reports
how long a request waited before its messages were leased; such a lease cannot end before that time plus the lease's
duration have passed since the request was sent, by the worker's monotonic clock. Until then a message may be handed
out. After that, another worker may hold it: an extension shows whether this one still does.

The response to a request that its caller gives up on (cancelled or timed out) may carry leased messages. The request is
withdrawn by closing the sending half of its connection: the broker stops waiting, and leases that it has granted by
then are returned as soon as the response arrives, without counting as a delivery.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, NamedTuple

from millstream.core.errors import MillstreamError, RequestTimedOut
from millstream.core.subscription import Verb
from millstream.protocol.messages.codec import response_body_at
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.subscription_messages import (
    RECEIVE_KEY,
    SETTLE_KEY,
    PartitionMessages,
    PartitionSettles,
    ReceiveRequest,
    ReceiveResponse,
    SettledRange,
    SettleRequest,
)
from millstream.protocol.wire.channel import Channel, Pool

_logger = logging.getLogger(__name__)

FRESH_SHARE: Final = 0.95
"""The fraction of a lease that is relied on; the rest covers clocks that run at different speeds."""

LATE_S: Final = 30.0
"""How long to wait for the response to a withdrawn request."""

RETURN_S: Final = 5.0


def fresh_until(sent_at: float, lease_ms: int | None, *, waited_ms: int = 0) -> float:
    """Return until when a lease is certain to hold, on the monotonic clock of `sent_at`."""
    return math.inf if lease_ms is None else sent_at + (waited_ms + FRESH_SHARE * lease_ms) / 1000


class LeaseResponse(NamedTuple):
    """The response to a request for messages, and when the request was sent."""

    response: ReceiveResponse
    sent_at: float

    def fresh_until(self, part: PartitionMessages) -> float:
        """Return until when the leases of one partition are certain to hold."""
        return fresh_until(self.sent_at, part.lease_ms, waited_ms=self.response.waited_ms)


class _PendingReceive:
    """A request, in its own task so that its response outlives the caller."""

    def __init__(self, pool: Pool, request: ReceiveRequest, timeout_s: float) -> None:
        self.pool = pool
        self.request = request
        self._channel: Channel | None = None
        self.task = asyncio.get_running_loop().create_task(self._exchange(timeout_s))
        # The error of a request whose caller has given up does not matter, and the program may end before anyone asks.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _exchange(self, timeout_s: float) -> LeaseResponse:
        async with self.pool.borrowed() as channel:
            self._channel = channel
            sent_at = monotonic()
            frame = await channel.exchange(RECEIVE_KEY, 0, [encode(self.request)], timeout_s=timeout_s)
        return LeaseResponse(decode(frame[response_body_at(RECEIVE_KEY, 0, frame) :], ReceiveResponse), sent_at)

    def withdraw(self) -> None:
        """Make the broker stop waiting; a response that it has sent still arrives."""
        if self._channel is None:
            self.task.cancel()
        elif not self.task.done():
            self._channel.end_writing()


class LeaseRequests:
    """Requests messages from nodes; leases that arrive after the caller has given up are returned."""

    def __init__(self) -> None:
        self._open: set[_PendingReceive] = set()
        self._returning: set[asyncio.Task[None]] = set()

    async def receive(self, pool: Pool, request: ReceiveRequest, *, timeout_s: float) -> LeaseResponse:
        """Request messages from one node, which responds within the request's wait unless something is wrong."""
        pending = _PendingReceive(pool, request, timeout_s + LATE_S)
        self._open.add(pending)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(pending.task)
        except TimeoutError:
            self._abandon(pending)
            raise RequestTimedOut(f"{pool.address} did not respond within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._abandon(pending)
            raise
        finally:
            self._open.discard(pending)

    def withdraw(self) -> None:
        """Make nodes respond at once, with the leases granted so far or by hanging up."""
        for pending in self._open:
            pending.withdraw()

    def return_leases(self, pool: Pool, request: ReceiveRequest, partitions: list[PartitionMessages]) -> None:
        """Return leases to the node that granted them; leases that cannot be returned expire."""
        if partitions:
            self._begin(_return(pool, request, partitions))

    async def close(self, timeout_s: float = RETURN_S) -> None:
        """Wait, for at most this long, until late responses have arrived and their leases are returned."""
        if self._returning:
            await asyncio.wait(self._returning, timeout=timeout_s)
        for task in self._returning:
            task.cancel()

    def _abandon(self, pending: _PendingReceive) -> None:
        pending.withdraw()
        self._begin(_return_late(pending))

    def _begin(self, returning: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(returning)
        self._returning.add(task)
        task.add_done_callback(self._on_returned)

    def _on_returned(self, task: asyncio.Task[None]) -> None:
        self._returning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("leases could not be returned", exc_info=error)


async def _return_late(pending: _PendingReceive) -> None:
    await asyncio.wait([pending.task])
    if not pending.task.cancelled() and pending.task.exception() is None:
        await _return(pending.pool, pending.request, pending.task.result().response.partitions)


async def _return(pool: Pool, request: ReceiveRequest, partitions: list[PartitionMessages]) -> None:
    settles = [
        PartitionSettles(
            part.topic,
            part.partition,
            [SettledRange(lease.start, lease.end, Verb.RETURN, 0, "", lease.attempt) for lease in part.leases],
        )
        for part in partitions
        if part.lease_ms is not None
    ]
    if not settles:
        return
    body = encode(SettleRequest(request.subscription, request.worker, settles))
    try:
        await (await pool.shared()).exchange(SETTLE_KEY, 0, [body], timeout_s=RETURN_S)
    except MillstreamError as error:
        _logger.debug("leases of %r expire: %s", request.subscription, error)
