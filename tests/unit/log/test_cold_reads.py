"""Data that is read again is verified again: after a write by another process, and periodically without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from errno import EIO
from pathlib import Path
from uuid import UUID

import pytest

from millstream.broker.log import scan as scan_module
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.log import Log
from millstream.broker.log.reader import VERIFIED_S
from millstream.broker.log.segment import FRESH_S
from millstream.broker.log.segment_slice import BrokenSegment
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.errors import InspectionPending, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import BatchHeader
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import read_log, running

SETTINGS = TopicSettings(segment_bytes=2000, index_interval_bytes=400)
COUNT = 40
BASE_OFFSET_AT, LENGTH_AT, EPOCH_AT, PAYLOAD_AT = 7, 11, 15, 120


@pytest.fixture
def log(store: LogStore) -> Log:
    log = store.open_log(UUID(int=5), TopicPartition("orders", PartitionIndex(0)), SETTINGS)
    for number in range(COUNT):
        log.append(encode_batch([NewRecord(None, b"%0100d" % number, (), 1000)]), leader_epoch=Epoch(0))
    assert len(log.segments) == 4
    return log


def read_all(log: Log) -> tuple[list[int], list[tuple[int, int]]]:
    """The served values, one batch each, and the refused ranges."""
    served, lost = read_log(log, max_bytes=500)
    return [int(record.value or b"") for record in decode_records(served)], lost


def place_of(log: Log, offset: int) -> tuple[str, int]:
    segment = log.segments.containing(offset)
    return segment.path, log.reader.locate(segment, offset)


def without(*offsets: int) -> tuple[list[int], list[tuple[int, int]]]:
    return [number for number in range(COUNT) if number not in offsets], [(offset, offset + 1) for offset in offsets]


@pytest.mark.parametrize("at", [BASE_OFFSET_AT, LENGTH_AT, EPOCH_AT, PAYLOAD_AT])
@pytest.mark.parametrize("offset", [0, 5, 11, 25])
def test_a_write_by_another_process_is_detected_at_once(log: Log, files: MemoryFiles, offset: int, at: int) -> None:
    assert read_all(log) == without()
    path, position = place_of(log, offset)
    old = files.content(path)[position + at]
    files.overwrite(path, position + at, bytes([old ^ 0x21]))
    assert read_all(log) == without(offset)


def test_a_flipped_bit_is_detected_after_a_while(log: Log, files: MemoryFiles, clock: ManualClock) -> None:
    assert read_all(log) == without()
    path, position = place_of(log, 5)
    files.flip_bit(path, position + PAYLOAD_AT, 0)
    clock.advance_ms(int(VERIFIED_S * 1000) + 1)
    assert read_all(log) == without(5)


def test_the_end_of_the_active_segment_is_verified_unless_just_written(
    log: Log, files: MemoryFiles, clock: ManualClock
) -> None:
    assert read_all(log) == without()
    path, position = place_of(log, COUNT - 1)
    files.flip_bit(path, position + PAYLOAD_AT, 0)
    clock.advance_ms(int(FRESH_S * 2000) + 1)
    log.segments[-1].forget_verified()
    assert read_all(log) == without(COUNT - 1)


def test_just_written_batches_are_read_without_verification(log: Log, files: MemoryFiles, clock: ManualClock) -> None:
    read_all(log)
    for number in range(5):
        clock.advance_ms(int(FRESH_S * 600))
        log.append(encode_batch([NewRecord(None, b"%d" % number, (), 1000)]), leader_epoch=Epoch(0))
        reads = files.reads
        log.read(log.end_offset - 1, max_bytes=500, up_to=log.end_offset)
        assert files.reads == reads + 1


def test_a_write_between_the_response_header_and_its_data_is_detected(log: Log, files: MemoryFiles) -> None:
    chunk = log.read_slice(0, max_bytes=1500, up_to=log.end_offset, eager_bytes=0)
    assert chunk is not None
    path, position = place_of(log, 5)
    files.overwrite(path, position + PAYLOAD_AT, b"x")
    with pytest.raises(BrokenSegment):
        chunk.read(0, chunk.size)
    assert read_all(log) == without(5)


def test_a_write_of_identical_bytes_does_not_affect_a_response(log: Log, files: MemoryFiles) -> None:
    chunk = log.read_slice(0, max_bytes=1500, up_to=log.end_offset, eager_bytes=0)
    assert chunk is not None
    segment = log.segments[0]
    files.overwrite(segment.path, 0, files.content(segment.path)[:100])
    assert len(chunk.read(0, chunk.size)) == chunk.size


def test_a_removed_file_is_lost_and_later_batches_are_served(log: Log, files: MemoryFiles) -> None:
    read_all(log)
    gone = log.segments[1]
    log.open_files._close(gone)
    files.remove(gone.path)
    served, lost = read_all(log)
    assert lost == [(gone.base_offset, gone.next_offset)]
    assert served == [number for number in range(COUNT) if not gone.base_offset <= number < gone.next_offset]


# -- unreadable sectors -------------------------------------------------------------------------------------------


@pytest.fixture
def harm(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, range], None]:
    """Make some bytes of a file unreadable."""
    monkeypatch.setattr(scan_module, "_SECTOR_BYTES", 50)
    read_at = files.read_at

    def harm(path: str, bad: range) -> None:
        harmed = files._file(path)

        def fail_to_read(descriptor: int, size: int, at: int, /) -> bytes:
            if files._opened(descriptor) is harmed and at < bad.stop and bad.start < at + size:
                raise OSError(EIO, "Input/output error")
            return read_at(descriptor, size, at)

        monkeypatch.setattr(files, "read_at", fail_to_read)

    return harm


def test_an_unreadable_sector_is_damage(log: Log, clock: ManualClock, harm: Callable[[str, range], None]) -> None:
    clock.advance_ms(int(VERIFIED_S * 1000) + 1)
    path, position = place_of(log, 17)
    harm(path, range(position + PAYLOAD_AT, position + PAYLOAD_AT + 1))
    assert read_all(log) == without(17)
    assert log.damaged_ranges == ((17, 18),)


def test_an_unreadable_file_is_not_skipped(
    log: Log, clock: ManualClock, harm: Callable[[str, range], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.advance_ms(int(VERIFIED_S * 1000) + 1)
    path, _ = place_of(log, 17)
    with monkeypatch.context():
        harm(path, range(1 << 30))
        with pytest.raises(StorageFailure, match="Input/output error"):
            read_all(log)
    assert log.damaged_ranges == ()


def overwrite(path: str, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"?")


def damaged(store: LogStore) -> tuple[Log, asyncio.Event]:
    """A log with a damaged batch that was not found yet, and an event for the end of the search."""
    log = store.open_log(UUID(int=5), TopicPartition("orders", PartitionIndex(0)), SETTINGS)
    for number in range(COUNT):
        log.append(encode_batch([NewRecord(None, b"%0100d" % number, (), 1000)]), leader_epoch=Epoch(0))
    path, position = place_of(log, 17)
    overwrite(path, position + PAYLOAD_AT)
    log.segments.containing(17).forget_verified()
    looked_again = asyncio.Event()
    log.damage.on_change = looked_again.set
    return log, looked_again


async def test_damage_is_located_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DiskFiles()
    store = LogStore.open(tmp_path, files=files, clock=SystemClock(), journal_bytes=1 << 20, producer_expiry_ms=10**9)
    async with running(store):
        log, looked_again = damaged(store)
        scanned_in: list[bool] = []
        scan = scan_module.Scan.__iter__
        loop_thread = threading.get_ident()

        def counted(scanning: scan_module.Scan) -> Iterator[BatchHeader | scan_module.BadRange]:
            scanned_in.append(threading.get_ident() == loop_thread)
            return scan(scanning)

        monkeypatch.setattr(scan_module.Scan, "__iter__", counted)
        for _ in range(3):
            # Until it is located, nothing is skipped, and nothing is read twice.
            with pytest.raises(InspectionPending, match="determining which offsets are lost"):
                log.read(17, max_bytes=500, up_to=log.end_offset)
        await looked_again.wait()
        assert scanned_in == [False]
        assert read_all(log) == without(17)


async def test_batches_truncated_during_the_check_are_not_reported_as_lost(tmp_path: Path) -> None:
    store = LogStore.open(
        tmp_path, files=DiskFiles(), clock=SystemClock(), journal_bytes=1 << 20, producer_expiry_ms=10**9
    )
    async with running(store):
        log, looked_again = damaged(store)
        with pytest.raises(InspectionPending):
            log.read(17, max_bytes=500, up_to=log.end_offset)
        log.truncate_to(5)
        for number in range(5, COUNT):
            log.append(encode_batch([NewRecord(None, b"%0100d" % number, (), 1000)]), leader_epoch=Epoch(0))
        await looked_again.wait()
        assert read_all(log) == without()
