"""Whether the coordination store answers, and since when it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.core.clock import Clock

_logger = logging.getLogger(__name__)


class StoreHealth:
    """The health of the store according to its last call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._answered_once = False
        self.away_since_ms: int | None = None

    @property
    def available(self) -> bool:
        """Whether the last call of the store was answered."""
        return self.away_since_ms is None

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time `available` changes."""
        self._listeners.append(listener)

    def answered(self) -> None:
        """Note that the store answered, whatever it was."""
        self._answered_once = True
        if self.away_since_ms is None:
            return
        away_ms = self._clock.now_ms() - self.away_since_ms
        self.away_since_ms = None
        _logger.info("etcd is available again", extra={"away_ms": away_ms})
        self._notify()

    def silent(self, reason: str) -> None:
        """Note that the store did not answer."""
        if self.away_since_ms is not None:
            return
        self.away_since_ms = self._clock.now_ms()
        if self._answered_once:
            # Before that, the task that waits for the first answer reports it.
            _logger.warning(
                "etcd is unavailable; data flows with the current leaders, changes of the cluster wait",
                extra={"reason": reason},
            )
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class HealthReporting:
    """A store that reports its health; what every back end has in common."""

    def __init__(self, clock: Clock) -> None:
        self._health = StoreHealth(clock)

    @property
    def available(self) -> bool:
        """Whether the last call of the store was answered."""
        return self._health.available

    @property
    def away_since_ms(self) -> int | None:
        """Since when it does not answer."""
        return self._health.away_since_ms

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time `available` changes."""
        self._health.when_changed(listener)
