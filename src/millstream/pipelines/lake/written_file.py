"""Files that tasks wrote and that no table knows of yet, as tasks tell the driver of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Written(NamedTuple):
    """One file. It goes through Arrow and JSON as it is."""

    path: str
    """Where it is, seen from the folder of its table."""
    rows: int
    bytes: int
    stats: str
    """Counts, smallest and largest values, as Delta keeps them: JSON."""
    partition_values: dict[str, str]


def to_json(files: Iterable[Written]) -> str:
    """Files as a text."""
    return json.dumps([list(file) for file in files])


def from_json(text: str) -> list[Written]:
    """The files of such a text; raises `msgspec.ValidationError` for what is none."""
    return msgspec.json.decode(text, type=list[Written])
