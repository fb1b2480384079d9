"""A queue on a real partition: what wakes workers, what they receive, and when it is durable."""

from __future__ import annotations

import asyncio
from itertools import chain
from uuid import UUID

import numpy as np
import pytest

from millstream.broker.kafka.api import error_code
from millstream.broker.kafka.apis.subscription_receive import build_response
from millstream.broker.net.budget import Budget
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions import delivery as driver
from millstream.broker.subscriptions.batch_scan import LIGHT_BYTES_MAX, LIGHT_RECORDS_MAX
from millstream.broker.subscriptions.delivery import ORIGINS_KEPT, Delivery
from millstream.broker.subscriptions.filter_cache import Matches, QueueFilter
from millstream.broker.subscriptions.lease import LETTER_BYTES, Origin, Settlement
from millstream.broker.subscriptions.log_scan import ScannedRange, scan_heavy_batch
from millstream.broker.subscriptions.receiving import Grant, receive
from millstream.client.admin.dead_letter import DeadLetterClient, origin_of
from millstream.core.errors import (
    CoordinatorUnavailable,
    DamagedRange,
    FencedLeaderEpoch,
    InvalidRecordState,
    NotLeader,
    PartitionClosed,
    RepairPending,
    StorageFailure,
)
from millstream.core.ids import Offset
from millstream.core.subscription import AT_MOST_ONCE, EXACTLY_ONCE, READ_UNCOMMITTED, SubscriptionSettings, Verb
from millstream.protocol.filter.filter import Filter, compile_filter
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.records import compression
from millstream.protocol.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_LZ4,
    COMPRESSION_SNAPPY,
    COMPRESSION_ZSTD,
    Buffer,
)
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code
from millstream_testing.queue_bench import Workbench, demand_for, offsets, turns
from millstream_testing.waiting import until

WAIT_S = 60.0
PLENTY = Budget(1 << 30)


def given_offsets(grants: list[Grant]) -> list[int]:
    return [offset for reply in grants for offset in offsets(reply.received)]


def settle(offset: int, verb: Verb, delay_ms: int | None = None) -> list[Settlement]:
    return [Settlement(Offset(offset), Offset(offset), verb, delay_ms)]


def waits(delivery: Delivery, worker: str = "one", count: int = 1) -> asyncio.Task[list[Grant]]:
    return asyncio.ensure_future(receive([delivery], demand_for(count, worker), PLENTY, wait_s=WAIT_S))


class HeldFilter(QueueFilter):
    """A filter whose response the test holds back."""

    def __init__(self, text: str, matches: bool) -> None:
        self.filter: Filter = compile_filter(text)
        self.responses = asyncio.Event()
        self.asked = asyncio.Event()
        self.failures = 0
        self.unreadable: tuple[tuple[int, int, str], ...] = ()
        self._matches = matches

    def close(self) -> None:
        pass

    async def matches(self, records: Buffer, first: Offset, next_offset: Offset) -> Matches:
        self.asked.set()
        await self.responses.wait()
        if self.failures:
            self.failures -= 1
            raise StorageFailure("the filter is away")
        bits = np.full(next_offset - first, self._matches, np.bool_)
        return Matches(bits, tuple(entry for entry in self.unreadable if first <= entry[0] < next_offset))


# -- wake-ups ----------------------------------------------------------------------------------------------------


async def test_a_worker_at_its_lease_limit_costs_nothing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = await bench.open(in_flight_max=2)
    bench.publish("a", "b", "c")
    held = delivery.try_receive(demand_for(5))
    assert offsets(held) == [0, 1]
    served = 0
    serve = Delivery._serve_waiting

    def counted(current: Delivery) -> None:
        nonlocal served
        served += 1
        serve(current)

    monkeypatch.setattr(Delivery, "_serve_waiting", counted)
    waiting = waits(delivery)
    await turns(200)
    assert served <= 2
    assert not waiting.done()
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    assert given_offsets(await waiting) == [2]


async def test_a_burst_is_distributed_among_waiting_workers(bench: Workbench) -> None:
    delivery = await bench.open()
    waiting = [waits(delivery, f"w{number}", 100) for number in range(3)]
    await turns()
    bench.publish(*map(str, range(30)))
    offset_lists = [given_offsets(await task) for task in waiting]
    assert sorted(chain.from_iterable(offset_lists)) == list(range(30))
    assert [len(reply) for reply in offset_lists] == [10, 10, 10]


async def test_waiting_workers_share_what_one_scan_has_read(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = await bench.open()
    waiting = [waits(delivery, f"w{number}", 100) for number in range(4)]
    await turns()
    for number in range(100):
        bench.publish(str(number) + "x" * 1000)
    monkeypatch.setattr(driver, "read_batches", None)
    received = [reply.received for grants in [await task for task in waiting] for reply in grants]
    assert sorted(chain.from_iterable(map(offsets, received))) == list(range(100))
    for received_part in received:
        stored = [record.offset for piece in received_part.batches for record in decode_records(bytes(piece))]
        assert stored == offsets(received_part)
        # None of them keeps everything that was read in memory.
        assert sum(memoryview(piece.obj).nbytes for piece in received_part.batches) < 50_000


async def test_a_worker_is_woken_when_the_store_has_space_again(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.store.holds_writes = True
    bench.publish("a", "b")
    delivery.try_receive(demand_for())
    bench.store.room = False
    waiting = waits(delivery, "two")
    await turns()
    assert not waiting.done()
    bench.store.room = True
    bench.store.release_writes()
    assert given_offsets(await waiting) == [1]


async def test_a_worker_is_served_when_others_have_freed_space_in_the_store(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "STORE_FULL_RETRY_S", 0.01)
    delivery = await bench.open()
    bench.publish("a")
    bench.store.room = False
    waiting = waits(delivery)
    await turns()
    assert not waiting.done()
    bench.store.room = True
    assert given_offsets(await waiting) == [0]


async def test_a_paused_queue_delivers_nothing_and_resuming_wakes_workers(bench: Workbench) -> None:
    delivery = await bench.open(paused=True)
    bench.publish("a")
    waiting = waits(delivery)
    await turns()
    assert not waiting.done()
    delivery.change(SubscriptionSettings(), None)
    assert given_offsets(await waiting) == [0]


async def test_waiting_workers_ask_again_when_the_delivery_mode_changes(bench: Workbench) -> None:
    delivery = await bench.open()
    waiting = waits(delivery)
    await turns()
    delivery.change(SubscriptionSettings(delivery=EXACTLY_ONCE), None)
    assert await waiting == []
    delivery.change(SubscriptionSettings(delivery=EXACTLY_ONCE, paused=True), None)
    waiting = waits(delivery)
    await turns()
    assert not waiting.done()
    bench.publish("a")
    delivery.change(SubscriptionSettings(delivery=EXACTLY_ONCE), None)
    assert given_offsets(await waiting) == [0]


async def test_a_queue_paused_during_a_long_scan_stops(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SCAN_BYTES", 1)
    delivery = await bench.open(ordered=True)
    bench.publish("a0", key=b"a")
    delivery.try_receive(demand_for())
    for number in range(3 * driver.SCANS_PER_TURN):
        bench.publish(f"a{number}", key=b"a")
    assert offsets(delivery.try_receive(demand_for(1, "two"))) == []
    delivery.change(SubscriptionSettings(ordered=True, paused=True), None)
    waiting = waits(delivery, "two")
    await turns()
    served = 0
    serve = Delivery._serve_waiting

    def counted(current: Delivery) -> None:
        nonlocal served
        served += 1
        serve(current)

    monkeypatch.setattr(Delivery, "_serve_waiting", counted)
    await turns(50)
    assert served == 0
    behind = bench.publish("b", key=b"b")
    delivery.change(SubscriptionSettings(ordered=True), None)
    assert given_offsets(await waiting) == [behind]


async def test_an_expired_lease_or_delay_wakes_waiters(bench: Workbench) -> None:
    delivery = await bench.open(lease_ms=100)
    at_ms = bench.clock.now_ms() + 150
    bench.publish("a")
    bench.publish("late", headers=(("deliver-at", str(at_ms).encode()),))
    delivery.try_receive(demand_for(5))
    first, second = waits(delivery, "two"), waits(delivery, "three")
    await turns()
    bench.clock.advance_ms(200)
    assert sorted(given_offsets(await first) + given_offsets(await second)) == [0, 1]


async def test_messages_due_during_a_response_are_delivered_with_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await bench.open()
    at_ms = bench.clock.now_ms() + 10
    bench.publish("late", headers=(("deliver-at", str(at_ms).encode()),))
    bench.publish("now")
    prepare = Delivery._prepare

    def slow(current: Delivery, count: int) -> None:
        prepare(current, count)
        bench.clock.advance_ms(20)

    monkeypatch.setattr(Delivery, "_prepare", slow)
    received = delivery.try_receive(demand_for(5))
    assert offsets(received) == [0, 1]
    assert [record.offset for batch in received.batches for record in decode_records(batch)] == [0, 1]


async def test_a_far_future_message_sets_a_valid_timer(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("never", headers=(("deliver-at", b"9" * 15),))
    bench.publish("now")
    assert offsets(delivery.try_receive(demand_for(5))) == [1]
    delivery.close(NotLeader("over"))


async def test_messages_waiting_for_a_key_do_not_hide_later_ones(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SCAN_BYTES", 1)
    delivery = await bench.open(ordered=True)
    bench.publish("a0", key=b"a")
    assert offsets(delivery.try_receive(demand_for())) == [0]
    waiting = waits(delivery, "two")
    await turns()
    for number in range(3 * driver.SCANS_PER_TURN):
        bench.publish(f"a{number}", key=b"a")
    behind = bench.publish("b", key=b"b")
    assert given_offsets(await waiting) == [behind]


async def test_a_worker_that_arrives_when_a_scan_was_cut_short_is_served(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SCAN_BYTES", 1)
    delivery = await bench.open(ordered=True)
    bench.publish("a0", key=b"a")
    delivery.try_receive(demand_for())
    for number in range(3 * driver.SCANS_PER_TURN):
        bench.publish(f"a{number}", key=b"a")
    behind = bench.publish("b", key=b"b")
    assert given_offsets(await waits(delivery, "two")) == [behind]


async def test_an_ordered_queue_restores_its_keys_after_a_restart(bench: Workbench) -> None:
    delivery = await bench.open(ordered=True, lease_ms=600_000)
    for number in range(40):
        bench.publish(f"v{number}", key=b"key-%d" % (number % 20))
    first = delivery.try_receive(demand_for(5))
    assert offsets(first) == [0, 1, 2, 3, 4]
    await delivery.durable()
    delivery.close(NotLeader("restart"))
    again = await bench.open(ordered=True, lease_ms=600_000)
    assert given_offsets(await waits(again, "two", 3)) == [5, 6, 7]
    again.settle_now("one", settle(0, Verb.ACCEPT))
    assert 20 in offsets(again.try_receive(demand_for(100, "three")))


# -- durability --------------------------------------------------------------------------------------------------


async def test_leases_are_returned_when_the_delivery_mode_allows(bench: Workbench) -> None:
    for promise, index in ((EXACTLY_ONCE, 1), (AT_MOST_ONCE, 2)):
        bench.partition = bench.make_partition(index)
        bench.publish("a")
        delivery = await bench.open(delivery=promise)
        bench.store.holds_writes = True
        waiting = waits(delivery)
        await turns()
        assert not waiting.done()
        bench.store.holds_writes = False
        bench.store.release_writes()
        assert given_offsets(await waiting) == [0]


@pytest.mark.parametrize("is_there", [False, True])
async def test_the_granted_lease_duration_is_reported(bench: Workbench, is_there: bool) -> None:
    delivery = await bench.open(delivery=EXACTLY_ONCE, lease_ms=1000)
    if is_there:
        bench.publish("a")
    bench.store.holds_writes = True
    waiting = waits(delivery)
    await turns()
    if not is_there:
        bench.publish("a")
        await turns()
    assert delivery.queue.counts.leased == 1
    delivery.change(SubscriptionSettings(delivery=EXACTLY_ONCE, lease_ms=60_000), None)
    bench.store.holds_writes = False
    bench.store.release_writes()
    grants = await waiting
    (lease,) = grants[0].received.leases
    (reported,) = build_response(grants, 0.0).partitions
    assert (lease.deadline_ms - bench.clock.now_ms(), reported.lease_ms) == (1000, 1000)


async def test_a_worker_that_disconnects_before_its_response_returns_its_leases(bench: Workbench) -> None:
    delivery = await bench.open(delivery=EXACTLY_ONCE)
    bench.publish("a")
    bench.store.holds_writes = True
    leaving = waits(delivery, "leaves")
    await turns()
    assert delivery.queue.counts.leased == 1
    leaving.cancel()
    await asyncio.wait([leaving])
    assert delivery.queue.counts.leased == 0
    bench.store.holds_writes = False
    bench.store.release_writes()
    assert given_offsets(await waits(delivery, "stays")) == [0]


async def test_a_disconnecting_worker_does_not_affect_others_waiting_for_the_same_write(bench: Workbench) -> None:
    delivery = await bench.open(delivery=EXACTLY_ONCE)
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    await delivery.durable()
    bench.store.holds_writes = True
    leaving = asyncio.ensure_future(delivery.settle("one", settle(0, Verb.ACCEPT)))
    staying = asyncio.ensure_future(delivery.durable())
    await turns()
    leaving.cancel()
    await asyncio.wait([leaving])
    await turns()
    assert not staying.done()
    bench.publish("c")
    assert offsets(delivery.try_receive(demand_for(1, "two"))) == [2]
    bench.store.release_writes()
    await staying
    assert not delivery.is_closed


async def test_a_worker_that_disconnects_while_being_served_returns_its_leases(bench: Workbench) -> None:
    delivery = await bench.open()
    leaving = waits(delivery, "leaves")
    await turns()
    bench.publish("a")
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert (delivery.queue.counts.leased, delivery.waiting) == (0, 0)


async def test_leases_are_stored_with_the_next_write_or_alone_and_on_close(
    bench: Workbench,
) -> None:
    delivery = await bench.open()

    def are_stored() -> bool:
        return not delivery.queue.has_leases

    bench.publish("a", "b", "c")
    delivery.try_receive(demand_for())
    assert not are_stored()
    await delivery.settle("one", settle(0, Verb.ACCEPT))
    assert are_stored()
    delivery.try_receive(demand_for())
    await until(are_stored)
    delivery.try_receive(demand_for())
    delivery.close(PartitionClosed("the broker is stopping"))
    again = await bench.open()
    assert again.queue.in_flight("one") == 2


async def test_accepts_during_a_write_are_stored_together(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish(*map(str, range(6)))
    delivery.try_receive(demand_for(6))
    before, bench.store.holds_writes = bench.store.writes, True
    accepting = [asyncio.ensure_future(delivery.settle("one", settle(offset, Verb.ACCEPT))) for offset in range(6)]
    await turns()
    assert bench.store.writes == before + 1
    bench.store.release_writes()
    await turns()
    assert [task.done() for task in accepting] == [True] + [False] * 5
    assert bench.store.writes == before + 2
    bench.store.release_writes()
    assert await asyncio.gather(*accepting) == [[None]] * 6
    again = await bench.open()
    assert again.queue.oldest == 6


async def test_accepts_while_workers_wait_share_a_write_soon_after_the_last(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "WRITE_INTERVAL_S", 3600.0)
    delivery = await bench.open()
    bench.publish(*map(str, range(5)))
    delivery.try_receive(demand_for(5))
    # Without a waiting worker, the next message may depend on the write.
    before = bench.store.writes
    await delivery.settle("one", settle(0, Verb.ACCEPT))
    assert bench.store.writes == before + 1
    waiting = waits(delivery, "two")
    await turns()
    accepting = [asyncio.ensure_future(delivery.settle("one", settle(offset, Verb.ACCEPT))) for offset in (1, 2)]
    await turns()
    assert (bench.store.writes, [task.done() for task in accepting]) == (before + 1, [False, False])
    delivery.hasten_write()
    assert await asyncio.gather(*accepting) == [[None], [None]]
    assert bench.store.writes == before + 2
    # After a pause, an acceptance is written at once.
    bench.clock.advance_ms(3_600_000)
    await delivery.settle("one", settle(3, Verb.ACCEPT))
    assert bench.store.writes == before + 3
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_accepts_that_share_a_write_are_written_by_its_timer(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    waiting = waits(delivery, "two")
    await turns()
    # The clock of the queue stands still, so every write is soon after the last; the loop's timers run.
    for offset in range(2):
        assert await delivery.settle("one", settle(offset, Verb.ACCEPT)) == [None]
    assert (await bench.open()).queue.oldest == 2
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize("delivery_mode", [AT_MOST_ONCE, EXACTLY_ONCE])
async def test_leases_that_must_be_durable_wait_for_no_others(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, delivery_mode: str
) -> None:
    monkeypatch.setattr(driver, "WRITE_INTERVAL_S", 3600.0)
    delivery = await bench.open(delivery=delivery_mode)
    waiting = [waits(delivery, worker) for worker in ("one", "two", "three")]
    await turns()
    bench.publish("a")
    assert given_offsets(await waiting[0]) == [0]
    bench.publish("b")
    assert given_offsets(await waiting[1]) == [1]
    waiting[2].cancel()
    await asyncio.wait([waiting[2]])


@pytest.mark.parametrize("is_stored", [True, False])
async def test_accepts_queued_behind_a_write_get_a_response_on_close(bench: Workbench, is_stored: bool) -> None:
    delivery = await bench.open()
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    bench.store.holds_writes = True
    accepting = [asyncio.ensure_future(delivery.settle("one", settle(offset, Verb.ACCEPT))) for offset in range(2)]
    await turns()
    if is_stored:
        delivery.close(PartitionClosed("the broker is stopping"))
    else:
        bench.store.error = StorageFailure("the disk is full")
    bench.store.release_writes()
    bench.store.release_writes()
    outcomes = await asyncio.gather(*accepting, return_exceptions=True)
    if is_stored:
        assert outcomes == [[None], [None]]
    else:
        assert [type(outcome) for outcome in outcomes] == [StorageFailure] * 2


async def test_an_accept_that_could_not_be_written_gets_no_response_and_the_queue_is_reloaded(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = await bench.open(lease_ms=100)
    bench.publish("a")
    delivery.try_receive(demand_for())
    await delivery.durable(is_all=True)
    bench.store.holds_writes = True
    accepting = asyncio.ensure_future(delivery.settle("one", settle(0, Verb.ACCEPT)))
    waiting = waits(delivery, "two")
    await turns()
    bench.store.error = StorageFailure("the disk is full")
    bench.store.release_writes()
    with pytest.raises(StorageFailure):
        await accepting
    assert await waiting == []
    assert delivery.is_closed
    bench.store.error, bench.store.holds_writes = None, False
    bench.clock.advance_ms(200)
    again = await bench.open(lease_ms=100)
    received = again.try_receive(demand_for(1, "two"))
    assert (offsets(received), received.leases[0].attempt) == ([0], 2)
    # Once, and not when another node has the queue.
    bench.store.error = FencedLeaderEpoch("another leads")
    again.release_worker("two")
    await turns()
    assert (again.is_closed, len(caplog.messages)) == (True, 1)
    assert "nothing confirmed is lost" in caplog.text


async def test_a_queue_led_elsewhere_redirects_every_worker(bench: Workbench) -> None:
    delivery = await bench.open()
    waiting = waits(delivery)
    await turns()
    bench.partition.close()
    assert await waiting == []
    with pytest.raises(NotLeader):
        delivery.settle_now("one", settle(0, Verb.ACCEPT))
    with pytest.raises(NotLeader):
        await receive([delivery], demand_for(), PLENTY, wait_s=0)
    delivery.release_worker("one")
    delivery.close(NotLeader("again"))


async def test_an_unexpected_failure_closes_the_queue(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    delivery = await bench.open(lease_ms=100)
    waiting = waits(delivery)
    await turns()
    monkeypatch.setattr(driver, "scan_log", fails)
    bench.publish("a")
    assert await waiting == []
    assert delivery.is_closed
    assert "a queue stopped because of a bug; it restarts from its stored state" in caplog.text
    monkeypatch.undo()
    again = await bench.open(lease_ms=100)
    again.try_receive(demand_for())
    monkeypatch.setattr(again.queue, "tick", fails)
    await asyncio.wait_for(_closed(again), WAIT_S)
    with pytest.raises(CoordinatorUnavailable):
        again.try_receive(demand_for())


async def _closed(delivery: Delivery) -> None:
    await until(lambda: delivery.is_closed)


# -- the log -----------------------------------------------------------------------------------------------------


async def test_retention_removes_messages_and_their_leases(bench: Workbench) -> None:
    delivery = await bench.open()
    for value in "abc":
        bench.publish(value)
    assert offsets(delivery.try_receive(demand_for(2))) == [0, 1]
    bench.partition.delete_before(Offset(2))
    assert offsets(delivery.try_receive(demand_for(5))) == [2]
    (late,) = delivery.settle_now("one", settle(0, Verb.ACCEPT))
    assert isinstance(late, InvalidRecordState)


async def test_a_seek_voids_leases_and_redelivers(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    waiting = waits(delivery, "two", 5)
    await turns()
    delivery.seek(Offset(1))
    assert given_offsets(await waiting) == [1]
    (late,) = delivery.settle_now("one", settle(1, Verb.ACCEPT))
    assert isinstance(late, InvalidRecordState)


async def test_a_range_lost_by_the_disk_blocks_nothing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.broker.subscriptions import log_scan

    for value in "abcd":
        bench.publish(value)
    delivery = await bench.open()
    assert offsets(delivery.try_receive(demand_for(1))) == [0]
    read = log_scan.read_batches

    def damaged(partition: object, offset: int, *rest: object, **more: object) -> object:
        if 1 <= offset < 3:
            raise DamagedRange("lost", start=1, end=3)
        return read(partition, offset, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(log_scan, "read_batches", damaged)
    monkeypatch.setattr(driver, "read_batches", damaged)
    assert given_offsets(await waits(delivery, "two", 5)) == [3]
    other = await bench.open(partition=bench.partition)
    other.seek(Offset(1))
    assert given_offsets(await waits(other, "two", 5)) == [3]


async def test_a_message_under_repair_is_revived_later_and_not_missing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await bench.open(dead_letter_topic="dead")
    bench.publish("a")
    delivery.try_receive(demand_for(1))
    delivery.settle_now("one", settle(0, Verb.REJECT))
    assert delivery.queue.dead_lettered(0, b"there", now_ms=bench.clock.now_ms())
    repairing = [RepairPending("the disk lost the offsets 0 to 0; they are being fetched from another replica")]
    read = Partition.read

    def read_or_repair(partition: Partition, offset: Offset, *, max_bytes: int) -> Buffer:
        if repairing:
            raise repairing.pop()
        return read(partition, offset, max_bytes=max_bytes)

    async def revive(*_request: object) -> list[int]:
        """Revive as over the wire, where an error is a code."""
        try:
            return [*await delivery.revive({Offset(0): bytes(LETTER_BYTES)}, {}, epoch=delivery.leader_epoch)]
        except StorageFailure as error:
            raise error_from_code(error_code(error), str(error)) from error

    monkeypatch.setattr(Partition, "read", read_or_repair)
    monkeypatch.setattr(SubscriptionClient, "revive", revive)
    headers = {"subscription": "billing", "topic": "orders", "topic-id": str(UUID(int=7)), "partition": 0, "offset": 0}
    headers["leader-epoch"] = delivery.leader_epoch
    named = tuple((f"dlq-{name}", str(text).encode()) for name, text in headers.items())
    record = Record(Offset(5), 0, None, None, named)
    dlq = DeadLetterClient(Client.connect("127.0.0.1:1"), "dead", "cli", patience_s=WAIT_S)
    assert await dlq.revive([LeasedMessage(None, "dead", UUID(int=3), 0, 1, 0, record)]) == [None]
    assert not repairing
    monkeypatch.setattr(Partition, "read", read)
    assert offsets(delivery.try_receive(demand_for(1))) == [0]


@pytest.mark.parametrize("epoch", ["", "x", "-1", "2147483648", "9" * 30])
def test_a_letter_with_an_impossible_leader_epoch_has_no_origin(epoch: str) -> None:
    """Anyone who may write to the topic can publish one."""
    headers = {"subscription": "billing", "topic": "orders", "topic-id": str(UUID(int=7)), "partition": 0, "offset": 0}
    headers["leader-epoch"] = epoch
    named = tuple((f"dlq-{name}", str(text).encode()) for name, text in headers.items())
    record = Record(Offset(5), 0, None, None, named)
    assert origin_of(LeasedMessage(None, "dead", UUID(int=3), 0, 1, 0, record)) is None


async def test_transactional_messages_are_delivered_once_committed(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish_in_transaction("aborted", producer_id=1, commit=False)
    bench.publish_in_transaction("open", producer_id=2, commit=None)
    bench.publish("behind")
    waiting = waits(delivery, count=5)
    await turns()
    assert not waiting.done()
    bench.end_transaction(2, commit=True)
    assert given_offsets(await waiting) == [2, 3]
    uncommitted = await bench.open(isolation=READ_UNCOMMITTED)
    uncommitted.seek(Offset(0))
    assert offsets(uncommitted.try_receive(demand_for(9))) == [0, 2, 3]


@pytest.mark.parametrize("ordered", [False, True])
async def test_all_waiting_workers_are_served_although_the_first_takes_everything_scanned(
    bench: Workbench, ordered: bool
) -> None:
    """It takes a whole batch, or the key of all messages within the scan window."""
    delivery = await bench.open(ordered=ordered)
    bench.publish_in_transaction("open", producer_id=2, commit=None)
    values = ["same key"] * driver.SCAN_OFFSETS_ORDERED if ordered else ["x" * (driver.SCAN_BYTES - 100), "y"]
    bench.publish(*values, key=b"one")
    bench.publish("behind", key=b"two")
    demands = [demand_for(1, f"w{number}")._replace(whole_batches=True) for number in range(3)]
    waiting = [asyncio.ensure_future(receive([delivery], demand, PLENTY, wait_s=WAIT_S)) for demand in demands]
    await turns()
    assert delivery.waiting == 3
    # All become visible at once, and nothing wakes the queue later.
    bench.end_transaction(2, commit=True)
    first_offsets = [given_offsets(reply)[0] for reply in await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S / 2)]
    assert first_offsets == [0, 1, 1 + len(values)]


async def test_a_queue_switched_to_read_committed_waits_for_open_transactions(bench: Workbench) -> None:
    delivery = await bench.open(isolation=READ_UNCOMMITTED)
    bench.publish_in_transaction("open", producer_id=2, commit=None)
    assert offsets(delivery.try_receive(demand_for(9))) == [0]
    delivery.settle_now("one", settle(0, Verb.RELEASE, 0))
    delivery.change(SubscriptionSettings(), None)
    waiting = waits(delivery)
    await turns()
    assert not waiting.done()
    bench.end_transaction(2, commit=True)
    assert given_offsets(await waiting) == [0]


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_unreadable_batch_is_named_and_skipped(
    bench: Workbench, caplog: pytest.LogCaptureFixture, ordered: bool
) -> None:
    delivery = await bench.open(ordered=ordered)
    bench.publish("a", key=b"a")
    broken = encode_batch([NewRecord(b"a", b"x" * 500, (), 1)], compression=COMPRESSION_ZSTD)
    _break(broken)
    bench.partition.write(broken, acks=-1)
    bench.publish("b", key=b"b")
    grants = await receive([delivery], demand_for(5), PLENTY, wait_s=0)
    grants += await receive([delivery], demand_for(5), PLENTY, wait_s=0)
    assert given_offsets(grants) == [0, 2]
    (reported,) = [record for record in caplog.records if "skipped" in record.message]
    assert (reported.__dict__["first"], reported.__dict__["last"]) == (1, 1)


@pytest.mark.parametrize("codec", [COMPRESSION_GZIP, COMPRESSION_SNAPPY, COMPRESSION_LZ4, COMPRESSION_ZSTD])
async def test_large_batches_are_decompressed_elsewhere_and_those_over_the_limit_skipped(
    bench: Workbench, codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = encode_batch([NewRecord(b"a", bytes(LIGHT_BYTES_MAX), (), 1)], compression=codec)
    monkeypatch.setattr(compression, "_limits", (2 * LIGHT_BYTES_MAX, 1000))
    over = encode_batch([NewRecord(b"a", bytes(2 * LIGHT_BYTES_MAX), (), 1)], compression=codec)
    bench.publish("a", key=b"a")
    for batch in (heavy, over):
        bench.partition.write(batch, acks=-1)
    bench.publish("b", key=b"b")
    opened: list[int] = []

    async def opener(seen: ScannedRange) -> ScannedRange:
        assert len(opened) < 2
        opened.append(seen.first)
        return scan_heavy_batch(seen)

    delivery = await bench.open(opener=opener)
    grants: list[Grant] = []
    while len(given_offsets(grants)) < 3:
        grants += await receive([delivery], demand_for(5), PLENTY, wait_s=WAIT_S)
    assert given_offsets(grants) == [0, 1, 3]
    assert opened == [1, 2]
    assert delivery.damaged == 1


async def test_a_waiting_worker_gets_messages_behind_a_batch_over_the_limit(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_limits", (2 * LIGHT_BYTES_MAX, 1000))
    over = encode_batch([NewRecord(b"a", bytes(2 * LIGHT_BYTES_MAX), (), 1)], compression=COMPRESSION_ZSTD)
    bench.partition.write(over, acks=-1)
    bench.publish("b", key=b"b")
    delivery = await bench.open()
    # Nothing else wakes the queue.
    grants = await asyncio.wait_for(receive([delivery], demand_for(5), PLENTY, wait_s=10 * WAIT_S), WAIT_S)
    assert given_offsets(grants) == [1]


async def test_records_of_large_batches_are_decoded_elsewhere(bench: Workbench) -> None:
    records = [NewRecord(b"%d" % (number % 7), b"", (), 1) for number in range(LIGHT_RECORDS_MAX + 1)]
    bench.partition.write(encode_batch(records), acks=-1)
    opened: list[int] = []

    async def opener(seen: ScannedRange) -> ScannedRange:
        opened.append(seen.first)
        return scan_heavy_batch(seen)

    plain = await bench.open(opener=opener)
    assert len(offsets(plain.try_receive(demand_for(5)))) == 5
    assert opened == []
    ordered = await bench.open(opener=opener, ordered=True)
    grants = await receive([ordered], demand_for(10), PLENTY, wait_s=WAIT_S)
    assert given_offsets(grants) == list(range(7))
    assert opened == [0]


def _break(batch: bytearray) -> None:
    """Corrupt the compressed data, and make the checksum match."""
    import crc32c

    batch[62:] = bytes(len(batch) - 62)
    batch[17:21] = crc32c.crc32c(bytes(batch[21:])).to_bytes(4, "big")


# -- filters -----------------------------------------------------------------------------------------------------


async def test_a_seek_during_filtering_repeats_it(bench: Workbench) -> None:
    queue_filter = HeldFilter("key = 'a'", matches=True)
    bench.publish("a", "b")
    delivery = await bench.open(queue_filter=queue_filter, filter="key = 'a'")
    waiting = waits(delivery, count=5)
    await queue_filter.asked.wait()
    delivery.seek(Offset(1))
    queue_filter.responses.set()
    assert given_offsets(await waiting) == [1]
    assert delivery.queue.filter_version == int(queue_filter.filter.version, 16) & (2**63 - 1)


async def test_a_filter_changed_during_its_evaluation_decides_nothing(bench: Workbench) -> None:
    before, after = HeldFilter("key = 'a'", matches=True), HeldFilter("key = 'b'", matches=False)
    bench.publish("a")
    delivery = await bench.open(queue_filter=before, filter="key = 'a'")
    waiting = waits(delivery, count=5)
    await before.asked.wait()
    after.responses.set()
    delivery.change(SubscriptionSettings(filter="key = 'b'"), after)
    before.responses.set()
    await turns()
    assert not waiting.done()
    delivery.change(SubscriptionSettings(), None)
    second = bench.publish("b")
    assert given_offsets(await waiting) == [second]


async def test_a_failing_filter_is_retried(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FILTER_RETRY_S", 0.01)
    queue_filter = HeldFilter("key = 'a'", matches=True)
    queue_filter.failures = 2
    queue_filter.responses.set()
    delivery = await bench.open(queue_filter=queue_filter, filter="key = 'a'")
    waiting = waits(delivery)
    await turns()
    bench.publish("a")
    assert given_offsets(await waiting) == [0]


async def test_messages_that_their_filter_cannot_decode_are_skipped_and_counted(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    queue_filter = HeldFilter("key = 'a'", matches=True)
    queue_filter.unreadable = ((1, 2, "the process that reads it died 2 times"),)
    queue_filter.responses.set()
    bench.publish("a", "b", "c", "d")
    delivery = await bench.open(queue_filter=queue_filter, filter="key = 'a'")
    assert given_offsets(await receive([delivery], demand_for(5), PLENTY, wait_s=WAIT_S)) == [0, 3]
    assert delivery.damaged == 2
    (logged,) = [record for record in caplog.records if "skipped" in record.message]
    assert (vars(logged)["first"], vars(logged)["last"]) == (1, 2)
    assert "died" in vars(logged)["reason"]


async def test_a_closing_queue_cancels_its_filter(bench: Workbench) -> None:
    queue_filter = HeldFilter("key = 'a'", matches=True)
    bench.publish("a")
    delivery = await bench.open(queue_filter=queue_filter, filter="key = 'a'")
    waiting = waits(delivery)
    await queue_filter.asked.wait()
    delivery.close(NotLeader("moved"))
    assert await waiting == []
    await turns()


async def test_the_clients_of_workers_are_known_while_they_hold_messages(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a", "b", "c")
    demand = demand_for(2, "one")._replace(origin=Origin("packer", "10.0.0.1:5"))
    delivery.try_receive(demand)
    delivery.try_receive(demand_for(1, "two"))
    # The node has not leased to this worker itself; later requests identify it.
    delivery.record_origin("two", Origin("painter", "10.0.0.2:6"), replaces=True)
    delivery.record_origin("one", Origin("gateway", "127.0.0.1:1"), replaces=False)
    held = [
        (offset_range.first, offset_range.last, offset_range.attempt, offset_range.worker, offset_range.origin)
        for offset_range in delivery.held_ranges()
    ]
    assert held == [(0, 1, 1, "one", ("packer", "10.0.0.1:5")), (2, 2, 1, "two", ("painter", "10.0.0.2:6"))]
    for number in range(1000):
        delivery.record_origin(f"gone-{number}", Origin("passer-by", ""))
    assert len(delivery._origins) <= 2 * 2 + ORIGINS_KEPT
    assert [offset_range.origin.client_id for offset_range in delivery.held_ranges()] == ["packer", "painter"]
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    assert [(offset_range.first, offset_range.last) for offset_range in delivery.held_ranges()] == [(1, 1), (2, 2)]


async def test_a_caught_up_worker_causes_no_work_until_something_happens(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a")
    (lease,) = delivery.try_receive(demand_for(5)).leases
    # The first scan splits the coarse bucket of the lease's expiry.
    assert delivery.try_receive(demand_for(5)).leases == []
    prepared: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "_prepare", prepared.append)
        assert delivery.try_receive(demand_for(5)).leases == []
    assert prepared == []
    # The log grows, a lease expires, the wall clock is set back: each is noticed.
    bench.publish("b")
    assert offsets(delivery.try_receive(demand_for(5))) == [1]
    bench.clock.jump_ms(-10_000)
    delivery.try_receive(demand_for(5))
    assert {held.deadline_ms for held in delivery.held_ranges()} == {lease.deadline_ms - 10_000}
    bench.clock.advance_ms(lease.deadline_ms - 10_000 - bench.clock.now_ms())
    (again,) = delivery.try_receive(demand_for(5)).leases
    assert (again.first, again.last, again.attempt) == (0, 1, 2)
