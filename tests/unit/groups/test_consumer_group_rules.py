"""Consumer groups step by step: join, assignment, revocation, leave, timeouts, topic changes, restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations

import pytest

from millstream.broker.groups.consumer import reconciliation
from millstream.broker.groups.consumer.group import ConsumerGroupState
from millstream.broker.groups.consumer.member import NOTHING, Assignment, MemberState, overlaps, size_of, union
from millstream.broker.groups.requests import HeartbeatResult
from millstream.core.errors import (
    FencedMemberEpoch,
    GroupFull,
    GroupNotEmpty,
    InvalidRegex,
    PolicyViolation,
    StaleMemberEpoch,
    SubscribedToTopic,
    UnknownGroup,
    UnknownMember,
    UnsupportedVersion,
)
from millstream_testing.consumer_harness import REBALANCE_MS, SESSION_MS, ConsumerHarness, SimulatedConsumer
from millstream_testing.group_harness import GROUP


@pytest.fixture
def harness() -> ConsumerHarness:
    made = ConsumerHarness()
    made.topics.clear()
    made.add_topic("orders", 4)
    made.add_topic("bills", 2)
    return made


def members(number: int, *topics: str) -> list[SimulatedConsumer]:
    return [SimulatedConsumer(f"m{index}", *topics) for index in range(number)]


def each_once(harness: ConsumerHarness, consumers: list[SimulatedConsumer]) -> Iterator[int]:
    """The number of partitions of each member; checks that none has two owners."""
    for consumer, other in combinations(consumers, 2):
        assert not overlaps(consumer.owned, other.owned)
    return (size_of(consumer.owned) for consumer in consumers)


# Joining


def test_the_first_member_gets_everything_at_once(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders", "bills")
    response = harness.send_heartbeat(alone)
    everything = harness.partitions(orders={0, 1, 2, 3}, bills={0, 1})
    assert response == HeartbeatResult(member_id="m0", epoch=1, heartbeat_ms=5000, assignment=everything)
    group = harness.consumers()
    assert (group.state, group.epoch, group.target_epoch) == (ConsumerGroupState.STABLE, 1, 1)


def test_a_response_contains_the_assignment_only_if_the_member_may_not_know_it(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders")
    harness.send_heartbeat(alone)
    written = len(harness.log)
    assert harness.send_heartbeat(alone).assignment is None
    assert harness.send_heartbeat(alone, full=True).assignment == harness.partitions(orders={0, 1, 2, 3})
    assert len(harness.log) == written


def test_a_member_without_an_id_gets_one(harness: ConsumerHarness) -> None:
    response = harness.send(SimulatedConsumer("", "orders").request()).result()
    assert response.member_id
    assert response.member_id in harness.consumers().members


def test_partitions_are_revoked_before_they_are_assigned_to_others(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.send_heartbeat(first)
    response = harness.send_heartbeat(second)
    assert (response.epoch, response.assignment) == (2, NOTHING)
    assert harness.consumers().state is ConsumerGroupState.RECONCILING
    assert harness.send_heartbeat(second).assignment is None
    # The first member learns of it, but still owns everything.
    response = harness.send_heartbeat(first)
    assert response.epoch == 1
    assert size_of(first.assigned) == 2
    assert size_of(first.owned) == 4
    assert harness.send_heartbeat(second).assignment is None
    first.apply_assignment()
    assert harness.send_heartbeat(first).epoch == 2
    response = harness.send_heartbeat(second)
    assert response.assignment is not None
    assert sorted(each_once(harness, [first, second])) == [2, 2]
    assert harness.consumers().state is ConsumerGroupState.STABLE


def test_many_members_share_evenly_in_any_order(harness: ConsumerHarness) -> None:
    consumers = members(3, "orders", "bills")
    for consumer in consumers:
        harness.send_heartbeat(consumer)
    harness.settle(*consumers)
    assert list(each_once(harness, consumers)) == [2, 2, 2]
    more = [*consumers, SimulatedConsumer("m9", "orders", "bills")]
    harness.settle(*more)
    assert sorted(each_once(harness, more)) == [1, 1, 2, 2]


def test_members_may_subscribe_to_different_topics(harness: ConsumerHarness) -> None:
    one, two = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders", "bills")
    harness.settle(one, two)
    assert one.owned.keys() == {harness.id_of("orders")}
    assert sorted(each_once(harness, [one, two])) == [3, 3]


def test_the_assignor_with_most_votes_is_used(harness: ConsumerHarness) -> None:
    ranged = [SimulatedConsumer(f"m{number}", "orders", "bills", assignor="range") for number in range(2)]
    other = SimulatedConsumer("m9", "orders", "bills", assignor="uniform")
    harness.settle(*ranged, other)
    assert harness.describe_consumers().assignor == "range"
    assert ranged[0].owned == harness.partitions(orders={0, 1}, bills={0})
    assert ranged[1].owned == harness.partitions(orders={2}, bills={1})
    assert other.owned == harness.partitions(orders={3})


def test_members_that_join_together_are_assigned_together() -> None:
    harness = ConsumerHarness(members_max=200)
    harness.add_topic("t", 200)
    crowd = members(100, "t")
    for consumer in crowd:
        harness.send_heartbeat(consumer)
    group = harness.consumers()
    assert (group.epoch, group.state) == (100, ConsumerGroupState.ASSIGNING)
    assert group.target_epoch < 60
    harness.advance_ms(1000)
    harness.settle(*crowd, rounds=4)
    assert (group.target_epoch, group.state) == (100, ConsumerGroupState.STABLE)
    assert set(each_once(harness, crowd)) == {2}


def test_topics_that_do_not_exist_yet_are_assigned_once_created(harness: ConsumerHarness) -> None:
    early = SimulatedConsumer("m0", "later")
    assert harness.send_heartbeat(early).assignment == NOTHING
    harness.add_topic("later", 2)
    assert harness.send_heartbeat(early).assignment == harness.partitions(later={0, 1})


def test_a_full_group_refuses_another_member() -> None:
    harness = ConsumerHarness(members_max=2)
    harness.add_topic("t", 2)
    consumers = members(2, "t")
    harness.settle(*consumers)
    assert isinstance(harness.send(SimulatedConsumer("m9", "t").request()).error, GroupFull)
    harness.settle(*consumers)
    harness.leave(consumers.pop())
    harness.send_heartbeat(SimulatedConsumer("m9", "t"))


def test_the_metadata_of_members_is_bounded() -> None:
    harness = ConsumerHarness(members_bytes_max=2000)
    chatty = SimulatedConsumer("m0", *(f"topic-{number}" for number in range(500)))
    assert isinstance(harness.send(chatty.request()).error, GroupFull)
    assert harness.log == []
    modest = SimulatedConsumer("m0", "t")
    harness.send_heartbeat(modest)
    modest.topics = chatty.topics
    assert isinstance(harness.send(modest.request(full=True)).error, GroupFull)


def test_the_number_of_consumer_groups_is_bounded() -> None:
    harness = ConsumerHarness(groups_max=1)
    harness.send_heartbeat(SimulatedConsumer("m0", "t"))
    other = SimulatedConsumer("m0", "t").request(group_id="another")
    assert isinstance(harness.send(other).error, PolicyViolation)


# Epochs


def test_a_member_with_a_wrong_epoch_is_fenced(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    harness.cluster.grow("orders", 6)
    harness.settle(first, second)
    assert first.epoch == 3
    for epoch in (1, 4, 9):
        first.epoch = epoch
        assert isinstance(harness.send(first.request()).error, FencedMemberEpoch)
    first.epoch = 3
    harness.send_heartbeat(first)


def test_a_lost_response_is_repeated(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first)
    before = first.epoch
    harness.settle(second, rounds=1)
    harness.send_heartbeat(first)
    first.apply_assignment()
    harness.send(first.request()).result()
    # The response with the newer epoch did not arrive, so the member sends the previous one.
    assert first.epoch == before
    first.lost_response = True
    assert harness.send_heartbeat(first).epoch > before
    assert first.owned == first.assigned


def test_the_previous_epoch_with_partitions_of_others_is_fenced(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first)
    everything = first.owned
    harness.settle(first, second)
    first.epoch, first.owned = 1, everything
    assert isinstance(harness.send(first.request(full=True)).error, FencedMemberEpoch)
    first.owned = NOTHING
    assert harness.send_heartbeat(first, full=True).epoch == 2


def test_a_fenced_member_rejoins_with_its_id(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    first.fence()
    response = harness.send_heartbeat(first)
    assert response.epoch == harness.consumers().epoch
    assert size_of(first.owned) == 2
    harness.settle(first, second)
    assert list(each_once(harness, [first, second])) == [2, 2]


def test_a_member_that_never_joined_is_unknown(harness: ConsumerHarness) -> None:
    stranger = SimulatedConsumer("m9", "orders")
    stranger.epoch = 1
    assert isinstance(harness.send(stranger.request()).error, UnknownGroup)
    assert isinstance(harness.send(stranger.leave_request()).error, UnknownGroup)
    harness.send_heartbeat(SimulatedConsumer("m0", "orders"))
    assert isinstance(harness.send(stranger.request()).error, UnknownMember)
    assert isinstance(harness.send(stranger.leave_request()).error, UnknownMember)


# Leaving and timeouts


def test_the_partitions_of_a_leaving_member_are_reassigned(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    assert harness.leave(second) == [HeartbeatResult(member_id="m1", epoch=-1)]
    assert harness.consumers().state is ConsumerGroupState.ASSIGNING
    assert size_of(harness.send_heartbeat(first).assignment or NOTHING) == 4
    harness.leave(first)
    assert harness.consumers().state is ConsumerGroupState.EMPTY


def test_a_member_whose_session_expires_is_removed(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    harness.advance_ms(SESSION_MS - 1)
    harness.send_heartbeat(first)
    harness.advance_ms(1)
    assert list(harness.consumers().members) == ["m0"]
    assert isinstance(harness.send(second.request()).error, UnknownMember)
    harness.settle(first)
    assert size_of(first.owned) == 4


def test_a_member_that_does_not_revoke_in_time_is_removed(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first)
    harness.send_heartbeat(second)
    passed = 0
    while passed < REBALANCE_MS:
        harness.send_heartbeat(first)
        harness.send_heartbeat(second)
        harness.advance_ms(5000)
        passed += 5000
    assert list(harness.consumers().members) == ["m1"]
    harness.settle(second)
    assert size_of(second.owned) == 4
    assert isinstance(harness.send(first.request()).error, UnknownMember)


def test_a_member_that_revokes_in_time_stays(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first)
    harness.send_heartbeat(second)
    harness.send_heartbeat(first)
    first.apply_assignment()
    for _ in range(2 * REBALANCE_MS // 5000):
        harness.send_heartbeat(first)
        harness.send_heartbeat(second)
        harness.advance_ms(5000)
    assert list(harness.consumers().members) == ["m0", "m1"]


# Topics


def test_new_partitions_are_assigned(harness: ConsumerHarness) -> None:
    consumers = members(2, "orders")
    harness.settle(*consumers)
    harness.cluster.grow("orders", 8)
    harness.settle(*consumers)
    assert list(each_once(harness, consumers)) == [4, 4]


def test_a_deleted_topic_is_revoked_and_a_recreated_one_is_distinct(harness: ConsumerHarness) -> None:
    consumers = members(2, "orders", "bills")
    harness.settle(*consumers)
    old = harness.id_of("bills")
    harness.remove_topic("bills")
    harness.settle(*consumers)
    assert old not in union(consumers[0].owned, consumers[1].owned)
    harness.add_topic("bills", 2)
    harness.settle(*consumers)
    assert list(each_once(harness, consumers)) == [3, 3]
    assert union(consumers[0].owned, consumers[1].owned) == harness.partitions(orders={0, 1, 2, 3}, bills={0, 1})


def test_topics_without_subscribers_change_nothing(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders")
    harness.settle(alone)
    written = len(harness.log)
    harness.add_topic("other", 3)
    harness.send_heartbeat(alone)
    assert len(harness.log) == written


def test_a_member_changes_its_subscription(harness: ConsumerHarness) -> None:
    consumers = members(2, "orders")
    harness.settle(*consumers)
    consumers[0].topics = frozenset({"bills"})
    response = harness.send_heartbeat(consumers[0], full=True)
    # Unsubscribed topics are revoked at once, and new ones are assigned after that.
    assert response.assignment == NOTHING
    assert harness.consumers().members["m0"].position.state is MemberState.UNREVOKED
    consumers[0].apply_assignment()
    harness.settle(*consumers)
    assert consumers[0].owned == harness.partitions(bills={0, 1})
    assert size_of(consumers[1].owned) == 4


def test_a_member_without_topics_stays_a_member(harness: ConsumerHarness) -> None:
    idle = SimulatedConsumer("m0")
    assert harness.send_heartbeat(idle).assignment == NOTHING
    assert harness.consumers().state is ConsumerGroupState.STABLE


# Expressions


def test_an_expression_subscribes_to_every_topic_that_it_matches(harness: ConsumerHarness) -> None:
    matching = SimulatedConsumer("m0", expression="(orders|later).*")
    assert harness.send_heartbeat(matching).assignment == harness.partitions(orders={0, 1, 2, 3})
    harness.add_topic("later.eu", 2)
    harness.advance_ms(1000)
    assert harness.send_heartbeat(matching).assignment == harness.partitions(
        orders={0, 1, 2, 3}, **{"later.eu": {0, 1}}
    )
    harness.remove_topic("orders")
    harness.settle(matching)
    assert matching.owned == harness.partitions(**{"later.eu": {0, 1}})


def test_an_expression_matches_only_topics_that_the_member_may_describe(
    harness: ConsumerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciliation, "RIGHTS_REFRESH_MS", 2000)
    visible = {"orders"}
    member = SimulatedConsumer("m0", expression=".*")

    def heartbeat() -> Assignment | None:
        response = harness.send(dataclasses.replace(member.request(), may_describe=visible.__contains__)).result()
        member.handle_response(response)
        return response.assignment

    assert heartbeat() == harness.partitions(orders={0, 1, 2, 3})
    visible.add("bills")
    harness.advance_ms(2000)
    assert heartbeat() == harness.partitions(orders={0, 1, 2, 3}, bills={0, 1})


def test_members_with_different_rights_do_not_change_the_matches_of_an_expression_in_turn(
    harness: ConsumerHarness,
) -> None:
    rights = {"m0": {"orders"}, "m1": {"orders", "bills"}}
    both = [SimulatedConsumer(name, expression=".*") for name in rights]
    epochs = set()
    for turn in range(8):
        # The other one is the first whose heartbeat looks for topics again.
        for member in both if turn % 2 or not turn else reversed(both):
            may_describe = rights[member.member_id].__contains__
            response = harness.send(dataclasses.replace(member.request(), may_describe=may_describe)).result()
            member.handle_response(response)
            member.apply_assignment()
        harness.advance_ms(1000)
        if turn >= 4:
            epochs.add(tuple(member.epoch for member in both))
    assert len(epochs) == 1


def test_names_and_expressions_together(harness: ConsumerHarness) -> None:
    both = SimulatedConsumer("m0", "bills", expression="ord.*")
    named = SimulatedConsumer("m1", "orders")
    harness.settle(both, named)
    assert sorted(each_once(harness, [both, named])) == [3, 3]
    assert harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})).result()["orders"][0] is not None


def test_an_invalid_expression_is_refused_and_changes_nothing(harness: ConsumerHarness) -> None:
    wrong = SimulatedConsumer("m0", expression="(")
    assert isinstance(harness.send(wrong.request()).error, InvalidRegex)
    assert harness.log == []
    right = SimulatedConsumer("m0", expression="orders")
    harness.settle(right)
    right.expression = "[z-a]"
    assert isinstance(harness.send(right.request(full=True)).error, InvalidRegex)
    assert size_of(harness.consumers().members["m0"].position.assigned) == 4


def test_the_number_of_expressions_of_a_group_is_bounded() -> None:
    harness = ConsumerHarness(members_max=200)
    crowd = [SimulatedConsumer(f"m{number}", expression=f"orders|x{number}") for number in range(100)]
    for consumer in crowd:
        harness.send_heartbeat(consumer)
    one_more = SimulatedConsumer("m100", expression="orders|x100")
    assert isinstance(harness.send(one_more.request()).error, InvalidRegex)
    one_more.expression = "orders|x7"
    harness.send_heartbeat(one_more)
    harness.leave(crowd[0])
    harness.send_heartbeat(SimulatedConsumer("m101", expression="orders|x101"))


def test_an_expression_is_changed_and_dropped(harness: ConsumerHarness) -> None:
    one, two = SimulatedConsumer("m0", expression="orders"), SimulatedConsumer("m1", expression="orders")
    harness.settle(one, two)
    assert set(harness.consumers().resolved) == {"orders"}
    one.expression = "bills"
    harness.send_heartbeat(one, full=True)
    one.apply_assignment()
    harness.settle(one, two)
    assert one.owned == harness.partitions(bills={0, 1})
    assert set(harness.consumers().resolved) == {"orders", "bills"}
    two.expression, two.topics = "", frozenset({"orders"})
    harness.send_heartbeat(two, full=True)
    two.apply_assignment()
    harness.settle(one, two)
    assert set(harness.consumers().resolved) == {"bills"}
    harness.leave(one)
    assert harness.consumers().resolved == {}


def test_many_expressions_are_refreshed_in_turns(harness: ConsumerHarness) -> None:
    consumers = [SimulatedConsumer(f"m{number}", expression=f"new|x{number}") for number in range(20)]
    harness.settle(*consumers, rounds=2)
    harness.add_topic("new", 20)
    harness.advance_ms(1000)
    for _ in range(6):
        harness.advance_ms(1000)
        harness.settle(*consumers, rounds=2)
    assert list(each_once(harness, consumers)) == [1] * 20


# Restarts


def test_a_restart_changes_nothing(harness: ConsumerHarness) -> None:
    consumers = [*members(2, "orders"), SimulatedConsumer("m2", expression="b.*|orders", rack_id="here")]
    harness.settle(*consumers)
    before = harness.describe_consumers()
    harness.reload()
    assert harness.describe_consumers() == before
    written = len(harness.log)
    for consumer in consumers:
        assert harness.send_heartbeat(consumer).assignment is None
    assert len(harness.log) == written


def test_a_rewritten_group_is_unchanged(harness: ConsumerHarness) -> None:
    consumers = [*members(2, "orders"), SimulatedConsumer("m2", expression="b.*|orders", instance_id="static")]
    harness.settle(*consumers)
    harness.send_heartbeat(SimulatedConsumer("m3", "orders"))
    before = harness.describe_consumers()
    harness.log[:] = [record for key in harness.shard.durable_keys() if (record := harness.shard.durable_record(key))]
    harness.reload()
    assert harness.describe_consumers() == before


def test_after_a_restart_session_and_rebalance_timeouts_start_over(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first)
    harness.send_heartbeat(second)
    harness.send_heartbeat(first)
    harness.reload()
    for _ in range(REBALANCE_MS // 5000):
        harness.advance_ms(5000)
        harness.send(first.request())
        harness.send(second.request())
    assert list(harness.consumers().members) == ["m1"]
    harness.reload()
    harness.advance_ms(SESSION_MS)
    assert harness.consumers().is_empty


@pytest.mark.parametrize("lost", range(1, 6))
def test_a_group_works_after_losing_the_end_of_the_log(harness: ConsumerHarness, lost: int) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    harness.reload_without_last(lost)
    for consumer in (first, second):
        if harness.send(consumer.request(full=True)).error is not None:
            consumer.fence()
    harness.settle(first, second)
    assert list(each_once(harness, [first, second])) == [2, 2]


# Offsets


def test_members_commit_with_their_epoch(harness: ConsumerHarness) -> None:
    first, second = members(2, "orders")
    harness.settle(first, second)
    assert harness.commit(5, member_id="m0", generation=2).error is None
    for member_id, epoch, version, expected in (
        ("m0", 3, 9, StaleMemberEpoch),
        ("m0", 2, 8, UnsupportedVersion),
        ("nobody", 2, 9, UnknownMember),
        ("", -1, 9, UnknownMember),
    ):
        error = harness.commit(6, member_id=member_id, generation=epoch, version=version).error
        assert isinstance(error, expected)
    assert harness.committed() == 5
    harness.leave(first, second)
    assert harness.commit(7).error is None
    assert harness.committed() == 7


def test_members_fetch_offsets_with_their_epoch(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders")
    harness.settle(alone)
    harness.commit(5, member_id="m0", generation=1)

    def fetch(member_id: str | None, epoch: int, group_id: str = GROUP) -> object:
        fetched = harness.run(lambda shard: shard.fetch(group_id, None, member_id=member_id, epoch=epoch))
        return fetched.error or fetched.result()

    for member_id, epoch in (("m0", 1), (None, -1), ("", -1)):
        assert not isinstance(fetch(member_id, epoch), Exception)
    assert isinstance(fetch("m0", 2), StaleMemberEpoch)
    assert isinstance(fetch("m9", 1), UnknownMember)
    assert fetch("m9", 1, "no-such-group") == {}


def test_offsets_of_subscribed_topics_are_not_deleted(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders")
    harness.settle(alone)
    for topic in ("orders", "bills"):
        harness.commit(5, member_id="m0", generation=1, topic=topic)
    response = harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0], "bills": [0]})).result()
    assert isinstance(response["orders"][0], SubscribedToTopic)
    assert response["bills"] == {0: None}
    assert set(harness.all_committed()) == {"orders"}


# Groups


def test_groups_are_listed_with_their_type(harness: ConsumerHarness) -> None:
    harness.send_heartbeat(SimulatedConsumer("m0", "orders"))
    harness.commit(1, group_id="simple")
    groups = harness.run(lambda shard: shard.list_groups()).result()
    group_types = {group.group_id: (group.group_type, group.state, group.protocol_type) for group in groups}
    assert group_types == {GROUP: ("consumer", "Stable", "consumer"), "simple": ("classic", "Empty", "")}


def test_a_group_is_described(harness: ConsumerHarness) -> None:
    first, second = SimulatedConsumer("m0", "orders", rack_id="r1"), SimulatedConsumer("m1", expression="orders")
    harness.settle(first)
    harness.send_heartbeat(second)
    described = harness.describe_consumers()
    assert (described.state, described.epoch, described.target_epoch) == ("Reconciling", 2, 2)
    one, two = described.members
    orders = harness.id_of("orders")
    assert (one.rack_id, one.epoch, one.client_id, one.client_host) == ("r1", 1, "client", "/127.0.0.1")
    assert (one.topics, one.expression, one.speaks_classic) == (frozenset({"orders"}), "", False)
    assert (one.assigned, one.target) == ([(orders, "orders", (0, 1, 2, 3))], [(orders, "orders", (0, 1))])
    assert (two.expression, two.assigned, two.target) == ("orders", [], [(orders, "orders", (2, 3))])
    assert isinstance(harness.run(lambda shard: shard.describe(GROUP)).error, UnknownGroup)
    harness.commit(1, group_id="simple")
    assert isinstance(harness.run(lambda shard: shard.consumers.describe("simple")).error, UnknownGroup)


def test_only_an_empty_group_is_deleted_with_its_offsets(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", expression="orders")
    harness.settle(alone)
    harness.commit(5, member_id="m0", generation=1)
    assert isinstance(harness.run(lambda shard: shard.delete(GROUP)).error, GroupNotEmpty)
    harness.leave(alone)
    assert harness.run(lambda shard: shard.delete(GROUP)).result()
    assert harness.shard.consumers.get(GROUP) is None
    assert harness.shard.groups.get(GROUP) is None
    assert harness.shard.durable_keys() == []
    harness.reload()
    assert len(harness.shard.groups) == 0


def test_an_empty_group_without_offsets_is_removed(harness: ConsumerHarness) -> None:
    alone = SimulatedConsumer("m0", "orders")
    harness.settle(alone)
    harness.leave(alone)
    harness.advance_ms(3 * harness.limits.sweep_ms)
    assert harness.shard.consumers.get(GROUP) is None
    assert harness.shard.durable_keys() == []


def test_offsets_of_a_group_expire_unless_it_subscribes_to_the_topic(harness: ConsumerHarness) -> None:
    harness = ConsumerHarness(offsets_retention_ms=1_000_000, sweep_ms=100_000)
    harness.add_topic("t", 1)
    harness.add_topic("u", 1)
    alone = SimulatedConsumer("m0", "t")
    harness.settle(alone)
    for topic in ("t", "u"):
        harness.commit(5, member_id="m0", generation=1, topic=topic)
    for _ in range(1_300_000 // 40_000):
        harness.advance_ms(40_000)
        harness.send_heartbeat(alone)
    assert set(harness.all_committed()) == {"t"}
    harness.leave(alone)
    harness.advance_ms(1_300_000)
    assert harness.shard.durable_keys() == []
