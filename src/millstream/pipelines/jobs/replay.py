"""Replays messages of a topic, from the log or from its landed table, into another topic: exactly once and resumable.

Each step commits its messages and the position after them with one record at the coordinator, as pipelines do (see
`batch_loop.py`). The position is the offsets of the group `replay-NAME`. Where the replay ends is fixed when it first
starts, as the offsets of the group `replay-NAME.end`. So however a replay ends, the same command continues after the
last commit; a second one at the same time can commit nothing twice, since steps are numbered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import InvalidRequest, NotFound, TransactionRejected
from millstream.core.headers import MESSAGE_ID
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.batch_commit import Batch, abort_batch, next_batch
from millstream.pipelines.source.landed_history import landings, read_landed
from millstream.pipelines.source.link import Link, task_link
from millstream.pipelines.source.offset_resolver import OffsetResolver
from millstream.pipelines.source.options import BROKERS, SourceOffsets, StartingTimestamp, WriteOptions, read_options
from millstream.pipelines.source.ranges import Range, Table, admitted, commit_offsets, ranges_between, stable_offsets
from millstream.pipelines.source.row_producer import write_with_offsets
from millstream.pipelines.source.rows import RowFilter, read_range
from millstream.pipelines.source.shape import default_schema, shape_of
from millstream.protocol.private.transactions import Transactions
from millstream.protocol.records.arrow import from_arrow
from millstream.protocol.wire.group_offsets import GroupMember

GROUP_PREFIX: Final = "replay-"
END_SUFFIX: Final = ".end"
ORIGIN_HEADER: Final = "replayed-from"
"""Says where a message comes from: topic, partition and offset."""
CLIENT_ID: Final = "millstream-replay"
STEP_MESSAGES: Final = 50_000
"""How many offsets one commit covers at most."""
REFUSALS_MAX: Final = 5
"""How often another process may have taken a step's number before the replay gives up."""
STEP_S: Final = 0.25
"""How long a step takes when the rate is bounded; also how much lost time the next steps make up for."""
_COLUMNS: Final = "key,value,headers,timestamp,offset"
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

Offsets = dict[str, dict[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    topic: str
    into: str
    from_table: bool = False
    where: str = ""
    """A condition in the filter language of subscriptions."""
    since_ms: int | None = None
    until_ms: int | None = None
    """Exclusive."""
    rate: float = 0.0
    """Messages per second at most; 0 for no limit."""
    name: str = ""

    @property
    def title(self) -> str:
        """Its name: the given one, or one derived from the order, so that the same command resumes it."""
        if self.name:
            return self.name
        parts = (self.topic, self.into, self.from_table, self.where, self.since_ms, self.until_ms)
        return f"{self.topic}-{sha256(repr(parts).encode()).hexdigest()[:12]}"

    @property
    def group(self) -> str:
        return f"{GROUP_PREFIX}{self.title}"


class Progress(NamedTuple):
    examined: int
    """Messages that were read in this run."""
    written: int
    left: int
    """Offsets that are not examined yet."""


class RateLimiter:
    """Bounds the messages of any second, not their average: after a stall, only `STEP_S` of it is made up for."""

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate = rate
        self._due_s = now_s

    def pause_s(self, written: int, now_s: float) -> float:
        """Return how long to wait after a step that has just been committed."""
        self._due_s = max(self._due_s, now_s - STEP_S) + written / self._rate
        return max(0.0, self._due_s - now_s)


class Replay:
    """A replay; all of its methods block."""

    def __init__(self, order: ReplayOrder, brokers: str, access: Access = NO_ACCESS) -> None:
        if order.into == order.topic:
            raise InvalidRequest(
                f"messages of {order.topic!r} cannot be replayed into the same topic; name another one"
            )
        self.order = order
        self._brokers = brokers
        reader_options = {BROKERS: brokers, "subscribe": order.topic, "kafka.client.id": CLIENT_ID, "columns": _COLUMNS}
        self._read = read_options(reader_options, access)
        self._write = WriteOptions(brokers=brokers, access=access, client_id=CLIENT_ID, topic=order.into)
        self._resolver = OffsetResolver(self._read)
        self._shape = shape_of(default_schema(self._read), self._read)
        self._query = order.group
        self._table: Table | None = None
        if order.where:
            # Reports an invalid filter at once, with its position.
            RowFilter(order.where, Range(order.topic, 0, 0, 0))

    def run(self, report: Callable[[Progress], None] = lambda _: None, *, dry: bool = False) -> Progress:
        """Replay everything, or only count in a dry run; return how much that was."""
        link = task_link(self._write)
        topics = link.call(link.client.metadata([self.order.topic, self.order.into])).topics
        for name in (self.order.topic, self.order.into):
            if name not in topics:
                raise NotFound(f"topic {name!r} does not exist; create it with: millstream topic create {name}")
        self._topic_id = str(topics[self.order.topic].topic_id)
        if self.order.from_table:
            self._table = self._find_table(link)
        number, position = self._load_position(link)
        first, end = self._bounds(link, dry=dry)
        at = {
            topic: {n: max(offset, position.get(topic, {}).get(n, 0)) for n, offset in numbers.items()}
            for topic, numbers in first.items()
        }
        examined = written = refusals = 0
        pace = RateLimiter(self.order.rate, time.monotonic())
        while ranges_between(at, end):
            until = admitted(at, end, self._step_size)
            rows = self._rows(at, until)
            if dry:
                count, done = sum(batch.num_rows for batch in rows), True
            else:
                count, done = self._commit(link, number, rows, until)
            if not done:
                refusals += 1
                if refusals > REFUSALS_MAX:
                    raise InvalidRequest(f"replay {self.order.title!r} is being run by another process")
                number, position = self._load_position(link)
                at = {topic: {**numbers, **position.get(topic, {})} for topic, numbers in at.items()}
                continue
            number, refusals = number + 1, 0
            examined += sum(map(len, ranges_between(at, until)))
            written += count
            at = until
            report(Progress(examined, written, sum(map(len, ranges_between(at, end)))))
            if self.order.rate and not dry:
                time.sleep(pace.pause_s(count, time.monotonic()))
        return Progress(examined, written, 0)

    # -- internals ------------------------------------------------------------------------------------------------

    @property
    def _step_size(self) -> int:
        """Short steps when the rate is bounded, so that messages arrive evenly."""
        return min(STEP_MESSAGES, max(1, round(self.order.rate * STEP_S))) if self.order.rate else STEP_MESSAGES

    def _load_position(self, link: Link) -> tuple[int, Offsets]:
        """Return the number of the next step and the position."""
        return next_batch(link, self._query), link.call(stable_offsets(link.client, self.order.group))

    def _bounds(self, link: Link, *, dry: bool) -> tuple[Offsets, Offsets]:
        """Return the first offset of each partition, and the end, which is fixed when the replay begins."""
        order, resolver = self.order, self._resolver
        partitions = resolver.partitions()
        fixed = link.call(stable_offsets(link.client, f"{order.group}{END_SUFFIX}"))
        if self._table is not None:
            first: Offsets = {order.topic: dict.fromkeys(partitions[order.topic], 0)}
            end = self._landed_ends(self._table, partitions[order.topic])
        else:
            earliest, end = resolver.earliest(partitions), resolver.latest(partitions)
            since = earliest
            if order.since_ms is not None:
                since = resolver.resolve(StartingTimestamp(order.since_ms, or_latest=True), partitions, "starting")
            first = {
                order.topic: {n: max(offset, earliest[order.topic][n]) for n, offset in since[order.topic].items()}
            }
        if fixed.get(order.topic):
            end = {order.topic: fixed[order.topic]}
            first = {
                order.topic: {n: min(first[order.topic].get(n, 0), offset) for n, offset in end[order.topic].items()}
            }
        elif not dry:
            link.call(commit_offsets(link.client, f"{order.group}{END_SUFFIX}", end, GroupMember()))
        return first, end

    def _rows(self, start: Offsets, end: Offsets) -> Iterator[pa.RecordBatch]:
        """Yield the matching messages between two positions, as they are written."""
        for offset_range in ranges_between(start, end):
            row_filter = RowFilter(self.order.where, offset_range) if self.order.where else None
            if self._table is None:
                batches = read_range(offset_range, self._read, self._shape)
            else:
                batches = read_landed(
                    Range(
                        offset_range.topic, offset_range.partition, offset_range.start, offset_range.end, self._table
                    ),
                    self._shape,
                )
            for batch in batches:
                kept = self._within_time(batch)
                if row_filter is not None and kept.num_rows:
                    kept = kept.filter(row_filter.matches(from_arrow(kept)))
                if kept.num_rows:
                    yield self._with_origin(kept, offset_range)

    def _within_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        stamps = batch.column("timestamp").cast(pa.int64())
        if self.order.since_ms is not None:
            kept = pc.greater_equal(stamps, self.order.since_ms * 1000)
            batch, stamps = batch.filter(kept), stamps.filter(kept)
        if self.order.until_ms is not None:
            batch = batch.filter(pc.less(stamps, self.order.until_ms * 1000))
        return batch

    def _with_origin(self, batch: pa.RecordBatch, offset_range: Range) -> pa.RecordBatch:
        offsets = batch.column("offset").cast(pa.string())
        origins = pc.binary_join_element_wise(pa.scalar(f"{offset_range.topic}/{offset_range.partition}"), offsets, "/")
        ids = pc.binary_join_element_wise(pa.scalar(f"{self._topic_id}/{offset_range.partition}"), offsets, "/")
        headers = add_headers(batch.column("headers"), origins.cast(pa.binary()), ids.cast(pa.binary()))
        columns = {name: batch.column(name) for name in ("key", "value", "timestamp")}
        return pa.RecordBatch.from_pydict({**columns, "headers": headers})

    def _commit(self, link: Link, number: int, rows: Iterator[pa.RecordBatch], until: Offsets) -> tuple[int, bool]:
        """Write a step and its position; return how many messages it has, and whether this run committed it."""
        batch = Batch(self._query, number, uuid4().hex[:12])
        try:
            part = write_with_offsets(self._write, batch, rows, SourceOffsets(self.order.group, until), {})
            members = [part.member] if part.member is not None else []
            done = link.call(Transactions(link.client).complete_batch(batch.query, batch.number, members))
        except BaseException as error:
            with suppress(Exception):
                abort_batch(self._write, batch)
            if isinstance(error, TransactionRejected):
                return 0, False
            raise
        return part.rows, done

    def _find_table(self, link: Link) -> Table:
        for settings, lake in landings(link):
            if settings.takes(self.order.topic):
                return Table(f"{lake}/{self.order.topic}", settings.format, self._topic_id)
        raise NotFound(f"no pipeline lands topic {self.order.topic!r} message by message, so it has no table to replay")

    def _landed_ends(self, table: Table, numbers: list[int]) -> Offsets:
        from millstream.pipelines.lake.table import open_table

        opened = open_table(table.url, format=table.format)
        if opened.schema() is None:
            raise NotFound(f"nothing of topic {self.order.topic!r} is landed yet")
        reached = opened.reached([(table.topic_id, number) for number in numbers])
        return {self.order.topic: {number: reached.get((table.topic_id, number), 0) for number in numbers}}


def add_headers(headers: pa.Array, origins: pa.Array, ids: pa.Array) -> pa.Array:
    """Add to each list of headers its origin, and the message's id unless it has one."""
    rows = len(headers)
    flat = headers.flatten()
    lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy().astype(np.int64)
    parents = np.repeat(np.arange(rows), lengths)
    is_id = pc.fill_null(pc.equal(flat.field("key"), MESSAGE_ID), False).to_numpy(zero_copy_only=False)
    # An id without a value does not count.
    is_id &= pc.fill_null(pc.greater(pc.binary_length(flat.field("value")), 0), False).to_numpy(zero_copy_only=False)
    lacks_id = np.bincount(parents[is_id], minlength=rows) == 0
    counts = lengths + 1 + lacks_id
    starts = np.concatenate(([0], np.cumsum(counts)))
    old_starts = np.concatenate(([0], np.cumsum(lengths)))
    order = np.empty(starts[-1], np.int64)
    order[starts[parents] + np.arange(len(flat)) - old_starts[parents]] = np.arange(len(flat))
    order[starts[:-1] + lengths] = len(flat) + np.arange(rows)
    order[(starts[:-1] + lengths + 1)[lacks_id]] = len(flat) + rows + np.flatnonzero(lacks_id)
    keys = pa.concat_arrays(
        [flat.field("key"), *(pa.repeat(pa.scalar(name), rows) for name in (ORIGIN_HEADER, MESSAGE_ID))]
    )
    values = pa.concat_arrays([flat.field("value"), origins, ids])
    taken = pa.array(order)
    pairs = pa.StructArray.from_arrays([keys.take(taken), values.take(taken)], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), pairs).cast(_HEADERS)
