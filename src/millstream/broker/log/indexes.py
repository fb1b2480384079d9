"""Loading the index of a segment from its files, or rebuilding it from the batches if those cannot be trusted."""

from __future__ import annotations

from collections import OrderedDict

from millstream.broker.log.files import Files
from millstream.broker.log.index import ENTRY_BYTES, Index
from millstream.broker.log.scan import Bad, Scan
from millstream.broker.log.segment import INDEX_SUFFIX, TIME_INDEX_SUFFIX, Segment, segment_path
from millstream.broker.log.state import read_whole

BUDGET_BYTES = 64 * 1024 * 1024


def load_index(files: Files, segment: Segment) -> Index | None:
    """Return the stored index; None if it is not the one that the checkpoint recorded."""
    wanted = segment.index_entries * ENTRY_BYTES
    if not wanted:
        return Index()
    try:
        places = read_whole(files, segment_path(segment.directory, segment.base_offset, INDEX_SUFFIX))
        times = read_whole(files, segment_path(segment.directory, segment.base_offset, TIME_INDEX_SUFFIX))
    except OSError:
        return None
    if len(places) < wanted or len(times) < wanted:
        return None
    index = Index.from_bytes(places[:wanted], times[:wanted])
    return index if index.checksum() == segment.index_checksum else None


def build_index(scan: Scan, segment: Segment, interval_bytes: int) -> Index:
    """Rebuild the index from the batches; damaged ones are left out and found again when they are read."""
    index, largest = Index(), -1
    for found in scan:
        if isinstance(found, Bad):
            continue
        if found.position - index.last_position >= interval_bytes:
            index.add(found.base_offset - segment.base_offset, found.position, largest)
        largest = max(largest, found.max_timestamp_ms)
    segment.index_stored = 0
    return index


class LoadedIndexes:
    """The indexes of sealed segments in memory, within one budget for all logs.

    When the budget is used up, the one that was loaded first is dropped. Active segments do not count.
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._loaded: OrderedDict[int, tuple[Segment, int]] = OrderedDict()

    def loaded(self, segment: Segment) -> None:
        """Count an index that was loaded."""
        if not segment.sealed or segment.index is None:
            return
        self._forget(id(segment))
        size = 2 * ENTRY_BYTES * len(segment.index)
        self._loaded[id(segment)] = (segment, size)
        self._bytes += size
        while self._bytes > self._budget_bytes and len(self._loaded) > 1:
            oldest = next(iter(self._loaded.values()))[0]
            self._forget(id(oldest))
            oldest.drop_index()

    def _forget(self, key: int) -> None:
        known = self._loaded.pop(key, None)
        if known is not None:
            self._bytes -= known[1]
