"""Compaction of one log: when it is due, what it covers, and its steps.

Decisions are made on the loop; a `Worker` does the work in a thread, and each new segment is swapped in on the loop
again. Only sealed segments take part whose bytes are durable in their own files. A pass always begins at the start of
the log, so that below its end only the last record of each key is left; keys are collected only from where the last
pass ended. A crash or an error in between leaves some groups new and the others old, which is a valid log.
"""

from __future__ import annotations

import errno
import logging
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec

from millstream.broker.log.cleaner import (
    KEYS_MAX,
    Cleaner,
    CleaningCancelled,
    CleanResult,
    CompactionPass,
    DamagedSource,
    MapResult,
    SourceSegment,
)
from millstream.broker.log.cleaner_child import CleanResponse, Failure, MapResponse, Response, write_message
from millstream.broker.log.files import DiskFiles, Files
from millstream.broker.log.log import Log
from millstream.broker.log.retention import awaits_landing
from millstream.broker.log.segment import RELATIVE_OFFSET_MAX, Index, Segment, cleaned_path
from millstream.core.child_process import read_framed
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError, StorageFailure
from millstream.core.metric import Metric, counter, gauge
from millstream.core.topic import INTERNAL_TOPICS

_logger = logging.getLogger(__name__)

CLEANER_MODULE = "millstream.broker.log.cleaner_child"


class Worker(Protocol):
    """Does the work of one pass. Every method but `cancel` is called in a thread and may raise `OSError`."""

    def map_keys(self) -> MapResult:
        """Collect the last offset of each key."""

    def clean(self, group: int) -> CleanResult:
        """Write the retained records of a group into a new file."""

    def close(self) -> None:
        """End the pass."""

    def cancel(self) -> None:
        """Stop the work soon; called from any thread."""


class InlineWorker:
    """Works in the calling thread: for files that only this process has."""

    def __init__(self, files: Files, compaction_pass: CompactionPass) -> None:
        self._cancelled = False
        self._cleaner = Cleaner(files, compaction_pass, self._check_cancelled)

    def _check_cancelled(self, _bytes: int) -> None:
        if self._cancelled:
            raise CleaningCancelled("the store is closing")

    def map_keys(self) -> MapResult:
        return self._cleaner.map_keys()

    def clean(self, group: int) -> CleanResult:
        return self._cleaner.clean(group)

    def close(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Raise at the next batch."""
        self._cancelled = True


class ChildWorker:
    """Works in a child process, so that the loop of the broker is not delayed."""

    def __init__(self, compaction_pass: CompactionPass) -> None:
        self._pass = compaction_pass
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def map_keys(self) -> MapResult:
        """Start the child and let it collect the last offset of each key."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", CLEANER_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
        )
        if self._cancelled:
            self._child.kill()
        response = self._request(self._pass)
        if not isinstance(response, MapResponse):
            raise OSError(errno.EIO, "the compaction process sent an unexpected response")
        return response.mapped

    def clean(self, group: int) -> CleanResult:
        """Have the child process write the retained records of a group to a new file."""
        response = self._request(group)
        if not isinstance(response, CleanResponse):
            raise OSError(errno.EIO, "the compaction process sent an unexpected response")
        return response.cleaned

    def _request(self, request: CompactionPass | int) -> MapResponse | CleanResponse:
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise OSError(errno.ECHILD, "no compaction process is running")
        body = None
        with suppress(BrokenPipeError):
            write_message(child.stdin, request)
            body = read_framed(child.stdout)
        if body is None:
            if self._cancelled:
                raise CleaningCancelled("the store is closing")
            raise OSError(errno.ECHILD, "the compaction process died")
        response: Response = msgspec.msgpack.decode(body, type=Response)
        if not isinstance(response, Failure):
            return response
        if response.base_offset >= 0:
            raise DamagedSource(response.base_offset, response.position)
        raise OSError(response.errno, response.reason)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        child.wait()

    def cancel(self) -> None:
        """Kill the child; the thread that waits for its response gets `CleaningCancelled`."""
        self._cancelled = True
        child = self._child
        if child is not None:
            child.kill()


_Result = TypeVar("_Result")


class Job(Protocol):
    """Work whose slow half is done in a thread."""

    def execute(self) -> None:
        """Run the slow half; called in a thread."""

    def finish(self) -> None:
        """Account for it; called on the loop."""


class WorkerJob(Generic[_Result]):
    """A step of the worker."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self.done: _Result | None = None
        self.error: OSError | MillstreamError | None = None

    def execute(self) -> None:
        """Run the step; called in a thread."""
        try:
            self.done = self._work()
        except (OSError, MillstreamError) as error:
            self.error = error

    def finish(self) -> None:
        """Do nothing: the caller uses the result."""


# -- scheduling -------------------------------------------------------------------------------------------------


def is_compacted(log: Log) -> bool:
    """Whether compaction applies to the log. The broker's own state topics rewrite their state instead."""
    return log.settings.compacts and log.partition.topic not in INTERNAL_TOPICS


def roll_idle(log: Log, now_ms: int) -> None:
    """Seal an active segment that is old enough, so that an idle log is compacted too."""
    if log.closed or log.health.broken or log.is_replaying or not log.segments or not log.segments[-1].size:
        return
    settings = log.settings
    age_ms = now_ms - log.segments[-1].first_append_ms
    if age_ms >= min(settings.segment_ms, settings.max_compaction_lag_ms):
        # Producers get the disk's error; compaction waits until it works again.
        with suppress(StorageFailure):
            log.roll()


def cleanable_segments(log: Log, now_ms: int) -> list[Segment]:
    """Return the segments from the start of the log that a pass may cover now."""
    segments = []
    # A record that is not acknowledged may still be truncated, and must not remove an earlier one. A record of an
    # open transaction may be aborted.
    limit = min(log.stored_offset, log.acknowledged_offset(default=log.stored_offset))
    limit = log.producers.transactions.stable_offset(limit)
    for segment in log.segments[:-1]:
        durable = segment.sealed and not segment.broken and segment.synced_bytes == segment.size
        if not durable or segment.next_offset > limit or _is_fresh(log, segment, now_ms):
            break
        if awaits_landing(log, segment, now_ms):
            break
        segments.append(segment)
    return segments


def _is_fresh(log: Log, segment: Segment, now_ms: int) -> bool:
    lag_ms = log.settings.min_compaction_lag_ms
    return lag_ms > 0 and now_ms - max(segment.max_timestamp_ms, segment.last_append_ms) < lag_ms


def dirty_ratio(log: Log, now_ms: int) -> float:
    """Return the share of the cleanable bytes that is new since the last pass; above 1 if a record waited too long."""
    segments = cleanable_segments(log, now_ms)
    dirty = [segment for segment in segments if segment.next_offset > log.cleaned_offset]
    if not dirty:
        return 0.0
    if now_ms - dirty[0].first_append_ms > log.settings.max_compaction_lag_ms:
        return 2.0
    total = sum(segment.size for segment in segments)
    return sum(segment.size for segment in dirty) / total if total else 0.0


def next_due_ms(log: Log, now_ms: int) -> int | None:
    """Return when time alone may make a pass due: a segment is sealed, or old enough; None if nothing waits.

    An active segment that became old enough while others were compacted is due now; one that could not be sealed,
    because the disk failed, waits for the next check of retention.
    """
    if log.closed or log.health.broken or log.is_replaying or not log.segments:
        return None
    settings, times = log.settings, []
    active = log.segments[-1]
    if active.size and log.health.failure is None:
        sealed_ms = active.first_append_ms + min(settings.segment_ms, settings.max_compaction_lag_ms)
        if sealed_ms <= now_ms:
            return now_ms
        times.append(sealed_ms)
    oldest = next((segment for segment in log.segments[:-1] if segment.next_offset > log.cleaned_offset), None)
    if oldest is not None:
        times.append(max(oldest.max_timestamp_ms, oldest.last_append_ms) + settings.min_compaction_lag_ms)
        times.append(oldest.first_append_ms + settings.max_compaction_lag_ms + 1)
    return min((time for time in times if time > now_ms), default=None)


def is_due(log: Log, ratio: float) -> bool:
    # While producers are read from the log, it is not known which transactions are open or aborted.
    ready = log.health.is_idle and not (log.is_replaying or log.segments.swaps)
    return ready and ratio > 0 and ratio >= log.settings.min_cleanable_dirty_ratio


# -- selection --------------------------------------------------------------------------------------------------


def _group_segments(log: Log, segments: list[Segment]) -> list[list[Segment]]:
    """Group adjacent segments that become one. A damaged one stays unchanged: its holes are recorded by position."""
    groups: list[list[Segment]] = []
    room = 0
    last: Segment | None = None
    for segment in segments:
        if segment.holes:
            last = None
            continue
        apart = last is None or segment.next_offset - groups[-1][0].base_offset > RELATIVE_OFFSET_MAX
        if apart or segment.size > room or segment.base_offset != (last.next_offset if last else -1):
            groups.append([])
            room = log.settings.segment_bytes
        groups[-1].append(segment)
        room -= segment.size
        last = segment
    return groups


def _retained_offsets(log: Log) -> list[int]:
    """Return the offsets of the batches and markers of known producers, which must be kept."""
    batches = (batch.base_offset for known in log.producers for batch in known.batches)
    return sorted({*batches, *(known.marker_offset for known in log.producers if known.marker_offset >= 0)})


def _to_source(segment: Segment) -> SourceSegment:
    return SourceSegment(segment.base_offset, segment.path, segment.size, segment.next_offset)


class Compaction:
    """A pass over one log. `jobs` yields its steps; each is carried out before the next is requested."""

    def __init__(
        self,
        log: Log,
        now_ms: int,
        *,
        files: Files,
        start_worker: Callable[[CompactionPass], Worker],
        keys_max: int = KEYS_MAX,
    ) -> None:
        self.log = log
        self.read_bytes = self.freed_bytes = self.records_removed = 0
        self.failed = False
        self._files = files
        self._generation = log.generation
        segments = cleanable_segments(log, now_ms)
        self._groups = _group_segments(log, segments)
        self._pass = CompactionPass(
            directory=log.directory,
            token=secrets.token_hex(4),
            groups=[[_to_source(segment) for segment in group] for group in self._groups],
            dirty_from=log.cleaned_offset,
            cleanable_to=segments[-1].next_offset,
            epochs=log.epochs.entries(),
            retained_offsets=_retained_offsets(log),
            aborted=[
                (transaction.producer_id, transaction.first_offset, transaction.marker_offset)
                for transaction in log.producers.transactions.aborted.overlapping(
                    log.start_offset, segments[-1].next_offset
                )
            ],
            now_ms=now_ms,
            delete_retention_ms=log.settings.delete_retention_ms,
            keep_tombstones=any(segment.holes for segment in segments),
            index_interval_bytes=log.settings.index_interval_bytes,
            keys_max=keys_max,
        )
        self.worker = start_worker(self._pass)

    def jobs(self, checkpoint: Callable[[Log], Job]) -> Iterator[Job]:
        """Yield the steps; `checkpoint` captures the checkpoint that makes a swap count."""
        mapping = WorkerJob(self.worker.map_keys)
        yield mapping
        mapped = mapping.done
        for at in range(len(self._groups)):
            if mapped is None or self._groups[at][0].base_offset >= mapped.end_offset:
                break
            cleaning = WorkerJob(lambda at=at: self.worker.clean(at))  # type: ignore[misc]
            yield cleaning
            if not self._swap_group(at, cleaning, mapped.end_offset):
                break
            if self.log.segments.swaps:
                yield checkpoint(self.log)
                if self.log.segments.swaps:
                    self.failed = True
                    break
        if mapping.error is not None:
            self._handle_failure(mapping.error)
        yield WorkerJob(self.worker.close)
        if mapped is not None and not self.failed:
            self._complete(mapped)

    def _swap_group(self, at: int, cleaning: WorkerJob[CleanResult], mapped_to: int) -> bool:
        """Continue with the new segment of a group, which lacks records whose keys occur again below an offset."""
        cleaned, old = cleaning.done, self._groups[at]
        if cleaned is None:
            self._handle_failure(cleaning.error)
            self._discard(at)
            return False
        self.read_bytes += cleaned.read_bytes
        if not cleaned.changed:
            self._forget_aborted(cleaned)
            return True
        new = _new_segment(self.log.directory, old, cleaned)
        # Stored with the checkpoint that makes the swap count.
        self.log.record_superseding(mapped_to)
        try:
            swapped = self.log.swap_in(old, new, self._pass.token)
        except OSError as error:
            self._handle_failure(error)
            swapped = False
        if not swapped:
            self.failed = True
            self._discard(at)
            return False
        self._forget_aborted(cleaned)
        self.freed_bytes += sum(segment.size for segment in old) - new.size
        self.records_removed += cleaned.records_removed
        return True

    def _forget_aborted(self, cleaned: CleanResult) -> None:
        """Forget aborted transactions of which no record is left; their markers are removed later."""
        aborted = self.log.producers.transactions.aborted
        if cleaned.ended and aborted:
            aborted.discard(cleaned.ended)

    def _discard(self, at: int) -> None:
        """Remove the new file of an abandoned group; the next unclean start would do so too."""
        with suppress(OSError):
            self._files.remove(cleaned_path(self.log.directory, self._groups[at][0].base_offset, self._pass.token))

    def _handle_failure(self, error: OSError | MillstreamError | None) -> None:
        self.failed = True
        log = self.log
        if isinstance(error, CleaningCancelled) or log.closed:
            return
        if isinstance(error, DamagedSource):
            segment = next((segment for segment in log.segments if segment.base_offset == error.base_offset), None)
            if segment is not None and any(segment in group for group in self._groups):
                # The log records and reports what it finds.
                with suppress(StorageFailure):
                    log.locate_damage(segment, error.position)
                return
        _logger.warning(
            "a log could not be compacted and stays as it is",
            extra={"partition": str(log.partition), "error": str(error)},
        )

    def _complete(self, mapped: MapResult) -> None:
        log = self.log
        if log.closed or log.generation != self._generation:
            return
        log.advance_cleaned(mapped.end_offset)
        _logger.info(
            "a log was compacted",
            extra={
                "partition": str(log.partition),
                "up_to_offset": mapped.end_offset,
                "keys": mapped.keys,
                "records_removed": self.records_removed,
                "read_bytes": self.read_bytes,
                "freed_bytes": self.freed_bytes,
            },
        )


def _new_segment(directory: str, old: list[Segment], cleaned: CleanResult) -> Segment:
    new = Segment(directory, old[0].base_offset)
    new.size = cleaned.size
    new.next_offset = old[-1].next_offset
    new.max_timestamp_ms = cleaned.max_timestamp_ms
    new.first_append_ms = min(segment.first_append_ms for segment in old)
    new.last_append_ms = max(segment.last_append_ms for segment in old)
    new.index = Index.from_bytes(cleaned.places, cleaned.times)
    new.sealed = True
    new.mark_synced(new.size, new.next_offset)
    return new


class Compactor:
    """Picks the logs of a store that are due."""

    def __init__(self, files: Files, clock: Clock) -> None:
        self.keys_max = KEYS_MAX
        self._files = files
        self._clock = clock
        self._failed_logs: set[Log] = set()
        """Logs whose last pass failed; they wait for `retry`."""
        self._running: Compaction | None = None
        self._read_bytes = 0
        self._freed_bytes = 0
        self._passes = 0
        self._failures = 0
        self._last_ms = 0
        self._dirty_ratio = 0.0

    def retry(self) -> None:
        """Allow logs whose last pass failed again."""
        self._failed_logs.clear()

    def begin_round(self, logs: Iterable[Log]) -> None:
        """Seal the segments that are old enough to be compacted."""
        now_ms = self._clock.now_ms()
        for log in logs:
            if is_compacted(log):
                roll_idle(log, now_ms)

    def due_in_s(self, log: Log) -> float | None:
        """Return in how many seconds a pass may be due if nothing is appended until then; None for never."""
        if not is_compacted(log):
            return None
        now_ms = self._clock.now_ms()
        if log not in self._failed_logs and is_due(log, dirty_ratio(log, now_ms)):
            return 0.0
        due_ms = next_due_ms(log, now_ms)
        return None if due_ms is None else (due_ms - now_ms) / 1000

    def next(self, logs: Iterable[Log]) -> Compaction | None:
        """Start a pass over the log with the highest dirty ratio, if one is due."""
        now_ms = self._clock.now_ms()
        ratios = {log: dirty_ratio(log, now_ms) for log in logs if is_compacted(log)}
        self._dirty_ratio = min(1.0, max(ratios.values(), default=0.0))
        due = {log: ratio for log, ratio in ratios.items() if log not in self._failed_logs and is_due(log, ratio)}
        if not due:
            return None
        log = max(due, key=due.__getitem__)
        self._running = Compaction(
            log, now_ms, files=self._files, start_worker=self._worker_factory(), keys_max=self.keys_max
        )
        return self._running

    def _worker_factory(self) -> Callable[[CompactionPass], Worker]:
        if isinstance(self._files, DiskFiles):
            return ChildWorker
        return lambda compaction_pass: InlineWorker(self._files, compaction_pass)

    def ended(self, compaction: Compaction) -> None:
        """Account for a pass."""
        self._running = None
        self._read_bytes += compaction.read_bytes
        self._freed_bytes += compaction.freed_bytes
        self._last_ms = self._clock.now_ms()
        if compaction.failed:
            self._failures += 1
            self._failed_logs.add(compaction.log)
        else:
            self._passes += 1

    def cancel(self) -> None:
        """End the pass that is under way, because the store is closing."""
        if self._running is not None:
            self._running.worker.cancel()

    def metrics(self) -> Iterable[Metric]:
        name = "millstream_log_compaction"
        yield counter(f"{name}_passes_total", "Compactions of logs since the start.", self._passes)
        yield counter(f"{name}_failures_total", "Compactions that failed.", self._failures)
        yield counter(f"{name}_read_bytes_total", "Bytes of segments that compaction read.", self._read_bytes)
        yield counter(f"{name}_freed_bytes_total", "Bytes that compaction freed.", self._freed_bytes)
        yield gauge(f"{name}_last_seconds", "When the last compaction ended, 0 for never.", self._last_ms / 1000)
        yield gauge(
            f"{name}_dirty_ratio",
            "The largest fraction of a compacted log that waits for compaction.",
            self._dirty_ratio,
        )
