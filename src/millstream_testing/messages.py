"""Random messages of any of kio's classes, for tests that fill every field of every version."""

from __future__ import annotations

import dataclasses
import datetime
import random
import uuid
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin

from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map

_ITEMS_MAX: Final = 3
_TEXTS: Final = ("", "a", "orders.created", "ünïcödé ✓", "x" * 200)
_INTEGERS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UNSIGNED: Final = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
_MAKERS: Final[dict[str, Callable[[random.Random], Any]]] = {
    "bool": lambda rng: rng.random() < 0.5,
    "string": lambda rng: rng.choice(_TEXTS),
    "bytes": lambda rng: rng.randbytes(rng.randrange(20)),
    "records": lambda rng: rng.randbytes(rng.randrange(20)),
    "float64": lambda rng: rng.random() * 1e6,
    "uuid": lambda rng: uuid.UUID(int=rng.getrandbits(128) | 1),
    "error_code": lambda rng: rng.choice(list(ErrorCode)),
    "timedelta_i32": lambda rng: datetime.timedelta(milliseconds=rng.randrange(-1, 2**31)),
    "timedelta_i64": lambda rng: datetime.timedelta(milliseconds=rng.randrange(-1, 2**40)),
    "datetime_i64": lambda rng: datetime.datetime.fromtimestamp(rng.randrange(2**32), tz=datetime.UTC),
}


def versions_of(api_key: int) -> list[int]:
    """Return every version of an API that kio knows, oldest first."""
    return sorted(schema_name_map[api_key_map[api_key]])


def api_keys() -> Iterator[int]:
    yield from sorted(api_key_map)


def random_message(message_class: type[Any], rng: random.Random) -> Any:
    """Fill every field of a message at random, with nulls where they are allowed."""
    values = {field.name: _value(field, rng) for field in dataclasses.fields(message_class)}
    return message_class(**values)


def _value(field: dataclasses.Field[Any], rng: random.Random) -> Any:
    kind: Any = field.type
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
        # A null in a tagged field is the same as leaving it out, so only untagged fields get one.
        if "tag" not in field.metadata and rng.random() < 0.2:
            return None
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_item(item, field, rng) for _ in range(rng.randrange(_ITEMS_MAX + 1)))
    return _item(kind, field, rng)


def _item(kind: Any, field: dataclasses.Field[Any], rng: random.Random) -> Any:
    if dataclasses.is_dataclass(kind):
        nested: Any = kind
        return random_message(nested, rng)
    kafka_type = field.metadata["kafka_type"]
    if kafka_type in _INTEGERS:
        bits = _INTEGERS[kafka_type]
        return rng.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    if kafka_type in _UNSIGNED:
        return rng.randrange(2 ** _UNSIGNED[kafka_type])
    return _MAKERS[kafka_type](rng)
