"""The schema of rows: the columns of Spark's Kafka source, those that a query selects, and typed payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.core.errors import InvalidSetting
from millstream.core.setting import suggestion
from millstream.pipelines.source.options import BY_SCHEMA, ReadOptions
from millstream.protocol.records.arrow import NAMES

_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

TYPES: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": _HEADERS,
}

RANGE_SCHEMA: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("start", LongType()),
        StructField("end", LongType()),
    ]
)
"""One row per range, in the ranges mode; its consumer fetches the records."""

ERROR: Final = "payload_error"
"""With decode=schema: the column that says why a payload could not be decoded."""
_MESSAGES: Final = "millstream.messages"
"""In the metadata of that column: the Protobuf messages whose fields are the columns."""
_PREFIX: Final = "payload_"
_TAKEN: Final = frozenset({*(name.lower() for name in TYPES), "error"})

_TEXT: Final = ("key", "value")
"""Columns that may be requested as text."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: pa.DataType
    is_payload: bool = False
    """Whether it is a field of the payload, not of the record."""


@dataclass(frozen=True, slots=True)
class Shape:
    columns: tuple[Column, ...]
    by_schema: bool = False
    """Whether payloads are decoded by the registered schemas that they name."""
    messages: tuple[str, ...] = ()
    """The Protobuf messages whose fields are the columns; none if the query gave the columns."""

    @property
    def record_names(self) -> tuple[str, ...]:
        needed = {column.name for column in self.columns if not column.is_payload}
        if self.payload:
            needed.add("value")
        if self.by_schema:
            needed.add("headers")
        return tuple(name for name in NAMES if name in needed)

    @property
    def payload(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_payload)


def default_schema(options: ReadOptions) -> StructType:
    """Return the schema of a query that gives none."""
    if options.ranges:
        return RANGE_SCHEMA
    if options.value_format == "json":
        raise InvalidSetting(
            "valueFormat=json needs the fields to read: declare them with .schema('order_id long, total double'), "
            "together with any of the columns of a record"
        )
    if options.value_format == BY_SCHEMA:
        return _with_payload(options)
    names = options.columns or tuple(name for name in NAMES if name != "headers" or options.include_headers)
    return StructType([StructField(name, _type_of(name, options)) for name in names])


def shape_of(schema: StructType, options: ReadOptions) -> Shape:
    """Validate the user's schema; raise `InvalidSetting` if rows cannot have it."""
    if options.ranges:
        return Shape(())
    columns = tuple(_column(field, options) for field in schema.fields)
    named_messages = [field.metadata[_MESSAGES] for field in schema.fields if _MESSAGES in field.metadata]
    messages = tuple(named_messages[0].split()) if named_messages else (options.message,) if options.message else ()
    return Shape(columns, by_schema=options.value_format == BY_SCHEMA, messages=messages)


def _with_payload(options: ReadOptions) -> StructType:
    """Return the columns of records, and the fields that the topics' schemas have."""
    from millstream.pipelines.source.schema_decoder import payload_of

    names = options.columns or tuple(name for name in NAMES if name != "headers" or options.include_headers)
    fields = [StructField(name, TYPES[name]) for name in names]
    payload, messages = payload_of(options)
    fields.append(StructField(ERROR, StringType(), metadata={_MESSAGES: " ".join(messages)}))
    fields += [StructField(payload_column(field.name), from_arrow_type(field.type)) for field in payload]
    return StructType(fields)


def payload_column(field: str) -> str:
    """Return the column of a payload field: its name, unless a record column has that name."""
    return f"{_PREFIX}{field}" if field.lower() in _TAKEN else field


def payload_field(column: str) -> str:
    rest = column.removeprefix(_PREFIX)
    return rest if rest.lower() in _TAKEN else column


def _column(field: StructField, options: ReadOptions) -> Column:
    if field.name == ERROR and options.value_format == BY_SCHEMA:
        return Column(ERROR, pa.string(), is_payload=True)
    if field.name not in TYPES:
        if options.value_format not in ("json", BY_SCHEMA):
            hint = suggestion(field.name, NAMES) or f"; there are: {', '.join(NAMES)}"
            raise InvalidSetting(
                f"the schema names {field.name!r}, which records do not have{hint} (fields of a payload need the "
                "option valueFormat=json or decode=schema)"
            )
        return Column(field.name, to_arrow_type(field.dataType, timezone="UTC"), is_payload=True)
    expected = TYPES[field.name]
    if field.dataType == expected:
        return Column(field.name, to_arrow_type(expected, timezone="UTC"))
    if field.name in _TEXT and isinstance(field.dataType, StringType):
        return Column(field.name, pa.string())
    raise InvalidSetting(
        f"the schema has {field.name} as {field.dataType.simpleString()}; in a record it is {expected.simpleString()}"
    )


def _type_of(name: str, options: ReadOptions) -> DataType:
    is_text = name in options.text_columns or (name == "value" and options.value_format == "string")
    return StringType() if is_text else TYPES[name]
