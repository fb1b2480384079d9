"""The columns of landed tables: the record columns, and those inferred from payloads.

Integers are long and other numbers double; what looks like a time is text, since the next value may not. A type never
depends on how messages are divided into batches: the first message with a field decides, whether or not it fits, and
messages before it are landed without the column. Later values of another type do not fit. A column keeps its type,
except that structs gain fields and, where enabled, long becomes double when a value has a fraction and none landed
before it is beyond doubles.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.core.payload_columns import is_legal
from millstream.pipelines.lake.columns import (
    ELEMENT,
    EVENT_DAY,
    EVENT_HOUR,
    EXACT_MAX,
    RAW,
    FieldPath,
    inexact_reason,
    retyped,
)
from millstream.pipelines.source.ranges import Range

LEAVES_MAX: Final = 1000
"""The most inferred columns, nested ones included; other fields have no column."""

DEPTH_MAX: Final = 12
"""Deeper values are text."""

NOTHING: Final = pa.null()
_DIGITS_MAX: Final = 38
_WHOLE: Final = pa.decimal128(_DIGITS_MAX, 0)
DETECTED_TIME: Final = pa.timestamp("us", tz="UTC")
_LONG_MIN: Final = -(2**63)
_LONG_MAX: Final = 2**63 - 1


def joined_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Merge schemas in their order; different numbers are double, and of other incompatible types the first stays."""
    joined: pa.DataType = pa.struct([])
    for schema in schemas:
        joined = _join_types(joined, pa.struct(list(schema)))
    return pa.schema(list(joined))


def _join_types(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type that holds the values of both; if no such type exists, the first."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return pa.struct(_joined_fields([*one, *other]))
    if is_undecided(one):
        return other
    if _is_number(one) and _is_number(other):
        return pa.float64()
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = max(one.precision - one.scale, other.precision - other.scale)
        return pa.decimal128(digits + scale, scale) if digits + scale <= _DIGITS_MAX else pa.string()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(pa.field("element", _join_types(one.value_type, other.value_type)))
    return one


def _joined_fields(every: Iterable[pa.Field]) -> list[pa.Field]:
    """Merge fields whose names differ in case alone, under the spelling of the first value."""
    fields: dict[str, pa.Field] = {}
    for field in every:
        have = fields.get(field.name.lower())
        if have is None or is_undecided(have.type):
            fields[field.name.lower()] = field
        else:
            fields[field.name.lower()] = have.with_type(_join_types(have.type, field.type))
    return list(fields.values())


def grown(known: pa.Schema, inferred: pa.Schema) -> pa.Schema:
    room = LEAVES_MAX - _leaves(pa.struct(list(known)))
    fields, _ = _grown_fields(list(known), list(inferred), room, DEPTH_MAX)
    return pa.schema(fields)


def dropped_fields(known: pa.Schema, inferred: pa.Schema) -> set[str]:
    """Return the found fields that have no column, because of their names or the number of columns."""
    columns = {field.name.lower() for field in known}
    named = {field.name for field in inferred if not is_undecided(field.type) and field.name.lower() not in columns}
    inner: dict[str, pa.Field] = {field.name.lower(): field for field in inferred}
    for field in known:
        have = inner.get(field.name.lower())
        if have is not None and pa.types.is_struct(field.type) and pa.types.is_struct(have.type):
            parts = dropped_fields(pa.schema(list(field.type)), pa.schema(list(have.type)))
            named |= {f"{field.name}.{part}" for part in parts}
    return named


def _grown_fields(known: list[pa.Field], inferred: list[pa.Field], room: int, depth: int) -> tuple[list[pa.Field], int]:
    # Spark and other readers ignore case, so another spelling is not another column.
    fields = {field.name.lower(): field for field in known}
    for field in inferred:
        have = fields.get(field.name.lower())
        if have is not None:
            kind, room = _grown_type(have.type, field.type, room, depth)
            fields[field.name.lower()] = have.with_type(kind)
        elif is_legal(field.name):
            kind, room = _new_type(field.type, room, depth)
            if not pa.types.is_null(kind):
                fields[field.name.lower()] = pa.field(field.name, kind)
    return list(fields.values()), room


def _grown_type(known: pa.DataType, inferred: pa.DataType, room: int, depth: int) -> tuple[pa.DataType, int]:
    if pa.types.is_struct(known) and pa.types.is_struct(inferred):
        fields, room = _grown_fields(list(known), list(inferred), room, depth - 1)
        return pa.struct(fields), room
    if pa.types.is_list(known) and pa.types.is_list(inferred):
        kind, room = _grown_type(known.value_type, inferred.value_type, room, depth - 1)
        return pa.list_(known.value_field.with_type(kind)), room
    return known, room


def _new_type(inferred: pa.DataType, room: int, depth: int) -> tuple[pa.DataType, int]:
    """Return the type of a new column as far as there is room; null if nothing is known yet."""
    if is_undecided(inferred):
        return NOTHING, room
    if depth > 0 and pa.types.is_list(inferred):
        element, room = _new_type(inferred.value_type, room, depth - 1)
        return element if pa.types.is_null(element) else pa.list_(pa.field("element", element)), room
    if depth > 0 and pa.types.is_struct(inferred):
        fields, room = _grown_fields([], list(inferred), room, depth - 1)
        return pa.struct(fields) if fields else NOTHING, room
    kind = pa.string() if depth <= 0 and pa.types.is_nested(inferred) else inferred
    return (kind, room - 1) if room > 0 else (NOTHING, room)


def is_undecided(kind: pa.DataType) -> bool:
    """Whether values of a type, all of them null or empty, make no column."""
    if pa.types.is_struct(kind):
        return all(is_undecided(field.type) for field in kind)
    return is_undecided(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_null(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _leaves(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return sum(_leaves(field.type) for field in kind)
    return _leaves(kind.value_type) if pa.types.is_list(kind) else 1


class NewFields(NamedTuple):
    """A message with fields that have no column, and the types that it gives them."""

    partition: int
    offset: int
    fields: pa.Schema


def new_fields(known: pa.Schema, inferred: pa.Schema) -> pa.Schema | None:
    """Return the columns that found fields add or extend; None without any."""
    after = grown(known, inferred)
    if after == known:
        return None
    return pa.schema([field for field in after if field.name not in known.names or known.field(field.name) != field])


class Evolution:
    """The payload fields of a topic over the messages of a batch: a field begins with the first message that has it."""

    def __init__(
        self,
        fields: pa.Schema,
        messages: Iterable[NewFields] = (),
        *,
        doubles: Collection[FieldPath] = (),
        first_partition: int = -1,
    ) -> None:
        """Begin with the fields of a table.

        `doubles` are long fields of messages that are double because of later ones. `first_partition` is the partition
        with which the batch begins; the others follow by their numbers.
        """
        self._doubles = doubles
        self._first_partition = first_partition
        self._steps = [retyped(fields, doubles, pa.float64())]
        self.messages: list[NewFields] = []
        """The messages with new fields, in order."""
        self.add(messages)

    @property
    def fields(self) -> pa.Schema:
        return self._steps[-1]

    def position(self, partition: int, offset: int) -> tuple[bool, int, int]:
        """Return the sort key of the messages of the batch."""
        return partition != self._first_partition, partition, offset

    def add(self, messages: Iterable[NewFields]) -> None:
        """Add messages with new fields; those whose fields earlier messages have are dropped."""
        ordered = sorted([*self.messages, *messages], key=self._position_of)
        del self._steps[1:]
        self.messages = []
        for message in ordered:
            after = grown(self.fields, message.fields)
            if after != self.fields:
                self.messages.append(message)
                self._steps.append(retyped(after, self._doubles, pa.float64()))

    def _position_of(self, message: NewFields) -> tuple[bool, int, int]:
        return self.position(message.partition, message.offset)

    def before(self, partition: int, offset: int) -> list[NewFields]:
        end = self.position(partition, offset)
        return [message for message in self.messages if self._position_of(message) < end]

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.Schema, pa.RecordBatch]]:
        """Divide messages of one partition, in order, where fields begin; yield the fields of each part with it."""
        partition, offsets = batch.column("partition")[0].as_py(), batch.column("offset").to_numpy()
        positions = [self._position_of(message) for message in self.messages]
        start = 0
        while start < len(offsets):
            step = bisect_right(positions, self.position(partition, int(offsets[start])))
            end = len(offsets)
            if step < len(positions) and positions[step] < self.position(partition, int(offsets[-1]) + 1):
                end = int(np.searchsorted(offsets, positions[step][2]))
            yield self._steps[step], batch.slice(start, end - start)
            start = end


RECORD_NAMES: Final = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""The columns of every record, by the names that records have."""

CLOUD_EVENT: Final = tuple(
    f"ce_{name}" for name in ("id", "source", "specversion", "type", "subject", "time", "datacontenttype", "dataschema")
)
"""The attributes of CloudEvents, as headers and as columns."""

KEYED_NAMES: Final = ("partition", "offset", "timestamp", "key")
"""The columns of every message in a table with one row per key."""

_PREFIX: Final = "payload_"
_TAKEN: Final = frozenset((*RAW.names, EVENT_DAY, EVENT_HOUR, *CLOUD_EVENT))


def column_of(field: str) -> str:
    """Return the column of a payload field: its name, unless a record column has that name."""
    return _PREFIX + field if _is_taken(field) else field


def field_of(column: str) -> str:
    rest = column.removeprefix(_PREFIX)
    return rest if rest != column and _is_taken(rest) else column


def payload_fields(schema: pa.Schema | None) -> pa.Schema:
    """Return the payload fields of a table, under the names that payloads use."""
    if schema is None:
        return pa.schema([])
    return pa.schema([field.with_name(field_of(field.name)) for field in schema if field.name not in _TAKEN])


def table_schema(fields: pa.Schema, record: pa.Schema = RAW) -> pa.Schema:
    """Return the schema of a table: the columns of every record, and these payload fields."""
    return pa.schema([*record, *(field.with_name(column_of(field.name)) for field in fields)])


def _is_taken(field: str) -> bool:
    name = field.lower()
    while name not in _TAKEN and name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    return name in _TAKEN


SAMPLE_MAX: Final = 1000
"""The messages of a partition in a sample, the first ones."""
SAMPLE_ALL_MAX: Final = 10_000
"""The messages of all partitions in a sample, unless there are more partitions."""

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d(:?\d\d)?)?")


class SampleResult(NamedTuple):
    fields: pa.Schema
    messages: int
    """The messages that could be decoded."""
    fixed: dict[FieldPath, str]
    """Fields whose columns never become double, since they have numbers that doubles cannot hold, with the reasons."""


def sample_ranges(ranges: Iterable[Range]) -> list[Range]:
    listed = list(ranges)
    per_partition = max(1, min(SAMPLE_MAX, SAMPLE_ALL_MAX // max(1, len(listed))))
    return [
        Range(
            offset_range.topic,
            offset_range.partition,
            offset_range.start,
            min(offset_range.end, offset_range.start + per_partition),
        )
        for offset_range in listed
    ]


def decide(documents: Iterable[Mapping[str, Any]], *, known: pa.Schema, detects: bool) -> SampleResult:
    """Return the columns of a new table for a sample: the payloads of the first messages of every partition.

    Which messages these are depends on the log alone, not on how it is divided into batches. If values are
    incompatible, the most frequent kind decides, and the others do not fit.

    A long beyond 2^53 is never rounded: its column stays long. With whole numbers of more than 64 bits, one without
    fractions is decimal. With `detects`, text that always is a time becomes a timestamp.
    """
    votes = _Votes(detects=detects)
    messages = 0
    for document in documents:
        votes.add(document)
        messages += 1
    kind = votes.type()
    fields = grown(known, pa.schema(list(kind) if pa.types.is_struct(kind) else []))
    return SampleResult(fields, messages, {place: inexact_reason(number) for place, number in votes.inexact()})


def fields_of(document: Mapping[str, Any]) -> pa.Schema:
    """Return the fields of one payload, as a sample of this message alone decides them."""
    votes = _Votes(detects=False)
    votes.add(document)
    return pa.schema(list(votes.type()))


class _Votes:
    """The values of one field."""

    def __init__(self, *, detects: bool) -> None:
        self._detects = detects
        self._kinds: Counter[str] = Counter()
        self._has_fraction = False
        self._is_decimal = False
        """Whether a decimal holds a whole number that a long does not."""
        self._farthest = 0
        """The long number that is farthest from zero."""
        self._are_times = True
        self._fields: dict[str, tuple[str, _Votes]] = {}
        self._element: _Votes | None = None

    def add(self, value: Any) -> None:
        """Count a value; nulls decide nothing."""
        if value is None:
            return
        kind = _kind(value)
        self._kinds[kind] += 1
        if kind == "number":
            self._add_number(value)
        elif kind == "text":
            self._are_times = self._are_times and _TIME.fullmatch(value) is not None
        elif kind == "object":
            for name, inner in value.items():
                if inner is not None:
                    self._fields.setdefault(name.lower(), (name, self._empty()))[1].add(inner)
        elif kind == "array":
            self._element = self._element or self._empty()
            for inner in value:
                self._element.add(inner)

    def _empty(self) -> _Votes:
        return _Votes(detects=self._detects)

    def _add_number(self, value: int | float) -> None:
        if isinstance(value, float):
            self._has_fraction = True
        elif _LONG_MIN <= value <= _LONG_MAX:
            self._farthest = max(self._farthest, value, key=abs)
        elif abs(value) < 10**_DIGITS_MAX:
            self._is_decimal = True

    def type(self) -> pa.DataType:
        """Return the most frequent type of the values, on a tie the first; null if nothing is known."""
        kind = self._kind()
        if kind is None:
            return pa.null()
        if kind == "number":
            return self._number_type()
        if kind == "text":
            return DETECTED_TIME if self._detects and self._are_times else pa.string()
        if kind == "boolean":
            return pa.bool_()
        if kind == "object":
            parts = [pa.field(name, votes.type()) for name, votes in self._fields.values()]
            return pa.struct([part for part in parts if not pa.types.is_null(part.type)])
        element = pa.null() if self._element is None else self._element._element_type()
        return pa.list_(pa.field("element", element))

    def _kind(self) -> str | None:
        # A counter keeps the order in which kinds came first.
        return max(self._kinds, key=lambda kind: self._kinds[kind], default=None)

    def _number_type(self) -> pa.DataType:
        if not self._has_fraction:
            return _WHOLE if self._is_decimal else pa.int64()
        # The numbers that do not fit into a long are quarantined, where a double would make different ones equal.
        return pa.int64() if abs(self._farthest) > EXACT_MAX else pa.float64()

    def inexact(self, above: FieldPath = ()) -> Iterator[tuple[FieldPath, int]]:
        """Yield the paths of long columns that have a number which doubles cannot hold, with the number."""
        kind = self._kind()
        if kind == "number" and abs(self._farthest) > EXACT_MAX:
            yield above, self._farthest
        elif kind == "object":
            for name, votes in self._fields.values():
                yield from votes.inexact((*above, name))
        elif kind == "array" and self._element is not None:
            yield from self._element.inexact((*above, ELEMENT))

    def _element_type(self) -> pa.DataType:
        """Return the type of an array's elements, text if they are of several kinds."""
        return pa.string() if len(self._kinds) > 1 else self.type()


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    return "object" if isinstance(value, Mapping) else "array"


def shown_columns(fields: pa.Schema, *, length_max: int = 500) -> str:
    """Return columns in Spark's notation, cut if there are many."""
    from pyspark.sql.pandas.types import from_arrow_type

    parts: Sequence[str] = [f"{field.name} {from_arrow_type(field.type).simpleString()}" for field in fields]
    text = ", ".join(parts)
    return text if len(text) <= length_max else f"{text[:length_max]} … ({len(parts)} columns)"
