"""The topics of a landing pipeline, the offset range of each partition, and the plan of a batch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from millstream.core.errors import CorruptBatch, OffsetOutOfRange, StorageFailure, UnknownTopic
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import OFFSET_EARLIEST, OFFSET_LATEST
from millstream.pipelines.source.ranges import Range
from millstream.protocol.records.decoder import find_batches
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.fetch import READ_COMMITTED
from millstream.protocol.wire.list_offsets import Listed, ListedOffset

_CLIENT_ID: Final = "millstream-land"
_TIMEOUT_S: Final = 60.0
_CONCURRENT_LOOKUPS: Final = 16
_SAMPLE_BYTES: Final = 64 * 1024
MESSAGE_BYTES: Final = 1000.0
"""The assumed size of a message before any has been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A topic. A topic recreated under the same name has another id and is another source."""

    topic: str
    topic_id: str
    first: Mapping[int, int]
    """The log start offset, by partition."""
    end: Mapping[int, int]
    """The last stable offset, by partition."""


class Sources:
    """Looks up the topics of a pipeline."""

    def __init__(self, brokers: str, names: Collection[str], pattern: str, access: Access = NO_ACCESS) -> None:
        self._brokers = brokers
        self._access = access
        self._names = list(names)
        self._pattern = re.compile(pattern) if pattern else None

    @property
    def link(self) -> Link:
        return link_to(
            self._brokers,
            client_id=_CLIENT_ID,
            timeout_s=_TIMEOUT_S,
            patience_s=_TIMEOUT_S,
            access=self._access,
        )

    def now(self) -> list[Source]:
        return self.link.call(_find_sources(self.link.client, self._names, self._pattern))

    def missing(self, sources: Iterable[Source]) -> list[str]:
        """Return the named topics that do not exist."""
        existing = {source.topic for source in sources}
        return [name for name in self._names if name not in existing]

    def ids(self, topics: Collection[str]) -> dict[str, str]:
        metadata = self.link.call(self.link.client.metadata(topics))
        return {name: str(topic.topic_id) for name, topic in metadata.topics.items()}

    def message_bytes(self, ranges: Sequence[Range]) -> float | None:
        """Estimate the stored size of a topic's messages from the first of those to be read; None if that fails.

        An estimate never stops a batch, which has other topics: the tasks report what cannot be read, or skip it.
        """
        longest = max(ranges, key=len, default=None)
        if longest is None:
            return None
        try:
            response = self.link.call(
                self.link.client.fetch(
                    longest.topic, longest.partition, longest.start, max_bytes=_SAMPLE_BYTES, isolation=READ_COMMITTED
                )
            )
            batches = find_batches(response.records)
        except (OffsetOutOfRange, CorruptBatch, StorageFailure):
            return None
        if batches.next_offset is None or batches.next_offset <= longest.start:
            return None
        return max(1.0, len(response.records) / (batches.next_offset - longest.start))


async def _find_sources(client: Client, names: list[str], pattern: re.Pattern[str] | None) -> list[Source]:
    response = await client.metadata(None if pattern is not None else names)
    for name in names:
        if name in response.errors:
            error = error_from_code(response.errors[name], None, about=f"topic {name!r}")
            if not isinstance(error, UnknownTopic):
                raise error
    selected = [
        topic
        for name, topic in sorted(response.topics.items())
        if pattern is None or (pattern.fullmatch(name) and not topic.is_internal)
    ]
    places = [TopicPartition(topic.name, PartitionIndex(number)) for topic in selected for number in topic.partitions]
    firsts = await client.list_offsets_of(dict.fromkeys(places, OFFSET_EARLIEST))
    ends = await client.list_offsets_of(dict.fromkeys(places, OFFSET_LATEST), isolation=READ_COMMITTED)
    limit = asyncio.Semaphore(_CONCURRENT_LOOKUPS)
    sources = await asyncio.gather(*(_build_source(client, topic, firsts, ends, limit) for topic in selected))
    return [source for source in sources if source is not None]


async def _build_source(
    client: Client, topic: TopicMetadata, firsts: Listed, ends: Listed, limit: asyncio.Semaphore
) -> Source | None:
    first, end = _offsets(topic, firsts), _offsets(topic, ends)
    if first is None or end is None:
        # The leader is unavailable or has moved; a separate lookup waits for one.
        async with limit:
            try:
                first, end = await _look_up_separately(client, topic)
            except UnknownTopic:
                # It has just been deleted.
                return None
    return Source(topic=topic.name, topic_id=str(topic.topic_id), first=first, end=end)


def _offsets(topic: TopicMetadata, listed: Listed) -> dict[int, int] | None:
    ends = {number: listed[TopicPartition(topic.name, PartitionIndex(number))] for number in topic.partitions}
    offsets = {
        int(number): int(listed_offset.offset)
        for number, listed_offset in ends.items()
        if isinstance(listed_offset, ListedOffset)
    }
    return offsets if len(offsets) == len(ends) else None


async def _look_up_separately(client: Client, topic: TopicMetadata) -> tuple[dict[int, int], dict[int, int]]:
    numbers = list(topic.partitions)
    first = await client.list_offsets(topic.name, dict.fromkeys(numbers, OFFSET_EARLIEST))
    end = await client.list_offsets(topic.name, dict.fromkeys(numbers, OFFSET_LATEST), isolation=READ_COMMITTED)
    return {number: int(listed_offset.offset) for number, listed_offset in first.items()}, {
        n: int(listed_offset.offset) for n, listed_offset in end.items()
    }


FILE_BYTES: Final = 128 * 1024 * 1024
"""The most that a task takes: it becomes one file per topic."""

TASK_BYTES_MIN: Final = 8 * 1024 * 1024
"""Less than this is not divided, since every task costs its start."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The table's position in one partition, and where the batch takes it."""

    start: int | None
    """The table's next offset; None if it has none of this partition yet."""
    first: int
    """The first offset to read: after `start` if retention deleted some, or if nothing was landed before."""
    end: int

    @property
    def lost(self) -> int:
        """Return how many offsets were deleted before they were landed."""
        return 0 if self.start is None else self.first - self.start

    def __len__(self) -> int:
        return max(0, self.end - self.first)


def plans(source: Source, landed: Mapping[int, int], *, from_latest: bool) -> dict[int, PartitionPlan]:
    """Plan a topic's partitions, given the next offsets of its table."""
    planned = {}
    for number, end in source.end.items():
        start = landed.get(number)
        # Partitions added later start at their first message, regardless of the topic's configuration.
        first = end if start is None and from_latest and not landed else source.first[number]
        begin = max(first, start if start is not None else 0)
        planned[number] = PartitionPlan(start, begin, max(begin, end))
    return planned


def topic_ranges(topic: str, plan_of: Mapping[int, PartitionPlan]) -> list[Range]:
    return [Range(topic, number, plan.first, plan.end) for number, plan in sorted(plan_of.items()) if len(plan)]


def tasks(ranges: Sequence[Range], message_bytes: Mapping[str, float], *, parallelism: int) -> list[list[Range]]:
    """Divide ranges into as many tasks as run in parallel, or more if they would be too large.

    They are laid end to end and cut into equal sizes: a large partition is shared by several tasks, and a hundred small
    topics need no more tasks than one large topic.
    """
    sizes = [len(offset_range) * message_bytes[offset_range.topic] for offset_range in ranges]
    total = sum(sizes)
    if not total:
        return []
    count = ceil(total / min(FILE_BYTES, max(TASK_BYTES_MIN, total / parallelism)))
    shared: list[list[Range]] = [[]]
    room = total / count
    for offset_range, size in zip(ranges, sizes, strict=True):
        rest = offset_range
        # The last task takes the rest.
        while size > room and len(shared) < count:
            taken = int(len(rest) * room / size)
            if taken:
                shared[-1].append(Range(rest.topic, rest.partition, rest.start, rest.start + taken))
                size -= size * taken / len(rest)
                rest = Range(rest.topic, rest.partition, rest.start + taken, rest.end)
            shared.append([])
            room = total / count
        if len(rest):
            shared[-1].append(rest)
            room -= size
    return [task for task in shared if task]
