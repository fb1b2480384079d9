"""Finds messages whose id was landed before, so that they are skipped.

The ids of the deduplication window are kept in the driver. They are read from the table when the job starts, or when
another run has landed something; the table records only the hour in which a message was landed, so ids are then
remembered for up to an hour longer than configured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.options import BROKERS, read_options
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import default_schema, shape_of

_logger = logging.getLogger(__name__)

IDS_BYTES_MAX: Final = 1024 * 1024 * 1024
"""The memory limit for the ids of all topics of a pipeline; the oldest are forgotten first."""

COLUMNS: Final = "topic string, partition int, offset long, timestamp timestamp, id binary"
_READ: Final = ("topic", "partition", "offset", "timestamp", "headers")
_HOUR: Final = timedelta(hours=1)


class IdTasks:
    """The function of `mapInArrow` that maps task numbers to the ids of their messages."""

    def __init__(self, brokers: str, header: str, tasks: Sequence[Sequence[Range]], access: Access = NO_ACCESS) -> None:
        self._brokers = brokers
        self._access = access
        self._header = header
        self._tasks = tasks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for offset_range in self._tasks[number]:
                    yield from self._ids(offset_range)

    def _ids(self, offset_range: Range) -> Iterator[pa.RecordBatch]:
        reader_options = {BROKERS: self._brokers, "subscribe": offset_range.topic, "columns": ",".join(_READ)}
        options = read_options(reader_options, self._access)
        shape = shape_of(default_schema(options), options)
        # An unreadable batch has no ids; the landing task puts it into the quarantine.
        for batch in read_range(offset_range, options, shape, skip=lambda _batch: None):
            ids = ids_of(batch.column("headers"), self._header)
            rows = batch.drop_columns(["headers"]).append_column("id", ids)
            yield rows.filter(pc.is_valid(ids))


def ids_of(headers: pa.Array, name: str) -> pa.Array:
    """Return the first header of a name for every message; null for messages without one."""
    every = headers.flatten()
    is_id = pc.equal(every.field("key"), name)
    rows, first = np.unique(pc.list_parent_indices(headers).filter(is_id).to_numpy(), return_index=True)
    positions = np.full(len(headers), -1, np.int64)
    positions[rows] = first
    return every.field("value").filter(is_id).take(pa.array(positions, mask=positions < 0))


def select_in_ranges(ids: pa.Table, ranges: Iterable[Range]) -> pa.Table:
    number, offset = ids.column("partition"), ids.column("offset")
    matches = pa.chunked_array([pa.repeat(False, len(ids))])
    for offset_range in ranges:
        is_in = pc.and_(pc.greater_equal(offset, offset_range.start), pc.less(offset, offset_range.end))
        matches = pc.or_(matches, pc.and_(pc.equal(number, offset_range.partition), is_in))
    return ids.filter(matches)


def find_repeated(ids: pa.Table, known: pa.ChunkedArray) -> tuple[dict[int, pa.Array], pa.Array]:
    """Return the offsets whose id is known or repeated, by partition, and the ids of the other messages."""
    ids = ids.sort_by([("timestamp", "ascending"), ("partition", "ascending"), ("offset", "ascending")])
    ids = ids.append_column("row", pa.array(np.arange(len(ids))))
    firsts = ids.group_by("id", use_threads=False).aggregate([("row", "first")]).column("row_first")
    # The known ids far outnumber a batch, so they are never hashed themselves.
    again = known.filter(pc.is_in(known, ids.column("id")))
    is_kept = pc.and_(pc.is_in(ids.column("row"), firsts), pc.invert(pc.is_in(ids.column("id"), again)))
    left_out = ids.filter(pc.invert(is_kept))
    by_partition = {
        number: left_out.filter(pc.equal(left_out.column("partition"), number)).column("offset").combine_chunks()
        for number in pc.unique(left_out.column("partition")).to_pylist()
    }
    return by_partition, ids.filter(is_kept).column("id").combine_chunks()


class RecentIds:
    def __init__(
        self, table: LakeTable, header: str, window: timedelta, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._table = table
        self._header = header
        self._window = window
        self._progress = progress
        self._known: list[tuple[datetime, pa.Array]] | None = None
        """Oldest first."""
        self._ends: Mapping[int, int | None] = {}

    def known(self, now: datetime, starts: Mapping[int, int | None]) -> pa.ChunkedArray:
        """Return the recently landed ids, given the table's position."""
        if self._known is None or any(self._ends.get(number) != start for number, start in starts.items()):
            self._known = self._in_table(now)
        self._known = [(landed, ids) for landed, ids in self._known if landed >= now - self._window]
        return pa.chunked_array([ids for _, ids in self._known], pa.binary())

    def _in_table(self, now: datetime) -> list[tuple[datetime, pa.Array]]:
        parts: list[tuple[datetime, pa.Array]] = []
        size = 0
        for hour, batch in self._table.landed_since(now - self._window, ["headers"]):
            self._progress()
            ids = ids_of(batch.column("headers"), self._header).drop_null()
            parts.append((min(now, hour + _HOUR), ids))
            size += ids.nbytes
            if size > IDS_BYTES_MAX:
                parts.sort(key=lambda landed: landed[0])
                while size > IDS_BYTES_MAX:
                    size -= parts.pop(0)[1].nbytes
        parts.reverse()
        return sorted(parts, key=lambda landed: landed[0])

    def landed(self, now: datetime, ids: pa.Array, ends: Mapping[int, int]) -> None:
        """Add the ids of messages that have just been landed, and the table's new position."""
        if self._known is not None and len(ids):
            self._known.append((now, ids))
        self._ends = dict(ends)

    @property
    def bytes(self) -> int:
        return sum(ids.nbytes for _, ids in self._known or ())

    @property
    def oldest(self) -> datetime | None:
        """Return when the oldest ids were landed; None if there are none."""
        return self._known[0][0] if self._known else None

    def forget_oldest(self) -> int:
        """Forget the oldest ids; return the memory that they took."""
        return int(self._known.pop(0)[1].nbytes) if self._known else 0


def keep_bounded(topics: Iterable[RecentIds]) -> None:
    """Forget the oldest ids of all topics until the rest fits the limit."""
    recent = list(topics)
    size = sum(topic.bytes for topic in recent)
    forgotten: datetime | None = None
    while size > IDS_BYTES_MAX:
        moment, oldest = min(((topic.oldest, topic) for topic in recent if topic.oldest), key=lambda entry: entry[0])
        size -= oldest.forget_oldest()
        forgotten = moment
    if forgotten is not None:
        _logger.warning("ids take more than %d bytes: those landed until %s are forgotten", IDS_BYTES_MAX, forgotten)
