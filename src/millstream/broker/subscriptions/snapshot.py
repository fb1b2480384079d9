"""Encode the durable state of a queue. Equal states have equal bytes."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.columns import (
    AVAILABLE,
    BLOCKED,
    DONE,
    LEASED,
    PARKED,
    REJECTING,
    STATES,
    Columns,
    Window,
)
from millstream.broker.subscriptions.fold import Fold, InternTable
from millstream.core.errors import CorruptBatch, CorruptState
from millstream.core.ids import PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.protocol.records.batch import COMPRESSION_ZSTD
from millstream.protocol.records.compression import compress, decompress

_logger = logging.getLogger(__name__)

FORMAT: Final = 0x81
"""The first byte, which differs from that of a frame of deltas."""
BROKEN_FORMAT: Final = 0x82
"""The first byte of a snapshot that is followed by what could not be applied to it: `[snapshot, frame, …]`."""
SNAPSHOT_BYTES_MAX: Final = 1 << 28
"""The maximum size after decompression: a queue at both limits needs a third of it."""


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """Stored columns; times and holders only for messages that have any."""

    states: bytes
    attempts: bytes
    rows: bytes
    dues: bytes
    holders: bytes
    first_delivered: bytes


class StoredQueue(msgspec.Struct, frozen=True, array_like=True):
    subscription_id: bytes
    topic_id: bytes
    partition: int
    is_started: bool
    start: int
    sequence: int
    counters: list[int]
    redelivered: int
    workers: list[str]
    reasons: list[str]
    plans: list[tuple[int, bytes]]
    revived: list[tuple[int, bytes]]
    window: StoredColumns
    stragglers: StoredColumns
    straggler_offsets: bytes
    straggler_keys: bytes
    has_ledger: bool


_FORMAT_BYTE: Final = bytes([FORMAT])
_BROKEN_BYTE: Final = bytes([BROKEN_FORMAT])
_PARTS: Final = msgspec.msgpack.Decoder(list[bytes])
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(StoredQueue)


def write_snapshot(fold: Fold) -> bytes:
    window, stragglers = fold.window, fold.stragglers
    waiting = np.frombuffer(stragglers.states, np.uint8) != DONE
    workers, reasons = fold.workers.texts_in_use(), fold.reasons.texts_in_use()
    numbers = _renumbered(fold.workers, workers), _renumbered(fold.reasons, reasons)
    stored = StoredQueue(
        subscription_id=fold.key.subscription_id.bytes,
        topic_id=fold.key.topic_id.bytes,
        partition=fold.key.partition,
        is_started=fold.is_started,
        start=window.start,
        sequence=fold.sequence,
        counters=fold.counters,
        redelivered=fold.redelivered,
        workers=workers,
        reasons=reasons,
        plans=sorted(fold.plans.items()),
        revived=list(fold.revived.items()),
        window=_store_columns(window, slice(window.start - window.base, None), *numbers),
        stragglers=_store_columns(stragglers, waiting, *numbers),
        straggler_offsets=np.frombuffer(stragglers.offsets, np.int64)[waiting].tobytes(),
        straggler_keys=np.frombuffer(stragglers.keys, np.int64)[waiting].tobytes(),
        has_ledger=fold.has_ledger,
    )
    return _FORMAT_BYTE + compress(COMPRESSION_ZSTD, _ENCODER.encode(stored))


def is_snapshot(data: bytes) -> bool:
    return data[:1] in (_FORMAT_BYTE, _BROKEN_BYTE)


def read_snapshot(data: bytes) -> Fold:
    """Decode a snapshot, or raise `CorruptState`."""
    first, *rest = _split_parts(data)
    fold = _read_compressed(first)
    for part in rest:
        try:
            fold = _apply(fold, part)
        except CorruptState as error:
            raise CorruptState(f"{error}; the oldest unfinished message before that was {fold.oldest}") from error
    return fold


def _write_broken(fold: Fold, unfolded: list[bytes]) -> bytes:
    return _BROKEN_BYTE + _ENCODER.encode([write_snapshot(fold), *unfolded])


def _split_parts(data: bytes) -> list[bytes]:
    """Return a snapshot, and what could not be applied to it when it was written; a newer version may be able to."""
    if data[:1] != _BROKEN_BYTE:
        return [data]
    try:
        parts = _PARTS.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise CorruptState(f"the snapshot of a queue cannot be read: {error}") from error
    return parts or [b""]


def _apply(fold: Fold, part: bytes) -> Fold:
    """Return the state after a frame or a snapshot."""
    if is_snapshot(part):
        return _read_compressed(part)
    fold.replay(part)
    return fold


def _read_compressed(data: bytes) -> Fold:
    if data[:1] != _FORMAT_BYTE:
        raise CorruptState("the snapshot of a queue has an unknown format")
    try:
        body = decompress(COMPRESSION_ZSTD, memoryview(data)[1:], bytes_max=SNAPSHOT_BYTES_MAX)
        stored = _DECODER.decode(body)
    except (CorruptBatch, msgspec.MsgspecError) as error:
        raise CorruptState(f"the snapshot of a queue cannot be read: {error}") from error
    try:
        return _restore_fold(stored)
    except (ValueError, IndexError) as error:
        raise CorruptState(f"the columns of a snapshot are inconsistent: {error}") from error


def cut_snapshot(data: bytes, end: int) -> tuple[bytes, bool]:
    """Return a snapshot without the messages from an offset on, and whether it held any."""
    fold = read_snapshot(data)
    return (write_snapshot(fold), True) if fold.cut_after(end) else (data, False)


def _renumbered(interned: InternTable, texts_in_use: list[str]) -> npt.NDArray[np.uint32]:
    """Map the numbers in use to consecutive numbers for the snapshot."""
    numbers = np.zeros(len(interned.texts) + 1, np.uint32)
    for place, text in enumerate(texts_in_use):
        number = interned.number(text)
        numbers[-1 if number is None else number] = place
    return numbers


def _store_columns(
    columns: Columns,
    chosen: slice | npt.NDArray[np.bool_],
    workers: npt.NDArray[np.uint32],
    reasons: npt.NDArray[np.uint32],
) -> StoredColumns:
    states = np.frombuffer(columns.states, np.uint8)[chosen].copy()
    states[states == BLOCKED] = AVAILABLE
    attempts = np.frombuffer(columns.attempts, np.uint8)[chosen].copy()
    attempts[states == DONE] = 0
    rows = np.flatnonzero((attempts > 0) | (states == PARKED))
    state = states[rows]
    dues = np.frombuffer(columns.dues, np.int64)[chosen][rows]
    dues[state == AVAILABLE] = 0
    numbers = np.frombuffer(columns.holders, np.uint32)[chosen][rows]
    holders = np.zeros(len(rows), np.uint32)
    holders[state == LEASED] = workers[numbers[state == LEASED]]
    holders[state == REJECTING] = reasons[numbers[state == REJECTING]]
    first_delivered = np.frombuffer(columns.first_delivered, np.int64)[chosen][rows]
    first_delivered[attempts[rows] == 0] = 0
    return StoredColumns(
        states=states.tobytes(),
        attempts=attempts.tobytes(),
        rows=rows.astype(np.uint32).tobytes(),
        dues=dues.tobytes(),
        holders=holders.tobytes(),
        first_delivered=first_delivered.tobytes(),
    )


def _restore_fold(stored: StoredQueue) -> Fold:
    key = QueueKey(UUID(bytes=stored.subscription_id), UUID(bytes=stored.topic_id), PartitionIndex(stored.partition))
    fold = Fold(key)
    fold.is_started = stored.is_started
    fold.window = Window(stored.start)
    fold.sequence = stored.sequence
    fold.has_ledger = stored.has_ledger
    fold.counters[: len(stored.counters)] = stored.counters
    fold.redelivered = stored.redelivered
    fold.plans = dict(stored.plans)
    fold.revived = dict(stored.revived)
    for columns, kept in ((fold.window, stored.window), (fold.stragglers, stored.stragglers)):
        _restore_columns(columns, kept)
        for state, count in enumerate(np.bincount(np.frombuffer(kept.states, np.uint8), minlength=STATES).tolist()):
            fold.counts[state] += count
    fold.counts[DONE] = 0
    fold.stragglers.offsets.frombytes(stored.straggler_offsets)
    fold.stragglers.keys.frombytes(stored.straggler_keys)
    if not len(fold.stragglers.offsets) == len(fold.stragglers.keys) == len(fold.stragglers):
        raise ValueError("the stragglers of a snapshot have no offsets or keys")
    _count_references(fold.workers, stored.workers, fold, LEASED)
    _count_references(fold.reasons, stored.reasons, fold, REJECTING)
    return fold


def _restore_columns(columns: Columns, stored: StoredColumns) -> None:
    count = len(stored.states)
    if len(stored.attempts) != count or (np.frombuffer(stored.states, np.uint8) >= STATES).any():
        raise ValueError("a message has no attempts, or an unknown state")
    columns.states += stored.states
    columns.attempts += stored.attempts
    rows = np.frombuffer(stored.rows, np.uint32)
    columns.dues = array("q", _scatter(rows, np.frombuffer(stored.dues, np.int64), count))
    columns.holders = array("I", _scatter(rows, np.frombuffer(stored.holders, np.uint32), count))
    columns.first_delivered = array("q", _scatter(rows, np.frombuffer(stored.first_delivered, np.int64), count))


def _scatter(rows: npt.NDArray[np.uint32], values: npt.NDArray[Any], count: int) -> bytes:
    column = np.zeros(count, values.dtype)
    column[rows] = values
    return column.tobytes()


def _count_references(interned: InternTable, texts: list[str], fold: Fold, state: int) -> None:
    """Count the references to each text. All texts of a snapshot are in use, so they keep their numbers."""
    total = np.zeros(len(texts), np.int64)
    for columns in (fold.window, fold.stragglers):
        texts_in_use = np.frombuffer(columns.holders, np.uint32)[np.frombuffer(columns.states, np.uint8) == state]
        counts = np.bincount(texts_in_use, minlength=len(texts))
        if len(counts) > len(texts):
            raise ValueError("a message refers to an unknown text")
        total += counts
    for text, references in zip(texts, total.tolist(), strict=True):
        interned.add_references(text, references)


LARGE: Final = 2000
"""Encoding a snapshot of this many messages takes up to half a millisecond."""


UNFOLDED_MAX: Final = 16
UNFOLDED_BYTES_MAX: Final = 4096
"""How many frames of an image wait to be folded together, which is cheaper than one by one between other work."""
BROKEN_BYTES_MAX: Final = 1 << 20
"""How much is kept of what cannot be applied. Beyond it, each frame replaces the one before, which leaves a gap."""


class FoldImage:
    """A queue as the state store holds it.

    An image that meets a frame it cannot apply stays as it was before, and keeps that frame and all later ones: they
    are durable, so a snapshot without them would undo acknowledgements. Reading its snapshot raises the error, until a
    snapshot of another state replaces it.
    """

    __slots__ = ("_fold", "_is_broken", "_unfolded", "_unfolded_bytes")

    def __init__(self, key: QueueKey) -> None:
        self._fold = Fold(key)
        self._is_broken = False
        self._unfolded: list[bytes] = []
        self._unfolded_bytes = 0

    @property
    def fold(self) -> Fold:
        """The state with everything that was replayed, or as much of it as can be applied."""
        self._fold_frames()
        return self._fold

    @property
    def is_broken(self) -> bool:
        """Whether something cannot be applied."""
        self._fold_frames()
        return self._is_broken

    def _fold_frames(self) -> None:
        if self._is_broken or not self._unfolded:
            return
        for index, frame in enumerate(self._unfolded):
            try:
                self._fold = _apply(self._fold, frame)
            except Exception as error:
                self._mark_broken(self._unfolded[index:], error)
                return
        self._unfolded, self._unfolded_bytes = [], 0

    def _mark_broken(self, unfolded: list[bytes], error: Exception) -> None:
        self._is_broken = True
        self._unfolded, self._unfolded_bytes = [], 0
        for data in unfolded:
            self._append_unfolded(data)
        _logger.error(
            "the state of a queue cannot be read, so the queue cannot be opened; "
            "`millstream subscription seek` replaces it",
            exc_info=None if isinstance(error, CorruptState) else error,
            extra={"queue": str(self._fold.key), "error": str(error), "oldest": self._fold.oldest},
        )

    def _append_unfolded(self, data: bytes) -> None:
        if self._is_broken and self._unfolded and self._unfolded_bytes + len(data) > BROKEN_BYTES_MAX:
            self._unfolded_bytes -= len(self._unfolded.pop())
        self._unfolded.append(data)
        self._unfolded_bytes += len(data)

    def replay(self, data: bytes) -> None:
        """Apply a frame of deltas, or a snapshot, which replaces everything before it."""
        if is_snapshot(data):
            self._replace(data)
            return
        self._append_unfolded(data)
        if len(self._unfolded) >= UNFOLDED_MAX or self._unfolded_bytes >= UNFOLDED_BYTES_MAX:
            self._fold_frames()

    def _replace(self, data: bytes) -> None:
        try:
            first, *rest = _split_parts(data)
            fold = _read_compressed(first)
        except CorruptState:
            # Like a frame that cannot be applied.
            self._append_unfolded(data)
            self._fold_frames()
            return
        self._fold, self._is_broken = fold, False
        self._unfolded, self._unfolded_bytes = rest, sum(map(len, rest))
        self._fold_frames()

    @property
    def has_ledger(self) -> bool:
        return self.fold.has_ledger

    @property
    def is_large(self) -> bool:
        return len(self.fold.window) + len(self.fold.stragglers) > LARGE

    def capture(self) -> Callable[[], bytes]:
        """Return a function that encodes the current state on any thread."""
        # Copying the columns of a million messages takes a few milliseconds; the rest may take a hundred.
        fold = deepcopy(self.fold)
        return partial(_write_broken, fold, list(self._unfolded)) if self._is_broken else partial(write_snapshot, fold)

    def snapshot(self) -> bytes:
        return self.capture()()
