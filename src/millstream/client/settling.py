"""Tells the broker what became of messages: gathered while a request is under way, and sent as ranges.

A request that is lost, or comes to a node that no longer leads the partition, is repeated at the leader until the
leases it is about are over. If the broker then says that nobody holds a message, since the answer to the first request
was lost, it is asked whether the message is accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from millstream.client.accepted_ranges import AcceptedRanges
from millstream.client.held import Held
from millstream.client.message import Message
from millstream.core.errors import InvalidRecordState, MillstreamError, ProtocolViolation, RequestTimedOut
from millstream.core.ids import NodeId
from millstream.core.verb import Verb
from millstream.protocol.private.delivery_state import delivery_state
from millstream.protocol.private.subscription_messages import (
    SETTLE_KEY,
    PartitionSettles,
    SettleAnswer,
    SettledRange,
    SettleRequest,
)
from millstream.protocol.wire.client import BACKOFF_S_MAX, BACKOFF_S_MIN, Client
from millstream.protocol.wire.refusal import TRANSIENT, refusal

_logger = logging.getLogger(__name__)

REPEATED: Final = (*TRANSIENT, RequestTimedOut)
"""What is tried again, at whoever leads the partition then."""


ACCEPTED: Final = "accepted"


class Awaited:
    """An answer that somebody waits for; an order that is told in parts has it when each of them was told."""

    __slots__ = ("_ended", "answer", "error", "parts", "when_ended")

    def __init__(self, answer: asyncio.Future[None] | None, *, when_ended: Callable[[], None] | None = None) -> None:
        self.answer = answer
        """None if nobody wants to know what the answer is."""
        self.when_ended = when_ended
        """Called when every part was told, whatever the answer is."""
        self._ended: asyncio.Future[None] | None = None
        self.parts = 1
        self.error: MillstreamError | None = None
        """The first that a part met."""

    def told(self, error: MillstreamError | None) -> None:
        """One part was told."""
        self.parts -= 1
        self.error = self.error or error
        if self.parts:
            return
        if self.when_ended is not None:
            self.when_ended()
        if self._ended is not None:
            self._ended.set_result(None)
        if self.answer is None or self.answer.done():
            return
        if self.error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(self.error)
            # A caller that was cancelled does not look at it.
            self.answer.exception()

    @property
    def is_ended(self) -> bool:
        """Whether every part was told."""
        return not self.parts

    async def ended(self) -> None:
        """Wait until every part was told, whatever the answer is."""
        if self.is_ended:
            return
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        # Several may wait for it.
        await asyncio.wait([self._ended])


class Order:
    """What is to be told of some messages that came together, and who waits for the answer."""

    __slots__ = ("awaited", "delay_ms", "held", "is_alone", "is_repeated", "offsets", "reason", "verb")

    def __init__(
        self,
        held: Held,
        offsets: list[int],
        verb: int,
        delay_ms: int | None = None,
        reason: str = "",
        awaited: Awaited | None = None,
        *,
        is_alone: bool = False,
        is_repeated: bool = False,
    ) -> None:
        self.held = held
        self.offsets = offsets
        self.verb = verb
        self.delay_ms = delay_ms
        self.reason = reason
        self.awaited = awaited
        self.is_alone = is_alone
        """Whether it is sent in a range of its own."""
        self.is_repeated = is_repeated
        """Whether it was sent before, and may have been carried out then."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody wants to know the answer."""
        return self.awaited is not None and self.awaited.answer is not None

    async def ended(self) -> None:
        """Wait until it has been told, whatever the answer is."""
        if self.awaited is None:
            self.awaited = Awaited(None)
        await self.awaited.ended()

    def in_parts(self, parts: list[list[int]], *, is_alone: bool = False) -> list[Order]:
        """The same of the messages in several orders; whoever waits does so for all of them."""
        if self.awaited is not None:
            self.awaited.parts += len(parts) - 1
        more = {"is_alone": is_alone, "is_repeated": self.is_repeated}
        return [Order(self.held, part, self.verb, self.delay_ms, self.reason, self.awaited, **more) for part in parts]

    def is_like(self, other: Order) -> bool:
        """Whether both may be told in one range."""
        mine = (self.verb, self.delay_ms, self.reason, self.held.attempt)
        others = (other.verb, other.delay_ms, other.reason, other.held.attempt)
        return mine == others and not (self.is_alone or other.is_alone)


Told = Callable[[Order, MillstreamError | None], None]
"""Called with what came of an order."""


class _Range(NamedTuple):
    """Consecutive messages of which the same is told."""

    first: int
    last: int
    orders: list[Order]

    def settled(self) -> SettledRange:
        order = self.orders[0]
        return SettledRange(self.first, self.last, order.verb, order.delay_ms, order.reason, order.held.attempt)


class SettleLane:
    """Settles messages at one node, one request at a time."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        node: NodeId | None,
        *,
        told: Told,
        elsewhere: Told,
        parted: Callable[[Sequence[Order], Sequence[Order]], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._node = node
        self._told = told
        self._elsewhere = elsewhere
        """Told of orders that this node could not take."""
        self._parted = parted
        """Told of orders that others took the place of, since one is told in parts."""
        self._waiting: list[Order] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, order: Order) -> None:
        """Tell this with the next request."""
        self._waiting.append(order)
        self._begin()

    async def close(self) -> None:
        """Give up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._told(order, _given_up())

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

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
            places: dict[tuple[str, int], list[_Range]] = {}
            for place, listed in _by_place(orders).items():
                ranges = places[place] = list(_ranges(listed))
                if sum(len(one.orders) for one in ranges) > len(listed):
                    self._parted(listed, [order for one in ranges for order in one.orders])
            try:
                results = await self._ask(places)
            except BaseException as error:
                self._fail(places, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for ranges, told in zip(places.values(), results, strict=True):
                for one, (code, text) in zip(ranges, told, strict=True):
                    self._conclude(one, refusal(code, text) if code else None)

    async def _ask(self, places: dict[tuple[str, int], list[_Range]]) -> list[list[tuple[int, str | None]]]:
        settles = [
            PartitionSettles(topic, partition, [one.settled() for one in ranges])
            for (topic, partition), ranges in places.items()
        ]
        body = msgspec.msgpack.encode(SettleRequest(self._subscription, self._worker, settles))
        answer = _read(await self._client.private(self._node, SETTLE_KEY, body))
        if answer.error:
            raise refusal(answer.error, answer.message)
        if [len(told) for told in answer.results] != [len(ranges) for ranges in places.values()]:
            raise ProtocolViolation("the broker does not answer for each of the messages that were settled")
        return answer.results

    def _fail(self, places: dict[tuple[str, int], list[_Range]], error: BaseException) -> None:
        """Nothing of a request is known to have been taken: tell everybody, whatever the reason is."""
        tell = self._elsewhere if isinstance(error, REPEATED) else self._told
        if isinstance(error, MillstreamError):
            told: MillstreamError = error
        elif isinstance(error, Exception):
            _logger.error("messages of %r could not be settled", self._subscription, exc_info=error)
            told = ProtocolViolation(f"messages could not be settled: {error!r}")
        else:
            told = _given_up()
        for ranges in places.values():
            for one in ranges:
                for order in one.orders:
                    tell(order, told)

    def _conclude(self, one: _Range, error: MillstreamError | None) -> None:
        if isinstance(error, InvalidRecordState) and one.first < one.last:
            # A range is taken as a whole or not at all: one message in it is not held any more, the others may be.
            for order in one.orders:
                parts = order.in_parts([[offset] for offset in order.offsets], is_alone=True)
                self._parted([order], parts)
                self._waiting += parts
            return
        tell = self._elsewhere if isinstance(error, REPEATED) else self._told
        for order in one.orders:
            tell(order, error)


def _by_place(orders: Sequence[Order]) -> dict[tuple[str, int], list[Order]]:
    places: dict[tuple[str, int], list[Order]] = {}
    for order in orders:
        held = order.held
        if held.accepting is order:
            # What is accepted from now on goes with the next request.
            held.accepting = None
        places.setdefault(held.place, []).append(order)
    return places


def _ranges(orders: list[Order]) -> Iterator[_Range]:
    """Orders of one partition as ranges: those about one message are merged where the same is told of neighbours."""
    singles = [order for order in orders if len(order.offsets) == 1]
    for order in orders:
        if len(order.offsets) > 1:
            yield from _runs(order)
    # A message may be extended and settled in the same request; the first of both comes first.
    singles.sort(key=lambda order: (order.verb != Verb.EXTEND, order.offsets[0]))
    together: list[Order] = []
    for order in singles:
        if together:
            before = together[-1]
            if order.offsets[0] != before.offsets[0] + 1 or not order.is_like(before):
                yield _Range(together[0].offsets[0], before.offsets[0], together)
                together = []
        together.append(order)
    if together:
        yield _Range(together[0].offsets[0], together[-1].offsets[0], together)


def _runs(order: Order) -> Iterator[_Range]:
    offsets = order.offsets
    offsets.sort()
    first, last = offsets[0], offsets[-1]
    if last - first == len(offsets) - 1:
        yield _Range(first, last, [order])
        return
    parts: list[list[int]] = []
    start = 0
    for at in range(1, len(offsets) + 1):
        if at == len(offsets) or offsets[at] != offsets[at - 1] + 1:
            parts.append(offsets[start:at])
            start = at
    for part in order.in_parts(parts):
        yield _Range(part.offsets[0], part.offsets[-1], [part])


def _given_up() -> MillstreamError:
    return RequestTimedOut("closed before the broker answered; whether the message is settled is not known")


def _not_known(order: Order, doubt: str) -> InvalidRecordState:
    place = f"{order.held.topic}-{order.held.partition} at {order.offsets[0]}"
    return InvalidRecordState(f"{place} is not held, nor known to be accepted: {doubt}")


def _read(body: memoryview) -> SettleAnswer:
    try:
        return msgspec.msgpack.decode(body, type=SettleAnswer)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"the broker's answer cannot be read: {error}") from error


class Settling:
    """Settles the messages of one worker, wherever their partitions are led."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        lost: Callable[[Order], None],
        oldest_sent: Callable[[], float],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._lost = lost
        """Told of messages whose lease could not be kept."""
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[NodeId | None, SettleLane] = {}
        self._moving: list[Order] = []
        self._mover: asyncio.Task[None] | None = None
        self._doubtful: deque[Order] = deque()
        """Of which it is not known whether they were carried out."""
        self._asker: asyncio.Task[None] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._open: set[Order] = set()
        """What has no answer yet."""
        self._accepted = AcceptedRanges(oldest_sent)
        self._unsettled: dict[str, tuple[int, int, MillstreamError]] = {}

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Tell it; the future ends when it is durable."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self.tell(Order(message._held, [message.offset], verb, delay_ms, reason, Awaited(answer)))
        return answer

    def accepting(self, held: Held) -> Order:
        """An order to which accepted messages are added until it is sent."""
        order = held.accepting = Order(held, [], Verb.ACCEPT)
        self.tell(order)
        return order

    def tell(self, order: Order) -> None:
        """Tell it with the next request."""
        self._open.add(order)
        self._lane(order.held.node).add(order)

    async def flush(self) -> None:
        """Wait until everything has been told."""
        if self._open:
            self._idle.append(self._loop.create_future())
            await self._idle[-1]

    async def close(self) -> None:
        """Give up what was not told."""
        for lane in list(self._lanes.values()):
            await lane.close()
        for task in (self._mover, self._asker):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _lane(self, node: NodeId | None) -> SettleLane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = SettleLane(
                self._client,
                self._subscription,
                self._worker,
                node,
                told=self._told,
                elsewhere=self._elsewhere,
                parted=self._parted,
            )
        return lane

    def _parted(self, before: Sequence[Order], after: Sequence[Order]) -> None:
        self._open.difference_update(before)
        self._open.update(after)

    def open_about(self, held: Held, offsets: set[int]) -> list[Order]:
        """What was said of messages, by whichever lease, and has no answer yet."""
        return [
            order
            for order in self._open
            if order.verb != Verb.EXTEND and order.held.where == held.where and not offsets.isdisjoint(order.offsets)
        ]

    def in_doubt(self, held: Held, offsets: set[int], asked: float) -> set[int]:
        """Which of the messages that were asked for then may be settled, so that this lease of them is none any more.

        Something was said of them and has no answer yet, or they are known to be accepted since.
        """
        found = self._accepted.since(asked, held.where, offsets)
        for order in self.open_about(held, offsets):
            found |= offsets.intersection(order.offsets)
        return found

    def _told(self, order: Order, error: MillstreamError | None) -> None:
        is_refused = isinstance(error, InvalidRecordState)
        if is_refused and order.is_repeated and order.is_awaited and order.verb == Verb.ACCEPT:
            # The answer to the first request may have been lost: then nobody holds the message since it is accepted.
            self._doubt(order)
            return
        self._open.discard(order)
        if error is None:
            if order.verb == Verb.ACCEPT and order.offsets:
                self._accepted.add(monotonic(), order.held.where, order.offsets[0], order.offsets[-1])
        else:
            self._lost(order)
            if order.verb != Verb.EXTEND and not order.is_awaited:
                self._warn(order, error)
        if order.awaited is not None:
            order.awaited.told(error)
        if not self._open:
            idle, self._idle = self._idle, []
            for waiting in idle:
                if not waiting.done():
                    waiting.set_result(None)

    def _warn(self, order: Order, error: MillstreamError) -> None:
        """Tell the log, once of all that an answer refuses: after a restart that may be all that was held."""
        if not self._unsettled:
            self._loop.call_soon(self._warn_of_all)
        place = f"{order.held.topic}-{order.held.partition}"
        count, first, why = self._unsettled.get(place, (0, order.offsets[0], error))
        self._unsettled[place] = count + len(order.offsets), min(first, order.offsets[0]), why

    def _warn_of_all(self) -> None:
        unsettled, self._unsettled = self._unsettled, {}
        for place, (count, first, why) in unsettled.items():
            _logger.warning("messages of %s, %d from %d on, may not be settled: %s", place, count, first, why)

    # -- when leaders move ----------------------------------------------------------------------------------

    def _elsewhere(self, order: Order, error: MillstreamError | None) -> None:
        if monotonic() < order.held.valid_until:
            order.is_repeated = True
            self._moving.append(order)
            self._begin_to_move()
        elif order.is_awaited and order.verb == Verb.ACCEPT:
            # It cannot be repeated any more, but it may have been carried out, and only the answer was lost.
            self._doubt(order)
        else:
            self._told(order, error)

    def _begin_to_move(self) -> None:
        if self._mover is None:
            self._mover = self._loop.create_task(self._move())
            self._mover.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._mover = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _logger.error("the leaders of %r cannot be found", self._subscription, exc_info=error)
        if self._moving and (task.cancelled() or error is not None):
            moving, self._moving = self._moving, []
            for order in moving:
                self._told(order, _given_up() if error is None else RequestTimedOut(str(error)))
        if self._moving:
            self._begin_to_move()

    async def _move(self) -> None:
        """Find out who leads the partitions now, and tell them."""
        pause_s = BACKOFF_S_MIN
        while self._moving:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, BACKOFF_S_MAX)
            failure: MillstreamError | None = None
            try:
                found = await self._client.metadata(sorted({order.held.topic for order in self._moving}))
            except REPEATED as error:
                failure = error
            moving, self._moving = self._moving, []
            if failure is not None:
                for order in moving:
                    self._elsewhere(order, failure)
                continue
            for order in moving:
                held = order.held
                topic = found.topics.get(held.topic)
                partitions = () if topic is None else topic.partitions.values()
                leader = next((one.leader_id for one in partitions if one.partition == held.partition), -1)
                if leader < 0:
                    self._elsewhere(order, RequestTimedOut(f"{held.topic}-{held.partition} has no leader now"))
                else:
                    held.node = NodeId(leader)
                    self._lane(held.node).add(order)

    # -- when it is not known what was carried out ----------------------------------------------------------------

    def _doubt(self, order: Order) -> None:
        """Ask what became of the messages of an order."""
        order.is_repeated = False
        self._doubtful.append(order)
        if self._asker is None:
            self._asker = self._loop.create_task(self._find_out())
            self._asker.add_done_callback(self._found_out)

    def _found_out(self, task: asyncio.Task[None]) -> None:
        self._asker = None
        while self._doubtful:
            self._told(self._doubtful.popleft(), _given_up())

    async def _find_out(self) -> None:
        """Ask what became of messages; one that is accepted is not delivered again, whoever said so."""
        while self._doubtful:
            order, concluded = self._doubtful[0], 1
            topic, partition = order.held.place
            try:
                states = [
                    (await delivery_state(self._client, self._subscription, topic, partition, offset)).state
                    for offset in order.offsets
                ]
                doubt = next((state for state in states if state != ACCEPTED), None)
            except MillstreamError as error:
                doubt = str(error)
                if isinstance(error, REPEATED):
                    # Nobody could be asked for a while, and the others do not wait as long one after the other.
                    concluded = len(self._doubtful)
            for one in [self._doubtful.popleft() for _ in range(concluded)]:
                self._told(one, None if doubt is None else _not_known(one, doubt))
