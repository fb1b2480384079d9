"""Reads a topic from a position: up to its current end, or forever."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from millstream.core.errors import BatchRejected, BrokerUnreachable, CorruptBatch, OffsetOutOfRange, RequestTimedOut
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.tasks import cancel_and_wait
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import BatchHeader, iterate_whole_headers
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.fetch import READ_UNCOMMITTED, FetchedPartition, FetchLimits

if TYPE_CHECKING:
    from millstream.client.admin.cluster_status import DamagedOffsets

FETCH_BYTES_MAX = 4 * 1024 * 1024
FOLLOW_WAIT_MS = 5_000
CHECK_INTERVAL_S = 5.0
"""The shortest interval at which a follower looks for new partitions."""

REACH_FACTOR = 4
_RETRY_S = 0.2
_NO_LEADER = NodeId(-1)

T = TypeVar("T")
_Fetched = dict[TopicPartition, FetchedPartition]


class Message(NamedTuple):
    partition: int
    record: Record


class Fetched(NamedTuple):
    """The records that one partition returned, to be read from an offset."""

    partition: int
    start: int
    response: FetchedPartition


class _PollResult(NamedTuple):
    fetched: list[Fetched]
    has_moved: bool
    """Whether the node no longer leads all requested partitions."""


class Tailer:
    """Reads all partitions of a topic, each in order."""

    def __init__(
        self,
        client: Client,
        topic: str,
        starts: Mapping[int, int],
        *,
        patience_s: float,
        isolation: int = READ_UNCOMMITTED,
        is_whole: bool = False,
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._isolation = isolation
        self._topic = topic
        self._patience_s = patience_s
        self._note = note
        self._noted: set[str] = set()
        self._is_whole = is_whole
        """Whether it reads the whole topic, so that new partitions belong to it."""
        self.lost: list[str] = []
        """Descriptions of offsets that were skipped because the broker's disk lost them or their batch is
        unreadable."""
        self._positions = {
            TopicPartition(topic, PartitionIndex(partition)): Offset(offset) for partition, offset in starts.items()
        }

    async def last(self, number: int, ends: Mapping[int, int]) -> list[Message]:
        """Return the last messages before the ends, oldest first; across partitions, ordered by time.

        Not every offset holds a message: transaction markers take some, and compaction leaves gaps. If too few messages
        are found, it starts again further back.
        """
        starts = dict(self._positions)
        reach = number
        while True:
            kept: dict[int, deque[Message]] = {}
            self.lost.clear()
            self._positions = {
                where: Offset(max(start, ends[where.partition] - reach)) for where, start in starts.items()
            }
            is_all = self._positions == starts
            async for message in self.until(ends):
                kept.setdefault(message.partition, deque(maxlen=number)).append(message)
            if is_all or sum(map(len, kept.values())) >= number:
                break
            reach *= REACH_FACTOR
        merged = heapq.merge(*kept.values(), key=lambda message: message.record.timestamp_ms)
        return list(deque(merged, maxlen=number))

    async def until(self, ends: Mapping[int, int]) -> AsyncIterator[Message]:
        limits = FetchLimits(FETCH_BYTES_MAX, 0, isolation=self._isolation)
        while True:
            positions = {where: at for where, at in self._positions.items() if at < ends[where.partition]}
            if not positions:
                return
            before = dict(self._positions)
            for where, response in (await self._fetch(positions, limits)).items():
                for message in self._messages(self._advance(where, response)):
                    if message.record.offset < ends[where.partition]:
                        yield message
            if self._positions == before:
                # The rest can no longer be read, for example because it was deleted meanwhile.
                return

    async def follow(self) -> AsyncGenerator[Message, None]:
        async with aclosing(self.follow_fetched()) as following:
            async for fetched in following:
                for message in (message for response in fetched for message in self._messages(response)):
                    yield message

    async def follow_fetched(self, bytes_max: int = FETCH_BYTES_MAX) -> AsyncGenerator[list[Fetched], None]:
        """Yield fetch responses from here on, for callers that read the batches themselves.

        Each node has its own poll, so that its records do not wait for other nodes.
        """
        limits = FetchLimits(bytes_max, FOLLOW_WAIT_MS, isolation=self._isolation)
        loop = asyncio.get_running_loop()
        polls: dict[NodeId, asyncio.Task[_PollResult]] = {}
        try:
            by_leader, checked_at = await self._retry_while_unreachable(self._by_leader), loop.time()
            while True:
                for leader in by_leader.keys() - polls.keys():
                    polls[leader] = loop.create_task(self._poll(by_leader[leader], limits))
                await asyncio.wait(polls.values(), return_when=asyncio.FIRST_COMPLETED)
                ended = [leader for leader, poll in polls.items() if poll.done()]
                polled = [polls.pop(leader).result() for leader in ended]
                fetched = [response for result in polled for response in result.fetched]
                if fetched:
                    yield fetched
                if any(result.has_moved for result in polled):
                    # The leader may not be elected yet.
                    await asyncio.sleep(_RETRY_S)
                elif loop.time() - checked_at < CHECK_INTERVAL_S:
                    continue
                by_leader, checked_at = await self._retry_while_unreachable(self._by_leader), loop.time()
        finally:
            await cancel_and_wait(*polls.values())

    async def _poll(self, places: Sequence[TopicPartition], limits: FetchLimits) -> _PollResult:
        async def fetch() -> _Fetched:
            return await self._fetch({where: self._positions[where] for where in places}, limits)

        responses = await self._retry_while_unreachable(fetch)
        fetched = [self._advance(where, response) for where, response in responses.items() if response.records]
        return _PollResult(fetched, has_moved=len(responses) < len(places))

    async def _by_leader(self) -> dict[NodeId, list[TopicPartition]]:
        """Return the partitions to fetch from each leader; new partitions are read from their start.

        Partitions without a leader are added to another node's, which learns of their leader.
        """
        topic_metadata = (await self._client.metadata([self._topic])).topics.get(self._topic)
        partitions = {} if topic_metadata is None else topic_metadata.partitions
        if self._is_whole:
            for index in partitions:
                self._positions.setdefault(TopicPartition(self._topic, PartitionIndex(index)), Offset(0))
        led: dict[NodeId, list[TopicPartition]] = {}
        for where in self._positions:
            known = partitions.get(where.partition)
            led.setdefault(_NO_LEADER if known is None else known.leader_id, []).append(where)
        return led

    def _advance(self, where: TopicPartition, response: FetchedPartition) -> Fetched:
        start = self._positions[where]
        # By the headers, since a batch may end with offsets that no longer hold records.
        for header in iterate_whole_headers(response.records):
            self._positions[where] = max(self._positions[where], header.next_offset)
        return Fetched(where.partition, start, response)

    def _messages(self, fetched: Fetched) -> Iterator[Message]:
        """Yield messages while no more than one of their batches is held decompressed."""
        skip = partial(self._skip, TopicPartition(self._topic, PartitionIndex(fetched.partition)))
        response = fetched.response
        for record in decode_records(response.records, aborted=response.aborted, skip=skip):
            if record.offset >= fetched.start:
                yield Message(fetched.partition, record)

    def _skip(self, where: TopicPartition, header: BatchHeader, error: BatchRejected) -> None:
        offsets = f"{where}: the batch at offsets {header.base_offset} to {header.last_offset} cannot be read ({error})"
        reset = f"millstream group reset GROUP --topic {where.topic} --partition {where.partition}"
        at = header.next_offset
        self._record_lost(offsets, f"{offsets}; continuing at {at}. Move a group past it with: {reset} --to {at}.")

    def _record_lost(self, offsets: str, note: str) -> None:
        """Record offsets that were skipped; they are noted once, although `last` may pass them several times."""
        self.lost.append(offsets)
        if note not in self._noted:
            self._noted.add(note)
            self._note(note)

    async def _retry_while_unreachable(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Send a request; retry for a while if the broker is unreachable, for example during a restart."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            try:
                return await attempt()
            except OffsetOutOfRange:
                await self._start_over()
            except (BrokerUnreachable, RequestTimedOut) as error:
                if deadline is None:
                    self._note(f"Lost the connection to the broker; retrying for {self._patience_s:g} s ({error}).")
                    deadline = loop.time() + self._patience_s
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _fetch(self, positions: Mapping[TopicPartition, Offset], limits: FetchLimits) -> _Fetched:
        try:
            return await self._client.fetch_many(positions, limits)
        except CorruptBatch:
            if not await self._step_over():
                raise
            return {}

    async def _step_over(self) -> bool:
        """Skip offsets that the broker's disk lost, and record them; return False if it reports no damage there."""
        passed = await step_over_damage(self._client, self._topic, self._positions)
        for damaged_range in passed:
            self._record_lost(
                str(damaged_range),
                f"{damaged_range}; continuing at {damaged_range.end}. Advice: {damaged_range.advice}.",
            )
        return bool(passed)

    async def _start_over(self) -> None:
        """Continue after retention has deleted the next records of a slow reader."""
        from millstream.client.admin.topics import offset_bounds

        bounds = await offset_bounds(self._client, self._topic, [where.partition for where in self._positions])
        has_moved = False
        for where, at in self._positions.items():
            start, end = bounds[where.partition]
            if not start <= at <= end:
                self._note(f"{where}: offset {at} no longer exists; continuing at {start}.")
                self._positions[where] = Offset(start)
                has_moved = True
        if not has_moved:
            # The nodes disagree, as while a leader is elected.
            await asyncio.sleep(_RETRY_S)


async def step_over_damage(client: Client, topic: str, positions: dict[TopicPartition, Offset]) -> list[DamagedOffsets]:
    """Move positions past permanently lost offsets; return the damage that was skipped, if any."""
    from millstream.client.admin.cluster_status import find_damage
    from millstream.client.admin.topics import find_topic

    topic_metadata = await find_topic(client, topic)
    passed: list[DamagedOffsets] = []
    for damaged_range in await find_damage(client, topic_metadata, [where.partition for where in positions]) or ():
        where = TopicPartition(damaged_range.topic, PartitionIndex(damaged_range.partition))
        if damaged_range.start <= positions[where] < damaged_range.end and not damaged_range.is_repaired:
            positions[where] = Offset(damaged_range.end)
            passed.append(damaged_range)
    return passed
