"""Damage a data folder and open it: undamaged data must be readable, and corrupt data must never be served.

    python -m trials.fuzz_recovery --seconds 60

An example is a store on a disk in memory with a few logs of small segments, which are written, committed (partly
through the journal), checkpointed, truncated at the front, and then stopped cleanly or killed. Some of its files
(segments, indexes, the journal, the checkpoints, the clean-stop marker) are corrupted, truncated, extended or removed.
Opening it and reading every log must return each batch as it was written, or raise a `MillstreamError`; a committed
batch whose bytes were not damaged must be present. Afterwards each log must accept a write and return it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from trials.fuzz_trial import Finding, collect_logs, run

from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import MillstreamError, OffsetOutOfRange
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_whole_headers
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles

DATA = Path("/data")
LOGS = 6
SETTINGS = TopicSettings(segment_bytes=1024, index_interval_bytes=200)
_UNTOUCHED = ("/lock", "/format")
_EPOCH_FROM, _EPOCH_TO = 12, 16


class Written(NamedTuple):
    """An appended batch, with its file and byte range."""

    content: bytes
    base_offset: int
    next_offset: int
    path: str
    start: int
    end: int


class Damage:
    """The damage done to the files."""

    def __init__(self) -> None:
        self.removed: set[str] = set()
        self.ranges: dict[str, list[tuple[int, int]]] = {}

    def hits(self, batch: Written) -> bool:
        """Whether any byte of a batch was damaged."""
        ranges = self.ranges.get(batch.path, ())
        return batch.path in self.removed or any(start < batch.end and batch.start < end for start, end in ranges)


def open_store(files: MemoryFiles, clock: ManualClock) -> LogStore:
    """Open the folder as the broker does."""
    return LogStore.open(DATA, files=files, clock=clock, journal_bytes=20_000, producer_expiry_ms=3_600_000)


def open_logs(store: LogStore) -> list[Log]:
    return [
        store.open_log(UUID(int=1), TopicPartition("orders", PartitionIndex(index)), SETTINGS) for index in range(LOGS)
    ]


class Writer:
    """Writes to the logs of a store and records the position of every batch."""

    def __init__(self, rng: random.Random, clock: ManualClock) -> None:
        self._chance = rng
        self._clock = clock
        self._sequences = [0] * LOGS
        self.written: list[list[Written]] = [[] for _ in range(LOGS)]

    def append(self, number: int, log: Log) -> None:
        rng = self._chance
        records = [
            NewRecord(None, rng.randbytes(rng.choice((1, 20, 200))), (), self._clock.now_ms())
            for _ in range(rng.choice((1, 1, 2, 10)))
        ]
        sequence = self._sequences[number]
        batch = encode_batch(records, producer_id=number, producer_epoch=0, base_sequence=sequence)
        self._sequences[number] += len(records)
        appended = log.append(batch, leader_epoch=Epoch(0))
        segment = log.segments[-1]
        place = (segment.path, segment.size - len(batch), segment.size)
        self.written[number].append(Written(bytes(batch), appended.base_offset, appended.next_offset, *place))


def build(rng: random.Random, files: MemoryFiles, clock: ManualClock) -> tuple[list[list[Written]], list[int]]:
    """Write a folder and stop, cleanly or not; return the batches and the committed offset of each log."""
    writer = Writer(rng, clock)
    store = open_store(files, clock)
    logs = open_logs(store)
    for _ in range(rng.choice((3, 20, 60))):
        step = rng.random()
        number = rng.randrange(LOGS)
        if step < 0.7:
            for at in {rng.randrange(LOGS) for _ in range(rng.choice((1, 3, LOGS)))}:
                writer.append(at, logs[at])
                store.sync_soon(logs[at])
        elif step < 0.9:
            store.commit_once()
        elif step < 0.97:
            store.checkpoint_soon(logs[number])
            store.checkpoint_once()
        elif logs[number].synced_offset:
            logs[number].delete_before(rng.randint(logs[number].start_offset, logs[number].synced_offset))
        clock.advance_ms(1000)
    if rng.random() < 0.5:
        store.close_now()
        committed = [int(log.end_offset) for log in logs]
    else:
        committed = [int(log.synced_offset) for log in logs]
        files.kill()
    remaining = [
        [batch for batch in batches if batch.next_offset > log.start_offset]
        for batches, log in zip(writer.written, logs, strict=True)
    ]
    return remaining, committed


def damage_files(rng: random.Random, files: MemoryFiles) -> Damage:
    damage = Damage()
    paths = [path for path in files.walk() if not path.endswith(_UNTOUCHED)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        path = rng.choice(paths)
        if path in damage.removed:
            continue
        size = len(files.content(path))
        ranges = damage.ranges.setdefault(path, [])
        kind = rng.choice(("flip", "flip", "zero", "cut", "extend", "remove"))
        if kind == "remove":
            files.remove(path)
            damage.removed.add(path)
        elif kind == "extend":
            overwrite(files, path, size, rng.randbytes(rng.choice((1, 11, 70, 600))))
            ranges.append((size, 2**62))
        elif kind == "cut":
            at = rng.randint(0, size)
            cut(files, path, at)
            ranges.append((at, 2**62))
        elif size:
            at = rng.randrange(size)
            end = at + 1 if kind == "flip" else min(size, at + rng.choice((4, 40, 512)))
            old = files.content(path)[at:end]
            overwrite(files, path, at, bytes([old[0] ^ 1 << rng.randrange(8)]) if kind == "flip" else bytes(end - at))
            ranges.append((at, end))
    return damage


def overwrite(files: MemoryFiles, path: str, position: int, data: bytes) -> None:
    """Change bytes of a file without the broker."""
    descriptor = files.open(path)
    files.write_at(descriptor, data, position)
    files.close(descriptor)


def cut(files: MemoryFiles, path: str, size: int) -> None:
    descriptor = files.open(path)
    files.truncate(descriptor, size)
    files.close(descriptor)


def read_all(log: Log) -> dict[int, bytes]:
    """Return every batch that the log serves, by its base offset, and skip offsets that it refuses."""
    batches_by_offset: dict[int, bytes] = {}
    offset = int(log.start_offset)
    while offset < log.end_offset:
        try:
            data = bytes(log.read(offset, max_bytes=1000, up_to=log.end_offset))
        except OffsetOutOfRange:
            raise
        except MillstreamError:
            offset = next((after for first, after in log.damaged_ranges if first <= offset < after), offset + 1)
            continue
        headers = list(iterate_whole_headers(data))
        if not headers:
            raise Finding(f"{log}: nothing was read at {offset}")
        for header in headers:
            batches_by_offset[header.base_offset] = data[header.position : header.position + header.length + 12]
            after = header.base_offset + header.last_offset_delta + 1
        if after <= offset:
            raise Finding(f"{log}: a read at {offset} ended at {after}")
        offset = after
    return batches_by_offset


def _without_epoch(content: bytes) -> bytes:
    """Return what the checksum or the position of the batch verifies: all but the leader epoch."""
    return content[:_EPOCH_FROM] + content[_EPOCH_TO:]


def compare(log: Log, written: list[Written], committed: int, damage: Damage) -> dict[int, bytes]:
    """Compare what is read with what was written; return what was read."""
    contents = read_all(log)
    by_offset = {batch.base_offset: batch for batch in written}
    for base_offset, content in contents.items():
        batch = by_offset.get(base_offset)
        # Batches before the start offset that DeleteRecords set may reappear when the checkpoints are lost.
        if batch is not None and _without_epoch(batch.content) != _without_epoch(content):
            raise Finding(f"{log}: the batch at {base_offset} is not what was written")
    for batch in written:
        if batch.next_offset > committed or damage.hits(batch) or batch.base_offset in contents:
            continue
        if batch.next_offset <= log.start_offset:
            raise Finding(f"{log}: the start went beyond {batch.base_offset}, which was not deleted")
        raise Finding(
            f"{log}: {batch} was not damaged but is missing; damage {log.damaged_ranges}, done {damage.ranges}"
        )
    return contents


def write_again(store: LogStore, log: Log, damage: Damage) -> dict[int, bytes]:
    """Check that a recovered log accepts writes and returns them; return what was written, by its offset."""
    batch = encode_batch([NewRecord(None, b"after", (), 1)])
    try:
        appended = log.append(batch, leader_epoch=Epoch(0))
    except MillstreamError:
        # Refused with a reason: the file that it should go to was taken away after a clean stop, or an epoch in it
        # was changed, which no checksum covers.
        if any(path.startswith(log.directory + "/") for path in damage.ranges):
            return {}
        raise
    store.sync_soon(log)
    store.commit_once()
    if log.synced_offset != appended.next_offset:
        raise Finding(f"{log}: a write after recovery was not committed")
    if bytes(log.read(appended.base_offset, max_bytes=1, up_to=log.end_offset)) != bytes(batch):
        raise Finding(f"{log}: a write after recovery reads differently")
    return {int(appended.base_offset): bytes(batch)}


def example(rng: random.Random) -> int:
    """Build, break, open and compare."""
    files, clock = MemoryFiles(rng.getrandbits(32), open_files_max=rng.choice((16, 64))), ManualClock()
    written, committed = build(rng, files, clock)
    damage = damage_files(rng, files)
    try:
        store = open_store(files, clock)
    except MillstreamError:
        return 0
    served = [
        compare(log, batches, end, damage) | write_again(store, log, damage)
        for log, batches, end in zip(open_logs(store), written, committed, strict=True)
    ]
    if rng.random() < 0.5:
        store.close_now()
    else:
        files.kill()
    for log, before in zip(open_logs(open_store(files, clock)), served, strict=True):
        # More may be there: a write behind the end of a file that was cut can make the file whole again.
        if not before.items() <= read_all(log).items():
            raise Finding(f"{log}: another start serves less than the one before, or something else")
    return sum(map(len, written))


def main() -> int:
    collected = collect_logs()

    def checked(rng: random.Random) -> int:
        tried = example(rng)
        collected.check()
        return tried

    return run("trials.fuzz_recovery", checked)


if __name__ == "__main__":
    sys.exit(main())
