"""The account of a queue's messages: real queues write their events, and every planted fault is found."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest

from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import POSITION, Revival, Settlement
from millstream.broker.subscriptions.state_shard import DELTAS, QueueRecord, write_record
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite
from millstream.core.errors import NotLeader
from millstream.core.ids import Epoch, Offset, OffsetRange
from millstream.core.subscription import AT_LEAST_ONCE, EXACTLY_ONCE, Verb
from millstream.pipelines.jobs.ledger.account import Account, Unreadable
from millstream.pipelines.jobs.ledger.events import decode_events
from millstream_testing.queue_bench import MemoryStateStore, Workbench, demand_for


class Recording(MemoryStateStore):
    """A store that also records every write, as the log does."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[QueueWrite] = []

    def write(self, write: QueueWrite) -> PendingWrite:
        self.log.append(write)
        return super().write(write)

    def events(self, without: Sequence[int] = (), twice: Sequence[int] = ()) -> pa.Table:
        """The events of the writes; some may be omitted, or repeated at the end."""
        kept_records = [record for at, record in enumerate(self.log) if at not in without] + [
            self.log[at] for at in twice
        ]
        records = [
            write_record(QueueRecord(DELTAS, record.key, Epoch(0), record.sequence, record.deltas))
            for record in kept_records
        ]
        batch = pa.RecordBatch.from_pydict(
            {
                "offset": pa.array(range(len(records)), pa.int64()),
                "timestamp": pa.array([0] * len(records), pa.timestamp("us", tz="UTC")),
                "key": pa.array([record.key for record in records], pa.binary()),
                "value": pa.array([record.value for record in records], pa.binary()),
            }
        )
        return pa.Table.from_batches([decode_events(batch, 0)])


@pytest.fixture
async def bench() -> Workbench:
    made = Workbench()
    made.store = Recording()
    return made


def settle(delivery: Delivery, first: int, last: int, verb: Verb, worker: str = "one", reason: str = "") -> None:
    results = delivery.settle_now(worker, [Settlement(Offset(first), Offset(last), verb, 0, reason)])
    assert results == [None]


def account(
    events: pa.Table, bench: Workbench, *, pieces: int = 1, unreadable: Sequence[Unreadable] = (), first: int = 0
) -> Account:
    """Fold events in one or several parts, and compare them with the log."""
    result = Account(base=0, size=int(bench.partition.high_watermark))
    step = -(-events.num_rows // pieces)
    for start in range(0, events.num_rows, step):
        result.take(events.slice(start, step))
    end = int(bench.partition.high_watermark)
    log_start = int(bench.partition.log_start)
    present = [OffsetRange(log_start, end)]
    for gap in unreadable:
        present[-1:] = [OffsetRange(present[-1].start, gap.start), OffsetRange(gap.end, end)]
    first = max(first, result.start or 0)
    result.close(present, first=first, cut=end, log_start=log_start, unreadable=unreadable)
    return result


def recorded(bench: Workbench) -> Recording:
    assert isinstance(bench.store, Recording)
    return bench.store


async def test_every_outcome_has_its_class(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True, dead_letter_topic="dead", delivery=EXACTLY_ONCE)
    bench.publish(*"abcdefghij")
    delivery.try_receive(demand_for(6))
    settle(delivery, 0, 2, Verb.ACCEPT)
    settle(delivery, 3, 3, Verb.REJECT, reason="broken")
    delivery.queue.dead_lettered(3, POSITION.pack(0, 7) + b"dead", now_ms=bench.clock.now_ms())
    settle(delivery, 4, 4, Verb.RELEASE)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(), bench)
    assert result.findings == []
    assert result.letters == {3: ("dead", 0, 7)}
    totals = result.totals()
    assert totals == {
        "published": 10,
        "accepted": 3,
        "dead_lettered": 1,
        "filtered": 0,
        "skipped": 0,
        "waiting": 6,
        "expired": 0,
        "lost": 0,
        "dropped": 0,
        "duplicated": 0,
    }


async def test_seeks_retention_redrives_and_restarts_add_up(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True, delivery=EXACTLY_ONCE)
    bench.publish(*"abcdefghij")
    delivery.try_receive(demand_for(4))
    settle(delivery, 0, 1, Verb.ACCEPT)
    delivery.seek(Offset(6))
    delivery.try_receive(demand_for(2))
    settle(delivery, 6, 7, Verb.ACCEPT)
    delivery.queue.revive([Revival(Offset(0), 0, bytes(28))], now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    await delivery.durable(is_all=True)
    delivery.close(NotLeader("moved"))
    delivery = await bench.open(ledger=True, delivery=EXACTLY_ONCE)
    delivery.seek(Offset(5))
    delivery.try_receive(demand_for(1))
    bench.partition.log.delete_before(9)
    delivery.queue.drop_before(9, now_ms=bench.clock.now_ms())
    delivery.mark_window("requested")
    delivery.queue_changed()
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(), bench)
    totals = result.totals()
    # Of 0 to 4, two were accepted and the others skipped; 5 to 8 were to be redelivered, and were deleted.
    assert [finding for finding in result.findings if finding.kind != "expired"] == []
    assert (totals["accepted"], totals["skipped"], totals["expired"], totals["waiting"]) == (1, 4, 4, 1)
    assert totals["published"] == 10
    assert (totals["lost"], totals["duplicated"]) == (0, 0)


async def test_a_lost_delta_is_found_and_named(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True)
    bench.publish(*"abcd")
    delivery.try_receive(demand_for(4))
    await delivery.durable(is_all=True)
    settle(delivery, 1, 2, Verb.ACCEPT)
    lost = len(recorded(bench).log) - 1
    settle(delivery, 3, 3, Verb.ACCEPT)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    for pieces in (1, 3):
        result = account(recorded(bench).events(without=[lost]), bench, pieces=pieces)
        (finding,) = result.findings
        assert (finding.kind, finding.start, finding.end) == ("lost", 1, 3)
        assert "missing" in finding.detail
        assert (result.totals()["lost"], result.totals()["waiting"], result.totals()["accepted"]) == (2, 1, 1)


async def test_a_missing_lease_is_named_though_nothing_is_lost(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True)
    bench.publish("a")
    delivery.try_receive(demand_for(1))
    await delivery.durable(is_all=True)
    lease = len(recorded(bench).log) - 1
    delivery.settle_now("one", [Settlement(Offset(0), Offset(0), Verb.EXTEND, 5000)])
    await delivery.durable(is_all=True)
    assert len(recorded(bench).log) == lease + 2
    settle(delivery, 0, 0, Verb.ACCEPT)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(without=[lease + 1]), bench)
    assert [finding.kind for finding in result.findings] == ["missing_events"]
    assert result.totals()["lost"] == 0


@pytest.mark.parametrize("delivery_mode", [AT_LEAST_ONCE, EXACTLY_ONCE])
async def test_a_duplicate_accept_is_found_where_it_is_excluded(bench: Workbench, delivery_mode: str) -> None:
    delivery = await bench.open(ledger=True, delivery=delivery_mode)
    bench.publish(*"ab")
    delivery.try_receive(demand_for(2))
    settle(delivery, 0, 0, Verb.ACCEPT)
    twice = len(recorded(bench).log) - 1
    settle(delivery, 1, 1, Verb.ACCEPT)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(twice=[twice]), bench)
    duplicated = [(finding.start, finding.end) for finding in result.findings if finding.kind == "duplicated"]
    assert duplicated == ([(0, 1)] if delivery_mode == EXACTLY_ONCE else [])
    assert result.totals()["duplicated"] == len(duplicated)


async def test_deletion_before_delivery_is_its_own_class(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True)
    bench.publish(*"abcdef")
    delivery.try_receive(demand_for(2))
    settle(delivery, 0, 0, Verb.ACCEPT)
    bench.partition.log.delete_before(4)
    delivery.queue.drop_before(4, now_ms=bench.clock.now_ms())
    delivery.mark_window("requested")
    delivery.queue_changed()
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(), bench)
    assert [(finding.kind, finding.start, finding.end) for finding in result.findings] == [("expired", 1, 4)]
    assert (result.totals()["expired"], result.totals()["lost"], result.totals()["published"]) == (3, 0, 6)


async def test_a_ledger_that_was_off_for_a_while_claims_nothing_about_that_time(bench: Workbench) -> None:
    delivery = await bench.open(ledger=False)
    bench.publish(*"abcdef")
    delivery.try_receive(demand_for(3))
    settle(delivery, 0, 0, Verb.ACCEPT)
    delivery.change(delivery.settings.__class__(ledger=True), None)
    settle(delivery, 1, 1, Verb.ACCEPT)
    delivery.change(delivery.settings.__class__(ledger=False), None)
    settle(delivery, 2, 2, Verb.ACCEPT)
    delivery.change(delivery.settings.__class__(ledger=True), None)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(), bench)
    assert result.findings == []
    totals = result.totals()
    assert (totals["published"], totals["accepted"], totals["waiting"]) == (4, 1, 3)


async def test_an_offset_without_a_message_by_the_ledger_must_not_hold_one(bench: Workbench) -> None:
    delivery = await bench.open(ledger=True)
    bench.publish(*"abc")
    delivery.queue.add_scanned(0, 3, now_ms=0, absent=[(1, 1)])
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    result = account(recorded(bench).events(), bench)
    assert [(finding.kind, finding.start, finding.end) for finding in result.findings] == [("lost", 1, 2)]


async def test_messages_that_the_disk_lost_count_by_their_events(bench: Workbench) -> None:
    """One was accepted before, one waits, and two were never read; a transaction marker looks like them."""
    delivery = await bench.open(ledger=True)
    bench.publish(*"abcdef")
    delivery.queue.add_scanned(0, 4, now_ms=0, absent=[(2, 3)])
    delivery.try_receive(demand_for(1))
    settle(delivery, 0, 0, Verb.ACCEPT)
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    events, damage = recorded(bench).events(), [Unreadable(0, 4, "the disk of the broker lost it")]
    result = account(events, bench, unreadable=damage)
    assert [(finding.kind, finding.start, finding.end) for finding in result.findings] == [
        ("unreadable", 0, 4),
        ("lost", 2, 4),
    ]
    totals = result.totals()
    assert (totals["published"], totals["accepted"], totals["waiting"], totals["lost"]) == (6, 1, 3, 2)
    # Damage before --since does not concern the audit.
    assert account(events, bench, unreadable=damage, first=4).findings == []


@pytest.mark.parametrize("seed", range(12))
async def test_random_lives_add_up(bench: Workbench, seed: int) -> None:
    rng = random.Random(seed)
    delivery = await bench.open(ledger=True, delivery=EXACTLY_ONCE, dead_letter_topic="dead", attempts=3)
    published = 0
    for _ in range(150):
        what = rng.random()
        if what < 0.25:
            count = rng.randint(1, 20)
            bench.publish(*("x" * count))
            published += count
        elif what < 0.55:
            delivery.try_receive(demand_for(rng.randint(1, 15), rng.choice(["one", "two"])))
        elif what < 0.9:
            for held in delivery.held_ranges()[:3]:
                verb = rng.choice([Verb.ACCEPT, Verb.ACCEPT, Verb.RELEASE, Verb.REJECT, Verb.RETURN])
                delivery.settle_now(held.worker, [Settlement(held.first, held.last, verb, 0)])
            for rejected in delivery.queue.rejecting(5):
                where = POSITION.pack(0, rejected.offset) + b"dead"
                delivery.queue.dead_lettered(rejected.offset, where, now_ms=bench.clock.now_ms())
        elif what < 0.93 and published:
            delivery.seek(Offset(rng.randint(int(bench.partition.log_start), published)))
        elif what < 0.95 and published:
            start = rng.randint(int(bench.partition.log_start), published)
            bench.partition.log.delete_before(start)
            delivery.queue.drop_before(start, now_ms=bench.clock.now_ms())
        elif what < 0.97:
            delivery.mark_window("periodic")
        else:
            await delivery.durable(is_all=True)
            delivery.close(NotLeader("moved"))
            delivery = await bench.open(ledger=True, delivery=EXACTLY_ONCE, dead_letter_topic="dead", attempts=3)
        bench.clock.advance_ms(rng.choice([0, 10, 40_000]))
        delivery.queue_changed()
    delivery.mark_window("requested")
    await delivery.durable(is_all=True)
    for pieces in (1, 5):
        result = account(recorded(bench).events(), bench, pieces=pieces)
        assert [finding for finding in result.findings if finding.kind != "expired"] == []
        totals = result.totals()
        parts = ("accepted", "dead_lettered", "filtered", "skipped", "waiting", "expired")
        assert totals["published"] == published == sum(totals[name] for name in parts)
