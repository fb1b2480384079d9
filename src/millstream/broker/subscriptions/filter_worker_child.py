"""The child process that evaluates filters: its messages, on standard input and standard output.

It exits when its input closes, so it never outlives the broker.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import msgspec

from millstream.broker.subscriptions.batch_scan import BatchScan, scan_batch
from millstream.core.child_pool import serve_parent
from millstream.core.errors import BatchRejected
from millstream.core.heap import freeze_heap
from millstream.protocol.filter.filter import Evaluation, Messages, compile_filter, evaluate
from millstream.protocol.records.batch import read_header


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
        keys = None if scan.keys is None else scan.keys.astype("<i8").tobytes()
        return ScannedBatch(scan.absent, scan.delayed, keys, scan.scanned_bytes)

    def scan(self) -> BatchScan:
        import numpy as np

        keys = None if self.keys is None else np.frombuffer(self.keys, "<i8").astype(np.int64)
        return BatchScan(self.absent, self.delayed, keys, self.scanned_bytes)


class FilterMatches(msgspec.Struct, frozen=True, tag=True):
    """The result of an evaluation: offsets as 64-bit integers, and one bit per message and filter."""

    offsets: bytes
    matches: list[bytes]

    @staticmethod
    def of(evaluation: Evaluation) -> FilterMatches:
        import numpy as np

        matches = [np.packbits(column, bitorder="little").tobytes() for column in evaluation.matches]
        return FilterMatches(evaluation.offsets.astype("<i8").tobytes(), matches)

    def evaluation(self) -> Evaluation:
        import numpy as np

        offsets = np.frombuffer(self.offsets, "<i8").astype(np.int64)
        bits = (np.frombuffer(column, np.uint8) for column in self.matches)
        unpacked = (np.unpackbits(column, count=offsets.size, bitorder="little") for column in bits)
        return Evaluation(offsets, tuple(column.view(np.bool_) for column in unpacked))


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """The batches could not be read."""

    reason: str


FilterResponse = FilterMatches | ScannedBatch | Unreadable


FILTERS_KEPT = 1024
RESPONSE_S_MAX = 120.0
"""After this long without an end, the child ends itself; a running broker ends it earlier."""

_compiled = lru_cache(maxsize=FILTERS_KEPT)(compile_filter)


def respond(request: FilterRequest | BatchRequest) -> FilterResponse:
    """Evaluate the filters of one request, or scan its batch."""
    try:
        if isinstance(request, BatchRequest):
            header = read_header(request.batch)
            scan = scan_batch(request.batch, header, request.first, with_keys=request.with_keys, light=False)
            return ScannedBatch.of(scan)
        return FilterMatches.of(evaluate(request.messages(), [_compiled(text) for text in request.filters]))
    except BatchRejected as error:
        return Unreadable(str(error))


def main() -> None:
    """Serve the broker until it closes the input."""
    freeze_heap()
    decode = msgspec.msgpack.Decoder(FilterRequest | BatchRequest).decode
    with suppress(BrokenPipeError):
        # The broker limits the time, and the size that batches decompress to.
        serve_parent(
            lambda body: msgspec.msgpack.encode(respond(decode(body))),
            memory_bytes_max=None,
            response_s_max=RESPONSE_S_MAX,
        )


if __name__ == "__main__":
    main()
