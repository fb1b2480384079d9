"""The timers of one state machine: plain data, so that tests move the clock and nothing sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

from millstream.broker.coordination.state_machine import StateRecord
from millstream.core.clock import Clock

Action = Callable[[], Sequence[StateRecord]]
"""What to do when a timer is due: an operation without a response."""

_STALE_ENTRIES_MAX = 64


class Timer:
    """One deadline. `pure` means that the action only returns records and does not change the state."""

    __slots__ = ("action", "deadline", "pure", "queued_for")

    def __init__(self, deadline: float, action: Action, *, pure: bool) -> None:
        self.deadline = deadline
        self.action = action
        self.pure = pure
        # The heap entry of the timer; it may be earlier than the deadline, which costs one extra check.
        self.queued_for = deadline


class Timers:
    """Named deadlines. Postponing one, as every heartbeat does, is one dictionary look-up and no heap work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[Hashable, Timer] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._timers

    def schedule(self, key: Hashable, delay_ms: int, action: Action, *, pure: bool = False) -> None:
        """Set or move the timer of this name."""
        deadline = self._clock.monotonic() + delay_ms / 1000
        timer = self._timers.get(key)
        if timer is None:
            timer = self._timers[key] = Timer(deadline, action, pure=pure)
            self._push(deadline, key)
            return
        timer.deadline = deadline
        timer.action = action
        timer.pure = pure
        if deadline < timer.queued_for:
            timer.queued_for = deadline
            self._push(deadline, key)

    def cancel(self, key: Hashable) -> None:
        """Cancel a timer, if it exists."""
        self._timers.pop(key, None)

    def clear(self) -> None:
        """Cancel all timers."""
        self._timers.clear()
        self._heap.clear()

    @property
    def next_deadline(self) -> float | None:
        """Return when to check again, by the monotonic clock; possibly before anything is due."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, limit: int) -> list[Timer]:
        """Remove and return at most `limit` timers that are due, the earliest first."""
        now = self._clock.monotonic()
        due: list[Timer] = []
        while self._heap and self._heap[0][0] <= now and len(due) < limit:
            queued_for, _, key = heapq.heappop(self._heap)
            timer = self._timers.get(key)
            if timer is None or timer.queued_for != queued_for:
                continue
            if timer.deadline > now:
                timer.queued_for = timer.deadline
                self._push(timer.deadline, key)
                continue
            del self._timers[key]
            due.append(timer)
        return due

    def _push(self, deadline: float, key: Hashable) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (deadline, self._sequence, key))
        if len(self._heap) > 2 * len(self._timers) + _STALE_ENTRIES_MAX:
            self._drop_stale()

    def _drop_stale(self) -> None:
        live = {(timer.queued_for, key) for key, timer in self._timers.items()}
        self._heap = [entry for entry in self._heap if (entry[0], entry[2]) in live]
        heapq.heapify(self._heap)
