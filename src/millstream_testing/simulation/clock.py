"""The clock of a simulated machine: virtual time, and a wall clock that can be stepped."""

from __future__ import annotations

from millstream_testing.simulation.loop import SimulatedLoop

_BEGIN_MS = 1_700_000_000_000


class SimulatedClock:
    """Follows the loop; `jump_ms` moves its wall clock only."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return _BEGIN_MS + self._ahead_ms + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()

    def jump_ms(self, milliseconds: int) -> None:
        """Move the wall clock, forward or back."""
        self._ahead_ms += milliseconds
