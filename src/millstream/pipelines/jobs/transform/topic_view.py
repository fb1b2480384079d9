"""A topic as an SQL view: the columns of its records and the fields of its payloads.

A field named like a record column, such as `key` or `timestamp`, is called `payload_key`; names are compared
case-insensitively, as in SQL. `payload` has all fields, and `payload_error` says why they could not be decoded.

Tasks report what they find in payloads, undecodable ones and new fields, through a Spark accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DataType, StringType, StructField, StructType

from millstream.pipelines.jobs.batch_loop import BatchLoop, batch_of_job, numbers_of, reading_options
from millstream.pipelines.jobs.land.decoding import DecodedPayloads, Decoder, SchemaDecoder, documents
from millstream.pipelines.jobs.land.inference import decide, grown, joined_schemas
from millstream.pipelines.jobs.transform.payload_schema import to_arrow
from millstream.pipelines.runtime.fault import MarkedTask
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.link import task_link
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.schema_decoder import SchemaRows
from millstream.pipelines.source.shape import TYPES, Column, Shape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Finding(NamedTuple):
    undecoded: int = 0
    """Messages whose payload is not a JSON object, or has a value that does not fit."""
    fields: pa.Schema | None = None
    """All fields, if there are new ones."""


Findings = dict[str, Finding]


class _FindingsParam(AccumulatorParam[Findings]):
    def zero(self, value: Findings) -> Findings:
        return {}

    def addInPlace(self, value1: Findings, value2: Findings) -> Findings:  # noqa: N802
        merged = dict(value1)
        for topic, found in value2.items():
            have = merged.get(topic, Finding())
            fields = [shape.fields for shape in (have, found) if shape.fields is not None]
            merged[topic] = Finding(have.undecoded + found.undecoded, joined_schemas(fields) if fields else None)
        return merged


class FindingsAccumulator:
    """Collects the findings of tasks; the driver reads them."""

    def __init__(self, spark: SparkSession) -> None:
        self._noted: Accumulator[Findings] = spark.sparkContext.accumulator({}, _FindingsParam())

    def note(self, topic: str, finding: Finding) -> None:
        self._noted.add({topic: finding})

    def read(self) -> Mapping[str, Finding]:
        """Return the findings since the last `clear`."""
        return self._noted.value

    def clear(self) -> None:
        """Reset the findings, while no task runs."""
        self._noted.value = {}


Rows = Iterator[pa.RecordBatch]

CLASH_PREFIX: Final = "payload_"
DOCUMENT: Final = "payload"
"""The column with all fields of the payload."""
ERROR: Final = "payload_error"
"""The column that says why a payload could not be decoded; NULL if it was."""


class Origin(Enum):
    """The part of a message that a column holds."""

    RECORD = auto()
    ERROR = auto()
    """The reason why the payload could not be read."""
    DOCUMENT = auto()
    """All fields of the payload."""
    FIELD = auto()
    """One field of the payload."""


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column of a view, with its name there and in the record or payload."""

    name: str
    source: str
    kind: DataType
    origin: Origin


@dataclass(frozen=True, slots=True)
class TopicView:
    topic: str
    columns: tuple[ViewColumn, ...]
    fields: StructType
    """The fields that payloads are decoded for; others are ignored."""
    evolves: bool = False
    """Whether to look for unknown fields."""
    by_schema: bool = False
    """Whether payloads are decoded by the registered schemas that they name."""

    @property
    def schema(self) -> StructType:
        return StructType([StructField(column.name, column.kind) for column in self.columns])

    def types(self) -> Iterator[tuple[str, str]]:
        """Return every column with its type, as text."""
        return ((column.name, column.kind.simpleString()) for column in self.columns)

    @property
    def structs(self) -> frozenset[str]:
        return frozenset(
            column.name for column in self.columns if column.origin is not Origin.RECORD and _has_fields(column.kind)
        )

    @property
    def records(self) -> tuple[str, ...]:
        named = {column.source for column in self.columns if column.origin is Origin.RECORD}
        if any(column.origin is not Origin.RECORD for column in self.columns):
            named |= {"value", "headers"} if self.by_schema else {"value"}
        return tuple(name for name in TYPES if name in named)

    def narrowed(self, names: Collection[str]) -> TopicView:
        """Keep only these columns, since decoding each of them costs time."""
        used = tuple(column for column in self.columns if column.name in names)
        read = {column.source for column in used if column.origin is Origin.FIELD}
        # Errors concern the whole payload, and new fields have no column yet.
        is_whole = self.evolves or any(column.origin in (Origin.ERROR, Origin.DOCUMENT) for column in used)
        fields = self.fields if is_whole else StructType([field for field in self.fields.fields if field.name in read])
        columns = used or tuple(column for column in self.columns if column.name == "offset")
        return replace(self, columns=columns, fields=fields)

    def example(self, spark: SparkSession) -> DataFrame:
        """Return a frame for planning, which is never run."""
        return spark.range(1).mapInArrow(_nothing, self.schema)

    def stream_example(self, spark: SparkSession) -> DataFrame:
        """Return a stream for planning, which is never started."""
        return spark.readStream.format("rate").load().mapInArrow(_nothing, self.schema)

    def frame(
        self,
        spark: SparkSession,
        loop: BatchLoop,
        ranges: Sequence[Range],
        accumulator: FindingsAccumulator,
    ) -> DataFrame:
        access = loop.reading_access([self.topic])
        fetch = fetching(tuple(ranges), loop.options.brokers, self, accumulator, access)
        return numbers_of(spark, ranges).mapInArrow(MarkedTask(fetch), self.schema)

    def frame_of_job(
        self, spark: SparkSession, brokers: str, accumulator: FindingsAccumulator, access: Access
    ) -> DataFrame:
        """Return the rows of the ranges that each job passes to its tasks, read by one task."""
        fetch = fetching(None, brokers, self, accumulator, access)
        return spark.range(0, 1, 1, 1).mapInArrow(MarkedTask(fetch), self.schema)


def view_of(topic: str, payload: StructType | None, *, by_schema: bool = False) -> TopicView:
    """Return the view of a topic with these payload fields; None leaves payloads undecoded."""
    columns = [ViewColumn(name, name, kind, Origin.RECORD) for name, kind in TYPES.items()]
    if payload is None:
        return TopicView(topic, tuple(columns), StructType())
    columns.append(ViewColumn(ERROR, ERROR, StringType(), Origin.ERROR))
    if payload.fields:
        columns.append(ViewColumn(DOCUMENT, DOCUMENT, payload, Origin.DOCUMENT))
    taken = {column.name.lower() for column in columns}
    for field in payload.fields:
        name = field.name
        while name.lower() in taken:
            name = f"{CLASH_PREFIX}{name}"
        taken.add(name.lower())
        columns.append(ViewColumn(name, field.name, field.dataType, Origin.FIELD))
    return TopicView(topic, tuple(columns), payload, by_schema=by_schema)


def fetching(
    ranges: tuple[Range, ...] | None,
    brokers: str,
    view: TopicView,
    accumulator: FindingsAccumulator,
    access: Access = NO_ACCESS,
) -> Callable[[Iterable[pa.RecordBatch]], Rows]:
    """Return the function of a task that fetches the ranges of the given numbers; without ranges, those of its job."""
    read = _reading(view, brokers, access)
    decode = decoding(view, accumulator, brokers, access)

    def records(batches: Iterable[pa.RecordBatch]) -> Rows:
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            yield from read(batch_of_job().of(view.topic) if ranges is None else [ranges[number] for number in numbers])

    return lambda batches: decode(records(batches))


def rows_of_view(
    view: TopicView, ranges: Sequence[Range], options: WriteOptions, accumulator: FindingsAccumulator
) -> Rows:
    """Yield the rows of some ranges in this process, over the client that it writes with."""
    read = _reading(view, options.brokers, options.access)
    return decoding(view, accumulator, options.brokers, options.access)(read(ranges))


def _reading(view: TopicView, brokers: str, access: Access) -> Callable[[Iterable[Range]], Rows]:
    shape = Shape(tuple(Column(name, to_arrow_type(TYPES[name], timezone="UTC")) for name in view.records))

    def read(ranges: Iterable[Range]) -> Rows:
        options = reading_options(brokers, (view.topic,), access)
        for offset_range in ranges:
            yield from read_range(offset_range, options, shape)

    return read


def decoding(
    view: TopicView, accumulator: FindingsAccumulator, brokers: str, access: Access
) -> Callable[[Iterable[pa.RecordBatch]], Rows]:
    """Return the function of a task that converts records to rows of the view."""
    schema = pa.schema([(column.name, to_arrow_type(column.kind, timezone="UTC")) for column in view.columns])
    known = to_arrow(view.fields)
    is_plain = all(column.origin is Origin.RECORD for column in view.columns)
    by_fields = Decoder(known, evolves=view.evolves)

    def decoded_by() -> Callable[[pa.RecordBatch], DecodedPayloads]:
        if not view.by_schema:
            return lambda batch: by_fields.decode(batch.column("value"))
        rows = SchemaRows(task_link(reading_options(brokers, (view.topic,), access)), view.topic)
        by_schema = SchemaDecoder(known, rows, evolves=view.evolves)
        return lambda batch: by_schema.decode(batch.column("value"), batch.column("headers"))

    def decode(batches: Iterable[pa.RecordBatch]) -> Rows:
        payloads = None if is_plain else decoded_by()
        for batch in batches:
            parts = {(Origin.RECORD, name): batch.column(name) for name in batch.schema.names}
            if payloads is not None:
                decoded = payloads(batch)
                _record_findings(decoded, batch, view, accumulator)
                parts |= {(Origin.ERROR, ERROR): decoded.reasons, (Origin.DOCUMENT, DOCUMENT): decoded.columns}
                fields = zip(known.names, decoded.columns.flatten(), strict=True)
                parts |= {(Origin.FIELD, name): array for name, array in fields}
            arrays = [parts[column.origin, column.source] for column in view.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return decode


def _has_fields(kind: DataType) -> bool:
    return isinstance(kind, StructType) or (isinstance(kind, ArrayType) and _has_fields(kind.elementType))


def _record_findings(
    decoded: DecodedPayloads, batch: pa.RecordBatch, view: TopicView, accumulator: FindingsAccumulator
) -> None:
    undecoded = len(decoded.reasons) - decoded.reasons.null_count
    fields = None
    if decoded.new_fields:
        known = to_arrow(view.fields)
        if view.by_schema:
            fields = grown(known, joined_schemas(schema for _row, schema in decoded.new_fields))
        else:
            fields = decide(documents(batch.column("value").to_pylist()), known=known, detects=False).fields
    if undecoded or fields is not None:
        accumulator.note(view.topic, Finding(undecoded, fields))


def _nothing(batches: Iterable[pa.RecordBatch]) -> Rows:
    yield from ()
