"""Transactions as compaction sees them: which batches were aborted, and which markers nothing is left of.

Only what lies below the last stable offset is compacted, so every transaction in it is decided. A marker stays while
there is a batch of its transaction, since whoever copies or recovers the log would find that open for ever. It stays
for one more pass, which notes from when on it may go, and then for as long as deletions do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from millstream.protocol.records.batch import BatchHeader

AbortedRange = tuple[int, int, int]
"""An aborted transaction: producer id, first offset, offset of its marker."""


class CleanedTransactions:
    """Follows one pass over a log, batch by batch."""

    def __init__(self, aborted: Iterable[AbortedRange]) -> None:
        self._aborted: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first, marker in aborted:
            self._aborted.setdefault(producer_id, []).append((first, marker))
        self._seen: set[int] = set()

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether a batch belongs to an aborted transaction."""
        ranges = self._aborted.get(header.producer_id) if header.is_transactional else None
        if not ranges:
            return False
        # Those of one producer follow each other.
        at = bisect_right(ranges, (int(header.base_offset), 2**63)) - 1
        return at >= 0 and header.base_offset < ranges[at][1]

    def met(self, header: BatchHeader) -> None:
        """The pass has come to a batch of data."""
        if header.is_transactional:
            self._seen.add(header.producer_id)

    def ended(self, header: BatchHeader) -> bool:
        """The pass has come to a marker; whether it met nothing of its transaction."""
        if header.producer_id in self._seen:
            self._seen.discard(header.producer_id)
            return False
        return True
