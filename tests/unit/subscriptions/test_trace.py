"""The history of a message as known to the leader of its queue."""

from __future__ import annotations

import pytest

from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import LETTER_BYTES, POSITION, Settlement
from millstream.broker.subscriptions.outcomes import message_state, trace_message
from millstream.core.errors import RequestTimedOut
from millstream.core.ids import Offset
from millstream.core.subscription import Verb
from millstream.protocol.private.subscriptions import DeadLetterPosition, SubscriptionTrace
from millstream_testing.queue_bench import Workbench, demand_for


def settle(offset: int, verb: Verb, delay_ms: int | None = None, reason: str = "") -> list[Settlement]:
    return [Settlement(Offset(offset), Offset(offset), verb, delay_ms, reason)]


async def trace(delivery: Delivery, offset: int = 0, start: int | None = 0) -> SubscriptionTrace:
    return await trace_message(delivery, offset, subscription="billing", start=start)


def kinds(subscription_trace: SubscriptionTrace) -> list[str]:
    return [event.kind for event in subscription_trace.events]


async def test_a_retried_message_has_all_its_attempts(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a")
    assert (await trace(delivery)).state == "waiting"
    began_ms = bench.clock.now_ms()
    (lease,) = delivery.try_receive(demand_for()).leases
    held = await trace(delivery)
    assert (held.state, held.worker, held.until_ms, held.attempts) == ("leased", "one", lease.deadline_ms, 1)
    delivery.settle_now("one", settle(0, Verb.RELEASE, 5000, "no stock"))
    delayed = await trace(delivery)
    assert (delayed.state, delayed.reason, delayed.until_ms) == ("delayed", "no stock", began_ms + 5000)
    bench.clock.advance_ms(6000)
    delivery.try_receive(demand_for())
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    done = await trace(delivery)
    assert (done.state, done.is_final, done.attempts, done.worker) == ("accepted", True, 2, "one")
    assert (done.first_delivery_ms, done.ended_ms) == (began_ms, began_ms + 6000)
    assert kinds(done) == ["acquired", "released", "acquired", "accepted"]
    assert [event.reason for event in done.events] == ["", "no stock", "", ""]
    assert done.is_complete
    assert done.unknown == ""


async def test_a_dead_letter_is_named_with_its_reason(bench: Workbench) -> None:
    delivery = await bench.open(dead_letter_topic="dead")
    bench.publish("a")
    delivery.try_receive(demand_for())
    delivery.settle_now("one", settle(0, Verb.REJECT, None, "not an order"))
    rejected = await trace(delivery)
    assert (rejected.state, rejected.reason) == ("rejected", "not an order")
    delivery.queue.dead_lettered(0, POSITION.pack(0, 7) + b"dead", now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    subscription_trace = await trace(delivery)
    assert (subscription_trace.state, subscription_trace.reason, subscription_trace.worker) == (
        "dead-lettered",
        "not an order",
        "one",
    )
    assert subscription_trace.dead_letter == DeadLetterPosition("dead", 0, 7)


async def test_other_outcomes_have_a_reason(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish(*"abcd")
    delivery.try_receive(demand_for(1))
    delivery.seek(Offset(2))
    moved = await trace(delivery, 1)
    assert (moved.state, moved.reason) == ("skipped", "the subscription was moved to offset 2")
    delivery.queue.drop_before(3, now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    assert (await trace(delivery, 2)).state == "expired"
    bench_start = await trace(delivery, 0, start=1)
    # A subscription that was moved may have been moved back before its start.
    assert bench_start.state == "skipped"


async def test_a_seek_forward_does_not_change_outcomes(bench: Workbench) -> None:
    delivery = await bench.open(dead_letter_topic="dead")
    bench.publish(*"abcde")
    delivery.try_receive(demand_for(3))
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    delivery.settle_now("one", settle(1, Verb.REJECT, None, "not an order"))
    delivery.queue.dead_lettered(1, POSITION.pack(0, 7) + b"dead", now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    delivery.seek(Offset(4))
    accepted, letter, skipped = [await trace(delivery, offset) for offset in range(3)]
    assert (accepted.state, accepted.worker, accepted.reason) == ("accepted", "one", "")
    assert (letter.state, letter.worker, letter.reason) == ("dead-lettered", "one", "not an order")
    assert letter.dead_letter == DeadLetterPosition("dead", 0, 7)
    assert (skipped.state, skipped.worker) == ("skipped", "")
    states = [(await message_state(delivery, offset, start=0, wait_s=0)).state for offset in range(3)]
    assert states == ["accepted", "dead-lettered", "skipped"]
    # A seek backward starts over.
    delivery.seek(Offset(0))
    assert (await trace(delivery)).state == "waiting"
    delivery.try_receive(demand_for(1))
    delivery.seek(Offset(4))
    assert [(await trace(delivery, offset)).state for offset in range(2)] == ["skipped", "skipped"]


async def test_retention_does_not_change_outcomes(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish(*"abc")
    delivery.try_receive(demand_for(3))
    delivery.settle_now("one", settle(1, Verb.ACCEPT))
    delivery.queue.drop_before(2, now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    assert [(await trace(delivery, offset)).state for offset in range(3)] == ["expired", "accepted", "leased"]


async def test_forgotten_outcomes_are_reported_as_such(bench: Workbench) -> None:
    delivery = await bench.open()
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    await delivery.durable()
    delivery.outcomes.clear()
    certain = await trace(delivery, 0)
    assert certain.state == "accepted"
    assert "--ledger" in certain.unknown
    delivery.settle_now("one", settle(1, Verb.REJECT))
    await delivery.durable()
    delivery.outcomes.clear()
    assert (await trace(delivery, 0)).state == "done"
    bench.publish("c")
    delivery.try_receive(demand_for(3))
    await delivery.durable(is_all=True)
    delivery.outcomes.clear()
    held = await trace(delivery, 2)
    assert (held.state, held.is_complete) == ("leased", False)
    assert "earlier deliveries" in held.unknown


async def test_unsearchable_events_are_mentioned(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = await bench.open(ledger=True)
    bench.publish("a")
    delivery.try_receive(demand_for())
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    await delivery.durable(is_all=True)
    delivery.outcomes.clear()

    async def refuse(_key: object, _offset: int, _since_ms: int) -> list[bytes]:
        raise RequestTimedOut("the search took too long")

    monkeypatch.setattr(bench.store, "frames", refuse)
    subscription_trace = await trace(delivery)
    assert (subscription_trace.state, subscription_trace.is_complete) == ("accepted", False)
    assert "the search took too long" in subscription_trace.unknown


async def test_a_ledger_remembers_outcomes_that_the_node_has_forgotten(bench: Workbench) -> None:
    delivery = await bench.open(dead_letter_topic="dead", ledger=True)
    bench.publish("a", "b")
    delivery.try_receive(demand_for(2))
    delivery.settle_now("one", settle(0, Verb.REJECT, None, "not an order"))
    delivery.settle_now("one", settle(1, Verb.ACCEPT))
    delivery.queue.dead_lettered(0, POSITION.pack(0, 7) + b"dead", now_ms=bench.clock.now_ms())
    delivery.queue_changed()
    await delivery.durable(is_all=True)
    remembered = await trace(delivery)
    delivery.outcomes.clear()
    assert await trace(delivery) == remembered
    assert (remembered.state, remembered.is_complete) == ("dead-lettered", True)
    assert kinds(remembered) == ["acquired", "rejecting", "dead_lettered"]
    assert kinds(await trace(delivery, 1)) == ["acquired", "accepted"]
    # Later events are remembered, and earlier ones are found.
    await delivery.revive({Offset(0): bytes(LETTER_BYTES)}, {}, epoch=delivery.leader_epoch)
    revived = await trace(delivery)
    assert (revived.state, revived.attempts, revived.is_complete) == ("waiting", 0, True)
    assert kinds(revived) == ["acquired", "rejecting", "dead_lettered", "revived"]
    delivery.try_receive(demand_for())
    delivery.settle_now("one", settle(0, Verb.ACCEPT))
    accepted = await trace(delivery)
    assert (accepted.state, accepted.attempts, accepted.reason) == ("accepted", 1, "")
