"""Encode the deltas of a queue. A frame holds the deltas of one moment, and is stored as a whole or not at all.

    header   format, flags, subscription id, topic id, partition, leader epoch, sequence, filter version,
             number of rows, of texts, of extras
    lengths  of each text and each extra, 4 bytes each
    rows     48 bytes each: kind, attempt, worker, reason, extra (numbers of texts and extras), first, last, due, time
    texts    in UTF-8, concatenated; then the extras

A frame of a queue with a ledger ends its texts with the names of the subscription and the topic, for later readers of
the ledger, who may no longer find them by their ids.

Rows have a fixed width, so that numpy can read many at once. If what follows the header is large, it is compressed, and
preceded by the lowest and the highest offset of its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.core.errors import CorruptBatch, CorruptState
from millstream.core.ids import PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.protocol.records.batch import COMPRESSION_ZSTD
from millstream.protocol.records.compression import compress, decompress

FORMAT: Final = 2
FRAME_BYTES_MAX: Final = 1 << 28

ROWS: Final = np.dtype(
    [
        ("kind", "<u1"),
        ("attempt", "<u1"),
        ("unused", "<u2"),
        ("worker", "<u4"),
        ("reason", "<u4"),
        ("extra", "<u4"),
        ("first", "<i8"),
        ("last", "<i8"),
        ("due_ms", "<i8"),
        ("time_ms", "<i8"),
    ]
)
"""The layout of rows; 0 means no worker, reason or extra."""

_HEADER: Final = struct.Struct("<BB16s16siiqqIII")
_ROW: Final = struct.Struct("<BBHIIIqqqq")
_SPAN: Final = struct.Struct("<qq")
_COMPRESSED: Final = 1
_LEDGER: Final = 2
_COMPRESS_MIN: Final = 1024
_KINDS: Final = {kind.value: kind for kind in DeltaKind}


class LedgerNames(NamedTuple):
    subscription: str
    topic: str


class FrameHeader(NamedTuple):
    """Fields shared by all deltas of a frame."""

    key: QueueKey
    leader_epoch: int
    sequence: int
    filter_version: int
    has_ledger: bool = False


class Frame(NamedTuple):
    header: FrameHeader
    deltas: list[Delta]
    encoded_names: Sequence[bytes] = ()
    """Decoded on demand: every frame is read when it is stored, and only the ledger needs its names."""

    @property
    def names(self) -> LedgerNames | None:
        if not self.encoded_names:
            return None
        return LedgerNames(*(name.decode("utf-8", "replace") for name in self.encoded_names))


def write_frame(header: FrameHeader, deltas: Sequence[Delta], names: LedgerNames | None = None) -> bytes:
    """Encode deltas as a frame; with names, as one for the ledger."""
    texts: dict[str, int] = {"": 0}
    extras: list[bytes] = []
    pack = _ROW.pack
    rows: list[bytes] = []
    for kind, first, last, attempt, due_ms, worker, time_ms, reason, extra in deltas:
        named = texts.get(worker)
        if named is None:
            named = texts[worker] = len(texts)
        why = texts.setdefault(reason, len(texts)) if reason else 0
        if extra:
            extras.append(extra)
        rows.append(pack(kind, attempt, 0, named, why, len(extras) if extra else 0, first, last, due_ms, time_ms))
    del texts[""]
    blobs = [text.encode("utf-8", "replace") for text in texts]
    if names is not None:
        blobs += _encode_names(names)
    lengths = b"".join([len(blob).to_bytes(4, "little") for blob in (*blobs, *extras)])
    body = b"".join((lengths, *rows, *blobs, *extras))
    flags = 0 if names is None else _LEDGER
    if len(body) >= _COMPRESS_MIN:
        body = _SPAN.pack(*_offset_span(deltas)) + compress(COMPRESSION_ZSTD, body)
        flags |= _COMPRESSED
    key = header.key
    return b"".join(
        (
            _HEADER.pack(
                FORMAT,
                flags,
                key.subscription_id.bytes,
                key.topic_id.bytes,
                key.partition,
                header.leader_epoch,
                header.sequence,
                header.filter_version,
                len(deltas),
                len(blobs),
                len(extras),
            ),
            body,
        )
    )


@lru_cache(maxsize=4096)
def _encode_names(names: LedgerNames) -> list[bytes]:
    return [name.encode("utf-8", "replace") for name in names]


LEDGER_ON, LEDGER_OFF, LEDGER_OPENED, LEDGER_PERIODIC, LEDGER_REQUESTED = "on", "off", "opened", "periodic", "requested"
"""Why a window is recorded for the ledger."""


class LedgerWindow(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a `WINDOW` delta: the unfinished messages, and the settings that a reader of the ledger needs."""

    ranges: bytes
    """Pairs of 64-bit offsets [start, end)."""
    delivery: str
    isolation: str
    dead_letter_topic: str
    """Empty without one."""
    filter: str

    def unfinished(self) -> npt.NDArray[np.int64]:
        """Return the ranges of unfinished messages, a row each."""
        return np.frombuffer(self.ranges, np.int64).reshape(-1, 2)


encode_window: Final = msgspec.msgpack.Encoder().encode

PUBLISHED: Final = struct.Struct("<qq")
"""An entry in the extra of a `SCANNED` delta: the end of a run of messages, and the time of their batches."""


def read_window(extra: bytes) -> LedgerWindow:
    """Decode the extra of a `WINDOW` delta, or raise `CorruptState`."""
    try:
        return _WINDOW.decode(extra)
    except msgspec.MsgspecError as error:
        raise CorruptState(f"a window of the ledger cannot be read: {error}") from error


_WINDOW: Final = msgspec.msgpack.Decoder(LedgerWindow)


def is_for_ledger(data: bytes) -> bool:
    """Whether a frame is one for the ledger; cheap enough to ask of every frame."""
    return len(data) > 1 and bool(data[1] & _LEDGER)


def _offset_span(deltas: Sequence[Delta]) -> tuple[int, int]:
    if any(delta.kind == DeltaKind.SOUGHT for delta in deltas):
        return -(1 << 63), (1 << 63) - 1
    return min((delta.first for delta in deltas), default=0), max((delta.last for delta in deltas), default=-1)


def may_concern(data: bytes, offset: int) -> bool:
    """Whether a frame may hold a delta about a message; cheap enough to ask of every frame of a log."""
    header = _read_header(data)
    if header.flags & _COMPRESSED:
        low, high = _SPAN.unpack_from(data, _HEADER.size)
        if not low <= offset <= high:
            return False
    body, rows_start, rows_end = _read_body(data, header)
    if not header.flags & _COMPRESSED:
        # These have few rows, for which arrays take longer.
        return any(
            first <= offset <= last or kind == DeltaKind.SOUGHT
            for kind, _, _, _, _, _, first, last, _, _ in _ROW.iter_unpack(body[rows_start:rows_end])
        )
    rows = np.frombuffer(body[rows_start:rows_end], ROWS)
    concerned = (rows["first"] <= offset) & (rows["last"] >= offset)
    return bool((concerned | (rows["kind"] == DeltaKind.SOUGHT)).any())


def read_header(data: bytes) -> FrameHeader:
    """Decode only the header of a frame."""
    return _read_header(data).shared


def read_frame(data: bytes) -> Frame:
    """Decode a frame, or raise `CorruptState`."""
    header = _read_header(data)
    body, lengths_bytes, rows_end = _read_body(data, header)
    lengths = np.frombuffer(body[:lengths_bytes], "<u4").tolist()
    if rows_end + sum(lengths) != len(body):
        raise CorruptState("the texts of a frame of deltas do not match its length")
    blobs = list(_read_blobs(body, rows_end, lengths))
    names_start = header.texts - (len(LedgerNames._fields) if header.shared.has_ledger else 0)
    if names_start < 0:
        raise CorruptState("a frame of the ledger has no names")
    texts = ["", *(blob.decode("utf-8", "replace") for blob in blobs[:names_start])]
    deltas = _read_rows(body[lengths_bytes:rows_end], texts, [b"", *blobs[header.texts :]])
    return Frame(header.shared, deltas, blobs[names_start : header.texts])


class _Header(NamedTuple):
    shared: FrameHeader
    flags: int
    rows: int
    texts: int
    extras: int


@lru_cache(maxsize=4096)
def _queue_key(subscription_id: bytes, topic_id: bytes, partition: int) -> QueueKey:
    return QueueKey(UUID(bytes=subscription_id), UUID(bytes=topic_id), PartitionIndex(partition))


def _read_header(data: bytes) -> _Header:
    if len(data) < _HEADER.size:
        raise CorruptState("a frame of deltas is shorter than its header")
    form, flags, subscription_id, topic_id, partition, epoch, sequence, filter_version, rows, texts, extras = (
        _HEADER.unpack_from(data)
    )
    if form != FORMAT:
        raise CorruptState(f"a frame of deltas has unknown format {form}")
    if flags & _COMPRESSED and len(data) < _HEADER.size + _SPAN.size:
        raise CorruptState("a compressed frame of deltas has no span of offsets")
    key = _queue_key(subscription_id, topic_id, partition)
    shared = FrameHeader(key, epoch, sequence, filter_version, bool(flags & _LEDGER))
    return _Header(shared, flags, rows, texts, extras)


def _read_body(data: bytes, header: _Header) -> tuple[memoryview, int, int]:
    """Return the decompressed body after the header, and the start and end of its rows."""
    body = memoryview(data)[_HEADER.size :]
    if header.flags & _COMPRESSED:
        try:
            body = memoryview(decompress(COMPRESSION_ZSTD, body[_SPAN.size :], bytes_max=FRAME_BYTES_MAX))
        except CorruptBatch as error:
            raise CorruptState(f"a frame of deltas does not decompress: {error}") from error
    rows_start = 4 * (header.texts + header.extras)
    rows_end = rows_start + _ROW.size * header.rows
    if rows_end > len(body):
        raise CorruptState("a frame of deltas is truncated")
    return body, rows_start, rows_end


def _read_blobs(body: memoryview, position: int, lengths: Iterable[int]) -> Iterable[bytes]:
    for length in lengths:
        yield bytes(body[position : position + length])
        position += length


def _read_rows(rows: memoryview, texts: list[str], extras: list[bytes]) -> list[Delta]:
    deltas = []
    try:
        for kind, attempt, _, worker, reason, extra, first, last, due_ms, time_ms in _ROW.iter_unpack(rows):
            deltas.append(
                Delta(
                    _KINDS[kind],
                    first,
                    last,
                    attempt,
                    due_ms,
                    texts[worker],
                    time_ms,
                    texts[reason],
                    extras[extra],
                )
            )
    except (KeyError, IndexError) as error:
        raise CorruptState(f"a frame of deltas has an invalid row: {error!r}") from error
    return deltas
