"""The fields that the payloads of topics have: given with the pipeline, or found in the messages.

What was found is kept in the pipeline's folder, and only grows: a field that was found has its type for good. Where the
folder is lost, fields are found anew. A stream that remembers messages has the fields that it began with, since its
state is made of them.
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

from millstream.core.errors import InvalidSetting
from millstream.pipelines.jobs.batch_loop import BatchLoop
from millstream.pipelines.jobs.land.decoding import Decoder
from millstream.pipelines.jobs.land.inference import grown
from millstream.pipelines.source.options import BROKERS, read_options
from millstream.pipelines.source.ranges import Range, ranges_between
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import default_schema, shape_of

SAMPLE_MAX: Final = 1000
"""How many messages of each partition are looked at, the youngest of it."""
SAMPLE_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much of each partition is looked at, about."""
SAMPLE_ALL_MAX: Final = 20_000
"""How many messages of all partitions are looked at, unless there are more partitions than that."""

_UNREAD: Final = (MapType, BinaryType, NullType)


class PayloadSchemas:
    """The fields of the topics of one statement, by topic; None where payloads are not decoded."""

    def __init__(self, given: Mapping[str, StructType], found: Mapping[str, StructType], *, decodes: bool) -> None:
        self._given = given
        self._found = dict(found)
        self._decodes = decodes

    @property
    def found(self) -> Mapping[str, StructType]:
        """Those that were found in messages."""
        return self._found

    def fields(self, topic: str) -> StructType | None:
        """The fields of a topic's payloads."""
        return (self._given.get(topic) or self._found.get(topic, StructType())) if self._decodes else None

    def grows(self, topic: str) -> bool:
        """Whether fields are added as they are found."""
        return self._decodes and topic not in self._given

    def grown_by(self, found: Mapping[str, pa.Schema]) -> PayloadSchemas | None:
        """The same with what was found beside; None if that is nothing new."""
        larger = dict(self._found)
        for topic, fields in found.items():
            if self.grows(topic):
                known = to_arrow(self._found.get(topic, StructType()))
                larger[topic] = to_spark(grown(known, fields))
        is_same = larger == self._found
        return None if is_same else PayloadSchemas(self._given, larger, decodes=self._decodes)


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
        if not isinstance(schema, StructType) or not schema.fields:
            raise InvalidSetting(f"the schema of {topic!r} has to name columns, such as `id long, amount double`")
        for field in schema.fields:
            _check_type(topic, field.name, field.dataType)
        found[topic] = schema
    return found


def _check_type(topic: str, name: str, kind: DataType) -> None:
    if isinstance(kind, _UNREAD):
        raise InvalidSetting(
            f"the schema of {topic!r} has {name} as {kind.simpleString()}, which payloads are not decoded into; as "
            "string it keeps its JSON"
        )
    if isinstance(kind, ArrayType):
        _check_type(topic, name, kind.elementType)
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check_type(topic, f"{name}.{field.name}", field.dataType)


def to_arrow(schema: StructType) -> pa.Schema:
    """Fields as Arrow has them."""
    return pa.schema([pa.field(one.name, to_arrow_type(one.dataType, timezone="UTC")) for one in schema.fields])


def to_spark(schema: pa.Schema) -> StructType:
    """Fields as Spark has them."""
    return StructType([StructField(one.name, from_arrow_type(one.type)) for one in schema])


def sample_ranges(loop: BatchLoop, topic: str, count: int = SAMPLE_MAX) -> list[Range]:
    """The last messages of every partition of a topic."""
    survey = loop.survey([topic])
    there = survey.partitions()
    first, last = survey.earliest(there), survey.latest(there)
    start = {
        name: {
            number: max(first[name][number], end - min(count, max(1, SAMPLE_ALL_MAX // len(ends))))
            for number, end in ends.items()
        }
        for name, ends in last.items()
    }
    return ranges_between(start, last)


def find_fields(loop: BatchLoop, topic: str, brokers: str) -> pa.Schema | None:
    """The fields of the payloads in a sample; None if there is no message yet."""
    values = [value for one in sample_ranges(loop, topic) for value in _payloads(one, brokers)]
    if not values:
        return None
    return Decoder(pa.schema([]), evolves=True).decode(pa.array(values, pa.binary())).found


class KeptSchemas:
    """Schemas in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> dict[str, StructType]:
        """By topic; nothing if there is no file, or none that can be read."""
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return {topic: StructType.fromJson(schema) for topic, schema in document.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, schemas: Mapping[str, StructType]) -> None:
        """Keep them; the file is there as a whole or not at all."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f"{self._file.stem}-{uuid4().hex}.tmp")
        new.write_text(json.dumps({topic: schema.jsonValue() for topic, schema in schemas.items()}), encoding="utf-8")
        os.replace(new, self._file)


def _payloads(one: Range, brokers: str) -> Iterator[bytes]:
    options = read_options({BROKERS: brokers, "subscribe": one.topic, "columns": "value"})
    size = 0
    for batch in read_range(one, options, shape_of(default_schema(options), options), skip=lambda _batch: None):
        column = batch.column("value")
        yield from (value for value in column.to_pylist() if value is not None)
        size += column.nbytes
        if size > SAMPLE_BYTES_MAX:
            return
