"""Leases as the worker that holds them counts them, and requests for leases that lose none.

The clocks of broker and worker differ, so a lease is never compared with the broker's time of day. The broker says how
long a request waited before its messages were leased; a lease that was granted then cannot be over before that time and
the lease's length have passed since the request was sent, by the worker's monotonic clock. Until then a message may be
handed out. Later, another worker may have handled it: an extension of its delivery shows whether it is still held.

An answer that its caller gives up on (cancelled, or too slow) may be on its way with leased messages. The request is
withdrawn by closing the sending half of its connection: the broker stops waiting, and what it has leased by then is
returned as soon as the answer arrives, without counting as a delivery.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec

from millstream.core.errors import MillstreamError, ProtocolViolation, RequestTimedOut
from millstream.core.verb import Verb
from millstream.protocol.messages.codec import response_body_at
from millstream.protocol.private.subscription_messages import (
    RECEIVE_KEY,
    SETTLE_KEY,
    PartitionMessages,
    PartitionSettles,
    Receive,
    ReceiveAnswer,
    SettledRange,
    SettleRequest,
)
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.pool import Pool

_logger = logging.getLogger(__name__)

FRESH_SHARE: Final = 0.95
"""The part of a lease that is relied on; the rest covers clocks that run at different speeds."""

LATE_S: Final = 30.0
"""How long the answer to a withdrawn request is waited for."""

RETURN_S: Final = 5.0

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ReceiveAnswer)


def fresh_until(sent_at: float, lease_ms: int | None, *, waited_ms: int = 0) -> float:
    """Until when a lease holds for certain, by the monotonic clock that `sent_at` was read from."""
    return math.inf if lease_ms is None else sent_at + (waited_ms + FRESH_SHARE * lease_ms) / 1000


class Leased(NamedTuple):
    """An answer to a request for messages, and when that request was sent."""

    answer: ReceiveAnswer
    sent_at: float

    def fresh_until(self, part: PartitionMessages) -> float:
        """Until when the leases of one partition hold for certain."""
        return fresh_until(self.sent_at, part.lease_ms, waited_ms=self.answer.waited_ms)


class _Asking:
    """One request, in a task of its own so that its answer outlives whoever asked."""

    def __init__(self, pool: Pool, request: Receive, timeout_s: float) -> None:
        self.pool = pool
        self.request = request
        self._channel: Channel | None = None
        self.task = asyncio.get_running_loop().create_task(self._exchange(timeout_s))

    async def _exchange(self, timeout_s: float) -> Leased:
        async with self.pool.borrowed() as channel:
            self._channel = channel
            sent_at = monotonic()
            frame = await channel.exchange(RECEIVE_KEY, 0, [_encode(self.request)], timeout_s=timeout_s)
        try:
            return Leased(_decoder.decode(frame[response_body_at(RECEIVE_KEY, 0, frame) :]), sent_at)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"the broker's answer cannot be read: {error}") from error

    def withdraw(self) -> None:
        """Have the broker wait no longer; an answer that it has sent still arrives."""
        if self._channel is None:
            self.task.cancel()
        elif not self.task.done():
            self._channel.end_writing()


class LeaseRequests:
    """Asks nodes for messages; leases that arrive after their caller has left are returned."""

    def __init__(self) -> None:
        self._open: set[_Asking] = set()
        self._returning: set[asyncio.Task[None]] = set()

    async def ask(self, pool: Pool, request: Receive, *, timeout_s: float) -> Leased:
        """Ask one node, which answers within the request's wait unless something is wrong."""
        asking = _Asking(pool, request, timeout_s + LATE_S)
        self._open.add(asking)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(asking.task)
        except TimeoutError:
            self._give_up(asking)
            raise RequestTimedOut(f"{pool.address} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._give_up(asking)
            raise
        finally:
            self._open.discard(asking)

    def withdraw(self) -> None:
        """Have nodes answer at once, with what they have leased already or by hanging up."""
        for asking in self._open:
            asking.withdraw()

    def give_back(self, pool: Pool, request: Receive, partitions: list[PartitionMessages]) -> None:
        """Return leases to the node that granted them; leases that cannot be returned run out."""
        if partitions:
            self._begin(_return(pool, request, partitions))

    async def close(self, timeout_s: float = RETURN_S) -> None:
        """Wait until late answers have arrived and their leases are returned, but not for longer than this."""
        if self._returning:
            await asyncio.wait(self._returning, timeout=timeout_s)
        for task in self._returning:
            task.cancel()

    def _give_up(self, asking: _Asking) -> None:
        asking.withdraw()
        self._begin(_return_late(asking))

    def _begin(self, returning: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(returning)
        self._returning.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self._returning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("leases could not be returned", exc_info=error)


async def _return_late(asking: _Asking) -> None:
    await asyncio.wait([asking.task])
    if not asking.task.cancelled() and asking.task.exception() is None:
        await _return(asking.pool, asking.request, asking.task.result().answer.partitions)


async def _return(pool: Pool, request: Receive, partitions: list[PartitionMessages]) -> None:
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
    body = _encode(SettleRequest(request.subscription, request.worker, settles))
    try:
        await (await pool.shared()).exchange(SETTLE_KEY, 0, [body], timeout_s=RETURN_S)
    except MillstreamError as error:
        _logger.debug("leases of %r run out by themselves: %s", request.subscription, error)
