"""The data folder itself: its lock, its format, and the mark of a clean stop."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import UUID

import msgspec
from crc32c import crc32c

from millstream.broker.log.files import Files
from millstream.broker.log.ledger import LogKey
from millstream.broker.log.state import read_whole, replace_file
from millstream.core.errors import DataFolderInvalid
from millstream.core.ids import PartitionIndex

_logger = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO

FORMAT = b"millstream data, format 1\n"
FORMAT_NAME = "format"
CLEAN_STOP_NAME = "clean-stop"
LOCK_NAME = "lock"
PARTITIONS_NAME = "partitions"
JOURNAL_NAME = "journal"
DELETED_SUFFIX = ".deleted"
_EVIDENCE = re.compile(rf"{FORMAT_NAME}|{LOCK_NAME}|{PARTITIONS_NAME}|coordination|catalog\.sqlite|node-[0-9]+")
"""Names of which every data folder has at least one; a node whose users were declared first has just the catalog."""
_OF_FILE_SYSTEMS = frozenset({"lost+found"})


class CleanStop(msgspec.Struct, frozen=True):
    """The record of a clean stop: the size of the ledger, and the logs that were never opened for recovery."""

    ledger_bytes: int
    unrecovered: list[tuple[UUID, int]]


class DataFolder:
    """A locked data folder; with `is_locked` the caller holds the lock."""

    def __init__(self, directory: Path, files: Files, *, is_locked: bool = False) -> None:
        self._files = files
        self._lock: int | None = None
        self.path = str(directory)
        self.partitions = f"{self.path}/{PARTITIONS_NAME}"
        self.journal = f"{self.path}/{JOURNAL_NAME}"
        try:
            self._make()
            if not is_locked:
                self._lock = files.lock(f"{self.path}/{LOCK_NAME}")
        except OSError as error:
            raise DataFolderInvalid(
                f"{directory} cannot be used as a data folder: {error.strerror or error}; choose a writable folder"
            ) from error
        try:
            self.is_new = self._check_format()
        except BaseException:
            self.release()
            raise

    def _make(self) -> None:
        """Create the folder durably: every new name on the way to it is synced."""
        missing = []
        path = self.partitions
        while path and not self._files.exists(path):
            missing.append(path)
            path = path.rpartition("/")[0]
        self._files.make_directory(self.partitions)
        for path in missing:
            self._files.sync_directory(path.rpartition("/")[0] or ("/" if path.startswith("/") else "."))

    def _check_format(self) -> bool:
        try:
            content = read_whole(self._files, f"{self.path}/{FORMAT_NAME}")
        except FileNotFoundError:
            replace_file(self._files, self.path, FORMAT_NAME, FORMAT)
            return True
        if content != FORMAT:
            raise DataFolderInvalid(
                f"{self.path} was written in a format that this version does not know; "
                f"its file {FORMAT_NAME!r} says {content[:80]!r}"
            )
        return False

    def release(self) -> None:
        if self._lock is not None:
            self._files.close(self._lock)

    # -- the clean-stop mark --------------------------------------------------------------------------------

    def take_clean_stop(self) -> CleanStop | None:
        """Read and remove the mark: from here on, only another clean stop makes the folder clean again."""
        path = f"{self.path}/{CLEAN_STOP_NAME}"
        try:
            data = read_whole(self._files, path)
        except FileNotFoundError:
            return None
        self._files.remove(path)
        self._files.sync_directory(self.path)
        if len(data) < 4 or crc32c(data[4:]) != int.from_bytes(data[:4], "big"):
            return None
        try:
            return msgspec.msgpack.decode(data[4:], type=CleanStop)
        except msgspec.DecodeError:
            return None

    def mark_clean_stop(self, ledger_bytes: int, unrecovered: Iterable[LogKey]) -> None:
        """Write the mark, durably."""
        body = msgspec.msgpack.encode(CleanStop(ledger_bytes, sorted(unrecovered)))
        content = crc32c(body).to_bytes(4, "big") + body
        replace_file(self._files, self.path, CLEAN_STOP_NAME, content)

    # -- partitions -----------------------------------------------------------------------------------------

    def log_folder(self, topic_id: UUID, partition: int) -> str:
        return f"{self.partitions}/{topic_id}/{partition}"

    def stored(self) -> Iterator[LogKey]:
        for topic in sorted(self._files.names(self.partitions)):
            topic_id = _parse_topic_id(topic)
            if topic_id is None:
                continue
            for name in self._files.names(f"{self.partitions}/{topic}"):
                if name.isdigit():
                    yield topic_id, PartitionIndex(int(name))

    def move_log(self, key: LogKey, to: DataFolder) -> None:
        """Move the folder of a closed log to another data folder on the same disk, durably; repeatable."""
        old, new = self.log_folder(*key), to.log_folder(*key)
        topic = new.rpartition("/")[0]
        if not self._files.exists(topic):
            self._files.make_directory(topic)
        # Also if it exists: a killed process may have created it without syncing it.
        self._files.sync_directory(to.partitions)
        self._files.rename(old, new)
        self._files.sync_directory(topic)
        topic = old.rpartition("/")[0]
        self._files.sync_directory(topic)
        self.remove_if_empty(topic)

    def mark_deleted(self, log_folder: str) -> str:
        """Rename the folder of a deleted log, durably; return where its files are until they are removed."""
        deleted_folder = log_folder + DELETED_SUFFIX
        self.remove_tree(deleted_folder)
        self._files.rename(log_folder, deleted_folder)
        self._files.sync_directory(log_folder.rpartition("/")[0])
        return deleted_folder

    def remove_tree(self, folder: str) -> None:
        if not self._files.exists(folder):
            return
        for name in self._files.names(folder):
            self._files.remove(f"{folder}/{name}")
        self._files.remove_directory(folder)

    def remove_if_empty(self, folder: str) -> None:
        if not self._files.names(folder):
            self._files.remove_directory(folder)

    def deleted(self) -> Iterator[LogKey]:
        """Yield the deleted logs whose files are not removed yet, unless there is another one in their place."""
        for topic in self._files.names(self.partitions):
            topic_id = _parse_topic_id(topic)
            names = set(self._files.names(f"{self.partitions}/{topic}"))
            for number in (name.removesuffix(DELETED_SUFFIX) for name in names if name.endswith(DELETED_SUFFIX)):
                if topic_id is not None and number.isdigit() and number not in names:
                    yield topic_id, PartitionIndex(int(number))

    def remove_deleted(self) -> None:
        """Remove the folders of deleted logs, and of topics that are empty afterwards."""
        for topic in self._files.names(self.partitions):
            folder = f"{self.partitions}/{topic}"
            names = self._files.names(folder)
            deleted = [name for name in names if name.endswith(DELETED_SUFFIX)]
            for name in deleted:
                self.remove_tree(f"{folder}/{name}")
            if deleted:
                self.remove_if_empty(folder)


def check_own_or_empty(folder: str, files: Files) -> None:
    """Raise if a folder holds files but is not a data folder: `make_private` would lock other users out of them."""
    try:
        names = set(files.names(folder)) - _OF_FILE_SYSTEMS
    except OSError as error:
        raise DataFolderInvalid(f"{folder} cannot be used as a data folder: {error.strerror or error}") from error
    if names and not any(map(_EVIDENCE.fullmatch, names)):
        first = ", ".join(sorted(names)[:3])
        raise DataFolderInvalid(
            f"{folder} holds other files ({first}{', …' if len(names) > 3 else ''}) and no data of Millstream; pass a "
            "new or an empty folder"
        )


def make_private(folder: Path) -> None:
    """Remove the access of other users to a data folder and its contents: it holds messages and secrets.

    In a folder that belongs to another user, as volumes of containers do, only the contents can be changed.
    """
    tightened = [str(path) for path in (folder, *folder.iterdir()) if _restrict_access(path)]
    if tightened:
        _logger.info("removed the access of other users", extra={"paths": tightened})
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OTHERS:
        _logger.warning(
            "other users can access the data folder; have its owner set its mode to 0700",
            extra={"folder": str(folder), "mode": f"{mode:04o}"},
        )


def _restrict_access(path: Path) -> bool:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode) or not mode & _OTHERS:
        return False
    try:
        path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    except PermissionError:
        return False
    return True


def _parse_topic_id(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


def folders_above(log_folder: str) -> tuple[str, str]:
    """Return the folders that hold the name of a log and the name of its topic."""
    topic = log_folder.rpartition("/")[0]
    return topic, topic.rpartition("/")[0]
