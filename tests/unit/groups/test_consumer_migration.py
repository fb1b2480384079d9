"""Groups that migrate between the protocols: empty ones, and live ones with members of both."""

from __future__ import annotations

import pytest

from millstream.broker.groups.consumer.classic_member import parse_assignment
from millstream.broker.groups.consumer.member import AWAY_EPOCH, NOTHING, Assignment, overlaps, size_of
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.requests import LeavingMember
from millstream.core.errors import (
    FencedInstance,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownGroup,
    UnknownMember,
)
from millstream_testing.consumer_harness import (
    REBALANCE_MS,
    ClassicConsumer,
    ConsumerHarness,
    SimulatedConsumer,
    classic_protocols,
)
from millstream_testing.group_harness import GROUP, SESSION_MS


@pytest.fixture
def harness() -> ConsumerHarness:
    made = ConsumerHarness()
    made.topics.clear()
    made.add_topic("orders", 4)
    return made


def classic_pair(harness: ConsumerHarness) -> tuple[ClassicConsumer, ClassicConsumer]:
    """A stable classic group of two members that share four partitions."""
    one, two = ClassicConsumer(harness, "orders"), ClassicConsumer(harness, "orders")
    joins = [one.join(), two.join()]
    harness.finish_joining()
    assert all(join.error is None for join in joins)
    two.sync()
    one.sync(**{one.member_id: {"orders": {0, 1}}, two.member_id: {"orders": {2, 3}}})
    assert (one.owned, two.owned) == ({"orders": {0, 1}}, {"orders": {2, 3}})
    return one, two


def held_by(harness: ConsumerHarness, member: ClassicConsumer | SimulatedConsumer) -> Assignment:
    return harness.partitions(**member.owned) if isinstance(member, ClassicConsumer) else member.owned


def settle(harness: ConsumerHarness, *members: ClassicConsumer | SimulatedConsumer) -> None:
    """Let all members follow the protocol; no partition may ever have two owners."""
    for _ in range(12):
        for member in members:
            if isinstance(member, ClassicConsumer):
                member.rejoin_if_needed()
            else:
                harness.send_heartbeat(member)
                member.apply_assignment()
            for owner in members:
                for other in members:
                    assert owner is other or not overlaps(held_by(harness, owner), held_by(harness, other))


# Empty groups


def test_an_empty_classic_group_becomes_a_consumer_group_with_its_offsets(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    harness.commit(7, member_id=one.member_id, generation=one.generation)
    harness.leave(LeavingMember(one.member_id), LeavingMember(two.member_id))
    harness.finish_joining()
    assert harness.group().is_in(GroupState.EMPTY)
    consumer = SimulatedConsumer("m0", "orders")
    assert size_of(harness.send_heartbeat(consumer).assignment or NOTHING) == 4
    assert harness.shard.groups.get(GROUP) is None
    assert harness.committed() == 7
    harness.reload()
    assert harness.shard.groups.get(GROUP) is None
    assert harness.send_heartbeat(consumer).assignment is None


def test_committed_offsets_without_a_group_belong_to_a_new_one(harness: ConsumerHarness) -> None:
    harness.commit(7)
    harness.send_heartbeat(SimulatedConsumer("m0", "orders"))
    assert harness.shard.groups.get(GROUP) is None
    assert harness.committed() == 7


def test_an_empty_consumer_group_becomes_a_classic_group_with_its_offsets(harness: ConsumerHarness) -> None:
    consumer = SimulatedConsumer("m0", expression="orders")
    harness.settle(consumer)
    harness.commit(7, member_id="m0", generation=1)
    harness.leave(consumer)
    one = ClassicConsumer(harness, "orders")
    join = one.join()
    assert harness.shard.consumers.get(GROUP) is None
    harness.finish_joining()
    assert join.result().generation == 1
    one.sync(**{one.member_id: {"orders": {0, 1, 2, 3}}})
    assert one.owned == {"orders": {0, 1, 2, 3}}
    assert harness.committed() == 7
    harness.reload()
    assert harness.shard.consumers.get(GROUP) is None
    assert harness.group().is_in(GroupState.STABLE)


def test_a_refused_join_leaves_an_empty_consumer_group_unchanged(harness: ConsumerHarness) -> None:
    consumer = SimulatedConsumer("m0", "orders")
    harness.settle(consumer)
    harness.commit(7, member_id="m0", generation=1)
    harness.leave(consumer)
    assert isinstance(harness.join(protocol_type="", protocols=()).error, InconsistentProtocol)
    assert isinstance(harness.join("unknown").error, UnknownMember)
    assert harness.shard.groups.get(GROUP) is None
    assert harness.consumers().is_empty
    assert harness.committed() == 7


# From classic to consumer, live


def test_a_classic_group_is_migrated_member_by_member(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    generation = one.generation
    new = SimulatedConsumer("m0", "orders")
    response = harness.send_heartbeat(new)
    assert response.epoch == generation + 1
    assert harness.shard.groups.get(GROUP) is None
    group = harness.consumers()
    assert {member.speaks_classic for member in group.members.values()} == {True, False}
    # Each member keeps its partitions until it has revoked them.
    assert new.owned == NOTHING
    assert isinstance(one.send_heartbeat().error, RebalanceInProgress)
    settle(harness, one, two, new)
    assert sorted(size_of(held_by(harness, member)) for member in (one, two, new)) == [1, 1, 2]
    harness.reload()
    settle(harness, one, two, new)
    harness.leave(LeavingMember(one.member_id))
    settle(harness, two, new)
    assert [size_of(held_by(harness, member)) for member in (two, new)] == [2, 2]
    harness.leave(LeavingMember(two.member_id))
    settle(harness, new)
    assert size_of(new.owned) == 4
    assert harness.consumers().classic_members == 0


def test_a_classic_group_is_migrated_during_a_rebalance(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    three = ClassicConsumer(harness, "orders")
    waiting = three.join()
    assert not waiting.completed
    again = one.join()
    new = SimulatedConsumer("m0", "orders")
    harness.send_heartbeat(new)
    assert isinstance(waiting.error, RebalanceInProgress)
    assert isinstance(again.error, RebalanceInProgress)
    for member in (one, two, three):
        member.join()
        member.sync()
    settle(harness, one, two, three, new)
    assert [size_of(held_by(harness, member)) for member in (one, two, three, new)] == [1, 1, 1, 1]


def test_a_classic_group_that_waits_for_its_leader_is_migrated(harness: ConsumerHarness) -> None:
    one, two = ClassicConsumer(harness, "orders"), ClassicConsumer(harness, "orders")
    one.join()
    two.join()
    harness.finish_joining()
    waiting = two.sync()
    new = SimulatedConsumer("m0", "orders")
    harness.send_heartbeat(new)
    assert isinstance(waiting.error, RebalanceInProgress)
    settle(harness, one, two, new)
    assert sorted(size_of(held_by(harness, member)) for member in (one, two, new)) == [1, 1, 2]


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
    harness: ConsumerHarness, options: dict[str, object], assignment: bytes
) -> None:
    member_id, _ = harness.new_member(**options)
    harness.finish_joining()
    harness.sync(member_id, assignments={member_id: assignment})
    assert isinstance(harness.send(SimulatedConsumer("m0", "orders").request()).error, UnknownGroup)
    assert harness.group().is_in(GroupState.STABLE)
    harness.heartbeat(member_id).result()


def test_a_group_with_too_many_members_cannot_be_migrated() -> None:
    harness = ConsumerHarness()
    harness.add_topic("t", 1)
    harness.stable_group(3, protocols=classic_protocols("t"))
    object.__setattr__(harness.limits, "members_max", 2)
    assert isinstance(harness.send(SimulatedConsumer("m0", "t").request()).error, UnknownGroup)


# Classic members of a consumer group


def test_a_classic_member_joins_a_consumer_group(harness: ConsumerHarness) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(harness, "orders")
    harness.settle(new)
    joined = old.join().result()
    assert (joined.generation, joined.protocol_type, joined.protocol_name) == (2, "consumer", "range")
    assert (joined.leader_id, joined.members) == ("", ())
    settle(harness, new, old)
    assert [size_of(held_by(harness, member)) for member in (new, old)] == [2, 2]
    assert harness.commit(5, member_id=old.member_id, generation=2, version=5).error is None
    assert isinstance(harness.commit(5, member_id=old.member_id, generation=1).error, IllegalGeneration)
    described = harness.describe_consumers()
    assert [member.speaks_classic for member in described.members] == [False, True]


def test_a_classic_member_gets_only_topics_that_it_may_describe(harness: ConsumerHarness) -> None:
    harness.add_topic("secret", 3)
    harness.settle(SimulatedConsumer("m0", "other"))
    protocols, visible = classic_protocols("orders", "secret"), {"orders"}.__contains__
    first = harness.join(protocols=protocols, may_describe=visible).error
    assert isinstance(first, MemberIdRequired)
    joined = harness.join(first.member_id, protocols=protocols, may_describe=visible).result()
    synced = harness.sync(joined.member_id, generation=joined.generation).result()
    assert [(topic, sorted(numbers)) for topic, numbers in parse_assignment(synced.assignment)[0]] == [
        ("orders", [0, 1, 2, 3])
    ]
    assert [sorted(member.topics) for member in harness.describe_consumers().members] == [["other"], ["orders"]]


def test_requests_of_classic_members_are_checked(harness: ConsumerHarness) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(harness, "orders")
    harness.settle(new)
    old.join()
    settle(harness, new, old)
    generation = old.generation
    for member_id, asked, expected in (
        (old.member_id, generation - 1, IllegalGeneration),
        (old.member_id, generation + 1, IllegalGeneration),
        ("nobody", generation, UnknownMember),
        ("m0", generation, UnknownMember),
    ):
        assert isinstance(harness.heartbeat(member_id, generation=asked).error, expected)
        assert isinstance(harness.sync(member_id, generation=asked).error, expected)
    wrong = harness.sync(old.member_id, generation=generation, protocol_name="sticky")
    assert isinstance(wrong.error, InconsistentProtocol)
    for options in (
        {"protocol_type": "connect", "protocols": classic_protocols("orders")},
        {"protocols": classic_protocols("orders", names=["sticky"])},
        {"protocols": (("range", b"\xff"),)},
        {"protocols": ()},
    ):
        assert isinstance(harness.join("someone", **options).error, InconsistentProtocol)


def test_a_classic_member_that_does_not_rejoin_is_removed(harness: ConsumerHarness) -> None:
    new, old = SimulatedConsumer("m0", "orders"), ClassicConsumer(harness, "orders")
    harness.settle(new)
    old.join()
    settle(harness, new, old)
    harness.cluster.grow("orders", 6)
    harness.send_heartbeat(new)
    for _ in range(REBALANCE_MS // 5000):
        assert isinstance(old.send_heartbeat().error, RebalanceInProgress)
        harness.send_heartbeat(new)
        harness.advance_ms(5000)
    assert isinstance(old.send_heartbeat().error, UnknownMember)


def test_a_classic_member_that_does_not_sync_or_is_silent_is_removed(harness: ConsumerHarness) -> None:
    new, silent = SimulatedConsumer("m0", "orders"), ClassicConsumer(harness, "orders")
    harness.settle(new)
    silent.join()
    harness.advance_ms(SESSION_MS - 1)
    assert silent.member_id in harness.consumers().members
    harness.advance_ms(1)
    assert silent.member_id not in harness.consumers().members
    lazy = ClassicConsumer(harness, "orders")
    lazy.join()
    settle_new = [new]
    for _ in range(REBALANCE_MS // 5000):
        lazy.send_heartbeat()
        harness.settle(*settle_new, rounds=1)
        harness.advance_ms(5000)
    assert lazy.member_id not in harness.consumers().members


def test_a_restarted_static_classic_member_keeps_its_place(harness: ConsumerHarness) -> None:
    new = SimulatedConsumer("m0", "orders")
    old = ClassicConsumer(harness, "orders", instance_id="one")
    harness.settle(new)
    old.join()
    settle(harness, new, old)
    epoch = harness.consumers().epoch
    again = ClassicConsumer(harness, "orders", instance_id="one")
    again.join()
    again.sync()
    assert again.owned == old.owned
    assert harness.consumers().epoch == epoch
    assert isinstance(old.send_heartbeat().error, FencedInstance)
    upgraded = SimulatedConsumer("m1", "orders", instance_id="one")
    # A process of the newer protocol replaces a classic one without asking.
    assert size_of(harness.send_heartbeat(upgraded).assignment or NOTHING) == 2
    assert harness.consumers().classic_members == 0


# From consumer to classic, live


def test_a_consumer_group_with_only_classic_members_becomes_classic(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    new = SimulatedConsumer("m0", "orders")
    settle(harness, one, two, new)
    generation = harness.consumers().epoch
    harness.leave(new)
    assert harness.shard.consumers.get(GROUP) is None
    group = harness.group()
    assert (group.generation, set(group.members)) == (generation, {one.member_id, two.member_id})
    harness.advance_ms(0)
    assert group.is_in(GroupState.PREPARING)
    assert isinstance(one.send_heartbeat().error, RebalanceInProgress)
    joins = [one.join(), two.join()]
    assert {join.result().generation for join in joins} == {generation + 1}
    leader = one if joins[0].result().leader_id == one.member_id else two
    other = two if leader is one else one
    other.sync()
    leader.sync(**{one.member_id: {"orders": {0, 1}}, two.member_id: {"orders": {2, 3}}})
    assert (one.owned, two.owned) == ({"orders": {0, 1}}, {"orders": {2, 3}})
    harness.reload()
    assert harness.group().is_in(GroupState.STABLE)


def test_members_keep_their_current_partitions_rather_than_their_targets(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    new = SimulatedConsumer("m0", "orders")
    harness.send_heartbeat(new)
    assert (
        size_of(harness.consumers().targets[one.member_id]) + size_of(harness.consumers().targets[two.member_id]) == 3
    )
    harness.leave(new)
    for member in (one, two):
        stored = harness.group().members[member.member_id].assignment
        assert parse_assignment(stored)[0] == [(topic, sorted(owned)) for topic, owned in member.owned.items()]


def test_a_consumer_group_becomes_classic_when_the_last_newer_member_times_out(harness: ConsumerHarness) -> None:
    one, _ = classic_pair(harness)
    new = SimulatedConsumer("m0", "orders")
    harness.send_heartbeat(new)
    for _ in range(20):
        harness.advance_ms(5000)
        one.rejoin_if_needed()
    assert harness.group().members.keys() == {one.member_id}


def test_a_converted_group_keeps_live_members_and_removes_silent_ones(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    new = SimulatedConsumer("m0", "orders")
    settle(harness, one, two, new)
    harness.leave(new)
    harness.advance_ms(SESSION_MS // 2)
    one.send_heartbeat()
    harness.advance_ms(SESSION_MS // 2)
    assert set(harness.group().members) == {one.member_id}


def test_a_static_member_that_returns_to_classic_converts_the_group(harness: ConsumerHarness) -> None:
    new = SimulatedConsumer("m0", "orders", instance_id="one")
    harness.settle(new)
    harness.send(new.leave_request(AWAY_EPOCH)).result()
    old = ClassicConsumer(harness, "orders", instance_id="one")
    assert old.join().result().generation == harness.consumers().epoch
    old.sync()
    assert old.owned == {"orders": {0, 1, 2, 3}}
    harness.advance_ms(0)
    assert harness.shard.consumers.get(GROUP) is None
    assert set(harness.group().members) == {old.member_id}


def test_migrating_back_and_forth_keeps_offsets(harness: ConsumerHarness) -> None:
    one, two = classic_pair(harness)
    harness.commit(3, member_id=one.member_id, generation=one.generation)
    new = SimulatedConsumer("m0", "orders")
    settle(harness, one, two, new)
    assert harness.committed() == 3
    harness.commit(4, member_id="m0", generation=new.epoch)
    harness.leave(new)
    assert harness.committed() == 4
    harness.reload()
    assert harness.committed() == 4
    again = SimulatedConsumer("m1", "orders")
    harness.send_heartbeat(again)
    assert harness.committed() == 4
