"""What the broker and the process that evaluates filters say to each other.

A message is its length in four bytes and MessagePack. Each request is answered before the next is read.
"""

from __future__ import annotations

import msgspec

from millstream.broker.subscriptions.batch_scan import BatchScan
from millstream.protocol.filter.evaluation import Evaluation, Messages

LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 1 << 30


class FilterRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Messages, and the texts of the filters to evaluate."""

    topic: str
    partition: int
    batches: bytes
    start_offset: int
    end_offset: int
    aborted: list[tuple[int, int]]
    filters: list[str]

    def messages(self) -> Messages:
        """The messages to look at."""
        return Messages(
            topic=self.topic,
            partition=self.partition,
            batches=self.batches,
            start_offset=self.start_offset,
            end_offset=self.end_offset,
            aborted=self.aborted,
        )


class BatchRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One batch to open for a queue, from an offset on."""

    batch: bytes
    first: int
    with_keys: bool


class ScannedBatch(msgspec.Struct, frozen=True, tag=True):
    """The answer: see `broker/subscriptions/batch_scan.py`; keys as numbers of 64 bits."""

    absent: list[tuple[int, int]]
    delayed: list[tuple[int, int]]
    keys: bytes | None
    scanned_bytes: int

    @staticmethod
    def of(scan: BatchScan) -> ScannedBatch:
        """Pack what was found."""
        keys = None if scan.keys is None else scan.keys.astype("<i8").tobytes()
        return ScannedBatch(scan.absent, scan.delayed, keys, scan.scanned_bytes)

    def scan(self) -> BatchScan:
        """Unpack it again."""
        import numpy as np

        keys = None if self.keys is None else np.frombuffer(self.keys, "<i8").astype(np.int64)
        return BatchScan(self.absent, self.delayed, keys, self.scanned_bytes)


class FilterMatches(msgspec.Struct, frozen=True, tag=True):
    """The answer: offsets as numbers of 64 bits, and a bit a message for every filter."""

    offsets: bytes
    matches: list[bytes]

    @staticmethod
    def of(evaluation: Evaluation) -> FilterMatches:
        """Pack an evaluation."""
        import numpy as np

        matches = [np.packbits(column, bitorder="little").tobytes() for column in evaluation.matches]
        return FilterMatches(evaluation.offsets.astype("<i8").tobytes(), matches)

    def evaluation(self) -> Evaluation:
        """Unpack it again."""
        import numpy as np

        offsets = np.frombuffer(self.offsets, "<i8").astype(np.int64)
        bits = (np.frombuffer(column, np.uint8) for column in self.matches)
        unpacked = (np.unpackbits(column, count=offsets.size, bitorder="little") for column in bits)
        return Evaluation(offsets, tuple(column.view(np.bool_) for column in unpacked))


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """The batches could not be read."""

    reason: str


Answer = FilterMatches | ScannedBatch | Unreadable


def frame_message(message: object) -> bytes:
    """A message as it goes over the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
