"""Topics as a table: what is there when the query is planned, cut into tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.core.errors import LostData
from millstream.pipelines.source.options import ReadOptions
from millstream.pipelines.source.plainly import each_plainly, plainly
from millstream.pipelines.source.position import EARLIEST, ByTime, Named, Offsets
from millstream.pipelines.source.push_down import Bounds, PushDown
from millstream.pipelines.source.ranges import Range, ranges_between, split
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import Shape
from millstream.pipelines.source.survey import Partitions, Survey

_logger = logging.getLogger(__name__)


class TopicReader(DataSourceReader):
    """Reads topics between two positions."""

    def __init__(self, options: ReadOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._bounds = Bounds()
        self.pushFilters: Any = PushDown(self._bounds)

    @plainly
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks: every partition from where to where, cut as the options say."""
        options, survey, bounds = self._options, Survey(self._options), self._bounds
        there = survey.partitions()
        start = survey.resolve(options.starting or EARLIEST, there, "starting")
        end = survey.resolve(options.ending, there, "ending")
        landed: list[Range] = []
        if options.reaches_lake:
            from millstream.pipelines.source.lake_reach import LakeReach

            reach = LakeReach(survey, options)
            end = reach.lowered_end(end, there)
            landed, start = reach.taken(reach.lowered(start, there), end)
        is_named = bool(landed) or isinstance(options.starting, Named)
        start = check_start(survey, start, there, options, named=is_named, end=end)
        if bounds.from_ms is not None:
            young = survey.resolve(ByTime(bounds.from_ms, or_latest=True), there, "starting")
            start = {
                topic: {number: max(offset, young[topic][number]) for number, offset in offsets.items()}
                for topic, offsets in start.items()
            }
        ranges = [narrowed for one in (*landed, *ranges_between(start, end)) for narrowed in self._narrowed(one)]
        return split(ranges, min_partitions=options.min_partitions, records_max=options.records_per_task_max)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task."""
        return read_task(partition, self._options, self._shape)

    def _narrowed(self, one: Range) -> Iterator[Range]:
        bounds = self._bounds
        if not bounds.allow(one.topic, one.partition):
            return
        narrowed = replace(one, start=max(one.start, bounds.first_offset), end=min(one.end, bounds.end_offset))
        if narrowed.end > narrowed.start:
            yield narrowed


@each_plainly
def read_task(partition: InputPartition, options: ReadOptions, shape: Shape) -> Iterator[pa.RecordBatch]:
    """The rows of one task; where there is nothing to read, Spark asks for one task all the same, without a range."""
    if isinstance(partition, Range) and options.ranges:
        yield range_row(partition)
    elif isinstance(partition, Range) and partition.table is not None:
        from millstream.pipelines.source.lake_reach import read_landed

        yield from read_landed(partition, shape)
    elif isinstance(partition, Range):
        yield from read_range(partition, options, shape)


def range_row(one: Range) -> pa.RecordBatch:
    """A range itself as a row, for jobs that fetch in `mapInArrow`."""
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([one.topic], pa.string()),
            "partition": pa.array([one.partition], pa.int32()),
            "start": pa.array([one.start], pa.int64()),
            "end": pa.array([one.end], pa.int64()),
        }
    )


def check_start(
    survey: Survey,
    start: Offsets,
    there: Partitions,
    options: ReadOptions,
    *,
    named: bool,
    end: Offsets | None = None,
) -> dict[str, dict[int, int]]:
    """Offsets that still exist; what a query names and retention has deleted is lost, and said so exactly.

    With an end, only what lies before it is meant.
    """
    if not named:
        return {topic: dict(offsets) for topic, offsets in start.items()}
    earliest = survey.earliest(there)
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
        _logger.warning("%s; failOnDataLoss is false, so the query goes on", error)
    return {
        topic: {number: max(offset, earliest[topic][number]) for number, offset in offsets.items()}
        for topic, offsets in start.items()
    }
