"""The child process that evaluates filters: its messages, on standard input and standard output.

It exits when its input closes, so it never outlives the broker.
"""

from __future__ import annotations

import signal
import sys
from functools import lru_cache
from typing import IO

import msgspec

from millstream.broker.subscriptions.batch_scan import BatchScan, scan_batch
from millstream.core.errors import BatchRejected
from millstream.core.heap import freeze_heap
from millstream.protocol.filter.filter import Evaluation, Messages, compile_filter, evaluate
from millstream.protocol.records.batch import read_header

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
    """The result of an evaluation: offsets as 64-bit integers, and one bit per message and filter.

    Each is its length in four bytes followed by MessagePack. A request gets a response before the next one is read.
    """

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


FilterResponse = FilterMatches | ScannedBatch | Unreadable


def frame_message(message: object) -> bytes:
    """Encode a message as it is sent over the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


FILTERS_KEPT = 1024

_compiled = lru_cache(maxsize=FILTERS_KEPT)(compile_filter)


def respond(request: FilterRequest | BatchRequest) -> FilterResponse:
    """Evaluate the filters of one request, or scan its batch."""
    try:
        if isinstance(request, BatchRequest):
            header = read_header(request.batch)
            found = scan_batch(request.batch, header, request.first, with_keys=request.with_keys, light=False)
            return ScannedBatch.of(found)
        return FilterMatches.of(evaluate(request.messages(), [_compiled(text) for text in request.filters]))
    except BatchRejected as error:
        return Unreadable(str(error))


def serve(asking: IO[bytes], responses: IO[bytes]) -> None:
    """Respond to requests until the input ends."""
    decode = msgspec.msgpack.Decoder(FilterRequest | BatchRequest).decode
    while True:
        head = asking.read(LENGTH_BYTES)
        size = int.from_bytes(head, "big")
        if len(head) < LENGTH_BYTES or size > MESSAGE_BYTES_MAX:
            return
        body = asking.read(size)
        if len(body) < size:
            return
        responses.write(frame_message(respond(decode(body))))
        responses.flush()


def main() -> None:
    """Serve the broker until it closes the input."""
    # Ctrl-C reaches the whole process group; the broker decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    freeze_heap()
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
