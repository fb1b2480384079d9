"""The columns of a new table, decided by a sample: the first messages of every partition.

Which messages these are depends on the log alone, not on how it is divided into batches. Of values that do not go
together, the kind that most of them have decides, and the others do not fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from millstream.pipelines.jobs.land.inference import DETECTED_TIME, grown
from millstream.pipelines.source.ranges import Range

SAMPLE_MAX: Final = 1000
"""The messages of a partition in a sample, the first ones."""
SAMPLE_ALL_MAX: Final = 10_000
"""The messages of all partitions in a sample, unless there are more partitions."""

_LONG_MIN: Final = -(2**63)
_LONG_MAX: Final = 2**63 - 1
_DIGITS_MAX: Final = 38
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d(:?\d\d)?)?")


class Decided(NamedTuple):
    """The result of a sample."""

    fields: pa.Schema
    messages: int
    """The messages that could be decoded."""


def sample_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return the parts of ranges that are the sample."""
    listed = list(ranges)
    each = max(1, min(SAMPLE_MAX, SAMPLE_ALL_MAX // max(1, len(listed))))
    return [Range(one.topic, one.partition, one.start, min(one.end, one.start + each)) for one in listed]


def decide(documents: Iterable[Mapping[str, Any]], *, known: pa.Schema, detects: bool) -> Decided:
    """Return the columns for decoded payloads, besides known ones.

    With `detects`, text that always is a time becomes a timestamp, and numbers of more than 64 bits a decimal.
    """
    votes = _Votes(detects=detects)
    messages = 0
    for document in documents:
        votes.add(document)
        messages += 1
    found = votes.type()
    return Decided(grown(known, pa.schema(list(found) if pa.types.is_struct(found) else [])), messages)


class _Votes:
    """The values of one field."""

    def __init__(self, *, detects: bool) -> None:
        self._detects = detects
        self._kinds: Counter[str] = Counter()
        self._has_fraction = False
        self._is_long = True
        self._digits = 0
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
                self._fields.setdefault(name.lower(), (name, _Votes(detects=self._detects)))[1].add(inner)
        elif kind == "array":
            self._element = self._element or _Votes(detects=self._detects)
            for inner in value:
                self._element.add(inner)

    def _add_number(self, value: int | float) -> None:
        if isinstance(value, float):
            self._has_fraction = True
        elif not _LONG_MIN <= value <= _LONG_MAX:
            self._is_long = False
            self._digits = max(self._digits, len(str(abs(value))))

    def type(self) -> pa.DataType:
        """Return the type that most values have, of equally many the first; null if nothing is known."""
        if not self._kinds:
            return pa.null()
        # A counter keeps the order in which kinds came first.
        kind = max(self._kinds, key=lambda one: self._kinds[one])
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

    def _number_type(self) -> pa.DataType:
        if self._has_fraction:
            return pa.float64()
        if self._is_long:
            return pa.int64()
        return pa.decimal128(_DIGITS_MAX, 0) if self._detects and self._digits <= _DIGITS_MAX else pa.float64()

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
