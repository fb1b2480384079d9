"""One JSON payload at a time: parsed, and each value put into the type of its column, or why it does not fit.

Nothing is bent: a number with a fraction is no long, a text is no number. Into a text column everything goes, as its
JSON, and into a column of doubles every number that is not too large for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn

import pyarrow as pa
import pyarrow.json as pj

from millstream.pipelines.jobs.land.spelling import picked
from millstream.pipelines.lake.places import ELEMENT, Place
from millstream.pipelines.source.nesting import NESTING_MAX, is_text_too_deep

_SHOWN_MAX: Final = 60
_FINER: Final = re.compile(r"(\.[0-9]{6})[0-9]{1,3}(?![0-9])")
"""The digits of a time beyond its microseconds."""
_BITS: Final = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
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


class Misfit(Exception):
    """Why a payload cannot be had as columns."""


class _Number(float):
    """A number with a fraction or an exponent, and how it was written."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def parsed(value: bytes | None) -> dict[str, Any]:
    """The object of a payload; a message without one is an empty object. Raise `Misfit` if it is none."""
    if value is None:
        return {}
    try:
        text = value.decode("utf-8")
        if is_text_too_deep(text):
            raise Misfit(f"the payload has more than {NESTING_MAX} objects and arrays within each other")
        document = json.loads(text, parse_float=_Number)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise Misfit(f"the payload is not UTF-8: byte {error.start} cannot be read") from None
    except UnicodeEncodeError:
        raise Misfit("the payload has half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise Misfit(f"the payload is not JSON: {error}" if value.strip() else "the payload is empty") from None
    if not isinstance(document, dict):
        raise Misfit(f"the payload is no JSON object but {_shown(document)}")
    return document


def value_for(value: Any, kind: pa.DataType, path: str) -> Any:
    """A value as its column takes it; raise `Misfit` if it does not fit."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else _as_json(value)
    if pa.types.is_struct(kind):
        return _struct(value, kind, path)
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            _refuse(value, "array", path)
        return [value_for(inner, kind.value_type, f"{path}[{index}]") for index, inner in enumerate(value)]
    return _scalar(value, kind, path)


def wider(value: Any, kind: pa.DataType, above: Place = ()) -> Iterator[Place]:
    """The places that are long and have a number here which only a double takes.

    A whole number of more than 64 bits that is written with all its digits is none: a double would not keep them.
    """
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        values = picked(value, (field.name for field in kind))
        for field in kind:
            yield from wider(values[field.name], field.type, (*above, field.name))
    elif pa.types.is_list(kind) and isinstance(value, list):
        for inner in value:
            yield from wider(inner, kind.value_type, (*above, ELEMENT))
    elif pa.types.is_int64(kind) and isinstance(value, float) and not (value.is_integer() and abs(value) < 2**63):
        yield above


def _struct(value: Any, kind: pa.StructType, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(value, "object", path)
    values = picked(value, (field.name for field in kind))
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
    if isinstance(value, str) or (isinstance(value, float) and not value.is_integer()):
        _refuse(value, name, path)
    number, limit = int(value), 2 ** (_BITS[kind] - 1)
    return number if -limit <= number < limit else _refuse(value, name, path)


def _double(value: Any, name: str, path: str) -> float:
    if isinstance(value, str):
        _refuse(value, name, path)
    try:
        number = float(value)
    except OverflowError:
        _refuse(value, name, path)
    # A number that is written out is never infinite; one that is called so is.
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
    """Times are read by the parser that reads whole batches, so that both ways agree."""
    schema = pa.schema([pa.field("value", kind)])
    # Java and Go write nanoseconds, of which columns keep the microseconds.
    text = json.dumps({"value": _FINER.sub(r"\1", value)}).encode()
    try:
        options = pj.ParseOptions(explicit_schema=schema)
        return pj.read_json(pa.BufferReader(text), parse_options=options).column("value")[0].as_py()
    except pa.ArrowInvalid:
        return _refuse(value, name, path)


def _as_json(value: Any) -> str:
    return value.text if isinstance(value, _Number) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _shown(value: Any) -> str:
    text = _as_json(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _refuse(value: Any, name: str, path: str) -> NoReturn:
    raise Misfit(f"{path}: {_shown(value)} is no {name}")
