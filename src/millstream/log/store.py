"""The data folder: its lock, all logs in it, and the group commit that makes them durable."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

from millstream.log.files import Files
from millstream.log.handles import OpenFiles
from millstream.log.log import Log
from millstream.log.recovery import recover
from millstream.model.clock import Clock
from millstream.model.errors import DataFolderInvalid
from millstream.model.ids import Offset, PartitionIndex
from millstream.model.topic import FLUSH_INTERVAL, TopicPartition, TopicSettings

_logger = logging.getLogger(__name__)


class LogStore:
    """All logs of a data folder."""

    def __init__(self, directory: Path, *, files: Files, clock: Clock, lock: int, producer_expiry_ms: int) -> None:
        self.directory = directory
        self.recovery_reports: list[str] = []
        self._files = files
        self._clock = clock
        self._lock = lock
        self._producer_expiry_ms = producer_expiry_ms
        self._open_files = OpenFiles(files, files.open_files_max())
        self._logs: dict[tuple[UUID, int], Log] = {}
        self._dirty: dict[Log, None] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-sync")

    @classmethod
    def open(
        cls, directory: Path, *, files: Files, clock: Clock, journal_bytes: int, producer_expiry_ms: int
    ) -> LogStore:
        """Lock and open a data folder, making it if it is not there."""
        try:
            files.make_directory(str(directory / "partitions"))
            lock = files.lock(str(directory / "lock"))
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise DataFolderInvalid(f"{directory} cannot hold data: {error.strerror}") from error
        return cls(directory, files=files, clock=clock, lock=lock, producer_expiry_ms=producer_expiry_ms)

    def open_log(self, topic_id: UUID, partition: TopicPartition, settings: TopicSettings) -> Log:
        """Open the log of a partition, making it if it is not there."""
        folder = str(self.directory / "partitions" / str(topic_id) / str(partition.partition))
        self._files.make_directory(folder)
        contents = recover(
            self._files,
            folder,
            now_ms=self._clock.now_ms(),
            producer_expiry_ms=self._producer_expiry_ms,
            interval_bytes=settings.index_interval_bytes,
        )
        log = Log(
            partition,
            contents,
            settings,
            files=self._files,
            open_files=self._open_files,
            clock=self._clock,
            keeper=self,
        )
        self._logs[topic_id, partition.partition] = log
        return log

    def close_log(self, log: Log) -> None:
        """Close one log."""
        log.close()
        self._logs = {key: kept for key, kept in self._logs.items() if kept is not log}

    def delete_log(self, log: Log) -> None:
        """Delete one log and its files."""
        self.close_log(log)
        shutil.rmtree(log.directory)

    def stored(self) -> Iterable[tuple[UUID, PartitionIndex]]:
        """Every partition that has a folder."""
        root = str(self.directory / "partitions")
        for topic in self._files.names(root):
            for partition in self._files.names(f"{root}/{topic}"):
                yield UUID(topic), PartitionIndex(int(partition))

    def touched(self, log: Log) -> None:
        """A log holds what is not synced."""
        if log.settings.flush == FLUSH_INTERVAL:
            self.sync_soon(log)

    def sync_soon(self, log: Log) -> None:
        """Make everything that the log holds now durable, together with what other logs ask for."""
        self._dirty[log] = None
        self._wake.set()

    async def run(self) -> None:
        """Sync what was asked for until the store is closed; while one sync runs, the next group gathers."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            if not self._dirty:
                continue
            group, self._dirty = list(self._dirty), {}
            captured = [(log, *log.capture()) for log in group]
            descriptors = [self._open_files.pin(segment) for _, _, segments in captured for segment in segments]
            await loop.run_in_executor(self._executor, self._sync, descriptors)
            for log, end_offset, segments in captured:
                for segment in segments:
                    self._open_files.unpin(segment)
                log.synced(Offset(end_offset))

    def _sync(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self._files.sync(descriptor)

    async def close(self) -> None:
        """Sync everything and release the folder."""
        self._closing = True
        self._wake.set()
        for log in list(self._logs.values()):
            end_offset, segments = log.capture()
            for segment in segments:
                self._files.sync(self._open_files.descriptor(segment))
            log.synced(end_offset)
            self.close_log(log)
        self._executor.shutdown()
        self._files.close(self._lock)
