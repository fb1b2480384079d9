"""The ledger of checkpoints: the last known state of every log, in one file for all of them.

A group of checkpoints is one append with one sync, however many logs it covers; the file is rewritten when most of it
is out of date. A group that a crash has torn is the last one and is ignored. A group that is bad and not the last was
damaged on disk: it is unknown which logs it was about, so nothing before it is trusted, which costs those logs a scan.

A group: magic, CRC-32C u32 of the rest, length u32 of the entries, entries. An entry: topic id, partition i32, length
u32, the state, which has its own checksum; without a state, the log was forgotten.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from uuid import UUID

from crc32c import crc32c

from millstream.broker.log.files import Files, write_fully
from millstream.core.ids import PartitionIndex

_logger = logging.getLogger(__name__)

LEDGER_NAME = "checkpoints"
REWRITE_BYTES_MIN = 1024 * 1024
RESERVE_BYTES = 256 * 1024
"""Space is reserved ahead, so that a full disk can still record deletions, which make room again."""

_MAGIC = b"MScp"
_GROUP = struct.Struct(">4sII")
_ENTRY = struct.Struct(">16siI")
_CRC_FROM = 8

LogKey = tuple[UUID, PartitionIndex]


class _Place(NamedTuple):
    """The place of a log's last state in the file."""

    position: int
    size: int


class Ledger:
    """The checkpoints of all logs. Written by one thread at a time, under the ledger's own lock."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._path = f"{directory}/{LEDGER_NAME}"
        self._places: dict[LogKey, _Place] = {}
        self._versions: dict[LogKey, int] = {}
        self._forgotten: set[LogKey] = set()
        """Forgotten logs of which the file still has a state."""
        self._last_version = 0
        self._live_bytes = 0
        self._end = 0
        self._reserved = 0
        self.damaged = False
        """Whether the middle of the file was bad when it was opened."""
        self._broken = False
        self._lock = threading.Lock()
        new = not files.exists(self._path)
        self._descriptor = files.open(self._path, create=True)
        if new:
            files.sync_directory(directory)
        self._read()

    def __contains__(self, key: object) -> bool:
        return key in self._places

    @property
    def size_bytes(self) -> int:
        return self._end

    def state_of(self, key: LogKey) -> bytes | None:
        with self._lock:
            place = self._places.get(key)
            return None if place is None else self._files.read_at(self._descriptor, place.size, place.position)

    def next_version(self) -> int:
        """Return a number for a state that is captured now: of two states of a log the later one wins."""
        self._last_version += 1
        return self._last_version

    def write(self, states: Iterable[tuple[LogKey, int, bytes]]) -> None:
        """Append checkpoints and deletions, durably. A version older than a stored one is left out."""
        with self._lock:
            fresh = [item for item in states if item[1] > self._versions.get(item[0], -1)]
            try:
                if self._broken:
                    self._rewrite()
                elif self._end > REWRITE_BYTES_MIN + 2 * self._live_bytes:
                    self._rewrite_if_possible()
                entries = [*((key, b"") for key in self._forgotten), *((key, state) for key, _, state in fresh)]
                places = self._append(entries)
                self._files.sync(self._descriptor)
            except OSError:
                # The bytes of a failed sync cannot be trusted, so the next one goes into another file.
                self._broken = True
                raise
            self._forgotten.clear()
            for key, place in places:
                self._set_place(key, place)
            self._versions.update((key, version) for key, version, _ in fresh)

    def forget(self, key: LogKey) -> None:
        """Forget a deleted log; the next write records it."""
        with self._lock:
            # A checkpoint that was captured before the deletion may still be written.
            self._versions[key] = self.next_version()
            if key in self._places:
                self._drop_place(key)
                self._forgotten.add(key)

    def close(self) -> None:
        self._files.close(self._descriptor)

    # -- internals ------------------------------------------------------------------------------------------

    def _append(self, states: list[tuple[LogKey, bytes]]) -> list[tuple[LogKey, _Place]]:
        """Append one group. Its entries count once it is synced."""
        body = b"".join(_ENTRY.pack(key[0].bytes, key[1], len(state)) + state for key, state in states)
        size = len(body).to_bytes(4, "big")
        group = _MAGIC + crc32c(body, crc32c(size)).to_bytes(4, "big") + size + body
        self._reserve(self._end + len(group))
        write_fully(self._files, self._descriptor, group, self._end)
        places = list(_places(body, self._end + _GROUP.size))
        self._end += len(group)
        return places

    def _reserve(self, end: int) -> None:
        """Reserve space ahead of the current need, if the disk has some."""
        if end <= self._reserved:
            return
        try:
            self._files.allocate(self._descriptor, end + RESERVE_BYTES)
            self._reserved = end + RESERVE_BYTES
        except OSError as error:
            _logger.warning("no space is left to reserve for checkpoints", extra={"error": str(error)})

    def _set_place(self, key: LogKey, place: _Place) -> None:
        self._drop_place(key)
        if place.size:
            self._places[key] = place
            self._live_bytes += place.size

    def _drop_place(self, key: LogKey) -> None:
        old = self._places.pop(key, None)
        if old is not None:
            self._live_bytes -= old.size

    def _read(self) -> None:
        """Find the last state of each log."""
        size = self._files.size(self._descriptor)
        content = self._files.read_at(self._descriptor, size, 0) if size else b""
        for position, end in _iterate_groups(content):
            if position != self._end:
                _logger.error("the ledger of checkpoints is damaged", extra={"file": self._path, "byte": self._end})
                self.damaged = True
                self._places.clear()
                self._live_bytes = 0
            for key, place in _places(content[position + _GROUP.size : end], position + _GROUP.size):
                self._set_place(key, place)
            self._end = end
        if content[self._end :].strip(b"\0"):
            # Bytes of a torn group could be mistaken for a group once the end has advanced.
            self._files.truncate(self._descriptor, self._end)
        else:
            self._reserved = size

    def _rewrite_if_possible(self) -> None:
        try:
            self._rewrite()
        except OSError as error:
            _logger.warning("the ledger of checkpoints could not be rewritten", extra={"error": str(error)})

    def _rewrite(self) -> None:
        states = [(key, self._files.read_at(self._descriptor, *place[::-1])) for key, place in self._places.items()]
        new = self._path + ".new"
        old, self._descriptor = self._descriptor, self._files.open(new, create=True)
        before = self._end, self._reserved
        self._end = self._reserved = 0
        try:
            self._files.truncate(self._descriptor, 0)
            places = self._append(states)
            self._files.sync(self._descriptor)
            self._files.rename(new, self._path)
            self._files.sync_directory(self._directory)
        except OSError:
            self._files.close(self._descriptor)
            self._descriptor = old
            self._end, self._reserved = before
            raise
        self._files.close(old)
        self._places = dict(places)
        self._live_bytes = sum(place.size for place in self._places.values())
        self._forgotten.clear()
        self._broken = False


def last_states(content: bytes) -> dict[LogKey, bytes]:
    """Return the last state of each log in a ledger, for read-only use."""
    entries: dict[LogKey, bytes] = {}
    for position, end in _iterate_groups(content):
        for key, place in _places(content[position + _GROUP.size : end], position + _GROUP.size):
            entries[key] = content[place.position : place.position + place.size]
    return {key: state for key, state in entries.items() if state}


def _iterate_groups(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each valid group."""
    position = content.find(_MAGIC)
    while 0 <= position <= len(content) - _GROUP.size:
        _, checksum, length = _GROUP.unpack_from(content, position)
        end = position + _GROUP.size + length
        if end <= len(content) and crc32c(memoryview(content)[position + _CRC_FROM : end]) == checksum:
            yield position, end
            position = content.find(_MAGIC, end)
        else:
            position = content.find(_MAGIC, position + 1)


def _places(body: bytes, start: int) -> Iterator[tuple[LogKey, _Place]]:
    """Yield the positions of a group's states in the file."""
    at = 0
    while at < len(body):
        topic_id, partition, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        yield (UUID(bytes=topic_id), PartitionIndex(partition)), _Place(start + at, length)
        at += length
