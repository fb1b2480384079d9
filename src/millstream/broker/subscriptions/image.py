"""A queue as the state store keeps it: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Final

from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.snapshot import is_snapshot, read_snapshot, write_snapshot
from millstream.core.subscription import QueueKey

LARGE: Final = 2000
"""A snapshot of so many messages takes up to half a millisecond."""


class FoldImage:
    """The fold of what was written of a queue."""

    __slots__ = ("fold",)

    def __init__(self, key: QueueKey) -> None:
        self.fold = Fold(key)

    def replay(self, data: bytes) -> None:
        """Take in a frame of deltas, or a snapshot, which stands for everything before it."""
        if is_snapshot(data):
            self.fold = read_snapshot(data)
        else:
            self.fold.replay(data)

    @property
    def is_large(self) -> bool:
        """Whether its snapshot takes longer to make than the loop should wait."""
        return len(self.fold.window) + len(self.fold.stragglers) > LARGE

    def capture(self) -> Callable[[], bytes]:
        """What makes the snapshot of it as it is now, on any thread."""
        # Copying the columns of a million messages takes a few milliseconds, all the rest may take a hundred.
        return partial(write_snapshot, deepcopy(self.fold))

    def snapshot(self) -> bytes:
        """All of it."""
        return write_snapshot(self.fold)
