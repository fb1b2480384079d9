"""Receives messages of topics as they are published: nothing is stored, leased or settled.

Each leader is polled separately, so that none waits for another. A slow listener delays no other; one that falls behind
the topic's retention continues with the newest messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from millstream.client.message import Lease, Message, read_leased
from millstream.client.message_stream import Source
from millstream.client.settling import RETRIED
from millstream.core.backoff import Backoff
from millstream.core.errors import CorruptBatch, MillstreamError, OffsetOutOfRange, ProtocolViolation, UnknownTopic
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.tasks import cancel_and_wait, run_until_first
from millstream.core.topic import TopicPartition
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.batch import iterate_whole_headers
from millstream.protocol.wire.client import BACKOFF_S_MAX, Client
from millstream.protocol.wire.fetch import READ_COMMITTED, FetchedPartition, FetchLimits

_logger = logging.getLogger(__name__)

_LATEST: Final = -1
_LIMITS: Final = FetchLimits(1024 * 1024, 5000, isolation=READ_COMMITTED)
_OFFSET_MAX: Final = 2**63 - 1


class LiveReceiver(Source):
    def __init__(self, client: Client, topics: Sequence[str]) -> None:
        super().__init__(f"live {', '.join(topics)}")
        self._client = client
        self._topics = tuple(topics)
        self._positions: dict[TopicPartition, Offset] = {}
        self._topic_ids: dict[str, bytes] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Record the current ends of the topics, and follow from there."""
        await self._find_partitions(Offset(_LATEST))
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    # -- messages -------------------------------------------------------------------------------------------

    def take(self) -> Message | None:
        if not self._buffer:
            return None
        message = self._buffer.popleft()
        if not self._buffer:
            self._room.set()
        return message

    def take_many(self, count: int) -> list[Message]:
        taken = [self._buffer.popleft() for _ in range(min(count, len(self._buffer)))]
        if not self._buffer:
            self._room.set()
        return taken

    async def stop(self) -> None:
        self._stopping = True
        if self._task is not None:
            await cancel_and_wait(self._task)
        self._wake(len(self._idle))

    async def close(self) -> None:
        await self.stop()
        self._buffer.clear()

    # -- following ------------------------------------------------------------------------------------------

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            cause = error if isinstance(error, MillstreamError) else ProtocolViolation(f"receiving failed: {error!r}")
            _logger.error("%s: receiving has stopped: %s", self.subscription, cause)
            self._fail(cause)

    async def _find_partitions(self, begin: Offset) -> None:
        """Look for new partitions; partitions that exist at the start are followed from their end."""
        metadata = await self._client.metadata(self._topics)
        missing = [name for name in self._topics if name not in metadata.topics]
        if missing and begin == _LATEST:
            raise UnknownTopic(
                f"topic {', '.join(map(repr, missing))} does not exist; "
                f"create it with: millstream topic create {missing[0]}"
            )
        for name in self._topics:
            topic = metadata.topics.get(name)
            if topic is None:
                continue
            self._topic_ids[name] = topic.topic_id.bytes
            new = [
                partition for partition in topic.partitions if TopicPartition(name, partition) not in self._positions
            ]
            ends = await self._client.list_offsets(name, dict.fromkeys(new, _LATEST)) if begin == _LATEST else {}
            for index in new:
                at = ends[index].offset if index in ends else begin
                self._positions[TopicPartition(name, PartitionIndex(index))] = Offset(at)

    async def _run(self) -> None:
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while True:
            try:
                by_leader: dict[NodeId, list[TopicPartition]] = {}
                for place in self._positions:
                    leader = await self._client.leader_of(place.topic, place.partition)
                    by_leader.setdefault(leader, []).append(place)
                self._moved.clear()
                await run_until_first((self._moved.wait(), *map(self._read_from_node, by_leader.values())))
                backoff.reset()
            except RETRIED as error:
                _logger.debug("%s: no messages for now: %s", self.subscription, error)
                await backoff.pause()

    async def _read_from_node(self, places: Sequence[TopicPartition]) -> None:
        while True:
            await self._room.wait()
            positions = {place: self._positions[place] for place in places}
            try:
                responses = await self._client.fetch_many(positions, _LIMITS)
            except OffsetOutOfRange:
                await self._skip(places)
                continue
            except CorruptBatch:
                if not await self._step_over(places):
                    raise
                continue
            self._receive(responses)
            known = len(self._positions)
            if not any(len(response.records) for response in responses.values()):
                await self._find_partitions(Offset(0))
            if len(responses) < len(positions) or len(self._positions) > known:
                self._moved.set()

    async def _step_over(self, places: Sequence[TopicPartition]) -> bool:
        """Continue after offsets that disks lost; return False if no such damage is known."""
        from millstream.client.admin.tailer import step_over_damage

        has_passed = False
        for topic in {place.topic for place in places}:
            positions = {place: self._positions[place] for place in places if place.topic == topic}
            for passed in await step_over_damage(self._client, topic, positions):
                _logger.warning("%s: %s", self.subscription, passed)
                has_passed = True
            self._positions.update(positions)
        return has_passed

    async def _skip(self, places: Sequence[TopicPartition]) -> None:
        for topic in {place.topic for place in places}:
            of_topic = [place for place in places if place.topic == topic]
            ends = await self._client.list_offsets(topic, {place.partition: _LATEST for place in of_topic})
            for place in of_topic:
                if self._positions[place] != ends[place.partition].offset:
                    _logger.warning(
                        "%s: offset %s of %s no longer exists", self.subscription, self._positions[place], place
                    )
                self._positions[place] = ends[place.partition].offset

    def _receive(self, responses: Mapping[TopicPartition, FetchedPartition]) -> None:
        before = len(self._buffer)
        for place, response in responses.items():
            lease = Lease(place.topic, self._topic_ids[place.topic], place.partition)
            lease.client = self._client
            everything = [LeasedRange(self._positions[place], _OFFSET_MAX, 0, 0)]
            self._buffer += read_leased(bytes(response.records), everything, lease, aborted=response.aborted)
            for header in iterate_whole_headers(response.records):
                self._positions[place] = max(self._positions[place], header.next_offset)
        if self._buffer:
            self._room.clear()
        self._wake(len(self._buffer) - before)
