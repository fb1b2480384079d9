"""Files of failed attempts, which will never be committed: deleted soon instead of by the vacuum after a week.

When a task fails, other tasks of its job have written files that are never reported, and some run on for a while after
they were cancelled. File names contain the attempt, so the files can be found: they are searched for at once, and again
every minute until none has appeared for a while. Only attempts for which no commit was ever tried are tracked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.storage import Storage

_logger = logging.getLogger(__name__)

KEPT_S: Final = 600.0
"""How long files of an attempt are looked for; later ones are left to the vacuum."""
PAUSE_S: Final = 60.0
"""The pause between two listings of a folder."""
EMPTY_LISTINGS_MAX: Final = 3
"""After this many listings in a row that find nothing, a folder is dropped; cancelled tasks have ended by then."""
SWEEP_S: Final = 20.0
"""The time limit of a sweep, not counting listings in progress; the rest waits for the next sweep."""
PLACES_MAX: Final = 1000
"""The most folders that are tracked; the oldest are left to the vacuum."""
_AT_ONCE: Final = 8

Key = tuple[str, str]


@dataclass(slots=True)
class _Folder:
    """A folder of a table; an empty path is the whole table."""

    storage: Storage
    path: str
    attempts: dict[str, float] = field(default_factory=dict)
    """When to stop looking for the files of each attempt."""
    due: float = 0.0
    """When to list it next."""
    empty_listings: int = 0
    """Listings in a row that found nothing."""

    def needs_listing(self, now: float) -> bool:
        """Whether to look again; expired attempts are forgotten."""
        self.attempts = {attempt: until for attempt, until in self.attempts.items() if until > now}
        return bool(self.attempts) and self.empty_listings < EMPTY_LISTINGS_MAX


class AbandonedFiles:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folders: dict[Key, _Folder] = {}

    @contextmanager
    def watch(
        self, attempt: str, places: Sequence[tuple[Storage, str]], progress: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Track an attempt that writes to folders; if it fails, delete all of its files, now and for a while."""
        try:
            yield
        except BaseException:
            self._add(attempt, places)
            self._sweep([(storage.url, path) for storage, path in places], progress)
            raise

    def sweep(self, progress: Callable[[], None] = lambda: None) -> int:
        """Delete the files in folders that are due and return how many; failures are retried later."""
        now = self._clock()
        return self._sweep([key for key, folder in list(self._folders.items()) if folder.due <= now], progress)

    def _add(self, attempt: str, places: Sequence[tuple[Storage, str]]) -> None:
        """Track the folders of an attempt, dropping the oldest ones beyond the limit."""
        now = self._clock()
        for storage, path in places:
            folder = self._folders.pop((storage.url, path), None) or _Folder(storage, path)
            folder.attempts[attempt] = now + KEPT_S
            folder.due, folder.empty_listings = now, 0
            self._folders[storage.url, path] = folder
        for key in list(self._folders)[:-PLACES_MAX]:
            del self._folders[key]

    def _sweep(self, keys: Sequence[Key], progress: Callable[[], None]) -> int:
        due = {key: self._folders[key] for key in keys if key in self._folders}
        if not due:
            return 0
        deleted = 0
        try:
            looks = _FolderListings(self._clock, progress)
            with ThreadPoolExecutor(min(_AT_ONCE, len(due)), thread_name_prefix="leftovers") as pool:
                deleted = sum(pool.map(looks.delete_files_in, due.values()))
        except Exception as error:
            _logger.info("files of failed attempts could not be listed: %s", error)
        now = self._clock()
        for key, folder in due.items():
            if not folder.needs_listing(now):
                self._folders.pop(key, None)
            elif folder.due > now and self._folders.pop(key, None) is not None:
                # Folders that this sweep did not reach come first the next time.
                self._folders[key] = folder
        return deleted


class _FolderListings:
    """The folder listings of one sweep, several at a time; one failure ends them, as the store may be down."""

    def __init__(self, clock: Callable[[], float], progress: Callable[[], None]) -> None:
        self._clock = clock
        self._progress = progress
        self._until = clock() + SWEEP_S
        self._is_over = False

    def delete_files_in(self, folder: _Folder) -> int:
        """Delete the files in a folder, unless the sweep is over; return how many."""
        if self._is_over or self._clock() > self._until:
            return 0
        deleted = 0
        try:
            deleted = _delete_abandoned(folder)
            folder.empty_listings = 0 if deleted else folder.empty_listings + 1
        except Exception as error:
            self._is_over = True
            _logger.info("files of failed attempts at %s could not be deleted: %s", folder.storage.url, error)
        folder.due = self._clock() + PAUSE_S
        self._progress()
        return deleted


_known: dict[UUID, AbandonedFiles] = {}
_lock = threading.Lock()


def abandoned_files_of(pipeline_id: UUID) -> AbandonedFiles:
    """Return a pipeline's abandoned files in this process: a failed job is recreated while its tasks may continue."""
    with _lock:
        return _known.setdefault(pipeline_id, AbandonedFiles())


def _delete_abandoned(folder: _Folder) -> int:
    candidates = [path for path in folder.storage.data_files(folder.path) if _was_written_by(path, folder.attempts)]
    if not candidates:
        return 0
    # They should be in no commit; check all the same, since a table is worth more than the space.
    log = DeltaLog(folder.storage)
    log.refresh()
    uncommitted = set(candidates) - set(log.paths())
    for path in uncommitted:
        folder.storage.delete(path)
    return len(uncommitted)


def _was_written_by(path: str, attempts: dict[str, float]) -> bool:
    """Whether one of the attempts has written or rewritten a file."""
    name = path.rpartition("/")[2]
    return any(f"_{attempt}" in name or f".{attempt}." in name for attempt in attempts)
