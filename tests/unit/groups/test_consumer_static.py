"""Static members: their place is kept while they are away, and a second process with their instance id is fenced."""

from __future__ import annotations

import pytest

from millstream.broker.groups.consumer.member import AWAY_EPOCH, size_of
from millstream.broker.groups.requests import HeartbeatResult, Leaver
from millstream.core.errors import FencedInstance, FencedMemberEpoch, UnknownMember, UnreleasedInstance
from millstream_testing.consumer_trial import SESSION_MS, ConsumerTrial, SimulatedConsumer


@pytest.fixture
def trial() -> ConsumerTrial:
    made = ConsumerTrial()
    made.topics.clear()
    made.add_topic("orders", 4)
    return made


def static(member_id: str, instance_id: str = "one") -> SimulatedConsumer:
    return SimulatedConsumer(member_id, "orders", instance_id=instance_id)


def test_a_returning_static_member_keeps_its_partitions(trial: ConsumerTrial) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(away, other)
    epoch, had = trial.consumers().epoch, away.owned
    assert trial.send(away.leaving(AWAY_EPOCH)).result() == HeartbeatResult(member_id="m0", epoch=-2)
    trial.beat(other)
    assert trial.consumers().epoch == epoch
    back = static("m2")
    response = trial.beat(back)
    assert (response.epoch, response.assignment) == (epoch, had)
    assert trial.consumers().epoch == epoch
    assert trial.consumers().static_members == {"one": "m2"}
    assert set(trial.consumers().members) == {"m1", "m2"}
    trial.reload()
    assert trial.beat(back).assignment is None
    assert isinstance(trial.send(away.request()).error, FencedInstance)
    away.instance_id = None
    assert isinstance(trial.send(away.request()).error, UnknownMember)


def test_a_returning_static_member_may_change_its_subscription(trial: ConsumerTrial) -> None:
    trial.add_topic("bills", 2)
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(away, other)
    trial.send(away.leaving(AWAY_EPOCH)).result()
    back = SimulatedConsumer("m2", "bills", instance_id="one")
    trial.settle(back, other)
    assert back.owned == trial.partitions(bills={0, 1})
    assert size_of(other.owned) == 4


def test_the_partitions_of_an_absent_member_are_reassigned_when_its_session_expires(trial: ConsumerTrial) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(away, other)
    trial.send(away.leaving(AWAY_EPOCH)).result()
    trial.pass_ms(SESSION_MS - 1)
    trial.beat(other)
    assert size_of(other.assigned) == 2
    trial.pass_ms(1)
    trial.settle(other)
    assert size_of(other.owned) == 4
    assert trial.consumers().static_members == {}


def test_an_absent_member_that_was_revoking_has_revoked(trial: ConsumerTrial) -> None:
    away, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(away)
    trial.beat(other)
    trial.beat(away)
    assert size_of(trial.consumers().members["m0"].position.pending) == 2
    trial.send(away.leaving(AWAY_EPOCH)).result()
    trial.settle(other)
    assert size_of(other.owned) == 2
    back = static("m2")
    trial.settle(back, other)
    assert size_of(back.owned) == 2


def test_an_instance_id_in_use_is_refused(trial: ConsumerTrial) -> None:
    first = static("m0")
    trial.settle(first)
    written = len(trial.log)
    assert isinstance(trial.send(static("m1").request()).error, UnreleasedInstance)
    assert len(trial.log) == written
    trial.leave(first)
    trial.beat(static("m1"))


def test_the_same_process_may_rejoin(trial: ConsumerTrial) -> None:
    first = static("m0")
    trial.settle(first)
    first.fence()
    assert size_of(trial.beat(first).assignment or {}) == 4


def test_an_absent_member_must_rejoin(trial: ConsumerTrial) -> None:
    first = static("m0")
    trial.settle(first)
    trial.send(first.leaving(AWAY_EPOCH)).result()
    assert isinstance(trial.send(first.request()).error, FencedMemberEpoch)
    first.fence()
    assert size_of(trial.beat(first).assignment or {}) == 4


def test_an_instance_id_must_match_the_member(trial: ConsumerTrial) -> None:
    first = static("m0")
    trial.settle(first)
    first.instance_id = "two"
    for request in (first.request(), first.leaving(), first.leaving(AWAY_EPOCH)):
        assert isinstance(trial.send(request).error, UnknownMember)


def test_a_static_member_may_omit_its_instance_id(trial: ConsumerTrial) -> None:
    first = static("m0")
    trial.settle(first)
    first.instance_id = None
    trial.beat(first)
    assert trial.consumers().static_members == {"one": "m0"}


def test_a_static_member_leaves_permanently(trial: ConsumerTrial) -> None:
    first, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(first, other)
    trial.leave(first)
    trial.settle(other)
    assert size_of(other.owned) == 4
    assert trial.consumers().static_members == {}


def test_a_full_group_readmits_a_static_member() -> None:
    trial = ConsumerTrial(members_max=1)
    trial.add_topic("orders", 1)
    first = static("m0")
    trial.settle(first)
    trial.send(first.leaving(AWAY_EPOCH)).result()
    assert trial.beat(static("m1")).epoch > 0


def test_an_operator_removes_a_static_member_by_instance_id(trial: ConsumerTrial) -> None:
    first, other = static("m0"), SimulatedConsumer("m1", "orders")
    trial.settle(first, other)
    results = trial.leave(Leaver("", "one"), Leaver("", "nobody"), Leaver("m9"), Leaver("m9", "one"))
    errors = [type(left.error) for left in results]
    assert errors == [type(None), UnknownMember, UnknownMember, FencedInstance]
    trial.settle(other)
    assert size_of(other.owned) == 4
