"""One log: which batches it accepts and refuses, how it rolls, and what it returns."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.log.log import Log
from millstream.broker.log.reader import LIGHT_RECORDS_MAX
from millstream.broker.log.retention import held_bytes
from millstream.broker.log.store import LogStore
from millstream.core.errors import (
    BatchTooLarge,
    CorruptBatch,
    FencedLeaderEpoch,
    InvalidBatch,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionClosed,
    StorageFailure,
)
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import (
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_ZSTD,
    iterate_headers,
    read_header,
)
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.batches import encode_values
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles

TOPIC_ID = UUID(int=3)
EPOCH = Epoch(0)


def open_log(store: LogStore, settings: TopicSettings | None = None) -> Log:
    return store.open_log(TOPIC_ID, TopicPartition("orders", PartitionIndex(0)), settings or TopicSettings())


@pytest.fixture
def log(store: LogStore) -> Log:
    return open_log(store)


# -- appending ----------------------------------------------------------------------------------------------


def test_batches_get_their_offsets_and_epoch_in_place(log: Log) -> None:
    first = log.append(encode_values(b"a", b"b"), leader_epoch=Epoch(4))
    batch = encode_values(b"c")
    second = log.append(batch, leader_epoch=Epoch(4))

    assert first[:2] == (0, 2)
    assert second == (2, 3, -1, 0, False)
    header = read_header(batch)
    assert (header.base_offset, header.leader_epoch) == (2, 4)
    assert [record.value for record in decode_records(log.read(0, max_bytes=1000, up_to=3))] == [b"a", b"b", b"c"]


def test_a_writable_view_is_accepted(log: Log) -> None:
    log.append(memoryview(encode_values(b"a")), leader_epoch=EPOCH)

    assert log.end_offset == 1


def test_the_broker_may_append_several_batches_and_markers(log: Log) -> None:
    appended = log.append(
        encode_values(b"a") + encode_values(b"b", b"c") + encode_values(b"d", control=True),
        leader_epoch=EPOCH,
        internal=True,
    )

    assert appended[:2] == (0, 4)
    assert [header.base_offset for header in iterate_headers(bytes(log.read(0, max_bytes=1000, up_to=9)))] == [0, 1, 3]


def corrupt() -> bytearray:
    batch = encode_values(b"a")
    batch[-1] ^= 1
    return batch


def wrong_count() -> bytearray:
    batch = encode_values(b"a")
    batch[57:61] = (2).to_bytes(4, "big")
    return with_crc(batch)


def with_crc(batch: bytearray) -> bytearray:
    from crc32c import crc32c

    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return batch


def with_offset() -> bytearray:
    batch = encode_values(b"a")
    batch[7] = 1
    return batch


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (bytearray(), InvalidBatch),
        (bytearray(10), CorruptBatch),
        (corrupt(), CorruptBatch),
        (encode_values(b"a")[:-1], CorruptBatch),
        (encode_values(b"a") + encode_values(b"b"), InvalidBatch),
        (encode_values(b"a", control=True), InvalidBatch),
        (wrong_count(), InvalidBatch),
        (with_offset(), InvalidBatch),
        (encode_values(b"a", producer_id=5), InvalidBatch),
        (encode_values(b"x" * 2000), BatchTooLarge),
    ],
    ids=["empty", "short", "crc", "cut", "two", "control", "count", "offset", "sequence", "large"],
)
def test_a_batch_that_clients_may_not_send_changes_nothing(
    store: LogStore, batch: bytearray, error: type[Exception]
) -> None:
    log = open_log(store, TopicSettings(max_message_bytes=1000))
    with pytest.raises(error):
        log.append(batch, leader_epoch=EPOCH)

    assert log.end_offset == 0
    assert log.append(encode_values(b"a"), leader_epoch=EPOCH).base_offset == 0


def test_a_retried_batch_gets_its_original_offsets(log: Log) -> None:
    log.append(encode_values(b"a"), leader_epoch=EPOCH)
    first = log.append(encode_values(b"b", b"c", producer_id=5, sequence=0), leader_epoch=EPOCH)
    again = log.append(encode_values(b"b", b"c", producer_id=5, sequence=0), leader_epoch=EPOCH)

    assert not first.duplicate
    assert again == (1, 3, -1, 0, True)
    assert log.end_offset == 3
    with pytest.raises(OutOfOrderSequence):
        log.append(encode_values(b"e", producer_id=5, sequence=3), leader_epoch=EPOCH)


def test_append_time_is_stamped_if_the_topic_says_so(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(message_timestamp_type="LogAppendTime"))
    appended = log.append(encode_values(b"a", b"b", timestamp_ms=5, producer_id=1, sequence=0), leader_epoch=EPOCH)
    clock.advance_ms(1000)
    again = log.append(encode_values(b"a", b"b", timestamp_ms=5, producer_id=1, sequence=0), leader_epoch=EPOCH)

    assert appended.append_time_ms == again.append_time_ms == clock.now_ms() - 1000
    records = list(decode_records(log.read(0, max_bytes=1000, up_to=2)))
    assert {record.timestamp_ms for record in records} == {appended.append_time_ms}
    assert log.offset_for_time(1, up_to=2) == (0, appended.append_time_ms, 0)


def test_an_append_with_an_older_leader_epoch_is_refused(log: Log) -> None:
    log.append(encode_values(b"a"), leader_epoch=Epoch(3))
    with pytest.raises(FencedLeaderEpoch):
        log.append(encode_values(b"b"), leader_epoch=Epoch(2))
    log.append(encode_values(b"c"), leader_epoch=Epoch(5))

    assert log.latest_epoch == 5
    assert log.end_of_epoch(3) == (3, 1)
    assert log.end_of_epoch(5) == (5, 2)
    assert log.end_of_epoch(6) == (-1, -1)


def test_a_closed_log_refuses(store: LogStore, log: Log) -> None:
    store.close_log(log)
    with pytest.raises(PartitionClosed):
        log.append(encode_values(b"a"), leader_epoch=EPOCH)
    with pytest.raises(PartitionClosed):
        log.read(0, max_bytes=1, up_to=0)
    with pytest.raises(PartitionClosed):
        log.offset_for_time(0, up_to=0)


def test_a_log_is_opened_once(store: LogStore, log: Log) -> None:
    with pytest.raises(StorageFailure, match="already open"):
        open_log(store)


# -- rolling ------------------------------------------------------------------------------------------------


def test_a_segment_rolls_by_size(store: LogStore, files: MemoryFiles) -> None:
    log = open_log(store, TopicSettings(segment_bytes=500))
    for _ in range(10):
        log.append(encode_values(b"x" * 100), leader_epoch=EPOCH)

    assert [segment.base_offset for segment in log.segments] == [0, 2, 4, 6, 8]
    assert all(segment.size <= 500 for segment in log.segments)
    assert sum(path.endswith(".log") for path in files.walk()) == 5


def test_a_segment_rolls_after_an_hour_of_appends(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store)
    for minutes in (0, 59, 1, 59):
        clock.advance_ms(minutes * 60_000)
        log.append(encode_values(b"x"), leader_epoch=EPOCH)

    assert [segment.base_offset for segment in log.segments] == [0, 2]


def test_a_batch_larger_than_a_segment_gets_its_own(store: LogStore) -> None:
    log = open_log(store, TopicSettings(segment_bytes=500))
    for size in (10, 2000, 10):
        log.append(encode_values(b"x" * size), leader_epoch=EPOCH)

    assert [segment.base_offset for segment in log.segments] == [0, 1, 2]
    assert len(bytes(log.read(1, max_bytes=1, up_to=3))) > 2000


def test_changed_settings_are_applied(store: LogStore) -> None:
    log = open_log(store)
    log.append(encode_values(b"x" * 100), leader_epoch=EPOCH)
    log.change_settings(TopicSettings(segment_bytes=150))
    log.append(encode_values(b"x" * 100), leader_epoch=EPOCH)

    assert len(log.segments) == 2


# -- reading ------------------------------------------------------------------------------------------------


def test_reads_respect_the_limits(log: Log) -> None:
    for value in (b"a", b"b", b"c", b"d"):
        log.append(encode_values(value, value), leader_epoch=EPOCH)
    size = len(encode_values(b"a", b"a"))

    def offsets(offset: int, max_bytes: int, up_to: int) -> list[int]:
        return [h.base_offset for h in iterate_headers(bytes(log.read(offset, max_bytes=max_bytes, up_to=up_to)))]

    assert offsets(0, 10_000, 8) == [0, 2, 4, 6]
    assert offsets(3, 10_000, 8) == [2, 4, 6]
    assert offsets(0, 0, 8) == [0]
    assert offsets(0, size, 8) == [0]
    assert offsets(0, 2 * size + 1, 8) == [0, 2]
    assert offsets(2, 10_000, 6) == [2, 4]
    assert offsets(2, 10_000, 5) == [2]
    assert offsets(2, 10_000, 3) == []
    assert offsets(8, 10_000, 8) == []
    for outside in (-1, 9):
        with pytest.raises(OffsetOutOfRange) as out:
            log.read(outside, max_bytes=10, up_to=8)
        assert (out.value.start, out.value.end) == (0, 8)


def test_sequential_reads_cost_one_file_read_each(store: LogStore, files: MemoryFiles) -> None:
    log = open_log(store)
    for number in range(100):
        log.append(encode_values(b"x" * 100, timestamp_ms=number), leader_epoch=EPOCH)
    log.read(0, max_bytes=1700, up_to=100)
    before, offset = files.reads, 10
    while offset < 100:
        for header in iterate_headers(bytes(log.read(offset, max_bytes=1700, up_to=100))):
            offset = header.next_offset
    # The first of these reads at an unexpected offset, which has to be searched.
    assert files.reads - before <= 10 + 1


def test_the_tail_is_found_after_a_roll(store: LogStore) -> None:
    log = open_log(store, TopicSettings(segment_bytes=200))
    for number in range(5):
        assert log.read(number, max_bytes=100, up_to=number) == b""
        log.append(encode_values(b"x" * 100), leader_epoch=EPOCH)
        assert len(log.read(number, max_bytes=100, up_to=number + 1)) > 100


async def test_timestamps_are_looked_up_in_log_order(log: Log) -> None:
    assert log.offset_for_time(0, up_to=9) is None
    assert await log.find_max_timestamp(up_to=9) is None
    for times in ([10, 30, 20], [5], [30, 40]):
        batch = encode_batch([NewRecord(None, b"v", (), time) for time in times])
        log.append(batch, leader_epoch=Epoch(1))

    assert log.offset_for_time(0, up_to=6) == (0, 10, 1)
    assert log.offset_for_time(15, up_to=6) == (1, 30, 1)
    assert log.offset_for_time(31, up_to=6) == (5, 40, 1)
    assert log.offset_for_time(31, up_to=5) is None
    assert log.offset_for_time(41, up_to=6) is None
    assert await log.find_max_timestamp(up_to=6) == (5, 40, 1)
    assert await log.find_max_timestamp(up_to=4) == (1, 30, 1)


@pytest.mark.parametrize("codec", [COMPRESSION_NONE, COMPRESSION_ZSTD])
async def test_a_large_batch_is_searched_beside_the_loop(log: Log, codec: int) -> None:
    count = LIGHT_RECORDS_MAX + 100
    for first in (0, count):
        times = [first + number for number in range(count)]
        log.append(
            encode_batch([NewRecord(None, b"", (), time) for time in times], compression=codec), leader_epoch=EPOCH
        )
    log.append(encode_batch([NewRecord(None, bytes(2**26), (), 9999)], compression=COMPRESSION_LZ4), leader_epoch=EPOCH)
    end = log.end_offset
    assert log.offset_for_time(count + 70, up_to=end) == (count, 2 * count - 1, EPOCH)
    assert await log.find_time(count + 70, up_to=end) == (count + 70, count + 70, EPOCH)
    assert await log.find_time(70, up_to=70) is None
    # Within a batch that decompresses to more than is allowed, nothing finer than the batch is known.
    assert await log.find_time(5000, up_to=end) == (2 * count, 9999, EPOCH)
    assert await log.find_max_timestamp(up_to=end) == (2 * count, 9999, EPOCH)
    assert await log.find_max_timestamp(up_to=end - 1) == (2 * count - 1, 2 * count - 1, EPOCH)


# -- a disk that fails --------------------------------------------------------------------------------------


def test_a_full_disk_refuses_writes_serves_reads_and_recovers(log: Log, files: MemoryFiles, store: LogStore) -> None:
    log.append(encode_values(b"a", producer_id=1, sequence=0), leader_epoch=EPOCH)
    files.capacity_bytes = files.capacity_bytes or sum(len(files.content(path)) for path in files.walk()) + 30
    with pytest.raises(StorageFailure, match=r"orders-0: writing \d+ bytes failed: No space left.*free space"):
        log.append(encode_values(b"b", producer_id=1, sequence=1), leader_epoch=EPOCH)

    assert log.end_offset == 1
    assert len(files.content(log.segments[0].path)) == log.segments[0].size
    assert log.read(0, max_bytes=100, up_to=1)
    assert list(store.failures) == [log.partition]
    files.capacity_bytes = None
    assert log.append(encode_values(b"b", producer_id=1, sequence=1), leader_epoch=EPOCH)[:2] == (1, 2)
    assert not store.failures


def test_a_full_disk_is_reported_until_what_it_refused_fits(
    log: Log, files: MemoryFiles, store: LogStore, clock: ManualClock
) -> None:
    files.capacity_bytes = sum(len(files.content(path)) for path in files.walk()) + 500
    with pytest.raises(StorageFailure):
        log.append(encode_values(b"x" * 5000), leader_epoch=EPOCH)
    log.append(encode_values(b"small"), leader_epoch=EPOCH)
    clock.advance_ms(3_600_000)
    assert list(store.failures) == [log.partition]
    files.capacity_bytes += 10_000
    assert not store.failures


def test_retention_frees_space_on_a_full_disk(store: LogStore, files: MemoryFiles, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(segment_bytes=5000, retention_ms=7_200_000, index_interval_bytes=100))
    for _ in range(30):
        log.append(encode_values(b"x" * 900, timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
        clock.advance_ms(600_000)
    store.sync_soon(log)
    store.commit_once()
    store.checkpoint_soon(log)
    store.checkpoint_once()
    files.capacity_bytes = sum(len(files.content(path)) for path in files.walk())
    with pytest.raises(StorageFailure):
        log.append(encode_values(b"x" * 900), leader_epoch=EPOCH)
    assert store.delete_expired() > 0
    while store.checkpoint_once():
        pass

    assert files.free_bytes("/data") > 0
    log.append(encode_values(b"x" * 900), leader_epoch=EPOCH)


def test_a_failed_write_leaves_nothing_behind(log: Log, files: MemoryFiles) -> None:
    log.append(encode_values(b"a"), leader_epoch=EPOCH)
    files.fail_next_writes(".log")
    with pytest.raises(StorageFailure):
        log.append(encode_values(b"b"), leader_epoch=EPOCH)
    log.append(encode_values(b"c"), leader_epoch=EPOCH)

    assert [record.value for record in decode_records(log.read(0, max_bytes=1000, up_to=2))] == [b"a", b"c"]


# -- deleting -----------------------------------------------------------------------------------------------


def test_old_segments_are_deleted_including_an_old_active_one(
    store: LogStore, clock: ManualClock, files: MemoryFiles
) -> None:
    log = open_log(store, TopicSettings(retention_ms=7_200_000))
    for _ in range(3):
        log.append(encode_values(b"x", timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
        clock.advance_ms(3_600_000)
    store.sync_soon(log)
    store.commit_once()

    assert store.delete_expired() > 0
    assert (log.start_offset, log.end_offset) == (1, 3)
    clock.advance_ms(7_200_000)
    store.delete_expired()
    assert (log.start_offset, log.end_offset) == (3, 3)
    while store.checkpoint_once():
        pass
    assert [path.rpartition("/")[2] for path in files.walk() if path.endswith(".log")] == [f"{3:020d}.log"]
    assert log.append(encode_values(b"y"), leader_epoch=EPOCH).base_offset == 3


def test_old_records_wait_for_subscriptions_for_a_limited_time(store: LogStore, clock: ManualClock) -> None:
    floor: list[int | None] = [1]
    settings = TopicSettings(retention_ms=1000, retention_until_delivered=True, retention_until_max_ms=100_000)
    log = open_log(store, settings)
    for _ in range(4):
        log.append(encode_values(b"x", timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
        log.roll()
    store.sync_soon(log)
    store.commit_once()
    clock.advance_ms(10_000)

    assert store.delete_expired() == 0, "as long as it is unknown what is needed, everything is kept"
    store.floors.delivery = lambda _partition: floor[0]
    store.delete_expired()
    assert log.start_offset == 1
    floor[0] = 3
    store.delete_expired()
    assert log.start_offset == 3
    clock.advance_ms(100_000)
    store.delete_expired()
    assert log.start_offset == 4, "a forgotten subscription does not fill the disk"


def test_old_records_wait_until_they_are_landed(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(retention_ms=1000, retention_until_landed=True, retention_until_max_ms=100_000))
    for _ in range(3):
        log.append(encode_values(b"x", timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
        log.roll()
    store.sync_soon(log)
    store.commit_once()
    clock.advance_ms(10_000)
    assert store.delete_expired() == 0, "nothing counts as landed before the first report"
    assert held_bytes(log, clock.now_ms()) == log.size_bytes
    store.floors.landed = lambda _partition: 2
    store.delete_expired()
    assert log.start_offset == 2
    clock.advance_ms(100_000)
    store.delete_expired()
    assert log.start_offset == 3, "a pipeline that stands still does not fill the disk"
    assert held_bytes(log, clock.now_ms()) == 0


def test_without_subscriptions_only_the_age_counts(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(retention_ms=1000, retention_until_delivered=True))
    store.floors.delivery = lambda _partition: None
    log.append(encode_values(b"x", timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
    store.sync_soon(log)
    store.commit_once()
    clock.advance_ms(10_000)
    store.delete_expired()
    assert log.start_offset == 1


def test_unsynced_segments_are_not_deleted(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(retention_ms=1000))
    log.append(encode_values(b"x", timestamp_ms=clock.now_ms()), leader_epoch=EPOCH)
    clock.advance_ms(10_000)

    assert store.delete_expired() == 0
    store.sync_soon(log)
    store.commit_once()
    assert store.delete_expired() > 0


def test_segments_beyond_the_size_limit_are_deleted(store: LogStore) -> None:
    log = open_log(store, TopicSettings(segment_bytes=500, retention_bytes=1000, retention_ms=-1))
    for _ in range(12):
        log.append(encode_values(b"x" * 100), leader_epoch=EPOCH)
    store.sync_soon(log)
    store.commit_once()
    before = log.size_bytes

    freed = store.delete_expired()
    assert freed == before - log.size_bytes > 0
    assert 1000 <= log.size_bytes < 1000 + 500


def test_a_compacted_topic_is_not_deleted_by_age(store: LogStore, clock: ManualClock) -> None:
    log = open_log(store, TopicSettings(retention_ms=1000, cleanup_policy="compact"))
    log.append(encode_batch([NewRecord(b"key", b"x", (), clock.now_ms())]), leader_epoch=EPOCH)
    clock.advance_ms(10_000)

    assert store.delete_expired() == 0


def test_the_log_start_can_be_moved_into_a_batch(store: LogStore) -> None:
    log = open_log(store, TopicSettings(segment_bytes=300))
    for _ in range(4):
        log.append(encode_values(b"x" * 50, b"y" * 50), leader_epoch=EPOCH)
    log.delete_before(5)

    assert log.start_offset == 5
    with pytest.raises(OffsetOutOfRange):
        log.read(4, max_bytes=1, up_to=8)
    assert read_header(bytes(log.read(5, max_bytes=1, up_to=8))).base_offset == 4
    assert [segment.base_offset for segment in log.segments] == [4, 6]
    with pytest.raises(OffsetOutOfRange):
        log.delete_before(9)


def test_the_end_can_be_truncated(store: LogStore) -> None:
    log = open_log(store, TopicSettings(segment_bytes=300))
    for sequence in range(4):
        log.append(encode_values(b"x" * 150, producer_id=1, sequence=sequence), leader_epoch=Epoch(sequence))
    log.truncate_to(2)

    assert log.end_offset == 2
    assert log.latest_epoch == 1
    assert log.read(0, max_bytes=10_000, up_to=9)
    with pytest.raises(OffsetOutOfRange):
        log.read(3, max_bytes=1, up_to=9)
    again = log.append(encode_values(b"z", producer_id=1, sequence=2), leader_epoch=Epoch(7))
    assert (again.base_offset, again.duplicate) == (2, False)
