"""The payload fields of topics: given with the pipeline, or inferred from messages.

Inferred fields are stored in the pipeline's folder and only grow: a field keeps its type permanently. If the folder is
lost they are inferred again. A stream with state keeps the fields that it started with, since its state consists of
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, NullType, StructField, StructType

from millstream.core.errors import InvalidSetting, SchemaRegistryError
from millstream.core.schema import RegistryCode
from millstream.pipelines.jobs.batch_loop import BatchLoop
from millstream.pipelines.jobs.land.decoding import documents
from millstream.pipelines.jobs.land.inference import decide, grown
from millstream.pipelines.source.options import BROKERS, WriteOptions, read_options
from millstream.pipelines.source.ranges import Range, ranges_between
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.schema_decoder import payload_fields_of
from millstream.pipelines.source.shape import default_schema, shape_of

SAMPLE_MAX: Final = 1000
"""The number of messages per partition in a sample, the newest ones."""
SAMPLE_BYTES_MAX: Final = 4 * 1024 * 1024
"""The approximate bytes per partition in a sample."""
SAMPLE_ALL_MAX: Final = 20_000
"""The number of messages of all partitions in a sample, unless there are more partitions."""

_UNREAD: Final = (MapType, BinaryType, NullType)


class PayloadSchemas:
    """The fields of a statement's topics; None where payloads are not decoded."""

    def __init__(
        self,
        declared: Mapping[str, StructType],
        inferred: Mapping[str, StructType],
        *,
        decodes: bool,
        by_schema: bool = False,
    ) -> None:
        self._declared = declared
        self._inferred = dict(inferred)
        self._decodes = decodes
        self.by_schema = by_schema
        """Whether payloads are decoded by the registered schemas that they name."""

    @property
    def inferred(self) -> Mapping[str, StructType]:
        return self._inferred

    def fields(self, topic: str) -> StructType | None:
        return (self._declared.get(topic) or self._inferred.get(topic, StructType())) if self._decodes else None

    def grows(self, topic: str) -> bool:
        """Whether new fields are added as they appear."""
        return self._decodes and topic not in self._declared

    def grown_by(self, new_fields: Mapping[str, pa.Schema]) -> PayloadSchemas | None:
        """Return the schemas extended by new fields; None if there are none."""
        larger = dict(self._inferred)
        for topic, fields in new_fields.items():
            if self.grows(topic):
                known = to_arrow(self._inferred.get(topic, StructType()))
                larger[topic] = to_spark(grown(known, fields))
        is_same = larger == self._inferred
        if is_same:
            return None
        return PayloadSchemas(self._declared, larger, decodes=self._decodes, by_schema=self.by_schema)


def parse_schemas(texts: Mapping[str, str]) -> dict[str, StructType]:
    """Parse the payload schemas of a pipeline's settings, by topic."""
    from pyspark.errors import PySparkException

    schemas: dict[str, StructType] = {}
    for topic, text in texts.items():
        try:
            schema = StructType.fromDDL(text)
        except PySparkException as error:
            reason = str(error).partition("\n")[0]
            raise InvalidSetting(f"the schema of {topic!r} is not in Spark's notation: {reason}") from None
        if not isinstance(schema, StructType) or not schema.fields:
            raise InvalidSetting(f"the schema of {topic!r} has to name columns, such as `id long, amount double`")
        for field in schema.fields:
            _check_type(topic, field.name, field.dataType)
        schemas[topic] = schema
    return schemas


def _check_type(topic: str, name: str, kind: DataType) -> None:
    if isinstance(kind, _UNREAD):
        raise InvalidSetting(
            f"the schema of {topic!r} has {name} as {kind.simpleString()}, which is not supported for payloads; "
            "declare it as string to keep its JSON"
        )
    if isinstance(kind, ArrayType):
        _check_type(topic, name, kind.elementType)
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check_type(topic, f"{name}.{field.name}", field.dataType)


def to_arrow(schema: StructType) -> pa.Schema:
    return pa.schema([pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC")) for field in schema.fields])


def to_spark(schema: pa.Schema) -> StructType:
    return StructType([StructField(field.name, from_arrow_type(field.type)) for field in schema])


def sample_ranges(loop: BatchLoop, topic: str, count: int = SAMPLE_MAX) -> list[Range]:
    resolver = loop.resolver([topic])
    partitions = resolver.partitions()
    first, last = resolver.earliest(partitions), resolver.latest(partitions)
    start = {
        name: {
            number: max(first[name][number], end - min(count, max(1, SAMPLE_ALL_MAX // len(ends))))
            for number, end in ends.items()
        }
        for name, ends in last.items()
    }
    return ranges_between(start, last)


def find_fields(loop: BatchLoop, topic: str) -> pa.Schema | None:
    """Infer the payload fields from a sample; None if there is no message yet."""
    values = [value for sample_range in sample_ranges(loop, topic) for value in _payloads(sample_range, loop.options)]
    if not values:
        return None
    return decide(documents(values), known=pa.schema([]), detects=False).fields


def registered_fields(loop: BatchLoop, topic: str) -> pa.Schema | None:
    """Return the fields that the schemas of a topic have; None if none is registered yet."""
    options = read_options({BROKERS: loop.options.brokers, "subscribe": topic}, loop.options.access)
    try:
        return payload_fields_of(options)
    except SchemaRegistryError as error:
        if error.code == RegistryCode.SUBJECT_NOT_FOUND:
            return None
        raise


class StoredSchemas:
    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> dict[str, StructType]:
        """Return the schemas by topic; empty if there is no readable file."""
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return {topic: StructType.fromJson(schema) for topic, schema in document.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, schemas: Mapping[str, StructType]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f"{self._file.stem}-{uuid4().hex}.tmp")
        new.write_text(json.dumps({topic: schema.jsonValue() for topic, schema in schemas.items()}), encoding="utf-8")
        os.replace(new, self._file)


def _payloads(offset_range: Range, writing: WriteOptions) -> Iterator[bytes]:
    reader_options = {BROKERS: writing.brokers, "subscribe": offset_range.topic, "columns": "value"}
    options = read_options(reader_options, writing.access)
    size = 0
    for batch in read_range(
        offset_range, options, shape_of(default_schema(options), options), skip=lambda _batch: None
    ):
        column = batch.column("value")
        yield from (value for value in column.to_pylist() if value is not None)
        size += column.nbytes
        if size > SAMPLE_BYTES_MAX:
            return
