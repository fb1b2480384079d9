"""How much the queues of a node keep of how their messages have ended, all of them together."""

from __future__ import annotations

from typing import Final, Protocol

NODE_BYTES_MAX: Final = 64 * 1024 * 1024
"""There may be very many queues, so each of them keeping a little would be too much."""


class OutcomeHolder(Protocol):
    """A queue's share."""

    def clear(self) -> int:
        """Keep nothing any more; how many bytes that were."""


class OutcomeBudget:
    """Counts what is kept; beyond the limit, queues that have written nothing for longest forget."""

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # The one that has written last comes last.
        self._holders: dict[OutcomeHolder, None] = {}
        self.bytes = 0

    def resize(self, holder: OutcomeHolder, size: int) -> None:
        """A queue keeps so much more than before, or less."""
        self._holders.pop(holder, None)
        self._holders[holder] = None
        self.bytes += size
        while self.bytes > self._bytes_max and self._holders:
            self.release(next(iter(self._holders)))

    def release(self, holder: OutcomeHolder) -> None:
        """A queue keeps nothing any more."""
        if holder in self._holders:
            del self._holders[holder]
            self.bytes -= holder.clear()
