"""The scrub finds damage that no client reads, continues after a restart, and notices repairs."""

from __future__ import annotations

from collections.abc import Callable
from errno import EIO
from uuid import UUID

import pytest

from millstream.broker.log import scan as scan_module
from millstream.broker.log import scrub as scrub_module
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles

OpenStore = Callable[[], LogStore]

SETTINGS = TopicSettings(segment_bytes=2000, index_interval_bytes=400)
BASE_OFFSET_AT, LENGTH_AT, EPOCH_AT, PAYLOAD_AT = 7, 11, 15, 120


def open_log(store: LogStore, number: int) -> Log:
    log = store.open_log(UUID(int=number + 1), TopicPartition(f"topic-{number}", PartitionIndex(0)), SETTINGS)
    if not log.end_offset:
        for value in range(40):
            log.append(encode_batch([NewRecord(None, b"%0100d" % value, (), 1000)]), leader_epoch=Epoch(value // 7))
        store.sync_soon(log)
        store.commit_once()
        store.checkpoint_now(log)
    return log


@pytest.fixture
def logs(store: LogStore) -> list[Log]:
    return [open_log(store, number) for number in range(3)]


def scrub(store: LogStore) -> int:
    """Run one pass; return the number of steps."""
    steps = 0
    while store.scrub_once():
        steps += 1
    return steps


def place_of(log: Log, offset: int) -> tuple[str, int]:
    segment = log.segments.containing(offset)
    return segment.path, log.reader.locate(segment, offset)


def test_a_pass_over_intact_logs_finds_nothing(store: LogStore, logs: list[Log]) -> None:
    assert scrub(store) == sum(len(log.segments) for log in logs)
    assert scrub(store) == sum(len(log.segments) for log in logs)
    assert list(store.damage()) == []


@pytest.mark.parametrize("at", [BASE_OFFSET_AT, LENGTH_AT, EPOCH_AT, PAYLOAD_AT])
def test_damage_in_unread_batches_is_found(store: LogStore, logs: list[Log], files: MemoryFiles, at: int) -> None:
    for path, position in [place_of(log, offset) for log in logs for offset in (0, 17, 39)]:
        files.flip_bit(path, position + at, 0)
    scrub(store)
    assert [log.damaged_ranges for log in logs] == [((0, 1), (17, 18), (39, 40))] * 3


def test_truncated_and_removed_files_are_found(store: LogStore, logs: list[Log], files: MemoryFiles) -> None:
    cut, removed = logs[0].segments[0], logs[1].segments[1]
    descriptor = files.open(cut.path)
    files.truncate(descriptor, cut.size - 1)
    files.remove(removed.path)
    scrub(store)
    assert logs[0].damaged_ranges == ((cut.next_offset - 1, cut.next_offset),)
    assert logs[1].damaged_ranges == ((removed.base_offset, removed.next_offset),)
    scrub(store)
    assert len(logs[1].damage) == 1


def test_repaired_batches_are_served_again(store: LogStore, logs: list[Log], files: MemoryFiles) -> None:
    path, position = place_of(logs[0], 5)
    files.flip_bit(path, position + PAYLOAD_AT, 3)
    scrub(store)
    assert logs[0].damaged_ranges == ((5, 6),)
    scrub(store)
    assert logs[0].damaged_ranges == ((5, 6),)
    files.flip_bit(path, position + PAYLOAD_AT, 3)
    scrub(store)
    assert not logs[0].damage
    assert b"%0100d" % 5 in bytes(logs[0].read(5, max_bytes=1, up_to=40))


def test_a_restored_file_of_any_size_is_served_again(
    store: LogStore, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "STEP_BYTES", 500)
    log = open_log(store, 0)
    removed = log.segments[1]
    content = files.content(removed.path)
    files.remove(removed.path)
    scrub(store)
    assert log.damaged_ranges == ((removed.base_offset, removed.next_offset),)
    descriptor = files.open(removed.path, create=True)
    files.write_at(descriptor, content, 0)
    scrub(store)
    assert not log.damage
    assert log.read(removed.base_offset, max_bytes=10_000, up_to=removed.next_offset) == content


@pytest.mark.parametrize("has_replicas", [True, False])
@pytest.mark.parametrize("is_disk_dead", [True, False])
def test_an_unreadable_sector_is_reported_and_the_rest_is_verified(
    store: LogStore,
    logs: list[Log],
    files: MemoryFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_replicas: bool,
    is_disk_dead: bool,
) -> None:
    """It is lost, unless the whole file is unreadable: another replica may have it, or it may be readable later."""
    monkeypatch.setattr(scan_module, "_SECTOR_BYTES", 50)
    log = logs[0]
    log.damage.has_replicas = has_replicas
    path, position = place_of(log, 17)
    behind = place_of(log, 19)
    assert behind[0] == path
    unreadable = files._file(path)
    read_at = files.read_at

    def fail_to_read(descriptor: int, size: int, at: int, /) -> bytes:
        is_bad = is_disk_dead or at <= position + PAYLOAD_AT < at + size
        if files._opened(descriptor) is unreadable and is_bad:
            raise OSError(EIO, "Input/output error")
        return read_at(descriptor, size, at)

    monkeypatch.setattr(files, "read_at", fail_to_read)
    files.flip_bit(path, behind[1] + PAYLOAD_AT, 1)
    scrub(store)
    if is_disk_dead:
        (segment,) = [segment for segment in log.segments if segment.path == path]
        assert log.damaged_ranges == (((segment.base_offset, segment.next_offset),) if has_replicas else ())
    else:
        assert log.damaged_ranges == ((17, 18), (19, 20))
    (reported,) = [record for record in caplog.records if record.message == "a segment cannot be read"]
    assert (vars(reported)["topic"], vars(reported)["partition"]) == ("topic-0", 0)
    (counted,) = [metric for metric in store.metrics() if metric.name == "millstream_log_scrub_read_errors_total"]
    assert [sample.value for sample in counted.samples] == [1]


def test_a_pass_continues_after_a_restart(
    store: LogStore, logs: list[Log], open_store: OpenStore, clock: ManualClock
) -> None:
    steps = scrub(store)
    clock.advance_ms(1)
    for _ in range(5):
        assert store.scrub_once()
    store._scrubber.save_progress()
    store.close_now()
    again = open_store()
    for number in range(3):
        open_log(again, number)
    assert again._scrubber.wait_s == 0
    # The segment in progress is scanned once more.
    assert scrub(again) == steps - 4
    again._scrubber.save_progress()
    assert again._scrubber.wait_s > 0
