"""The leader-epoch history: at which offset each leader of the partition began to write."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

from millstream.core.ids import NO_EPOCH, NO_OFFSET, Epoch, Offset

OFFSET_MAX = 2**63 - 1


class EpochHistory:
    """Epochs and their first offsets, both strictly increasing."""

    __slots__ = ("_epochs", "_starts", "latest")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.latest: Epoch = NO_EPOCH
        for epoch, start in entries:
            self.begin(epoch, start)

    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self._epochs, self._starts, strict=True))

    def begin(self, epoch: int, start: int) -> None:
        """Record that an epoch writes from an offset on; a known or older one changes nothing."""
        if epoch <= self.latest:
            return
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(start)
        self.latest = Epoch(epoch)

    def extend_back(self, epoch: int, start: int) -> None:
        """Record that an epoch before the latest wrote from an offset on, which may precede all known ones."""
        at = bisect_left(self._epochs, epoch)
        if epoch > self.latest:
            self.begin(epoch, start)
        elif self._epochs[at] != epoch:
            self._epochs.insert(at, epoch)
            self._starts.insert(at, start)
        elif start < self._starts[at]:
            self._starts[at] = start

    def end_of(self, epoch: int, end_offset: int) -> tuple[Epoch, Offset]:
        """Return the largest known epoch up to the given one, and where it ended.

        As in Kafka, an epoch before all known ones ended where the first of them began, and one after all of them is
        unknown: (-1, -1).
        """
        if epoch < 0 or epoch > self.latest:
            return NO_EPOCH, NO_OFFSET
        if epoch == self.latest:
            return Epoch(epoch), Offset(end_offset)
        at = bisect_right(self._epochs, epoch)
        return Epoch(self._epochs[at - 1] if at else epoch), Offset(self._starts[at])

    def epoch_at(self, offset: int) -> Epoch:
        """Return the epoch that wrote an offset, or -1."""
        at = bisect_right(self._starts, offset)
        return Epoch(self._epochs[at - 1]) if at else NO_EPOCH

    def range_at(self, offset: int) -> tuple[Epoch, int]:
        """Return the epoch that wrote an offset, or -1, and the offset at which the next epoch begins."""
        at = bisect_right(self._starts, offset)
        until = self._starts[at] if at < len(self._starts) else OFFSET_MAX
        return Epoch(self._epochs[at - 1]) if at else NO_EPOCH, until

    def jumps(self, step: int) -> list[int]:
        """Return the start offsets of epochs that exceed the previous one by at least `step`."""
        epochs = pairwise((NO_EPOCH, *self._epochs))
        return [start for (before, after), start in zip(epochs, self._starts, strict=True) if after - before >= step]

    def cut_after(self, end_offset: int) -> None:
        """Forget the epochs that begin at or beyond a new end of the log."""
        while self._starts and self._starts[-1] >= end_offset:
            self._starts.pop()
            self._epochs.pop()
        self.latest = Epoch(self._epochs[-1]) if self._epochs else NO_EPOCH

    def cut_before(self, start_offset: int) -> None:
        """Forget the epochs that ended at or below the first offset that is still stored."""
        while len(self._starts) > 1 and self._starts[1] <= start_offset:
            del self._starts[0], self._epochs[0]
