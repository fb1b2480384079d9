"""Payload schemas in Spark's notation, parsed without Spark, and the event time of a landed table.

It supports the types that JSON payloads are decoded into, so that a node without Spark reports errors when a pipeline
is declared. Spark parses everything that is accepted here in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.core.errors import InvalidSetting
from millstream.core.setting import suggestion
from millstream.core.sql import Kind, Token, setting_error_at, sql_tokens

DECIMAL_DIGITS_MAX: Final = 38
_DECIMAL_DIGITS: Final = 10
_DEPTH_MAX: Final = 50
_OF_ENVELOPE: Final = ("source.", "transaction.", "ts_ms", "ts_us", "ts_ns")
"""The prefixes of fields of Debezium's envelope by which changes may be ordered."""

_SIMPLE: Final[Mapping[str, str]] = {
    "boolean": "boolean",
    "tinyint": "tinyint",
    "byte": "tinyint",
    "smallint": "smallint",
    "short": "smallint",
    "int": "int",
    "integer": "int",
    "bigint": "bigint",
    "long": "bigint",
    "float": "float",
    "real": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
}
_DECIMAL: Final = ("decimal", "dec", "numeric")
_NESTED: Final[Mapping[str, str]] = {
    "array": "array<string>",
    "map": "map<string, long>",
    "struct": "struct<name string>",
}
"""Nested types, each with an example."""
_REFUSED: Final = ("char", "character", "geography", "geometry", "interval", "time", "varchar", "variant", "void")
"""Spark types that payloads are not decoded into."""
_KNOWN: Final = (*_SIMPLE, *_DECIMAL, *_NESTED)
_LANDED: Final = {**dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "long"), "float": "double"}
"""The types that tables have instead."""

_ILLEGAL: Final = frozenset(" ,;{}()\n\t=")
"""Characters that Parquet, as Spark and Delta Lake write it, does not allow in column names."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type by Spark's simple name."""

    name: str
    numbers: tuple[int, ...] = ()
    """The precision and the scale of a decimal."""
    parts: tuple[PayloadColumn, ...] = ()
    """The fields of a struct, the `element` of an array, the `key` and the `value` of a map."""


@dataclass(frozen=True, slots=True)
class PayloadColumn:
    """A column, or a field of one."""

    name: str
    type: ColumnType


def parse_columns(text: str, *, about: str = "`schema`") -> tuple[PayloadColumn, ...]:
    """Parse a schema; raise `InvalidSetting`, which shows the position, if it is invalid."""
    columns = _Reader(about, text).columns()
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSetting(f"{about} names column {name!r} twice")
    return columns


def order_column(name: str, *, is_debezium: bool) -> str:
    """Return the payload column of `order.by`; a field of Debezium's envelope is stored under another name."""
    return "__" + name.replace(".", "_") if is_debezium and name.startswith(_OF_ENVELOPE) else name


def check_changes(columns: Sequence[PayloadColumn], key: Sequence[str], order: str, *, is_debezium: bool) -> None:
    """Raise `InvalidSetting` unless the columns of the key, and the one that orders changes, are among these."""
    named = [("key", name, name) for name in key]
    if order:
        named.append(("order.by", order, order_column(order, is_debezium=is_debezium)))
    for setting, given, name in named:
        if not _has_column(columns, name):
            example = f"{name.replace('.', ' struct<')} long{'>' * name.count('.')}"
            raise InvalidSetting(
                f"`{setting}` names {given}, and `schema` has no column {name}: every message would go to the "
                f"quarantine; add it with its type, such as `{example}`"
            )


def _has_column(columns: Iterable[PayloadColumn], path: str) -> bool:
    """Whether there is a column, or a field of a struct, at a dotted path."""
    first, _, rest = path.partition(".")
    column = next((column for column in columns if column.name == first), None)
    return column is not None and (not rest or (column.type.name == "struct" and _has_column(column.type.parts, rest)))


def check_landed(columns: Iterable[PayloadColumn], *, about: str = "`schema`", is_inner: bool = False) -> None:
    """Raise `InvalidSetting` for columns that a lake table cannot have."""
    names: dict[str, str] = {}
    for column in columns:
        other = names.setdefault(column.name.lower(), column.name)
        if other is not column.name:
            raise InvalidSetting(f"{about} has columns {other!r} and {column.name!r}, which differ in case alone")
        _check_landed(column, about, is_inner=is_inner)


def kept_types(before: Iterable[PayloadColumn], after: Iterable[PayloadColumn], above: str = "") -> Iterator[str]:
    """Return the columns, with their types, that a table of one schema keeps although another one changes them."""
    known = {column.name.lower(): column.type for column in before}
    for column in after:
        was, path = known.get(column.name.lower()), f"{above}{column.name}"
        if was is None:
            continue
        if was.parts and was.name == column.type.name:
            yield from kept_types(was.parts, column.type.parts, f"{path}.")
            continue
        old, new = (_LANDED.get(kind.name, kind.name) for kind in (was, column.type))
        if (old, was.numbers) != (new, column.type.numbers) and (old, new) != ("long", "double"):
            yield f"{path} {old}"


def is_legal(name: str) -> bool:
    """Whether a field can be a column of a table, or part of one."""
    return bool(name) and name.isprintable() and _ILLEGAL.isdisjoint(name)


def _check_landed(column: PayloadColumn, about: str, *, is_inner: bool) -> None:
    kind = column.type.name
    if not is_legal(column.name):
        raise InvalidSetting(f"{about} names {column.name!r}, which cannot be a column of a table")
    if kind == "binary" or (kind == "map" and is_inner):
        within = " within another column" if kind == "map" else ""
        raise InvalidSetting(
            f"{about} has {column.name} as {kind}{within}, a type that payloads cannot be landed as; declare it as "
            "string to keep its JSON"
        )
    if kind == "map" and column.type.parts[0].type.name != "string":
        raise InvalidSetting(f"{about} has {column.name} as a map whose keys are not string, as those of JSON are")
    check_landed(column.type.parts, about=about, is_inner=True)


class _Reader:
    """Parses one schema."""

    def __init__(self, about: str, text: str) -> None:
        self._about = about
        self._text = text
        self._tokens = sql_tokens(about, text)
        self._at = 0

    def columns(self) -> tuple[PayloadColumn, ...]:
        """Parse the whole text."""
        is_struct = self._next_token.is_keyword("STRUCT") and self._tokens[1].is_sign("<")
        found = self._type(0).parts if is_struct else self._fields(0)
        if self._next_token.kind is not Kind.END:
            raise self._error_at(self._next_token, f"a comma is missing before {self._next_token.text!r}")
        return found

    def _fields(self, depth: int) -> tuple[PayloadColumn, ...]:
        fields = [self._field(depth)]
        while self._next_token.is_sign(","):
            self._advance()
            fields.append(self._field(depth))
        return tuple(fields)

    def _field(self, depth: int) -> PayloadColumn:
        name = self._advance()
        if name.kind not in (Kind.WORD, Kind.NAME):
            raise self._error_at(
                name,
                "a column name is missing; put a name with other characters than letters and digits in backquotes",
            )
        if name.kind is Kind.WORD and not name.text.isascii():
            raise self._error_at(name, f"write `{name.text}` in backquotes")
        if self._next_token.is_sign(":"):
            self._advance()
        kind = self._type(depth)
        self._skip_remarks()
        return PayloadColumn(name.text, kind)

    def _skip_remarks(self) -> None:
        """Skip constraints and comments, which have no effect: every field of a payload may be missing."""
        if self._next_token.is_keyword("NOT"):
            self._advance()
            self._expect_word("NULL")
        if self._next_token.is_keyword("COMMENT"):
            self._advance()
            comment = self._advance()
            if comment.kind is not Kind.TEXT:
                raise self._error_at(comment, "a comment must be quoted")

    def _type(self, depth: int) -> ColumnType:
        token = self._advance()
        if depth > _DEPTH_MAX:
            raise self._error_at(token, f"types are nested more than {_DEPTH_MAX} deep")
        name = token.text.lower() if token.kind is Kind.WORD else ""
        if name in _SIMPLE:
            return ColumnType(_SIMPLE[name])
        if name in _DECIMAL:
            return self._decimal(token)
        if name in _NESTED:
            return self._nested(name, depth + 1)
        if name in _REFUSED:
            raise self._error_at(token, f"payloads are not decoded into the type {name}; use string to keep the text")
        if token.kind in (Kind.WORD, Kind.NAME):
            known = suggestion(name, _KNOWN) or f"; there are {', '.join(_KNOWN)}"
            raise self._error_at(token, f"{token.text!r} is not a type{known}")
        raise self._error_at(token, "a type is missing, as in `id long, name string`")

    def _decimal(self, token: Token) -> ColumnType:
        digits, behind = self._numbers() if self._next_token.is_sign("(") else (_DECIMAL_DIGITS, 0)
        if not behind <= digits <= DECIMAL_DIGITS_MAX or not digits:
            raise self._error_at(
                token, f"a decimal has 1 to {DECIMAL_DIGITS_MAX} digits, and no more than these behind the point"
            )
        return ColumnType("decimal", (digits, behind))

    def _numbers(self) -> tuple[int, int]:
        """Parse one or two numbers in brackets."""
        self._advance()
        first, second = self._number(), 0
        if self._next_token.is_sign(","):
            self._advance()
            second = self._number()
        self._expect(")", "a closing bracket is missing")
        return first, second

    def _number(self) -> int:
        token = self._advance()
        if not (token.kind is Kind.WORD and token.text.isascii() and token.text.isdigit()):
            raise self._error_at(token, "a number is missing")
        return int(token.text)

    def _nested(self, name: str, depth: int) -> ColumnType:
        self._expect("<", f"say what the {name} contains, as in {_NESTED[name]}")
        if name == "struct":
            parts = self._fields(depth)
        elif name == "array":
            parts = (PayloadColumn("element", self._type(depth)),)
        else:
            key = self._type(depth)
            self._expect(",", "a map has a type for keys and one for values, as in map<string, long>")
            parts = (PayloadColumn("key", key), PayloadColumn("value", self._type(depth)))
        self._expect(">", f"the {name} is not closed by >")
        return ColumnType(name, (), parts)

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def _next_token(self) -> Token:
        return self._tokens[self._at]

    def _advance(self) -> Token:
        token = self._next_token
        # The end is never passed.
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _expect(self, mark: str, otherwise: str) -> None:
        token = self._advance()
        if not token.is_sign(mark):
            raise self._error_at(token, otherwise)

    def _expect_word(self, word: str) -> None:
        token = self._advance()
        if not token.is_keyword(word):
            raise self._error_at(token, f"{word} is missing")

    def _error_at(self, token: Token, reason: str) -> InvalidSetting:
        return setting_error_at(self._about, self._text, token.start, token.end, reason)


DAY: Final = "day"
HOUR: Final = "hour"
MESSAGE_TIME: Final = "timestamp"
"""The column with the timestamp of the message itself."""

_WRITTEN: Final = re.compile(r"(?:(?P<unit>\w+)\s*\((?P<of>[^()]+)\)|(?P<alone>[^()]+))", re.IGNORECASE)
_TIMES: Final = ("timestamp", "timestamp_ntz", "date", "string", "bigint", "int", "double", "decimal")
"""The types of columns that can hold a time."""


@dataclass(frozen=True, slots=True)
class EventTime:
    """The day or the hour of a column."""

    unit: str
    column: str
    """A column of the table; dots lead into objects."""

    @classmethod
    def parse(cls, text: str) -> EventTime:
        """Parse `day(created_at)`, `hour(created_at)` or `created_at`; raise `InvalidSetting` for anything else."""
        match = _WRITTEN.fullmatch(text.strip())
        unit = DAY if match is None else (match["unit"] or DAY).lower()
        column = "" if match is None else (match["of"] or match["alone"]).strip()
        if unit not in (DAY, HOUR) or not all(column.split(".")):
            raise InvalidSetting(
                f"`partition.by` must be day(COLUMN), hour(COLUMN) or COLUMN, as in day(created_at), not {text!r}"
            )
        return cls(unit, column)

    def __str__(self) -> str:
        return f"{self.unit}({self.column})"

    def check_columns(self, columns: Iterable[PayloadColumn]) -> None:
        """Raise `InvalidSetting` unless its column is one of the given ones, with a type that holds times."""
        if self.column == MESSAGE_TIME:
            return
        column: PayloadColumn | None = None
        parts: Iterable[PayloadColumn] = columns
        for name in self.column.split("."):
            # A field with the name of a column of every table has a prefix in the table.
            names = (name.lower(), name.lower().removeprefix("payload_"))
            column = next((part for part in parts if part.name.lower() in names), None)
            parts = () if column is None or column.type.name != "struct" else column.type.parts
        if column is None:
            raise InvalidSetting(f"`partition.by` names {self.column!r}, which `schema` does not have")
        if column.type.name not in _TIMES:
            raise InvalidSetting(
                f"`partition.by` names {self.column!r}, which `schema` declares as {column.type.name}; a time is a "
                "timestamp, a date, a text in ISO 8601, or a number of milliseconds since 1970"
            )
