"""The sparse index of one segment: positions of batches by offset and by timestamp.

An entry is added at the start of a batch once `index.interval.bytes` were written since the last one. It holds the
offset and position of the batch, and the largest timestamp before it in the segment. Both columns share their ordinal:
`.index` holds (offset - base) << 32
position, `.timeindex` the timestamps, eight bytes each. The entry for the start of the segment is implicit.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right

from crc32c import crc32c

ENTRY_BYTES = 8
RELATIVE_OFFSET_MAX = 2**32 - 1
_POSITION_MASK = 0xFFFFFFFF


class Index:
    """Positions and timestamps of some batches of a segment."""

    __slots__ = ("_place_sum", "_summed", "_time_sum", "last_position", "places", "times")

    def __init__(self) -> None:
        self.places = array("Q")
        self.times = array("q")
        self.last_position = 0
        self._summed = 0
        self._place_sum = 0
        self._time_sum = 0

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def from_bytes(cls, places: bytes, times: bytes) -> Index:
        """Restore what `to_bytes` returned."""
        index = cls()
        index.places.frombytes(places)
        index.times.frombytes(times)
        if sys.byteorder == "big":
            index.places.byteswap()
            index.times.byteswap()
        if index.places:
            index.last_position = index.places[-1] & _POSITION_MASK
        return index

    def to_bytes(self, first: int = 0) -> tuple[bytes, bytes]:
        """Return the two columns from an entry on, little-endian."""
        places, times = self.places[first:], self.times[first:]
        if sys.byteorder == "big":
            places.byteswap()
            times.byteswap()
        return places.tobytes(), times.tobytes()

    def add(self, relative_offset: int, position: int, max_timestamp_before_ms: int) -> None:
        """Add the start of a batch."""
        self.places.append(relative_offset << 32 | position)
        self.times.append(max_timestamp_before_ms)
        self.last_position = position

    def position_of(self, relative_offset: int) -> int:
        """Return the start of the last known batch that begins at or before an offset."""
        at = bisect_right(self.places, relative_offset << 32 | _POSITION_MASK)
        return self.places[at - 1] & _POSITION_MASK if at else 0

    def start_before(self, position: int) -> tuple[int, int]:
        """Return the last known batch that begins at or before a position: its relative offset and its position."""
        at = bisect_right(self.places, position, key=_position)
        return (self.places[at - 1] >> 32, self.places[at - 1] & _POSITION_MASK) if at else (0, 0)

    def position_for_time(self, timestamp_ms: int) -> int:
        """Return the last known start that has no timestamp as late as this before it."""
        at = bisect_left(self.times, timestamp_ms)
        return self.places[at - 1] & _POSITION_MASK if at else 0

    def max_timestamp_before(self, position: int) -> tuple[int, int]:
        """Return the last known start at or before a position, and the largest timestamp before it."""
        at = bisect_right(self.places, position, key=_position)
        return (self.places[at - 1] & _POSITION_MASK, self.times[at - 1]) if at else (0, -1)

    def cut(self, position: int) -> None:
        """Remove every start at or beyond a position."""
        at = bisect_left(self.places, position, key=_position)
        del self.places[at:]
        del self.times[at:]
        self.last_position = self.places[-1] & _POSITION_MASK if at else 0
        self._summed = self._place_sum = self._time_sum = 0

    def checksum(self) -> int:
        """Return the CRC-32C of both columns in one number; only entries added since the last call are read."""
        places, times = self.to_bytes(self._summed)
        self._place_sum = crc32c(places, self._place_sum)
        self._time_sum = crc32c(times, self._time_sum)
        self._summed = len(self.places)
        return self._place_sum << 32 | self._time_sum


def _position(place: int) -> int:
    return place & _POSITION_MASK
