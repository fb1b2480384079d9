"""The child process that evaluates filters: requests on standard input, answers on standard output.

It exits when its input closes, so it never outlives the broker.
"""

from __future__ import annotations

import signal
import sys
from functools import lru_cache
from typing import IO

import msgspec

from millstream.broker.subscriptions.batch_scan import scan_batch
from millstream.broker.subscriptions.filter_worker_message import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    Answer,
    BatchRequest,
    FilterMatches,
    FilterRequest,
    ScannedBatch,
    Unreadable,
    frame_message,
)
from millstream.core.errors import BatchRejected
from millstream.core.heap import freeze_heap
from millstream.protocol.filter.evaluation import evaluate
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.records.batch import read_header

FILTERS_KEPT = 1024

_compiled = lru_cache(maxsize=FILTERS_KEPT)(compile_filter)


def answer(request: FilterRequest | BatchRequest) -> Answer:
    """Evaluate the filters of one request, or scan its batch."""
    try:
        if isinstance(request, BatchRequest):
            header = read_header(request.batch)
            found = scan_batch(request.batch, header, request.first, with_keys=request.with_keys, light=False)
            return ScannedBatch.of(found)
        return FilterMatches.of(evaluate(request.messages(), [_compiled(text) for text in request.filters]))
    except BatchRejected as error:
        return Unreadable(str(error))


def serve(asking: IO[bytes], answering: IO[bytes]) -> None:
    """Answer requests until the input ends."""
    decode = msgspec.msgpack.Decoder(FilterRequest | BatchRequest).decode
    while True:
        head = asking.read(LENGTH_BYTES)
        size = int.from_bytes(head, "big")
        if len(head) < LENGTH_BYTES or size > MESSAGE_BYTES_MAX:
            return
        body = asking.read(size)
        if len(body) < size:
            return
        answering.write(frame_message(answer(decode(body))))
        answering.flush()


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
