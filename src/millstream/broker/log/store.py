"""All logs of a data folder, and their background work.

The parts that decide are synchronous and run on the loop (`commit_once`, `checkpoint_once`, `delete_expired`); `run` is
the thin shell that runs their slow parts in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EBUSY
from itertools import islice
from pathlib import Path
from uuid import UUID

from millstream.broker.log.checkpoint import Checkpoints
from millstream.broker.log.commit import DIRECT_LOGS_MAX, Commit
from millstream.broker.log.compaction import Compaction, Compactor, Job
from millstream.broker.log.files import BackgroundSync, Files, OpenFiles
from millstream.broker.log.folder import DataFolder
from millstream.broker.log.journal import Journal, remove_journal
from millstream.broker.log.ledger import Ledger, LogKey
from millstream.broker.log.log import Log
from millstream.broker.log.log_contents import ProducerReplay, RecoveryReport
from millstream.broker.log.range_repair import RangeRepair
from millstream.broker.log.recovery import OpenOptions, RecoveryProgress, Replay, open_contents
from millstream.broker.log.retention import RetentionFloors
from millstream.broker.log.scan import LoadedIndexes
from millstream.broker.log.scrub import Inspection, Scrubber, ScrubStep
from millstream.broker.log.segment import Segment
from millstream.broker.log.state import LogState, decode_state, empty_state, encode_state
from millstream.broker.log.truncation import Truncation, finish_when_executed
from millstream.core.clock import Clock
from millstream.core.errors import StorageFailure
from millstream.core.ids import PartitionIndex
from millstream.core.metric import Histogram, Metric, Sample, counter, gauge
from millstream.core.tasks import wait_up_to
from millstream.core.topic import FLUSH_INTERVAL, FLUSH_OS, TopicPartition, TopicSettings

_logger = logging.getLogger(__name__)

CHECKPOINT_S = 10.0
"""How long after a write a log is checkpointed, which bounds what a crash leaves to be scanned."""

RETRY_S = 1.0
COMPACTION_PAUSE_S = 1.0
"""Logs that become due within this time are compacted in one round."""
FAILURE_S = 30.0
CLOSE_ATTEMPTS = 3
RETENTION_SLICE = 500
UPKEEP_LOGS_MAX = 32
SYNC_ALL_LOGS_MIN = 64
"""From this many logs on, one sync of the whole file system is quicker than one of each file."""


class LogStore:
    """All logs of a data folder; created by `open`."""

    def __init__(
        self,
        folder: DataFolder,
        *,
        files: Files,
        clock: Clock,
        journal_bytes: int,
        producer_expiry_ms: int,
        retention_check_ms: int,
        scrub_bytes_per_s: int,
        scrub_interval_ms: int,
    ) -> None:
        self.recovery_reports: list[RecoveryReport] = []
        self.stop_failure: str | None = None
        """The reason why the stop was not clean, once the store is closed."""
        self.clean_start = True
        self.floors = RetentionFloors()
        self._folder = folder
        self._files = files
        self._clock = clock
        self._producer_expiry_ms = producer_expiry_ms
        self._retention_check_ms = retention_check_ms
        self._open_files = OpenFiles(files, files.open_files_max())
        # The files of a job stay open while a thread works on it, so one job may use only some of the descriptors.
        self._batch_max = max(1, files.open_files_max() // 4)
        self._upkeep_max = min(UPKEEP_LOGS_MAX, self._batch_max)
        self._indexes = LoadedIndexes()
        self._journal = Journal(files, folder.journal, journal_bytes)
        self._ledger = Ledger(files, folder.path)
        self._logs: dict[LogKey, Log] = {}
        self._unrecovered: set[LogKey] = set()
        # Logs to recover whose files are known to be on disk.
        self._durable: set[LogKey] = set()
        self._replayed: dict[str, int] = {}
        self._progress = RecoveryProgress()
        self._to_commit: dict[Log, None] = {}
        self._stale: dict[Log, None] = {}
        self._to_checkpoint: dict[Log, None] = {}
        self._catch_up: dict[Log, None] = {}
        self._background: BackgroundSync | None = None
        self._is_commit_due = False
        self._committing: dict[Log, float] = {}
        """Logs with a commit under way, and since when; what is requested meanwhile waits for their next one."""
        self._commits_in_thread = 0
        self._commits_ended: asyncio.Future[None] | None = None
        """Completes with the last commit of a closing store, or with the error of a failed commit."""
        self._upkeep_wake = asyncio.Event()
        self._compact_wake = asyncio.Event()
        self._compact_at = math.inf
        """When compaction looks again, on the monotonic clock."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Future[None] | None = None
        self._retention_due = False
        self._commit_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-commit")
        self._upkeep_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-upkeep")
        self._compact_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-compaction")
        self._compactor = Compactor(files, clock)
        self._scrub_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-scrub")
        self._is_scrub_over = asyncio.Event()
        self._scrubber = Scrubber(
            files, folder.path, clock, bytes_per_s=scrub_bytes_per_s, interval_ms=scrub_interval_ms
        )
        self._cutting: set[asyncio.Future[None]] = set()
        self._inspections: dict[Segment, Inspection] = {}
        """Passes in progress, and those that have just found nothing to do."""
        self._closing = False
        self._commit_seconds = Histogram()
        self._checkpoints = 0

    # -- opening --------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        files: Files,
        clock: Clock,
        journal_bytes: int,
        producer_expiry_ms: int,
        retention_check_ms: int = 60_000,
        scrub_bytes_per_s: int = 0,
        scrub_interval_ms: int = 3_600_000,
        is_locked: bool = False,
    ) -> LogStore:
        """Lock a data folder unless it `is_locked`, creating it if necessary, and replay the journal."""
        folder = DataFolder(directory, files, is_locked=is_locked)
        try:
            store = cls(
                folder,
                files=files,
                clock=clock,
                journal_bytes=journal_bytes,
                producer_expiry_ms=producer_expiry_ms,
                retention_check_ms=retention_check_ms,
                scrub_bytes_per_s=scrub_bytes_per_s,
                scrub_interval_ms=scrub_interval_ms,
            )
            store._recover()
        except OSError as error:
            folder.release()
            raise StorageFailure(f"{directory} could not be recovered: {error.strerror or error}") from error
        return store

    def _recover(self) -> None:
        mark = self._folder.take_clean_stop()
        is_clean = mark is not None and mark.ledger_bytes == self._ledger.size_bytes and not self._ledger.damaged
        # A crash may have come between a removal and its entry in the ledger.
        removed = [key for key in self._folder.deleted() if key in self._ledger]
        if removed:
            self._record_removed(removed)
        self._folder.remove_deleted()
        if mark is not None and is_clean:
            self._unrecovered = {(topic_id, PartitionIndex(partition)) for topic_id, partition in mark.unrecovered}
            remove_journal(self._files, self._folder.journal)
            return
        self.clean_start = self._folder.is_new
        self._unrecovered = set(self._folder.stored())
        replay = Replay(self._files, self._folder, self._state_of)
        replay.run(self._sync_everything)
        self._replayed = replay.bytes_by_folder
        # Without logs there is nothing to recover: only users may have been created in this folder so far.
        if not self.clean_start and self._unrecovered:
            _logger.warning(
                "the last stop was not clean; logs are recovered",
                extra={"logs": len(self._unrecovered), "replayed_bytes": sum(self._replayed.values())},
            )

    def _sync_everything(self) -> bool:
        """Sync all logs with one call if there are many; return False if each must be synced separately.

        What a killed process wrote may be in memory only, and counts as durable after this.
        """
        if len(self._unrecovered) < SYNC_ALL_LOGS_MIN:
            return False
        try:
            self._files.sync_all(self._folder.partitions)
        except OSError as error:
            _logger.warning(
                "the file system could not be synced as a whole; syncing each log", extra={"error": str(error)}
            )
            return False
        self._durable = set(self._unrecovered)
        return True

    def _state_of(self, key: LogKey) -> LogState | None:
        content = self._ledger.state_of(key)
        return None if content is None else decode_state(content)

    def open_log(self, topic_id: UUID, partition: TopicPartition, settings: TopicSettings) -> Log:
        """Open the log of a partition, creating it if necessary; recover it after an unclean stop."""
        key = (topic_id, partition.partition)
        if key in self._logs:
            raise StorageFailure(f"{partition} is already open")
        directory = self._folder.log_folder(topic_id, partition.partition)
        opening = OpenOptions(
            files=self._files,
            now_ms=self._clock.now_ms(),
            producer_expiry_ms=self._producer_expiry_ms,
            index_interval_bytes=settings.index_interval_bytes,
            durable=key in self._durable,
        )
        try:
            unrecovered = key in self._unrecovered
            is_created = not unrecovered and not self._files.exists(directory)
            if is_created:
                self._files.make_directory(directory)
            contents, report = open_contents(opening, directory, self._state_of(key), clean=not unrecovered)
            contents.known = contents.known and not is_created
        except OSError as error:
            raise StorageFailure(f"{partition}: opening {directory} failed: {error.strerror or error}") from error
        log = Log(
            topic_id,
            partition,
            contents,
            settings,
            files=self._files,
            open_files=self._open_files,
            indexes=self._indexes,
            clock=self._clock,
            maintenance=self,
        )
        self._logs[key] = log
        self._unrecovered.discard(key)
        self._durable.discard(key)
        # A new log has nothing to recover.
        if report is not None and (unrecovered or report.is_notable):
            self._record_recovery(log, report)
        if contents.changed:
            self.checkpoint_soon(log)
        return log

    def _record_recovery(self, log: Log, report: RecoveryReport) -> None:
        report.topic, report.partition = log.partition.topic, log.partition.partition
        report.replayed_bytes = self._replayed.pop(log.directory, 0)
        self._progress.add(report, left=len(self._unrecovered), now=self._clock.monotonic())
        if report.is_notable:
            self.recovery_reports.append(report)

    def on_recovery_progress(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener` with how many logs are recovered and how many are left, until all are."""
        self._progress = RecoveryProgress(listener)

    def finish_recovery(self) -> None:
        """Log a summary; all logs of the node are open."""
        progress, self._progress = self._progress, RecoveryProgress()
        progress.log_summary()

    @property
    def unrecovered(self) -> frozenset[LogKey]:
        """The logs that an unclean stop has left to be recovered when they are opened."""
        return frozenset(self._unrecovered)

    def stored(self) -> Iterable[LogKey]:
        return self._folder.stored()

    def hand_over(self, keys: Collection[LogKey], to: LogStore) -> None:
        """Move logs that are closed and need no recovery to another folder, durably: first their checkpoints.

        A crash between leaves each log in one folder, with its checkpoint there.
        """
        if any(key in self._logs or key in self._unrecovered for key in keys):
            raise StorageFailure(f"{self._folder.path}: only logs that are closed can be handed over")
        states = [(key, self._ledger.state_of(key)) for key in keys]
        try:
            to._ledger.write([(key, to._ledger.next_version(), state) for key, state in states if state is not None])
            for key in keys:
                self._folder.move_log(key, to._folder)
            self._record_removed(keys)
        except OSError as error:
            raise StorageFailure(
                f"logs could not be moved from {self._folder.path} to {to._folder.path}: {error.strerror or error}"
            ) from error

    # -- closing and deleting one log -----------------------------------------------------------------------

    def close_log(self, log: Log) -> None:
        """Make a log durable and close it."""
        if log.closed:
            return
        try:
            if log.is_replaying:
                raise OSError(EBUSY, "the log is being truncated")
            self.checkpoint_now(log)
        except OSError:
            self._unrecovered.add(log.key)
        self._remove(log)

    def delete_log(self, log: Log, *, topic_remains: bool = False) -> None:
        """Delete a log and its files, durably; the space is freed a little later.

        With `topic_remains`, only a replica is removed: this store may get one of the same partition again.
        """
        self._remove(log)
        self._ledger.forget(log.key)
        try:
            deleted_folder = self._folder.mark_deleted(log.directory)
        except OSError as error:
            raise StorageFailure(f"{log.partition} could not be deleted: {error.strerror or error}") from error
        if topic_remains:
            try:
                self._record_removed([log.key])
            except OSError as error:
                # The next checkpoint records that the log was forgotten.
                _logger.warning("a removed log could not be recorded yet", extra={"error": str(error)})
        if self._loop is None:
            self._remove_deleted(deleted_folder)
        else:
            self._loop.run_in_executor(self._upkeep_thread, self._remove_deleted, deleted_folder)

    def _record_removed(self, keys: Iterable[LogKey]) -> None:
        """Replace the checkpoints of logs whose folders are gone, durably.

        Otherwise the next replicas of these partitions would be taken for the removed ones, with all their data lost,
        and what the journal still has of them would be replayed.
        """
        state = encode_state(empty_state(self.journal_mark()))
        self._ledger.write([(key, self._ledger.next_version(), state) for key in keys])

    def _remove_deleted(self, folder: str) -> None:
        try:
            self._folder.remove_tree(folder)
            self._folder.remove_if_empty(folder.rpartition("/")[0])
        except OSError as error:
            _logger.warning(
                "a deleted log could not be removed; the next start tries again",
                extra={"folder": folder, "error": str(error)},
            )

    def _remove(self, log: Log) -> None:
        log.close()
        self._logs.pop(log.key, None)
        for group in (self._to_commit, self._stale, self._to_checkpoint, self._catch_up):
            group.pop(log, None)

    # -- requests of logs -----------------------------------------------------------------------------------

    def sync_soon(self, log: Log) -> None:
        """Make everything in the log durable, together with other requested syncs."""
        self._to_commit[log] = None
        if not self._is_commit_due and self._loop is not None:
            self._is_commit_due = True
            self._loop.call_soon(self._commit_due)

    def mark_dirty(self, log: Log) -> None:
        """Plan the sync, checkpoint and compaction of a log that holds unsynced bytes."""
        self._plan_compaction(log)
        if log.settings.flush == FLUSH_OS:
            return
        if not self._stale:
            self._call_later(CHECKPOINT_S, self._checkpoint_stale)
        self._stale[log] = None
        if log.settings.flush == FLUSH_INTERVAL:
            self._call_later(log.settings.flush_ms / 1000, self._sync_if_open, log)

    def _checkpoint_stale(self) -> None:
        stale, self._stale = self._stale, {}
        for log in stale:
            self.checkpoint_soon(log)

    def _sync_if_open(self, log: Log) -> None:
        if not log.closed:
            self.sync_soon(log)

    def checkpoint_soon(self, log: Log) -> None:
        self._to_checkpoint[log] = None
        self._upkeep_wake.set()

    def checkpoint_now(self, log: Log) -> None:
        job = self.checkpoint_job(log)
        self._run_job(job)
        if job.error is not None:
            raise job.error

    def inspect(self, log: Log, segment: Segment, position: int) -> bool:
        """Locate the offsets that are lost where a segment could not be read; return whether they are known now.

        A thread does it, and requests that wait for records of the log retry when it is done. Without a loop it is done
        here, and `StorageFailure` means that nothing was found to be lost.
        """
        if segment in self._inspections:
            return False
        try:
            inspection = Inspection.around(log, segment, position)
        except OSError as error:
            raise StorageFailure(f"{segment.path} cannot be read: {error.strerror or error}") from error
        if self._loop is not None:
            self._inspections[segment] = inspection
            executed = self._loop.run_in_executor(self._scrub_thread, inspection.execute)
            executed.add_done_callback(lambda _: self._end_inspection(inspection))
            return False
        self._run_job(inspection)
        if not inspection.is_lost:
            reason = "a second read found nothing wrong" if inspection.error is None else str(inspection.error)
            raise StorageFailure(f"{segment.path} could not be read at byte {position}: {reason}")
        return True

    def _end_inspection(self, inspection: Inspection) -> None:
        try:
            inspection.finish()
        finally:
            if inspection.is_lost or self._closing:
                # The log has failed the waiting requests.
                del self._inspections[inspection.segment]
            else:
                # Not at once, unless the log has changed: the disk may fail, or a reader may fail again at the same
                # place.
                self._call_later(RETRY_S if inspection.is_current else 0, self._release_inspection, inspection)

    def _release_inspection(self, inspection: Inspection) -> None:
        del self._inspections[inspection.segment]
        if not inspection.log.closed:
            inspection.log.damage.on_change()

    def truncate_now(self, cut: Truncation) -> None:
        """Carry out a truncation before this returns, or raise `StorageFailure`."""
        if cut.replay is not None:
            cut.replay.execute()
            cut.take_producers()
        self._drain_background()
        cut.execute()
        self._finish_truncation(cut)

    def truncate_soon(self, cut: Truncation) -> asyncio.Future[None]:
        """Carry out a truncation in a thread; the future is done when it is durable, or has the error."""
        # In the thread of all checkpoints, since those of a log are written in the order in which they were taken.
        loop = asyncio.get_running_loop()
        executed: asyncio.Future[None]
        if cut.replay is None:
            executed = loop.run_in_executor(self._upkeep_thread, cut.execute)
        else:
            executed = loop.create_task(self._replay_and_cut(cut, cut.replay), name="log cut")
            self._cutting.add(executed)
            executed.add_done_callback(self._cutting.discard)
        return finish_when_executed(executed, lambda: self._finish_truncation(cut))

    async def _replay_and_cut(self, cut: Truncation, replay: ProducerReplay) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._upkeep_thread, replay.execute)
        cut.take_producers()
        await loop.run_in_executor(self._upkeep_thread, cut.execute)

    def _finish_truncation(self, cut: Truncation) -> None:
        if cut.checkpoint is not None:
            self._finish_job(cut.checkpoint)
        cut.finish()

    def journal_mark(self) -> tuple[int, int]:
        """Return the journal's id and next sequence."""
        return self._journal.journal_id, self._journal.next_sequence

    # -- the synchronous cores ------------------------------------------------------------------------------

    def commit_once(self) -> bool:
        """Commit everything that was requested; return False if there was nothing."""
        return self._run_job(self._begin_commit())

    def checkpoint_once(self) -> bool:
        """Catch up with the journal, or write some due checkpoints; return False if there was nothing to do."""
        return self._run_job(self._begin_upkeep())

    def delete_expired(self) -> int:
        """Apply retention to all logs; return the bytes freed."""
        return sum(self._delete_expired(log) for log in list(self._logs.values()))

    def compact_once(self) -> bool:
        """Compact the log that needs it most; return False if none does."""
        self._compactor.retry()
        self._compactor.begin_round(self._logs.values())
        compaction = self._compactor.next(self._logs.values())
        if compaction is None:
            return False
        for job in compaction.jobs(self.checkpoint_job):
            self._run_job(job)
        self._compactor.ended(compaction)
        return True

    def checkpoint_job(self, log: Log) -> Checkpoints:
        """Capture a checkpoint of a log for the caller to carry out."""
        self._to_checkpoint.pop(log, None)
        return Checkpoints([log], self._files, self._ledger)

    def close_now(self) -> None:
        """Make everything durable, mark the clean stop, and release the folder."""
        for job in self._last_jobs():
            self._run_job(job)
        self._release()

    def _run_job(self, job: Job | None) -> bool:
        if job is None:
            return False
        self._drain_background()
        job.execute()
        self._finish_job(job)
        return True

    def _drain_background(self) -> None:
        """End the syncs in the background: what is about to run here may sync the same files."""
        if self._background is not None:
            self._background.drain()

    def _begin_commit(self, logs_max: int | None = None) -> Commit | None:
        if not self._to_commit:
            return None
        free = (log for log in self._to_commit if log not in self._committing)
        logs = list(islice(free, logs_max or self._batch_max))
        if not logs:
            return None
        now = self._clock.monotonic()
        for log in logs:
            del self._to_commit[log]
            self._committing[log] = now
        return Commit(logs, self._files, self._journal)

    def _begin_upkeep(self) -> Job | None:
        if self._catch_up:
            logs = list(islice(self._catch_up, self._upkeep_max))
            for log in logs:
                del self._catch_up[log]
            return Commit(logs, self._files, self._journal, direct=True)
        while self._to_checkpoint:
            some = list(islice(self._to_checkpoint, self._upkeep_max))
            for log in some:
                del self._to_checkpoint[log]
            due = [log for log in some if not log.closed and not log.health.broken and not log.is_replaying]
            if due:
                return Checkpoints(due, self._files, self._ledger)
        return None

    def _finish_job(self, job: Job) -> None:
        """Complete a job that a thread has carried out, and start the jobs that follow from it."""
        job.finish()
        if isinstance(job, Commit):
            if not job.is_direct:
                self._observe_commit(job)
            for log in job.retry_now:
                self.sync_soon(log)
            for log in job.retry_later:
                self._call_later(RETRY_S, self._sync_if_open, log)
            for log in self._journal.take_lagging():
                self._catch_up[log] = None
                self._upkeep_wake.set()
        elif isinstance(job, Checkpoints):
            self._checkpoints += len(job.checkpoints)
            for checkpoint in job.checkpoints:
                self._plan_compaction(checkpoint.log)
            for log in job.failed:
                if any(segment.broken for segment in log.segments.unsynced()):
                    self.sync_soon(log)
                else:
                    self.mark_dirty(log)

    def _observe_commit(self, commit: Commit) -> None:
        now = self._clock.monotonic()
        self._commit_seconds.observe(now - min(self._committing.pop(log, now) for log in commit.logs))

    def _delete_expired(self, log: Log) -> int:
        now_ms = self._clock.now_ms()
        log.producers.expire(now_ms)
        return log.delete_expired(now_ms)

    # -- the shell ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit, checkpoint and delete until the store is closed."""
        if self._closing:
            return
        self._loop = asyncio.get_running_loop()
        self._running = self._loop.create_future()
        self._commits_ended = self._loop.create_future()
        self._background = self._files.background_sync()
        for log in list(self._to_commit):
            self.sync_soon(log)
        # Logs that became dirty before the loop ran have no timer yet.
        stale, self._stale = self._stale, {}
        for log in {**stale, **{log: None for log in self._logs.values() if log.is_dirty}}:
            self.mark_dirty(log)
        self._retention_timer()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._await_commits(self._commits_ended), name="log commits")
                tasks.create_task(self._upkeep_forever(), name="log upkeep")
                tasks.create_task(self._compact_forever(), name="log compaction")
                if self._scrubber.bytes_per_s > 0:
                    tasks.create_task(self._scrub_forever(), name="log scrub")
        finally:
            background, self._background = self._background, None
            if background is not None:
                background.close()
            self._loop = None
            self._running.set_result(None)

    # Every producer waits for commits, so they continue by callbacks with a single hand-over each way. A few logs are
    # committed each for itself, in the background, so that none waits for another's sync; many together, in a thread.

    async def _await_commits(self, ended: asyncio.Future[None]) -> None:
        await ended

    def _commit_due(self) -> None:
        """Begin to commit everything that was requested in this turn of the loop."""
        self._is_commit_due = False
        try:
            self._begin_commits()
        except Exception as error:
            self._fail_commits(error)

    def _begin_commits(self) -> None:
        loop, background = self._loop, self._background
        if loop is None:
            return
        if background is not None and len(self._to_commit) + len(self._committing) <= DIRECT_LOGS_MAX:
            while (commit := self._begin_commit(logs_max=1)) is not None:
                if not commit.begin(background, self._commit_executed):
                    self._execute_in_thread(commit, loop)
        elif not self._commits_in_thread:
            several = self._begin_commit()
            if several is not None:
                self._execute_in_thread(several, loop)
        self._end_commits_if_closing()

    def _execute_in_thread(self, commit: Commit, loop: asyncio.AbstractEventLoop) -> None:
        self._commits_in_thread += 1
        loop.run_in_executor(self._commit_thread, self._execute, commit, loop)

    def _execute(self, commit: Commit, loop: asyncio.AbstractEventLoop) -> None:
        """Carry out a commit in its thread, and wake the loop once."""
        try:
            commit.execute()
        except Exception as error:
            loop.call_soon_threadsafe(self._fail_commits, error)
        else:
            loop.call_soon_threadsafe(self._thread_executed, commit)

    def _thread_executed(self, commit: Commit) -> None:
        self._commits_in_thread -= 1
        self._commit_executed(commit)

    def _commit_executed(self, commit: Commit) -> None:
        """Account for a commit, and begin with what was requested meanwhile."""
        try:
            self._finish_job(commit)
            self._begin_commits()
        except Exception as error:
            self._fail_commits(error)

    def _fail_commits(self, error: Exception) -> None:
        """Stop the store, and with it the node: a commit has failed unexpectedly."""
        if self._commits_ended is not None and not self._commits_ended.done():
            self._commits_ended.set_exception(error)

    def _end_commits_if_closing(self) -> None:
        is_busy = self._committing or self._to_commit
        if self._closing and not is_busy and self._commits_ended is not None and not self._commits_ended.done():
            self._commits_ended.set_result(None)

    async def _upkeep_forever(self) -> None:
        while not self._closing:
            await self._upkeep_wake.wait()
            self._upkeep_wake.clear()
            while not self._closing and (job := self._begin_upkeep()) is not None:
                await self._run_in_thread(self._upkeep_thread, job)
            if self._retention_due:
                self._retention_due = False
                await self._delete_expired_in_slices()
                self._compactor.retry()
                self._compact_wake.set()
                self._retention_timer()

    async def _compact_forever(self) -> None:
        while not self._closing:
            await self._compact_wake.wait()
            self._compact_wake.clear()
            self._compact_at = math.inf
            self._compactor.begin_round(self._logs.values())
            while not self._closing and (compaction := self._compactor.next(self._logs.values())) is not None:
                await self._compact(compaction)
            for log in self._logs.values():
                self._plan_compaction(log)

    def _plan_compaction(self, log: Log) -> None:
        """Wake compaction when a log is due, unless it wakes earlier anyway."""
        due_s = self._compactor.due_in_s(log) if self._loop is not None else None
        if due_s is None:
            return
        pause_s = max(COMPACTION_PAUSE_S, due_s)
        at = self._clock.monotonic() + pause_s
        if at < self._compact_at:
            self._compact_at = at
            self._call_later(pause_s, self._compact_wake.set)

    async def _compact(self, compaction: Compaction) -> None:
        for job in compaction.jobs(self.checkpoint_job):
            # Checkpoints of a log are written in the order in which they were taken, so all in one thread.
            await self._run_in_thread(
                self._upkeep_thread if isinstance(job, Checkpoints) else self._compact_thread, job
            )
        self._compactor.ended(compaction)

    async def _scrub_forever(self) -> None:
        """Verify all logs, pass after pass, within the configured rate."""
        scrubber, loop = self._scrubber, asyncio.get_running_loop()
        pause_s = scrubber.wait_s
        while not await wait_up_to(pause_s, self._is_scrub_over):
            step = scrubber.next(self._logs)
            if step is not None:
                await self._run_in_thread(self._scrub_thread, step)
                pause_s = scrubber.ended(step)
            if scrubber.should_save:
                await loop.run_in_executor(self._scrub_thread, scrubber.save_progress)
            if step is None:
                pause_s = scrubber.wait_s
        await loop.run_in_executor(self._scrub_thread, scrubber.save_progress)

    async def repair_range(self, repair_range: RangeRepair) -> None:
        """Repair a lost range with the batches of another replica, or raise why that failed."""
        # A truncation of the same file happens entirely before or after a write into it.
        await self._run_in_thread(
            self._upkeep_thread if repair_range.is_in_place else self._compact_thread, repair_range
        )
        if isinstance(repair_range.error, OSError):
            raise StorageFailure(
                f"{repair_range.log.partition}: lost offsets could not be repaired: {repair_range.error}"
            )
        if repair_range.error is not None:
            raise repair_range.error

    def scrub_once(self) -> bool:
        """Verify the next piece of a segment; return False at the end of a pass."""
        step = self._scrubber.next(self._logs)
        if step is None or not self._run_job(step):
            return False
        self._scrubber.ended(step)
        return True

    async def _run_in_thread(self, thread: ThreadPoolExecutor, job: Job) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(thread, job.execute)
        replay = job.replay() if isinstance(job, RangeRepair | ScrubStep) else None
        if replay is not None:
            # From when it has caught up until the job is finished, nothing may be appended.
            await loop.run_in_executor(self._scrub_thread, replay.execute)
            while not replay.has_caught_up():
                await loop.run_in_executor(self._scrub_thread, replay.execute)
        self._finish_job(job)

    def _retention_timer(self) -> None:
        self._call_later(self._retention_check_ms / 1000, self._request_retention)

    def _request_retention(self) -> None:
        self._retention_due = True
        self._upkeep_wake.set()

    async def _delete_expired_in_slices(self) -> None:
        for at, log in enumerate(list(self._logs.values())):
            self._delete_expired(log)
            if at % RETENTION_SLICE == RETENTION_SLICE - 1:
                await asyncio.sleep(0)

    def _call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Call something later, unless nothing runs the store (as in tests that step it manually)."""
        if self._loop is not None and not self._closing:
            self._loop.call_later(seconds, call, *arguments)

    async def close(self) -> None:
        """Make everything durable, mark the clean stop, and release the folder. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._end_commits_if_closing()
        self._upkeep_wake.set()
        self._compact_wake.set()
        self._is_scrub_over.set()
        self._compactor.cancel()
        if self._running is not None:
            await self._running
        for job in self._last_jobs():
            await self._run_in_thread(self._upkeep_thread, job)
        for inspection in self._inspections.values():
            inspection.is_cancelled = True
        await asyncio.gather(*self._cutting, return_exceptions=True)
        for thread in (self._commit_thread, self._upkeep_thread, self._scrub_thread):
            await asyncio.get_running_loop().run_in_executor(thread, int)
        self._release()

    def _last_jobs(self) -> Iterator[Job]:
        """Yield the jobs that remain before the folder is clean."""
        self._closing = True
        # A store that was cancelled may have left some.
        self._committing.clear()
        for log in self._logs.values():
            if log.synced_offset < log.end_offset:
                self._to_commit[log] = None
        for _ in range(CLOSE_ATTEMPTS * (1 + len(self._to_commit) // self._batch_max)):
            commit = self._begin_commit()
            if commit is None:
                break
            yield commit
        behind = [
            log
            for log in self._logs.values()
            if log.needs_checkpoint and not log.health.broken and not log.is_replaying
        ]
        for at in range(0, len(behind), self._batch_max):
            yield Checkpoints(behind[at : at + self._batch_max], self._files, self._ledger)

    def _release(self) -> None:
        """Release the folder, with the mark of a clean stop if all logs are durable."""
        clean = all(not log.needs_checkpoint and log.stored_offset == log.end_offset for log in self._logs.values())
        for log in list(self._logs.values()):
            self._remove(log)
        self._commit_thread.shutdown()
        self._upkeep_thread.shutdown()
        self._compact_thread.shutdown()
        self._scrub_thread.shutdown()
        self._open_files.close_all()
        self._ledger.close()
        try:
            if clean:
                self._journal.remove()
                self._folder.mark_clean_stop(self._ledger.size_bytes, self._unrecovered)
            else:
                self._journal.close()
                self.stop_failure = "the logs could not all be made durable; the next start will recover them"
                _logger.error(self.stop_failure)
        except OSError as error:
            self.stop_failure = f"the clean stop could not be marked: {error.strerror or error}"
            _logger.error("the clean stop could not be marked", extra={"error": str(error)})
        finally:
            self._folder.release()

    # -- health ---------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        return self._files.free_bytes(self._folder.path)

    @property
    def failures(self) -> dict[TopicPartition, str]:
        """The partitions that the disk currently fails, and how.

        A refused write counts only for a while: there may be no further write that would show that the disk works
        again. A full disk counts until it has space for what it refused.
        """
        since = self._clock.monotonic() - FAILURE_S
        causes: dict[TopicPartition, str] = {}
        for log in self._logs.values():
            if log.failure is not None and (log.health.broken or log.health.failed_at > since):
                causes[log.partition] = log.failure
            if log.health.lack is not None and (lack := log.health.check_space(self.free_bytes)) is not None:
                causes.setdefault(log.partition, lack)
        return causes

    def damage(self) -> Iterator[tuple[TopicPartition, list[tuple[int, int, bool]]]]:
        """Yield the partitions with lost ranges, each as (first, next, whether a replica may have it)."""
        for log in self._logs.values():
            if log.damage:
                repairable = log.damage.repairable
                yield log.partition, [(lost.start, lost.end, lost in repairable) for lost in log.damage]

    def metrics(self) -> Iterable[Metric]:
        seconds = (Sample(self._commit_seconds.distribution()),)
        yield Metric("millstream_log_commit_seconds", "histogram", "How long group commits took.", seconds)
        yield counter("millstream_log_checkpoints_total", "Checkpoints of logs since the start.", self._checkpoints)
        yield from self._compactor.metrics()
        yield from self._scrubber.metrics()
        yield gauge("millstream_log_open_files", "Segment files that are open.", len(self._open_files))
        transactions = [log.producers.transactions for log in self._logs.values()]
        opened = sum(len(log_folder.open) for log_folder in transactions)
        yield gauge("millstream_log_open_transactions", "Open transactions, counted on each partition.", opened)
        aborted = sum(len(log_folder.aborted) for log_folder in transactions)
        yield gauge("millstream_log_aborted_transactions", "Aborted transactions that readers have to skip.", aborted)
        yield gauge("millstream_log_failed_partitions", "Partitions whose disk fails or is full.", len(self.failures))
        lost = [after - first for _, ranges in self.damage() for first, after, _ in ranges]
        yield gauge("millstream_log_damaged_ranges", "Ranges of offsets that the disk lost.", len(lost))
        yield gauge("millstream_log_damaged_offsets", "Offsets that the disk lost.", sum(lost))
        yield gauge("millstream_log_free_bytes", "Free bytes on the disk of the data folder.", self.free_bytes)
