"""Batches of another replica replace a lost range; a crash leaves the range lost or restored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from millstream.broker.log.log import Log
from millstream.broker.log.range_repair import RangeRepair, fit_batches
from millstream.broker.log.scan import BadRange, Scan
from millstream.broker.log.store import LogStore
from millstream.core.errors import CorruptBatch, LogUnavailable, MillstreamError, MismatchedBatch, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import BatchHeader, place_batch, read_header
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream.protocol.records.rewrite import empty_batch
from millstream_testing.batches import encode_values
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

PARTITION = TopicPartition("orders", PartitionIndex(0))
SETTINGS = TopicSettings(segment_bytes=2000, index_interval_bytes=400)
COUNT = 40
PAYLOAD_AT = 120


def open_log(files: MemoryFiles) -> tuple[LogStore, Log]:
    store = memory_store(files)
    return store, store.open_log(UUID(int=1), PARTITION, SETTINGS)


def fill(store: LogStore, log: Log) -> None:
    for number in range(COUNT):
        log.append(encode_values(b"%0100d" % number), leader_epoch=Epoch(number // 7))
    store.sync_soon(log)
    store.commit_once()
    store.checkpoint_now(log)


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles(3, open_files_max=64)


@pytest.fixture
def opened(files: MemoryFiles) -> tuple[LogStore, Log]:
    store, log = open_log(files)
    fill(store, log)
    return store, log


def lose(files: MemoryFiles, store: LogStore, log: Log, *offsets: int) -> dict[int, bytes]:
    """Damage batches on the disk; return their original bytes."""
    contents = {offset: bytes(log.read(offset, max_bytes=1, up_to=COUNT)) for offset in offsets}
    for path, position in [(log.segments.containing(offset).path, place_of(log, offset)) for offset in offsets]:
        files.flip_bit(path, position + PAYLOAD_AT, 2)
    while store.scrub_once():
        pass
    assert {first for first, _ in log.damaged_ranges} <= contents.keys()
    return contents


def place_of(log: Log, offset: int) -> int:
    return log.reader.locate(log.segments.containing(offset), offset)


def repair_range(store: LogStore, log: Log, batches: bytes, *, lost: int = 0) -> None:
    bad_range = list(log.damage)[lost]
    fitted, next_offset = fit_batches(log, bad_range, batches)
    job = RangeRepair(log, bad_range, fitted, next_offset)
    job.execute()
    job.finish()
    assert job.error is None
    while store.checkpoint_once():
        pass


def values(log: Log, expected: Callable[[int], bytes] = lambda number: b"%0100d" % number) -> list[int]:
    """The served offsets, checked for their values."""
    offsets: list[int] = []
    offset = int(log.start_offset)
    while offset < log.end_offset:
        try:
            data = log.read(offset, max_bytes=700, up_to=log.end_offset)
        except MillstreamError:
            offset += 1
            continue
        records = [record for record in decode_records(data) if record.offset >= offset]
        assert [record.value for record in records] == [expected(record.offset) for record in records]
        offsets += [record.offset for record in records]
        offset = records[-1].offset + 1 if records else offset + 1
    return offsets


@pytest.mark.parametrize("offset", [0, 17, COUNT - 1])
def test_identical_bytes_are_written_in_place(opened: tuple[LogStore, Log], files: MemoryFiles, offset: int) -> None:
    store, log = opened
    data = lose(files, store, log, offset)
    sizes = [(segment.path, segment.size) for segment in log.segments]
    repair_range(store, log, data[offset])
    assert values(log) == list(range(COUNT))
    assert [(segment.path, segment.size) for segment in log.segments] == sizes
    store.close_now()
    assert values(open_log(files)[1]) == list(range(COUNT))


@pytest.mark.parametrize("offset", [0, 13, 17, COUNT - 1])
def test_different_bytes_replace_the_segment_and_its_other_damage_stays(
    opened: tuple[LogStore, Log], files: MemoryFiles, offset: int
) -> None:
    """As a compacted replica has them: an empty batch instead of several."""
    store, log = opened
    lose(files, store, log, offset, 15)
    at = [first for first, _ in log.damaged_ranges].index(offset)
    epoch = log.epochs.epoch_at(offset)
    first = max(0, offset - 2) if log.epochs.epoch_at(max(0, offset - 2)) == epoch else offset
    repair_range(store, log, bytes(empty_batch(first, offset + 1, epoch)), lost=at)
    assert log.damaged_ranges == ((15, 16),)
    whole = [number for number in range(COUNT) if number not in (offset, 15)]
    assert values(log) == whole
    log.append(encode_values(b"%0100d" % COUNT), leader_epoch=Epoch(9))
    assert values(log) == [*whole, COUNT]
    store.close_now()
    again = open_log(files)[1]
    assert again.damaged_ranges == ((15, 16),)
    assert values(again) == [*whole, COUNT]


def test_a_range_may_be_restored_in_parts(opened: tuple[LogStore, Log], files: MemoryFiles) -> None:
    store, log = opened
    segment = log.segments[1]
    data = bytes(log.read(segment.base_offset, max_bytes=10_000, up_to=segment.next_offset))
    files.remove(segment.path)
    while store.scrub_once():
        pass
    part = len(data) // (segment.next_offset - segment.base_offset) * 4
    repair_range(store, log, data[:part])
    assert log.damaged_ranges == ((segment.base_offset + 4, segment.next_offset),)
    repair_range(store, log, data[part:])
    assert not log.damage
    assert values(log) == list(range(COUNT))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_same", [True, False])
def test_a_power_failure_leaves_the_range_lost_or_restored(seed: int, is_same: bool) -> None:
    files = MemoryFiles(seed, open_files_max=64)
    store, log = open_log(files)
    fill(store, log)
    data = lose(files, store, log, 17)
    store.checkpoint_now(log)
    (lost,) = log.damage
    fitted, next_offset = fit_batches(log, lost, data[17] if is_same else bytes(empty_batch(17, 18, 2)))
    job = RangeRepair(log, lost, fitted, next_offset)
    job.execute()
    job.finish()
    assert job.error is None
    if seed % 2:
        store.checkpoint_now(log)
    files.crash()
    again = open_log(files)[1]
    expected = [number for number in range(COUNT) if number != 17]
    if is_same and not again.damage:
        expected = list(range(COUNT))
    if seed % 2:
        assert not again.damage
    assert values(again) == expected


def test_batches_that_cannot_have_been_there_are_refused(opened: tuple[LogStore, Log], files: MemoryFiles) -> None:
    store, log = opened
    data = lose(files, store, log, 17)
    (lost,) = log.damage
    right = data[17]
    wrong_crc = right[:-1] + b"?"
    wrong_offset = b"\0" * 7 + b"\x13" + right[8:]
    wrong_epoch = right[:12] + b"\0\0\0\x05" + right[16:]
    with pytest.raises(CorruptBatch):
        fit_batches(log, lost, wrong_crc)
    for batches in (wrong_offset, wrong_epoch):
        with pytest.raises(MismatchedBatch):
            fit_batches(log, lost, batches)
    assert fit_batches(log, lost, right) == (right, 18)


def test_a_failing_disk_leaves_the_range_lost(opened: tuple[LogStore, Log], files: MemoryFiles) -> None:
    store, log = opened
    data = lose(files, store, log, 17)
    (lost,) = log.damage
    job = RangeRepair(log, lost, data[17], 18)
    files.fail_next_writes(".log")
    job.execute()
    job.finish()
    assert job.error is not None
    assert log.damaged_ranges == ((17, 18),)
    repair_range(store, log, data[17])
    assert values(log) == list(range(COUNT))


@pytest.mark.parametrize("offset", [17, COUNT - 1])
def test_records_written_after_a_truncation_are_not_overwritten(
    opened: tuple[LogStore, Log], files: MemoryFiles, offset: int
) -> None:
    """The repair waits for its thread while a follower truncates the same file and appends other records."""
    store, log = opened
    data = lose(files, store, log, offset)
    (lost,) = log.damage
    job = RangeRepair(log, lost, data[offset], offset + 1)
    log.truncate_to(offset)
    for number in range(offset, COUNT):
        log.append(encode_values(b"%0100d" % (number + 100)), leader_epoch=Epoch(9))
    job.execute()
    job.finish()
    assert isinstance(job.error, LogUnavailable)
    assert not isinstance(job.error, StorageFailure)
    with pytest.raises(LogUnavailable):
        fit_batches(log, lost, data[offset])
    store.sync_soon(log)
    store.commit_once()
    files.kill()
    again = open_log(files)[1]
    assert values(again, lambda number: b"%0100d" % (number if number < offset else number + 100)) == list(range(COUNT))


def test_a_log_that_was_truncated_meanwhile_has_not_diverged(opened: tuple[LogStore, Log], files: MemoryFiles) -> None:
    """Otherwise what a follower has fetched again since, which its leader may count on, would be truncated."""
    store, log = opened
    lose(files, store, log, 17, 18)
    (lost,) = log.damage
    log.truncate_to(17)
    of_leader = bytearray()
    for offset, epoch in ((17, 9), (18, 10)):
        of_leader += (batch := encode_values(b"%0100d" % (offset + 100)))
        place_batch(of_leader, read_header(of_leader, len(of_leader) - len(batch)), offset, epoch)
    log.append(encode_values(b"%0100d" % 117), leader_epoch=Epoch(9))
    with pytest.raises(LogUnavailable):
        fit_batches(log, lost, bytes(of_leader))


async def test_in_place_writes_and_truncations_share_a_thread() -> None:
    files = ThreadFiles(3, open_files_max=64)
    store, log = open_log(files)
    fill(store, log)
    data = lose(files, store, log, 17)
    (lost,) = log.damage
    files.threads.clear()
    mending = asyncio.ensure_future(store.repair_range(RangeRepair(log, lost, data[17], 18)))
    await asyncio.sleep(0)
    cut = log.begin_truncation(16)
    assert cut is not None
    await store.truncate_soon(cut)
    with pytest.raises(LogUnavailable):
        await mending
    assert files.threads
    assert len(files.threads) == 1
    await store.close()


class ThreadFiles(MemoryFiles):
    """Files that record which threads change segments."""

    def __init__(self, seed: int, *, open_files_max: int) -> None:
        super().__init__(seed, open_files_max=open_files_max)
        self.threads: set[int] = set()

    def sync(self, descriptor: int, /) -> None:
        self.threads.add(threading.get_ident())
        super().sync(descriptor)


def numbered(number: int) -> bytearray:
    record = NewRecord(None, b"%0100d" % number, (), 1000)
    return encode_batch([record], producer_id=7, producer_epoch=0, base_sequence=number)


def lose_unread(files: MemoryFiles) -> tuple[LogStore, Log, bytes]:
    """A log with a producer's batch that recovery could not read, and the original batch."""
    store, log = open_log(files)
    ranges = []
    for number in range(4):
        batch = numbered(number)
        log.append(batch, leader_epoch=Epoch(0))
        ranges.append(bytes(batch))
    store.sync_soon(log)
    store.commit_once()
    path, position = log.segments[0].path, place_of(log, 2)
    files.kill()
    files.flip_bit(path, position + PAYLOAD_AT, 1)
    store, log = open_log(files)
    assert [(lost.start, lost.unread) for lost in log.damage] == [(2, True)]
    return store, log, ranges[2]


def written(log: Log) -> list[int]:
    producer = log.producers.get(7)
    assert producer is not None
    return [batch.base_offset for batch in producer.batches]


def test_producer_state_that_recovery_could_not_read_is_restored_by_a_repair(files: MemoryFiles) -> None:
    """Otherwise the marker of a transaction would be missed, and so would a sequence."""
    store, log, data = lose_unread(files)
    repair_range(store, log, data)
    assert written(log) == [0, 1, 2, 3]


async def test_producer_state_is_restored_in_a_thread_during_appends(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, log, data = lose_unread(files)
    (lost,) = log.damage
    loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
    is_appended, read_on_loop = threading.Event(), []
    scan = Scan.__iter__

    def append() -> None:
        log.append(numbered(4), leader_epoch=Epoch(0))
        is_appended.set()

    def scan_and_append(one: Scan) -> Iterator[BatchHeader | BadRange]:
        if threading.get_ident() == loop_thread:
            read_on_loop.append(one.window.end - one.position)
        else:
            loop.call_soon_threadsafe(append)
            assert is_appended.wait(60)
        return scan(one)

    monkeypatch.setattr(Scan, "__iter__", scan_and_append)
    await store.repair_range(RangeRepair(log, lost, data, 3))
    assert not log.damage
    assert written(log) == [0, 1, 2, 3, 4]
    # Only the batches appended meanwhile.
    assert read_on_loop == [len(numbered(4))]
    await store.close()
