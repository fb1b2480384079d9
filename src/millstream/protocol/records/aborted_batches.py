"""Skips what aborted transactions wrote, by the list in a fetch response.

A producer's batches are skipped from the first offset of its aborted transaction up to its next marker, which ended it:
a producer has one transaction at a time. The list applies to one response only.
"""

from __future__ import annotations

from collections.abc import Iterable

from millstream.protocol.records.batch import CONTROL_FLAG, TRANSACTIONAL_FLAG

Aborted = Iterable[tuple[int, int]]
"""Aborted transactions, each as producer id and first offset."""


class AbortedBatches:
    """Given every batch of a response in order, knows which to skip."""

    __slots__ = ("_ahead", "_now")

    def __init__(self, aborted: Aborted) -> None:
        self._ahead = sorted(((first, producer_id) for producer_id, first in aborted), reverse=True)
        self._now: set[int] = set()

    def holds(self, last_offset: int, attributes: int, producer_id: int) -> bool:
        """Return whether a batch belongs to an aborted transaction; its marker does not."""
        while self._ahead and self._ahead[-1][0] <= last_offset:
            self._now.add(self._ahead.pop()[1])
        if attributes & CONTROL_FLAG:
            self._now.discard(producer_id)
            return False
        return bool(attributes & TRANSACTIONAL_FLAG) and producer_id in self._now
