"""Reads from landed tables what the log no longer has.

A landing pipeline keeps a topic's older messages in a lake table. A query that starts with
`startingOffsets=earliest-landed`, or at a time before the log starts, reads offsets before the log start from the table
and continues in the log: the log start offset separates the two, so no message is missing or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client.admin.pipelines import PipelineClient, storage_of
from millstream.core.errors import InvalidSetting, MillstreamError
from millstream.core.pipeline import UPSERT, LandSettings, PipelineKind
from millstream.pipelines.lake.columns import QUARANTINE, UNREADABLE_BATCH
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.offset_resolver import OffsetResolver, Partitions, no_messages_since_error
from millstream.pipelines.source.options import FromLake, Offsets, Position, ReadOptions, StartingTimestamp, Timestamps
from millstream.pipelines.source.ranges import Range, Table
from millstream.pipelines.source.rows import shaped
from millstream.pipelines.source.shape import Shape
from millstream.protocol.private.pipeline_messages import ListPipelinesRequest

_LAKE_NAMES = {"timestampType": "timestamp_type"}


class LandedParts(NamedTuple):
    """The parts of ranges that tables have, and where the log continues."""

    ranges: list[Range]
    starts: dict[str, dict[int, int]]


class LandedHistory:
    """Finds messages before the log start, for the landed topics of one query."""

    def __init__(self, resolver: OffsetResolver, options: ReadOptions) -> None:
        self._resolver = resolver
        self._options = options
        self._opened: dict[str, tuple[Table, LakeTable] | None] = {}

    def lowered(self, start: Offsets, partitions: Partitions) -> dict[str, dict[int, int]]:
        """Return the start offsets including landed messages: never later than in the log alone."""
        position = self._options.starting
        lowered = self._lower(start, partitions, position)
        if isinstance(position, StartingTimestamp | Timestamps) and not position.or_latest:
            self._check_some(start, lowered)
        return lowered

    def lowered_end(self, end: dict[str, dict[int, int]], partitions: Partitions) -> dict[str, dict[int, int]]:
        """Return the end offsets: for a time before the log start, the table knows the offset."""
        position = self._options.ending
        return self._lower(end, partitions, position) if isinstance(position, StartingTimestamp | Timestamps) else end

    def _lower(self, places: Offsets, partitions: Partitions, position: Position | None) -> dict[str, dict[int, int]]:
        first = self._resolver.earliest(partitions)
        lowered = {topic: dict(offsets) for topic, offsets in places.items()}
        for topic, offsets in lowered.items():
            landed = self._landed(topic)
            if landed is None:
                continue
            for number, offset in offsets.items():
                beginning = first[topic][number]
                if offset > beginning:
                    # The log has older messages, so the table has no earlier message of the range.
                    continue
                time_ms = _time_ms(position, topic, number)
                first_offset = _first_in(Range(topic, number, 0, beginning, landed[0]), time_ms)
                offsets[number] = offset if first_offset is None else first_offset
        return lowered

    def _check_some(self, start: Offsets, lowered: Offsets) -> None:
        """Raise `InvalidSetting` if neither the log nor a table has messages since the requested time."""
        ends = self._resolver.latest({topic: list(offsets) for topic, offsets in start.items()})
        for topic, offsets in lowered.items():
            for number, offset in offsets.items():
                time_ms = _time_ms(self._options.starting, topic, number)
                if offset == start[topic][number] == ends[topic][number] and time_ms is not None:
                    raise no_messages_since_error(topic, number, time_ms)

    def split(self, starts: Offsets, ends: Offsets) -> LandedParts:
        """Split a range at the log start: earlier messages are read from the tables that have them."""
        first = self._resolver.earliest({topic: list(offsets) for topic, offsets in starts.items()})
        ranges: list[Range] = []
        not_landed: dict[str, dict[int, int]] = {}
        for topic, offsets in starts.items():
            not_landed[topic] = dict(offsets)
            early = [number for number, offset in offsets.items() if offset < first[topic][number]]
            landed = self._landed(topic) if early else None
            if landed is None:
                continue
            table, opened = landed
            nexts = opened.reached([(table.topic_id, number) for number in early])
            for number in early:
                reached = min(nexts.get((table.topic_id, number), 0), first[topic][number], ends[topic][number])
                if reached > offsets[number]:
                    ranges.append(Range(topic, number, offsets[number], reached, table))
                    not_landed[topic][number] = reached
        return LandedParts(ranges, not_landed)

    # -- internals ------------------------------------------------------------------------------------------------

    @property
    def _link(self) -> Link:
        return self._resolver.link

    @cached_property
    def _landings(self) -> list[tuple[LandSettings, str]]:
        return landings(self._link, self._options.lake)

    @cached_property
    def _topic_ids(self) -> Mapping[str, str]:
        metadata = self._link.call(self._link.client.metadata(list(self._resolver.partitions())))
        return {name: str(topic.topic_id) for name, topic in metadata.topics.items()}

    def _landed(self, topic: str) -> tuple[Table, LakeTable] | None:
        """Return the table of a topic; None if no pipeline lands it, or nothing is landed yet."""
        if topic not in self._opened:
            self._opened[topic] = self._open(topic)
        return self._opened[topic]

    def _open(self, topic: str) -> tuple[Table, LakeTable] | None:
        for settings, lake in self._landings:
            if settings.takes(topic):
                table = Table(f"{lake}/{topic}", settings.format, self._topic_ids[topic])
                opened = open_table(table.url, format=table.format)
                return None if opened.schema() is None else (table, opened)
        if isinstance(self._options.starting, FromLake):
            raise InvalidSetting(
                f"startingOffsets is earliest-landed, but no pipeline lands topic {topic!r} message by message; "
                f"declare one with: millstream pipeline create land NAME --topic {topic}"
            )
        return None


def _first_in(offset_range: Range, time_ms: int | None) -> int | None:
    """Return the first offset of a range that a table has, for messages since a time."""
    columns = ("offset",) if time_ms is None else ("offset", "timestamp")
    for batch in _rows(offset_range, columns):
        matching = batch
        if time_ms is not None:
            stamps = batch.column("timestamp").cast(pa.int64())
            matching = batch.filter(pc.greater_equal(stamps, time_ms * 1000))
        if matching.num_rows:
            return int(matching.column("offset")[0].as_py())
    return None


def landings(link: Link, lake: str | None = None) -> list[tuple[LandSettings, str]]:
    """Return the settings of the pipelines that land every message, each with its lake."""
    return [landing for landing in all_landings(link, lake) if landing[0].mode != UPSERT]


def all_landings(link: Link, lake: str | None = None) -> list[tuple[LandSettings, str]]:
    """Return the settings of the landing pipelines, also of those with one row per key, each with its lake."""
    return link.call(_landings(link, lake))


async def _landings(link: Link, lake: str | None) -> list[tuple[LandSettings, str]]:
    client = link.client
    if not await client.serves(ListPipelinesRequest.KEY):
        return []
    landings = []
    root = lake
    for described in await PipelineClient(client).describe():
        if described["kind"] != PipelineKind.LAND:
            continue
        settings = LandSettings.from_strings(described["overrides"])
        if not settings.lake and root is None:
            root = (await storage_of(client)).lake
        landings.append((settings, (lake or settings.lake or root or "").rstrip("/")))
    return landings


def _time_ms(position: Position | None, topic: str, number: int) -> int | None:
    if isinstance(position, StartingTimestamp):
        return position.timestamp_ms
    return position.times_ms[topic][number] if isinstance(position, Timestamps) else None


def read_landed(offset_range: Range, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a landed range, in order, as the log would return them."""
    names = shape.record_names
    stored_names = tuple(_LAKE_NAMES.get(name, name) for name in names if name != "topic")
    for batch in _rows(offset_range, tuple(dict.fromkeys((*stored_names, "offset")))):
        columns = [
            pa.repeat(pa.scalar(offset_range.topic, pa.string()), batch.num_rows)
            if name == "topic"
            else batch.column(_LAKE_NAMES.get(name, name))
            for name in names
        ]
        yield shaped(pa.RecordBatch.from_arrays(columns, names=list(names)), shape)


def _rows(offset_range: Range, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield rows of a table and of its quarantine, which has the messages that did not fit, by offset."""
    table = offset_range.table
    if table is None:
        return
    try:
        opened = open_table(table.url, format=table.format)
        place = (table.topic_id, offset_range.partition, offset_range.start, offset_range.end)
        quarantine_columns = tuple(name for name in dict.fromkeys((*columns, "reason")) if name in QUARANTINE.names)
        sources = (opened.scan(*place, columns), _messages(opened.scan_quarantined(*place, quarantine_columns)))
        yield from _merge_by_offset([_add_missing_columns(source, columns) for source in sources])
    except OSError as error:
        raise MillstreamError(
            f"the table {table.url} cannot be read: {error}; if it has another path on this machine, set it with the "
            "option lake"
        ) from None


def _messages(quarantined: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a quarantine that are messages, without those that represent an unreadable batch."""
    for batch in quarantined:
        is_batch = pc.starts_with(batch.column("reason"), UNREADABLE_BATCH)
        if len(messages := batch.filter(pc.invert(is_batch))):
            yield messages


def _add_missing_columns(batches: Iterator[pa.RecordBatch], columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Add missing columns; the quarantine has no timestamp type, which is then that of creation."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(
            [
                batch.column(name) if name in batch.schema.names else pa.repeat(pa.scalar(0, pa.int32()), len(batch))
                for name in columns
            ],
            names=list(columns),
        )


def _merge_by_offset(sources: list[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    waiting = [(source, batch) for source in sources if (batch := next(source, None)) is not None]
    while len(waiting) > 1:
        reached = min(batch.column("offset")[-1].as_py() for _, batch in waiting)
        parts, kept = [], []
        for source, batch in waiting:
            count = pc.sum(pc.less_equal(batch.column("offset"), reached)).as_py() or 0
            parts.append(batch.slice(0, count))
            rest = batch.slice(count) if count < batch.num_rows else next(source, None)
            if rest is not None:
                kept.append((source, rest))
        waiting = kept
        together = pa.Table.from_batches(parts).sort_by("offset").combine_chunks()
        yield from together.to_batches()
    for source, batch in waiting:
        yield batch
        yield from source
