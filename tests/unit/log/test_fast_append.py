"""The fast append path against the general one: the same results, errors, bytes and indexes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.log import log as log_module
from millstream.broker.log.append import AppendedRange, AppendedRun, append_fast
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import MillstreamError, StorageFailure
from millstream.core.ids import Epoch, Offset, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

SETTINGS = (
    TopicSettings(segment_bytes=700, index_interval_bytes=100),
    TopicSettings(message_timestamp_type="LogAppendTime"),
    TopicSettings(max_message_bytes=80),
    TopicSettings(message_timestamp_before_max_ms=100, message_timestamp_after_max_ms=100),
    TopicSettings(cleanup_policy="compact"),
    TopicSettings(segment_ms=1000),
)
BYTE_OFFSETS = st.integers(0, 60)


@st.composite
def batches(draw: st.DrawFn, now_ms: int) -> bytearray:
    """A batch as sent by clients, or one with an invalid header."""
    times = draw(st.lists(st.integers(now_ms - 150, now_ms + 150), min_size=1, max_size=4))
    key = draw(st.sampled_from([None, b"k"]))
    producer_id = draw(st.sampled_from([-1, -1, 5]))
    batch = encode_batch(
        [NewRecord(key, b"v" * draw(st.integers(0, 30)), (), time_ms) for time_ms in times],
        producer_id=producer_id,
        producer_epoch=-1 if producer_id < 0 else draw(st.integers(-1, 1)),
        base_sequence=-1 if producer_id < 0 else draw(st.integers(-1, 12)),
        control=draw(st.sampled_from([False, False, False, True])),
    )
    if draw(st.booleans()):
        for _ in range(draw(st.integers(0, 2))):
            batch[draw(BYTE_OFFSETS)] ^= draw(st.integers(1, 255))
        if draw(st.booleans()):
            batch[17:21] = crc32c(batch[21:]).to_bytes(4, "big")
    return batch if draw(st.integers(0, 9)) else batch[: draw(st.integers(0, len(batch)))]


def together(many: Sequence[bytes | bytearray]) -> tuple[memoryview, list[tuple[int, int]]]:
    """Batches in one buffer, and where each of them is."""
    ends = list(accumulate(map(len, many)))
    return memoryview(bytearray().join(many)), list(pairwise([0, *ends]))


def each_range(run: AppendedRun) -> list[AppendedRange]:
    """What each batch would have got alone."""
    bounds = pairwise([*run.base_offsets, run.appended.next_offset])
    return [run.appended._replace(base_offset=Offset(start), next_offset=Offset(end)) for start, end in bounds]


def open_log(files: MemoryFiles, clock: ManualClock, topic: TopicSettings) -> tuple[LogStore, Log]:
    store = memory_store(files, clock)
    return store, store.open_log(UUID(int=3), TopicPartition("t", PartitionIndex(0)), topic)


def contents(files: MemoryFiles) -> dict[str, bytes]:
    return {path: files.content(path) for path in files.walk() if path.endswith(".log")}


def outcome(append: Callable[[], Any]) -> Any:
    """The result of an append, or its error."""
    try:
        return append()
    except MillstreamError as error:
        return type(error), str(error)


def described(log: Log) -> Any:
    """Everything that an append changes."""
    segments = [
        (segment.to_state(), None if segment.index is None else segment.index.to_bytes()) for segment in log.segments
    ]
    return (
        repr(log),
        segments,
        log.producers.pack(),
        log.epochs.entries(),
        log.is_dirty,
        log._uncheckpointed_bytes,
        log.failure,
    )


@given(data=st.data(), topic=st.sampled_from(SETTINGS))
@settings(deadline=None, max_examples=50)
def test_both_paths_produce_the_same_log(data: st.DataObject, topic: TopicSettings) -> None:
    clock = ManualClock()
    disks = (MemoryFiles(), MemoryFiles())
    (short_store, short), (long_store, long) = (open_log(files, clock, topic) for files in disks)
    for _ in range(data.draw(st.integers(1, 12))):
        clock.advance_ms(data.draw(st.sampled_from([0, 1, 700])))
        batch = data.draw(batches(clock.now_ms()))
        epoch = Epoch(data.draw(st.sampled_from([0, 0, 0, 1])))
        if data.draw(st.integers(0, 9)) == 0:
            for files in disks:
                files.fail_next_writes(".log")
        with patch.object(log_module, "append_fast", lambda *_: ([], 0)):
            copy = bytearray(batch)
            expected = outcome(lambda: long.append(copy, leader_epoch=epoch))  # noqa: B023
        given_view = memoryview(batch) if data.draw(st.booleans()) else batch
        assert outcome(lambda: short.append(given_view, leader_epoch=epoch)) == expected  # noqa: B023
        if isinstance(expected, AppendedRange):
            assert batch == copy
        for files in disks:
            files.forget_planted()
        assert described(short) == described(long)
        assert contents(disks[0]) == contents(disks[1])
    short_store.close_now()
    long_store.close_now()


@pytest.mark.parametrize("producer_id", [-1, 7])
def test_ordinary_batches_take_the_fast_path(producer_id: int) -> None:
    clock = ManualClock()
    store, log = open_log(MemoryFiles(), clock, TopicSettings())
    for sequence in range(3):
        batch = encode_batch(
            [NewRecord(b"k", b"v", (), clock.now_ms())],
            producer_id=producer_id,
            producer_epoch=-1 if producer_id < 0 else 0,
            base_sequence=-1 if producer_id < 0 else sequence,
        )
        if sequence == 0:
            # The first batch starts the segment and the epoch, which takes the general path.
            assert append_fast(log, *together([batch]), 0) == ([], 0)
            log.append(batch, leader_epoch=Epoch(0))
        else:
            assert append_fast(log, *together([batch]), 0) == ([sequence], len(batch))
    store.close_now()


@given(data=st.data(), topic=st.sampled_from(SETTINGS))
@settings(deadline=None, max_examples=50)
def test_batches_appended_together_produce_the_same_log(data: st.DataObject, topic: TopicSettings) -> None:
    clock = ManualClock()
    disks = (MemoryFiles(), MemoryFiles())
    (short_store, short), (long_store, long) = (open_log(files, clock, topic) for files in disks)
    for _ in range(data.draw(st.integers(1, 4))):
        clock.advance_ms(data.draw(st.sampled_from([0, 1, 700])))
        sequence = data.draw(st.integers(0, 3))
        many: list[bytearray] = []
        for _ in range(data.draw(st.integers(1, 8))):
            kind = data.draw(st.sampled_from(["next", "next", "next", "other", "any"]))
            if kind == "any":
                many.append(data.draw(batches(clock.now_ms())))
                continue
            records = [NewRecord(b"k", b"v" * data.draw(st.integers(0, 60)), (), clock.now_ms())]
            is_next = kind == "next"
            many.append(
                encode_batch(
                    records,
                    producer_id=5 if is_next else -1,
                    producer_epoch=0 if is_next else -1,
                    base_sequence=sequence if is_next else -1,
                )
            )
            sequence += is_next
        epoch = Epoch(data.draw(st.sampled_from([0, 0, 0, 1])))
        with patch.object(log_module, "append_fast", lambda *_: ([], 0)):
            copies = [bytearray(batch) for batch in many]
            expected = [outcome(partial(long.append, copy, leader_epoch=epoch)) for copy in copies]
        results: list[Any] = []
        while len(results) < len(many):
            rest = many[len(results) :]
            run = outcome(partial(short.append_first, *together(rest), leader_epoch=epoch))
            if isinstance(run, AppendedRun):
                results += each_range(run)
            else:
                results.append(outcome(partial(short.append, rest[0], leader_epoch=epoch)))
        assert results == expected
        assert described(short) == described(long)
        assert contents(disks[0]) == contents(disks[1])
    short_store.close_now()
    long_store.close_now()


def test_batches_that_the_disk_refuses_together_are_unchanged() -> None:
    clock, files = ManualClock(), MemoryFiles()
    store, log = open_log(files, clock, TopicSettings())
    many = [encode_batch([NewRecord(b"k", b"v", (), clock.now_ms())]) for _ in range(3)]
    log.append(bytearray(many[0]), leader_epoch=Epoch(0))
    before, sent = described(log)[:4], together(many)
    files.fail_next_writes(".log")
    with pytest.raises(StorageFailure):
        log.append_first(*sent, leader_epoch=Epoch(0))
    assert described(log)[:4] == before
    assert sent[0] == b"".join(many)
    # They are not tried together again until the disk works.
    assert log.append_first(*sent, leader_epoch=Epoch(0)) is None
    assert [log.append(batch, leader_epoch=Epoch(0)).base_offset for batch in many] == [1, 2, 3]
    store.close_now()
