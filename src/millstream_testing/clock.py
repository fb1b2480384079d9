"""A clock that does not advance until the test moves it."""

from __future__ import annotations


class ManualClock:
    """Time that the test controls."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 1000.0

    def now_ms(self) -> int:
        """Wall-clock milliseconds since 1970."""
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance_ms(self, milliseconds: int) -> None:
        self._now_ms += milliseconds
        self._monotonic += milliseconds / 1000

    def jump_ms(self, milliseconds: int) -> None:
        """Move only the wall clock, as a correction does; it may go back."""
        self._now_ms += milliseconds
