"""The backlog of pipelines: from each one's position to the last stable offset.

Records of open transactions, and those after them, are not visible to readers of committed data and do not count. A
pipeline's position is the offset that its group has committed, otherwise the offset at which it is to start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from millstream.client.admin.position import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import LATEST, LandSettings, Pipeline, PipelineKind
from millstream.core.regex import compile_regex
from millstream.core.topic import TopicPartition
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, TopicMetadata
from millstream.protocol.wire.fetch import READ_COMMITTED, READ_UNCOMMITTED
from millstream.protocol.wire.group_offsets import Committed, committed_by_group
from millstream.protocol.wire.list_offsets import ListedOffset


class Reader(NamedTuple):
    """The topics that a pipeline reads, if they are known without Spark."""

    name: str
    kind: PipelineKind
    group: str
    topics: frozenset[str]
    pattern: re.Pattern[str] | None
    from_latest: bool

    def takes(self, topic: TopicMetadata) -> bool:
        if self.pattern is None:
            return topic.name in self.topics
        return not topic.is_internal and self.pattern.fullmatch(topic.name) is not None

    def existing_topics(self, metadata: ClusterMetadata) -> list[TopicMetadata]:
        if self.pattern is None:
            return [metadata.topics[name] for name in self.topics if name in metadata.topics]
        return [topic for topic in metadata.topics.values() if self.takes(topic)]

    def begins_at_end(self, topic: str, begun: frozenset[str]) -> bool:
        """Return whether it starts at the end of a topic, given the topics that it has started to read."""
        if not self.from_latest or topic in begun:
            return False
        # Topics that are created while it lands others are landed from their first message.
        return not (begun and self.kind is PipelineKind.LAND)


def reader_of(pipeline: Pipeline) -> Reader | None:
    """Return the topics that a pipeline reads; None if its settings do not name them."""
    try:
        settings = pipeline.settings
        topics = frozenset(pipeline.flows())
        pattern = settings.pattern if isinstance(settings, LandSettings) else ""
        compiled = compile_regex(pattern) if pattern else None
    except MillstreamError:
        return None
    return Reader(pipeline.name, pipeline.kind, pipeline.group, topics, compiled, settings.start == LATEST)


class Backlog(NamedTuple):
    """A pipeline's position, in offsets."""

    passed: int
    """Stored offsets before the position."""
    left: int
    """Offsets after the position."""


class Backlogs:
    """Measures the backlogs of readers, repeatedly.

    For partitions without a leader it keeps the last known values.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._starts: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}

    async def lags(self, readers: Sequence[Reader]) -> dict[str, int]:
        """Return the lag of each reader over everything it reads.

        Readers whose position is unknown, or whose topics are all missing, are omitted.
        """
        has_pattern = any(reader.pattern is not None for reader in readers)
        named = None if has_pattern else sorted(set().union(*(reader.topics for reader in readers)))
        metadata = await self._client.metadata(named)
        read = {reader: topics for reader in readers if (topics := reader.existing_topics(metadata))}
        return {name: backlog.left for name, backlog in (await self._backlogs_of(read, asks_passed=False)).items()}

    async def in_topic(self, readers: Sequence[Reader], topic: TopicMetadata) -> dict[str, Backlog]:
        """Return each reader's position in a topic, except readers whose position is unknown."""
        return await self._backlogs_of({reader: [topic] for reader in readers}, asks_passed=True)

    async def _backlogs_of(
        self, read: Mapping[Reader, Sequence[TopicMetadata]], *, asks_passed: bool
    ) -> dict[str, Backlog]:
        committed = await committed_by_group(self._client, [backlog.group for backlog in read])
        every = {where for topics in read.values() for topic in topics for where in _partitions(topic)}
        self._ends = await self._list_offsets(every, LATEST_TIMESTAMP, READ_COMMITTED, self._ends)
        places: dict[str, dict[TopicPartition, int | None]] = {}
        for reader, topics in read.items():
            offsets = committed[reader.group]
            if not isinstance(offsets, MillstreamError):
                places[reader.name] = self._positions(reader, topics, offsets)
        # The start of a partition matters only to readers that are not at its end.
        partitions = {
            where
            for of_reader in places.values()
            for where, offset in of_reader.items()
            if asks_passed or offset is None or offset < self._ends.get(where, 0)
        }
        self._starts = await self._list_offsets(partitions, EARLIEST_TIMESTAMP, READ_UNCOMMITTED, self._starts)
        backlogs = {name: self._backlog(of_reader) for name, of_reader in places.items()}
        return {name: backlog for name, backlog in backlogs.items() if backlog is not None}

    def _positions(
        self, reader: Reader, topics: Sequence[TopicMetadata], committed: Committed
    ) -> dict[TopicPartition, int | None]:
        """Return a reader's position by partition; None means the start of the partition."""
        begun = frozenset(where.topic for where in committed)
        places: dict[TopicPartition, int | None] = {}
        for topic in topics:
            at_end = reader.begins_at_end(topic.name, begun)
            for where in _partitions(topic):
                places[where] = committed.get(where, self._ends.get(where) if at_end else None)
        return places

    async def _list_offsets(
        self, partitions: Iterable[TopicPartition], time_ms: int, isolation: int, known: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        listed_offsets = await self._client.list_offsets_of(dict.fromkeys(partitions, time_ms), isolation=isolation)
        held = {where: known[where] for where in listed_offsets if where in known}
        return {
            **held,
            **{where: offset.offset for where, offset in listed_offsets.items() if isinstance(offset, ListedOffset)},
        }

    def _backlog(self, places: Mapping[TopicPartition, int | None]) -> Backlog | None:
        passed = left = 0
        for where, offset in places.items():
            end, start = self._ends.get(where), self._starts.get(where, offset)
            if end is None or start is None:
                return None
            place = start if offset is None else max(offset, start)
            passed += max(0, min(place, end) - start)
            left += max(0, end - place)
        return Backlog(passed, left)


def _partitions(topic: TopicMetadata) -> list[TopicPartition]:
    return [TopicPartition(topic.name, number) for number in topic.partitions]
