"""Settles messages: settlements are collected while a request is in flight, and sent as ranges.

A request that is lost, or reaches a node that no longer leads the partition, is retried at the leader until the leases
end. If the broker then says that a message is not leased, because the first response was lost, its delivery state is
looked up. The SDK, push and the gateway settle here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from time import monotonic
from typing import Final, NamedTuple

from millstream.client.message import Lease
from millstream.core.backoff import Backoff
from millstream.core.errors import InvalidRecordState, MillstreamError, ProtocolViolation, RequestTimedOut
from millstream.core.ids import NodeId, OffsetRange
from millstream.core.subscription import Verb
from millstream.core.tasks import cancel_and_wait
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.subscription_messages import (
    SETTLE_KEY,
    PartitionSettles,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.private.subscriptions import ACCEPTED, delivery_state
from millstream.protocol.wire.client import BACKOFF_S_MAX, Client
from millstream.protocol.wire.error_codes import TRANSIENT, error_from_code

_logger = logging.getLogger(__name__)

RANGES_MAX: Final = 1000

Where = tuple[bytes, int]
"""The topic's id, since another topic may have its name by now, and the partition."""


class _AcceptedRange:
    """Consecutive messages, and when they were known to be accepted."""

    __slots__ = ("offsets", "time", "where")

    def __init__(self, time: float, where: Where, offsets: OffsetRange) -> None:
        self.time = time
        self.where = where
        self.offsets = offsets


class AcceptedRanges:
    """Recently accepted messages, in the order of acceptance.

    A response in flight at that time may lease such a message again, as after a node's restart. A range is kept while a
    request is open that was sent before it was accepted. If there are too many, all are forgotten, and every message
    requested before then counts as possibly accepted.
    """

    def __init__(self, oldest_open: Callable[[], float]) -> None:
        self._oldest_open = oldest_open
        """Returns when the oldest pending request was sent; infinity if there is none."""
        self._ranges: deque[_AcceptedRange] = deque()
        self._forgotten = -math.inf
        """The time of the last accepted range that was forgotten; what was accepted before it is unknown."""

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, time: float, where: Where, offsets: OffsetRange) -> None:
        """Add messages that are now known to be accepted."""
        ranges = self._ranges
        if ranges:
            newest = ranges[-1]
            if newest.offsets.end == offsets.start and newest.where == where:
                newest.offsets, newest.time = OffsetRange(newest.offsets.start, offsets.end), time
                return
        if len(ranges) >= RANGES_MAX:
            self._forget()
        ranges.append(_AcceptedRange(time, where, offsets))

    def since(self, time: float, where: Where, offsets: Collection[int]) -> set[int]:
        """Return which messages that were requested at a time may have been accepted since then."""
        if time <= self._forgotten:
            return set(offsets)
        accepted: set[int] = set()
        for accepted_range in reversed(self._ranges):
            if accepted_range.time < time:
                break
            if accepted_range.where == where:
                accepted |= {
                    offset for offset in offsets if accepted_range.offsets.start <= offset < accepted_range.offsets.end
                }
        return accepted

    def _forget(self) -> None:
        """Make room: drop what no open request needs, or everything."""
        ranges, oldest = self._ranges, self._oldest_open()
        while ranges and ranges[0].time < oldest:
            ranges.popleft()
        if len(ranges) >= RANGES_MAX:
            self._forgotten = ranges[-1].time
            ranges.clear()


RETRIED: Final = (*TRANSIENT, RequestTimedOut)
"""Errors that are retried at the partition's current leader."""


class Completion:
    """The outcome of a settlement; one that was split completes with its last part."""

    __slots__ = ("_ended", "error", "on_complete", "parts", "response")

    def __init__(self, response: asyncio.Future[None] | None, *, on_complete: Callable[[], None] | None = None) -> None:
        self.response = response
        """None if no caller waits for the outcome."""
        self.on_complete = on_complete
        """Called when every part is settled, with any outcome."""
        self._ended: asyncio.Future[None] | None = None
        self.parts = 1
        self.error: MillstreamError | None = None
        """The first error of a part."""

    def part_settled(self, error: MillstreamError | None) -> None:
        self.parts -= 1
        self.error = self.error or error
        if self.parts:
            return
        if self.on_complete is not None:
            self.on_complete()
        if self._ended is not None:
            self._ended.set_result(None)
        if self.response is None or self.response.done():
            return
        if self.error is None:
            self.response.set_result(None)
        else:
            self.response.set_exception(self.error)
            # A cancelled caller does not retrieve it.
            self.response.exception()

    @property
    def is_complete(self) -> bool:
        return not self.parts

    async def ended(self) -> None:
        """Wait until every part is settled, with any outcome."""
        if self.is_complete:
            return
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        # Several callers may wait.
        await asyncio.wait([self._ended])


class Settlement:
    """A verb on messages of one lease, and the caller that waits for the outcome."""

    __slots__ = ("completion", "delay_ms", "is_alone", "is_retry", "lease", "offsets", "reason", "verb")

    def __init__(
        self,
        lease: Lease,
        offsets: list[int],
        verb: int,
        delay_ms: int | None = None,
        reason: str = "",
        completion: Completion | None = None,
        *,
        is_alone: bool = False,
        is_retry: bool = False,
    ) -> None:
        self.lease = lease
        self.offsets = offsets
        self.verb = verb
        self.delay_ms = delay_ms
        self.reason = reason
        self.completion = completion
        self.is_alone = is_alone
        """Whether it is sent in its own range."""
        self.is_retry = is_retry
        """Whether it was sent before, and may have been carried out."""

    @property
    def has_waiter(self) -> bool:
        return self.completion is not None and self.completion.response is not None

    async def ended(self) -> None:
        """Wait until it is settled, with any outcome."""
        if self.completion is None:
            self.completion = Completion(None)
        await self.completion.ended()

    def split(self, parts: list[list[int]], *, is_alone: bool = False) -> list[Settlement]:
        """Split it into several; a caller waits for all of them."""
        if self.completion is not None:
            self.completion.parts += len(parts) - 1
        more = {"is_alone": is_alone, "is_retry": self.is_retry}
        return [
            Settlement(self.lease, part, self.verb, self.delay_ms, self.reason, self.completion, **more)
            for part in parts
        ]

    def can_merge(self, other: Settlement) -> bool:
        """Return whether both may be sent as one range."""
        mine = (self.verb, self.delay_ms, self.reason, self.lease.attempt)
        others = (other.verb, other.delay_ms, other.reason, other.lease.attempt)
        return mine == others and not (self.is_alone or other.is_alone)


Send = Callable[[NodeId | None, int, bytes], Awaitable[memoryview]]
"""Sends a private request to a node, any if None, and returns the response."""

OnSettled = Callable[[Settlement, MillstreamError | None], None]
"""Called with the outcome of a settlement."""


class _Run(NamedTuple):
    """Consecutive messages with the same verb."""

    offsets: OffsetRange
    settlements: list[Settlement]

    def settled(self) -> SettledRange:
        settlement = self.settlements[0]
        return SettledRange(
            *self.offsets, settlement.verb, settlement.delay_ms, settlement.reason, settlement.lease.attempt
        )


class SettleLane:
    """Settles messages at one node, one request at a time."""

    def __init__(
        self,
        send: Send,
        subscription: str,
        worker: str,
        node: NodeId | None,
        *,
        on_settled: OnSettled,
        on_moved: OnSettled,
        on_split: Callable[[Sequence[Settlement], Sequence[Settlement]], None],
    ) -> None:
        self._send = send
        self._subscription = subscription
        self._worker = worker
        self._node = node
        self._on_settled = on_settled
        self._on_moved = on_moved
        """Called with settlements that this node could not carry out."""
        self._on_split = on_split
        """Called with settlements that were replaced by their parts."""
        self._waiting: list[Settlement] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, settlement: Settlement) -> None:
        """Send it with the next request."""
        self._waiting.append(settlement)
        self._begin()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        waiting, self._waiting = self._waiting, []
        for settlement in waiting:
            self._on_settled(settlement, _closed_error())

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("messages of %r could not be settled", self._subscription, exc_info=error)
        if self._waiting and not task.cancelled():
            # They were added after the task's last check.
            self._begin()

    async def _run(self) -> None:
        while self._waiting:
            settlements, self._waiting = self._waiting, []
            places: dict[tuple[str, int], list[_Run]] = {}
            for place, listed in _by_partition(settlements).items():
                ranges = places[place] = list(_ranges(listed))
                if sum(len(settled_range.settlements) for settled_range in ranges) > len(listed):
                    self._on_split(
                        listed, [settlement for settled_range in ranges for settlement in settled_range.settlements]
                    )
            try:
                results = await self._send_request(places)
            except BaseException as error:
                self._fail(places, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for ranges, outcomes in zip(places.values(), results, strict=True):
                for run, (code, text) in zip(ranges, outcomes, strict=True):
                    self._conclude(run, error_from_code(code, text) if code else None)

    async def _send_request(self, places: dict[tuple[str, int], list[_Run]]) -> list[list[tuple[int, str | None]]]:
        settles = [
            PartitionSettles(topic, partition, [settled_range.settled() for settled_range in ranges])
            for (topic, partition), ranges in places.items()
        ]
        body = encode(SettleRequest(self._subscription, self._worker, settles))
        response = decode(await self._send(self._node, SETTLE_KEY, body), SettleResponse)
        if response.error:
            raise error_from_code(response.error, response.message)
        if [len(outcomes) for outcomes in response.results] != [len(ranges) for ranges in places.values()]:
            raise ProtocolViolation("the broker's response does not cover every settled message")
        return response.results

    def _fail(self, places: dict[tuple[str, int], list[_Run]], error: BaseException) -> None:
        """Fail or retry all settlements of a request."""
        conclude = self._on_moved if isinstance(error, RETRIED) else self._on_settled
        if isinstance(error, MillstreamError):
            cause: MillstreamError = error
        elif isinstance(error, Exception):
            _logger.error("messages of %r could not be settled", self._subscription, exc_info=error)
            cause = ProtocolViolation(f"messages could not be settled: {error!r}")
        else:
            cause = _closed_error()
        for ranges in places.values():
            for settled_range in ranges:
                for settlement in settled_range.settlements:
                    conclude(settlement, cause)

    def _conclude(self, run: _Run, error: MillstreamError | None) -> None:
        if isinstance(error, InvalidRecordState) and run.offsets.size > 1:
            # A range is settled as a whole or not at all: one of its messages is no longer leased, the others may be.
            for settlement in run.settlements:
                parts = settlement.split([[offset] for offset in settlement.offsets], is_alone=True)
                self._on_split([settlement], parts)
                self._waiting += parts
            return
        conclude = self._on_moved if isinstance(error, RETRIED) else self._on_settled
        for settlement in run.settlements:
            conclude(settlement, error)


def _by_partition(settlements: Sequence[Settlement]) -> dict[tuple[str, int], list[Settlement]]:
    places: dict[tuple[str, int], list[Settlement]] = {}
    for settlement in settlements:
        lease = settlement.lease
        if lease.open_accept is settlement:
            # Messages accepted from now on go with the next request.
            lease.open_accept = None
        places.setdefault(lease.place, []).append(settlement)
    return places


def _ranges(settlements: list[Settlement]) -> Iterator[_Run]:
    """Return the settlements of one partition as ranges; those of single messages are merged with equal neighbours."""
    singles = [settlement for settlement in settlements if len(settlement.offsets) == 1]
    for settlement in settlements:
        if len(settlement.offsets) > 1:
            yield from _runs(settlement)
    # A message may be extended and settled in the same request; the extension goes first.
    singles.sort(key=lambda settlement: (settlement.verb != Verb.EXTEND, settlement.offsets[0]))
    together: list[Settlement] = []
    for settlement in singles:
        if together:
            before = together[-1]
            if settlement.offsets[0] != before.offsets[0] + 1 or not settlement.can_merge(before):
                yield _Run(OffsetRange(together[0].offsets[0], before.offsets[0] + 1), together)
                together = []
        together.append(settlement)
    if together:
        yield _Run(OffsetRange(together[0].offsets[0], together[-1].offsets[0] + 1), together)


def _runs(settlement: Settlement) -> Iterator[_Run]:
    offsets = settlement.offsets
    offsets.sort()
    first, last = offsets[0], offsets[-1]
    if last - first == len(offsets) - 1:
        yield _Run(OffsetRange(first, last + 1), [settlement])
        return
    parts: list[list[int]] = []
    start = 0
    for at in range(1, len(offsets) + 1):
        if at == len(offsets) or offsets[at] != offsets[at - 1] + 1:
            parts.append(offsets[start:at])
            start = at
    for part in settlement.split(parts):
        yield _Run(OffsetRange(part.offsets[0], part.offsets[-1] + 1), [part])


def _closed_error() -> MillstreamError:
    return RequestTimedOut("closed before the broker responded; whether the message is settled is unknown")


def _unknown_outcome(settlement: Settlement, doubt: str) -> InvalidRecordState:
    place = f"{settlement.lease.topic}-{settlement.lease.partition} at {settlement.offsets[0]}"
    return InvalidRecordState(f"{place} is not leased, nor known to be accepted: {doubt}")


class Settler:
    """Settles the messages of one worker at the leaders of their partitions."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        send: Send | None = None,
        on_lost: Callable[[Settlement], None] = lambda _settlement: None,
        oldest_sent: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._client = client
        self._send: Send = client.private if send is None else send
        self._subscription = subscription
        self._worker = worker
        self._on_lost = on_lost
        """Called with messages whose lease was lost."""
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[NodeId | None, SettleLane] = {}
        self._moving: list[Settlement] = []
        self._mover: asyncio.Task[None] | None = None
        self._unverified: deque[Settlement] = deque()
        """Settlements whose outcome is unknown."""
        self._verifier: asyncio.Task[None] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._open: set[Settlement] = set()
        """Settlements without a response."""
        self._accepted = AcceptedRanges(oldest_sent)
        self._unsettled: dict[str, tuple[int, int, MillstreamError]] = {}

    def settle(
        self, lease: Lease, offset: int, verb: int, *, delay_ms: int | None = None, reason: str = ""
    ) -> asyncio.Future[None]:
        """Settle one message; the future completes when that is durable."""
        response: asyncio.Future[None] = self._loop.create_future()
        self.enqueue(Settlement(lease, [offset], verb, delay_ms, reason, Completion(response)))
        return response

    def open_accept(self, lease: Lease) -> Settlement:
        """Return a settlement to which accepted messages are added until it is sent."""
        settlement = lease.open_accept = Settlement(lease, [], Verb.ACCEPT)
        self.enqueue(settlement)
        return settlement

    def enqueue(self, settlement: Settlement) -> None:
        """Send it with the next request."""
        self._open.add(settlement)
        self._lane_for(settlement.lease.node).add(settlement)

    async def flush(self) -> None:
        if self._open:
            self._idle.append(self._loop.create_future())
            await self._idle[-1]

    async def close(self) -> None:
        # Lanes refer back to this object: without them, it is freed without the garbage collector.
        while self._lanes:
            _, lane = self._lanes.popitem()
            await lane.close()
        for task in (self._mover, self._verifier):
            if task is not None:
                await cancel_and_wait(task)

    def _lane_for(self, node: NodeId | None) -> SettleLane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = SettleLane(
                self._send,
                self._subscription,
                self._worker,
                node,
                on_settled=self._on_settled,
                on_moved=self._on_moved,
                on_split=self._on_split,
            )
        return lane

    def _on_split(self, before: Sequence[Settlement], after: Sequence[Settlement]) -> None:
        self._open.difference_update(before)
        self._open.update(after)

    def pending_for(self, lease: Lease, offsets: set[int]) -> list[Settlement]:
        """Return the pending settlements of messages, under any lease."""
        return [
            settlement
            for settlement in self._open
            if settlement.verb != Verb.EXTEND
            and settlement.lease.where == lease.where
            and not offsets.isdisjoint(settlement.offsets)
        ]

    def possibly_settled(self, lease: Lease, offsets: set[int], requested_at: float) -> set[int]:
        """Return which of the messages requested at a time may be settled, so that this lease of them is void.

        They have a pending settlement, or are known to be accepted since.
        """
        settled = self._accepted.since(requested_at, lease.where, offsets)
        for settlement in self.pending_for(lease, offsets):
            settled |= offsets.intersection(settlement.offsets)
        return settled

    def _on_settled(self, settlement: Settlement, error: MillstreamError | None) -> None:
        is_refused = isinstance(error, InvalidRecordState)
        if is_refused and settlement.is_retry and settlement.has_waiter and settlement.verb == Verb.ACCEPT:
            # The first response may have been lost: then the message is not leased because it is accepted.
            self._verify_later(settlement)
            return
        self._open.discard(settlement)
        if error is None:
            if settlement.verb == Verb.ACCEPT and settlement.offsets:
                accepted = OffsetRange(settlement.offsets[0], settlement.offsets[-1] + 1)
                self._accepted.add(monotonic(), settlement.lease.where, accepted)
        else:
            self._on_lost(settlement)
            if settlement.verb != Verb.EXTEND and not settlement.has_waiter:
                self._note_unsettled(settlement, error)
        if settlement.completion is not None:
            settlement.completion.part_settled(error)
        if not self._open:
            idle, self._idle = self._idle, []
            for waiting in idle:
                if not waiting.done():
                    waiting.set_result(None)

    def _note_unsettled(self, settlement: Settlement, error: MillstreamError) -> None:
        """Log settlements that a response rejects, once for all of them: after a restart that may be everything."""
        if not self._unsettled:
            self._loop.call_soon(self._log_unsettled)
        place = f"{settlement.lease.topic}-{settlement.lease.partition}"
        count, first, error = self._unsettled.get(place, (0, settlement.offsets[0], error))
        self._unsettled[place] = count + len(settlement.offsets), min(first, settlement.offsets[0]), error

    def _log_unsettled(self) -> None:
        unsettled, self._unsettled = self._unsettled, {}
        for place, (count, first, error) in unsettled.items():
            _logger.warning("%d messages of %s from offset %d may not be settled: %s", count, place, first, error)

    # -- when leaders move ----------------------------------------------------------------------------------

    def _on_moved(self, settlement: Settlement, error: MillstreamError | None) -> None:
        if monotonic() < settlement.lease.valid_until:
            settlement.is_retry = True
            self._moving.append(settlement)
            self._begin_to_move()
        elif settlement.has_waiter and settlement.verb == Verb.ACCEPT:
            # It cannot be repeated any more, but it may have been carried out, and only the response was lost.
            self._verify_later(settlement)
        else:
            self._on_settled(settlement, error)

    def _begin_to_move(self) -> None:
        if self._mover is None:
            self._mover = self._loop.create_task(self._move())
            self._mover.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._mover = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _logger.error("the leaders of %r could not be found", self._subscription, exc_info=error)
        if self._moving and (task.cancelled() or error is not None):
            moving, self._moving = self._moving, []
            for settlement in moving:
                self._on_settled(settlement, _closed_error() if error is None else RequestTimedOut(str(error)))
        if self._moving:
            self._begin_to_move()

    async def _move(self) -> None:
        """Look up the partitions' leaders, and send to them."""
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while self._moving:
            await backoff.pause()
            failure: MillstreamError | None = None
            try:
                metadata = await self._client.metadata(sorted({settlement.lease.topic for settlement in self._moving}))
            except RETRIED as error:
                failure = error
            moving, self._moving = self._moving, []
            if failure is not None:
                for settlement in moving:
                    self._on_moved(settlement, failure)
                continue
            for settlement in moving:
                lease = settlement.lease
                topic = metadata.topics.get(lease.topic)
                partitions = () if topic is None else topic.partitions.values()
                leader = next(
                    (partition.leader_id for partition in partitions if partition.partition == lease.partition), -1
                )
                if leader < 0:
                    self._on_moved(settlement, RequestTimedOut(f"{lease.topic}-{lease.partition} has no leader now"))
                else:
                    lease.node = NodeId(leader)
                    self._lane_for(lease.node).add(settlement)

    # -- settlements with an unknown outcome ----------------------------------------------------------------------

    def _verify_later(self, settlement: Settlement) -> None:
        """Look up the delivery state of a settlement's messages."""
        settlement.is_retry = False
        self._unverified.append(settlement)
        if self._verifier is None:
            self._verifier = self._loop.create_task(self._verify())
            self._verifier.add_done_callback(self._on_verified)

    def _on_verified(self, task: asyncio.Task[None]) -> None:
        self._verifier = None
        while self._unverified:
            self._on_settled(self._unverified.popleft(), _closed_error())

    async def _verify(self) -> None:
        """Look up delivery states; an accepted message is not delivered again, whichever request accepted it."""
        while self._unverified:
            settlement, concluded = self._unverified[0], 1
            topic, partition = settlement.lease.place
            try:
                states = [
                    (await delivery_state(self._client, self._subscription, topic, partition, offset)).state
                    for offset in settlement.offsets
                ]
                doubt = next((state for state in states if state != ACCEPTED), None)
            except MillstreamError as error:
                doubt = str(error)
                if isinstance(error, RETRIED):
                    # No node responded for a while, and the others must not wait as long one after another.
                    concluded = len(self._unverified)
            for run in [self._unverified.popleft() for _ in range(concluded)]:
                self._on_settled(run, None if doubt is None else _unknown_outcome(run, doubt))
