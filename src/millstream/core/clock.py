"""Time as a parameter, so that tests can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the broker asks of time."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970; may jump."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, for timeouts."""


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        return time.monotonic()
