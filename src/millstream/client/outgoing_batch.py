"""A batch on its way to a partition: its encoded records, and the callers that wait for them.

Records are encoded as they are added, by the plain codec, so that a client loads no compiled code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from millstream.client.receipt import Receipt
from millstream.core.errors import MillstreamError
from millstream.protocol.records.batch import COMPRESSION_NONE, HEADER_BYTES, Buffer, read_header, seal_batch
from millstream.protocol.records.compression import compress
from millstream.protocol.records.record import Headers, decode_batch, record_pieces

RECORDS_MAX: Final = 10_000


class SharedResult:
    """Messages that one caller published together; it is woken once, when the last of them is settled."""

    __slots__ = ("future", "given_ids", "left", "receipts", "timestamps_ms")

    def __init__(self, future: asyncio.Future[None], timestamps_ms: list[int], given_ids: list[str | None]) -> None:
        self.future = future
        self.timestamps_ms = timestamps_ms
        self.given_ids = given_ids
        self.receipts: list[Receipt | MillstreamError | None] = [None] * len(timestamps_ms)
        self.left = len(timestamps_ms)

    def settle(self, count: int) -> None:
        """Count messages that have their receipt or error."""
        self.left -= count
        if self.left == 0 and not self.future.done():
            self.future.set_result(None)

    def fail_from(self, index: int, error: MillstreamError) -> None:
        """Fail a message and those after it."""
        left_out = len(self.receipts) - index
        self.receipts[index:] = [error] * left_out
        self.settle(left_out)


Single = tuple[int, "asyncio.Future[Receipt]", int, "str | None"]
"""The record's number in its batch, its caller's future, its time and the id that its publisher gave it."""

Share = tuple[int, SharedResult, list[int]]
"""The first record's number, the call that the messages belong to, and their indexes in it."""


class OutgoingBatch:
    """Records for one partition."""

    __slots__ = (
        "_freed",
        "_pieces",
        "base_timestamp_ms",
        "behind_gap",
        "charged",
        "count",
        "deadline",
        "flushers",
        "in_flight",
        "is_done",
        "max_timestamp_ms",
        "maybe_stored",
        "section",
        "shares",
        "singles",
        "size",
    )

    def __init__(self, deadline: float, freed: Callable[[int], None]) -> None:
        self.deadline = deadline
        self._freed = freed
        """Called with the number of bytes that no longer wait, once every caller has an answer."""
        self.charged = 0
        self.count = 0
        self.size = 0
        self.base_timestamp_ms = 0
        self.max_timestamp_ms = 0
        self._pieces: list[Buffer] = []
        self.section: bytes | None = None
        """The records, compressed, once the batch is closed."""
        self.singles: list[Single] = []
        self.shares: list[Share] = []
        self.flushers: list[asyncio.Future[None]] = []
        self.in_flight = False
        self.is_done = False
        self.behind_gap = False
        """Whether it was in flight when an earlier batch was abandoned, so that the broker sees a gap."""
        self.maybe_stored = False
        """Whether it was sent and its outcome is unknown."""

    def add(self, key: Buffer | None, value: Buffer | None, headers: Headers, timestamp_ms: int) -> int:
        """Encode one record; return how many bytes it takes."""
        if self.count == 0:
            self.base_timestamp_ms = self.max_timestamp_ms = timestamp_ms
        elif timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
        size, pieces = record_pieces(key, value, headers, timestamp_ms - self.base_timestamp_ms, self.count)
        self._pieces += pieces
        self.count += 1
        self.size += size
        self.charged += size
        return size

    def close(self, compression: int) -> None:
        """Join and compress the records: nothing more is added."""
        if self.section is None:
            joined = b"".join(self._pieces)
            self._pieces.clear()
            self.section = joined if compression == COMPRESSION_NONE else bytes(compress(compression, joined))

    def sealed(self, compression: int, producer_id: int, producer_epoch: int, sequence: int) -> bytearray:
        """Return the batch as it is sent."""
        self.close(compression)
        batch = bytearray(HEADER_BYTES)
        batch += self.section or b""
        seal_batch(
            batch,
            base_offset=0,
            attributes=compression,
            last_offset_delta=self.count - 1,
            base_timestamp_ms=self.base_timestamp_ms,
            max_timestamp_ms=self.max_timestamp_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=sequence,
            record_count=self.count,
        )
        return batch

    def stored(self, topic: str, topic_id: str, partition: int, base_offset: int, append_time_ms: int) -> None:
        """Complete the callers' futures with receipts."""
        new: Any = tuple.__new__
        for position, future, timestamp_ms, given_id in self.singles:
            if not future.done():
                offset = base_offset + position if base_offset >= 0 else -1
                time_ms = append_time_ms if append_time_ms >= 0 else timestamp_ms
                future.set_result(new(Receipt, (topic, partition, offset, time_ms, topic_id, given_id)))
        for first, shared, indexes in self.shares:
            offset, step = (base_offset + first, 1) if base_offset >= 0 else (-1, 0)
            receipts, times_ms, ids = shared.receipts, shared.timestamps_ms, shared.given_ids
            for index in indexes:
                time_ms = append_time_ms if append_time_ms >= 0 else times_ms[index]
                receipts[index] = new(Receipt, (topic, partition, offset, time_ms, topic_id, ids[index]))
                offset += step
            shared.settle(len(indexes))
        self._end()

    def failed(self, error: MillstreamError, by_record: Sequence[MillstreamError] = ()) -> None:
        """Fail the callers' futures, with an error per record if known."""
        errors = by_record or [error] * self.count
        for position, future, _, _ in self.singles:
            if not future.done():
                future.set_exception(errors[position])
        for first, shared, indexes in self.shares:
            for position, index in enumerate(indexes, first):
                shared.receipts[index] = errors[position]
            shared.settle(len(indexes))
        self._end()

    def halves(self, compression: int) -> tuple[OutgoingBatch, OutgoingBatch]:
        """Split the records into two batches, because the topic does not accept one this large."""
        return self.split_off(range(self.count // 2), compression)

    def split_off(self, places: Iterable[int], compression: int) -> tuple[OutgoingBatch, OutgoingBatch]:
        """Move some records, by their place, into one batch, and the others into another."""
        records = list(decode_batch(whole := self.sealed(compression, -1, -1, -1), read_header(whole)))
        chosen = set(places)
        parts = OutgoingBatch(self.deadline, self._freed), OutgoingBatch(self.deadline, self._freed)
        for part, is_chosen in zip(parts, (True, False), strict=True):
            kept = [place for place in range(self.count) if (place in chosen) is is_chosen]
            for place in kept:
                record = records[place]
                part.add(record.key, record.value, record.headers, record.timestamp_ms)
            numbers = {place: number for number, place in enumerate(kept)}
            part.singles = [(numbers[place], *rest) for place, *rest in self.singles if place in numbers]  # type: ignore[misc]
            part.shares = [cut for share in self.shares if (cut := _cut(share, numbers)) is not None]
        parts[1].charged = self.charged - parts[0].charged
        parts[1].flushers = self.flushers
        return parts

    def _end(self) -> None:
        self.is_done = True
        self._freed(self.charged)
        for flusher in self.flushers:
            if not flusher.done():
                flusher.set_result(None)


def _cut(share: Share, numbers: Mapping[int, int]) -> Share | None:
    """Return the records of a share that belong to another batch, where they are consecutive too."""
    start, shared, indexes = share
    kept = [(numbers[place], index) for place, index in enumerate(indexes, start) if place in numbers]
    return (kept[0][0], shared, [index for _, index in kept]) if kept else None
