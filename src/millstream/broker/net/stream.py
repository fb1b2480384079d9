"""A large answer, of which only the size is certain from the start: what lies in files is read while it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

Piece = bytes | bytearray | memoryview


class Stored(Protocol):
    """A part of an answer that is not in memory yet."""

    def __len__(self) -> int:
        """How many bytes there are."""

    def read(self, at: int, size: int, /) -> bytes:
        """Some of them; what it raises ends the connection, since the client has been told that they will come."""


class Stream:
    """The parts of an answer, to be sent one after the other."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Piece | Stored]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Piece]:
        """Every part with its bytes."""
        for part in self.parts:
            yield part if isinstance(part, Piece) else part.read(0, len(part))
