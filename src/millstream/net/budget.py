"""The global budget of bytes in flight: what all clients together may make the broker hold in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Budget:
    """Counts bytes and lets those who find no room wait in order."""

    __slots__ = ("_waiting", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Whether anything may be taken now. The last taker may overshoot, so that a large one is never stuck."""
        return self.used_bytes < self.limit_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def take(self, size_bytes: int) -> None:
        """Count bytes as held. Callers look at `has_room` first."""
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes as free again, and wake those who wait while there is room."""
        self.used_bytes -= size_bytes
        while self._waiting and self.has_room:
            _, resume = self._waiting.popitem(last=False)
            resume()

    def wait(self, who: Hashable, resume: Callable[[], None]) -> None:
        """Have `resume` called once there is room; at most one wait per `who`."""
        self._waiting[who] = resume

    def stop_waiting(self, who: Hashable) -> None:
        """Forget a wait, for example because the connection closed."""
        self._waiting.pop(who, None)
