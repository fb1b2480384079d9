"""The committed batches of one partition: once below any high watermark, a batch never changes or disappears."""

from __future__ import annotations

from bisect import bisect_right

from millstream.core.ids import NO_PRODUCER_ID
from millstream.protocol.records.batch import BatchHeader, Buffer, iterate_headers

_SENT_FROM = 16
"""The bytes from here on are those of the producer; offset and epoch come from the leader."""


class Violation(Exception):
    """A rule that must always hold was broken."""


class Committed:
    """The batches of one partition from its first offset to the highest high watermark that any replica had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = 0
        self._bases: list[int] = []
        self._batches: list[bytes] = []
        self._next_sequences: dict[int, tuple[int, int]] = {}
        """By producer: its epoch, and the sequence that comes next in it."""

    def __len__(self) -> int:
        return len(self._batches)

    def since(self, number: int) -> list[bytes]:
        """Return the batches after the first `count`."""
        return self._batches[number:]

    def check(self, records: Buffer, whose: str, *, may_extend: bool) -> int:
        """Compare stored batches with the committed ones; batches after the end become committed if that is allowed.

        Returns the offset after the last batch.
        """
        end = 0
        for header in iterate_headers(records):
            batch = bytes(records[header.position : header.end_position])
            if header.base_offset >= self.end and may_extend:
                self._extend(batch, header.base_offset, header.next_offset, whose)
                self._check_sequence(header)
            elif self._at(header.base_offset) != batch:
                raise Violation(
                    f"{self.name}: {whose} has at offset {header.base_offset} {_short(batch)}, but committed was "
                    f"{_short(self._at(header.base_offset))}"
                )
            end = header.next_offset
        return end

    def check_acknowledged(self, sent: bytes, base_offset: int, next_offset: int, whose: str) -> None:
        if next_offset > self.end or self._at(base_offset)[_SENT_FROM:] != sent[_SENT_FROM:]:
            raise Violation(
                f"{self.name}: {whose} got offset {base_offset} for its batch, but committed is up to {self.end} "
                f"and there {_short(self._at(base_offset))}"
            )

    def _extend(self, batch: bytes, base_offset: int, next_offset: int, whose: str) -> None:
        if base_offset != self.end:
            raise Violation(f"{self.name}: {whose} goes from offset {self.end} to {base_offset}")
        self._bases.append(base_offset)
        self._batches.append(batch)
        self.end = next_offset

    def _check_sequence(self, header: BatchHeader) -> None:
        producer = header.producer_id
        if producer == NO_PRODUCER_ID:
            return
        epoch, expected = self._next_sequences.get(producer, (0, 0))
        if header.producer_epoch < epoch:
            raise Violation(
                f"{self.name}: producer {producer} has epoch {header.producer_epoch} committed after epoch {epoch}"
            )
        if header.producer_epoch > epoch:
            expected = 0
        sequence = header.base_sequence
        if not header.is_control:
            if sequence != expected:
                kind = "duplicated or out of order" if sequence < expected else "lost"
                raise Violation(
                    f"{self.name}: producer {producer} has sequence {sequence} committed instead of {expected} ({kind})"
                )
            expected += header.record_count
        self._next_sequences[producer] = (header.producer_epoch, expected)

    def _at(self, offset: int) -> bytes:
        at = bisect_right(self._bases, offset) - 1
        return self._batches[at] if at >= 0 and offset == self._bases[at] else b""


def _short(batch: bytes) -> str:
    if not batch:
        return "nothing"
    header = next(iter(iterate_headers(batch)))
    return (
        f"a batch of producer {header.producer_id}, sequence {header.base_sequence}, epoch {header.leader_epoch}, "
        f"{len(batch)} bytes"
    )
