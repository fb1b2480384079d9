"""Files of attempts that failed, which nobody will ever commit: they are deleted soon, not by the vacuum after a week.

When a task fails, others of its job have written files that nobody hears of, and some go on for a while although they
were cancelled. The names of files have the attempt, so that they are found; it is looked for them at once, and again
once a minute until nothing came for a while. Only attempts are here of which the driver knows that no commit was ever
tried.
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
"""For so long it is looked for files of an attempt at most; whatever is written later is left to the vacuum."""
PAUSE_S: Final = 60.0
"""A folder is looked into again no sooner than this."""
LOOKS: Final = 3
"""After so many looks in a row that found nothing a folder is forgotten; tasks that were cancelled have ended then."""
SWEEP_S: Final = 20.0
"""How long one sweep takes at most, but for the looks that have begun; others wait for the next one."""
PLACES_MAX: Final = 1000
"""So many folders are looked into; those of which it has been known the longest are left to the vacuum."""
_AT_ONCE: Final = 8

Key = tuple[str, str]


@dataclass(slots=True)
class _Folder:
    """A folder of a table; the empty one is all of it."""

    storage: Storage
    path: str
    attempts: dict[str, float] = field(default_factory=dict)
    """By attempt, until when it is looked for what it wrote."""
    due: float = 0.0
    """When it is looked into next."""
    in_vain: int = 0
    """How many looks in a row found nothing."""

    def is_wanted(self, now: float) -> bool:
        """Whether it is looked into again; attempts of long ago are forgotten."""
        self.attempts = {attempt: until for attempt, until in self.attempts.items() if until > now}
        return bool(self.attempts) and self.in_vain < LOOKS


class AbandonedFiles:
    """What the attempts of one pipeline left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folders: dict[Key, _Folder] = {}

    @contextmanager
    def watch(
        self, attempt: str, places: Sequence[tuple[Storage, str]], progress: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Have an attempt write into folders; if it fails all of its files are deleted, now and for a while."""
        try:
            yield
        except BaseException:
            self._add(attempt, places)
            self._sweep([(storage.url, path) for storage, path in places], progress)
            raise

    def sweep(self, progress: Callable[[], None] = lambda: None) -> int:
        """Delete what is there in folders that are due; how many files. What fails is tried again later."""
        now = self._clock()
        return self._sweep([key for key, folder in list(self._folders.items()) if folder.due <= now], progress)

    def _add(self, attempt: str, places: Sequence[tuple[Storage, str]]) -> None:
        """Know where an attempt has written; the folders that were known the longest are the first of all."""
        now = self._clock()
        for storage, path in places:
            folder = self._folders.pop((storage.url, path), None) or _Folder(storage, path)
            folder.attempts[attempt] = now + KEPT_S
            folder.due, folder.in_vain = now, 0
            self._folders[storage.url, path] = folder
        for key in list(self._folders)[:-PLACES_MAX]:
            del self._folders[key]

    def _sweep(self, keys: Sequence[Key], progress: Callable[[], None]) -> int:
        due = {key: self._folders[key] for key in keys if key in self._folders}
        if not due:
            return 0
        deleted = 0
        try:
            looks = _Looks(self._clock, progress)
            with ThreadPoolExecutor(min(_AT_ONCE, len(due)), thread_name_prefix="leftovers") as pool:
                deleted = sum(pool.map(looks.look, due.values()))
        except Exception as error:
            _logger.info("files of failed attempts could not be looked for: %s", error)
        now = self._clock()
        for key, folder in due.items():
            if not folder.is_wanted(now):
                self._folders.pop(key, None)
            elif folder.due > now and self._folders.pop(key, None) is not None:
                # Those that had no turn come first the next time.
                self._folders[key] = folder
        return deleted


class _Looks:
    """The looks of one sweep, several at a time; they end when one fails: a store that is away keeps all waiting."""

    def __init__(self, clock: Callable[[], float], progress: Callable[[], None]) -> None:
        self._clock = clock
        self._progress = progress
        self._until = clock() + SWEEP_S
        self._is_over = False

    def look(self, folder: _Folder) -> int:
        """Delete what is there, unless the sweep is over; how many files."""
        if self._is_over or self._clock() > self._until:
            return 0
        deleted = 0
        try:
            deleted = _swept(folder)
            folder.in_vain = 0 if deleted else folder.in_vain + 1
        except Exception as error:
            self._is_over = True
            _logger.info("files of failed attempts at %s could not be deleted: %s", folder.storage.url, error)
        folder.due = self._clock() + PAUSE_S
        self._progress()
        return deleted


_known: dict[UUID, AbandonedFiles] = {}
_lock = threading.Lock()


def abandoned_files_of(pipeline_id: UUID) -> AbandonedFiles:
    """What a pipeline left in this process: a job that failed is made anew, and its tasks may go on."""
    with _lock:
        return _known.setdefault(pipeline_id, AbandonedFiles())


def _swept(folder: _Folder) -> int:
    """Delete the files of attempts in a folder."""
    found = [path for path in folder.storage.data_files(folder.path) if _is_of(path, folder.attempts)]
    if not found:
        return 0
    # They are in no commit. Should that ever be wrong, the table is worth more than the room.
    log = DeltaLog(folder.storage)
    log.refresh()
    left = set(found) - set(log.paths())
    for path in left:
        folder.storage.delete(path)
    return len(left)


def _is_of(path: str, attempts: dict[str, float]) -> bool:
    """Whether one of the attempts has written a file: rows of messages, or a file anew."""
    name = path.rpartition("/")[2]
    return any(f"_{attempt}" in name or f".{attempt}." in name for attempt in attempts)
