"""One segment: a file of whole batches, named after its first offset, and what is known about it."""

from __future__ import annotations

import threading

from millstream.log.files import Files
from millstream.log.index import Index

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
_NAME_DIGITS = 20


def segment_path(directory: str, base_offset: int, suffix: str = LOG_SUFFIX) -> str:
    """The file of a segment."""
    return f"{directory}/{base_offset:0{_NAME_DIGITS}d}{suffix}"


def base_offset_of(name: str) -> int | None:
    """The base offset in the name of a segment's log file, or None when it is the name of something else."""
    stem = name.removesuffix(LOG_SUFFIX)
    if stem == name or len(stem) != _NAME_DIGITS or not stem.isdigit():
        return None
    return int(stem)


class Segment:
    """A file of batches. `size` counts the bytes of whole, valid batches; what lies behind them is ignored."""

    __slots__ = (
        "_sync_lock",
        "base_offset",
        "descriptor",
        "directory",
        "first_append_ms",
        "holes",
        "index",
        "index_checksum",
        "index_entries",
        "journaled_bytes",
        "max_timestamp_ms",
        "next_offset",
        "path",
        "pins",
        "sealed",
        "size",
        "synced_bytes",
        "synced_offset",
        "unverified_to",
        "used",
        "verified_from",
        "verified_to",
    )

    def __init__(self, directory: str, base_offset: int) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.path = segment_path(directory, base_offset)
        self.size = 0
        self.next_offset = base_offset
        self.max_timestamp_ms = -1
        self.first_append_ms = -1
        self.index: Index | None = Index()
        self.index_entries = 0
        self.index_checksum = 0
        self.holes: dict[int, int] = {}
        self.sealed = False
        self.synced_bytes = 0
        self.synced_offset = base_offset
        self.journaled_bytes = 0
        self.unverified_to = 0
        self.verified_from = 0
        self.verified_to = 0
        self.descriptor = -1
        self.used = False
        self.pins = 0
        self._sync_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Segment({self.path}, offsets {self.base_offset}..{self.next_offset}, {self.size} bytes)"

    def closed(self) -> None:
        """The file was closed; nothing is kept only while it is open."""

    def sync(self, files: Files, descriptor: int) -> None:
        """Sync the file; called in a thread. Once this failed, no later success may be believed."""
        with self._sync_lock:
            files.sync(descriptor)
