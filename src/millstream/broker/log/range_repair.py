"""Repair of a lost range with the batches of another replica.

If they take as many bytes as were lost, they are written in place; until the next checkpoint the range counts as lost,
so a crash in between leaves it lost. Otherwise (the file is gone, or the replica was compacted at another time) the
segment is rewritten with them and swapped in as compaction does. The bytes before and after the range do not change.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress

from millstream.broker.log.damage import LostRange
from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.log import Log
from millstream.broker.log.log_contents import ProducerReplay
from millstream.broker.log.scan import BadRange, Scan, Window
from millstream.broker.log.segment import Index, Segment, cleaned_path
from millstream.core.errors import DivergedLog, LogUnavailable, MillstreamError, MismatchedBatch, StorageFailure
from millstream.protocol.records.batch import BatchHeader, Buffer, check_crc, check_offsets, iterate_headers
from millstream.protocol.records.rewrite import empty_batch

COPY_BYTES = 1024 * 1024


def fit_batches(log: Log, lost: LostRange, batches: Buffer) -> tuple[bytes, int]:
    """Select the batches of another replica that belong in a lost range; return them and the offset after them.

    Raise `CorruptBatch` if they are damaged themselves, `MismatchedBatch` if they cannot have been there: they must
    begin where the range does, be contiguous, and be of epochs that fit those around them; `DivergedLog` if an epoch is
    later than that behind the range; `LogUnavailable` if the range is no longer lost, because the log was truncated
    meanwhile. Empty batches, in which compaction joins offsets, are cut to fit.
    """
    if lost not in log.damage:
        raise _log_changed(log, lost)
    latest, last = log.epochs.epoch_at(lost.start - 1), log.epochs.epoch_at(lost.end)
    fitted, expected = bytearray(), lost.start
    for header in iterate_headers(batches):
        if expected >= lost.end:
            break
        check_offsets(header)
        check_crc(batches, header)
        is_first = not fitted and header.base_offset <= expected < header.next_offset
        if not is_first and header.base_offset != expected:
            raise MismatchedBatch(
                f"{log.partition}: a replica returned offset {header.base_offset} instead of {expected}"
            )
        if not latest <= header.leader_epoch <= last:
            unfit = DivergedLog if header.leader_epoch > last else MismatchedBatch
            raise unfit(
                f"{log.partition}: a replica returned a batch of epoch {header.leader_epoch} at offset {expected}, "
                f"between epochs {latest} and {last}"
            )
        fitted += _trim_batch(log, lost, header, batches)
        latest, expected = header.leader_epoch, int(header.next_offset)
    return bytes(fitted), min(expected, lost.end)


def _trim_batch(log: Log, lost: LostRange, header: BatchHeader, batches: Buffer) -> Buffer:
    # A range that begins where the log does may begin within a batch.
    begins = header.base_offset >= lost.start or lost.start == log.start_offset
    if begins and header.next_offset <= lost.end:
        return memoryview(batches)[header.position : header.end_position]
    if header.record_count:
        raise MismatchedBatch(
            f"{log.partition}: a replica has offsets {header.base_offset} to {header.last_offset} in one batch, "
            f"and {lost.start} to {lost.end - 1} are lost here"
        )
    first, after = max(int(header.base_offset), lost.start), min(int(header.next_offset), lost.end)
    return empty_batch(first, after, header.leader_epoch)


class RangeRepair:
    """Writes batches into the beginning of a lost range, or all of it; `fit_batches` has checked them."""

    def __init__(self, log: Log, lost: LostRange, batches: bytes, next_offset: int) -> None:
        self.log = log
        self.error: OSError | MillstreamError | None = None
        self._lost_range = lost
        self._batches = batches
        self._next_offset = next_offset
        self._generation = log.generation
        self._files = log.open_files.files
        self._old_segment = log.segments.find(lost.segment)
        self.is_in_place = self._fits_in_place()
        self._token = secrets.token_hex(4)
        self._epochs = EpochHistory(log.epochs.entries())
        for header in iterate_headers(batches):
            self._epochs.extend_back(header.leader_epoch, int(header.base_offset))
        self._interval_bytes = log.settings.index_interval_bytes
        self._new: Segment | None = None
        self._bad: list[BadRange] = []
        self._replay: ProducerReplay | None = None
        if not self.is_in_place and self._old_segment is log.segments.active:
            log.roll()
        if self._old_segment is not None:
            log.open_files.descriptor(self._old_segment, create=True)
            self._descriptor = log.open_files.pin(self._old_segment)

    def _fits_in_place(self) -> bool:
        lost, end = self._lost_range, self._lost_range.start_position + len(self._batches)
        if self._old_segment is None or lost.end_position > self._old_segment.size:
            return False
        return end == lost.end_position if self._next_offset == lost.end else end < lost.end_position

    @property
    def _is_current(self) -> bool:
        log = self.log
        return not log.closed and log.generation == self._generation and self._lost_range in log.damage

    def execute(self) -> None:
        """Write and sync; called in a thread. A repair in place needs the thread that truncates logs."""
        try:
            if not self._is_current:
                # The file may hold newer records at this position by now.
                raise _log_changed(self.log, self._lost_range)
            if self.is_in_place:
                write_fully(self._files, self._descriptor, self._batches, self._lost_range.start_position)
                self._files.sync(self._descriptor)
                # A file that was removed gets its name back.
                self._files.sync_directory(self.log.directory)
            else:
                self._rewrite_segment()
        except (OSError, MillstreamError) as error:
            self.error = error

    def _rewrite_segment(self) -> None:
        lost, old = self._lost_range, self._old_segment
        base_offset = next(iter(iterate_headers(self._batches))).base_offset if old is None else old.base_offset
        new = self._new = Segment(self.log.directory, int(base_offset))
        new.path = cleaned_path(self.log.directory, new.base_offset, self._token)
        descriptor = self._files.open(new.path, create=True)
        try:
            self._files.truncate(descriptor, 0)
            end = 0
            for piece in self._new_content():
                write_fully(self._files, descriptor, piece, end)
                end += len(piece)
            limit = max(self._next_offset, old.next_offset if old is not None else 0)
            if old is not None and lost.end > limit and lost.end_position >= old.size:
                limit = lost.end
            self._scan(new, Window(self._files, descriptor, end), limit)
            self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)

    def _new_content(self) -> Iterator[bytes]:
        """Yield the content of the new file."""
        lost, old = self._lost_range, self._old_segment
        behind = lost.end_position
        if self._next_offset < lost.end:
            behind = min(lost.start_position + len(self._batches), lost.end_position)
        if old is not None:
            yield from _read(self._files, self._descriptor, 0, min(lost.start_position, old.size))
        yield self._batches
        if old is not None:
            yield from _read(self._files, self._descriptor, behind, old.size)

    def _scan(self, new: Segment, window: Window, limit: int) -> None:
        """Build the index of the new file, and find the ranges that are still lost."""
        index = new.index or Index()
        scan = Scan(window, 0, new.base_offset, limit=limit, epochs=self._epochs)
        for found in scan:
            if isinstance(found, BadRange):
                found = found if found.next_offset >= 0 else found._replace(next_offset=limit)
                if found.first < self._next_offset and found.next_offset > self._lost_range.start:
                    raise StorageFailure(f"{new.path} does not contain the bytes written at {found.start}")
                self._bad.append(found)
            else:
                new.add_batch(found, int(found.base_offset), found.position, index, self._interval_bytes)
        if scan.expected < limit and not (self._bad and self._bad[-1].next_offset == limit):
            self._bad.append(BadRange(window.end, window.end, scan.expected, limit))
        new.index, new.size, new.next_offset = index, window.end, limit

    def replay(self) -> ProducerReplay | None:
        """Return the replay to read before `finish`, if the range holds producers' batches; called on the loop."""
        if self.error is not None or not self.log.needs_replay(self._lost_range, self._remaining_ranges()):
            return None
        self._replay = ProducerReplay(self.log, self._new)
        return self._replay

    def finish(self) -> None:
        """Serve the range again; called on the loop."""
        log, lost = self.log, self._lost_range
        if self._old_segment is not None:
            log.open_files.unpin(self._old_segment)
        if self.error is None and self._replay is not None:
            self.error = self._replay.error
        if self.error is None and not self._is_current:
            self.error = _log_changed(log, lost)
        if self.error is None and self._new is not None:
            self._swap(self._new)
        if self.error is not None:
            if self._new is not None:
                with suppress(OSError):
                    self._files.remove(self._new.path)
            return
        for epoch, start in self._epochs.entries():
            log.epochs.extend_back(epoch, start)
        log.mark_repaired(lost, self._next_offset, self._remaining_ranges(), self._replay)

    def _swap(self, new: Segment) -> None:
        old, log = self._old_segment, self.log
        new.sealed = True
        now_ms = log.clock.now_ms()
        new.first_append_ms = now_ms if old is None else old.first_append_ms
        new.last_append_ms = now_ms if old is None else old.last_append_ms
        new.mark_synced(new.size, new.next_offset)
        try:
            if not log.swap_in([] if old is None else [old], new, self._token):
                self.error = _log_changed(log, self._lost_range)
        except OSError as error:
            self.error = error

    def _remaining_ranges(self) -> list[LostRange]:
        """Return the ranges of the segment that are still lost, by their position in the new file."""
        lost, new = self._lost_range, self._new
        if new is not None:
            left = [
                LostRange(bad.first, bad.next_offset, new.base_offset, bad.start, bad.end, self._is_unread(bad.first))
                for bad in self._bad
            ]
            if self._old_segment is None and self._next_offset < lost.end:
                left.append(LostRange(self._next_offset, lost.end, -1, 0, 0, lost.unread))
            return left
        left = self.log.other_losses(lost)
        if self._next_offset < lost.end:
            start = lost.start_position + len(self._batches)
            left.append(LostRange(self._next_offset, lost.end, lost.segment, start, lost.end_position, lost.unread))
        return left

    def _is_unread(self, offset: int) -> bool:
        known = self.log.damage.at(offset)
        return known is not None and known.unread


def _log_changed(log: Log, lost: LostRange) -> LogUnavailable:
    return LogUnavailable(f"{log.partition} changed while offsets {lost.start} to {lost.end - 1} were being repaired")


def _read(files: Files, descriptor: int, start: int, end: int) -> Iterator[bytes]:
    for position in range(start, end, COPY_BYTES):
        size = min(COPY_BYTES, end - position)
        # A file that was cut short is read at its old length; the missing bytes stay lost.
        yield files.read_at(descriptor, size, position).ljust(size, b"\0")
