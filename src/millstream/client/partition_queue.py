"""The batches of one partition that wait or are in flight, in order.

Every batch carries a producer id and a sequence, so the broker recognizes one that is sent again. Up to five are in
flight at once. When one fails for the moment, those after it are rejected as well, because their sequences come too
early; then nothing new is sent, and once all responses have arrived they are sent again in order, one at a time.

The first batch of a producer id is sent alone: a broker without state of a producer accepts any sequence, so a second
batch could be stored although the first was rejected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from millstream.client.message import Receipt
from millstream.core.errors import (
    BatchTooLarge,
    InvalidBatch,
    InvalidTimestamp,
    MillstreamError,
    NotStoredInTime,
    OutOfOrderSequence,
    RequestTimedOut,
    UnknownProducer,
)
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    HEADER_BYTES,
    SEQUENCE_MASK,
    Buffer,
    read_header,
    seal_batch,
)
from millstream.protocol.records.compression import compress
from millstream.protocol.records.record import Headers, decode_batch, record_pieces
from millstream.protocol.wire.produce import Produced

if TYPE_CHECKING:
    from millstream.client.node_sender import NodeSender


RECORDS_MAX: Final = 10_000


class SharedResult:
    """Messages that one caller published together; it is woken once, when the last of them is settled."""

    __slots__ = ("future", "header_ids", "left", "receipts", "timestamps_ms")

    def __init__(self, future: asyncio.Future[None], timestamps_ms: list[int], header_ids: list[str | None]) -> None:
        self.future = future
        self.timestamps_ms = timestamps_ms
        self.header_ids = header_ids
        self.receipts: list[Receipt | MillstreamError | None] = [None] * len(timestamps_ms)
        self.left = len(timestamps_ms)

    def settle(self, count: int) -> None:
        """Count messages that have their receipt or error."""
        self.left -= count
        if self.left == 0 and not self.future.done():
            self.future.set_result(None)

    def fail_from(self, index: int, error: MillstreamError) -> None:
        left_out = len(self.receipts) - index
        self.receipts[index:] = [error] * left_out
        self.settle(left_out)


Single = tuple[int, "asyncio.Future[Receipt]", int, "str | None"]
"""The record's number in its batch, its caller's future, its time and the id that its publisher gave it."""

Share = tuple[int, SharedResult, list[int]]
"""The first record's number, the call that the messages belong to, and their indexes in it."""


class OutgoingBatch:
    """Records for one partition.

    Records are encoded as they are added, by the plain codec, so that a client loads no compiled code.
    """

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
        """Called with the number of bytes that no longer wait, once every caller has a response."""
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
        for position, future, timestamp_ms, header_id in self.singles:
            if not future.done():
                offset = base_offset + position if base_offset >= 0 else -1
                time_ms = append_time_ms if append_time_ms >= 0 else timestamp_ms
                future.set_result(new(Receipt, (topic, partition, offset, time_ms, topic_id, header_id)))
        for first, shared, indexes in self.shares:
            offset, step = (base_offset + first, 1) if base_offset >= 0 else (-1, 0)
            receipts, times_ms, ids = shared.receipts, shared.timestamps_ms, shared.header_ids
            for index in indexes:
                time_ms = append_time_ms if append_time_ms >= 0 else times_ms[index]
                receipts[index] = new(Receipt, (topic, partition, offset, time_ms, topic_id, ids[index]))
                offset += step
            shared.settle(len(indexes))
        self._finish()

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
        self._finish()

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
            part.shares = [cut for share in self.shares if (cut := _split_share(share, numbers)) is not None]
        parts[1].charged = self.charged - parts[0].charged
        parts[1].flushers = self.flushers
        return parts

    def _finish(self) -> None:
        self.is_done = True
        self._freed(self.charged)
        for flusher in self.flushers:
            if not flusher.done():
                flusher.set_result(None)


def _split_share(share: Share, numbers: Mapping[int, int]) -> Share | None:
    """Return the records of a call that belong to another batch, in which they are consecutive too."""
    start, shared, indexes = share
    kept = [(numbers[place], index) for place, index in enumerate(indexes, start) if place in numbers]
    return (kept[0][0], shared, [index for _, index in kept]) if kept else None


IN_FLIGHT_MAX: Final = 5
"""How many batches of a producer a broker remembers."""


class ProducerIdentity(NamedTuple):
    """The producer id and epoch of batches; -1 without sequences."""

    producer_id: int
    epoch: int


NOT_IDEMPOTENT: Final = ProducerIdentity(-1, -1)


class PartitionQueue:
    __slots__ = (
        "_acknowledged",
        "_freed",
        "_proven",
        "batch_bytes",
        "cause",
        "compression",
        "failures",
        "given_up",
        "identity",
        "index",
        "recovering",
        "sender",
        "sent",
        "timeout_s",
        "topic",
        "topic_id",
        "troubled",
        "waiting",
        "waiting_bytes",
    )

    def __init__(
        self,
        topic: str,
        topic_id: str,
        index: int,
        *,
        batch_bytes: int,
        compression: int,
        timeout_s: float,
        freed: Callable[[int], None],
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.batch_bytes = batch_bytes
        self.compression = compression
        self.timeout_s = timeout_s
        self.sender: NodeSender | None = None
        """The sender of the leader; None while it is unknown."""
        self.identity: ProducerIdentity | None = None
        """The current producer id and epoch; None while a new id is needed."""
        self.waiting: deque[OutgoingBatch] = deque()
        self.waiting_bytes = 0
        self.sent: deque[OutgoingBatch] = deque()
        self.recovering = False
        """Whether batches that were sent before must be sent again, one at a time."""
        self.troubled = False
        """Whether nothing can be sent until the leader and the producer id are known again."""
        self.cause = "the broker temporarily refuses it"
        """The reason why sending fails."""
        self.failures = 0
        """How often sending has failed since the last success."""
        self.given_up: MillstreamError | None = None
        """The reason why nothing can be published here any more; the topic must be looked up again."""
        self._freed = freed
        self._acknowledged = 0
        self._proven = False

    def room(self, now: float, record_bytes: int) -> OutgoingBatch:
        waiting = self.waiting
        if waiting:
            batch = waiting[-1]
            if batch.size + record_bytes <= self.batch_bytes and batch.count < RECORDS_MAX:
                return batch
        batch = OutgoingBatch(now + self.timeout_s, self._freed)
        waiting.append(batch)
        return batch

    def write(
        self, batch: OutgoingBatch, key: Buffer | None, value: Buffer | None, headers: Headers, time_ms: int
    ) -> int:
        """Add a record to a waiting batch; return how many bytes it takes."""
        try:
            if self.given_up is not None:
                raise self.given_up
            size = batch.add(key, value, headers, time_ms)
        except BaseException:
            if not batch.count:
                self.waiting.remove(batch)
            raise
        self.waiting_bytes += size
        return size

    @property
    def can_send(self) -> bool:
        """Return whether a batch may be sent now."""
        if self.troubled or self.identity is None or self.sender is None:
            return False
        if self.recovering or not self._proven:
            return not any(batch.in_flight for batch in self.sent) and bool(self.sent or self.waiting)
        return bool(self.waiting) and len(self.sent) < IN_FLIGHT_MAX

    def take(self) -> OutgoingBatch:
        """Return the next batch to send: first one to be resent, otherwise one that waits."""
        if self.recovering and self.sent:
            batch = next(batch for batch in self.sent if not batch.is_done)
        else:
            self.recovering = False
            batch = self.waiting.popleft()
            self.waiting_bytes -= batch.size
            self.sent.append(batch)
        batch.in_flight = True
        batch.behind_gap = False
        return batch

    def sealed(self, batch: OutgoingBatch) -> bytearray:
        identity = self.identity or NOT_IDEMPOTENT
        if identity.producer_id < 0:
            return batch.sealed(self.compression, -1, -1, -1)
        sequence = self._acknowledged
        for earlier in self.sent:
            if earlier is batch:
                break
            sequence += earlier.count
        return batch.sealed(self.compression, *identity, sequence & SEQUENCE_MASK)

    # -- responses ------------------------------------------------------------------------------------------

    def stored(self, batch: OutgoingBatch, produced: Produced) -> None:
        batch.in_flight = False
        self._proven = True
        self.failures = 0
        batch.stored(self.topic, self.topic_id, self.index, produced.base_offset, produced.append_time_ms)
        self._discard_done()

    def failed_for_now(self, batch: OutgoingBatch, *, maybe_stored: bool) -> None:
        """Handle a batch that did not get through, or may not have; it is sent again."""
        batch.in_flight = False
        batch.maybe_stored |= maybe_stored
        self.failures += 1
        self.recovering = self.troubled = True
        if maybe_stored and (self.identity is None or self.identity == NOT_IDEMPOTENT):
            # It cannot be sent again with the id that the broker would recognize.
            self._give_up(
                batch, RequestTimedOut("the response was lost; it is unknown whether the messages were stored")
            )

    def refused(self, batch: OutgoingBatch, error: MillstreamError) -> None:
        batch.in_flight = False
        follows = batch.behind_gap or batch is not self._first()
        if follows and isinstance(error, OutOfOrderSequence | UnknownProducer):
            # One before it has failed, so this one is sent again.
            self.recovering = True
        elif isinstance(error, BatchTooLarge) and batch.maybe_stored:
            # Halves have sequences that the broker does not know, so they could be stored in addition to the whole.
            self._give_up(batch, BatchTooLarge(f"{error}; it was sent before, and may have been stored then"))
        elif isinstance(error, BatchTooLarge) and batch.count > 1:
            self._replace(batch, batch.halves(self.compression))
        elif isinstance(error, InvalidBatch | InvalidTimestamp) and not batch.maybe_stored:
            self._drop_invalid(batch, error)
        else:
            self._give_up(batch, error)

    def expire(self, now: float) -> float | None:
        """Fail batches that have waited too long, even in flight; return when the next one expires."""
        while (first := self._first()) is not None and first.deadline <= now:
            cause = "the broker does not respond" if first.in_flight else self._reason
            first.maybe_stored |= first.in_flight
            missed = f"no acknowledgement within {self.timeout_s:g} s ({cause})"
            if first.maybe_stored:
                self._give_up(first, RequestTimedOut(f"{missed}; may have been stored"))
            else:
                self._give_up(first, NotStoredInTime(f"{missed}; was not stored"))
        while not self.sent and self.waiting and self.waiting[0].deadline <= now:
            batch = self.waiting.popleft()
            self.waiting_bytes -= batch.size
            batch.failed(NotStoredInTime(f"not sent within {self.timeout_s:g} s ({self._reason}); was not stored"))
        if first is None and self.waiting:
            first = self.waiting[0]
        return None if first is None else first.deadline

    @property
    def _reason(self) -> str:
        if self.sender is not None and self.sender.is_throttled:
            return "the broker throttles this client, which has exceeded its quota"
        return self.cause

    def fail_all(self, error: MillstreamError) -> None:
        """Fail everything that waits or is in flight, and accept nothing more; report unknown outcomes."""
        unsure = _unknown_outcome_error(error)
        self.given_up = error
        batches = [*self.sent, *self.waiting]
        self.sent.clear()
        self.waiting.clear()
        self.waiting_bytes = 0
        for batch in batches:
            if not batch.is_done:
                batch.failed(unsure if batch.in_flight or batch.maybe_stored else error)
        self.identity = None
        self.troubled = True

    @property
    def needs_identity(self) -> bool:
        """Return whether a new producer id is needed and may be used: all responses for the old one have arrived."""
        return self.identity is None and not any(batch.in_flight for batch in self.sent)

    def begin(self, identity: ProducerIdentity) -> None:
        """Continue with a new producer id."""
        self.identity = identity
        for batch in [batch for batch in self.sent if batch.is_done]:
            self.sent.remove(batch)
        self._acknowledged = 0
        self._proven = identity.producer_id < 0

    def _first(self) -> OutgoingBatch | None:
        return next((batch for batch in self.sent if not batch.is_done), None)

    def _give_up(self, batch: OutgoingBatch, error: MillstreamError) -> None:
        """Fail a batch; if it may be stored nevertheless, its sequence and those after it are spent."""
        self.recovering = True
        doomed = [batch]
        if batch.maybe_stored or isinstance(error, OutOfOrderSequence | UnknownProducer):
            doomed += [sent for sent in self.sent if sent.maybe_stored and sent is not batch and not sent.is_done]
            self.identity = None
            self.troubled = True
        for sent_batch in doomed:
            self.sent.remove(sent_batch)
            sent_batch.failed(error)
        for sent_batch in self.sent:
            sent_batch.behind_gap = sent_batch.in_flight
        self._discard_done()

    def _drop_invalid(self, batch: OutgoingBatch, error: InvalidBatch | InvalidTimestamp) -> None:
        """Fail the records that the broker names, and send the others again: other callers may have published them."""
        messages = {index: message for index, message in error.records if 0 <= index < batch.count}
        if not 0 < len(messages) < batch.count:
            self._give_up(batch, error)
            return
        refused, rest = batch.split_off(messages, self.compression)
        self._replace(batch, [rest])
        refused.failed(error, [error.__class__(messages[index]) for index in sorted(messages)])

    def _replace(self, batch: OutgoingBatch, parts: Sequence[OutgoingBatch]) -> None:
        """Send the parts of a batch instead of it."""
        at = self.sent.index(batch)
        self.sent.remove(batch)
        for part in reversed(parts):
            self.sent.insert(at, part)
        self.recovering = True

    def _discard_done(self) -> None:
        while self.sent and self.sent[0].is_done:
            self._acknowledged += self.sent.popleft().count
        if not self.sent:
            self.recovering = False


def _unknown_outcome_error(error: MillstreamError) -> MillstreamError:
    copy = error.__class__.__new__(error.__class__)
    copy.__dict__.update(error.__dict__)
    copy.args = (f"{error}; whether it was stored is unknown",)
    return copy
