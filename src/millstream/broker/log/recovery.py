"""Opening the folder of a log: from its state after a clean stop, otherwise by scanning what the state does not cover.

Recovery starts at the checkpoint. A tail that is not a batch is torn and is truncated. Anything bad that has a valid
batch behind it, or lies below the checkpoint, is damage: its range is recorded, and the records behind it stay. So is a
file that is missing although the state names it; writes then go to a new file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millstream.broker.log.damage import Damage, LostRange
from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.folder import DataFolder, folders_above
from millstream.broker.log.journal import Entry, read_journal, remove_journal
from millstream.broker.log.ledger import LogKey
from millstream.broker.log.log_contents import LogContents, RecoveryReport, replay_batch
from millstream.broker.log.producers import Producers
from millstream.broker.log.scan import BadRange, Scan, Window, build_index, load_index
from millstream.broker.log.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    REPAIR_SUFFIX,
    SEGMENT_SUFFIXES,
    Index,
    Segment,
    base_offset_of,
    complete_swaps,
    segment_name,
    segment_path,
)
from millstream.broker.log.state import LogState
from millstream.core.ids import OffsetRange, PartitionIndex
from millstream.protocol.records.batch import BatchHeader

_logger = logging.getLogger(__name__)


class Replay:
    """Writes the entries of the journal into the segments; `bytes_by_folder` counts the written bytes."""

    def __init__(self, files: Files, folder: DataFolder, state_of: Callable[[LogKey], LogState | None]) -> None:
        self.bytes_by_folder: dict[str, int] = {}
        self._files = files
        self._folder = folder
        self._state_of = state_of
        self._states: dict[LogKey, LogState | None] = {}
        self._written: set[str] = set()

    def run(self, sync_everything: Callable[[], bool]) -> None:
        """Replay everything, sync it, and remove the journal.

        `sync_everything` is called once all is written; if it returns False, each file is synced separately.
        """
        for entry, data in read_journal(self._files, self._folder.journal):
            self._apply(entry, data)
        if not sync_everything():
            self._sync_written()
        remove_journal(self._files, self._folder.journal)

    def _sync_written(self) -> None:
        for path in self._written:
            descriptor = self._files.open(path)
            try:
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
        for folder in self.bytes_by_folder:
            self._files.sync_directory(folder)

    def _apply(self, entry: Entry, data: bytes) -> None:
        folder = self._folder.log_folder(entry.topic_id, entry.partition)
        if not self._files.exists(folder):
            # A log is journaled only once its folder is durable, so this one was deleted.
            return
        path = segment_path(folder, entry.base_offset)
        state = self._state(entry)
        if state is not None:
            void = entry.journal_id == state.journal_id and entry.sequence < state.journal_sequence
            deleted = entry.base_offset < state.start_offset and not self._files.exists(path)
            if void or deleted:
                return
        descriptor = self._files.open(path, create=True)
        try:
            write_fully(self._files, descriptor, data, entry.position)
        finally:
            self._files.close(descriptor)
        self._written.add(path)
        self.bytes_by_folder[folder] = self.bytes_by_folder.get(folder, 0) + len(data)

    def _state(self, entry: Entry) -> LogState | None:
        key = (entry.topic_id, PartitionIndex(entry.partition))
        if key not in self._states:
            self._states[key] = self._state_of(key)
        return self._states[key]


PROGRESS_S = 2.0

LISTENER_S = 0.1

NAMED_MAX = 5
"""How many logs of each kind are named; a start after a crash may have truncated thousands."""


class RecoveryProgress:
    """Counts recovered logs, and logs a readable number of them."""

    def __init__(self, listener: Callable[[int, int], None] | None = None) -> None:
        """Call `listener` a few times a second with how many logs are recovered and how many are left."""
        self._listener = listener
        self._notified_at: float | None = None
        self._logs = 0
        self._scanned_bytes = 0
        self._replayed_bytes = 0
        self._truncated: list[RecoveryReport] = []
        self._damaged: list[RecoveryReport] = []
        self._logged_at: float | None = None

    def add(self, report: RecoveryReport, *, left: int, now: float) -> None:
        self._logs += 1
        self._scanned_bytes += report.scanned_bytes
        self._replayed_bytes += report.replayed_bytes
        if report.lost:
            self._damaged.append(report)
            if len(self._damaged) <= NAMED_MAX:
                place = {"topic": report.topic, "partition": report.partition}
                _logger.error("a log is damaged", extra={**place, "what": str(report)})
        elif report.cut_bytes:
            self._truncated.append(report)
        if self._listener is not None and (self._notified_at is None or now - self._notified_at >= LISTENER_S):
            self._notified_at = now
            self._listener(self._logs, left)
        if self._logged_at is None:
            self._logged_at = now
        elif now - self._logged_at >= PROGRESS_S:
            self._logged_at = now
            _logger.warning("recovering logs", extra={"done": self._logs, "left": left})

    def log_summary(self) -> None:
        if not self._logs:
            return
        extra: dict[str, object] = {
            "logs": self._logs,
            "scanned_bytes": self._scanned_bytes,
            "replayed_bytes": self._replayed_bytes,
        }
        for word, reports in (("cut", self._truncated), ("damaged", self._damaged)):
            if reports:
                extra |= {word: len(reports), f"{word}_logs": _describe_logs(reports)}
        level = logging.ERROR if self._damaged else logging.WARNING if self._truncated else logging.INFO
        _logger.log(level, "recovered logs", extra=extra)


def _describe_logs(reports: list[RecoveryReport]) -> str:
    """Describe the first few logs, each with its result."""
    more = len(reports) - NAMED_MAX
    return " | ".join(map(str, reports[:NAMED_MAX])) + (f" | and {more} more" if more > 0 else "")


_NO_LIMIT = 2**63 - 1

_UNFINISHED = (DELETED_SUFFIX, REPAIR_SUFFIX, CLEANED_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    files: Files
    now_ms: int
    producer_expiry_ms: int
    index_interval_bytes: int
    durable: bool = False
    """Whether everything in the folder is known to be on disk, not only in the page cache."""


def open_contents(
    opening: OpenOptions, directory: str, state: LogState | None, *, clean: bool
) -> tuple[LogContents, RecoveryReport | None]:
    """Open the folder of a log; after a clean stop only its file names are read."""
    if state is not None and clean and not _has_missing_file(opening.files, directory, state):
        return _trust_state(opening, directory, state), None
    return Recovery(opening, directory, state).run()


def _has_missing_file(files: Files, directory: str, state: LogState) -> bool:
    """Whether a segment file was removed since; a reader would notice too late, and a writer would lose data."""
    if not state.segments:
        return False
    there = set(files.names(directory))
    return any(segment_name(segment.base_offset) not in there for segment in state.segments)


def _trust_state(opening: OpenOptions, directory: str, state: LogState) -> LogContents:
    """Return the log as its state describes it."""
    producers = Producers(expiry_ms=opening.producer_expiry_ms)
    producers.unpack(state.producers)
    if state.transactions is not None:
        producers.unpack_transactions(state.transactions)
    segments = [Segment.from_state(directory, known) for known in state.segments]
    for segment in segments[:-1]:
        segment.sealed = True
    contents = LogContents(
        directory=directory,
        segments=segments,
        start_offset=state.start_offset,
        end_offset=state.recovery_offset,
        epochs=EpochHistory(state.epochs),
        producers=producers,
        damage=Damage(state.lost),
        journal_mark=(state.journal_id, state.journal_sequence),
        cleaned_offset=state.cleaned_offset,
        superseded_by=state.superseded_by,
        known=True,
    )
    for segment in segments if contents.damage else ():
        segment.holes = contents.damage.holes_of(segment.base_offset)
    return contents


class Recovery:
    """Recovers one log after an unclean stop, or when its state cannot be trusted.

    Segments are taken in order; the contents' `end_offset` is how far the log is known to go. Bad or missing data at
    that point is kept in `_tail` until it is known whether anything valid follows.
    """

    def __init__(self, opening: OpenOptions, directory: str, state: LogState | None) -> None:
        self._opening = opening
        self._files = opening.files
        self._directory = directory
        self._report = RecoveryReport(directory=directory)
        self._checkpoint = state.recovery_offset if state is not None else 0
        self._trusted: dict[int, Segment] = {}
        self._tail: tuple[Segment, int] | None = None
        self._names_changed = False
        self._has_gaps = False
        """Whether records are missing among those that the checkpoint does not know, and not because of damage:
        compaction has removed them, here or where they were fetched, also if the topic does not compact any more."""
        self._lost_until = 0
        """The end of the last damaged range."""
        self._swaps = state.swaps if state is not None else []
        if state is not None:
            self._contents = _trust_state(opening, directory, state)
            self._trusted = {segment.base_offset: segment for segment in self._contents.segments}
            self._contents.segments = []
        else:
            self._contents = _empty_contents(opening, directory)

    def run(self) -> tuple[LogContents, RecoveryReport]:
        """Find the contents of the log, truncate torn batches, and make the rest durable."""
        bases = self._list_segments()
        contents = self._contents
        if not self._trusted and bases:
            contents.start_offset = max(contents.start_offset, bases[0])
        contents.end_offset = min([*self._trusted, *bases], default=self._checkpoint)
        for at, base in enumerate(bases):
            limit = bases[at + 1] if at + 1 < len(bases) else _NO_LIMIT
            segment = self._trusted.get(base)
            if segment is not None:
                self._recover_trusted(segment, limit)
            elif base >= self._checkpoint:
                self._recover_segment(Segment(self._directory, base), limit)
        self._resolve_tail()
        if self._has_gaps:
            contents.superseded_by = max(contents.superseded_by, contents.end_offset)
        for segment in contents.segments[:-1]:
            segment.sealed = True
        return contents, self._report

    def _list_segments(self) -> list[int]:
        """List the segments on disk, after removing everything that a crash left unfinished."""
        if complete_swaps(self._files, self._directory, self._swaps):
            self._contents.changed = True
            self._names_changed = True
        names = self._files.names(self._directory)
        for name in names:
            if name.endswith(_UNFINISHED):
                self._remove(f"{self._directory}/{name}")
        bases = sorted(base for base in map(base_offset_of, names) if base is not None and not self._is_replaced(base))
        kept = []
        for at, base in enumerate(bases):
            following = bases[at + 1] if at + 1 < len(bases) else _NO_LIMIT
            if following > self._contents.start_offset:
                kept.append(base)
        self._remove_leftovers(names, set(kept))
        return kept

    def _is_replaced(self, base: int) -> bool:
        """Whether a file is within a segment that the checkpoint knows, so that compaction has replaced it."""
        return base not in self._trusted and any(
            segment.base_offset < base < segment.next_offset for segment in self._trusted.values()
        )

    def _remove_leftovers(self, names: list[str], kept: set[int]) -> None:
        """Remove the files of segments that were deleted or never completed."""
        for name in names:
            stem, dot, suffix = name.partition(".")
            if dot + suffix in SEGMENT_SUFFIXES and stem.isdigit() and int(stem) not in kept:
                self._remove(f"{self._directory}/{name}")

    def _remove(self, path: str) -> None:
        self._files.remove(path)
        self._names_changed = True

    # -- segments -------------------------------------------------------------------------------------------

    def _recover_trusted(self, segment: Segment, limit: int) -> None:
        """Open a segment that the checkpoint knows, and scan only later bytes."""
        size = self._size_of(segment)
        if size < segment.size:
            # The file lost something since, so nothing in it is trusted.
            self._recover_segment(_reset_segment(segment), segment.next_offset, replay=False)
        elif size > segment.size and segment.base_offset == max(self._trusted):
            self._recover_segment(segment, limit)
        else:
            self._accept(segment)

    def _recover_segment(self, segment: Segment, limit: int, *, replay: bool = True) -> None:
        """Scan a segment from where it is known; accept it if it holds anything or continues at the end of the log."""
        bad_end = self._scan(segment, limit, replay=replay)
        if segment.size or segment.base_offset < self._checkpoint or segment.base_offset == self._contents.end_offset:
            self._accept(segment)
            self._tail = (segment, bad_end) if bad_end is not None else None
        else:
            # It holds nothing valid, so the data before it may still be a torn tail, which this file is part of.
            self._report.cut_bytes += bad_end or 0
            self._remove(segment.path)
            self._contents.changed = True

    def _accept(self, segment: Segment) -> None:
        """Continue with a segment; offsets missing between the last one and this one are lost."""
        contents = self._contents
        if contents.end_offset < segment.base_offset:
            previous, end = self._tail if self._tail is not None else (None, 0)
            if previous is None:
                self._record_damage(LostRange(contents.end_offset, segment.base_offset, -1, 0, 0))
            else:
                self._record_damage_at(previous, BadRange(previous.size, end, contents.end_offset, segment.base_offset))
        self._tail = None
        contents.segments.append(segment)
        contents.end_offset = max(contents.end_offset, segment.next_offset)

    def _size_of(self, segment: Segment) -> int:
        descriptor = self._files.open(segment.path)
        try:
            return self._files.size(descriptor)
        finally:
            self._files.close(descriptor)

    # -- batches --------------------------------------------------------------------------------------------

    def _scan(self, segment: Segment, limit: int, *, replay: bool) -> int | None:
        """Account for the valid batches after the known part of a file; return where a bad tail ends, if any."""
        descriptor = self._files.open(segment.path)
        try:
            window = Window(self._files, descriptor, self._files.size(descriptor))
            index = self._index_of(segment, window)
            start, bad_end = segment.size, None
            last_epoch = self._contents.epochs.latest if replay else -1
            for found in Scan(window, start, segment.next_offset, limit=limit, last_epoch=last_epoch):
                if not isinstance(found, BadRange):
                    self._add_batch(segment, found, index, window, replay=replay)
                elif found.next_offset >= 0:
                    self._record_damage_at(segment, found)
                else:
                    bad_end = found.end
            self._report.scanned_bytes += window.end - start
            if not self._opening.durable:
                # After a kill the bytes may only be in the page cache, but from here on they count as durable.
                self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)
        segment.mark_synced(segment.size, segment.next_offset)
        self._contents.changed = True
        return bad_end

    def _index_of(self, segment: Segment, window: Window) -> Index:
        if segment.index is None:
            segment.index = load_index(self._files, segment)
        if segment.index is None:
            scan = Scan(window, 0, segment.base_offset, limit=segment.next_offset)
            segment.index = build_index(scan, segment, self._opening.index_interval_bytes)
        return segment.index

    def _add_batch(self, segment: Segment, header: BatchHeader, index: Index, window: Window, *, replay: bool) -> None:
        now_ms = self._opening.now_ms
        if segment.first_append_ms < 0:
            segment.first_append_ms = now_ms
        segment.last_append_ms = now_ms
        if replay and header.record_count != header.next_offset - max(segment.next_offset, self._lost_until):
            self._has_gaps = True
        segment.add_batch(header, header.base_offset, header.position, index, self._opening.index_interval_bytes)
        self._report.scanned_batches += 1
        if replay:
            self._contents.epochs.begin(header.leader_epoch, header.base_offset)
            replay_batch(self._contents.producers, header, window, now_ms)

    # -- decisions ------------------------------------------------------------------------------------------

    def _record_damage_at(self, segment: Segment, bad: BadRange) -> None:
        segment.holes[bad.start] = (bad.end, bad.next_offset)
        self._lost_until = bad.next_offset
        self._record_damage(LostRange(bad.first, bad.next_offset, segment.base_offset, bad.start, bad.end))

    def _record_damage(self, lost: LostRange) -> None:
        """Record a lost range, or the part of it that was not deleted before."""
        self._contents.changed = True
        start = max(lost.start, self._contents.start_offset)
        if start < lost.end:
            unread = lost.end > self._checkpoint
            self._contents.damage.add(msgspec.structs.replace(lost, start=start, unread=unread))
            self._report.lost.append(OffsetRange(start, lost.end))

    def _resolve_tail(self) -> None:
        """Decide about the end: missing data below the checkpoint is damage, the rest is torn and truncated."""
        contents = self._contents
        if contents.end_offset < self._checkpoint:
            self._record_damage(LostRange(contents.end_offset, self._checkpoint, -1, 0, 0))
            contents.end_offset = self._checkpoint
            self._continue_at(contents.end_offset)
        elif self._tail is not None:
            segment, bad_end = self._tail
            self._report.cut_bytes += bad_end - segment.size
            self._report.cut_from_offset = segment.next_offset
            self._truncate(segment)
        if self._report.cut_bytes and self._report.cut_from_offset < 0:
            self._report.cut_from_offset = contents.end_offset
        if contents.changed and not self._opening.durable:
            # Names may only be in the page cache too.
            for folder in (self._directory, *folders_above(self._directory)):
                self._files.sync_directory(folder)
        elif self._names_changed:
            self._files.sync_directory(self._directory)
        contents.known = contents.known or contents.changed or self._opening.durable

    def _truncate(self, segment: Segment) -> None:
        descriptor = self._files.open(segment.path)
        try:
            self._files.truncate(descriptor, segment.size)
            self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)

    def _continue_at(self, offset: int) -> None:
        """Begin a segment whose name preserves the end of the log, even if nothing else of the log is left."""
        segment = Segment(self._directory, offset)
        self._files.close(self._files.open(segment.path, create=True))
        self._names_changed = True
        self._contents.segments.append(segment)


def _empty_contents(opening: OpenOptions, directory: str) -> LogContents:
    return LogContents(
        directory=directory,
        segments=[],
        start_offset=0,
        end_offset=0,
        epochs=EpochHistory(),
        producers=Producers(expiry_ms=opening.producer_expiry_ms),
    )


def _reset_segment(segment: Segment) -> Segment:
    """Return a segment of which only the name and the times are still trusted."""
    renewed = Segment(segment.directory, segment.base_offset)
    renewed.first_append_ms, renewed.last_append_ms = segment.first_append_ms, segment.last_append_ms
    return renewed
