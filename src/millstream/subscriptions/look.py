"""What the log has at offsets that a queue looks at for the first time, as deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millstream.subscriptions.delta import Delta, DeltaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was read of the offsets [first, next_offset)."""

    first: int
    next_offset: int
    absent: Sequence[tuple[int, int]] = ()
    """Offsets without a message, as ranges with both ends."""
    matches: npt.NDArray[np.bool_] | None = None
    """For each offset whether the filter lets it through; None if it lets all through."""
    keys: npt.NDArray[np.int64] | None = None
    """For each offset the hash of its key, 0 without one."""
    due: Sequence[tuple[int, int]] = ()
    """Messages that are delayed: offset and time."""

    def since(self, offset: int) -> Look:
        """The part from an offset on; what lies between the offset and the first that was read is absent."""
        skipped = offset - self.first
        if skipped == 0:
            return self
        if skipped < 0:
            hole = -skipped
            return Look(
                first=offset,
                next_offset=self.next_offset,
                absent=[(offset, self.first - 1), *self.absent],
                matches=None if self.matches is None else np.concatenate((np.ones(hole, np.bool_), self.matches)),
                keys=None if self.keys is None else np.concatenate((np.zeros(hole, np.int64), self.keys)),
                due=self.due,
            )
        return Look(
            first=offset,
            next_offset=max(self.next_offset, offset),
            absent=[(max(first, offset), last) for first, last in self.absent if last >= offset],
            matches=None if self.matches is None else self.matches[skipped:],
            keys=None if self.keys is None else self.keys[skipped:],
            due=[(message, due_ms) for message, due_ms in self.due if message >= offset],
        )

    def key_bytes(self) -> bytes:
        """The hashes of all keys, 8 bytes each."""
        if self.keys is None:
            return bytes(8 * (self.next_offset - self.first))
        return np.ascontiguousarray(self.keys, np.int64).tobytes()

    def deltas(self, now_ms: int) -> list[Delta]:
        """What happens by it."""
        if self.next_offset <= self.first:
            return []
        first, last = self.first, self.next_offset - 1
        deltas = [Delta(DeltaKind.LOOKED, first, last, 0, 0, "", now_ms)]
        for begin, end in self.absent:
            deltas.append(Delta(DeltaKind.ABSENT, begin, end, 0, 0, "", now_ms))
        if self.matches is None and not self.due:
            return deltas
        wanted = np.ones(self.next_offset - self.first, np.bool_)
        for begin, end in self.absent:
            wanted[begin - self.first : end - self.first + 1] = False
        if self.matches is not None:
            deltas += self._filtered(wanted & ~self.matches, now_ms)
            wanted &= self.matches
        deltas += self._parked(wanted, now_ms)
        return deltas

    def _filtered(self, out: npt.NDArray[np.bool_], now_ms: int) -> list[Delta]:
        places = np.flatnonzero(out)
        if not len(places):
            return []
        begin, end = int(places[0]), int(places[-1])
        # A range says it all if it has no holes; otherwise there is a bit for each offset.
        bits = b"" if end - begin + 1 == len(places) else np.packbits(out[begin : end + 1], bitorder="little").tobytes()
        first, last = self.first + begin, self.first + end
        return [Delta(DeltaKind.FILTERED, first, last, 0, 0, "", now_ms, "", bits)]

    def _parked(self, wanted: npt.NDArray[np.bool_], now_ms: int) -> list[Delta]:
        deltas: list[Delta] = []
        for offset, due_ms in self.due:
            if due_ms <= now_ms or not wanted[offset - self.first]:
                continue
            before = deltas[-1] if deltas else None
            if before is not None and before.last + 1 == offset and before.due_ms == due_ms:
                deltas[-1] = before._replace(last=offset)
            else:
                deltas.append(Delta(DeltaKind.PARKED, offset, offset, 0, due_ms, "", now_ms))
        return deltas
