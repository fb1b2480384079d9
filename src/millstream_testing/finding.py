"""The findings of a history check, and how they are printed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

SHOWN_MAX = 20
"""How many findings of each kind are described; the rest is counted."""


class Kind(StrEnum):
    """The kinds of errors in a history."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    SKIPPED = "skipped"
    INCONSISTENT = "inconsistent"
    PHANTOM = "phantom"
    WENT_BACK = "went back"
    ABORTED_READ = "aborted read"
    EARLY_READ = "read before commit"
    TORN = "torn"


class Finding(NamedTuple):
    """A fault, and its position."""

    kind: Kind
    topic: str
    partition: int
    offset: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.topic}-{self.partition} at offset {self.offset}: {self.detail}"
