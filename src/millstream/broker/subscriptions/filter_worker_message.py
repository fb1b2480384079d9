"""Messages between the broker and the process that evaluates filters.

Each is its length in four bytes followed by MessagePack. A request is answered before the next one is read.
"""

from __future__ import annotations

import msgspec

from millstream.broker.subscriptions.batch_scan import BatchScan
from millstream.protocol.filter.evaluation import Evaluation, Messages

LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 1 << 30


class FilterRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Messages, and the filters to evaluate on them."""

    topic: str
    partition: int
    batches: bytes
    start_offset: int
    end_offset: int
    aborted: list[tuple[int, int]]
    filters: list[str]

    def messages(self) -> Messages:
        """Return the messages to evaluate."""
        return Messages(
            topic=self.topic,
            partition=self.partition,
            batches=self.batches,
            start_offset=self.start_offset,
            end_offset=self.end_offset,
            aborted=self.aborted,
        )


class BatchRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A batch to scan for a queue, from an offset on."""

    batch: bytes
    first: int
    with_keys: bool


class ScannedBatch(msgspec.Struct, frozen=True, tag=True):
    """The result of a scan; keys are encoded as 64-bit integers. See `broker/subscriptions/batch_scan.py`."""

    absent: list[tuple[int, int]]
    delayed: list[tuple[int, int]]
    keys: bytes | None
    scanned_bytes: int

    @staticmethod
    def of(scan: BatchScan) -> ScannedBatch:
        """Encode a scan."""
        keys = None if scan.keys is None else scan.keys.astype("<i8").tobytes()
        return ScannedBatch(scan.absent, scan.delayed, keys, scan.scanned_bytes)

    def scan(self) -> BatchScan:
        """Decode the scan."""
        import numpy as np

        keys = None if self.keys is None else np.frombuffer(self.keys, "<i8").astype(np.int64)
        return BatchScan(self.absent, self.delayed, keys, self.scanned_bytes)


class FilterMatches(msgspec.Struct, frozen=True, tag=True):
    """The result of an evaluation: offsets as 64-bit integers, and one bit per message and filter."""

    offsets: bytes
    matches: list[bytes]

    @staticmethod
    def of(evaluation: Evaluation) -> FilterMatches:
        """Encode an evaluation."""
        import numpy as np

        matches = [np.packbits(column, bitorder="little").tobytes() for column in evaluation.matches]
        return FilterMatches(evaluation.offsets.astype("<i8").tobytes(), matches)

    def evaluation(self) -> Evaluation:
        """Decode the evaluation."""
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
    """Encode a message as it is sent over the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
