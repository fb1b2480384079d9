"""A worker that polls one or several queues: what it receives first, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millstream.broker.net.budget import Budget
from millstream.broker.net.presence import Presence
from millstream.broker.net.response import Buffers
from millstream.broker.subscriptions import delivery as delivery_module
from millstream.broker.subscriptions import receiving
from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.receiving import Grant, ParkedLease, receive
from millstream.broker.subscriptions.state_store import PendingWrite
from millstream.core.errors import NotLeader
from millstream.core.ids import Offset
from millstream.core.subscription import EXACTLY_ONCE, Verb
from millstream_testing.queue_bench import Workbench, demand_for, offsets, turns

WAIT_S = 60.0
PLENTY = Budget(1 << 30)


def given_offsets(grants: list[Grant]) -> list[int]:
    return [offset for reply in grants for offset in offsets(reply.received)]


# -- memory ------------------------------------------------------------------------------------------------------


async def test_delivered_messages_count_as_client_memory_until_sent(bench: Workbench) -> None:
    delivery = await bench.open(delivery=EXACTLY_ONCE)
    budget = Budget(1000)
    bench.publish("a")
    bench.publish("b" * 1000)
    bench.store.holds_writes = True
    # One batch is delivered although it exceeds a fair share of the rest, but not a second one.
    asking = asyncio.ensure_future(receive([delivery], demand_for(5)._replace(max_bytes=9999), budget, wait_s=0))
    await turns()
    held_bytes = budget.used_bytes
    bench.store.holds_writes = False
    bench.store.release_writes()
    ((_, received, *_),) = await asking
    assert (offsets(received), held_bytes, budget.used_bytes) == ([0], sum(map(len, received.batches)), 0)


async def test_a_worker_waits_for_client_memory(bench: Workbench) -> None:
    delivery = await bench.open()
    budget = Budget(1000)
    budget.reserve(1000)
    bench.publish("a")
    assert await receive([delivery], demand_for(5), budget, wait_s=0) == []
    asking = asyncio.ensure_future(receive([delivery], demand_for(5), budget, wait_s=WAIT_S))
    await turns()
    assert (asking.done(), budget.waiting) == (False, 1)
    budget.release(1000)
    assert given_offsets(await asking) == [0]
    bench.publish("b")
    budget.reserve(1000)
    asking = asyncio.ensure_future(receive([delivery], demand_for(5), budget, wait_s=WAIT_S))
    await turns()
    asking.cancel()
    await asyncio.wait([asking])
    assert (budget.waiting, delivery.waiting) == (0, 0)
    await turns()
    assert budget.used_bytes == 1000


# -- requests parked without a task ------------------------------------------------------------------------------


def sizes(grants: list[Grant], error: Exception | None) -> Buffers:
    return [b"%d" % len(given_offsets(grants)) if error is None else str(error).encode()]


def fails(_grants: list[Grant], _error: Exception | None) -> Buffers:
    raise KeyError("a bug")


def parked(budget: Budget, response: Callable[[list[Grant], Exception | None], Buffers] = sizes) -> ParkedLease:
    return ParkedLease(budget, "one", Presence(), response, lambda error: [type(error).__name__.encode()])


@pytest.mark.parametrize("is_available", [True, False])
async def test_messages_do_not_wait_for_acceptances_to_share_a_write(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    monkeypatch.setattr(delivery_module, "WRITE_INTERVAL_S", 3600.0)
    delivery = await bench.open()
    bench.publish("a")
    delivery.try_receive(demand_for(1))
    other = asyncio.ensure_future(receive([delivery], demand_for(1, "two"), PLENTY, wait_s=WAIT_S))
    await turns()
    delivery.settle_now("one", [Settlement(Offset(0), Offset(0), Verb.ACCEPT)])
    write = delivery.pending_write()
    assert write is not None
    if is_available:
        bench.publish("b", "c")
        await turns()
    waiting = parked(PLENTY)
    waiting.begin([delivery], demand_for(1), wait_s=WAIT_S, writes=[write])
    if not is_available:
        assert not write.is_done
        bench.publish("b")
        bench.publish("c")
    await turns()
    assert (waiting.buffers, write.is_done, given_offsets(await other)) == ([b"1"], True, [1])


@pytest.mark.parametrize("is_available", [True, False])
async def test_a_failed_response_is_an_error_and_leases_nothing(bench: Workbench, is_available: bool) -> None:
    delivery, budget = await bench.open(), Budget(1 << 20)
    if is_available:
        bench.publish("a")
    waiting = parked(budget, fails)
    begun = waiting.begin([delivery], demand_for(), wait_s=WAIT_S)
    if not is_available:
        assert begun is waiting
        bench.publish("a")
    assert await asyncio.wait_for(waiting, WAIT_S) == [b"KeyError"]
    await turns()
    assert (budget.used_bytes, delivery.is_closed) == (0, False)
    (lease,) = delivery.try_receive(demand_for(worker="two")).leases
    assert (lease.first, lease.attempt) == (0, 1)


@pytest.mark.parametrize("method", ["try_receive", "park"])
async def test_an_exception_in_a_queue_is_an_error_and_nothing_is_leased(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    delivery, budget = await bench.open(), Budget(1 << 20)
    other = await bench.open(partition=bench.make_partition(1))
    if method == "try_receive":
        bench.publish("a")
    waiting = parked(budget)
    with monkeypatch.context() as bug:
        bug.setattr(other, method, broken)
        response = waiting.begin([delivery, other], demand_for(5), wait_s=WAIT_S)
    assert response == [b"'a bug'"]
    await turns()
    assert (budget.used_bytes, budget.waiting, delivery.waiting, other.waiting) == (0, 0, 0, 0)
    if method == "park":
        bench.publish("a")
    (lease,) = delivery.try_receive(demand_for(worker="two")).leases
    assert (lease.first, lease.attempt) == (0, 1)


async def test_a_failure_without_a_response_does_not_block_the_connection(bench: Workbench) -> None:
    delivery, budget = await bench.open(), Budget(1 << 20)
    bench.publish("a")

    def refuse(_error: BaseException) -> Buffers:
        raise ValueError("another bug")

    waiting = ParkedLease(budget, "one", Presence(), fails, refuse)
    waiting.begin([delivery], demand_for(), wait_s=WAIT_S)
    await turns()
    assert (waiting.is_resolved, waiting.buffers, budget.used_bytes) == (True, None, 0)


async def test_messages_behind_a_write_are_held_and_counted_until_it_is_durable(bench: Workbench) -> None:
    delivery, budget = await bench.open(), Budget(1 << 20)
    bench.publish("a")
    write, lost = PendingWrite(), PendingWrite()
    waiting = parked(budget)
    assert waiting.begin([delivery], demand_for(), wait_s=WAIT_S, writes=[write, lost]) is waiting
    write.finish()
    await turns()
    assert (waiting.is_resolved, budget.used_bytes > 0) == (False, True)
    lost.finish(NotLeader("moved"))
    assert (waiting.is_resolved, waiting.buffers) == (True, [b"1"])
    await turns()
    assert budget.used_bytes == 0


async def test_a_client_that_disconnects_before_a_write_is_durable_leases_nothing(bench: Workbench) -> None:
    delivery, budget = await bench.open(), Budget(1 << 20)
    bench.publish("a")
    write, waiting = PendingWrite(), parked(budget)
    waiting.begin([delivery], demand_for(), wait_s=WAIT_S, writes=[write])
    waiting.abandon()
    write.finish()
    waiting.abandon()
    await turns()
    assert (waiting.buffers, budget.used_bytes) == (None, 0)
    (lease,) = delivery.try_receive(demand_for(worker="two")).leases
    assert (lease.first, lease.attempt) == (0, 1)


async def test_messages_that_were_not_sent_are_returned(bench: Workbench) -> None:
    delivery, presence = await bench.open(), Presence()
    bench.publish("a")
    waiting = ParkedLease(PLENTY, "one", presence, sizes, lambda _error: [])
    assert waiting.begin([delivery], demand_for(), wait_s=WAIT_S) == [b"1"]
    presence.end()
    (lease,) = delivery.try_receive(demand_for(worker="two")).leases
    assert (lease.first, lease.attempt) == (0, 1)


async def test_closed_queues_only_are_an_error(bench: Workbench) -> None:
    delivery = await bench.open()
    delivery.close(NotLeader("moved"))
    write, waiting = PendingWrite(), parked(PLENTY)
    assert waiting.begin([delivery], demand_for(), wait_s=WAIT_S, writes=[write]) is waiting
    write.finish()
    assert await waiting == [b"moved"]


# -- several queues ----------------------------------------------------------------------------------------------


async def test_a_closed_queue_does_not_block_the_others(bench: Workbench) -> None:
    here = await bench.open()
    other = await bench.open(partition=bench.make_partition(1))
    other.close(NotLeader("moved"))
    waiting = asyncio.ensure_future(receive([other, here], demand_for(5), PLENTY, wait_s=WAIT_S))
    await turns()
    bench.publish("a")
    assert given_offsets(await waiting) == [0]
    bench.publish("b")
    assert given_offsets(await receive([other, here], demand_for(5), PLENTY, wait_s=0)) == [1]


async def test_leases_of_one_queue_are_returned_although_another_was_lost(bench: Workbench) -> None:
    here = await bench.open(delivery=EXACTLY_ONCE)
    bench.publish("a")
    bench.partition = bench.make_partition(1)
    other = await bench.open(delivery=EXACTLY_ONCE)
    bench.publish("b")
    bench.store.holds_writes = True
    asking = asyncio.ensure_future(receive([other, here], demand_for(5), PLENTY, wait_s=WAIT_S))
    await turns()
    other.close(NotLeader("moved"))
    bench.store.holds_writes = False
    bench.store.release_writes()
    assert [reply.delivery for reply in await asking] == [other, here]
    bench.store.holds_writes = True
    bench.publish("c")
    asking = asyncio.ensure_future(receive([here], demand_for(5), PLENTY, wait_s=0))
    await asking
    assert asking.result() == []


async def test_only_the_first_queue_exceeds_the_requested_bytes_and_no_queue_starves(bench: Workbench) -> None:
    deliveries = []
    for index in range(1, 4):
        bench.partition = bench.make_partition(index)
        deliveries.append(await bench.open())
        bench.publish("x" * 1000)
    served: list[int] = []
    for _ in range(3):
        grants = await receive(deliveries, demand_for(5)._replace(max_bytes=1500), PLENTY, wait_s=0)
        assert sum(len(batch) for reply in grants for batch in reply.received.batches) <= 1500
        served += [reply.delivery.partition.index for reply in grants]
    assert served == [1, 2, 3]


async def test_without_any_queue_the_response_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "NO_QUEUE_WAIT_S", 0.01)
    assert await receive([], demand_for(), PLENTY, wait_s=WAIT_S) == []
