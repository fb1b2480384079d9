"""The work of compaction: reads segments, and writes the records that are not superseded into a new file.

It runs alongside the log and does not change it: the new file has a temporary name, and the log swaps it in when it is
complete and synced. On a real disk this runs in a child process (`cleaner_child`), because it looks at every record in
plain Python.

The batches of the new file stay contiguous: an empty batch of 61 bytes covers the offsets of removed ones. Every
check that relies on contiguous offsets keeps working, and a damaged offset can be distinguished from a removed one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import msgspec
from crc32c import crc32c

from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.scan import BadRange, Scan, Window
from millstream.broker.log.segment import Index, Segment, cleaned_path
from millstream.core.errors import BatchRejected, MillstreamError
from millstream.protocol.records.batch import DELETE_HORIZON_FLAG, TIMESTAMP_TYPE_FLAG, BatchHeader, read_header
from millstream.protocol.records.record import records_section
from millstream.protocol.records.rewrite import RawRecord, can_shift, empty_batch, raw_records, rebuild_batch

KEYS_MAX = 1_000_000
DIGEST_BYTES = 16


class KeyMap:
    """Keys and their last offsets.

    A key of 16 bytes or more is represented by its 128-bit BLAKE2b digest, so memory does not depend on key length; a
    shorter key represents itself and cannot be mistaken for a digest. A key takes about 170 bytes.
    """

    __slots__ = ("_keys_max", "_offsets")

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._offsets: dict[bytes, int] = {}
        self._keys_max = keys_max

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def full(self) -> bool:
        """Return whether it holds the maximum number of keys; the batch that filled it is still added as a whole."""
        return len(self._offsets) >= self._keys_max

    def record(self, key: bytes, offset: int) -> None:
        """Record a record of this key, which comes after all earlier ones."""
        self._offsets[_map_key(key)] = offset

    def is_superseded(self, key: bytes, offset: int) -> bool:
        """Whether a later record of the same key is known."""
        last = self._offsets.get(_map_key(key))
        return last is not None and offset < last


def _map_key(key: bytes) -> bytes:
    return key if len(key) < DIGEST_BYTES else blake2b(key, digest_size=DIGEST_BYTES).digest()


AbortedRange = tuple[int, int, int]
"""An aborted transaction: producer id, first offset, offset of its marker."""


class CleanedTransactions:
    """Tracks the transactions of a log during one pass, batch by batch."""

    def __init__(self, aborted: Iterable[AbortedRange]) -> None:
        self._aborted: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first, marker in aborted:
            self._aborted.setdefault(producer_id, []).append((first, marker))
        self._seen: set[int] = set()

    def is_aborted(self, header: BatchHeader) -> bool:
        ranges = self._aborted.get(header.producer_id) if header.is_transactional else None
        if not ranges:
            return False
        # Those of one producer follow each other.
        at = bisect_right(ranges, (int(header.base_offset), 2**63)) - 1
        return at >= 0 and header.base_offset < ranges[at][1]

    def record_data(self, header: BatchHeader) -> None:
        if header.is_transactional:
            self._seen.add(header.producer_id)

    def ended(self, header: BatchHeader) -> bool:
        """Record a marker; return whether no batch of its transaction was seen."""
        if header.producer_id in self._seen:
            self._seen.discard(header.producer_id)
            return False
        return True


WRITE_BYTES = 1024 * 1024

_EMPTY_OFFSETS_MAX = 2**31 - 1


class DamagedSource(MillstreamError):
    """A segment differs from what the log expects; nothing was changed."""

    def __init__(self, base_offset: int, position: int) -> None:
        super().__init__(f"the segment {base_offset} is damaged at byte {position}")
        self.base_offset = base_offset
        self.position = position


class CleaningCancelled(MillstreamError):
    """The store is closing, or the process that requested the work is gone."""


class SourceSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment as the log knows it."""

    base_offset: int
    path: str
    size: int
    next_offset: int


class CompactionPass(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction of one log: everything from its start to `cleanable_to`, with one new segment per group."""

    directory: str
    token: str
    groups: list[list[SourceSegment]]
    dirty_from: int
    """Below this offset every key occurs once already."""
    cleanable_to: int
    epochs: list[tuple[int, int]]
    retained_offsets: list[int]
    """Offsets of the batches that identify retries of idempotent producers, and of their last markers."""
    aborted: list[AbortedRange] = []
    now_ms: int
    delete_retention_ms: int
    keep_tombstones: bool
    """Whether a skipped segment may hold older values, so that no tombstone may be removed."""
    index_interval_bytes: int
    keys_max: int = KEYS_MAX


class MapResult(msgspec.Struct, frozen=True):
    """The offset up to which the keys are known."""

    end_offset: int
    keys: int


class CleanResult(msgspec.Struct, frozen=True):
    """The outcome of a group. `changed` is False if the new file would be the same as the old one."""

    changed: bool
    size: int
    max_timestamp_ms: int
    places: bytes
    times: bytes
    read_bytes: int
    records_removed: int
    ended: list[int]
    """The markers of transactions of which no record is left."""


class Cleaner:
    """Does the work of one pass: first `map_keys`, then `clean` for each group, in order.

    `progress` is called with the number of bytes worked on, and may wait or raise.
    """

    def __init__(self, files: Files, compaction_pass: CompactionPass, progress: Callable[[int], None]) -> None:
        self._files = files
        self._pass = compaction_pass
        self._progress = progress
        self._epochs = EpochHistory(compaction_pass.epochs)
        self._retained_offsets = frozenset(compaction_pass.retained_offsets)
        self._keys = KeyMap(compaction_pass.keys_max)
        self._mapped_to = compaction_pass.dirty_from
        self._keep_tombstones = compaction_pass.keep_tombstones
        self._transactions = CleanedTransactions(compaction_pass.aborted)
        self._ended: list[int] = []

    def map_keys(self) -> MapResult:
        """Collect the last offset of each key from `dirty_from` on, until the map is full."""
        for source in (source for group in self._pass.groups for source in group):
            if source.next_offset <= self._pass.dirty_from:
                continue
            for header, batch in self._batches(source):
                if header.next_offset <= self._pass.dirty_from:
                    continue
                if self._keys.full:
                    return MapResult(self._mapped_to, len(self._keys))
                self._map_batch(header, batch)
                self._mapped_to = int(header.next_offset)
        self._mapped_to = self._pass.cleanable_to
        return MapResult(self._mapped_to, len(self._keys))

    def _map_batch(self, header: BatchHeader, batch: memoryview) -> None:
        if header.is_control or self._transactions.is_aborted(header):
            return
        records = self._records(header, batch)
        if records is not None:
            for record in records[1]:
                if record.key is not None:
                    self._keys.record(record.key, header.base_offset + record.offset_delta)

    def clean(self, at: int) -> CleanResult:
        """Write the retained records of a group into a new file and sync it."""
        group = self._pass.groups[at]
        writer = _Writer(self._files, self._pass, group[0].base_offset, self._epochs)
        read_bytes = removed = before = 0
        self._ended = []
        try:
            for source in group:
                for header, batch in self._batches(source):
                    before = crc32c(batch, before)
                    kept = self._filter_batch(header, batch)
                    if kept is not None:
                        writer.put(kept, header.base_offset)
                        removed -= read_header(kept).record_count
                    removed += header.record_count
                read_bytes += source.size
                # Not across the end of a segment, so that each of the old ones ends where a batch does.
                writer.fill(source.next_offset)
            same = len(group) == 1 and writer.segment.size == group[0].size and writer.checksum == before
            writer.finish()
        finally:
            writer.close()
        places, times = writer.index.to_bytes()
        new = writer.segment
        if same:
            self._files.remove(new.path)
        return CleanResult(not same, new.size, new.max_timestamp_ms, places, times, read_bytes, removed, self._ended)

    def _filter_batch(self, header: BatchHeader, batch: memoryview) -> bytes | bytearray | memoryview | None:
        """Return the retained part of a batch; None if an empty batch can replace it."""
        if header.is_control:
            return self._filter_marker(header, batch)
        self._transactions.record_data(header)
        if header.next_offset > self._mapped_to:
            return batch
        if self._transactions.is_aborted(header):
            return self._placeholder(header)
        decoded = self._records(header, batch)
        if decoded is None:
            return batch
        section, records = decoded
        drop_tombstones = self._may_drop_tombstones(header)
        kept = [record for record in records if self._is_kept(header, record, drop_tombstones=drop_tombstones)]
        if not kept:
            return self._placeholder(header)
        horizon_ms = self._delete_horizon_ms(header, kept)
        if len(kept) == len(records) and horizon_ms is None:
            return batch
        return rebuild_batch(header, section, kept, delete_horizon_ms=horizon_ms)

    def _filter_marker(self, header: BatchHeader, batch: memoryview) -> bytes | bytearray | memoryview | None:
        """Return a marker until it expires: first with the time of its removal, after that not at all."""
        if not self._transactions.ended(header) or header.next_offset > self._mapped_to:
            return batch
        if self._pass.keep_tombstones:
            # A segment that the pass skips may hold records of the transaction.
            return batch
        self._ended.append(int(header.base_offset))
        if header.base_offset in self._retained_offsets:
            return batch
        if header.attributes & DELETE_HORIZON_FLAG:
            return None if self._pass.now_ms >= header.base_timestamp_ms else batch
        decoded = self._records(header, batch)
        if decoded is None:
            return batch
        section, records = decoded
        horizon_ms = min(self._pass.now_ms + self._pass.delete_retention_ms, 2**63 - 1)
        if not records or not can_shift(header, records, horizon_ms):
            return batch
        return rebuild_batch(header, section, records, delete_horizon_ms=horizon_ms)

    def _is_kept(self, header: BatchHeader, record: RawRecord, *, drop_tombstones: bool) -> bool:
        if record.key is None or (drop_tombstones and not record.has_value):
            return False
        return not self._keys.is_superseded(record.key, header.base_offset + record.offset_delta)

    def _may_drop_tombstones(self, header: BatchHeader) -> bool:
        """Whether consumers had the promised time to see the tombstones of a batch."""
        if self._keep_tombstones or not header.attributes & DELETE_HORIZON_FLAG:
            return False
        return self._pass.now_ms >= header.base_timestamp_ms

    def _delete_horizon_ms(self, header: BatchHeader, kept: list[RawRecord]) -> int | None:
        """Return the time from which the tombstones of a batch may be removed, if the batch does not contain it yet."""
        if header.attributes & DELETE_HORIZON_FLAG or all(record.has_value for record in kept):
            return None
        horizon_ms = min(self._pass.now_ms + self._pass.delete_retention_ms, 2**63 - 1)
        return horizon_ms if can_shift(header, kept, horizon_ms) else None

    def _placeholder(self, header: BatchHeader) -> bytearray | None:
        """Return an empty batch that replaces one that identifies a retry of its producer."""
        if header.producer_id < 0 or header.base_offset not in self._retained_offsets:
            return None
        return empty_batch(
            header.base_offset,
            header.next_offset,
            header.leader_epoch,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            append_time_ms=header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else None,
        )

    # -- reading --------------------------------------------------------------------------------------------

    def _batches(self, source: SourceSegment) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield every batch of a segment, verified; raise `DamagedSource` for a bad one."""
        descriptor = self._files.open(source.path)
        try:
            window = Window(self._files, descriptor, min(source.size, self._files.size(descriptor)))
            scan = Scan(window, 0, source.base_offset, limit=source.next_offset, epochs=self._epochs)
            for found in scan:
                if isinstance(found, BadRange):
                    raise DamagedSource(source.base_offset, found.start)
                self._progress(found.size_bytes)
                yield found._replace(position=0), window.at(found.position, found.size_bytes)
            if scan.expected < source.next_offset:
                raise DamagedSource(source.base_offset, scan.position)
        finally:
            self._files.close(descriptor)

    def _records(self, header: BatchHeader, batch: memoryview) -> tuple[bytes, list[RawRecord]] | None:
        """Return the records of a batch; None for one that cannot be decoded, which is kept unchanged.

        Its checksum is right, so a producer sent it like that. Its keys are unknown, so no later tombstone may be
        removed: it may delete one of them.
        """
        try:
            section = records_section(batch, header)
            return section, list(raw_records(section, header))
        except BatchRejected:
            self._keep_tombstones = True
            return None


class _Writer:
    """Writes the new file of a group through a buffer, and keeps its batches contiguous."""

    def __init__(self, files: Files, compaction_pass: CompactionPass, base_offset: int, epochs: EpochHistory) -> None:
        self.segment = Segment(compaction_pass.directory, base_offset)
        self.segment.path = cleaned_path(compaction_pass.directory, base_offset, compaction_pass.token)
        self.index = Index()
        self.checksum = 0
        self._interval_bytes = compaction_pass.index_interval_bytes
        self._files = files
        self._epochs = epochs
        self._buffer = bytearray()
        self._written = 0
        self._descriptor = files.open(self.segment.path, create=True)

    def put(self, batch: bytes | bytearray | memoryview, base_offset: int) -> None:
        """Append one batch, and fill the offsets missing before it."""
        self.fill(base_offset)
        self._append(batch)

    def fill(self, up_to: int) -> None:
        """Append empty batches up to an offset, each within one leader epoch."""
        while (first := self.segment.next_offset) < up_to:
            starts = (start for _, start in self._epochs.entries() if first < start < up_to)
            after = min(next(starts, up_to), first + _EMPTY_OFFSETS_MAX)
            self._append(empty_batch(first, after, self._epochs.epoch_at(first)))

    def _append(self, batch: bytes | bytearray | memoryview) -> None:
        header = read_header(batch)
        self.segment.add_batch(header, header.base_offset, self.segment.size, self.index, self._interval_bytes)
        self.checksum = crc32c(batch, self.checksum)
        self._buffer += batch
        if len(self._buffer) >= WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        write_fully(self._files, self._descriptor, self._buffer, self._written)
        self._written += len(self._buffer)
        self._buffer.clear()

    def finish(self) -> None:
        """Write the rest and sync the file."""
        if self._buffer:
            self._flush()
        self._files.sync(self._descriptor)

    def close(self) -> None:
        self._files.close(self._descriptor)
