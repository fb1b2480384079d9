"""`make bench-cold-reads`: what verification adds to a fetch of stored records, in CPU time per gigabyte.

python -m benchmarks.cold_reads [--megabytes N] [--rounds N] [--json]

Three variants alternate over the same segments: verified reads (CRC, offsets, epochs), repeated reads, which are not
verified again, and a bare `pread` of the same bytes, which is the lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from uuid import UUID

from benchmarks.machine import facts

from millstream.broker.log.files import DiskFiles
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch

MEGABYTES, ROUNDS = 128, 7
READ_BYTES = 1024 * 1024
BATCH_BYTES = (300, 1_000, 16_000, 100_000)


def fill(log: Log, batch_bytes: int, total_bytes: int) -> None:
    """Write batches of one record each, followed by one more segment, so that all of them are in closed segments."""
    batch = bytes(encode_batch([NewRecord(None, os.urandom(batch_bytes), (), 1000)]))
    for _ in range(total_bytes // len(batch)):
        log.append(bytearray(batch), leader_epoch=Epoch(0))
    log.roll()
    log.synced_offset = log.end_offset


def read_all(log: Log) -> int:
    """Read everything like a consumer's fetches."""
    offset, size = int(log.start_offset), 0
    while offset < log.end_offset:
        piece = log.read_slice(offset, max_bytes=READ_BYTES, up_to=log.end_offset)
        if piece is None:
            break
        offset, size = piece.next_offset, size + len(piece.data)
    return size


def read_cold(log: Log) -> int:
    """Read everything when nothing was verified recently."""
    for segment in log.segments:
        segment.forget_verified()
    return read_all(log)


def read_bare(log: Log) -> int:
    """Read only the bytes."""
    size = 0
    for segment in log.segments:
        descriptor = log.open_files.descriptor(segment)
        for position in range(0, segment.size, READ_BYTES):
            size += len(os.pread(descriptor, min(READ_BYTES, segment.size - position), position))
    return size


VARIANTS: dict[str, Callable[[Log], int]] = {"verified": read_cold, "not verified again": read_all, "pread": read_bare}


def measure(log: Log, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds per gigabyte of each variant."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, variant in VARIANTS.items():
            started = time.process_time()
            size = variant(log)
            seconds[name].append((time.process_time() - started) / size * 1e9)
    return {name: round(median(of_variant), 3) for name, of_variant in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[int, dict[str, float]] = {}
    for batch_bytes in BATCH_BYTES:
        with tempfile.TemporaryDirectory() as folder:
            store = LogStore.open(
                Path(folder), files=DiskFiles(), clock=SystemClock(), journal_bytes=1 << 20, producer_expiry_ms=1
            )
            where = TopicPartition("cold", PartitionIndex(0))
            log = store.open_log(UUID(int=1), where, TopicSettings(segment_bytes=16 << 20))
            fill(log, batch_bytes, min(options.megabytes << 20, 200_000 * batch_bytes))
            results[batch_bytes] = measure(log, options.rounds)
            store.close_now()
    if options.json:
        print(json.dumps({"machine": facts(), "cpu_seconds_per_gigabyte": results}))
        return
    print("CPU seconds per gigabyte of stored records that is read, by the size of a batch")
    for batch_bytes, variants in results.items():
        print(f"{batch_bytes:>8} bytes  " + "   ".join(f"{name} {seconds:.3f}" for name, seconds in variants.items()))


if __name__ == "__main__":
    main()
