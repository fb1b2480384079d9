"""Time as a parameter, so that tests control it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The time functions that the broker uses."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970; may jump."""

    def monotonic(self) -> float:
        """Return seconds that never go back, for timeouts."""


class SystemClock:
    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()
