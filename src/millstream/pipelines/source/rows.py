"""The records of a range as Arrow batches: fetched from the leader and decoded in compiled code, while the next fetch
runs.

A task holds at most the response being decoded and the one being received, each at most
`kafka.max.partition.fetch.bytes` (or one batch, if that is larger).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.client.admin.cluster_status import find_lost
from millstream.core.errors import CorruptBatch, LostData, OffsetOutOfRange, RequestTimedOut, UnreadableData
from millstream.core.heap import freeze_worker_heap
from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.pipelines.source.link import Link, task_link
from millstream.pipelines.source.options import OFFSET_EARLIEST, ReadOptions
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.schema_decoder import SchemaRows, columns_of
from millstream.pipelines.source.shape import ERROR, Column, Shape, payload_field
from millstream.protocol.filter.batch import ColumnBatch
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.records.arrow import to_arrow
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.decoder import FIELDS, Batches, Skip, UnreadableBatch, decode_columns, find_batches
from millstream.protocol.wire.fetch import READ_COMMITTED, FetchedPartition

_logger = logging.getLogger(__name__)

# The nesting depth of JSON texts, checked before parsing: parsers recurse for every level.
#
# Arrow's compiled parser overflows its stack on a payload of a hundred thousand brackets, which ends the process;
# Python's gives up at a depth that depends on the caller.

NESTING_MAX: Final = 200
"""The most levels of objects and arrays."""

_STRINGS: Final = r'(?s)"(?:[^"\\]|\\.)*"'
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def is_text_too_deep(text: str) -> bool:
    return text.count("{") + text.count("[") > NESTING_MAX and is_too_deep(pa.array([text], pa.string()))


def is_too_deep(texts: pa.Array) -> bool:
    """Whether any of the texts is nested too deeply to be parsed."""
    opened = pc.add(pc.count_substring(texts, "{"), pc.count_substring(texts, "["))
    # Hardly any text has enough brackets to need a closer look.
    many = texts.filter(pc.greater(opened, NESTING_MAX))
    if not len(many):
        return False
    # Brackets within strings do not count.
    return any(_depth(text) > NESTING_MAX for text in pc.replace_substring_regex(many, _STRINGS, ""))


def _depth(text: pa.StringScalar) -> int:
    """Return the depth of a text without strings; exact as far as a parser gets."""
    steps = _STEPS[np.frombuffer(text.as_buffer(), np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


_EMPTY = b"{}"


def parse_payloads(values: pa.Array, columns: Sequence[Column]) -> list[pa.Array]:
    """Return the fields of every payload, a column each."""
    schema = pa.schema([pa.field(column.name, column.kind) for column in columns])
    parsed = _parse_together(values, schema)
    return _parse_singly(values, schema) if parsed is None else parsed


def _parse_together(values: pa.Array, schema: pa.Schema) -> list[pa.Array] | None:
    """Parse everything at once; None if Arrow's parser refuses a payload."""
    if not len(values):
        return [pa.array([], field.type) for field in schema]
    documents = values.fill_null(_EMPTY).to_pylist() if values.null_count else values.to_pylist()
    if any(b"\n" in document or not document.lstrip().startswith(b"{") for document in documents):
        return None
    try:
        if is_too_deep(values.cast(pa.string())):
            return None
    except pa.ArrowInvalid:
        # Some payload is not text.
        return None
    text = b"\n".join(documents)
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = pj.read_json(pa.BufferReader(text), reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if table.num_rows != len(values):
        return None
    return [table.column(field.name).combine_chunks().cast(field.type) for field in schema]


def _parse_singly(values: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    documents = [_document(value) for value in values.to_pylist()]
    return [
        pa.array([_value_if_fitting(document.get(field.name), field.type) for document in documents], field.type)
        for field in schema
    ]


def _document(value: bytes | None) -> dict[str, Any]:
    try:
        text = (value or _EMPTY).decode("utf-8")
        document = {} if is_text_too_deep(text) else json.loads(text)
        # An unpaired surrogate is not a character, and no column can hold it.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _value_if_fitting(value: Any, kind: pa.DataType) -> Any:
    """Return the value if its type fits, else None."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if isinstance(value, bool) != pa.types.is_boolean(kind) or (isinstance(value, float) and pa.types.is_integer(kind)):
        return None
    try:
        if pa.types.is_timestamp(kind) and isinstance(value, str):
            return pa.scalar(value).cast(kind).as_py()
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError, TypeError):
        return None


_WAIT_MS = 500


def read_range(
    offset_range: Range, options: ReadOptions, shape: Shape, *, skip: Skip | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, in order; see `read_columns`."""
    row_filter = RowFilter(options.filter, offset_range) if options.filter else None
    names = shape.record_names
    fields = FIELDS.intersection(names) | (row_filter.fields if row_filter is not None else frozenset())
    schemas = SchemaRows(task_link(options), offset_range.topic, shape.messages) if shape.by_schema else None
    for columns in read_columns(offset_range, options, fields, skip=skip):
        batch = to_arrow(columns, topic=offset_range.topic, partition=offset_range.partition, names=names)
        if row_filter is not None:
            batch = batch.filter(row_filter.matches(columns))
        if batch.num_rows:
            yield shaped(batch, shape, schemas)
    freeze_worker_heap()


def read_columns(
    offset_range: Range, options: ReadOptions, fields: frozenset[str], *, skip: Skip | None = None
) -> Iterator[Columns]:
    """Yield the records of a range, in order, with some fields decoded.

    Batches that cannot be read, or decompress to too much, and records that the broker's disk lost permanently, are
    reported to `skip` and skipped. Without it, the option `failOnUnreadable` decides.
    """
    link = task_link(options)
    skip = skip or partial(_skip_unreadable, offset_range, options)
    for batches, start, response in _fetch_range(link, offset_range, options, skip):
        yield from decode_columns(
            batches,
            fields=fields,
            start_offset=start,
            end_offset=offset_range.end,
            aborted=response.aborted,
            skip=skip,
        )


def _skip_unreadable(offset_range: Range, options: ReadOptions, batch: UnreadableBatch) -> None:
    error = UnreadableData(offset_range.topic, offset_range.partition, batch.start, batch.end, batch.reason)
    if options.fail_on_unreadable:
        raise error
    _logger.warning("%s, so they are skipped", error.finding)


class RowFilter:
    """A filter in the subscriptions' filter language, on whole batches."""

    def __init__(self, text: str, offset_range: Range) -> None:
        self._filter = compile_filter(text)
        self._range = offset_range

    @property
    def fields(self) -> frozenset[str]:
        return self._filter.uses.fields

    def matches(self, columns: Columns) -> pa.Array:
        offset_range = self._range
        batch = ColumnBatch(columns, topic=offset_range.topic, partition=offset_range.partition, uses=self._filter.uses)
        return pa.array(self._filter.matches(batch))


def shaped(batch: pa.RecordBatch, shape: Shape, schemas: SchemaRows | None = None) -> pa.RecordBatch:
    """Convert rows to the query's schema: payload fields parsed, text decoded."""
    payload = shape.payload
    fields: Iterator[pa.Array] = iter(())
    if payload and schemas is not None:
        fields = iter(_decode_payloads(batch, payload, schemas))
    elif payload:
        fields = iter(parse_payloads(batch.column("value"), payload))
    arrays = [
        next(fields) if column.is_payload else _cast(batch.column(column.name), column) for column in shape.columns
    ]
    return pa.RecordBatch.from_arrays(
        arrays, schema=pa.schema([(column.name, column.kind) for column in shape.columns])
    )


def _decode_payloads(batch: pa.RecordBatch, columns: Sequence[Column], schemas: SchemaRows) -> list[pa.Array]:
    """Return the fields of every payload, decoded by the schema that it names; no fields and a reason if that fails."""
    fields = [pa.field(payload_field(column.name), column.kind) for column in columns if column.name != ERROR]
    read = schemas.read(batch.column("value"), batch.column("headers"))
    arrays = iter(columns_of(read, pa.schema(fields)).flatten())
    reasons = pa.array(read.reasons, pa.string())
    return [reasons if column.name == ERROR else next(arrays) for column in columns]


def _cast(array: pa.Array, column: Column) -> pa.Array:
    if array.type == column.kind:
        return array
    try:
        return array.cast(column.kind)
    except pa.ArrowInvalid:
        # Spark shows bytes that are not UTF-8 with replacement characters.
        texts = (None if value is None else value.decode("utf-8", "replace") for value in array.to_pylist())
        return pa.array(texts, column.kind)


def _fetch_range(
    link: Link, offset_range: Range, options: ReadOptions, skip: Skip
) -> Iterator[tuple[Batches, int, FetchedPartition]]:
    """Yield the responses of a range, each with the offset from which it counts: batches may start before it.

    The next fetch is sent before a response is yielded.
    """
    position = offset_range.start
    deadline = time.monotonic() + options.timeout_s
    coming = _fetch_async(link, offset_range, position, options)
    while True:
        try:
            response = coming.result()
        except (OffsetOutOfRange, CorruptBatch) as error:
            if isinstance(error, CorruptBatch):
                position = _skip_damage(link, offset_range, position, skip, error)
            else:
                position = _skip_lost(link, offset_range, position, options)
            if position >= offset_range.end:
                return
            coming = _fetch_async(link, offset_range, position, options)
            continue
        batches = find_batches(response.records)
        reached = batches.next_offset
        if reached is None:
            if _limit(response, options) >= offset_range.end:
                # Everything up to the end was examined, and no record remains.
                return
            if time.monotonic() > deadline:
                raise RequestTimedOut(
                    f"{offset_range.topic}-{offset_range.partition} ends at {_limit(response, options)}, "
                    f"but {offset_range.end} was planned"
                )
            # A new leader may not know the followers' progress yet.
            coming = _fetch_async(link, offset_range, position, options)
            continue
        deadline = time.monotonic() + options.timeout_s
        start, position = position, max(position, reached)
        is_last = position >= offset_range.end
        if not is_last:
            coming = _fetch_async(link, offset_range, position, options)
        yield batches, start, response
        if is_last:
            return


def _limit(response: FetchedPartition, options: ReadOptions) -> int:
    return response.last_stable if options.isolation == READ_COMMITTED else response.high_watermark


def _fetch_async(link: Link, offset_range: Range, offset: int, options: ReadOptions) -> Future[FetchedPartition]:
    return link.start(
        link.client.fetch(
            offset_range.topic,
            offset_range.partition,
            offset,
            max_bytes=options.fetch_bytes,
            max_wait_ms=_WAIT_MS,
            isolation=options.isolation,
        )
    )


def _skip_lost(link: Link, offset_range: Range, position: int, options: ReadOptions) -> int:
    """Return the first offset after deleted ones; raise unless the query tolerates the gap."""
    # The error need not contain the log start offset.
    listed = link.call(link.client.list_offsets(offset_range.topic, {offset_range.partition: OFFSET_EARLIEST}))
    start = int(listed[offset_range.partition].offset)
    first = min(start, offset_range.end) if start > position else offset_range.end
    lost = LostData([(offset_range.topic, offset_range.partition, position, first)])
    if options.fail_on_data_loss:
        raise lost
    _logger.warning("%s; failOnDataLoss is false, so the query continues", lost)
    return first


def _skip_damage(link: Link, offset_range: Range, position: int, skip: Skip, error: CorruptBatch) -> int:
    """Return the offset after a range that the broker's disk lost; raise while another replica may restore it."""
    lost = link.call(find_lost(link.client, offset_range.topic, offset_range.partition, position))
    if lost is None:
        raise error
    end = min(lost.end, offset_range.end)
    skip(UnreadableBatch(position, end, NO_TIMESTAMP_MS, "the disk of the broker lost them"))
    return end
