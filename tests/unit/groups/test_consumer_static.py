"""Static members: their place is kept while they are away, and a second process with their instance id is fenced."""

from __future__ import annotations

import pytest

from millstream.broker.groups.consumer.member import AWAY_EPOCH, size_of
from millstream.broker.groups.requests import HeartbeatResult, LeavingMember
from millstream.core.errors import FencedInstance, FencedMemberEpoch, UnknownMember, UnreleasedInstance
from millstream_testing.consumer_harness import SESSION_MS, ConsumerHarness, SimulatedConsumer


@pytest.fixture
def harness() -> ConsumerHarness:
    made = ConsumerHarness()
    made.topics.clear()
    made.add_topic("orders", 4)
    return made


def static(member_id: str, instance_id: str = "one") -> SimulatedConsumer:
    return SimulatedConsumer(member_id, "orders", instance_id=instance_id)


def test_a_returning_static_member_keeps_its_partitions(harness: ConsumerHarness) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(away, other)
    epoch, had = harness.consumers().epoch, away.owned
    assert harness.send(away.leave_request(AWAY_EPOCH)).result() == HeartbeatResult(member_id="m0", epoch=-2)
    harness.send_heartbeat(other)
    assert harness.consumers().epoch == epoch
    back = static("m2")
    response = harness.send_heartbeat(back)
    assert (response.epoch, response.assignment) == (epoch, had)
    assert harness.consumers().epoch == epoch
    assert harness.consumers().static_members == {"one": "m2"}
    assert set(harness.consumers().members) == {"m1", "m2"}
    harness.reload()
    assert harness.send_heartbeat(back).assignment is None
    assert isinstance(harness.send(away.request()).error, FencedInstance)
    away.instance_id = None
    assert isinstance(harness.send(away.request()).error, UnknownMember)


def test_a_returning_static_member_may_change_its_subscription(harness: ConsumerHarness) -> None:
    harness.add_topic("bills", 2)
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(away, other)
    harness.send(away.leave_request(AWAY_EPOCH)).result()
    back = SimulatedConsumer("m2", "bills", instance_id="one")
    harness.settle(back, other)
    assert back.owned == harness.partitions(bills={0, 1})
    assert size_of(other.owned) == 4


def test_the_partitions_of_an_absent_member_are_reassigned_when_its_session_expires(harness: ConsumerHarness) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(away, other)
    harness.send(away.leave_request(AWAY_EPOCH)).result()
    harness.advance_ms(SESSION_MS - 1)
    harness.send_heartbeat(other)
    assert size_of(other.assigned) == 2
    harness.advance_ms(1)
    harness.settle(other)
    assert size_of(other.owned) == 4
    assert harness.consumers().static_members == {}


def test_an_absent_member_that_was_revoking_has_revoked(harness: ConsumerHarness) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(away)
    harness.send_heartbeat(other)
    harness.send_heartbeat(away)
    assert size_of(harness.consumers().members["m0"].position.pending) == 2
    harness.send(away.leave_request(AWAY_EPOCH)).result()
    harness.settle(other)
    assert size_of(other.owned) == 2
    back = static("m2")
    harness.settle(back, other)
    assert size_of(back.owned) == 2


def test_an_instance_id_in_use_is_refused(harness: ConsumerHarness) -> None:
    first = static("m0")
    harness.settle(first)
    written = len(harness.log)
    assert isinstance(harness.send(static("m1").request()).error, UnreleasedInstance)
    assert len(harness.log) == written
    harness.leave(first)
    harness.send_heartbeat(static("m1"))


def test_the_same_process_may_rejoin(harness: ConsumerHarness) -> None:
    first = static("m0")
    harness.settle(first)
    first.fence()
    assert size_of(harness.send_heartbeat(first).assignment or {}) == 4


def test_an_absent_member_must_rejoin(harness: ConsumerHarness) -> None:
    first = static("m0")
    harness.settle(first)
    harness.send(first.leave_request(AWAY_EPOCH)).result()
    assert isinstance(harness.send(first.request()).error, FencedMemberEpoch)
    first.fence()
    assert size_of(harness.send_heartbeat(first).assignment or {}) == 4


def test_an_instance_id_must_match_the_member(harness: ConsumerHarness) -> None:
    first = static("m0")
    harness.settle(first)
    first.instance_id = "two"
    for request in (first.request(), first.leave_request(), first.leave_request(AWAY_EPOCH)):
        assert isinstance(harness.send(request).error, UnknownMember)


def test_a_static_member_may_omit_its_instance_id(harness: ConsumerHarness) -> None:
    first = static("m0")
    harness.settle(first)
    first.instance_id = None
    harness.send_heartbeat(first)
    assert harness.consumers().static_members == {"one": "m0"}


def test_a_static_member_leaves_permanently(harness: ConsumerHarness) -> None:
    first, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(first, other)
    harness.leave(first)
    harness.settle(other)
    assert size_of(other.owned) == 4
    assert harness.consumers().static_members == {}


def test_a_full_group_readmits_a_static_member() -> None:
    harness = ConsumerHarness(members_max=1)
    harness.add_topic("orders", 1)
    first = static("m0")
    harness.settle(first)
    harness.send(first.leave_request(AWAY_EPOCH)).result()
    assert harness.send_heartbeat(static("m1")).epoch > 0


def test_an_operator_removes_a_static_member_by_instance_id(harness: ConsumerHarness) -> None:
    first, other = static("m0"), SimulatedConsumer("m1", "orders")
    harness.settle(first, other)
    results = harness.leave(
        LeavingMember("", "one"), LeavingMember("", "nobody"), LeavingMember("m9"), LeavingMember("m9", "one")
    )
    errors = [type(result.error) for result in results]
    assert errors == [type(None), UnknownMember, UnknownMember, FencedInstance]
    harness.settle(other)
    assert size_of(other.owned) == 4
