"""The state of a log at a checkpoint: what needs no verification, and where recovery starts after a crash.

Everything below `recovery_offset` is synced in the segment files themselves. Without a state (or with a broken one) the
segments are scanned from the start, which only takes time.
"""

from __future__ import annotations

import struct

import msgspec
from crc32c import crc32c

from millstream.broker.log.damage import LostRange
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.producers import PackedProducer
from millstream.broker.log.transactions import PackedTransactions

FORMAT = 1
SwapName = tuple[int, str]
"""A swap that has begun: base offset and token."""

_PREFIX = struct.Struct(">4sI")
_MAGIC = b"MSls"


class SegmentState(msgspec.Struct, frozen=True, array_like=True):
    """A segment as it was at the checkpoint."""

    base_offset: int
    size: int
    next_offset: int
    max_timestamp_ms: int
    first_append_ms: int
    last_append_ms: int
    index_entries: int
    index_checksum: int


class LogState(msgspec.Struct, frozen=True, array_like=True):
    """A log as it was at the checkpoint. Journal entries before the sequence named here are void."""

    format: int
    topic: str
    start_offset: int
    recovery_offset: int
    segments: list[SegmentState]
    epochs: list[tuple[int, int]]
    producers: list[PackedProducer]
    lost: list[LostRange]
    journal_id: int
    journal_sequence: int
    cleaned_offset: int = 0
    """The offset below which everything is compacted."""
    superseded_by: int = 0
    """Compaction may have removed records because of later ones below this offset."""
    swaps: list[SwapName] = []
    """Segments whose files may still need to be renamed."""
    transactions: PackedTransactions | None = None


def empty_state(journal_mark: tuple[int, int]) -> LogState:
    """Return the state of an empty log; its journal entries before the mark are void."""
    return LogState(
        format=FORMAT,
        topic="",
        start_offset=0,
        recovery_offset=0,
        segments=[],
        epochs=[],
        producers=[],
        lost=[],
        journal_id=journal_mark[0],
        journal_sequence=journal_mark[1],
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LogState)


def encode_state(state: LogState) -> bytes:
    body = _encoder.encode(state)
    return _PREFIX.pack(_MAGIC, crc32c(body)) + body


def decode_state(data: bytes) -> LogState | None:
    """Decode a state; return None if it cannot be trusted."""
    if len(data) < _PREFIX.size:
        return None
    magic, checksum = _PREFIX.unpack_from(data)
    body = memoryview(data)[_PREFIX.size :]
    if magic != _MAGIC or crc32c(body) != checksum:
        return None
    try:
        state = _decoder.decode(body)
    except msgspec.DecodeError:
        return None
    return state if state.format == FORMAT else None


def read_whole(files: Files, path: str) -> bytes:
    descriptor = files.open_to_read(path)
    try:
        return files.read_at(descriptor, files.size(descriptor), 0)
    finally:
        files.close(descriptor)


def replace_file(files: Files, directory: str, name: str, content: bytes) -> None:
    """Replace a small file as a whole, so that a crash leaves either the old or the new one."""
    new = f"{directory}/{name}.new"
    descriptor = files.open(new, create=True)
    try:
        files.truncate(descriptor, 0)
        write_fully(files, descriptor, content, 0)
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    files.rename(new, f"{directory}/{name}")
    files.sync_directory(directory)
