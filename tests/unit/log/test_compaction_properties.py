"""Random histories of compacted logs with power failures at any disk operation, against a plain list of records.

`LOG_EXAMPLES=5000 pytest tests/unit/log/test_compaction_properties.py` searches further than the everyday run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from millstream.broker.log.log import Log
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import FLUSH_ALWAYS, FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store, read_log

TOPIC_ID = UUID(int=11)
LOGS = 6
DELETE_RETENTION_MS = 5_000
LAG_MS = 400


class PowerFailure(BaseException):
    """The machine is off; no code of the process can catch this."""


class FailingPower(MemoryFiles):
    """Files of a machine whose power fails before a given disk operation."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, open_files_max=28)
        self.changes = 0
        self.fails_at: int | None = None

    def _change(self) -> None:
        self.changes += 1
        if self.fails_at is not None and self.changes >= self.fails_at:
            raise PowerFailure

    def kill(self) -> None:
        self.fails_at = None
        super().kill()


def _failing(name: str) -> Callable[..., Any]:
    whole = getattr(MemoryFiles, name)

    def call(self: FailingPower, *arguments: Any, **named: Any) -> Any:
        self._change()
        return whole(self, *arguments, **named)

    return call


for _name in ("open", "write_at", "sync", "truncate", "sync_directory", "rename", "remove"):
    setattr(FailingPower, _name, _failing(_name))


@dataclass
class Sent:
    """One record as it was sent."""

    offset: int
    key: bytes
    value: bytes | None
    time_ms: int
    sent_ms: int


@dataclass
class Model:
    """Everything that was sent to one log, and its known state."""

    sent: list[Sent] = field(default_factory=list)
    batches: list[tuple[int, int, int, list[Sent]]] = field(default_factory=list)
    durable: int = 0
    lost: list[range] = field(default_factory=list)
    touchable: int = 0

    def latest(self) -> dict[bytes, Sent]:
        return {record.key: record for record in self.sent}


class CompactionMachine(RuleBasedStateMachine):
    """Drives six logs, so that commits use the journal, with power failures at any operation."""

    @initialize(seed=st.integers(0, 2**32), keys_max=st.sampled_from([3, 1000]))
    def begin(self, seed: int, keys_max: int) -> None:
        self.files = FailingPower(seed)
        self.clock = ManualClock()
        self.models = [Model() for _ in range(LOGS)]
        self.keys_max = keys_max
        self.open()

    def open(self) -> None:
        self.store = memory_store(self.files, self.clock, journal_bytes=3000)
        self.store._compactor.keys_max = self.keys_max
        self.logs = [
            self.store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(at)), self.settings_of(at))
            for at in range(LOGS)
        ]

    def settings_of(self, at: int) -> TopicSettings:
        return TopicSettings(
            cleanup_policy="compact",
            segment_bytes=(300, 900)[at % 2],
            segment_ms=3_000,
            index_interval_bytes=100,
            flush=FLUSH_OS if at == 5 else FLUSH_ALWAYS,
            min_cleanable_dirty_ratio=(0.0, 0.3)[at % 2],
            min_compaction_lag_ms=LAG_MS if at % 3 == 0 else 0,
            delete_retention_ms=DELETE_RETENTION_MS,
            message_timestamp_after_max_ms=10**9,
        )

    # -- events ---------------------------------------------------------------------------------------------

    @rule(
        at=st.integers(0, LOGS - 1),
        pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 60)), min_size=1, max_size=4),
        producer_id=st.sampled_from([-1, 1, 2]),
        codec=st.sampled_from([0, 4]),
        new_epoch=st.booleans(),
    )
    def append(self, at: int, pairs: list[tuple[int, int]], producer_id: int, codec: int, new_epoch: bool) -> None:
        model, log = self.models[at], self.logs[at]
        now_ms = self.clock.now_ms()
        records = [
            NewRecord(b"key-%d" % key * (1 + 3 * (key % 2)), None if size < 0 else bytes(size), (), now_ms - key)
            for key, size in pairs
        ]
        sequence = -1
        if producer_id >= 0:
            mine = [batch for batch in model.batches if batch[0] == producer_id]
            sequence = mine[-1][1] + len(mine[-1][3]) if mine else 0
        batch = encode_batch(
            records,
            compression=codec,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        base = log.append(batch, leader_epoch=Epoch(max(0, log.latest_epoch) + new_epoch)).base_offset
        sent = [
            Sent(base + delta, record.key or b"", record.value, record.timestamp_ms, now_ms)
            for delta, record in enumerate(records)
        ]
        model.sent += sent
        model.batches.append((producer_id, sequence, base, sent))

    @rule(some=st.sets(st.integers(0, LOGS - 1), min_size=1))
    def commit(self, some: set[int]) -> None:
        for at in some:
            self.store.sync_soon(self.logs[at])
        self.store.commit_once()
        for model, log in zip(self.models, self.logs, strict=True):
            model.durable = max(model.durable, log.synced_offset)

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint_once()

    @rule(milliseconds=st.sampled_from([1, 300, 3_000, 5_001]))
    def wait(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @rule(at=st.integers(0, LOGS - 1))
    def roll(self, at: int) -> None:
        if self.logs[at].segments and self.logs[at].segments[-1].size:
            self.logs[at].roll()

    @rule(rounds=st.integers(1, 4))
    def compact(self, rounds: int) -> None:
        for _ in range(rounds):
            self.record_touchable()
            self.store.compact_once()
        self.check()

    @rule(after=st.integers(1, 40), cut=st.booleans(), together=st.booleans())
    def compact_and_fail(self, after: int, cut: bool, together: bool) -> None:
        """Fail the power, or kill the process, during compaction and the operations around it."""
        self.record_touchable()
        self.files.changes, self.files.fails_at = 0, after
        try:
            for _ in range(4):
                self.store.compact_once()
                if together:
                    self.commit(set(range(LOGS)))
                self.store.checkpoint_once()
        except PowerFailure:
            pass
        self.end(cut=cut)

    @rule(cut=st.booleans())
    def fail(self, cut: bool) -> None:
        self.end(cut=cut)

    @rule()
    def restart(self) -> None:
        self.store.close_now()
        self.open()
        assert self.store.clean_start
        for model, log in zip(self.models, self.logs, strict=True):
            model.durable = log.end_offset
        self.check()

    def end(self, *, cut: bool) -> None:
        if cut:
            self.files.crash()
        else:
            self.files.kill()
        self.open()
        for model, log in zip(self.models, self.logs, strict=True):
            assert log.end_offset >= model.durable
            gone = [range(first, after) for first, after in log.damaged_ranges]
            assert all(lost.start >= model.durable or lost in model.lost for lost in gone)
            model.lost = gone
            end = log.end_offset

            def there(offset: int, end: int = end, gone: list[range] = gone) -> bool:
                return offset < end and not any(offset in lost for lost in gone)

            model.sent = [record for record in model.sent if there(record.offset)]
            model.batches = [batch for batch in model.batches if there(batch[2])]
            model.durable = log.end_offset
        self.check()

    # -- invariants -----------------------------------------------------------------------------------------

    def record_touchable(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            lag_ms = log.settings.min_compaction_lag_ms
            old = [record for record in model.sent if self.clock.now_ms() - record.sent_ms >= lag_ms]
            model.touchable = max([model.touchable, *(record.offset + 1 for record in old)])

    def check(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            self.check_log(model, log)

    def check_log(self, model: Model, log: Log) -> None:
        records = _read(log)
        by_offset = {record.offset: record for record in model.sent}
        for offset, time_ms, key, value in records:
            sent = by_offset[offset]
            assert (sent.key, sent.value, sent.time_ms) == (key, value, time_ms)
        offsets = {offset for offset, *_ in records}
        values = {key for _, _, key, value in records if value is not None}
        for key, last in model.latest().items():
            if last.offset in offsets:
                continue
            # Only a tombstone may be gone, only after its retention, and not without the record that it deleted.
            assert last.value is None
            assert self.clock.now_ms() >= last.sent_ms + DELETE_RETENTION_MS
            assert key not in values
        for record in model.sent:
            assert record.offset < model.touchable or record.offset in offsets
        self.check_retries(model, log)

    def check_retries(self, model: Model, log: Log) -> None:
        """The last batch of each producer is recognised as a duplicate."""
        for producer_id in (1, 2):
            mine = [batch for batch in model.batches if batch[0] == producer_id]
            if not mine or log.damaged_ranges:
                continue
            _, sequence, base, sent = mine[-1]
            records = [NewRecord(record.key, record.value, (), record.time_ms) for record in sent]
            again = encode_batch(records, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
            appended = log.append(again, leader_epoch=Epoch(max(0, log.latest_epoch)))
            assert (appended.duplicate, appended.base_offset) == (True, base)


def _read(log: Log) -> list[tuple[int, int, bytes | None, bytes | None]]:
    records = decode_records(read_log(log, max_bytes=200)[0])
    return [(record.offset, record.timestamp_ms, record.key, record.value) for record in records]


CompactionMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("LOG_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCompaction = pytest.mark.filterwarnings("ignore")(CompactionMachine.TestCase)


# -- every single disk operation --------------------------------------------------------------------------------


def _filled(seed: int) -> CompactionMachine:
    machine = CompactionMachine()
    machine.begin(seed, 1000)
    for round_ in range(8):
        for at in range(LOGS):
            machine.append(at, [(round_ % 4, 20), (round_ % 3, -1 if round_ == 5 else 10)], 1 + at % 2, 0, round_ == 6)
        machine.commit(set(range(LOGS)))
    _seal(machine)
    return machine


def _seal(machine: CompactionMachine) -> None:
    """Make everything old enough to be compacted."""
    for at in range(LOGS):
        machine.roll(at)
    while machine.store.checkpoint_once():
        pass
    machine.wait(5_000)


@pytest.mark.parametrize("cut", [True, False])
def test_a_power_failure_at_every_disk_operation_is_survived(cut: bool) -> None:
    # Each operation with one of the two, or, in the trials, with both.
    after, step = (1, 1) if "LOG_EXAMPLES" in os.environ else (1 if cut else 2, 2)
    failed = True
    while failed:
        machine = _filled(after)
        machine.record_touchable()
        machine.files.changes, machine.files.fails_at = 0, after
        failed = False
        try:
            while machine.store.compact_once():
                pass
            while machine.store.checkpoint_once():
                pass
        except PowerFailure:
            failed = True
        machine.end(cut=cut)
        assert all(log.damaged_ranges == () for log in machine.logs)
        _seal(machine)
        machine.compact(LOGS + 2)
        for model, log in zip(machine.models, machine.logs, strict=True):
            live = {key for key, record in model.latest().items()}
            assert len(_read(log)) <= len(live)
            assert not [name for name in machine.files.names(log.directory) if name.endswith(".cleaned")]
        after += step
    assert after > 50
