"""Reads a topic from somewhere on: up to where it ends now, or for ever."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from millstream.admin.damage import LostOffsets
from millstream.model.errors import BrokerUnreachable, CorruptBatch, OffsetOutOfRange, RequestTimedOut
from millstream.model.ids import Offset, PartitionIndex
from millstream.model.topic import TopicPartition
from millstream.records.batch import iterate_whole_headers
from millstream.records.record import Record, decode_records
from millstream.wire.client import Client
from millstream.wire.fetching import READ_UNCOMMITTED, FetchAnswer, FetchLimits

FETCH_BYTES_MAX = 4 * 1024 * 1024
FOLLOW_WAIT_MS = 5_000
REACH_FACTOR = 4
_RETRY_S = 0.2


class Message(NamedTuple):
    """One record and the partition it lies in."""

    partition: int
    record: Record


class Tailer:
    """Reads all partitions of a topic together, each of them in order."""

    def __init__(
        self,
        client: Client,
        topic: str,
        starts: Mapping[int, int],
        *,
        patience_s: float,
        isolation: int = READ_UNCOMMITTED,
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._isolation = isolation
        self._topic = topic
        self._patience_s = patience_s
        self._note = note
        self.lost: list[LostOffsets] = []
        """What was left out, since the disk of the broker lost it."""
        self._positions = {
            TopicPartition(topic, PartitionIndex(partition)): Offset(offset) for partition, offset in starts.items()
        }

    async def last(self, number: int, ends: Mapping[int, int]) -> list[Message]:
        """The last messages before the ends, oldest first; between partitions, their times decide.

        Not every offset holds a message: markers of transactions take some, and compaction leaves gaps. So where too
        few are found, it begins anew further back.
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
        """Every message before the ends."""
        limits = FetchLimits(FETCH_BYTES_MAX, 0, isolation=self._isolation)
        while True:
            wanted = {where: at for where, at in self._positions.items() if at < ends[where.partition]}
            if not wanted:
                return
            before = dict(self._positions)
            for where, answer in (await self._fetch(wanted, limits)).items():
                for message in self._take(where, answer):
                    if message.record.offset < ends[where.partition]:
                        yield message
            if self._positions == before:
                # What is left cannot be read any more, for example because it was deleted meanwhile.
                return

    async def follow(self) -> AsyncIterator[Message]:
        """Every message from here on, as it comes."""
        async for messages in self.follow_together():
            for message in messages:
                yield message

    async def follow_together(self, bytes_max: int = FETCH_BYTES_MAX) -> AsyncIterator[list[Message]]:
        """Every message from here on; those that come together are given together."""
        limits = FetchLimits(bytes_max, FOLLOW_WAIT_MS, isolation=self._isolation)
        while True:
            answers = await self._patiently(limits)
            messages = [message for where, answer in answers.items() for message in self._take(where, answer)]
            if messages:
                yield messages

    def _take(self, where: TopicPartition, answer: FetchAnswer) -> list[Message]:
        at = self._positions[where]
        messages = [
            Message(where.partition, record)
            for record in decode_records(answer.records, aborted=answer.aborted)
            if record.offset >= at
        ]
        # By the headers, since a batch may end in offsets that hold no record any more.
        for header in iterate_whole_headers(answer.records):
            self._positions[where] = max(self._positions[where], header.next_offset)
        return messages

    async def _patiently(self, limits: FetchLimits) -> dict[TopicPartition, FetchAnswer]:
        """Fetch; while the broker is away, for example because it restarts, try again for a while."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            try:
                return await self._fetch(self._positions, limits)
            except OffsetOutOfRange:
                await self._start_over()
            except (BrokerUnreachable, RequestTimedOut) as error:
                if deadline is None:
                    self._note(f"Lost the broker; trying for {self._patience_s:g} s to find it again ({error}).")
                    deadline = loop.time() + self._patience_s
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _fetch(
        self, wanted: Mapping[TopicPartition, Offset], limits: FetchLimits
    ) -> dict[TopicPartition, FetchAnswer]:
        try:
            return await self._client.fetch_many(wanted, limits)
        except CorruptBatch:
            if not await self._step_over():
                raise
            return {}

    async def _step_over(self) -> bool:
        """Go on behind what the disk of the broker lost, and say so; False when it knows of nothing there."""
        from millstream.admin.damage import ask_lost
        from millstream.admin.topics import find_topic

        found = await find_topic(self._client, self._topic)
        lost = await ask_lost(self._client, found, [where.partition for where in self._positions]) or ()
        moved = False
        for one in lost:
            where = TopicPartition(one.topic, PartitionIndex(one.partition))
            if one.first <= self._positions[where] < one.next_offset:
                self._positions[where] = Offset(one.next_offset)
                self.lost.append(one)
                self._note(f"{one}; going on at {one.next_offset}. To do: {one.advice}.")
                moved = True
        return moved

    async def _start_over(self) -> None:
        """Retention has overtaken a slow reader: go on with what is left."""
        from millstream.admin.topics import offset_bounds

        bounds = await offset_bounds(self._client, self._topic, [where.partition for where in self._positions])
        for where, at in self._positions.items():
            start, end = bounds[where.partition]
            if not start <= at <= end:
                self._note(f"{where}: offset {at} is gone; going on from {start}.")
                self._positions[where] = Offset(start)
