"""Reads messages for pages: some from a position on, or all that match a filter, in both cases within bounds.

Filters are evaluated in a child process, a few thousand messages at a time, so a search delays neither other requests
nor the broker; it stops when its reader does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, NamedTuple

from millstream.broker.subscriptions.filter_worker import FilterWorker
from millstream.client.admin.tailer import Fetched, Message, step_over_damage
from millstream.core.errors import BrokerUnreachable, CorruptBatch, OffsetOutOfRange
from millstream.core.ids import Offset, OffsetRange, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.gateway.api.message import message_bytes
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.services import Services
from millstream.protocol.filter.filter import Filter, Messages
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import AbortedBatches
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.fetch import READ_COMMITTED, FetchedPartition, FetchLimits

FETCH_BYTES: Final = 2 * 1024 * 1024
FOUND_BYTES_MAX: Final = 16 * 1024 * 1024
"""The maximum size of the messages that one step returns."""
SEARCHES_PER_USER_MAX: Final = 4
SEARCHES_MAX: Final = 32
TAILS_PER_USER_MAX: Final = 8
TAILS_MAX: Final = 200


class Step(NamedTuple):
    """The messages found in one response, and the offset at which to continue."""

    matches: list[Message]
    next_offset: int


@dataclass(slots=True)
class Progress:
    read: int = 0
    """Offsets that were searched."""
    total: int = 0
    """Offsets to search."""
    matched: int = 0
    skipped: list[str] = field(default_factory=list)
    """The first few unreadable places, with the reasons."""

    def skip(self, text: str) -> None:
        """Record the offsets that could not be read."""
        if len(self.skipped) < 20:
            self.skipped.append(text)


class Searches:
    def __init__(self) -> None:
        self._worker = FilterWorker()
        self._running: Counter[str] = Counter()
        self._tails: Counter[str] = Counter()

    async def close(self) -> None:
        """End the process that evaluates filters."""
        await self._worker.stop()

    def admitted(self, user: str) -> AbstractAsyncContextManager[None]:
        """Count a search; refuse one too many."""
        return _counted(self._running, user, SEARCHES_PER_USER_MAX, SEARCHES_MAX, "searches")

    def following(self, user: str) -> AbstractAsyncContextManager[None]:
        """Count a live tail; refuse one too many."""
        return _counted(self._tails, user, TAILS_PER_USER_MAX, TAILS_MAX, "live tails")

    async def read(
        self,
        services: Services,
        topic: TopicMetadata,
        ranges: Mapping[int, OffsetRange],
        condition: Filter | None,
        progress: Progress,
        *,
        limit: int | None = None,
        places: dict[int, int] | None = None,
    ) -> AsyncGenerator[list[Message], None]:
        """Yield committed messages in the ranges that match, a step at a time; an empty list reports progress.

        `places` is kept up to date with where each partition continues.
        """
        at = {} if places is None else places
        at.update({partition: start for partition, (start, _) in ranges.items()})
        open_places = {
            TopicPartition(topic.name, PartitionIndex(partition)): Offset(start)
            for partition, (start, end) in ranges.items()
            if start < end
        }
        progress.total = progress.read + sum(end - start for start, end in ranges.values())
        remaining = limit
        while open_places:
            try:
                responses = await _fetch(services, open_places)
            except OffsetOutOfRange as error:
                progress.skip(str(error))
                return
            except CorruptBatch as error:
                if not await self._step_over(services, topic, open_places, progress):
                    progress.skip(str(error))
                    return
                for where, reached in list(open_places.items()):
                    end = ranges[where.partition].end
                    progress.read += min(reached, end) - at[where.partition]
                    at[where.partition] = min(reached, end)
                    if reached >= end:
                        del open_places[where]
                continue
            has_moved = False
            for where, response in responses.items():
                start, end = open_places[where], ranges[where.partition].end
                step = await self.matching(
                    services,
                    topic,
                    Fetched(where.partition, start, response),
                    condition,
                    progress,
                    end=end,
                    limit=remaining,
                )
                has_moved = has_moved or step.next_offset > start
                progress.read += step.next_offset - start
                progress.matched += len(step.matches)
                at[where.partition] = step.next_offset
                open_places[where] = Offset(step.next_offset)
                if step.next_offset >= end:
                    del open_places[where]
                yield step.matches
                if remaining is not None:
                    remaining -= len(step.matches)
                    if remaining <= 0:
                        return
            if not has_moved:
                # The rest can no longer be read, its transaction is open, or its leader has moved.
                for where in open_places.keys() - responses.keys():
                    progress.skip(f"{where} has no leader that responds now; load the page again")
                return

    async def _step_over(
        self, services: Services, topic: TopicMetadata, positions: dict[TopicPartition, Offset], progress: Progress
    ) -> bool:
        """Skip offsets that disks lost, and record them; return False if no damage is known."""
        passed = await step_over_damage(services.reading, topic.name, positions)
        for damaged_range in passed:
            progress.skip(str(damaged_range))
        return bool(passed)

    async def matching(
        self,
        services: Services,
        topic: TopicMetadata,
        fetched: Fetched,
        condition: Filter | None,
        progress: Progress,
        *,
        end: int | None = None,
        limit: int | None = None,
    ) -> Step:
        """Read the matching messages of one response, and say where to continue."""
        response, start = fetched.response, fetched.start
        last = max((header.next_offset for header in iterate_whole_headers(response.records)), default=Offset(start))
        stop = last if end is None else min(last, end)
        ranges: list[OffsetRange] = [OffsetRange(start, stop)]
        if condition is not None:
            messages = Messages(
                topic=topic.name,
                partition=fetched.partition,
                batches=response.records,
                start_offset=start,
                end_offset=stop,
                aborted=response.aborted,
            )
            try:
                evaluated = await self._worker.evaluate(messages, [condition])
            except CorruptBatch as error:
                progress.skip(f"{topic.name}-{fetched.partition} from offset {start}: {error}")
                return Step([], stop)
            matching = evaluated.offsets[evaluated.matches[0]]
            ranges = [OffsetRange(offset, offset + 1) for offset in matching.tolist()]
        if not ranges:
            return Step([], stop)
        matches, next_offset = await self._records(services, topic, fetched, ranges, progress, limit)
        return Step(matches, stop if next_offset is None else next_offset)

    async def _records(
        self,
        services: Services,
        topic: TopicMetadata,
        fetched: Fetched,
        ranges: list[OffsetRange],
        progress: Progress,
        limit: int | None,
    ) -> tuple[list[Message], int | None]:
        """Read the records at some offsets, ascending; also return where to continue if there are too many."""
        batches, aborted = fetched.response.records, AbortedBatches(fetched.response.aborted)
        messages: list[Message] = []
        size = at = 0
        for header in iterate_whole_headers(batches):
            is_aborted = aborted.holds(header.last_offset, header.attributes, header.producer_id)
            if is_aborted or header.is_control:
                continue
            while at < len(ranges) and ranges[at].end <= header.base_offset:
                at += 1
            inside: list[OffsetRange] = []
            for number in range(at, len(ranges)):
                if ranges[number].start > header.last_offset:
                    break
                inside.append(OffsetRange(ranges[number].start, min(ranges[number].end, header.next_offset)))
            start = int(header.base_offset)
            while inside := [
                OffsetRange(max(offsets.start, start), offsets.end) for offsets in inside if offsets.end > start
            ]:
                try:
                    check_crc(batches, header)
                    read = await services.reader.read(batches, header, inside, FOUND_BYTES_MAX - size)
                except CorruptBatch as error:
                    progress.skip(f"{topic.name}-{fetched.partition} from offset {start}: {error}")
                    break
                if read.oversized:
                    progress.skip(f"{topic.name}-{fetched.partition} at {read.next_offset - 1}: {read.oversized}")
                for record in read.records:
                    messages.append(Message(fetched.partition, record))
                    size += message_bytes(record)
                    if (limit is not None and len(messages) >= limit) or size > FOUND_BYTES_MAX:
                        return messages, record.offset + 1
                if read.next_offset <= start:
                    # The rest of the batch cannot be read; skip it, or the loop would not end.
                    break
                start = read.next_offset
        return messages, None


async def _fetch(services: Services, places: Mapping[TopicPartition, Offset]) -> dict[TopicPartition, FetchedPartition]:
    limits = FetchLimits(FETCH_BYTES, 0, isolation=READ_COMMITTED)
    try:
        return await services.reading.fetch_many(places, limits)
    except BrokerUnreachable:
        # The leader has died; now the new one is asked, once there is one.
        return await services.reading.fetch_many(places, limits)


@asynccontextmanager
async def _counted(running: Counter[str], user: str, each_max: int, all_max: int, noun: str) -> AsyncIterator[None]:
    if running[user] >= each_max or running.total() >= all_max:
        raise Refused(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"at most {each_max} {noun} per user, and {all_max} in total, can run at the same time; stop one of "
            "yours, or try again later",
        )
    running[user] += 1
    try:
        yield
    finally:
        running[user] -= 1
        if not running[user]:
            del running[user]


async def compiled(text: str) -> Filter | None:
    """Compile a filter in a thread, since loading the compiler takes a while; None for an empty one."""
    return await asyncio.to_thread(_compile, text) if text else None


def _compile(text: str) -> Filter:
    from millstream.protocol.filter.filter import compile_filter

    return compile_filter(text)
