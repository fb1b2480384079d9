"""Random operations, faults and crashes of a whole store against the simplest correct log.

`LOG_EXAMPLES=5000 pytest tests/unit/log/test_log_properties.py` searches further than the everyday run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.broker.log.log import Log
from millstream.broker.net.response import start
from millstream.core.errors import DamagedRange, OutOfOrderSequence, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import FLUSH_ALWAYS, FLUSH_INTERVAL, FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

TOPIC_ID = UUID(int=7)
LOGS = 6
FLUSHES = (FLUSH_ALWAYS, FLUSH_ALWAYS, FLUSH_ALWAYS, FLUSH_ALWAYS, FLUSH_INTERVAL, FLUSH_OS)
JOURNAL_BYTES = 3000


@dataclass
class ModelBatch:
    base_offset: int
    next_offset: int
    data: bytes
    times: list[int]
    epoch: int
    producer_id: int
    sequence: int


@dataclass
class ModelLog:
    """The expected content of a log: batches, and the ranges that a crash was allowed to lose."""

    batches: list[ModelBatch] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0
    end: int = 0
    epoch: int = 0
    durable: int = 0

    def visible(self, start: int) -> list[ModelBatch]:
        return [batch for batch in self.batches if batch.next_offset > start]

    def is_lost(self, offset: int) -> bool:
        return any(first <= offset < after for first, after in self.lost)

    def next_sequence(self, producer_id: int) -> int | None:
        mine = [batch for batch in self.batches if batch.producer_id == producer_id]
        return None if not mine else mine[-1].sequence + len(mine[-1].times)


def read_everything(log: Log, *, up_to: int) -> list[bytes]:
    """Read all batches below an offset, skipping damage."""
    batches: list[bytes] = []
    offset = int(log.start_offset)
    while offset < min(up_to, log.end_offset):
        try:
            data = bytes(log.read(offset, max_bytes=300, up_to=up_to))
        except DamagedRange as damaged:
            offset = damaged.end
            continue
        if not data:
            break
        for header in iterate_headers(data):
            batches.append(data[header.position : header.end_position])
            offset = header.next_offset
    return batches


class StoreMachine(RuleBasedStateMachine):
    """Drives six logs of one store; a commit of more than four uses the journal."""

    @initialize(seed=st.integers(0, 2**32), short=st.booleans())
    def begin(self, seed: int, short: bool) -> None:
        self.files = MemoryFiles(seed, open_files_max=28)
        self.files.short_write_chance = 0.3 if short else 0.0
        self.clock = ManualClock()
        self.models = [ModelLog() for _ in range(LOGS)]
        self.open()

    def open(self) -> None:
        self.store = memory_store(self.files, self.clock, journal_bytes=JOURNAL_BYTES)
        self.logs = [
            self.store.open_log(
                TOPIC_ID,
                TopicPartition("t", PartitionIndex(partition)),
                TopicSettings(
                    segment_bytes=700,
                    segment_ms=60_000,
                    index_interval_bytes=150,
                    flush=FLUSHES[partition],
                    retention_ms=3_600_000,
                ),
            )
            for partition in range(LOGS)
        ]

    # -- appending ------------------------------------------------------------------------------------------

    @rule(
        at=st.integers(0, LOGS - 1),
        sizes=st.lists(st.integers(0, 120), min_size=1, max_size=4),
        shift=st.integers(-3000, 3000),
        producer_id=st.sampled_from([-1, -1, 1, 2]),
        new_epoch=st.booleans(),
    )
    def append(self, at: int, sizes: list[int], shift: int, producer_id: int, new_epoch: bool) -> None:
        model, log = self.models[at], self.logs[at]
        times = [self.clock.now_ms() + shift + 7 * n for n in range(len(sizes))]
        records = [NewRecord(None, bytes([65 + n]) * size, (), times[n]) for n, size in enumerate(sizes)]
        sequence = -1 if producer_id < 0 else model.next_sequence(producer_id) or 0
        batch = encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        model.epoch = max(model.epoch, log.latest_epoch) + new_epoch
        appended = log.append(batch, leader_epoch=Epoch(model.epoch))
        assert not appended.duplicate
        assert appended.base_offset == model.end
        assert appended.next_offset == model.end + len(sizes)
        model.batches.append(
            ModelBatch(model.end, model.end + len(sizes), bytes(batch), times, model.epoch, producer_id, sequence)
        )
        model.end += len(sizes)
        self.clock.advance_ms(500)

    @rule(at=st.integers(0, LOGS - 1), back=st.integers(0, 4), producer_id=st.sampled_from([1, 2]))
    def retry(self, at: int, back: int, producer_id: int) -> None:
        model, log = self.models[at], self.logs[at]
        mine = [batch for batch in model.batches if batch.producer_id == producer_id]
        if len(mine) <= back:
            return
        batch = mine[-1 - back]
        again = bytearray(batch.data)
        again[0:8] = bytes(8)
        appended = log.append(again, leader_epoch=Epoch(max(model.epoch, log.latest_epoch)))
        assert appended.duplicate
        assert (appended.base_offset, appended.next_offset) == (batch.base_offset, batch.next_offset)

    @rule(at=st.integers(0, LOGS - 1), producer_id=st.sampled_from([1, 2]))
    def gap(self, at: int, producer_id: int) -> None:
        model, log = self.models[at], self.logs[at]
        sequence = model.next_sequence(producer_id)
        if sequence is None:
            return
        batch = encode_batch(
            [NewRecord(None, b"x", (), 1)], producer_id=producer_id, producer_epoch=0, base_sequence=sequence + 1
        )
        with pytest.raises(OutOfOrderSequence):
            log.append(batch, leader_epoch=Epoch(max(model.epoch, log.latest_epoch)))

    @rule(at=st.integers(0, LOGS - 1))
    def append_to_a_full_disk(self, at: int) -> None:
        log, end = self.logs[at], self.logs[at].end_offset
        self.files.capacity_bytes = 0
        with pytest.raises(StorageFailure):
            log.append(
                encode_batch([NewRecord(None, b"y" * 50, (), 1)]),
                leader_epoch=Epoch(max(self.models[at].epoch, log.latest_epoch)),
            )
        self.files.capacity_bytes = None
        assert log.end_offset == end

    # -- durability -----------------------------------------------------------------------------------------

    def record_durable(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            model.durable = max(model.durable, log.synced_offset)

    @rule(chosen=st.sets(st.integers(0, LOGS - 1), min_size=1))
    def commit(self, chosen: set[int]) -> None:
        for at in chosen:
            self.store.sync_soon(self.logs[at])
        while self.store.commit_once():
            pass
        for at in chosen:
            assert self.logs[at].synced_offset == self.logs[at].end_offset
        self.record_durable()

    @rule()
    def commit_all(self) -> None:
        self.commit(set(range(LOGS)))

    @rule(at=st.integers(0, LOGS - 1))
    def checkpoint(self, at: int) -> None:
        self.store.checkpoint_soon(self.logs[at])
        self.upkeep()

    @rule()
    def upkeep(self) -> None:
        while self.store.checkpoint_once():
            pass
        self.record_durable()

    @rule(at=st.integers(0, LOGS - 1), keep_cache=st.booleans())
    def fail_a_sync(self, at: int, keep_cache: bool) -> None:
        """A failed sync loses no acknowledged record, and the log continues."""
        model, log = self.models[at], self.logs[at]
        unsynced = log.segments.unsynced()
        if not unsynced:
            return
        self.files.keep_cache_after_failed_sync = keep_cache
        self.files.fail_next_syncs(unsynced[-1].path)
        self.store.sync_soon(log)
        while self.store.commit_once():
            pass
        self.files.forget_planted()
        assert not log.health.broken
        assert log.end_offset == model.end
        self.settle(model, log, allowed_from=model.end if keep_cache else model.durable)
        self.record_durable()

    @rule(
        ending=st.sampled_from([".journal", "checkpoints", ".index", ".timeindex", "/0", "/3"]),
        writing=st.booleans(),
        chosen=st.sets(st.integers(0, LOGS - 1), min_size=1),
    )
    def fail_something_else(self, ending: str, writing: bool, chosen: set[int]) -> None:
        """A failure of the journal, the ledger, an index or a directory costs a retry, not a record."""
        if writing:
            self.files.fail_next_writes(ending)
        else:
            self.files.fail_next_syncs(ending)
        for at in chosen:
            self.store.sync_soon(self.logs[at])
            self.store.checkpoint_soon(self.logs[at])
        while self.store.commit_once() or self.store.checkpoint_once():
            pass
        self.files.forget_planted()
        self.record_durable()
        self.commit(set(range(LOGS)))
        for at in chosen:
            self.store.checkpoint_soon(self.logs[at])
        self.upkeep()
        self.clock.advance_ms(60_000)
        assert not self.store.failures

    # -- deleting -------------------------------------------------------------------------------------------

    @rule(at=st.integers(0, LOGS - 1), share=st.floats(0, 1))
    def delete_before(self, at: int, share: float) -> None:
        model, log = self.models[at], self.logs[at]
        offset = model.start + int((log.synced_offset - model.start) * share)
        log.delete_before(offset)
        assert log.start_offset == offset
        model.start = offset

    @rule(minutes=st.integers(10, 80))
    def expire(self, minutes: int) -> None:
        self.clock.advance_ms(minutes * 60_000)
        self.store.delete_expired()
        for model, log in zip(self.models, self.logs, strict=True):
            horizon = self.clock.now_ms() - 3_600_000
            gone = [batch for batch in model.batches if model.start < batch.next_offset <= log.start_offset]
            assert all(max(batch.times) < horizon for batch in gone)
            assert log.start_offset <= log.synced_offset or log.start_offset == model.start
            model.start = log.start_offset

    @rule(at=st.integers(0, LOGS - 1), share=st.floats(0, 1))
    def truncate(self, at: int, share: float) -> None:
        model, log = self.models[at], self.logs[at]
        offset = model.start + int((model.end - model.start) * share)
        log.truncate_to(offset)
        batches = [batch for batch in model.batches if batch.next_offset <= offset]
        end = min([offset] + [batch.base_offset for batch in model.batches if batch.next_offset > offset])
        assert log.end_offset == (end if offset < model.end else model.end)
        model.batches, model.end = batches if offset < model.end else model.batches, int(log.end_offset)
        model.start = min(model.start, model.end)
        model.lost = [(first, min(after, model.end)) for first, after in model.lost if first < model.end]
        model.durable = int(log.synced_offset)
        model.epoch = log.latest_epoch

    # -- stopping -------------------------------------------------------------------------------------------

    @rule()
    def close_cleanly(self) -> None:
        self.store.close_now()
        assert self.files.open_descriptors == 0
        for model in self.models:
            model.durable = model.end
        reads = self.files.reads
        self.open()
        assert self.store.clean_start
        assert not self.store.recovery_reports
        assert self.files.reads - reads <= 2 * LOGS + 4
        for model, log in zip(self.models, self.logs, strict=True):
            self.settle(model, log, allowed_from=model.end)

    @rule()
    def kill(self) -> None:
        """The process dies and the machine keeps running: nothing is lost."""
        self.files.kill()
        self.open()
        for model, log in zip(self.models, self.logs, strict=True):
            self.settle(model, log, allowed_from=model.end)
            model.durable = int(log.end_offset)

    @rule()
    def crash(self) -> None:
        """The machine loses power: records that were not durable may be lost."""
        self.files.crash()
        self.open()
        for model, log in zip(self.models, self.logs, strict=True):
            self.settle(model, log, allowed_from=model.durable)
            model.durable = int(log.end_offset)

    def settle(self, model: ModelLog, log: Log, *, allowed_from: int) -> None:
        """Check the state after a fault: everything below `allowed_from`, beyond it any intact batches."""
        assert log.end_offset >= allowed_from
        assert log.start_offset <= model.start or log.start_offset <= log.end_offset
        assert log.start_offset <= max(model.start, log.start_offset)
        for first, after in log.damaged_ranges:
            assert (
                first >= allowed_from
                or (first, after) in model.lost
                or any(low <= first and after <= high for low, high in model.lost)
            ), f"offsets {first}..{after} were durable"
        contents = read_everything(log, up_to=log.end_offset)
        by_base = {batch.base_offset: batch for batch in model.batches}
        remaining = []
        for data in contents:
            base = int.from_bytes(data[:8], "big")
            assert by_base[base].data == data
            remaining.append(by_base[base])
        missing = {batch.base_offset for batch in model.visible(log.start_offset)} - {b.base_offset for b in remaining}
        for base in missing:
            batch = by_base[base]
            assert base >= allowed_from, f"the batch at {base} was durable and is gone"
            assert base >= log.end_offset or any(f <= base and batch.next_offset <= a for f, a in log.damaged_ranges)
        before = [batch for batch in model.batches if batch.next_offset <= log.start_offset]
        model.batches = before + remaining
        model.lost = list(log.damaged_ranges)
        model.start = int(log.start_offset)
        model.end = int(log.end_offset)
        model.epoch = max(log.latest_epoch, 0)

    # -- reading --------------------------------------------------------------------------------------------

    @rule(at=st.integers(0, LOGS - 1), low=st.floats(0, 1), high=st.floats(0, 1), max_bytes=st.integers(1, 2000))
    def read(self, at: int, low: float, high: float, max_bytes: int) -> None:
        model, log = self.models[at], self.logs[at]
        offset = model.start + int((model.end - model.start) * low)
        up_to = model.start + int((model.end - model.start) * high)
        if model.is_lost(offset) and offset < up_to:
            with pytest.raises(DamagedRange) as damaged:
                log.read(offset, max_bytes=max_bytes, up_to=up_to)
            assert (damaged.value.start, damaged.value.end) in model.lost
            return
        data = bytes(log.read(offset, max_bytes=max_bytes, up_to=up_to))
        bound = min([up_to] + [first for first, _ in model.lost if first > offset])
        expected = [b for b in model.batches if b.next_offset > offset and b.next_offset <= bound]
        if offset >= up_to or not expected:
            assert data == b""
            return
        taken = b""
        for batch in expected:
            if taken and len(taken) + len(batch.data) > max_bytes:
                break
            taken += batch.data
        # A read never crosses into the next segment, so it may stop before the limit, but only there.
        assert taken.startswith(data)
        assert data
        if len(data) < len(taken):
            after = expected[0].base_offset
            for header in iterate_headers(data):
                after = header.next_offset
            assert any(segment.base_offset == after for segment in log.segments)

    @rule(at=st.integers(0, LOGS - 1), pick=st.floats(0, 1), shift=st.integers(-10, 10), high=st.floats(0, 1))
    def look_up_time(self, at: int, pick: float, shift: int, high: float) -> None:
        model, log = self.models[at], self.logs[at]
        records = [
            (batch.base_offset + n, time, batch.epoch)
            for batch in model.batches
            for n, time in enumerate(batch.times)
            if batch.base_offset + n >= model.start
        ]
        if not records:
            return
        target = records[int(pick * (len(records) - 1))][1] + shift
        up_to = model.start + int((model.end - model.start) * high)
        below = [record for record in records if record[0] < up_to]
        expected = next((record for record in below if record[1] >= target), None)
        assert log.offset_for_time(target, up_to=up_to) == expected
        whole = [record for record in records if record[0] < model.end]
        latest = max((record[1] for record in whole), default=None)
        first = next((record for record in whole if record[1] == latest), None)
        assert cast("Any", start(cast("Any", log.find_max_timestamp(up_to=model.end)))) == first

    # -- always ---------------------------------------------------------------------------------------------

    @invariant()
    def offsets_agree(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            assert log.end_offset == model.end
            assert log.start_offset == model.start
            assert log.start_offset <= log.end_offset
            assert log.synced_offset <= log.end_offset
            assert log.stored_offset <= log.synced_offset
        assert self.files.open_descriptors <= 31

    @precondition(lambda self: True)
    @rule(at=st.integers(0, LOGS - 1))
    def read_all(self, at: int) -> None:
        model, log = self.models[at], self.logs[at]
        contents = read_everything(log, up_to=log.end_offset)
        assert contents == [batch.data for batch in model.visible(model.start)]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=int(os.environ.get("LOG_EXAMPLES", "60")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
