"""Fields whose names differ from that of a column in case alone: their values are in that column.

Readers of tables do not tell such names apart, so that there is one column for all of them. The field that is spelled
as the column goes first, wherever it has a value; others follow in the order of their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_PATTERN_MAX: Final = 16_000
"""Patterns much longer than this are no longer looked for in one pass over the text."""

_NAMES_BYTES_MAX: Final = 256 * 1024
"""In so little text all names are looked at sooner than a pattern is made ready."""

_ESCAPED: Final = r"\\u[0-9A-Fa-f]{4}"
_LETTER_ESCAPED: Final = r"\\u00[4-7]"
"""Nobody writes letters so, but whoever does means the letter."""

_NAME: Final = re.compile(r'("(?:[^"\\]|\\.)*")\s*:')


def picked(document: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values of an object for these columns; None where there is none under any spelling."""
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
    found: dict[str, Any] = {}
    for name in sorted(document):
        if document[name] is not None:
            found.setdefault(name.lower(), document[name])
    return found


class Spellings:
    """Finds other spellings of the names of columns in texts of JSON, fast when there are none."""

    def __init__(self, fields: pa.Schema) -> None:
        self._known = frozenset(_names(fields))
        self._lower = frozenset(name.lower() for name in self._known)
        self._patterns = list(_patterns(self._known))

    def in_texts(self, texts: pa.Array) -> frozenset[str]:
        """The other spellings that objects in these texts have; perhaps some more that only look so."""
        if texts.nbytes > _NAMES_BYTES_MAX and not self._are_in(texts):
            return frozenset()
        quoted = {name for text in texts.to_pylist() for name in _NAME.findall(text)}
        names = {_unquoted(name) for name in quoted} - self._known
        return frozenset(name for name in names if name.lower() in self._lower)

    def _are_in(self, texts: pa.Array) -> bool:
        return any(pc.any(pc.match_substring_regex(texts, pattern)).as_py() for pattern in self._patterns)


def others_in(known: Iterable[pa.Field], found: Iterable[pa.Field]) -> set[str]:
    """The other spellings of known fields among those that were found."""
    by_lower = {field.name.lower(): field for field in known}
    others: set[str] = set()
    for field in found:
        have = by_lower.get(field.name.lower())
        if have is not None:
            if have.name != field.name:
                others.add(field.name)
            others |= others_in(_inner(have.type), _inner(field.type))
    return others


def with_others(fields: Iterable[pa.Field], others: Iterable[str]) -> list[pa.Field]:
    """Fields, and beside each of them the same under its other spellings."""
    spelled = sorted(others)
    return [
        field.with_name(name).with_type(_type_with_others(field.type, spelled))
        for field in fields
        for name in (field.name, *_spellings(field.name, spelled))
    ]


def merged(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values that were read under several spellings, in the columns that there are."""
    if pa.types.is_list(kind):
        values = merged(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    if not pa.types.is_struct(kind):
        return array
    columns = []
    for field in kind:
        names = (field.name, *_spellings(field.name, sorted(one.name for one in array.type)))
        columns.append(pc.coalesce(*(merged(array.field(name), field.type) for name in names)))
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
    """Patterns that find the names in any other spelling than their own."""
    pieces = [piece for name in sorted(names) if (piece := _otherwise(name))]
    while pieces:
        size = count = 0
        while count < len(pieces) and (not count or size + len(pieces[count]) <= _PATTERN_MAX):
            size += len(pieces[count])
            count += 1
        yield f'"(?:{"|".join(pieces[:count])})"|{_LETTER_ESCAPED}'
        pieces = pieces[count:]


def _otherwise(name: str) -> str:
    """A pattern for a name with at least one letter in the other case; empty if it has no letter."""
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
