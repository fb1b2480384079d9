"""A queue as the state store keeps it: bytes in, bytes out."""

from __future__ import annotations

from millstream.model.subscription import QueueKey
from millstream.subscriptions.fold import Fold
from millstream.subscriptions.snapshot import is_snapshot, read_snapshot, write_snapshot


class Image:
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

    def snapshot(self) -> bytes:
        """All of it."""
        return write_snapshot(self.fold)
