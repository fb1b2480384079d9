"""Files of attempts that failed, which nobody will ever commit: they are deleted soon, not by the vacuum after a week.

When a task fails, others of its job have written files that nobody hears of, and some go on for a while although they
were cancelled. The names of files have the attempt, so that they are found; it is looked for them at once, and again
for a while. Only attempts are here of which the driver knows that no commit was ever tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import pyarrow as pa
from deltalake.exceptions import DeltaError

from millstream.lake.delta_log import DeltaLog
from millstream.lake.storage import Storage

_logger = logging.getLogger(__name__)

KEPT_S: Final = 600.0
"""For so long it is looked for files of an attempt; whatever is written later is left to the vacuum."""
PLACES_MAX: Final = 1000
"""So many folders are looked into; those of which it has been known the longest are left to the vacuum."""


@dataclass(slots=True)
class _Folder:
    """A folder of a table; the empty one is all of it."""

    storage: Storage
    path: str
    attempts: dict[str, float] = field(default_factory=dict)
    """By attempt, until when it is looked for what it wrote."""


class Leftovers:
    """What the attempts of one pipeline left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folders: dict[tuple[str, str], _Folder] = {}

    @contextmanager
    def watch(self, attempt: str, places: Sequence[tuple[Storage, str]]) -> Iterator[None]:
        """Have an attempt write into folders; if it fails all of its files are deleted, now and for a while."""
        try:
            yield
        except BaseException:
            for storage, path in places:
                folder = self._folders.setdefault((storage.url, path), _Folder(storage, path))
                folder.attempts[attempt] = self._clock() + KEPT_S
            while len(self._folders) > PLACES_MAX:
                del self._folders[next(iter(self._folders))]
            self.sweep()
            raise

    def sweep(self) -> int:
        """Delete what is there; how many files."""
        deleted = 0
        for key, folder in list(self._folders.items()):
            try:
                deleted += _swept(folder)
            except (OSError, DeltaError, pa.ArrowException) as error:
                _logger.info("files of failed attempts at %s could not be deleted: %s", folder.storage.url, error)
                # A store that is away lets everybody wait who asks. The next time others come first.
                self._folders[key] = self._folders.pop(key)
                break
        self._forget()
        return deleted

    def _forget(self) -> None:
        """Look no more for what attempts of long ago wrote."""
        now = self._clock()
        for folder in self._folders.values():
            folder.attempts = {attempt: until for attempt, until in folder.attempts.items() if until > now}
        self._folders = {key: folder for key, folder in self._folders.items() if folder.attempts}


_known: dict[UUID, Leftovers] = {}
_lock = threading.Lock()


def leftovers_of(pipeline_id: UUID) -> Leftovers:
    """What a pipeline left in this process: a job that failed is made anew, and its tasks may go on."""
    with _lock:
        return _known.setdefault(pipeline_id, Leftovers())


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
