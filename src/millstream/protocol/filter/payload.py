"""Fields of JSON payloads: every payload is parsed once for all the fields that are asked for.

What is not JSON has no fields. That goes for bytes that are not UTF-8, for numbers that do not fit into a double, and
for more than `DEPTH_MAX` arrays and objects within each other, so that the answer is the same wherever it is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from millstream.protocol.filter.node import Path, Step
from millstream.protocol.filter.operation import SCALARS

DEPTH_MAX = 128
BYTES_MAX = 16 * 1024 * 1024
"""A larger payload counts as one that is not JSON."""

PARSED_BYTES = 64 * 1024
"""Payloads that are kept parsed at a time. Objects of Python take up to thirty times the bytes of their text, and what
is dropped before it leaves the processor's caches is made in half the time."""

NESTED = object()
"""Stands for an object or array, of which a filter can tell only that it is not NULL."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder().decode


def read_fields(payloads: Sequence[bytes | None], paths: Collection[Path]) -> dict[Path, list[Any]]:
    """For every path, its value in every payload; None where there is none."""
    fields: dict[Path, list[Any]] = {path: [] for path in paths}
    for chunk in _chunks(payloads):
        walked: dict[Path, list[Any]] = {(): _parse_all(chunk)}
        for path, column in fields.items():
            found = _walk(walked, path)
            column += found if len(chunk) == len(payloads) else _without_trees(found)
    return fields


def _chunks(payloads: Sequence[bytes | None]) -> Iterator[Sequence[bytes | None]]:
    """Runs of payloads of `PARSED_BYTES` or a little more; a large payload ends its run."""
    start = size = 0
    for at, payload in enumerate(payloads):
        size += len(payload) if payload is not None else 0
        if size > PARSED_BYTES:
            yield payloads[start : at + 1]
            start, size = at + 1, 0
    if start < len(payloads):
        yield payloads[start:] if start else payloads


def _parse_all(payloads: Sequence[bytes | None]) -> list[Any]:
    """In one go if all of them are JSON, as they mostly are; else one by one."""
    if payloads and len(payloads[-1] or b"") > BYTES_MAX:
        return [_parse(payload) for payload in payloads]
    try:
        parsed = [None if payload is None else _decode(payload) for payload in payloads]
    except _UNREADABLE:
        return [_parse(payload) for payload in payloads]
    for at, payload in enumerate(payloads):
        if payload is not None and len(payload) > 2 * DEPTH_MAX and _may_be_deep(payload) and _is_deep(parsed[at]):
            parsed[at] = None
    return parsed


def _parse(payload: bytes | None) -> Any:
    if payload is None or len(payload) > BYTES_MAX:
        return None
    try:
        parsed = _decode(payload)
    except _UNREADABLE:
        return None
    return None if _may_be_deep(payload) and _is_deep(parsed) else parsed


def _may_be_deep(payload: bytes) -> bool:
    return payload.count(b"[") + payload.count(b"{") > DEPTH_MAX


def _is_deep(parsed: Any) -> bool:
    level: list[Any] = [parsed]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in _inner(outer) if inner.__class__ in (dict, list)]
        if not level:
            return False
    return True


def _inner(outer: Any) -> Iterable[Any]:
    if outer.__class__ is dict:
        return outer.values()
    return outer if outer.__class__ is list else ()


def _walk(walked: dict[Path, list[Any]], path: Path) -> list[Any]:
    """The column of a path; what it has in common with another path is walked once."""
    known = len(path)
    while path[:known] not in walked:
        known -= 1
    column = walked[path[:known]]
    for at in range(known, len(path)):
        column = walked[path[: at + 1]] = _step(column, path[at])
    return column


def _step(column: list[Any], step: Step) -> list[Any]:
    if isinstance(step, str):
        return [outer.get(step) if outer.__class__ is dict else None for outer in column]
    return [outer[step] if outer.__class__ is list and step < len(outer) else None for outer in column]


def _without_trees(column: list[Any]) -> list[Any]:
    return [field if field is None or field.__class__ in SCALARS else NESTED for field in column]
