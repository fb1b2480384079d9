"""Compaction by key: which records stay and when, also across crashes, faults and restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from millstream.broker.log.ledger import LEDGER_NAME
from millstream.broker.log.log import AppendedRange, Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import BatchTooLarge, InvalidBatch, InvalidTimestamp
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_SNAPPY,
    COMPRESSION_ZSTD,
    DELETE_HORIZON_FLAG,
    BatchHeader,
    iterate_headers,
)
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store, read_log

TOPIC_ID = UUID(int=9)
SETTINGS = TopicSettings(
    cleanup_policy="compact",
    segment_bytes=400,
    index_interval_bytes=100,
    segment_ms=60_000,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=10_000,
    retention_ms=-1,
)
OpenStore = Callable[[], LogStore]
Pair = tuple[bytes | None, bytes | None]


def opened(store: LogStore, settings: TopicSettings = SETTINGS) -> Log:
    return store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(0)), settings)


def put(
    log: Log,
    clock: ManualClock,
    *pairs: Pair,
    epoch: int = 0,
    producer: tuple[int, int] = (-1, -1),
    compression: int = COMPRESSION_NONE,
    headers: tuple[tuple[str, bytes | None], ...] = (),
) -> AppendedRange:
    producer_id, sequence = producer
    batch = encode_batch(
        [NewRecord(key, value, headers, clock.now_ms() + at) for at, (key, value) in enumerate(pairs)],
        compression=compression,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=sequence,
    )
    return log.append(batch, leader_epoch=Epoch(epoch))


def settle(store: LogStore, log: Log) -> None:
    """Make everything durable in the segments, and close the active one."""
    store.sync_soon(log)
    store.commit_once()
    if log.segments and log.segments[-1].size:
        log.roll()
    while store.checkpoint_once():
        pass


def compact(store: LogStore, log: Log) -> None:
    settle(store, log)
    assert store.compact_once()


def batches(log: Log, offset: int | None = None) -> Iterator[tuple[BatchHeader, bytes]]:
    at = int(log.start_offset) if offset is None else offset
    while at < log.end_offset:
        data = bytes(log.read(at, max_bytes=250, up_to=log.end_offset))
        for header in iterate_headers(data):
            yield header, data[header.position : header.end_position]
            at = header.next_offset


def records(log: Log, offset: int | None = None) -> list[Record]:
    return [
        record
        for _, data in batches(log, offset)
        for record in decode_records(data)
        if offset is None or record.offset >= offset
    ]


def pairs_of(log: Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for record in records(log)]


def test_the_last_record_of_each_key_keeps_its_offset(store: LogStore, clock: ManualClock) -> None:
    log = opened(store)
    for number in range(40):
        put(log, clock, (b"k%d" % (number % 3), b"v%d" % number), (b"once%d" % number, b"x"))
    before = log.size_bytes
    compact(store, log)
    pairs = pairs_of(log)
    assert [offset for offset, key, _ in pairs if key in {b"k0", b"k1", b"k2"}] == [74, 76, 78]
    assert [key for _, key, _ in pairs if key and key.startswith(b"once")] == [b"once%d" % n for n in range(40)]
    assert (log.start_offset, log.end_offset) == (0, 80)
    assert log.size_bytes < before
    assert len(list(batches(log))) <= 40


def test_small_segments_are_merged_and_their_files_removed(
    store: LogStore, clock: ManualClock, files: MemoryFiles
) -> None:
    log = opened(store)
    for number in range(60):
        put(log, clock, (b"k", b"v%d" % number))
    settle(store, log)
    assert len(log.segments) > 10
    while store.compact_once():
        pass
    store.checkpoint_once()
    put(log, clock, (b"k", b"last"))
    compact(store, log)
    names = [name for name in files.names(log.directory) if name.endswith((".log", ".cleaned"))]
    assert sorted(names) == [f"{segment.base_offset:020d}.log" for segment in log.segments]
    assert pairs_of(log) == [(60, b"k", b"last")]
    assert log.damaged_ranges == ()


def test_reading_may_start_at_any_offset(store: LogStore, clock: ManualClock) -> None:
    log = opened(store)
    for number in range(50):
        put(log, clock, (b"k%d" % (number % 7), b"v%d" % number))
    compact(store, log)
    everything = records(log)
    for offset in range(50):
        assert records(log, offset) == [record for record in everything if record.offset >= offset]


@pytest.mark.parametrize(
    "codec", [COMPRESSION_NONE, COMPRESSION_GZIP, COMPRESSION_SNAPPY, COMPRESSION_LZ4, COMPRESSION_ZSTD]
)
def test_kept_records_keep_their_codec_headers_and_timestamp(store: LogStore, clock: ManualClock, codec: int) -> None:
    log = opened(store)
    headers = (("trace", b"\xff\x00"), ("none", None))
    put(log, clock, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"), compression=codec, headers=headers, epoch=3)
    clock.advance_ms(500)
    put(log, clock, (b"b", b"4"), epoch=5)
    was = records(log)
    compact(store, log)
    assert records(log) == [was[0], was[2], was[3]]
    first = next(iter(batches(log)))[0]
    assert (first.compression, first.record_count, first.last_offset_delta, first.leader_epoch) == (codec, 2, 2, 3)
    assert log.end_of_epoch(3) == (3, 3)


def test_a_tombstone_is_kept_for_its_retention_and_then_removed(store: LogStore, clock: ManualClock) -> None:
    log = opened(store)
    put(log, clock, (b"gone", b"1"), (b"here", b"2"))
    put(log, clock, (b"gone", None), (b"too", b"3"))
    sent = records(log)[2].timestamp_ms
    clock.advance_ms(5_000)
    compact(store, log)
    horizon = next(header for header, _ in batches(log) if header.attributes & DELETE_HORIZON_FLAG)
    assert horizon.base_timestamp_ms == clock.now_ms() + SETTINGS.delete_retention_ms
    assert [(record.offset, record.value, record.timestamp_ms) for record in records(log)][1] == (2, None, sent)
    clock.advance_ms(SETTINGS.delete_retention_ms - 1)
    put(log, clock, (b"other", b"4"))
    compact(store, log)
    assert (2, b"gone", None) in pairs_of(log)
    clock.advance_ms(1)
    put(log, clock, (b"other", b"5"))
    compact(store, log)
    assert pairs_of(log) == [(1, b"here", b"2"), (3, b"too", b"3"), (5, b"other", b"5")]


def test_records_that_are_not_landed_are_kept_for_a_while(store: LogStore, clock: ManualClock) -> None:
    log = opened(store, dataclasses.replace(SETTINGS, retention_until_landed=True, retention_until_max_ms=5000))
    for value in (b"1", b"2", b"3"):
        put(log, clock, (b"k", value))
        settle(store, log)
    assert not store.compact_once(), "nothing counts as landed before the first report"
    store.floors.landed = lambda _partition: 2
    assert store.compact_once()
    assert pairs_of(log) == [(1, b"k", b"2"), (2, b"k", b"3")]
    clock.advance_ms(6000)
    assert store.compact_once(), "a pipeline that stands still is not waited for for ever"
    assert pairs_of(log) == [(2, b"k", b"3")]


def test_records_newer_than_the_lag_are_not_compacted(store: LogStore, clock: ManualClock) -> None:
    log = opened(store, dataclasses.replace(SETTINGS, min_compaction_lag_ms=1000))
    put(log, clock, (b"k", b"1"))
    put(log, clock, (b"k", b"2"))
    settle(store, log)
    clock.advance_ms(900)
    put(log, clock, (b"k", b"3"))
    settle(store, log)
    assert not store.compact_once()
    clock.advance_ms(101)
    assert store.compact_once()
    assert pairs_of(log) == [(1, b"k", b"2"), (2, b"k", b"3")]
    assert log.cleaned_offset == 2


def test_the_active_segment_is_not_compacted_until_it_is_old(store: LogStore, clock: ManualClock) -> None:
    log = opened(store)
    put(log, clock, (b"k", b"1"))
    put(log, clock, (b"k", b"2"))
    store.sync_soon(log)
    store.commit_once()
    assert not store.compact_once()
    clock.advance_ms(SETTINGS.segment_ms)
    store.compact_once()
    store.checkpoint_once()
    assert store.compact_once() or log.cleaned_offset == 2
    assert pairs_of(log) == [(1, b"k", b"2")]


def test_few_new_records_wait_unless_the_maximum_lag_is_exceeded(store: LogStore, clock: ManualClock) -> None:
    settings = dataclasses.replace(SETTINGS, min_cleanable_dirty_ratio=0.5, max_compaction_lag_ms=50_000)
    log = opened(store, settings)
    for number in range(20):
        put(log, clock, (b"key%d" % number, b"value"))
    compact(store, log)
    put(log, clock, (b"key1", b"new"))
    settle(store, log)
    assert not store.compact_once()
    clock.advance_ms(50_001)
    assert store.compact_once()
    assert len(pairs_of(log)) == 20


def test_more_keys_than_fit_take_several_passes(store: LogStore, clock: ManualClock) -> None:
    store._compactor.keys_max = 4
    log = opened(store)
    for number in range(30):
        put(log, clock, (b"k%d" % (number % 10), b"v%d" % number), (b"k%d" % ((number + 5) % 10), b"w%d" % number))
    settle(store, log)
    passes = 0
    while store.compact_once():
        passes += 1
    assert passes > 3
    pairs = pairs_of(log)
    assert len(pairs) == len({key for _, key, _ in pairs}) == 10
    assert log.cleaned_offset == 60


def test_long_keys_are_not_confused(store: LogStore, clock: ManualClock) -> None:
    log = opened(store, dataclasses.replace(SETTINGS, segment_bytes=100_000))
    for number in range(50):
        put(log, clock, (b"x" * 100 + b"%d" % number, b"v"), (b"", b"empty%d" % number))
    compact(store, log)
    assert len(pairs_of(log)) == 51


def test_records_without_a_key_are_removed(store: LogStore, clock: ManualClock) -> None:
    log = opened(store, dataclasses.replace(SETTINGS, cleanup_policy="delete"))
    put(log, clock, (None, b"1"), (b"k", b"2"))
    log.change_settings(SETTINGS)
    compact(store, log)
    assert pairs_of(log) == [(1, b"k", b"2")]


def test_a_batch_without_keys_is_refused(store: LogStore, clock: ManualClock) -> None:
    log = opened(store)
    for codec in (COMPRESSION_NONE, COMPRESSION_ZSTD):
        with pytest.raises(InvalidBatch, match=r"1 of 2 records has no key \(at index 1\)"):
            put(log, clock, (b"k", b"1"), (None, b"2"), compression=codec)
    many = encode_batch([NewRecord(b"k", None, (), clock.now_ms())] * 100_001, compression=COMPRESSION_ZSTD)
    with pytest.raises(BatchTooLarge, match="100000 are the most"):
        log.append(many, leader_epoch=Epoch(0))
    assert log.end_offset == 0


def test_timestamps_too_far_from_the_brokers_clock_are_refused(store: LogStore, clock: ManualClock) -> None:
    settings = TopicSettings(message_timestamp_before_max_ms=1000, message_timestamp_after_max_ms=2000)
    log = opened(store, settings)

    def send(shift_ms: int) -> None:
        log.append(encode_batch([NewRecord(b"k", b"v", (), clock.now_ms() + shift_ms)]), leader_epoch=Epoch(0))

    for fine in (-1000, 0, 2000):
        send(fine)
    for wrong in (-1001, 2001):
        with pytest.raises(InvalidTimestamp, match="the broker's time"):
            send(wrong)
    log.append(encode_batch([NewRecord(b"k", b"v")]), leader_epoch=Epoch(0))
    log.change_settings(dataclasses.replace(settings, message_timestamp_type="LogAppendTime"))
    send(10**9)
    assert log.end_offset == 5


def test_retries_are_recognised_after_compaction_even_without_a_checkpoint(
    open_store: OpenStore, clock: ManualClock, files: MemoryFiles
) -> None:
    store = open_store()
    log = opened(store)
    for sequence in range(8):
        put(log, clock, (b"k", b"%d" % sequence), producer=(7, sequence), epoch=sequence // 3)
    for number in range(20):
        put(log, clock, (b"k", b"other%d" % number), epoch=2)
    compact(store, log)
    epochs = log.epochs.entries()
    settle(store, log)
    files.kill()
    files.remove("/data/checkpoints")
    log = opened(open_store())
    assert log.damaged_ranges == ()
    assert log.epochs.entries() == epochs
    again = put(log, clock, (b"k", b"7"), producer=(7, 7), epoch=2)
    assert (again.duplicate, again.base_offset) == (True, 7)
    assert not put(log, clock, (b"k", b"8"), producer=(7, 8), epoch=2).duplicate


def test_damage_is_recorded_and_skipped(store: LogStore, clock: ManualClock, files: MemoryFiles) -> None:
    log = opened(store)
    for number in range(30):
        put(log, clock, (b"k%d" % (number % 4), None if number == 29 else b"v%d" % number))
    settle(store, log)
    victim = log.segments[2]
    files.flip_bit(victim.path, victim.size // 2, 3)
    assert store.compact_once()
    assert log.damaged_ranges
    (first, after), *_ = log.damaged_ranges
    assert store.compact_once()
    readable_records = _readable(log)
    assert {record.key for record in readable_records} == {b"k0", b"k1", b"k2", b"k3"}
    assert log.damaged_ranges == ((first, after),)
    clock.advance_ms(10**9)
    put(log, clock, (b"k9", b"x"))
    compact(store, log)
    # The damaged range may hold an older value, which the tombstone must continue to hide.
    assert (29, b"k1", None) in [(record.offset, record.key, record.value) for record in _readable(log)]


def _readable(log: Log) -> list[Record]:
    return list(decode_records(read_log(log)[0]))


def test_retention_meanwhile_ends_the_pass_and_leaves_no_file(
    store: LogStore, clock: ManualClock, files: MemoryFiles
) -> None:
    log = opened(store, dataclasses.replace(SETTINGS, cleanup_policy="compact,delete"))
    for number in range(40):
        put(log, clock, (b"k", b"v%d" % number))
    settle(store, log)
    compaction = store._compactor.next([log])
    assert compaction is not None
    for at, job in enumerate(compaction.jobs(store.checkpoint_job)):
        store._run_job(job)
        if at == 0:
            log.delete_before(39)
    assert compaction.failed
    store.checkpoint_once()
    assert not [name for name in files.names(log.directory) if name.endswith(".cleaned")]
    assert pairs_of(log) == [(39, b"k", b"v39")]


@pytest.mark.parametrize("ending", [".cleaned", "/0", "checkpoints"])
def test_a_failing_disk_leaves_the_log_intact(
    store: LogStore, clock: ManualClock, files: MemoryFiles, ending: str
) -> None:
    log = opened(store)
    for number in range(40):
        put(log, clock, (b"k%d" % (number % 2), b"v%d" % number))
    settle(store, log)
    files.fail_next_syncs(ending)
    store.compact_once()
    files.forget_planted()
    while store.checkpoint_once() or store.compact_once():
        pass
    assert pairs_of(log)[-2:] == [(38, b"k0", b"v38"), (39, b"k1", b"v39")]
    store.close_now()
    reopened = opened(memory_store(files, clock, journal_bytes=100_000, producer_expiry_ms=3_600_000))
    assert pairs_of(reopened)[-2:] == [(38, b"k0", b"v38"), (39, b"k1", b"v39")]


def test_a_clean_stop_keeps_the_compaction_progress(open_store: OpenStore, clock: ManualClock) -> None:
    store = open_store()
    log = opened(store)
    for number in range(40):
        put(log, clock, (b"k", b"v%d" % number))
    compact(store, log)
    store.close_now()
    store = open_store()
    assert store.clean_start
    log = opened(store)
    assert log.cleaned_offset == 40
    assert not store.compact_once()
    assert pairs_of(log) == [(39, b"k", b"v39")]


def test_a_log_knows_the_offset_up_to_which_it_is_compacted(
    open_store: OpenStore, clock: ManualClock, files: MemoryFiles
) -> None:
    store = open_store()
    log = opened(store)
    put(log, clock, (b"k", b"1"))
    settle(store, log)
    put(log, clock, (b"other", b"2"))
    settle(store, log)
    assert log.superseded_by == 0
    for number in range(3, 20):
        put(log, clock, (b"k", b"%d" % number))
    # The pass is interrupted after some segments are replaced.
    settle(store, log)
    swap_in, swaps = log.swap_in, []

    def swap_one(*arguments: object) -> bool:
        swaps.append(arguments)
        return len(swaps) == 1 and swap_in(*arguments)  # type: ignore[arg-type]

    log.swap_in = swap_one  # type: ignore[method-assign, assignment]
    store.compact_once()
    assert len(swaps) > 1
    assert (log.cleaned_offset, log.superseded_by) == (0, 19)
    while store.checkpoint_once():
        pass
    files.kill()
    log = opened(open_store())
    assert (log.cleaned_offset, log.superseded_by) == (0, 19)
    log.restart_at(5)
    assert log.superseded_by == 5


def test_a_log_without_a_checkpoint_knows_whether_it_was_compacted(
    open_store: OpenStore, clock: ManualClock, files: MemoryFiles
) -> None:
    store = open_store()
    log = opened(store)
    for number in range(20):
        put(log, clock, (b"k", b"%d" % number), (b"other", b"x"))
    settle(store, log)
    put(log, clock, (b"tail", b"x"))
    settle(store, log)

    files.kill()
    files.remove(f"/data/{LEDGER_NAME}")
    store = open_store()
    log = opened(store)
    assert log.superseded_by == 0
    compact(store, log)
    assert pairs_of(log) == [(38, b"k", b"19"), (39, b"other", b"x"), (40, b"tail", b"x")]
    files.kill()
    files.remove(f"/data/{LEDGER_NAME}")
    log = opened(open_store())
    assert log.superseded_by == log.end_offset == 41


def test_a_replica_fetched_with_gaps_knows_that_it_is_compacted(
    open_store: OpenStore, clock: ManualClock, files: MemoryFiles
) -> None:
    store = open_store()
    log = opened(store)
    follower = store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(1)), SETTINGS)
    for number in range(20):
        put(log, clock, (b"k", b"%d" % number))
    follower.append_replica(
        log.read(0, max_bytes=99, up_to=log.end_offset), leader_epoch=Epoch(0), compacted_until=log.end_offset
    )
    assert follower.superseded_by == 0
    compact(store, log)
    data = log.read(int(follower.end_offset), max_bytes=9999, up_to=19)
    follower.append_replica(data, leader_epoch=Epoch(0), compacted_until=log.end_offset)
    assert follower.superseded_by == 20
    # Also after a crash before the next checkpoint.
    store.sync_soon(follower)
    store.commit_once()
    files.kill()
    follower = open_store().open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(1)), SETTINGS)
    assert follower.superseded_by == follower.end_offset


def test_the_journal_does_not_restore_compacted_records(
    open_store: OpenStore, clock: ManualClock, files: MemoryFiles
) -> None:
    store = open_store()
    logs = [
        store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(at)), dataclasses.replace(SETTINGS))
        for at in range(6)
    ]
    for number in range(2):
        for log in logs:
            put(log, clock, (b"k", b"old" * 20), (b"k%d" % number, b"x"))
            store.sync_soon(log)
        store.commit_once()
    assert all(log.segments[0].journaled_bytes > 0 == log.segments[0].synced_bytes for log in logs)
    for log in logs:
        log.roll()
    while store.checkpoint_once() or store.compact_once():
        pass
    pairs = [pairs_of(log) for log in logs]
    assert pairs[0] == [(1, b"k0", b"x"), (2, b"k", b"old" * 20), (3, b"k1", b"x")]
    files.kill()
    store = open_store()
    logs = [store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(at)), SETTINGS) for at in range(6)]
    assert [pairs_of(log) for log in logs] == pairs
    assert [log.damaged_ranges for log in logs] == [()] * 6
