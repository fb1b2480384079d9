"""Whether the coordination store answers, and since when it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.core.clock import Clock

_logger = logging.getLogger(__name__)


class StoreHealth:
    """What the last call of the store told about it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._answered_once = False
        self.away_since_ms: int | None = None

    @property
    def available(self) -> bool:
        """Whether the last that was heard of the store was an answer."""
        return self.away_since_ms is None

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called each time `available` changes."""
        self._listeners.append(listener)

    def answered(self) -> None:
        """Note that the store gave an answer, whatever it was."""
        self._answered_once = True
        if self.away_since_ms is None:
            return
        away_ms = self._clock.now_ms() - self.away_since_ms
        self.away_since_ms = None
        _logger.info("the coordination store is back", extra={"away_ms": away_ms})
        self._notify()

    def silent(self, reason: str) -> None:
        """Note that the store gave no answer."""
        if self.away_since_ms is not None:
            return
        self.away_since_ms = self._clock.now_ms()
        if self._answered_once:
            # Before that, whoever waits for the first answer tells.
            _logger.warning(
                "the coordination store is away; data flows with the current leaders, changes of the cluster wait",
                extra={"reason": reason},
            )
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class HealthReporting:
    """A store that tells its health; what every back end has in common."""

    def __init__(self, clock: Clock) -> None:
        self._health = StoreHealth(clock)

    @property
    def available(self) -> bool:
        """Whether the last that was heard of the store was an answer."""
        return self._health.available

    @property
    def away_since_ms(self) -> int | None:
        """Since when it gives none."""
        return self._health.away_since_ms

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called each time `available` changes."""
        self._health.when_changed(listener)
