"""How much the queues of a node keep of how their messages have ended, all of them together."""

from __future__ import annotations

from typing import Final, Protocol

NODE_BYTES_MAX: Final = 64 * 1024 * 1024
"""There may be very many queues, so each of them keeping a little would be too much."""


class Forgetful(Protocol):
    """A queue's share."""

    def forget(self) -> int:
        """Keep nothing any more; how many bytes that were."""


class Remembered:
    """Counts what is kept; beyond the limit, queues that have written nothing for longest forget."""

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # The one that has written last comes last.
        self._shares: dict[Forgetful, None] = {}
        self.bytes = 0

    def grew(self, share: Forgetful, size: int) -> None:
        """A queue keeps so much more than before, or less."""
        self._shares.pop(share, None)
        self._shares[share] = None
        self.bytes += size
        while self.bytes > self._bytes_max and self._shares:
            self.left(next(iter(self._shares)))

    def left(self, share: Forgetful) -> None:
        """A queue keeps nothing any more."""
        if share in self._shares:
            del self._shares[share]
            self.bytes -= share.forget()
