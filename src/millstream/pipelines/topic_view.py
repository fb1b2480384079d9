"""A topic as a view of SQL: the columns of its records, and the fields of its payloads beside them.

A field whose name a record has too, such as `key` or `timestamp`, stands as `payload_key`; names are compared without
regard to capital letters, as SQL does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructField, StructType

from millstream.model.errors import InvalidSetting
from millstream.pipelines.batch_loop import CLIENT_ID, numbers_of
from millstream.spark.options import BROKERS, read_options
from millstream.spark.payload import parse_payloads
from millstream.spark.ranges import Range
from millstream.spark.rows import read_range
from millstream.spark.shape import TYPES, Column, Shape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = Iterator[pa.RecordBatch]

CLASH_PREFIX: Final = "payload_"


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """One column of a view: what it is called there, and what of the message it is."""

    name: str
    source: str
    field: StructField
    is_payload: bool


@dataclass(frozen=True, slots=True)
class TopicView:
    """The columns of a topic's view."""

    topic: str
    columns: tuple[ViewColumn, ...]

    @property
    def schema(self) -> StructType:
        """As Spark has it."""
        return StructType([StructField(one.name, one.field.dataType) for one in self.columns])

    def types(self) -> Iterator[tuple[str, str]]:
        """Every column and its type, in words."""
        return ((one.name, one.field.dataType.simpleString()) for one in self.columns)

    @property
    def shape(self) -> Shape:
        """As the source reads it."""
        return Shape(
            tuple(
                Column(one.source, to_arrow_type(one.field.dataType, timezone="UTC"), one.is_payload)
                for one in self.columns
            )
        )

    def narrowed(self, names: Collection[str]) -> TopicView:
        """Only columns of these names, since every column costs."""
        used = tuple(one for one in self.columns if one.name in names)
        return TopicView(self.topic, used or tuple(one for one in self.columns if one.name == "offset"))

    def example(self, spark: SparkSession) -> DataFrame:
        """A frame to plan with, which is never run."""
        return spark.range(1).mapInArrow(fetching((), "", self), self.schema)

    def frame(self, spark: SparkSession, brokers: str, ranges: Sequence[Range]) -> DataFrame:
        """The rows of some ranges."""
        return numbers_of(spark, ranges).mapInArrow(fetching(tuple(ranges), brokers, self), self.schema)


def view_of(topic: str, payload: StructType) -> TopicView:
    """The view of a topic whose payloads have these fields."""
    columns = [ViewColumn(name, name, StructField(name, kind), False) for name, kind in TYPES.items()]
    taken = {name.lower() for name in TYPES}
    for field in payload.fields:
        name = field.name
        while name.lower() in taken:
            name = f"{CLASH_PREFIX}{name}"
        taken.add(name.lower())
        columns.append(ViewColumn(name, field.name, field, True))
    return TopicView(topic, tuple(columns))


def fetching(ranges: tuple[Range, ...], brokers: str, view: TopicView) -> Callable[[Iterable[pa.RecordBatch]], Rows]:
    """What a task does: fetch the records of the ranges whose numbers it is given."""
    shape, schema = view.shape, _arrow_schema(view)

    def fetch(batches: Iterable[pa.RecordBatch]) -> Rows:
        options = read_options({BROKERS: brokers, "subscribe": view.topic, "kafka.client.id": CLIENT_ID})
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in read_range(ranges[number], options, shape):
                    yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    return fetch


def decoding(view: TopicView) -> Callable[[Iterable[pa.RecordBatch]], Rows]:
    """What a task of a stream does: put the fields of payloads beside the columns of records."""
    schema = _arrow_schema(view)
    payload = [column for column in view.shape.columns if column.is_payload]

    def decode(batches: Iterable[pa.RecordBatch]) -> Rows:
        for batch in batches:
            fields = iter(parse_payloads(batch.column("value"), payload) if payload else ())
            arrays = [next(fields) if one.is_payload else batch.column(one.source) for one in view.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return decode


def parse_schemas(texts: Mapping[str, str]) -> dict[str, StructType]:
    """The payload schemas that a pipeline gives, by topic."""
    from pyspark.errors import PySparkException

    found: dict[str, StructType] = {}
    for topic, text in texts.items():
        try:
            schema = StructType.fromDDL(text)
        except PySparkException as error:
            reason = str(error).partition("\n")[0]
            raise InvalidSetting(f"the schema of {topic!r} is not in Spark's notation: {reason}") from None
        if not isinstance(schema, StructType):
            raise InvalidSetting(f"the schema of {topic!r} has to name columns, such as `id long, amount double`")
        found[topic] = schema
    return found


def _arrow_schema(view: TopicView) -> pa.Schema:
    return pa.schema([(one.name, to_arrow_type(one.field.dataType, timezone="UTC")) for one in view.columns])
