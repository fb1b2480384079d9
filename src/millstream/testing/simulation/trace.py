"""What happened in a simulation, in order: told when a seed fails, and the same for the same seed."""

from __future__ import annotations

from zlib import crc32

from millstream.testing.simulation.loop import SimulatedLoop


class Trace:
    """Lines with their virtual time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._began = loop.time()
        self._lines: list[tuple[float, str, str]] = []

    def tell(self, who: str, what: str) -> None:
        """Add a line."""
        self._lines.append((self._loop.time() - self._began, who, what))

    def lines(self) -> list[str]:
        """Every line as text."""
        return [f"{when:10.4f}  {who:<10}  {what}" for when, who, what in self._lines]

    def digest(self) -> int:
        """A number that differs, very likely, when anything went another way."""
        return crc32(repr((self._lines, self._loop.steps)).encode())
