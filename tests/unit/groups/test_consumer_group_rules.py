"""Consumer groups step by step: join, assignment, revocation, leave, timeouts, topic changes, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from millstream.broker.groups.consumer.group import ConsumerGroupState
from millstream.broker.groups.consumer.member import NOTHING, MemberState, overlaps, size_of, union
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
from millstream_testing.consumer_trial import REBALANCE_MS, SESSION_MS, ConsumerTrial, SimulatedConsumer
from millstream_testing.group_trial import GROUP


@pytest.fixture
def trial() -> ConsumerTrial:
    made = ConsumerTrial()
    made.topics.clear()
    made.add_topic("orders", 4)
    made.add_topic("bills", 2)
    return made


def members(number: int, *topics: str) -> list[SimulatedConsumer]:
    return [SimulatedConsumer(f"m{index}", *topics) for index in range(number)]


def each_once(trial: ConsumerTrial, consumers: list[SimulatedConsumer]) -> Iterator[int]:
    """The number of partitions of each member; checks that none has two owners."""
    for one, other in combinations(consumers, 2):
        assert not overlaps(one.owned, other.owned)
    return (size_of(consumer.owned) for consumer in consumers)


# Joining


def test_the_first_member_gets_everything_at_once(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders", "bills")
    response = trial.beat(alone)
    everything = trial.partitions(orders={0, 1, 2, 3}, bills={0, 1})
    assert response == HeartbeatResult(member_id="m0", epoch=1, heartbeat_ms=5000, assignment=everything)
    group = trial.consumers()
    assert (group.state, group.epoch, group.target_epoch) == (ConsumerGroupState.STABLE, 1, 1)


def test_a_response_contains_the_assignment_only_if_the_member_may_not_know_it(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders")
    trial.beat(alone)
    written = len(trial.log)
    assert trial.beat(alone).assignment is None
    assert trial.beat(alone, full=True).assignment == trial.partitions(orders={0, 1, 2, 3})
    assert len(trial.log) == written


def test_a_member_without_an_id_gets_one(trial: ConsumerTrial) -> None:
    response = trial.send(SimulatedConsumer("", "orders").request()).result()
    assert response.member_id
    assert response.member_id in trial.consumers().members


def test_partitions_are_revoked_before_they_are_assigned_to_others(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.beat(first)
    response = trial.beat(second)
    assert (response.epoch, response.assignment) == (2, NOTHING)
    assert trial.consumers().state is ConsumerGroupState.RECONCILING
    assert trial.beat(second).assignment is None
    # The first member learns of it, but still owns everything.
    response = trial.beat(first)
    assert response.epoch == 1
    assert size_of(first.assigned) == 2
    assert size_of(first.owned) == 4
    assert trial.beat(second).assignment is None
    first.give_up()
    assert trial.beat(first).epoch == 2
    response = trial.beat(second)
    assert response.assignment is not None
    assert sorted(each_once(trial, [first, second])) == [2, 2]
    assert trial.consumers().state is ConsumerGroupState.STABLE


def test_many_members_share_evenly_in_any_order(trial: ConsumerTrial) -> None:
    consumers = members(3, "orders", "bills")
    for consumer in consumers:
        trial.beat(consumer)
    trial.settle(*consumers)
    assert list(each_once(trial, consumers)) == [2, 2, 2]
    more = [*consumers, SimulatedConsumer("m9", "orders", "bills")]
    trial.settle(*more)
    assert sorted(each_once(trial, more)) == [1, 1, 2, 2]


def test_members_may_subscribe_to_different_topics(trial: ConsumerTrial) -> None:
    one, two = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders", "bills")
    trial.settle(one, two)
    assert one.owned.keys() == {trial.id_of("orders")}
    assert sorted(each_once(trial, [one, two])) == [3, 3]


def test_the_assignor_with_most_votes_is_used(trial: ConsumerTrial) -> None:
    ranged = [SimulatedConsumer(f"m{number}", "orders", "bills", assignor="range") for number in range(2)]
    other = SimulatedConsumer("m9", "orders", "bills", assignor="uniform")
    trial.settle(*ranged, other)
    assert trial.describe_consumers().assignor == "range"
    assert ranged[0].owned == trial.partitions(orders={0, 1}, bills={0})
    assert ranged[1].owned == trial.partitions(orders={2}, bills={1})
    assert other.owned == trial.partitions(orders={3})


def test_members_that_join_together_are_assigned_together() -> None:
    trial = ConsumerTrial(members_max=200)
    trial.add_topic("t", 200)
    crowd = members(100, "t")
    for consumer in crowd:
        trial.beat(consumer)
    group = trial.consumers()
    assert (group.epoch, group.state) == (100, ConsumerGroupState.ASSIGNING)
    assert group.target_epoch < 60
    trial.pass_ms(1000)
    trial.settle(*crowd, rounds=4)
    assert (group.target_epoch, group.state) == (100, ConsumerGroupState.STABLE)
    assert set(each_once(trial, crowd)) == {2}


def test_topics_that_do_not_exist_yet_are_assigned_once_created(trial: ConsumerTrial) -> None:
    early = SimulatedConsumer("m0", "later")
    assert trial.beat(early).assignment == NOTHING
    trial.add_topic("later", 2)
    assert trial.beat(early).assignment == trial.partitions(later={0, 1})


def test_a_full_group_refuses_another_member() -> None:
    trial = ConsumerTrial(members_max=2)
    trial.add_topic("t", 2)
    consumers = members(2, "t")
    trial.settle(*consumers)
    assert isinstance(trial.send(SimulatedConsumer("m9", "t").request()).error, GroupFull)
    trial.settle(*consumers)
    trial.leave(consumers.pop())
    trial.beat(SimulatedConsumer("m9", "t"))


def test_the_metadata_of_members_is_bounded() -> None:
    trial = ConsumerTrial(members_bytes_max=2000)
    chatty = SimulatedConsumer("m0", *(f"topic-{number}" for number in range(500)))
    assert isinstance(trial.send(chatty.request()).error, GroupFull)
    assert trial.log == []
    modest = SimulatedConsumer("m0", "t")
    trial.beat(modest)
    modest.topics = chatty.topics
    assert isinstance(trial.send(modest.request(full=True)).error, GroupFull)


def test_the_number_of_consumer_groups_is_bounded() -> None:
    trial = ConsumerTrial(groups_max=1)
    trial.beat(SimulatedConsumer("m0", "t"))
    other = SimulatedConsumer("m0", "t").request(group_id="another")
    assert isinstance(trial.send(other).error, PolicyViolation)


# Epochs


def test_a_member_with_a_wrong_epoch_is_fenced(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    trial.cluster.grow("orders", 6)
    trial.settle(first, second)
    assert first.epoch == 3
    for epoch in (1, 4, 9):
        first.epoch = epoch
        assert isinstance(trial.send(first.request()).error, FencedMemberEpoch)
    first.epoch = 3
    trial.beat(first)


def test_a_lost_response_is_repeated(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first)
    before = first.epoch
    trial.settle(second, rounds=1)
    trial.beat(first)
    first.give_up()
    trial.send(first.request()).result()
    # The response with the newer epoch did not arrive, so the member sends the previous one.
    assert first.epoch == before
    first.lost_response = True
    assert trial.beat(first).epoch > before
    assert first.owned == first.assigned


def test_the_previous_epoch_with_partitions_of_others_is_fenced(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first)
    everything = first.owned
    trial.settle(first, second)
    first.epoch, first.owned = 1, everything
    assert isinstance(trial.send(first.request(full=True)).error, FencedMemberEpoch)
    first.owned = NOTHING
    assert trial.beat(first, full=True).epoch == 2


def test_a_fenced_member_rejoins_with_its_id(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    first.fence()
    response = trial.beat(first)
    assert response.epoch == trial.consumers().epoch
    assert size_of(first.owned) == 2
    trial.settle(first, second)
    assert list(each_once(trial, [first, second])) == [2, 2]


def test_a_member_that_never_joined_is_unknown(trial: ConsumerTrial) -> None:
    stranger = SimulatedConsumer("m9", "orders")
    stranger.epoch = 1
    assert isinstance(trial.send(stranger.request()).error, UnknownGroup)
    assert isinstance(trial.send(stranger.leaving()).error, UnknownGroup)
    trial.beat(SimulatedConsumer("m0", "orders"))
    assert isinstance(trial.send(stranger.request()).error, UnknownMember)
    assert isinstance(trial.send(stranger.leaving()).error, UnknownMember)


# Leaving and timeouts


def test_the_partitions_of_a_leaving_member_are_reassigned(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    assert trial.leave(second) == [HeartbeatResult(member_id="m1", epoch=-1)]
    assert trial.consumers().state is ConsumerGroupState.ASSIGNING
    assert size_of(trial.beat(first).assignment or NOTHING) == 4
    trial.leave(first)
    assert trial.consumers().state is ConsumerGroupState.EMPTY


def test_a_member_whose_session_expires_is_removed(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    trial.pass_ms(SESSION_MS - 1)
    trial.beat(first)
    trial.pass_ms(1)
    assert list(trial.consumers().members) == ["m0"]
    assert isinstance(trial.send(second.request()).error, UnknownMember)
    trial.settle(first)
    assert size_of(first.owned) == 4


def test_a_member_that_does_not_revoke_in_time_is_removed(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first)
    trial.beat(second)
    passed = 0
    while passed < REBALANCE_MS:
        trial.beat(first)
        trial.beat(second)
        trial.pass_ms(5000)
        passed += 5000
    assert list(trial.consumers().members) == ["m1"]
    trial.settle(second)
    assert size_of(second.owned) == 4
    assert isinstance(trial.send(first.request()).error, UnknownMember)


def test_a_member_that_revokes_in_time_stays(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first)
    trial.beat(second)
    trial.beat(first)
    first.give_up()
    for _ in range(2 * REBALANCE_MS // 5000):
        trial.beat(first)
        trial.beat(second)
        trial.pass_ms(5000)
    assert list(trial.consumers().members) == ["m0", "m1"]


# Topics


def test_new_partitions_are_assigned(trial: ConsumerTrial) -> None:
    consumers = members(2, "orders")
    trial.settle(*consumers)
    trial.cluster.grow("orders", 8)
    trial.settle(*consumers)
    assert list(each_once(trial, consumers)) == [4, 4]


def test_a_deleted_topic_is_revoked_and_a_recreated_one_is_distinct(trial: ConsumerTrial) -> None:
    consumers = members(2, "orders", "bills")
    trial.settle(*consumers)
    old = trial.id_of("bills")
    trial.remove_topic("bills")
    trial.settle(*consumers)
    assert old not in union(consumers[0].owned, consumers[1].owned)
    trial.add_topic("bills", 2)
    trial.settle(*consumers)
    assert list(each_once(trial, consumers)) == [3, 3]
    assert union(consumers[0].owned, consumers[1].owned) == trial.partitions(orders={0, 1, 2, 3}, bills={0, 1})


def test_topics_without_subscribers_change_nothing(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders")
    trial.settle(alone)
    written = len(trial.log)
    trial.add_topic("other", 3)
    trial.beat(alone)
    assert len(trial.log) == written


def test_a_member_changes_its_subscription(trial: ConsumerTrial) -> None:
    consumers = members(2, "orders")
    trial.settle(*consumers)
    consumers[0].topics = frozenset({"bills"})
    response = trial.beat(consumers[0], full=True)
    # Unsubscribed topics are revoked at once, and new ones are assigned after that.
    assert response.assignment == NOTHING
    assert trial.consumers().members["m0"].position.state is MemberState.UNREVOKED
    consumers[0].give_up()
    trial.settle(*consumers)
    assert consumers[0].owned == trial.partitions(bills={0, 1})
    assert size_of(consumers[1].owned) == 4


def test_a_member_without_topics_stays_a_member(trial: ConsumerTrial) -> None:
    idle = SimulatedConsumer("m0")
    assert trial.beat(idle).assignment == NOTHING
    assert trial.consumers().state is ConsumerGroupState.STABLE


# Expressions


def test_an_expression_subscribes_to_every_topic_that_it_matches(trial: ConsumerTrial) -> None:
    matching = SimulatedConsumer("m0", expression="(orders|later).*")
    assert trial.beat(matching).assignment == trial.partitions(orders={0, 1, 2, 3})
    trial.add_topic("later.eu", 2)
    trial.pass_ms(1000)
    assert trial.beat(matching).assignment == trial.partitions(orders={0, 1, 2, 3}, **{"later.eu": {0, 1}})
    trial.remove_topic("orders")
    trial.settle(matching)
    assert matching.owned == trial.partitions(**{"later.eu": {0, 1}})


def test_names_and_expressions_together(trial: ConsumerTrial) -> None:
    both = SimulatedConsumer("m0", "bills", expression="ord.*")
    named = SimulatedConsumer("m1", "orders")
    trial.settle(both, named)
    assert sorted(each_once(trial, [both, named])) == [3, 3]
    assert trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})).result()["orders"][0] is not None


def test_an_invalid_expression_is_refused_and_changes_nothing(trial: ConsumerTrial) -> None:
    wrong = SimulatedConsumer("m0", expression="(")
    assert isinstance(trial.send(wrong.request()).error, InvalidRegex)
    assert trial.log == []
    right = SimulatedConsumer("m0", expression="orders")
    trial.settle(right)
    right.expression = "[z-a]"
    assert isinstance(trial.send(right.request(full=True)).error, InvalidRegex)
    assert size_of(trial.consumers().members["m0"].position.assigned) == 4


def test_the_number_of_expressions_of_a_group_is_bounded() -> None:
    trial = ConsumerTrial(members_max=200)
    crowd = [SimulatedConsumer(f"m{number}", expression=f"orders|x{number}") for number in range(100)]
    for consumer in crowd:
        trial.beat(consumer)
    one_more = SimulatedConsumer("m100", expression="orders|x100")
    assert isinstance(trial.send(one_more.request()).error, InvalidRegex)
    one_more.expression = "orders|x7"
    trial.beat(one_more)
    trial.leave(crowd[0])
    trial.beat(SimulatedConsumer("m101", expression="orders|x101"))


def test_an_expression_is_changed_and_dropped(trial: ConsumerTrial) -> None:
    one, two = SimulatedConsumer("m0", expression="orders"), SimulatedConsumer("m1", expression="orders")
    trial.settle(one, two)
    assert set(trial.consumers().resolved) == {"orders"}
    one.expression = "bills"
    trial.beat(one, full=True)
    one.give_up()
    trial.settle(one, two)
    assert one.owned == trial.partitions(bills={0, 1})
    assert set(trial.consumers().resolved) == {"orders", "bills"}
    two.expression, two.topics = "", frozenset({"orders"})
    trial.beat(two, full=True)
    two.give_up()
    trial.settle(one, two)
    assert set(trial.consumers().resolved) == {"bills"}
    trial.leave(one)
    assert trial.consumers().resolved == {}


def test_many_expressions_are_refreshed_in_turns(trial: ConsumerTrial) -> None:
    consumers = [SimulatedConsumer(f"m{number}", expression=f"new|x{number}") for number in range(20)]
    trial.settle(*consumers, rounds=2)
    trial.add_topic("new", 20)
    trial.pass_ms(1000)
    for _ in range(6):
        trial.pass_ms(1000)
        trial.settle(*consumers, rounds=2)
    assert list(each_once(trial, consumers)) == [1] * 20


# Restarts


def test_a_restart_changes_nothing(trial: ConsumerTrial) -> None:
    consumers = [*members(2, "orders"), SimulatedConsumer("m2", expression="b.*|orders", rack_id="here")]
    trial.settle(*consumers)
    before = trial.describe_consumers()
    trial.reload()
    assert trial.describe_consumers() == before
    written = len(trial.log)
    for consumer in consumers:
        assert trial.beat(consumer).assignment is None
    assert len(trial.log) == written


def test_a_rewritten_group_is_unchanged(trial: ConsumerTrial) -> None:
    consumers = [*members(2, "orders"), SimulatedConsumer("m2", expression="b.*|orders", instance_id="static")]
    trial.settle(*consumers)
    trial.beat(SimulatedConsumer("m3", "orders"))
    before = trial.describe_consumers()
    trial.log[:] = [record for key in trial.shard.durable_keys() if (record := trial.shard.durable_record(key))]
    trial.reload()
    assert trial.describe_consumers() == before


def test_after_a_restart_session_and_rebalance_timeouts_start_over(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first)
    trial.beat(second)
    trial.beat(first)
    trial.reload()
    for _ in range(REBALANCE_MS // 5000):
        trial.pass_ms(5000)
        trial.send(first.request())
        trial.send(second.request())
    assert list(trial.consumers().members) == ["m1"]
    trial.reload()
    trial.pass_ms(SESSION_MS)
    assert trial.consumers().is_empty


@pytest.mark.parametrize("lost", range(1, 6))
def test_a_group_works_after_losing_the_end_of_the_log(trial: ConsumerTrial, lost: int) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    trial.lose(lost)
    for consumer in (first, second):
        if trial.send(consumer.request(full=True)).error is not None:
            consumer.fence()
    trial.settle(first, second)
    assert list(each_once(trial, [first, second])) == [2, 2]


# Offsets


def test_members_commit_with_their_epoch(trial: ConsumerTrial) -> None:
    first, second = members(2, "orders")
    trial.settle(first, second)
    assert trial.commit(5, member_id="m0", generation=2).error is None
    for member_id, epoch, version, expected in (
        ("m0", 3, 9, StaleMemberEpoch),
        ("m0", 2, 8, UnsupportedVersion),
        ("nobody", 2, 9, UnknownMember),
        ("", -1, 9, UnknownMember),
    ):
        error = trial.commit(6, member_id=member_id, generation=epoch, version=version).error
        assert isinstance(error, expected)
    assert trial.committed() == 5
    trial.leave(first, second)
    assert trial.commit(7).error is None
    assert trial.committed() == 7


def test_members_fetch_offsets_with_their_epoch(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders")
    trial.settle(alone)
    trial.commit(5, member_id="m0", generation=1)

    def fetch(member_id: str | None, epoch: int, group_id: str = GROUP) -> object:
        fetched = trial.run(lambda shard: shard.fetch(group_id, None, member_id=member_id, epoch=epoch))
        return fetched.error or fetched.result()

    for member_id, epoch in (("m0", 1), (None, -1), ("", -1)):
        assert not isinstance(fetch(member_id, epoch), Exception)
    assert isinstance(fetch("m0", 2), StaleMemberEpoch)
    assert isinstance(fetch("m9", 1), UnknownMember)
    assert fetch("m9", 1, "no-such-group") == {}


def test_offsets_of_subscribed_topics_are_not_deleted(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders")
    trial.settle(alone)
    for topic in ("orders", "bills"):
        trial.commit(5, member_id="m0", generation=1, topic=topic)
    response = trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0], "bills": [0]})).result()
    assert isinstance(response["orders"][0], SubscribedToTopic)
    assert response["bills"] == {0: None}
    assert set(trial.all_committed()) == {"orders"}


# Groups


def test_groups_are_listed_with_their_type(trial: ConsumerTrial) -> None:
    trial.beat(SimulatedConsumer("m0", "orders"))
    trial.commit(1, group_id="simple")
    listed = trial.run(lambda shard: shard.list_groups()).result()
    found = {one.group_id: (one.group_type, one.state, one.protocol_type) for one in listed}
    assert found == {GROUP: ("consumer", "Stable", "consumer"), "simple": ("classic", "Empty", "")}


def test_a_group_is_described(trial: ConsumerTrial) -> None:
    first, second = SimulatedConsumer("m0", "orders", rack_id="r1"), SimulatedConsumer("m1", expression="orders")
    trial.settle(first)
    trial.beat(second)
    described = trial.describe_consumers()
    assert (described.state, described.epoch, described.target_epoch) == ("Reconciling", 2, 2)
    one, two = described.members
    orders = trial.id_of("orders")
    assert (one.rack_id, one.epoch, one.client_id, one.client_host) == ("r1", 1, "client", "/127.0.0.1")
    assert (one.topics, one.expression, one.speaks_classic) == (frozenset({"orders"}), "", False)
    assert (one.assigned, one.target) == ([(orders, "orders", (0, 1, 2, 3))], [(orders, "orders", (0, 1))])
    assert (two.expression, two.assigned, two.target) == ("orders", [], [(orders, "orders", (2, 3))])
    assert isinstance(trial.run(lambda shard: shard.describe(GROUP)).error, UnknownGroup)
    trial.commit(1, group_id="simple")
    assert isinstance(trial.run(lambda shard: shard.consumers.describe("simple")).error, UnknownGroup)


def test_only_an_empty_group_is_deleted_with_its_offsets(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", expression="orders")
    trial.settle(alone)
    trial.commit(5, member_id="m0", generation=1)
    assert isinstance(trial.run(lambda shard: shard.delete(GROUP)).error, GroupNotEmpty)
    trial.leave(alone)
    assert trial.run(lambda shard: shard.delete(GROUP)).result()
    assert trial.shard.consumers.get(GROUP) is None
    assert trial.shard.groups.get(GROUP) is None
    assert trial.shard.durable_keys() == []
    trial.reload()
    assert len(trial.shard.groups) == 0


def test_an_empty_group_without_offsets_is_removed(trial: ConsumerTrial) -> None:
    alone = SimulatedConsumer("m0", "orders")
    trial.settle(alone)
    trial.leave(alone)
    trial.pass_ms(3 * trial.limits.sweep_ms)
    assert trial.shard.consumers.get(GROUP) is None
    assert trial.shard.durable_keys() == []


def test_offsets_of_a_group_expire_unless_it_subscribes_to_the_topic(trial: ConsumerTrial) -> None:
    trial = ConsumerTrial(offsets_retention_ms=1_000_000, sweep_ms=100_000)
    trial.add_topic("t", 1)
    trial.add_topic("u", 1)
    alone = SimulatedConsumer("m0", "t")
    trial.settle(alone)
    for topic in ("t", "u"):
        trial.commit(5, member_id="m0", generation=1, topic=topic)
    for _ in range(1_300_000 // 40_000):
        trial.pass_ms(40_000)
        trial.beat(alone)
    assert set(trial.all_committed()) == {"t"}
    trial.leave(alone)
    trial.pass_ms(1_300_000)
    assert trial.shard.durable_keys() == []
