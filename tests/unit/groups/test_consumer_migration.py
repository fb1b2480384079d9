"""Groups that migrate between the protocols: empty ones, and live ones with members of both."""

from __future__ import annotations

import pytest

from millstream.broker.groups.consumer.classic_member import parse_assignment
from millstream.broker.groups.consumer.member import AWAY_EPOCH, NOTHING, Assignment, overlaps, size_of
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.requests import Leaver
from millstream.core.errors import (
    FencedInstance,
    IllegalGeneration,
    InconsistentProtocol,
    RebalanceInProgress,
    UnknownGroup,
    UnknownMember,
)
from millstream_testing.consumer_trial import (
    REBALANCE_MS,
    ClassicConsumer,
    ConsumerTrial,
    SimulatedConsumer,
    classic_protocols,
)
from millstream_testing.group_trial import GROUP, SESSION_MS


@pytest.fixture
def trial() -> ConsumerTrial:
    made = ConsumerTrial()
    made.topics.clear()
    made.add_topic("orders", 4)
    return made


def classic_pair(trial: ConsumerTrial) -> tuple[ClassicConsumer, ClassicConsumer]:
    """A stable classic group of two members that share four partitions."""
    one, two = ClassicConsumer(trial, "orders"), ClassicConsumer(trial, "orders")
    joins = [one.join(), two.join()]
    trial.finish_joining()
    assert all(join.error is None for join in joins)
    two.sync()
    one.sync(**{one.member_id: {"orders": {0, 1}}, two.member_id: {"orders": {2, 3}}})
    assert (one.owned, two.owned) == ({"orders": {0, 1}}, {"orders": {2, 3}})
    return one, two


def held_by(trial: ConsumerTrial, member: ClassicConsumer | SimulatedConsumer) -> Assignment:
    return trial.partitions(**member.owned) if isinstance(member, ClassicConsumer) else member.owned


def settle(trial: ConsumerTrial, *members: ClassicConsumer | SimulatedConsumer) -> None:
    """Let all members follow the protocol; no partition may ever have two owners."""
    for _ in range(12):
        for member in members:
            if isinstance(member, ClassicConsumer):
                member.go_on()
            else:
                trial.beat(member)
                member.give_up()
            for one in members:
                for other in members:
                    assert one is other or not overlaps(held_by(trial, one), held_by(trial, other))


# Empty groups


def test_an_empty_classic_group_becomes_a_consumer_group_with_its_offsets(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    trial.commit(7, member_id=one.member_id, generation=one.generation)
    trial.leave(Leaver(one.member_id), Leaver(two.member_id))
    trial.finish_joining()
    assert trial.group().is_in(GroupState.EMPTY)
    consumer = SimulatedConsumer("m0", "orders")
    assert size_of(trial.beat(consumer).assignment or NOTHING) == 4
    assert trial.shard.groups.get(GROUP) is None
    assert trial.committed() == 7
    trial.reload()
    assert trial.shard.groups.get(GROUP) is None
    assert trial.beat(consumer).assignment is None


def test_committed_offsets_without_a_group_belong_to_a_new_one(trial: ConsumerTrial) -> None:
    trial.commit(7)
    trial.beat(SimulatedConsumer("m0", "orders"))
    assert trial.shard.groups.get(GROUP) is None
    assert trial.committed() == 7


def test_an_empty_consumer_group_becomes_a_classic_group_with_its_offsets(trial: ConsumerTrial) -> None:
    consumer = SimulatedConsumer("m0", expression="orders")
    trial.settle(consumer)
    trial.commit(7, member_id="m0", generation=1)
    trial.leave(consumer)
    one = ClassicConsumer(trial, "orders")
    join = one.join()
    assert trial.shard.consumers.get(GROUP) is None
    trial.finish_joining()
    assert join.result().generation == 1
    one.sync(**{one.member_id: {"orders": {0, 1, 2, 3}}})
    assert one.owned == {"orders": {0, 1, 2, 3}}
    assert trial.committed() == 7
    trial.reload()
    assert trial.shard.consumers.get(GROUP) is None
    assert trial.group().is_in(GroupState.STABLE)


def test_a_refused_join_leaves_an_empty_consumer_group_unchanged(trial: ConsumerTrial) -> None:
    consumer = SimulatedConsumer("m0", "orders")
    trial.settle(consumer)
    trial.commit(7, member_id="m0", generation=1)
    trial.leave(consumer)
    assert isinstance(trial.join(protocol_type="", protocols=()).error, InconsistentProtocol)
    assert isinstance(trial.join("unknown").error, UnknownMember)
    assert trial.shard.groups.get(GROUP) is None
    assert trial.consumers().is_empty
    assert trial.committed() == 7


# From classic to consumer, live


def test_a_classic_group_is_migrated_member_by_member(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    generation = one.generation
    new = SimulatedConsumer("m0", "orders")
    response = trial.beat(new)
    assert response.epoch == generation + 1
    assert trial.shard.groups.get(GROUP) is None
    group = trial.consumers()
    assert {member.speaks_classic for member in group.members.values()} == {True, False}
    # Each member keeps its partitions until it has revoked them.
    assert new.owned == NOTHING
    assert isinstance(one.beat().error, RebalanceInProgress)
    settle(trial, one, two, new)
    assert sorted(size_of(held_by(trial, member)) for member in (one, two, new)) == [1, 1, 2]
    trial.reload()
    settle(trial, one, two, new)
    trial.leave(Leaver(one.member_id))
    settle(trial, two, new)
    assert [size_of(held_by(trial, member)) for member in (two, new)] == [2, 2]
    trial.leave(Leaver(two.member_id))
    settle(trial, new)
    assert size_of(new.owned) == 4
    assert trial.consumers().classic_members == 0


def test_a_classic_group_is_migrated_during_a_rebalance(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    three = ClassicConsumer(trial, "orders")
    waiting = three.join()
    assert not waiting.completed
    again = one.join()
    new = SimulatedConsumer("m0", "orders")
    trial.beat(new)
    assert isinstance(waiting.error, RebalanceInProgress)
    assert isinstance(again.error, RebalanceInProgress)
    for member in (one, two, three):
        member.join()
        member.sync()
    settle(trial, one, two, three, new)
    assert [size_of(held_by(trial, member)) for member in (one, two, three, new)] == [1, 1, 1, 1]


def test_a_classic_group_that_waits_for_its_leader_is_migrated(trial: ConsumerTrial) -> None:
    one, two = ClassicConsumer(trial, "orders"), ClassicConsumer(trial, "orders")
    one.join()
    two.join()
    trial.finish_joining()
    waiting = two.sync()
    new = SimulatedConsumer("m0", "orders")
    trial.beat(new)
    assert isinstance(waiting.error, RebalanceInProgress)
    settle(trial, one, two, new)
    assert sorted(size_of(held_by(trial, member)) for member in (one, two, new)) == [1, 1, 2]


@pytest.mark.parametrize(
    ("options", "assignment"),
    [
        ({"protocol_type": "connect", "protocols": (("v0", b""),)}, b""),
        ({"protocols": (("range", b"\xff"),)}, b""),
        ({"protocols": classic_protocols("orders")}, b"\0\0\0\0\0\0\0\0\0\1x"),
    ],
    ids=["another protocol type", "unreadable", "an assignor with its own data"],
)
def test_a_classic_group_that_cannot_be_migrated_is_unchanged(
    trial: ConsumerTrial, options: dict[str, object], assignment: bytes
) -> None:
    member_id, _ = trial.new_member(**options)
    trial.finish_joining()
    trial.sync(member_id, assignments={member_id: assignment})
    assert isinstance(trial.send(SimulatedConsumer("m0", "orders").request()).error, UnknownGroup)
    assert trial.group().is_in(GroupState.STABLE)
    trial.heartbeat(member_id).result()


def test_a_group_with_too_many_members_cannot_be_migrated() -> None:
    trial = ConsumerTrial()
    trial.add_topic("t", 1)
    trial.stable_group(3, protocols=classic_protocols("t"))
    object.__setattr__(trial.limits, "members_max", 2)
    assert isinstance(trial.send(SimulatedConsumer("m0", "t").request()).error, UnknownGroup)


# Classic members of a consumer group


def test_a_classic_member_joins_a_consumer_group(trial: ConsumerTrial) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(trial, "orders")
    trial.settle(new)
    joined = old.join().result()
    assert (joined.generation, joined.protocol_type, joined.protocol_name) == (2, "consumer", "range")
    assert (joined.leader_id, joined.members) == ("", ())
    settle(trial, new, old)
    assert [size_of(held_by(trial, member)) for member in (new, old)] == [2, 2]
    assert trial.commit(5, member_id=old.member_id, generation=2, version=5).error is None
    assert isinstance(trial.commit(5, member_id=old.member_id, generation=1).error, IllegalGeneration)
    described = trial.describe_consumers()
    assert [member.speaks_classic for member in described.members] == [False, True]


def test_requests_of_classic_members_are_checked(trial: ConsumerTrial) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(trial, "orders")
    trial.settle(new)
    old.join()
    settle(trial, new, old)
    generation = old.generation
    for member_id, asked, expected in (
        (old.member_id, generation - 1, IllegalGeneration),
        (old.member_id, generation + 1, IllegalGeneration),
        ("nobody", generation, UnknownMember),
        ("m0", generation, UnknownMember),
    ):
        assert isinstance(trial.heartbeat(member_id, generation=asked).error, expected)
        assert isinstance(trial.sync(member_id, generation=asked).error, expected)
    wrong = trial.sync(old.member_id, generation=generation, protocol_name="sticky")
    assert isinstance(wrong.error, InconsistentProtocol)
    for options in (
        {"protocol_type": "connect", "protocols": classic_protocols("orders")},
        {"protocols": classic_protocols("orders", names=["sticky"])},
        {"protocols": (("range", b"\xff"),)},
        {"protocols": ()},
    ):
        assert isinstance(trial.join("someone", **options).error, InconsistentProtocol)


def test_a_classic_member_that_does_not_rejoin_is_removed(trial: ConsumerTrial) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(trial, "orders")
    trial.settle(new)
    old.join()
    settle(trial, new, old)
    trial.cluster.grow("orders", 6)
    trial.beat(new)
    for _ in range(REBALANCE_MS // 5000):
        assert isinstance(old.beat().error, RebalanceInProgress)
        trial.beat(new)
        trial.pass_ms(5000)
    assert isinstance(old.beat().error, UnknownMember)


def test_a_classic_member_that_does_not_sync_or_is_silent_is_removed(trial: ConsumerTrial) -> None:
    new, silent = SimulatedConsumer("m0", "orders"), ClassicConsumer(trial, "orders")
    trial.settle(new)
    silent.join()
    trial.pass_ms(SESSION_MS - 1)
    assert silent.member_id in trial.consumers().members
    trial.pass_ms(1)
    assert silent.member_id not in trial.consumers().members
    lazy = ClassicConsumer(trial, "orders")
    lazy.join()
    settle_new = [new]
    for _ in range(REBALANCE_MS // 5000):
        lazy.beat()
        trial.settle(*settle_new, rounds=1)
        trial.pass_ms(5000)
    assert lazy.member_id not in trial.consumers().members


def test_a_restarted_static_classic_member_keeps_its_place(trial: ConsumerTrial) -> None:
    new = SimulatedConsumer("m0", "orders")
    old = ClassicConsumer(trial, "orders", instance_id="one")
    trial.settle(new)
    old.join()
    settle(trial, new, old)
    epoch = trial.consumers().epoch
    again = ClassicConsumer(trial, "orders", instance_id="one")
    again.join()
    again.sync()
    assert again.owned == old.owned
    assert trial.consumers().epoch == epoch
    assert isinstance(old.beat().error, FencedInstance)
    upgraded = SimulatedConsumer("m1", "orders", instance_id="one")
    # A process of the newer protocol replaces a classic one without asking.
    assert size_of(trial.beat(upgraded).assignment or NOTHING) == 2
    assert trial.consumers().classic_members == 0


# From consumer to classic, live


def test_a_consumer_group_with_only_classic_members_becomes_classic(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    new = SimulatedConsumer("m0", "orders")
    settle(trial, one, two, new)
    generation = trial.consumers().epoch
    trial.leave(new)
    assert trial.shard.consumers.get(GROUP) is None
    group = trial.group()
    assert (group.generation, set(group.members)) == (generation, {one.member_id, two.member_id})
    trial.pass_ms(0)
    assert group.is_in(GroupState.PREPARING)
    assert isinstance(one.beat().error, RebalanceInProgress)
    joins = [one.join(), two.join()]
    assert {join.result().generation for join in joins} == {generation + 1}
    leader = one if joins[0].result().leader_id == one.member_id else two
    other = two if leader is one else one
    other.sync()
    leader.sync(**{one.member_id: {"orders": {0, 1}}, two.member_id: {"orders": {2, 3}}})
    assert (one.owned, two.owned) == ({"orders": {0, 1}}, {"orders": {2, 3}})
    trial.reload()
    assert trial.group().is_in(GroupState.STABLE)


def test_members_keep_their_current_partitions_rather_than_their_targets(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    new = SimulatedConsumer("m0", "orders")
    trial.beat(new)
    assert size_of(trial.consumers().targets[one.member_id]) + size_of(trial.consumers().targets[two.member_id]) == 3
    trial.leave(new)
    for member in (one, two):
        stored = trial.group().members[member.member_id].assignment
        assert parse_assignment(stored)[0] == [(topic, sorted(owned)) for topic, owned in member.owned.items()]


def test_a_consumer_group_becomes_classic_when_the_last_newer_member_times_out(trial: ConsumerTrial) -> None:
    one, _ = classic_pair(trial)
    new = SimulatedConsumer("m0", "orders")
    trial.beat(new)
    for _ in range(20):
        trial.pass_ms(5000)
        one.go_on()
    assert trial.group().members.keys() == {one.member_id}


def test_a_converted_group_keeps_live_members_and_removes_silent_ones(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    new = SimulatedConsumer("m0", "orders")
    settle(trial, one, two, new)
    trial.leave(new)
    trial.pass_ms(SESSION_MS // 2)
    one.beat()
    trial.pass_ms(SESSION_MS // 2)
    assert set(trial.group().members) == {one.member_id}


def test_a_static_member_that_returns_to_classic_converts_the_group(trial: ConsumerTrial) -> None:
    new = SimulatedConsumer("m0", "orders", instance_id="one")
    trial.settle(new)
    trial.send(new.leaving(AWAY_EPOCH)).result()
    old = ClassicConsumer(trial, "orders", instance_id="one")
    assert old.join().result().generation == trial.consumers().epoch
    old.sync()
    assert old.owned == {"orders": {0, 1, 2, 3}}
    trial.pass_ms(0)
    assert trial.shard.consumers.get(GROUP) is None
    assert set(trial.group().members) == {old.member_id}


def test_migrating_back_and_forth_keeps_offsets(trial: ConsumerTrial) -> None:
    one, two = classic_pair(trial)
    trial.commit(3, member_id=one.member_id, generation=one.generation)
    new = SimulatedConsumer("m0", "orders")
    settle(trial, one, two, new)
    assert trial.committed() == 3
    trial.commit(4, member_id="m0", generation=new.epoch)
    trial.leave(new)
    assert trial.committed() == 4
    trial.reload()
    assert trial.committed() == 4
    again = SimulatedConsumer("m1", "orders")
    trial.beat(again)
    assert trial.committed() == 4
