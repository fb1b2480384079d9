"""The scrub: reads all segments again, slowly, so that damage is found before the records are needed.

Passes go over all logs in the order of their ids. A step verifies a piece of one segment in a thread: CRCs, and that
each batch continues the one before it. Broken ranges are recorded by the log; a range that was restored from outside is
served again. The position is stored in the data folder, so that a restart continues there.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from uuid import UUID

import msgspec

from millstream.broker.log.damage import LostRange
from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files
from millstream.broker.log.ledger import LogKey
from millstream.broker.log.log import Log
from millstream.broker.log.log_contents import ProducerReplay
from millstream.broker.log.scan import FRAME_BYTES, BadRange, Scan, SectorWindow, read_frame, valid_run
from millstream.broker.log.segment import Segment
from millstream.broker.log.state import read_whole, replace_file
from millstream.core.clock import Clock
from millstream.core.errors import CorruptBatch
from millstream.core.ids import PartitionIndex
from millstream.core.metric import Metric, counter, gauge

_logger = logging.getLogger(__name__)

SCRUB_NAME = "scrub"
STEP_BYTES = 1024 * 1024
STEP_COST_BYTES = 64 * 1024
"""Every step counts as at least this many bytes, so that many small segments are not read all at once."""
SAVE_S = 30.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The segment that the scrub has reached, and when the last pass ended, 0 for never."""

    topic_id: UUID = UUID(int=0)
    partition: int = 0
    base_offset: int = 0
    finished_ms: int = 0


class Inspection:
    """Determines in a thread which offsets a segment has lost, starting at a batch with a known offset."""

    def __init__(self, log: Log, segment: Segment, position: int, offset: int) -> None:
        self.log = log
        self.segment = segment
        self.end = position
        self.next_offset = offset
        self.bad: BadRange | None = None
        """Lost ranges that were not known."""
        self.error: OSError | None = None
        """The error of the disk, if it could not read some of it."""
        self.is_lost = False
        """Whether the log has recorded the lost ranges."""
        self.is_cancelled = False
        self._is_disk_dead = False
        self._epochs = EpochHistory(log.epochs.entries())
        self._generation = log.generation
        self._known_damage = tuple(log.damage)
        self._segment_size, self._limit = segment.size, segment.next_offset
        self._descriptor = log.open_files.pin(segment)
        self._files = log.open_files.files

    @classmethod
    def around(cls, log: Log, segment: Segment, position: int) -> Inspection:
        """Inspect a segment from the last known batch before a position on."""
        relative, start = log.reader.index_of(segment).start_before(position)
        return cls(log, segment, start, segment.base_offset + relative)

    def execute(self) -> None:
        """Read and verify; called in a thread."""
        try:
            self._find_bad()
        except OSError as error:
            self.error = error

    def _find_bad(self) -> None:
        """Find the first broken range that was not known, and its end."""
        end = min(self._segment_size, self._files.size(self._descriptor))
        window = SectorWindow(self._files, self._descriptor, end)
        scan = Scan(window, self.end, self.next_offset, limit=self._limit, epochs=self._epochs)
        for found in scan:
            if self.is_cancelled:
                return
            if isinstance(found, BadRange) and not self._is_known(found):
                self.bad = found
                break
        else:
            if scan.expected < self._limit:
                self.bad = BadRange(scan.position, self._segment_size, scan.expected, self._limit)
        if self.bad is not None and self.bad.next_offset < 0:
            self.bad = self.bad._replace(end=self._segment_size, next_offset=self._limit)
        self.error = self.error or window.error
        self._is_disk_dead = window.error is not None and not window.was_readable

    def _is_known(self, bad: BadRange) -> bool:
        after = self._limit if bad.next_offset < 0 else bad.next_offset
        return any(lost.start <= bad.first and after <= lost.end for lost in self._known_damage)

    def finish(self) -> None:
        """Report the result to the log; called on the loop."""
        log, segment = self.log, self.segment
        log.open_files.unpin(segment)
        if not self.is_current:
            return
        if self.error is not None:
            _logger.error(
                "a segment cannot be read",
                extra={
                    "topic": log.partition.topic,
                    "partition": log.partition.partition,
                    "file": segment.path,
                    "first_offset": self.next_offset if self.bad is None else self.bad.first,
                    "error": str(self.error),
                },
            )
        self._record_outcome()

    @property
    def is_current(self) -> bool:
        """Return whether the segment is still the one that was read: a segment truncated or compacted since is not
        damaged.
        """
        log = self.log
        return (
            not log.closed
            and log.generation == self._generation
            and any(segment is self.segment for segment in log.segments)
            and tuple(log.damage) == self._known_damage
        )

    def _record_outcome(self) -> None:
        # Bytes of a disk that fails as a whole may be readable later, so they are not recorded as lost unless another
        # replica can restore them.
        if self.bad is not None and not (self._is_disk_dead and not self.log.damage.has_replicas):
            self.log.record_damage(self.segment, self.bad)
            self.is_lost = True


class ScrubStep(Inspection):
    """Verifies one piece of a segment, from a batch whose offset is known."""

    def __init__(
        self, log: Log, segment: Segment, position: int, offset: int, stop: int, hole: LostRange | None
    ) -> None:
        super().__init__(log, segment, position, offset)
        self.is_broken = False
        self._replay: ProducerReplay | None = None
        self._stop = stop
        self.hole = hole
        self.size = 0

    def execute(self) -> None:
        try:
            self._verify()
            while self.hole is not None and not self.is_broken and self.end < self._stop:
                self._verify()
        except CorruptBatch:
            self.is_broken = True
        except OSError as error:
            self.is_broken, self.error = True, error
        if self.is_broken and self.hole is None:
            try:
                self._find_bad()
            except OSError as error:
                self.error = error

    def _verify(self) -> None:
        position = self.end
        size_max = min(STEP_BYTES, self._stop - position)
        data = self._files.read_at(self._descriptor, size_max, position)
        run = valid_run(data, len(data), self.next_offset, self._epochs)
        if run.end == 0 and not run.broken and len(data) >= FRAME_BYTES and size_max < self._stop - position:
            # The first batch is larger than a step.
            size = min(read_frame(data, 0, position).end_position, self._stop) - position
            data = self._files.read_at(self._descriptor, size, position)
            run = valid_run(data, 1, self.next_offset, self._epochs)
        self.size += len(data)
        self.is_broken = run.broken or run.end == 0
        self.end, self.next_offset = position + run.end, run.next_offset

    @property
    def _restored_range(self) -> LostRange | None:
        hole = self.hole
        return hole if hole is not None and (self.end, self.next_offset) == (hole.end_position, hole.end) else None

    def replay(self) -> ProducerReplay | None:
        """Return the replay to read before `finish`, if an intact range holds producers' batches."""
        restored, log = self._restored_range, self.log
        if restored is None or not self.is_current or not log.needs_replay(restored, log.other_losses(restored)):
            return None
        self._replay = ProducerReplay(log)
        return self._replay

    def _record_outcome(self) -> None:
        if self.hole is None:
            super()._record_outcome()
        elif self._restored_range is not None and (self._replay is None or self._replay.error is None):
            self.log.mark_intact(self.hole, self._replay)


class Scrubber:
    """Chooses the next segment to verify."""

    def __init__(self, files: Files, directory: str, clock: Clock, *, bytes_per_s: int, interval_ms: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._files = files
        self._directory = directory
        self._clock = clock
        self._interval_ms = interval_ms
        self._progress = self._read_progress()
        self._saved_at = clock.monotonic()
        self._keys: list[LogKey] = []
        """The logs that remain in this pass, the next one last."""
        self._segment: Segment | None = None
        self._generation = self._position = self._offset = 0
        self._bytes = self._read_errors = 0
        self._passes = 0

    def _read_progress(self) -> Progress:
        path = f"{self._directory}/{SCRUB_NAME}"
        try:
            return msgspec.json.decode(read_whole(self._files, path), type=Progress)
        except (OSError, msgspec.MsgspecError):
            return Progress()

    @property
    def wait_s(self) -> float:
        """How long until the next pass is due; 0 within one."""
        if self._is_under_way:
            return 0.0
        # A clock that was set back delays the pass by at most one interval.
        waited_ms = max(0, self._clock.now_ms() - self._progress.finished_ms)
        return max(0, self._interval_ms - waited_ms) / 1000

    @property
    def _is_under_way(self) -> bool:
        return bool(self._progress.topic_id.int)

    def next(self, logs: Mapping[LogKey, Log]) -> ScrubStep | None:
        """Return the next step of the pass; None at its end."""
        progress = self._progress
        if not self._keys:
            begun = (progress.topic_id, PartitionIndex(progress.partition))
            self._keys = [key for key in sorted(logs, reverse=True) if key >= begun]
        while self._keys:
            log = logs.get(self._keys[-1])
            step = None if log is None or log.closed else self._step_in(log)
            if step is not None:
                return step
            self._keys.pop()
        self._segment = None
        self._progress = Progress(finished_ms=self._clock.now_ms())
        self._passes += 1
        return None

    def _step_in(self, log: Log) -> ScrubStep | None:
        """Return the next step within a log; None if it is verified to its end."""
        progress = self._progress
        first = progress.base_offset if (progress.topic_id, progress.partition) == log.key else 0
        for segment in log.segments[bisect_left(log.segments, first, key=_base_offset) :]:
            if self._segment is not segment or self._generation != log.generation:
                self._begin(log, segment)
            try:
                if self._position < segment.size and self._check_file_exists(log, segment):
                    return self._step_at(log, segment)
            except OSError as error:
                _logger.warning("a segment could not be scrubbed", extra={"file": segment.path, "error": str(error)})
        return None

    def _begin(self, log: Log, segment: Segment) -> None:
        self._segment, self._generation = segment, log.generation
        self._position, self._offset = 0, segment.base_offset
        self._progress = Progress(
            topic_id=log.topic_id,
            partition=log.partition.partition,
            base_offset=segment.base_offset,
            finished_ms=self._progress.finished_ms,
        )

    def _check_file_exists(self, log: Log, segment: Segment) -> bool:
        """Whether the file still exists under its name; record a removed one, which is lost once it is closed."""
        if any(swap.segment is segment for swap in log.segments.swaps) or self._files.exists(segment.path):
            return True
        log.record_missing_file(segment)
        return False

    def _step_at(self, log: Log, segment: Segment) -> ScrubStep:
        """Return a step up to the next damaged range, or over one, to see whether it was restored."""
        holes = [lost for lost in log.damage if lost.segment == segment.base_offset]
        for hole in holes:
            if hole.start_position == hole.end_position == self._position:
                self._offset = hole.end
            elif hole.start_position <= self._position < hole.end_position:
                return ScrubStep(log, segment, hole.start_position, hole.start, hole.end_position, hole)
        stop = min([segment.size, *(hole.start_position for hole in holes if hole.start_position > self._position)])
        return ScrubStep(log, segment, self._position, self._offset, stop, None)

    def ended(self, step: ScrubStep) -> float:
        """Account for a step; return how many seconds to wait before the next one."""
        self._bytes += step.size
        self._read_errors += step.error is not None
        if step.hole is not None:
            self._position, self._offset = step.hole.end_position, step.hole.end
        elif step.bad is not None:
            self._position, self._offset = step.bad.end, step.bad.next_offset
        elif step.is_broken:
            # The segment is no longer broken; the next pass verifies the rest.
            self._position = step.segment.size
        else:
            self._position, self._offset = step.end, step.next_offset
        return max(step.size, STEP_COST_BYTES) / max(1, self.bytes_per_s)

    @property
    def should_save(self) -> bool:
        """Whether it is time to store the position."""
        return not self._is_under_way or self._clock.monotonic() - self._saved_at >= SAVE_S

    def save_progress(self) -> None:
        """Store the position; called in a thread."""
        self._saved_at = self._clock.monotonic()
        try:
            replace_file(self._files, self._directory, SCRUB_NAME, msgspec.json.encode(self._progress))
        except OSError as error:
            _logger.warning("the position of the scrub could not be stored", extra={"error": str(error)})

    def metrics(self) -> Iterable[Metric]:
        yield counter("millstream_log_scrubbed_bytes_total", "Bytes that the scrub has verified.", self._bytes)
        yield counter(
            "millstream_log_scrub_read_errors_total",
            "Steps of the scrub that failed because of the disk.",
            self._read_errors,
        )
        yield counter("millstream_log_scrub_passes_total", "Passes of the scrub over all logs.", self._passes)
        last_s = self._progress.finished_ms / 1000
        yield gauge("millstream_log_scrub_last_seconds", "When the last pass of the scrub ended, 0 for never.", last_s)


def _base_offset(segment: Segment) -> int:
    return segment.base_offset
