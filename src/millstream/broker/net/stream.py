"""A large response of which only the size is certain at first: parts in files are read while it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

Piece = bytes | bytearray | memoryview


class Stored(Protocol):
    """A part of a response that is not in memory yet."""

    def __len__(self) -> int:
        """Return how many bytes there are."""

    def read(self, at: int, size: int, /) -> bytes:
        """Read some of them; an error ends the connection, because the client was promised their number."""


class Stream:
    """The parts of a response, to be sent one after the other."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Piece | Stored]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Piece]:
        """Yield the bytes of every part."""
        for part in self.parts:
            yield part if isinstance(part, Piece) else part.read(0, len(part))
