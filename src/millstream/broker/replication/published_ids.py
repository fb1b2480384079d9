"""The ids of recent messages of a partition, so that a repeated one is recognized.

This only reads the leader's own log, so messages from every front end count, and a new leader obtains the same ids by
reading. It begins at the log's position one window ago, and catches up with the end of the log before each lookup. A
message of a transaction counts once the transaction is committed.

The number of ids is bounded: beyond it, the oldest are forgotten, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from millstream.broker.replication.partition import Partition
from millstream.core.errors import BatchRejected, DamagedRange, NotLeader
from millstream.core.headers import MESSAGE_ID
from millstream.protocol.records.batch import COMPRESSION_NONE, BatchHeader, iterate_whole_headers
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import Headers, decode_batch, records_section

IDS_MAX: Final = 200_000
READ_BYTES: Final = 1024 * 1024
ON_LOOP_BYTES: Final = 64 * 1024
"""More than this is read in a thread."""

_SHORT: Final = 32
# The encoded name of the header in a record, with its length: batches without it are not opened.
_MARK: Final = bytes([2 * len(MESSAGE_ID)]) + MESSAGE_ID.encode()


class Published(NamedTuple):
    """The position of a message with an id."""

    offset: int
    timestamp_ms: int


class _PublishedBatch(NamedTuple):
    producer_id: int
    """Whose transaction it belongs to; -1 for none."""
    ids: list[tuple[bytes, Published]]
    commits: bool | None = None
    """For a marker: whether the transaction was committed."""


class PublishedIds:
    """The recent ids of one partition, in one term of its leader."""

    def __init__(self, partition: Partition, window_ms: int) -> None:
        self._partition = partition
        self._log = partition.log
        self._epoch = partition.leader_epoch
        self._generation = partition.log.generation
        self._by_key: dict[bytes, Published] = {}
        # By producer: the ids of open transactions.
        self._open: dict[int, list[tuple[bytes, Published]]] = {}
        self.window_ms = window_ms
        self.lock = asyncio.Lock()
        """Held to look up an id and then write."""
        self.forgotten = 0
        begin = self._log.offset_for_time(self._now_ms - window_ms, up_to=self._log.end_offset)
        self._next = int(self._log.end_offset if begin is None else begin[0])

    def __len__(self) -> int:
        return len(self._by_key) + sum(map(len, self._open.values()))

    @property
    def is_current(self) -> bool:
        """Whether the log is the one that was read: led in the same term, and not truncated."""
        partition = self._partition
        return (
            partition.is_leader
            and partition.leader_epoch == self._epoch
            and self._log.generation == self._generation
            and self._next <= self._log.end_offset
        )

    async def catch_up(self) -> None:
        """Read up to the end of the log; after that, look up and write without awaiting in between."""
        while True:
            if not self.is_current:
                raise NotLeader(f"{self._log.partition} has a new leader epoch, or was truncated")
            self._next = max(self._next, self._log.start_offset)
            if self._next >= self._log.end_offset:
                return
            try:
                records = self._log.read(self._next, max_bytes=READ_BYTES, up_to=self._log.end_offset)
            except DamagedRange as damage:
                self._next = damage.end
                continue
            data = bytes(records)
            if len(data) > ON_LOOP_BYTES or any(header.compression for header in iterate_whole_headers(data)):
                next_offset, seen = await asyncio.to_thread(_extract_ids, data, self._next)
            else:
                next_offset, seen = _extract_ids(data, self._next)
            self._apply(seen)
            self._next = next_offset

    def find(self, message_id: bytes, window_ms: int) -> Published | None:
        """Return the message with an id, if it was published within the window."""
        known = self._by_key.get(_key(message_id))
        return None if known is None or known.timestamp_ms < self._now_ms - window_ms else known

    @property
    def _now_ms(self) -> int:
        return self._log.clock.now_ms()

    def _apply(self, batches: Iterable[_PublishedBatch]) -> None:
        for seen in batches:
            if seen.commits is not None:
                held = self._open.pop(seen.producer_id, [])
                self._add(held if seen.commits else [])
            elif seen.producer_id >= 0:
                self._open.setdefault(seen.producer_id, []).extend(seen.ids)
            else:
                self._add(seen.ids)
        self._expire()

    def _add(self, ids: Iterable[tuple[bytes, Published]]) -> None:
        """Add ids; of several messages with one id the youngest counts, as it does for a new leader."""
        by_key = self._by_key
        for key, place in ids:
            known = by_key.get(key)
            if known is None or known.timestamp_ms <= place.timestamp_ms:
                by_key.pop(key, None)
                by_key[key] = place

    def _expire(self) -> None:
        """Drop ids that are older than the window or exceed the limit."""
        by_key, oldest_ms = self._by_key, self._now_ms - self.window_ms
        while by_key:
            key, place = next(iter(by_key.items()))
            is_over = place.timestamp_ms < oldest_ms
            if not is_over and len(by_key) <= IDS_MAX:
                break
            self.forgotten += not is_over
            del by_key[key]
        while len(self) - len(by_key) > IDS_MAX:
            producer_id = next(iter(self._open))
            self.forgotten += len(self._open.pop(producer_id))


def id_of(headers: Headers) -> bytes | None:
    return next((value for name, value in headers if name == MESSAGE_ID and value), None)


def _key(message_id: bytes) -> bytes:
    return message_id if len(message_id) <= _SHORT else blake2b(message_id, digest_size=_SHORT).digest()


def _extract_ids(data: bytes, first: int) -> tuple[int, list[_PublishedBatch]]:
    """Return the ids in some batches from an offset on, and the offset after them."""
    seen: list[_PublishedBatch] = []
    next_offset = first
    for header in iterate_whole_headers(data):
        next_offset = header.next_offset
        try:
            if header.is_control:
                marker = read_marker(data, header)
                if marker is not None:
                    seen.append(_PublishedBatch(header.producer_id, [], marker.commit))
            elif ids := _extract_batch_ids(data, header, first):
                seen.append(_PublishedBatch(header.producer_id if header.is_transactional else -1, ids))
        except BatchRejected:
            # It cannot be decoded, so it cannot have been published twice.
            continue
    return next_offset, seen


def _extract_batch_ids(data: bytes, header: BatchHeader, first: int) -> list[tuple[bytes, Published]]:
    if header.compression == COMPRESSION_NONE:
        is_there = data.find(_MARK, header.position, header.end_position) >= 0
    else:
        is_there = _MARK in records_section(data, header)
    if not is_there:
        return []
    return [
        (_key(message_id), Published(record.offset, record.timestamp_ms))
        for record in decode_batch(data, header)
        if record.offset >= first and (message_id := id_of(record.headers)) is not None
    ]
