"""The states of a message as seen by its publisher, from publication to the end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from millstream.broker.subscriptions import outcomes
from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.outcomes import OutcomeBudget, OutcomeHistory, message_state
from millstream.core.errors import NotLeader, PolicyViolation
from millstream.core.ids import Offset
from millstream.core.subscription import AT_MOST_ONCE, Verb
from millstream.protocol.private.subscriptions import MessageDelivery
from millstream_testing.queue_bench import Workbench, demand_for, turns

WAIT_S = 60.0


def settle(offset: int, verb: Verb, delay_ms: int | None = None) -> list[Settlement]:
    return [Settlement(Offset(offset), Offset(offset), verb, delay_ms)]


async def state(delivery: Delivery, offset: int = 0, start: int | None = 0) -> str:
    return (await message_state(delivery, offset, start=start, wait_s=0)).state


async def test_a_message_from_publication_to_acceptance(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a")
    assert await state(delivery) == "waiting"
    (lease,) = delivery.try_receive(demand_for()).leases
    reported = await message_state(delivery, 0, start=0, wait_s=0)
    assert reported == MessageDelivery("leased", 1, lease.deadline_ms)
    delivery.settle_now("one", settle(0, Verb.RELEASE, 5000))
    assert await message_state(delivery, 0, start=0, wait_s=0) == MessageDelivery(
        "delayed", 1, bench.clock.now_ms() + 5000
    )
    bench.clock.advance_ms(6000)
    delivery.try_receive(demand_for())
    waiting = asyncio.ensure_future(message_state(delivery, 0, start=0, wait_s=WAIT_S))
    await turns()
    assert not waiting.done()
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    assert await waiting == MessageDelivery("accepted", 2, is_final=True)


async def test_a_message_with_another_outcome(bench: Workbench) -> None:
    delivery = await bench.open(dead_letter_topic="dead")
    bench.publish("a", "b", "c")
    delivery.try_receive(demand_for(3))
    delivery.settle_now("one", settle(0, Verb.REJECT))
    assert await state(delivery, 0) == "rejected"
    delivery.queue.dead_lettered(0, b"", now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    assert await state(delivery, 0) == "dead-lettered"
    delivery.queue.settings = type(delivery.settings)()
    delivery.settle_now("one", settle(1, Verb.REJECT))
    assert await state(delivery, 1) == "dropped"
    assert await state(delivery, 0, start=1) == "skipped"
    delivery.seek(Offset(3))
    assert await state(delivery, 2) == "skipped"


async def test_filtered_messages_and_offsets_without_messages(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish(*"abcdefghij")
    now_ms = bench.clock.now_ms()
    matches = np.array([True, False] * 5)
    delivery.queue.add_scanned(0, 10, now_ms=now_ms, matches=matches, absent=[(4, 4)])
    assert [await state(delivery, offset) for offset in range(6)] == [
        "waiting",
        "filtered",
        "waiting",
        "filtered",
        "absent",
        "filtered",
    ]


async def test_a_forgotten_outcome(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a", "b", "c")
    delivery.try_receive(demand_for(3))
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    delivery.outcomes.bytes_max = 0
    delivery.settle_now("one", settle(1, Verb.ACCEPT))
    # No message has had another outcome so far, so it is still known.
    assert await state(delivery, 0) == "accepted"
    delivery.settle_now("one", settle(2, Verb.REJECT))
    assert await state(delivery, 0) == "done"


async def test_waiters_are_notified_of_the_outcome_in_a_busy_queue(bench: Workbench) -> None:
    delivery = await bench.open()
    delivery.outcomes.bytes_max = 0
    bench.publish("a", "b", "c")
    delivery.try_receive(demand_for(3))
    waiting = [asyncio.ensure_future(message_state(delivery, offset, start=0, wait_s=WAIT_S)) for offset in range(3)]
    await turns()
    # All in one loop turn, so that no other task sees an intermediate state.
    delivery.settle_now("one", settle(2, Verb.REJECT))
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    delivery.settle_now("one", settle(1, Verb.ACCEPT))
    assert [(await waiter).state for waiter in waiting] == ["accepted", "accepted", "dropped"]


async def test_at_most_once_messages_are_accepted_on_delivery(bench: Workbench) -> None:
    delivery = await bench.open(delivery=AT_MOST_ONCE)
    bench.publish("a")
    delivery.try_receive(demand_for())
    assert await state(delivery) == "accepted"


async def test_waiters_are_notified_when_the_queue_closes(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a")
    waiting = asyncio.ensure_future(message_state(delivery, 0, start=0, wait_s=WAIT_S))
    await turns()
    delivery.close(NotLeader("elsewhere"))
    with pytest.raises(NotLeader):
        await waiting


async def test_the_number_of_waiters_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "WATCHERS_MAX", 1)
    delivery = await bench.open()
    bench.publish("a")
    waiting = asyncio.ensure_future(message_state(delivery, 0, start=0, wait_s=WAIT_S))
    await turns()
    with pytest.raises(PolicyViolation):
        await message_state(delivery, 0, start=0, wait_s=WAIT_S)
    waiting.cancel()
    await asyncio.wait([waiting])
    again = asyncio.ensure_future(message_state(delivery, 0, start=0, wait_s=WAIT_S))
    await turns()
    assert not again.done()
    delivery.try_receive(demand_for())
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    assert (await again).state == "accepted"


def test_the_outcomes_kept_by_all_queues_are_bounded() -> None:
    remembered = OutcomeBudget(bytes_max=300)
    histories = [OutcomeHistory() for _ in range(4)]
    for kept_state in histories:
        kept_state.share(remembered)
    for number in (0, 1, 2, 0, 3):
        histories[number].add_frame(bytes(100))
    # The queues that have been idle for longest forget first.
    assert [kept_state._bytes for kept_state in histories] == [200, 0, 0, 100]
    assert remembered.bytes == 300
    histories[0].close()
    assert (remembered.bytes, histories[0]._bytes) == (100, 0)
    histories[0].close()
    histories[1].add_frame(bytes(50))
    assert remembered.bytes == 150
