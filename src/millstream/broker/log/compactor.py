"""Which log is compacted next: one pass at a time, the log with the highest dirty ratio first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream.broker.log.cleaner import CompactionPass
from millstream.broker.log.cleaner_worker import ChildWorker, InlineWorker, Worker
from millstream.broker.log.compaction import Compaction, dirty_ratio, is_compacted, is_due, next_due_ms, roll_idle
from millstream.broker.log.files import DiskFiles, Files
from millstream.broker.log.key_map import KEYS_MAX
from millstream.broker.log.log import Log
from millstream.core.clock import Clock
from millstream.core.metric import Metric, counter, gauge


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
        self._running = Compaction(log, now_ms, files=self._files, start_worker=self._worker(), keys_max=self.keys_max)
        return self._running

    def _worker(self) -> Callable[[CompactionPass], Worker]:
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
        """Return the metrics of compaction."""
        name = "millstream_log_compaction"
        yield counter(f"{name}_passes_total", "Compactions of logs since the start.", self._passes)
        yield counter(f"{name}_failures_total", "Compactions that were given up.", self._failures)
        yield counter(f"{name}_read_bytes_total", "Bytes of segments that were compacted.", self._read_bytes)
        yield counter(f"{name}_freed_bytes_total", "Bytes that compaction made free.", self._freed_bytes)
        yield gauge(f"{name}_last_seconds", "When the last compaction ended, 0 for never.", self._last_ms / 1000)
        yield gauge(f"{name}_dirty_ratio", "The largest part of a log that waits for compaction.", self._dirty_ratio)
