"""JSON payloads as typed columns, with the reason for every payload that cannot be decoded.

Whole batches go through Arrow's compiled parser. A batch that it refuses is divided, so that only the neighbours of an
odd payload are decoded one by one. Both parsers agree on everything that both accept (a test verifies it), so
quarantine never depends on a message's neighbours.

Fields whose names differ from a column's in case alone go to that column, since readers of tables ignore case. The
field spelled like the column takes precedence where it has a value; others follow in the order of their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.pipelines.jobs.land.inference import dropped_fields, fields_of, grown, new_fields
from millstream.pipelines.lake.columns import (
    ELEMENT,
    EXACT_MAX,
    FieldPath,
    inexact_reason,
    leaf_paths,
    path_text,
    widened_paths,
)
from millstream.pipelines.source.rows import NESTING_MAX, is_text_too_deep, is_too_deep
from millstream.pipelines.source.schema_decoder import SchemaRows, columns_of

_PATTERN_MAX: Final = 16_000
"""Longer patterns are not searched for in a single pass."""

_NAMES_BYTES_MAX: Final = 256 * 1024
"""In texts up to this size, extracting all names is faster than compiling a pattern."""

_ESCAPED: Final = r"\\u[0-9A-Fa-f]{4}"
_LETTER_ESCAPED: Final = r"\\u00[4-7]"
"""Letters may be escaped, which is rare."""

_NAME: Final = re.compile(r'("(?:[^"\\]|\\.)*")\s*:')


def values_by_name(document: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return an object's values for these columns, under any spelling; None for missing ones."""
    values: dict[str, Any] = {}
    others: dict[str, Any] | None = None
    for name in names:
        value = document.get(name)
        if value is None:
            others = _by_lower(document) if others is None else others
            value = others.get(name.lower())
        values[name] = value
    return values


def _by_lower(document: Mapping[str, Any]) -> dict[str, Any]:
    lowered: dict[str, Any] = {}
    for name in sorted(document):
        if document[name] is not None:
            lowered.setdefault(name.lower(), document[name])
    return lowered


class SpellingFinder:
    """Finds other spellings of column names in JSON texts; fast if they have none."""

    def __init__(self, fields: pa.Schema) -> None:
        self._known = frozenset(_names(fields))
        self._lower = frozenset(name.lower() for name in self._known)
        self._patterns = list(_patterns(self._known))

    def in_texts(self, texts: pa.Array) -> frozenset[str]:
        """Return the other spellings in these texts, possibly with some false positives."""
        if texts.nbytes > _NAMES_BYTES_MAX and not self._are_in(texts):
            return frozenset()
        quoted = {name for text in texts.to_pylist() for name in _NAME.findall(text)}
        names = {_unquoted(name) for name in quoted} - self._known
        return frozenset(name for name in names if name.lower() in self._lower)

    def _are_in(self, texts: pa.Array) -> bool:
        return any(pc.any(pc.match_substring_regex(texts, pattern)).as_py() for pattern in self._patterns)


def others_in(known: Iterable[pa.Field], fields: Iterable[pa.Field]) -> set[str]:
    """Return the other spellings of known fields among those found."""
    by_lower = {field.name.lower(): field for field in known}
    others: set[str] = set()
    for field in fields:
        have = by_lower.get(field.name.lower())
        if have is not None:
            if have.name != field.name:
                others.add(field.name)
            others |= others_in(_inner(have.type), _inner(field.type))
    return others


def with_others(fields: Iterable[pa.Field], others: Iterable[str]) -> list[pa.Field]:
    """Add each field under its other spellings."""
    spelled = sorted(others)
    return [
        field.with_name(name).with_type(_type_with_others(field.type, spelled))
        for field in fields
        for name in (field.name, *_spellings(field.name, spelled))
    ]


def merge_spellings(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Merge values that were read under several spellings into their columns."""
    if pa.types.is_list(kind):
        values = merge_spellings(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    if not pa.types.is_struct(kind):
        return array
    columns = []
    for field in kind:
        names = (field.name, *_spellings(field.name, sorted(field.name for field in array.type)))
        columns.append(pc.coalesce(*(merge_spellings(array.field(name), field.type) for name in names)))
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=array.is_null())


def _spellings(name: str, names: Iterable[str]) -> list[str]:
    return [other for other in names if other != name and other.lower() == name.lower()]


def _type_with_others(kind: pa.DataType, others: list[str]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct(with_others(kind, others))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_type_with_others(kind.value_type, others)))
    return kind


def _inner(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_list(kind):
        return _inner(kind.value_type)
    return list(kind) if pa.types.is_struct(kind) else []


def _names(fields: Iterable[pa.Field]) -> Iterator[str]:
    for field in fields:
        yield field.name
        yield from _names(_inner(field.type))


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _patterns(names: Iterable[str]) -> Iterator[str]:
    """Return patterns that find the names in any spelling but their own."""
    pieces = [piece for name in sorted(names) if (piece := _other_case_pattern(name))]
    while pieces:
        size = count = 0
        while count < len(pieces) and (not count or size + len(pieces[count]) <= _PATTERN_MAX):
            size += len(pieces[count])
            count += 1
        yield f'"(?:{"|".join(pieces[:count])})"|{_LETTER_ESCAPED}'
        pieces = pieces[count:]


def _other_case_pattern(name: str) -> str:
    """Return a pattern for a name with at least one letter in the other case; empty if it has no letter."""
    pattern = ""
    rest = ""
    for letter in reversed(name):
        choices = [f"{other}{rest}" for other in _other_cases(letter)]
        if pattern:
            choices.append(f"{re.escape(letter)}{pattern}")
        pattern = f"(?:{'|'.join(choices)})" if choices else ""
        rest = _any_case(letter) + rest
    return pattern


def _other_cases(letter: str) -> list[str]:
    escaped = [] if letter.isascii() else [_ESCAPED]
    return [*(re.escape(case) for case in {letter.lower(), letter.upper()} - {letter}), *escaped]


def _any_case(letter: str) -> str:
    cases = [re.escape(letter), *_other_cases(letter)]
    return cases[0] if len(cases) == 1 else f"(?:{'|'.join(cases)})"


_SHOWN_MAX: Final = 60

_FINER: Final = re.compile(r"(\.[0-9]{6})[0-9]{1,3}(?![0-9])")
"""The digits of a time beyond microseconds."""

_BITS: Final = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}

_LONG_DIGITS: Final = 19

_NAMES: Final = {
    "int8": "byte",
    "int16": "short",
    "int32": "int",
    "int64": "long",
    "float": "float",
    "double": "double",
    "bool": "boolean",
    "date32[day]": "date",
    "timestamp[us, tz=UTC]": "timestamp",
}


class UndecodablePayload(Exception):
    """The payload cannot be decoded, for the given reason."""


class _Number(float):
    """A number with a fraction or an exponent, and its spelling."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def parsed(value: bytes | None) -> dict[str, Any]:
    """Parse the object of a payload, empty without one; raise `UndecodablePayload` if it is not an object."""
    if value is None:
        return {}
    try:
        text = value.decode("utf-8")
        if is_text_too_deep(text):
            raise UndecodablePayload(f"the payload nests more than {NESTING_MAX} objects and arrays")
        document = json.loads(text, parse_float=_Number)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UndecodablePayload(f"the payload is not UTF-8: byte {error.start} cannot be read") from None
    except UnicodeEncodeError:
        raise UndecodablePayload("the payload contains an unpaired surrogate") from None
    except ValueError as error:
        raise UndecodablePayload(
            f"the payload is not JSON: {error}" if value.strip() else "the payload is empty"
        ) from None
    if not isinstance(document, dict):
        raise UndecodablePayload(f"the payload is not a JSON object but {_quote_value(document)}")
    return document


def documents(values: Iterable[bytes | None]) -> Iterator[dict[str, Any]]:
    """Yield the objects of those payloads that are objects."""
    for value in values:
        with suppress(UndecodablePayload):
            yield parsed(value)


def value_for(value: Any, kind: pa.DataType, path: str) -> Any:
    """Convert a value to its column's type; raise `UndecodablePayload` if it does not fit."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else _as_json(value)
    if pa.types.is_struct(kind):
        return _struct(value, kind, path)
    if pa.types.is_map(kind):
        if not isinstance(value, Mapping):
            _refuse(value, "map", path)
        return [(name, value_for(inner, kind.item_type, f"{path}.{name}")) for name, inner in value.items()]
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            _refuse(value, "array", path)
        return [value_for(inner, kind.value_type, f"{path}[{index}]") for index, inner in enumerate(value)]
    return _scalar(value, kind, path)


def _numbers(
    value: Any, kind: pa.DataType, above: FieldPath = ()
) -> Iterator[tuple[FieldPath, pa.DataType, int | float]]:
    """Yield the numbers of a value, each with its path and the type of its column."""
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        values = values_by_name(value, (field.name for field in kind))
        for field in kind:
            yield from _numbers(values[field.name], field.type, (*above, field.name))
    elif pa.types.is_list(kind) and isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, kind.value_type, (*above, ELEMENT))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield above, kind, value


def _wider(value: Any, kind: pa.DataType) -> frozenset[FieldPath]:
    """Return the paths of long columns whose value here only a double can hold.

    An integer of more than 64 bits written with all its digits does not count: a double would not keep them.
    """
    return frozenset(
        place
        for place, column, number in _numbers(value, kind)
        if pa.types.is_int64(column) and isinstance(number, float) and not _is_long(_as_integer(number))
    )


def _rounding(value: Any, kind: pa.DataType) -> str | None:
    """Return the reason if a whole number does not fit a column of doubles, which would change its digits."""
    for place, column, number in _numbers(value, kind):
        if pa.types.is_float64(column) and isinstance(number, int) and not _keeps_digits(number):
            return f"{path_text(place)}: {number} would be rounded as double"
    return None


def _keeps_digits(number: int) -> bool:
    """Whether a double equals a whole number, or is one that producers write as this number."""
    try:
        double = float(number)
    except OverflowError:
        return False
    return double == number or Decimal(repr(double)) == number


def _as_integer(number: float) -> int | None:
    """Return a number with a fraction or an exponent as an integer, such as 3.0; None if it is not one, or is huge."""
    try:
        exact = Decimal(number.text if isinstance(number, _Number) else repr(number))
    except InvalidOperation:
        return None
    if not exact.is_finite() or exact.adjusted() > _LONG_DIGITS or exact != exact.to_integral_value():
        return None
    return int(exact)


def _is_long(number: int | None) -> bool:
    return number is not None and -(2**63) <= number < 2**63


def _beyond_doubles(value: Any, place: FieldPath) -> int | None:
    """Return the first whole number at a path that a double cannot represent exactly; None without one."""
    if not place:
        return value if isinstance(value, int) and abs(value) > EXACT_MAX else None
    if place[0] != ELEMENT:
        return (
            _beyond_doubles(values_by_name(value, place[:1])[place[0]], place[1:])
            if isinstance(value, Mapping)
            else None
        )
    places = [_beyond_doubles(inner, place[1:]) for inner in value] if isinstance(value, list) else []
    return next((number for number in places if number is not None), None)


def _struct(value: Any, kind: pa.StructType, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(value, "object", path)
    values = values_by_name(value, (field.name for field in kind))
    return {field.name: value_for(values[field.name], field.type, f"{path}.{field.name}") for field in kind}


def _scalar(value: Any, kind: pa.DataType, path: str) -> Any:
    name = _NAMES.get(str(kind), str(kind))
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else _refuse(value, name, path)
    if isinstance(value, bool | list | dict):
        _refuse(value, name, path)
    if pa.types.is_integer(kind):
        return _integer(value, kind, name, path)
    if pa.types.is_floating(kind):
        return _double(value, name, path)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind, path)
    if not isinstance(value, str):
        _refuse(value, name, path)
    return _day(value, path) if pa.types.is_date(kind) else _by_arrow(value, kind, name, path)


def _integer(value: Any, kind: pa.DataType, name: str, path: str) -> int:
    number = None if isinstance(value, str) else _as_integer(value) if isinstance(value, float) else int(value)
    limit = 2 ** (_BITS[kind] - 1)
    return number if number is not None and -limit <= number < limit else _refuse(value, name, path)


def _double(value: Any, name: str, path: str) -> float:
    if isinstance(value, str):
        _refuse(value, name, path)
    try:
        number = float(value)
    except OverflowError:
        _refuse(value, name, path)
    # Only the word `Infinity` is infinite; a number that overflows does not fit.
    if isinstance(value, _Number) and number in (float("inf"), float("-inf")):
        _refuse(value, name, path)
    return number


def _decimal(value: Any, kind: pa.DataType, path: str) -> Any:
    text = value.text if isinstance(value, _Number) else str(value)
    try:
        return pa.scalar(Decimal(text), kind).as_py()
    except (InvalidOperation, pa.ArrowInvalid, ValueError):
        return _refuse(value, f"decimal({kind.precision},{kind.scale})", path)


def _day(value: str, path: str) -> date:
    try:
        day: date = pa.scalar(value).cast(pa.date32()).as_py()
        return day
    except pa.ArrowInvalid:
        return _refuse(value, "date", path)


def _by_arrow(value: str, kind: pa.DataType, name: str, path: str) -> Any:
    """Read times with Arrow's parser, so that both parsers agree."""
    schema = pa.schema([pa.field("value", kind)])
    # Java and Go write nanoseconds, of which columns keep microseconds.
    text = json.dumps({"value": _FINER.sub(r"\1", value)}).encode()
    try:
        options = pj.ParseOptions(explicit_schema=schema)
        return pj.read_json(pa.BufferReader(text), parse_options=options).column("value")[0].as_py()
    except pa.ArrowInvalid:
        return _refuse(value, name, path)


def _as_json(value: Any) -> str:
    return value.text if isinstance(value, _Number) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _quote_value(value: Any) -> str:
    text = _as_json(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _refuse(value: Any, name: str, path: str) -> NoReturn:
    raise UndecodablePayload(f"{path}: {_quote_value(value)} is not of type {name}")


_APART_MAX: Final = 32
"""The size of a batch that is decoded one payload at a time."""

_OTHERS_MAX: Final = 32
"""With more spellings of the same names, payloads are decoded one by one."""

_CUTS: Final = 8

_BLANK: Final = " \t\r\n"

_MANY_DIGITS: Final = r"[\[:,\s-][0-9]{16,}[\]},\s]"
"""Whole numbers that doubles may round, as they are written in JSON."""

_NO_ROWS: Final = np.zeros(0, np.int64)


class Widening(NamedTuple):
    """The first row of a batch with fractions in long columns."""

    row: int
    places: frozenset[FieldPath]
    all_places: frozenset[FieldPath]
    """The long columns with fractions in any row."""


@dataclass(frozen=True, slots=True)
class DecodedPayloads:
    """The payloads of a batch: a column per field, and for each row null or why it cannot be decoded."""

    columns: pa.StructArray
    reasons: pa.Array
    new_fields: tuple[tuple[int, pa.Schema], ...] = ()
    """The rows with fields that have no column, and the columns that these make, if fields are looked for."""
    widening: Widening | None = None
    """The long columns that have to become double, if fields are looked for."""
    dropped: frozenset[str] = frozenset()
    """Fields that were found and cannot have a column, if fields are looked for."""


class Decoder:
    """Decodes payloads into known fields.

    With `evolves` it also finds new fields, and fractions in long columns, except at `fixed` paths: their columns stay
    long, for the reasons given. With `refuses_rounding`, whole numbers that a double would round do not fit.
    """

    def __init__(
        self,
        fields: pa.Schema,
        *,
        evolves: bool,
        fixed: Mapping[FieldPath, str] | None = None,
        refuses_rounding: bool = False,
    ) -> None:
        self._fields = fields
        self._evolves = evolves
        self._fixed = fixed or {}
        self._refuses_rounding = refuses_rounding
        self._kind = pa.struct(list(fields))
        # The parser accepts days only as numbers, and does not read objects as maps.
        self._maps = [field for field in fields if pa.types.is_map(field.type)]
        self._parsed_as = pa.schema(
            [field.with_type(_parsed_type(field.type)) for field in fields if not pa.types.is_map(field.type)]
        )
        # Where fields are looked for, other spellings are found with them.
        self._spellings = None if evolves else SpellingFinder(fields)

    def decode(self, values: pa.Array) -> DecodedPayloads:
        """Decode a column of payloads; a message without one has no fields, which is not an error."""
        if not len(values):
            return DecodedPayloads(pa.array([], self._kind), pa.array([], pa.string()))
        whole = self._decode_together(values)
        if whole is not None:
            return whole
        if len(values) <= _APART_MAX:
            return self._decode_singly(values)
        size = -(-len(values) // _CUTS)
        starts = range(0, len(values), size)
        parts = [self.decode(values.slice(start, size)) for start in starts]
        widenings = [(start, part.widening) for start, part in zip(starts, parts, strict=True)]
        return DecodedPayloads(
            pa.concat_arrays([part.columns for part in parts]),
            pa.concat_arrays([part.reasons for part in parts]),
            tuple(
                (start + row, field)
                for start, part in zip(starts, parts, strict=True)
                for row, field in part.new_fields
            ),
            _first_widening(
                [
                    (start + widening.row, widening.places, widening.all_places)
                    for start, widening in widenings
                    if widening
                ]
            ),
            frozenset().union(*(part.dropped for part in parts)),
        )

    # -- all at once ----------------------------------------------------------------------------------------------

    def _decode_together(self, values: pa.Array) -> DecodedPayloads | None:
        """Decode everything at once; None if Arrow's parser refuses a payload."""
        texts = _texts(values)
        text = None if texts is None else _lines(texts)
        if text is None:
            return None
        others = self._spellings.in_texts(texts) if self._spellings is not None else frozenset()
        decoded = self._decode_text(text, values, others)
        if decoded is not None and self._refuses_rounding:
            decoded = self._without_rounded(decoded, values, texts)
        return decoded if decoded is None or not self._maps else self._with_maps(decoded, values)

    def _without_rounded(self, decoded: DecodedPayloads, values: pa.Array, texts: pa.Array) -> DecodedPayloads | None:
        """Add reasons for numbers that the parser has rounded."""
        rows = pa.array(_rows_beyond(decoded.columns))
        rows = rows.filter(pc.match_substring_regex(texts.take(rows), _MANY_DIGITS)) if len(rows) else rows
        if not len(rows):
            return decoded
        try:
            documents = [parsed(value) for value in values.take(rows).to_pylist()]
        except UndecodablePayload:
            return None
        reasons: list[str | None] = [None] * len(values)
        for row, document in zip(rows.to_pylist(), documents, strict=True):
            reasons[row] = _rounding(document, self._kind)
        return replace(decoded, reasons=pa.array(reasons, pa.string()))

    def _with_maps(self, decoded: DecodedPayloads, values: pa.Array) -> DecodedPayloads | None:
        """Add the columns of maps, which the parser does not read; None if a value is not an object."""
        try:
            documents = [
                values_by_name(parsed(value), [field.name for field in self._maps]) for value in values.to_pylist()
            ]
            maps = {
                field.name: pa.array(
                    [value_for(document[field.name], field.type, field.name) for document in documents], field.type
                )
                for field in self._maps
            }
        except (UndecodablePayload, pa.ArrowInvalid):
            return None
        columns = [
            maps[field.name] if field.name in maps else decoded.columns.field(field.name) for field in self._fields
        ]
        whole = pa.StructArray.from_arrays(columns, fields=list(self._fields))
        return replace(decoded, columns=whole, dropped=decoded.dropped - maps.keys())

    def _decode_text(self, text: pa.Buffer, values: pa.Array, others: frozenset[str]) -> DecodedPayloads | None:
        if len(others) > _OTHERS_MAX:
            return None
        rows = len(values)
        schema = pa.schema(with_others(self._parsed_as, others)) if others else self._parsed_as
        table = _read(text, schema, evolves=self._evolves)
        if table is None or table.num_rows != rows:
            return None
        if self._evolves and (more := others | others_in(self._fields, table.schema)) != others:
            return self._decode_text(text, values, more)
        additions = self._found_in(table, values) if self._evolves else ()
        if additions is None:
            return None
        dropped = (
            frozenset(dropped_fields(_with_new_fields(self._fields, additions), table.schema))
            if self._evolves
            else frozenset()
        )
        declared = table.select(schema.names)
        if declared.schema.types != schema.types:
            # A value without a column of its own is inside one that exists.
            table = _read(text, schema, evolves=False)
            if table is None or table.num_rows != rows:
                return None
            declared = table.select(schema.names)
        columns = self._columns(declared, rows)
        if columns is None:
            return None
        return DecodedPayloads(columns, pa.nulls(rows, pa.string()), additions, dropped=dropped)

    def _found_in(self, table: pa.Table, values: pa.Array) -> tuple[tuple[int, pa.Schema], ...] | None:
        """Return the rows with new fields; None if the parser's types do not show which these are."""
        if grown(self._fields, table.schema) == self._fields:
            return ()
        known = {_lower(place) for place in leaf_paths(self._fields)}
        places = [place for place in leaf_paths(table.schema) if _lower(place) not in known]
        try:
            # Arrow's parser makes invalid arrays of new fields whose lists begin with null.
            columns = table.select(sorted({place[0] for place in places}))
            columns.validate(full=True)
            firsts = {_first_row(columns.column(place[0]).combine_chunks(), place[1:]) for place in places}
            added = _new_fields_in(self._fields, ((row, parsed(values[row].as_py())) for row in sorted(firsts - {-1})))
        except (UndecodablePayload, pa.ArrowInvalid):
            return None
        fields = _with_new_fields(self._fields, added)
        return added if grown(fields, table.schema) == fields else None

    def _columns(self, table: pa.Table, rows: int) -> pa.StructArray | None:
        fields = [field for field in self._fields if not pa.types.is_map(field.type)]
        if not fields:
            return pa.array([{}] * rows, pa.struct([]))
        arrays = [column.combine_chunks() for column in table.columns]
        if table.schema.names != self._parsed_as.names or table.schema.types != self._parsed_as.types:
            several = pa.StructArray.from_arrays(arrays, fields=list(table.schema))
            arrays = merge_spellings(several, pa.struct(list(self._parsed_as))).flatten()
        if any(_has_infinity(array) for array in arrays):
            return None
        try:
            cast = [array.cast(field.type) for array, field in zip(arrays, fields, strict=True)]
        except pa.ArrowInvalid:
            return None
        return pa.StructArray.from_arrays(cast, fields=fields)

    # -- one by one -----------------------------------------------------------------------------------------------

    def _decode_singly(self, values: pa.Array) -> DecodedPayloads:
        rows: list[dict[str, object]] = []
        reasons: list[str | None] = []
        documents: list[tuple[int, dict[str, Any]]] = []
        wide: list[tuple[int, frozenset[FieldPath], frozenset[FieldPath]]] = []
        for number, value in enumerate(values.to_pylist()):
            try:
                document = parsed(value)
            except UndecodablePayload as misfit:
                rows.append({})
                reasons.append(str(misfit))
                continue
            row, reason, places = self._decode_one(document)
            rows.append(row)
            reasons.append(reason)
            if self._evolves:
                # Whether the payload fits does not matter: that depends on fields which may be new, too.
                documents.append((number, document))
                wide.append((number, places, places))
        additions = _new_fields_in(self._fields, documents)
        fields = _with_new_fields(self._fields, additions)
        dropped = frozenset(
            name for _row, document in documents for name in dropped_fields(fields, fields_of(document))
        )
        return DecodedPayloads(
            pa.array(rows, self._kind), pa.array(reasons, pa.string()), additions, _first_widening(wide), dropped
        )

    def _decode_one(self, document: dict[str, Any]) -> tuple[dict[str, object], str | None, frozenset[FieldPath]]:
        """Return the fields that fit, the problems of the others, and the paths that have to become double."""
        row: dict[str, object] = {}
        reasons: dict[str, str] = {}
        values = values_by_name(document, self._fields.names)
        for field in self._fields:
            try:
                row[field.name] = value_for(values[field.name], field.type, field.name)
            except UndecodablePayload as misfit:
                reasons[field.name] = str(misfit)
        if not reasons:
            return row, _rounding(document, self._kind) if self._refuses_rounding else None, frozenset()
        return row, *self._widen_for(document, *next(iter(reasons.items())))

    def _widen_for(self, document: dict[str, Any], name: str, reason: str) -> tuple[str, frozenset[FieldPath]]:
        """Return why a field of a payload does not fit, and the paths with fractions that have to become double.

        As with new fields, it does not matter whether the payload fits then.
        """
        places = _wider(document, self._kind)
        kept = {place: self._fixed[place] for place in places & self._fixed.keys()}
        for place in places - kept.keys() if self._evolves else ():
            if (number := _beyond_doubles(document, place)) is not None:
                kept[place] = inexact_reason(number)
        for place in sorted(place for place in kept if place[0] == name)[:1]:
            reason = f"{reason}; {path_text(place)} stays long: {kept[place]}"
        return reason, places - kept.keys()


class SchemaDecoder:
    """Decodes payloads by the schemas that they name, into the fields that have columns.

    With `evolves` it also finds the new fields of schemas, and schemas with doubles for long columns, except at `fixed`
    paths; `refuses_rounding` is as in `Decoder`.
    """

    def __init__(
        self,
        fields: pa.Schema,
        rows: SchemaRows,
        *,
        evolves: bool,
        fixed: Mapping[FieldPath, str] | None = None,
        refuses_rounding: bool = False,
    ) -> None:
        self._fields = fields
        self._rows = rows
        self._evolves = evolves
        self._fixed = fixed or {}
        self._refuses_rounding = refuses_rounding

    def decode(self, values: pa.Array, headers: pa.Array | None) -> DecodedPayloads:
        """Decode a column of payloads, whose schemas may be named in headers."""
        read = self._rows.read(values, headers)
        columns = columns_of(read, self._fields)
        reasons = read.reasons
        for at in _rows_beyond(columns) if self._refuses_rounding else ():
            reasons[at] = reasons[at] or _rounding(read.rows[at], columns.type)
        additions: list[tuple[int, pa.Schema]] = []
        wide: list[tuple[int, frozenset[FieldPath], frozenset[FieldPath]]] = []
        for row, schema in read.schemas if self._evolves else ():
            if (new := new_fields(_with_new_fields(self._fields, additions), schema)) is not None:
                additions.append((row, new))
            places = frozenset(widened_paths(self._fields, schema)) - self._fixed.keys()
            wide.append((row, places, places))
        return DecodedPayloads(columns, pa.array(reasons, pa.string()), tuple(additions), _first_widening(wide))


def _first_widening(rows: Iterable[tuple[int, frozenset[FieldPath], frozenset[FieldPath]]]) -> Widening | None:
    """Merge rows with fractions, in order."""
    wide = [row for row in rows if row[1]]
    return Widening(*wide[0][:2], frozenset().union(*(entry[2] for entry in wide))) if wide else None


def _new_fields_in(
    known: pa.Schema, documents: Iterable[tuple[int, dict[str, Any]]]
) -> tuple[tuple[int, pa.Schema], ...]:
    """Return the rows with new fields, and the columns that these make."""
    additions: list[tuple[int, pa.Schema]] = []
    for row, document in documents:
        new = new_fields(known, fields_of(document))
        if new is not None:
            additions.append((row, new))
            known = grown(known, new)
    return tuple(additions)


def _with_new_fields(known: pa.Schema, additions: Iterable[tuple[int, pa.Schema]]) -> pa.Schema:
    """Return the fields including those found."""
    for _row, new in additions:
        known = grown(known, new)
    return known


def _first_row(array: pa.Array, path: FieldPath) -> int:
    """Return the first row with a value at a path; -1 without one."""
    if not path:
        return pc.index(array.is_valid(), True).as_py()  # type: ignore[no-any-return]
    if path[0] != ELEMENT:
        return _first_row(array.flatten()[array.type.get_field_index(path[0])], path[1:])
    element = _first_row(array.flatten(), path[1:])
    return -1 if element < 0 else pc.list_parent_indices(array)[element].as_py()


def _lower(place: FieldPath) -> FieldPath:
    return tuple(name.lower() for name in place)


def _texts(values: pa.Array) -> pa.Array | None:
    """Return the payloads as text; None if one is certainly not an object, or would crash the parser."""
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    texts = pc.ascii_trim(texts.fill_null("{}"), _BLANK)
    if not pc.all(pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))).as_py() or is_too_deep(texts):
        return None
    if pc.any(pc.match_substring(texts, "\n")).as_py():
        # Line breaks are white space between JSON tokens, and cannot occur within one.
        texts = pc.replace_substring(texts, "\n", "\r")
    return texts


def _lines(texts: pa.Array) -> pa.Buffer | None:
    """Join texts as lines; None if they are too large for that."""
    lines = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    try:
        return pc.binary_join(lines, "\n")[0].as_buffer()
    except pa.ArrowInvalid:
        return None


def _read(text: pa.Buffer, schema: pa.Schema, *, evolves: bool) -> pa.Table | None:
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if evolves else "ignore")
    reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
    try:
        return pj.read_json(pa.BufferReader(text), reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_parsed_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_parsed_type(kind.value_type)))
    return kind


def _rows_beyond(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the rows with doubles that are so large that they may have been rounded."""
    kind = array.type
    if pa.types.is_float64(kind):
        is_beyond = pc.greater_equal(pc.abs(array), float(EXACT_MAX)).fill_null(False)
        return np.flatnonzero(is_beyond.to_numpy(zero_copy_only=False))
    parts = [_NO_ROWS]
    if pa.types.is_struct(kind):
        parts = [_NO_ROWS, *map(_rows_beyond, array.flatten())]
    elif pa.types.is_list(kind) and len(elements := _rows_beyond(array.flatten())):
        parts = [pc.list_parent_indices(array).to_numpy()[elements]]
    return np.unique(np.concatenate(parts))


def _has_infinity(array: pa.Array) -> bool:
    """Whether a number may have overflowed; decoding it alone shows whether it has."""
    kind = array.type
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.is_inf(array)).as_py())
    if pa.types.is_struct(kind):
        return any(_has_infinity(array.field(index)) for index in range(kind.num_fields))
    return _has_infinity(array.values) if pa.types.is_list(kind) else False
