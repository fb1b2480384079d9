"""Topics as a table, with the messages that exist when the query is planned, and as a stream; divided into tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millstream.core.errors import LostData, MillstreamError
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.pipelines.source.offset_resolver import OffsetResolver, Partitions
from millstream.pipelines.source.options import EARLIEST, LATEST, NamedOffsets, Offsets, ReadOptions, StartingTimestamp
from millstream.pipelines.source.ranges import Range, admit_tasks, admitted, ranges_between, split
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import Shape
from millstream.pipelines.source.spark_errors import iterate_without_traceback, without_traceback
from millstream.protocol.wire.group_offsets import commit_offsets

_logger = logging.getLogger(__name__)

_UNBOUND: Final = 2**63 - 1


@dataclass(slots=True)
class Bounds:
    """The bounds that pushed-down conditions leave."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first_offset: int = 0
    end_offset: int = _UNBOUND
    from_ms: int | None = None
    partition_first: int = 0
    partition_end: int = _UNBOUND

    def allow(self, topic: str, partition: int) -> bool:
        return (
            (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
            and self.partition_first <= partition < self.partition_end
        )

    def take(self, condition: Filter) -> bool:
        """Push a condition down; False if Spark still has to check every row."""
        attribute: tuple[str, ...] = getattr(condition, "attribute", ())
        value: Any = getattr(condition, "value", None)
        if len(attribute) != 1 or value is None:
            return False
        if attribute[0] == "topic":
            return self._take_topic(condition, value)
        if attribute[0] == "partition":
            return self._take_partition(condition, value)
        if attribute[0] == "offset":
            return self._take_offset(condition, value)
        if (
            attribute[0] == "timestamp"
            and isinstance(value, datetime)
            and isinstance(condition, GreaterThan | GreaterThanOrEqual)
        ):
            # Later records may be older, so this only skips what precedes the first that is new enough.
            self.from_ms = max(self.from_ms or 0, int(value.timestamp() * 1000))
        return False

    def _take_topic(self, condition: Filter, value: Any) -> bool:
        allowed = _values(condition, value)
        if allowed is None:
            return False
        self.topics = allowed if self.topics is None else self.topics & allowed
        return True

    def _take_partition(self, condition: Filter, value: Any) -> bool:
        allowed = _values(condition, value)
        if allowed is not None:
            self.partitions = allowed if self.partitions is None else self.partitions & allowed
            return True
        bounds = _bounds(condition, value)
        if bounds is None:
            return False
        self.partition_first = max(self.partition_first, bounds[0])
        self.partition_end = min(self.partition_end, bounds[1])
        return True

    def _take_offset(self, condition: Filter, value: Any) -> bool:
        bounds = (value, value + 1) if isinstance(condition, EqualTo) else _bounds(condition, value)
        if bounds is None:
            return False
        self.first_offset = max(self.first_offset, bounds[0])
        self.end_offset = min(self.end_offset, bounds[1])
        return True


def _values(condition: Filter, value: Any) -> frozenset[Any] | None:
    if isinstance(condition, EqualTo):
        return frozenset([value])
    return frozenset(value) if isinstance(condition, In) else None


def _bounds(condition: Filter, value: Any) -> tuple[int, int] | None:
    if isinstance(condition, GreaterThan):
        return value + 1, _UNBOUND
    if isinstance(condition, GreaterThanOrEqual):
        return value, _UNBOUND
    if isinstance(condition, LessThan):
        return 0, value
    if isinstance(condition, LessThanOrEqual):
        return 0, value + 1
    return None


class PushDown:
    """Pushes down the conditions that a fetch can apply; a class, since a method could not be pickled."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return the conditions that Spark has to check itself."""
        return [condition for condition in filters if not self._bounds.take(condition)]


class TopicReader(DataSourceReader):
    """Reads topics between two positions."""

    def __init__(self, options: ReadOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._bounds = Bounds()
        self.pushFilters: Any = PushDown(self._bounds)

    @without_traceback
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks: every partition's range, divided as the options say."""
        options, resolver, bounds = self._options, OffsetResolver(self._options), self._bounds
        existing = resolver.partitions()
        start = resolver.resolve(options.starting or EARLIEST, existing, "starting")
        end = resolver.resolve(options.ending, existing, "ending")
        landed: list[Range] = []
        if options.reaches_lake:
            from millstream.pipelines.source.landed_history import LandedHistory

            reach = LandedHistory(resolver, options)
            end = reach.lowered_end(end, existing)
            landed, start = reach.split(reach.lowered(start, existing), end)
        is_named = bool(landed) or isinstance(options.starting, NamedOffsets)
        start = check_start(resolver, start, existing, options, named=is_named, end=end)
        if bounds.from_ms is not None:
            young = resolver.resolve(StartingTimestamp(bounds.from_ms, or_latest=True), existing, "starting")
            start = {
                topic: {number: max(offset, young[topic][number]) for number, offset in offsets.items()}
                for topic, offsets in start.items()
            }
        ranges = [
            narrowed
            for offset_range in (*landed, *ranges_between(start, end))
            for narrowed in self._narrowed(offset_range)
        ]
        pieces = split(ranges, min_partitions=options.min_partitions, records_max=options.records_per_task_max)
        return admit_tasks(pieces, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, self._options, self._shape)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the driver's credentials: tasks find their own in their ranges."""
        return {**self.__dict__, "_options": self._options.for_tasks()}

    def _narrowed(self, offset_range: Range) -> Iterator[Range]:
        bounds = self._bounds
        if not bounds.allow(offset_range.topic, offset_range.partition):
            return
        narrowed = replace(
            offset_range,
            start=max(offset_range.start, bounds.first_offset),
            end=min(offset_range.end, bounds.end_offset),
        )
        if narrowed.end > narrowed.start:
            yield narrowed


@iterate_without_traceback
def read_task(partition: InputPartition, options: ReadOptions, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task; for an empty query Spark runs one task without a range."""
    if isinstance(partition, Range) and options.ranges:
        yield range_row(partition)
    elif isinstance(partition, Range) and partition.table is not None:
        from millstream.pipelines.source.landed_history import read_landed

        yield from read_landed(partition, shape)
    elif isinstance(partition, Range):
        yield from read_range(partition, options.of(partition.access), shape)


def range_row(offset_range: Range) -> pa.RecordBatch:
    """Return a range as a row, for jobs that fetch in `mapInArrow`."""
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([offset_range.topic], pa.string()),
            "partition": pa.array([offset_range.partition], pa.int32()),
            "start": pa.array([offset_range.start], pa.int64()),
            "end": pa.array([offset_range.end], pa.int64()),
        }
    )


def check_start(
    resolver: OffsetResolver,
    start: Offsets,
    partitions: Partitions,
    options: ReadOptions,
    *,
    named: bool,
    end: Offsets | None = None,
) -> dict[str, dict[int, int]]:
    """Check that offsets still exist; named offsets that retention has deleted are reported as lost.

    With an end, only offsets before it count.
    """
    if not named:
        return {topic: dict(offsets) for topic, offsets in start.items()}
    earliest = resolver.earliest(partitions)
    if end is not None:
        earliest = {
            topic: {number: min(offset, end[topic][number]) for number, offset in offsets.items()}
            for topic, offsets in earliest.items()
        }
    lost = [
        (topic, number, offset, earliest[topic][number])
        for topic, offsets in start.items()
        for number, offset in offsets.items()
        if offset < earliest[topic][number]
    ]
    if lost:
        error = LostData(lost)
        if options.fail_on_data_loss:
            raise error
        _logger.warning("%s; failOnDataLoss is false, so the query continues", error)
    return {
        topic: {number: max(offset, earliest[topic][number]) for number, offset in offsets.items()}
        for topic, offsets in start.items()
    }


PATIENCE_S: Final = 0.5
"""How long an idle query waits for messages before it asks again."""

StreamOffsets = dict[str, dict[int, int]]


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. Offsets have the form of Spark's Kafka source: by topic and partition."""

    def __init__(self, options: ReadOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._until: StreamOffsets | None = None
        """The end offsets of a run that reads only existing messages."""
        self._waited_since = time.monotonic()
        self._committed: dict[str, Any] | None = None

    # -- what Spark asks on the driver ------------------------------------------------------------------------

    @without_traceback
    def initialOffset(self) -> dict[str, Any]:
        """Return the first offsets of a new query."""
        options, resolver = self._options, OffsetResolver(self._options)
        partitions = resolver.partitions()
        position = options.starting or LATEST
        start = resolver.resolve(position, partitions, "starting")
        if options.reaches_lake:
            from millstream.pipelines.source.landed_history import LandedHistory

            return to_json(LandedHistory(resolver, options).lowered(start, partitions))
        return to_json(check_start(resolver, start, partitions, options, named=isinstance(position, NamedOffsets)))

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.offsets_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:
        """Record the current end: the run ends there, however much is added meanwhile."""
        resolver = OffsetResolver(self._options)
        self._until = resolver.latest(resolver.partitions())

    @without_traceback
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch. The offsets before its start are committed to the group."""
        self._commit_to_group(start)
        begin = from_json(start)
        end = self._end(begin)
        if end == begin and self._until is None:
            OffsetResolver(self._options).wait_for_more(begin, PATIENCE_S)
            end = self._end(begin)
        starts = self._with_new(begin, end)
        if isinstance(limit, ReadMaxRows):
            end = admitted(starts, end, limit.max_rows)
        if self._waits_for_more(starts, end):
            return start
        self._waited_since = time.monotonic()
        return to_json(end)

    @without_traceback
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the topics, regardless of the size of a batch; lag is measured against it."""
        resolver = OffsetResolver(self._options)
        return to_json(resolver.latest(resolver.partitions()))

    @without_traceback
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options, resolver = self._options, OffsetResolver(self._options)
        ends = from_json(end)
        starts = self._with_new(from_json(start), ends)
        requested: dict[str, dict[int, int]] = {}
        for offset_range in ranges_between(starts, ends):
            requested.setdefault(offset_range.topic, {})[offset_range.partition] = offset_range.start
        landed: list[Range] = []
        if requested and options.reaches_lake:
            from millstream.pipelines.source.landed_history import LandedHistory

            landed, requested = LandedHistory(resolver, options).split(requested, ends)
        there = {topic: list(offsets) for topic, offsets in requested.items()}
        found = check_start(resolver, requested, there, options, named=True, end=ends) if requested else requested
        ranges = ranges_between(
            found, {topic: {number: ends[topic][number] for number in found[topic]} for topic in found}
        )
        pieces = split(
            [*landed, *ranges], min_partitions=options.min_partitions, records_max=options.records_per_task_max
        )
        return admit_tasks(pieces, options)

    def commit(self, end: dict[str, Any]) -> None:
        """Record that Spark has processed everything before."""
        self._commit_to_group(end)

    # -- what executors do ------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, self._options, self._shape)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the driver's credentials: tasks find their own in their ranges."""
        return {**self.__dict__, "_options": self._options.for_tasks()}

    # -- internals --------------------------------------------------------------------------------------------

    def _end(self, begin: StreamOffsets) -> StreamOffsets:
        """Return the available end offsets; never before the start, since partitions do not shrink for a reader."""
        if self._until is not None:
            end = self._until
        else:
            resolver = OffsetResolver(self._options)
            end = resolver.latest(resolver.partitions())
        self._check_partitions_exist(begin, end)
        merged = {
            topic: {number: max(offset, begin.get(topic, {}).get(number, 0)) for number, offset in offsets.items()}
            for topic, offsets in end.items()
        }
        # Deleted partitions have been reported; they stay where they were.
        for topic, offsets in begin.items():
            merged[topic] = {**offsets, **merged.get(topic, {})}
        return merged

    def _check_partitions_exist(self, begin: StreamOffsets, end: StreamOffsets) -> None:
        """Report a topic that was deleted, or ends before the query's position, as lost data."""
        lost = [
            (topic, number, end.get(topic, {}).get(number, 0), offset)
            for topic, offsets in begin.items()
            for number, offset in offsets.items()
            if end.get(topic, {}).get(number, 0) < offset
        ]
        if not lost:
            return
        error = LostData(lost)
        if self._options.fail_on_data_loss:
            raise error
        _logger.warning("%s; failOnDataLoss is false, so the query continues", error)

    def _with_new(self, begin: StreamOffsets, end: StreamOffsets) -> StreamOffsets:
        """Return starts for every partition: added ones start at their first record."""
        new = {
            topic: [number for number in offsets if number not in begin.get(topic, {})]
            for topic, offsets in end.items()
        }
        new = {topic: numbers for topic, numbers in new.items() if numbers}
        if not new:
            return begin
        first = OffsetResolver(self._options).earliest(new)
        return {topic: {**begin.get(topic, {}), **first.get(topic, {})} for topic in {**begin, **first}}

    def _waits_for_more(self, start: StreamOffsets, end: StreamOffsets) -> bool:
        """Whether a batch would be too small to be worth it and may still wait."""
        offsets_min = self._options.offsets_min
        if offsets_min is None or self._until is not None:
            return False
        waited_ms = (time.monotonic() - self._waited_since) * 1000
        size = sum(map(len, ranges_between(start, end)))
        return size < offsets_min and waited_ms < self._options.trigger_delay_ms

    def _commit_to_group(self, end: dict[str, Any]) -> None:
        """Commit progress to a consumer group, for tools that show lag; Spark never reads it."""
        options = self._options
        if options.group_id is None or end == self._committed:
            return
        offsets = {
            TopicPartition(topic, PartitionIndex(number)): offset
            for topic, listed in from_json(end).items()
            for number, offset in listed.items()
        }
        link = OffsetResolver(options).link
        try:
            link.call(commit_offsets(link.client, options.group_id, offsets))
            self._committed = end
        except MillstreamError as error:
            _logger.warning("progress was not committed to group %s: %s", options.group_id, error)


def to_json(offsets: StreamOffsets) -> dict[str, Any]:
    """Encode offsets as in Spark's checkpoint."""
    return {
        topic: {str(number): offset for number, offset in sorted(listed.items())}
        for topic, listed in sorted(offsets.items())
    }


def from_json(offsets: dict[str, Any]) -> StreamOffsets:
    return {topic: {int(number): int(offset) for number, offset in listed.items()} for topic, listed in offsets.items()}
