"""The events of a simulation in order: printed when a seed fails, and the same for the same seed."""

from __future__ import annotations

from zlib import crc32

from millstream_testing.simulation.loop import SimulatedLoop


class Trace:
    """Lines with their virtual time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._began = loop.time()
        self._lines: list[tuple[float, str, str]] = []
        self._notes: list[tuple[int, float, str, str]] = []

    def record(self, source: str, event: str) -> None:
        self._lines.append((self.elapsed_s, source, event))

    @property
    def elapsed_s(self) -> float:
        """Return how long the simulation has run, in virtual time."""
        return self._loop.time() - self._began

    def note(self, source: str, event: str) -> None:
        """Add a line that is printed only on request and is not part of the digest."""
        self._notes.append((len(self._lines), self.elapsed_s, source, event))

    def lines(self) -> list[str]:
        """Return every line as text, including notes."""
        numbered = [(number, 1, *line) for number, line in enumerate(self._lines)]
        every = sorted([*numbered, *((number, 0, *rest) for number, *rest in self._notes)], key=lambda line: line[:2])
        return [f"{when:10.4f}  {source:<10}  {event}" for _, _, when, source, event in every]

    def digest(self) -> int:
        """Return a number that, very likely, differs if anything happened differently."""
        return crc32(repr((self._lines, self._loop.steps)).encode())
