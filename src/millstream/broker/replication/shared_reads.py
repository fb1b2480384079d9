"""Reads for one follower, cached briefly for the others: followers in step ask for the same bytes.

With three replicas each part of a log is then read once instead of twice. An entry is removed by the read that it
serves. Entries that are not requested again are evicted by later reads; the cache is small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.protocol.records.batch import Buffer

if TYPE_CHECKING:
    from millstream.broker.log.log import Log

KEPT_BYTES_MAX = 16 * 1024 * 1024


class SharedReads:
    """The last parts of logs that were read for followers."""

    __slots__ = ("_bytes_max", "_kept", "_size")

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: dict[tuple[Log, int, int], Buffer] = {}
        self._size = 0

    def __len__(self) -> int:
        """Return the number of bytes kept."""
        return self._size

    def take(self, log: Log, epoch: int, offset: int, max_bytes: int) -> Buffer | None:
        """Remove and return what was read at an offset in an epoch; None if there is nothing, or too much.

        Within an epoch a leader's log only grows, so a read can be repeated from here.
        """
        records = self._kept.pop((log, epoch, offset), None)
        if records is None:
            return None
        self._size -= len(records)
        return records if len(records) <= max_bytes else None

    def keep(self, log: Log, epoch: int, offset: int, records: Buffer) -> None:
        """Keep a read for one other follower."""
        key = (log, epoch, offset)
        before = self._kept.pop(key, None)
        if before is not None:
            self._size -= len(before)
        self._kept[key] = records
        self._size += len(records)
        while self._size > self._bytes_max:
            self._size -= len(self._kept.pop(next(iter(self._kept))))
