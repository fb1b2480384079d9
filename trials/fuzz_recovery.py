"""Break a data folder and open it: what was not touched must be readable, and nothing wrong may ever be served.

    python -m trials.fuzz_recovery --seconds 60

An example is a store on a disk in memory with a few logs of small segments, written to, committed (some of it through
the journal), checkpointed, cut from the front, and then stopped cleanly or killed. Some of its files (segments,
indexes, the journal, the ledger of checkpoints, the mark of the clean stop) are flipped, cut, extended or removed.
Opening it and reading every log must give each batch as it was written, or an error of the tree of errors; a committed
batch whose bytes were not touched must be there. Afterwards each log must take a write and give it back.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from trials.fuzz_trial import Finding, listen, run

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
    """A batch that was appended, and the file and bytes it went to."""

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
        self.touched: dict[str, list[tuple[int, int]]] = {}

    def hits(self, batch: Written) -> bool:
        """Whether any byte of a batch was touched."""
        ranges = self.touched.get(batch.path, ())
        return batch.path in self.removed or any(start < batch.end and batch.start < end for start, end in ranges)


def open_store(files: MemoryFiles, clock: ManualClock) -> LogStore:
    """Open the folder as the broker does."""
    return LogStore.open(DATA, files=files, clock=clock, journal_bytes=20_000, producer_expiry_ms=3_600_000)


def open_logs(store: LogStore) -> list[Log]:
    """Every log of the folder."""
    return [
        store.open_log(UUID(int=1), TopicPartition("orders", PartitionIndex(index)), SETTINGS) for index in range(LOGS)
    ]


class Writer:
    """Writes to the logs of a store and remembers where everything went."""

    def __init__(self, chance: random.Random, clock: ManualClock) -> None:
        self._chance = chance
        self._clock = clock
        self._sequences = [0] * LOGS
        self.written: list[list[Written]] = [[] for _ in range(LOGS)]

    def append(self, number: int, log: Log) -> None:
        """Append one batch."""
        chance = self._chance
        records = [
            NewRecord(None, chance.randbytes(chance.choice((1, 20, 200))), (), self._clock.now_ms())
            for _ in range(chance.choice((1, 1, 2, 10)))
        ]
        sequence = self._sequences[number]
        batch = encode_batch(records, producer_id=number, producer_epoch=0, base_sequence=sequence)
        self._sequences[number] += len(records)
        appended = log.append(batch, leader_epoch=Epoch(0))
        segment = log.segments[-1]
        place = (segment.path, segment.size - len(batch), segment.size)
        self.written[number].append(Written(bytes(batch), appended.base_offset, appended.next_offset, *place))


def build(chance: random.Random, files: MemoryFiles, clock: ManualClock) -> tuple[list[list[Written]], list[int]]:
    """Write a folder and leave it, cleanly or not; returns what was written and where each log was committed up to."""
    writer = Writer(chance, clock)
    store = open_store(files, clock)
    logs = open_logs(store)
    for _ in range(chance.choice((3, 20, 60))):
        step = chance.random()
        number = chance.randrange(LOGS)
        if step < 0.7:
            for at in {chance.randrange(LOGS) for _ in range(chance.choice((1, 3, LOGS)))}:
                writer.append(at, logs[at])
                store.sync_soon(logs[at])
        elif step < 0.9:
            store.commit_once()
        elif step < 0.97:
            store.checkpoint_soon(logs[number])
            store.checkpoint_once()
        elif logs[number].synced_offset:
            logs[number].delete_before(chance.randint(logs[number].start_offset, logs[number].synced_offset))
        clock.advance_ms(1000)
    if chance.random() < 0.5:
        store.close_now()
        committed = [int(log.end_offset) for log in logs]
    else:
        committed = [int(log.synced_offset) for log in logs]
        files.kill()
    kept = [
        [batch for batch in batches if batch.next_offset > log.start_offset]
        for batches, log in zip(writer.written, logs, strict=True)
    ]
    return kept, committed


def harm(chance: random.Random, files: MemoryFiles) -> Damage:
    """Break some files."""
    damage = Damage()
    paths = [path for path in files.walk() if not path.endswith(_UNTOUCHED)]
    for _ in range(chance.choice((1, 1, 2, 5))):
        path = chance.choice(paths)
        if path in damage.removed:
            continue
        size = len(files.content(path))
        touched = damage.touched.setdefault(path, [])
        kind = chance.choice(("flip", "flip", "zero", "cut", "extend", "remove"))
        if kind == "remove":
            files.remove(path)
            damage.removed.add(path)
        elif kind == "extend":
            overwrite(files, path, size, chance.randbytes(chance.choice((1, 11, 70, 600))))
            touched.append((size, 2**62))
        elif kind == "cut":
            at = chance.randint(0, size)
            cut(files, path, at)
            touched.append((at, 2**62))
        elif size:
            at = chance.randrange(size)
            end = at + 1 if kind == "flip" else min(size, at + chance.choice((4, 40, 512)))
            old = files.content(path)[at:end]
            overwrite(
                files, path, at, bytes([old[0] ^ 1 << chance.randrange(8)]) if kind == "flip" else bytes(end - at)
            )
            touched.append((at, end))
    return damage


def overwrite(files: MemoryFiles, path: str, position: int, data: bytes) -> None:
    """Change bytes of a file behind the broker's back."""
    descriptor = files.open(path)
    files.write_at(descriptor, data, position)
    files.close(descriptor)


def cut(files: MemoryFiles, path: str, size: int) -> None:
    """Cut a file off."""
    descriptor = files.open(path)
    files.truncate(descriptor, size)
    files.close(descriptor)


def read_all(log: Log) -> dict[int, bytes]:
    """Every batch that the log serves, by its base offset; what it refuses is left out, offset by offset."""
    found: dict[int, bytes] = {}
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
            found[header.base_offset] = data[header.position : header.position + header.length + 12]
            after = header.base_offset + header.last_offset_delta + 1
        if after <= offset:
            raise Finding(f"{log}: a read at {offset} ended at {after}")
        offset = after
    return found


def _checked(content: bytes) -> bytes:
    """What a checksum, or the place of the batch, can vouch for: all but the leader epoch."""
    return content[:_EPOCH_FROM] + content[_EPOCH_TO:]


def compare(log: Log, written: list[Written], committed: int, damage: Damage) -> dict[int, bytes]:
    """Compare what is read with what was written; return what was read."""
    found = read_all(log)
    by_offset = {batch.base_offset: batch for batch in written}
    for base_offset, content in found.items():
        batch = by_offset.get(base_offset)
        # Below the start that DeleteRecords set, batches may come back with the ledger; those were written, too.
        if batch is not None and _checked(batch.content) != _checked(content):
            raise Finding(f"{log}: the batch at {base_offset} is not what was written")
    for batch in written:
        if batch.next_offset > committed or damage.hits(batch) or batch.base_offset in found:
            continue
        if batch.next_offset <= log.start_offset:
            raise Finding(f"{log}: the start went beyond {batch.base_offset}, which was not deleted")
        raise Finding(f"{log}: {batch} was not touched and is gone; damage {log.damaged_ranges}, done {damage.touched}")
    return found


def write_again(store: LogStore, log: Log, damage: Damage) -> dict[int, bytes]:
    """Check that a recovered log accepts writes and returns them; return what was written, by its offset."""
    batch = encode_batch([NewRecord(None, b"after", (), 1)])
    try:
        appended = log.append(batch, leader_epoch=Epoch(0))
    except MillstreamError:
        # Refused with a reason: the file that it should go to was taken away after a clean stop, or an epoch in it
        # was changed, which no checksum covers.
        if any(path.startswith(log.directory + "/") for path in damage.touched):
            return {}
        raise
    store.sync_soon(log)
    store.commit_once()
    if log.synced_offset != appended.next_offset:
        raise Finding(f"{log}: a write after recovery was not committed")
    if bytes(log.read(appended.base_offset, max_bytes=1, up_to=log.end_offset)) != bytes(batch):
        raise Finding(f"{log}: a write after recovery reads differently")
    return {int(appended.base_offset): bytes(batch)}


def example(chance: random.Random) -> int:
    """Build, break, open and compare."""
    files, clock = MemoryFiles(chance.getrandbits(32), open_files_max=chance.choice((16, 64))), ManualClock()
    written, committed = build(chance, files, clock)
    damage = harm(chance, files)
    try:
        store = open_store(files, clock)
    except MillstreamError:
        return 0
    served = [
        compare(log, batches, end, damage) | write_again(store, log, damage)
        for log, batches, end in zip(open_logs(store), written, committed, strict=True)
    ]
    if chance.random() < 0.5:
        store.close_now()
    else:
        files.kill()
    for log, before in zip(open_logs(open_store(files, clock)), served, strict=True):
        # More may be there: a write behind the end of a file that was cut can make the file whole again.
        if not before.items() <= read_all(log).items():
            raise Finding(f"{log}: another start serves less than the one before, or something else")
    return sum(map(len, written))


def main() -> int:
    """Run the fuzzer."""
    collected = listen()

    def checked(chance: random.Random) -> int:
        tried = example(chance)
        collected.check()
        return tried

    return run("trials.fuzz_recovery", checked)


if __name__ == "__main__":
    sys.exit(main())
