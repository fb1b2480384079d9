"""Messages that retention deletes while a task reads are skipped and counted; other gaps are reported."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from millstream.core.errors import LostData
from millstream.pipelines.jobs.land.task import REPORT_COLUMNS, RangeReader, Report, from_rows, to_arrow
from millstream.pipelines.source.ranges import Range


class Log:
    """A partition whose start moves when given offsets are reached, and which may have offsets without messages."""

    def __init__(self, end: int, moves: dict[int, int], without: frozenset[int] = frozenset()) -> None:
        self.start = 0
        self._end = end
        self._moves = moves
        self._without = without

    def records(self, offset_range: Range) -> Iterator[pa.RecordBatch]:
        for offset in range(offset_range.start, offset_range.end):
            self.start = max(self.start, self._moves.get(offset, 0))
            if self.start > offset or offset >= self._end:
                raise LostData([(offset_range.topic, offset_range.partition, offset, offset_range.end)])
            if offset not in self._without:
                yield pa.RecordBatch.from_pydict({"offset": [offset]})

    def log_start(self, topic: str, partition: int) -> int:
        return self.start


def offsets(reading: RangeReader, offset_range: Range) -> list[int]:
    return [row["offset"] for batch in reading.batches(offset_range) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("moves", "read", "lost"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ({0: 4}, [4, 5, 6, 7, 8, 9], 4),
        ({3: 5, 7: 9}, [0, 1, 2, 5, 6, 9], 4),
        ({4: 10}, [0, 1, 2, 3], 6),
        ({4: 100}, [0, 1, 2, 3], 6),
        ({0: 100}, [], 10),
    ],
)
def test_offsets_deleted_before_they_are_read_are_skipped_and_counted(
    moves: dict[int, int], read: list[int], lost: int
) -> None:
    log = Log(200, moves)
    reading = RangeReader(log.records, log.log_start)
    assert offsets(reading, Range("orders", 0, 0, 10)) == read
    assert reading.lost == lost


def test_offsets_without_messages_are_not_lost() -> None:
    log = Log(10, {5: 6}, frozenset({2, 3, 8, 9}))
    reading = RangeReader(log.records, log.log_start)
    assert offsets(reading, Range("orders", 0, 0, 10)) == [0, 1, 4, 6, 7]
    assert reading.lost == 1


def test_a_log_that_ends_early_is_reported() -> None:
    log = Log(5, {})
    reading = RangeReader(log.records, log.log_start)
    with pytest.raises(LostData):
        offsets(reading, Range("orders", 0, 0, 10))


def test_losses_of_several_ranges_are_summed_up_and_reported() -> None:
    logs = {0: Log(10, {2: 4}), 1: Log(10, {0: 3})}
    reading = RangeReader(
        lambda offset_range: logs[offset_range.partition].records(offset_range),
        lambda topic, partition: logs[partition].log_start(topic, 0),
    )
    assert [len(offsets(reading, Range("orders", number, 0, 10))) for number in logs] == [8, 7]
    reported = to_arrow([Report(topic="orders", rows=15, lost=reading.lost)])
    assert [part.split()[0] for part in REPORT_COLUMNS.split(", ")] == reported.schema.names
    (report,) = from_rows(tuple(row.values()) for row in reported.to_pylist())
    assert (report.rows, report.lost) == (15, 5)
