"""Tells the broker what became of messages: gathered while a request is under way, and sent as ranges.

A request that is lost, or comes to a node that no longer leads the partition, is repeated at the leader until the
leases it is about are over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from millstream.client.message import ACCEPT, EXTEND, Message
from millstream.model.errors import (
    InvalidRecordState,
    InvalidRequest,
    MillstreamError,
    ProtocolViolation,
    RequestTimedOut,
)
from millstream.model.ids import NodeId
from millstream.wire.client import BACKOFF_S_MAX, BACKOFF_S_MIN, Client
from millstream.wire.refusal import TRANSIENT, refusal
from millstream.wire.subscription_messages import (
    SETTLE_KEY,
    PartitionSettles,
    SettleAnswer,
    SettledRange,
    SettleRequest,
)

_logger = logging.getLogger(__name__)

REPEATED: Final = (*TRANSIENT, RequestTimedOut)
"""What is tried again, at whoever leads the partition then."""


class Order(NamedTuple):
    """What is to be told of one message, and who waits for the answer."""

    message: Message
    verb: int
    delay_ms: int | None
    reason: str
    answer: asyncio.Future[None] | None


Told = Callable[[Order, MillstreamError | None], None]
"""Called with what came of an order."""


class SettleLane:
    """Settles messages at one node, one request at a time."""

    def __init__(
        self, client: Client, subscription: str, worker: str, node: NodeId | None, *, told: Told, elsewhere: Told
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._node = node
        self._told = told
        self._elsewhere = elsewhere
        """Told of orders that this node could not take."""
        self._waiting: list[Order] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be told."""
        return self._task is None

    def add(self, order: Order) -> None:
        """Tell this with the next request."""
        self._waiting.append(order)
        self._begin()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Give up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("messages of %r could not be settled", self._subscription, exc_info=error)
        if self._waiting and not task.cancelled():
            # They came after the task had looked for the last time.
            self._begin()

    async def _run(self) -> None:
        while self._waiting:
            orders, self._waiting = self._waiting, []
            try:
                await self._send(orders)
            except MillstreamError as error:
                for order in orders:
                    (self._elsewhere if isinstance(error, REPEATED) else self._told)(order, error)

    async def _send(self, orders: list[Order]) -> None:
        places: dict[tuple[str, int], list[Order]] = {}
        for order in orders:
            places.setdefault(order.message._held.place, []).append(order)
        ranges = [list(_ranges(listed)) for listed in places.values()]
        singles = await self._ask(list(places), ranges)
        if singles:
            # A range is taken as a whole or not at all: one message in it is not held any more, the others may be.
            await self._ask(
                [place for place, _ in singles], [[_Range(order, [order]) for order in listed] for _, listed in singles]
            )

    async def _ask(
        self, places: Sequence[tuple[str, int]], ranges: Sequence[list[_Range]]
    ) -> list[tuple[tuple[str, int], list[Order]]]:
        """Send ranges; returns the orders of those that have to be sent one by one."""
        settles = [
            PartitionSettles(topic, partition, [one.settled for one in listed])
            for (topic, partition), listed in zip(places, ranges, strict=True)
        ]
        body = msgspec.msgpack.encode(SettleRequest(self._subscription, self._worker, settles))
        answer = _read(await self._client.private(self._node, SETTLE_KEY, body))
        if answer.error:
            raise refusal(answer.error, answer.message)
        if [len(told) for told in answer.results] != [len(listed) for listed in ranges]:
            raise ProtocolViolation("the broker does not answer for each of the messages that were settled")
        singles: list[tuple[tuple[str, int], list[Order]]] = []
        for place, listed, results in zip(places, ranges, answer.results, strict=True):
            again: list[Order] = []
            for one, (code, text) in zip(listed, results, strict=True):
                again += self._conclude(one, refusal(code, text) if code else None)
            if again:
                singles.append((place, again))
        return singles

    def _conclude(self, one: _Range, error: MillstreamError | None) -> list[Order]:
        if isinstance(error, InvalidRecordState) and len(one.orders) > 1:
            return one.orders
        for order in one.orders:
            (self._elsewhere if isinstance(error, REPEATED) else self._told)(order, error)
        return []


class _Range:
    """Consecutive messages of which the same is told."""

    __slots__ = ("orders", "settled")

    def __init__(self, first: Order, orders: list[Order]) -> None:
        self.orders = orders
        self.settled = SettledRange(
            first.message.offset, orders[-1].message.offset, first.verb, first.delay_ms, first.reason
        )


def _ranges(orders: list[Order]) -> Iterator[_Range]:
    """Orders of one partition, merged where the same is told of neighbours."""
    together: list[Order] = []
    for order in sorted(orders, key=_in_order):
        if together:
            before = together[-1]
            # A message may be extended and settled in the same request; then two verbs speak of one offset.
            follows = order.message.offset == before.message.offset + 1
            if not follows or order[1:4] != before[1:4]:
                yield _Range(together[0], together)
                together = []
        together.append(order)
    if together:
        yield _Range(together[0], together)


def _in_order(order: Order) -> tuple[int, int]:
    return (0 if order.verb == EXTEND else 1, order.message.offset)


def _read(body: memoryview) -> SettleAnswer:
    try:
        return msgspec.msgpack.decode(body, type=SettleAnswer)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"the broker's answer cannot be read: {error}") from error


class Settling:
    """Settles the messages of one worker, wherever their partitions are led."""

    def __init__(self, client: Client, subscription: str, worker: str, *, lost: Callable[[Message], None]) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._lost = lost
        """Told of a message whose lease could not be kept."""
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[NodeId | None, SettleLane] = {}
        self._moving: list[Order] = []
        self._mover: asyncio.Task[None] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._open = 0

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Tell it; the future ends when it is durable."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self.tell(Order(message, verb, delay_ms, reason, answer))
        return answer

    def accept(self, message: Message) -> None:
        """A message is done, and nobody waits for the answer."""
        self.tell(Order(message, ACCEPT, None, "", None))

    def tell(self, order: Order) -> None:
        """Tell it with the next request."""
        self._open += 1
        self._lane(order.message._held.node).add(order)

    async def flush(self) -> None:
        """Wait until everything has been told."""
        if self._open:
            self._idle.append(self._loop.create_future())
            await self._idle[-1]

    async def close(self) -> None:
        """Give up what was not told."""
        for lane in list(self._lanes.values()):
            await lane.close()
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.gather(self._mover, return_exceptions=True)

    def _lane(self, node: NodeId | None) -> SettleLane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = SettleLane(
                self._client, self._subscription, self._worker, node, told=self._told, elsewhere=self._elsewhere
            )
        return lane

    def _told(self, order: Order, error: MillstreamError | None) -> None:
        self._open -= 1
        if error is not None:
            self._lost(order.message)
        if order.answer is not None and not order.answer.done():
            if error is None:
                order.answer.set_result(None)
            else:
                order.answer.set_exception(error)
                # Whoever does not look at it, as the renewal of leases, has been told of the loss.
                order.answer.exception()
        elif error is not None and order.verb != EXTEND:
            _logger.warning("message %s was handled, but not settled: %s", order.message.id, error)
        if self._open == 0:
            idle, self._idle = self._idle, []
            for waiting in idle:
                if not waiting.done():
                    waiting.set_result(None)

    # -- when leaders move ----------------------------------------------------------------------------------

    def _elsewhere(self, order: Order, error: MillstreamError | None) -> None:
        held = order.message._held
        if self._loop.time() >= held.valid_until or (order.verb == EXTEND and order.message.is_settled):
            self._told(order, error or InvalidRequest("the lease is over"))
            return
        self._moving.append(order)
        self._begin_to_move()

    def _begin_to_move(self) -> None:
        if self._mover is None:
            self._mover = self._loop.create_task(self._move())
            self._mover.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._mover = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("the leaders of %r cannot be found", self._subscription, exc_info=error)
            moving, self._moving = self._moving, []
            for order in moving:
                self._told(order, RequestTimedOut(str(error)))
        if self._moving and not task.cancelled():
            self._begin_to_move()

    async def _move(self) -> None:
        """Find out who leads the partitions now, and tell them."""
        pause_s = BACKOFF_S_MIN
        while self._moving:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, BACKOFF_S_MAX)
            moving, self._moving = self._moving, []
            topics = sorted({order.message.topic for order in moving})
            try:
                found = await self._client.metadata(topics)
            except REPEATED as error:
                for order in moving:
                    self._elsewhere(order, error)
                continue
            for order in moving:
                held = order.message._held
                topic = found.topics.get(held.topic)
                partitions = () if topic is None else topic.partitions.values()
                leader = next((one.leader_id for one in partitions if one.partition == held.partition), -1)
                if leader < 0:
                    self._elsewhere(order, RequestTimedOut(f"{held.topic}-{held.partition} has no leader now"))
                else:
                    held.node = NodeId(leader)
                    self._lane(held.node).add(order)
