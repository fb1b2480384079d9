"""Static members, the limits of groups, and the state after a reload."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_group
from millstream.broker.groups.requests import LeavingMember
from millstream.core.errors import (
    FencedInstance,
    GroupFull,
    MemberIdRequired,
    MillstreamError,
    NotCoordinator,
    PolicyViolation,
    UnknownMember,
)
from millstream_testing.group_harness import REBALANCE_MS, SESSION_MS, GroupHarness


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    assert later.completed
    with pytest.raises(kind):
        later.result()


def waits(later: Deferred[Any]) -> bool:
    return not later.completed


# Static members


def static_group(harness: GroupHarness, *names: str) -> dict[str, str]:
    joins = {name: harness.join(instance_id=name) for name in names}
    harness.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name, member_id in ids.items():
        harness.sync(member_id, instance_id=name, assignments={other: other.encode() for other in ids.values()})
    assert harness.group().state is GroupState.STABLE
    return ids


def test_a_static_member_joins_without_getting_an_id_first() -> None:
    harness = GroupHarness()

    ids = static_group(harness, "a", "b")

    assert ids == {"a": "a-1", "b": "b-2"}


def test_a_returning_static_member_keeps_its_assignment_without_a_rebalance() -> None:
    harness = GroupHarness()
    ids = static_group(harness, "a", "b")
    records = len(harness.log)

    back = harness.join(instance_id="b").result()

    assert back.member_id != ids["b"]
    assert back.generation == 1
    assert not back.skip_assignment
    assert harness.group().state is GroupState.STABLE
    assert harness.sync(back.member_id, instance_id="b").result().assignment == ids["b"].encode()
    assert {member.member_id for member in read_group(harness.log[-1]).members} == {ids["a"], back.member_id}
    assert len(harness.log) == records + 1


def test_a_returning_static_leader_learns_that_the_assignment_stands() -> None:
    harness = GroupHarness()
    ids = static_group(harness, "a", "b")

    back = harness.join(instance_id="a").result()

    assert back.leader_id == back.member_id
    assert back.skip_assignment
    assert {member.instance_id for member in back.members} == {"a", "b"}
    old_client = harness.join(instance_id="a", version=8).result()
    assert old_client.leader_id == back.member_id != old_client.member_id
    assert old_client.members == ()
    assert ids["a"] not in harness.group().members


def test_the_replaced_process_of_a_static_member_is_fenced() -> None:
    harness = GroupHarness()
    ids = static_group(harness, "a", "b")
    harness.join(instance_id="a")

    refused(harness.heartbeat(ids["a"], instance_id="a"), FencedInstance)
    refused(harness.sync(ids["a"], instance_id="a"), FencedInstance)
    refused(harness.join(ids["a"], instance_id="a"), FencedInstance)
    refused(harness.commit(member_id=ids["a"], instance_id="a", generation=1), FencedInstance)
    (result,) = harness.leave(LeavingMember(ids["a"], "a"))
    assert isinstance(result.error, FencedInstance)
    refused(harness.heartbeat("x", instance_id="unknown"), UnknownMember)


def test_a_parked_join_of_the_replaced_process_is_fenced() -> None:
    harness = GroupHarness()
    first = harness.join(instance_id="a")
    second = harness.join(instance_id="a")
    harness.finish_joining()

    refused(first, FencedInstance)
    assert second.result().leader_id == second.result().member_id


def test_a_static_member_with_another_protocol_starts_a_rebalance() -> None:
    harness = GroupHarness()
    both = (("range", b""), ("sticky", b""))
    joins = {name: harness.join(instance_id=name, protocols=both) for name in ("a", "b")}
    harness.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        harness.sync(ids[name], instance_id=name)

    harness.join(instance_id="b", protocols=(("sticky", b""),))

    assert harness.group().state is GroupState.PREPARING


def test_a_static_member_that_returns_during_the_assignment_starts_a_rebalance() -> None:
    harness = GroupHarness()
    joins = [harness.join(instance_id=name) for name in ("a", "b")]
    harness.finish_joining()
    assert all(joining.completed for joining in joins)

    back = harness.join(instance_id="b")

    assert waits(back)
    assert harness.group().state is GroupState.PREPARING


def test_a_static_member_keeps_its_place_in_a_rebalance_while_its_session_lasts() -> None:
    harness = GroupHarness()
    joins = {name: harness.join(instance_id=name, session_ms=10 * REBALANCE_MS) for name in ("a", "b")}
    harness.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        harness.sync(ids[name], instance_id=name)
    rejoining = harness.join(ids["a"], instance_id="a", session_ms=10 * REBALANCE_MS)

    harness.advance_ms(REBALANCE_MS)

    assert {member.instance_id for member in rejoining.result().members} == {"a", "b"}


def test_a_static_leader_that_does_not_return_is_replaced() -> None:
    harness = GroupHarness()
    joins = {name: harness.join(instance_id=name, session_ms=10 * REBALANCE_MS) for name in ("a", "b")}
    harness.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        harness.sync(ids[name], instance_id=name)
    assert harness.group().leader_id == ids["a"]
    rejoining = harness.join(ids["b"], instance_id="b", protocols=(("range", b"new"),), session_ms=10 * REBALANCE_MS)

    harness.advance_ms(REBALANCE_MS)

    assert rejoining.result().leader_id == ids["b"]
    assert len(rejoining.result().members) == 2


def test_absent_static_members_do_not_accumulate() -> None:
    harness = GroupHarness(members_max=2, initial_delay_ms=0)
    for round_ in range(5):
        for name in ("x", "y"):
            harness.join(instance_id=f"{name}{round_}", session_ms=100 * REBALANCE_MS, rebalance_ms=10)
        harness.advance_ms(20)

    assert len(harness.group().members) <= 4


def test_without_returning_static_members_a_rebalance_waits_for_their_sessions() -> None:
    harness = GroupHarness()
    ids = static_group(harness, "a", "b")
    for name in ids:
        harness.heartbeat(ids[name], instance_id=name)
    harness.new_member()
    harness.leave(LeavingMember(next(iter(set(harness.group().members) - set(ids.values())))))
    assert harness.group().state is GroupState.PREPARING

    harness.advance_ms(REBALANCE_MS + SESSION_MS)

    assert harness.group().state is GroupState.EMPTY


def test_an_operator_removes_a_static_member_by_instance_id() -> None:
    harness = GroupHarness()
    ids = static_group(harness, "a", "b")

    results = harness.leave(LeavingMember("", "b"), LeavingMember("", "c"))

    assert [type(result.error) for result in results] == [type(None), UnknownMember]
    assert list(harness.group().members) == [ids["a"]]


def test_a_pending_member_cannot_become_static() -> None:
    harness = GroupHarness()
    error = harness.join().error
    assert isinstance(error, MemberIdRequired)

    refused(harness.join(error.member_id, instance_id="a"), UnknownMember)


# Limits


def test_the_number_of_members_is_bounded() -> None:
    harness = GroupHarness(members_max=2)
    first, second = harness.stable_group(2)

    refused(harness.join(), GroupFull)
    refused(harness.join(version=0), GroupFull)
    assert harness.group().state is GroupState.STABLE
    assert set(harness.group().members) == {first, second}


def test_pending_members_count_towards_the_limit() -> None:
    harness = GroupHarness(members_max=2)
    harness.join()
    harness.join()

    refused(harness.join(), GroupFull)


def test_the_last_to_rejoin_are_refused_by_a_group_over_its_limit() -> None:
    harness = GroupHarness(members_max=3)
    ids = harness.stable_group(3)
    small = GroupHarness(members_max=2)
    small.log = harness.log
    small.reload()
    small.advance_ms(0)
    assert small.group().state is GroupState.PREPARING

    responses = [small.join(member_id) for member_id in ids]

    refused(responses[2], GroupFull)
    assert responses[0].result().generation == 2
    assert set(small.group().members) == set(ids[:2])


def test_the_metadata_of_members_is_bounded() -> None:
    harness = GroupHarness(members_bytes_max=10_000)
    leader, _ = harness.new_member(protocols=(("range", b"x" * 4000),))

    refused(harness.join(protocols=(("range", b"x" * 6000),)), GroupFull)
    assert leader in harness.group().members


def test_the_number_of_groups_is_bounded() -> None:
    harness = GroupHarness(groups_max=2)
    harness.join(group_id="a")
    harness.commit(group_id="b")

    refused(harness.join(group_id="c"), PolicyViolation)
    refused(harness.commit(group_id="c"), PolicyViolation)
    harness.commit(group_id="b").result()


# Reloading


def test_a_stable_group_is_restored_with_its_members() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    harness.reload()

    assert harness.group().state is GroupState.STABLE
    assert harness.group().leader_id == leader
    harness.heartbeat(follower, generation=1).result()
    assert harness.sync(follower).result().assignment == follower.encode()

    harness.advance_ms(SESSION_MS)

    assert harness.group().state is GroupState.PREPARING or harness.group().state is GroupState.EMPTY
    assert leader not in harness.group().members


def test_a_rebalancing_group_is_restored_with_its_last_generation() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    _, joining = harness.new_member()
    rejoining = harness.join(leader)
    harness.reload()

    refused(joining, NotCoordinator)
    refused(rejoining, NotCoordinator)
    assert harness.group().generation == 1
    assert set(harness.group().members) == {leader, follower}
    harness.join(leader)
    assert harness.join(follower).result().generation == 2


def test_parked_syncs_are_refused_by_a_reload() -> None:
    harness = GroupHarness()
    harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    syncing = harness.sync(follower)

    harness.reload()

    refused(syncing, NotCoordinator)


def test_the_subscribed_topics_are_known_after_a_reload() -> None:
    harness = GroupHarness()
    topics = struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">i", 0)
    harness.stable_group(protocols=(("range", topics),))
    assert harness.group().subscribed == frozenset({"orders"})

    harness.reload()

    assert harness.group().subscribed == frozenset({"orders"})
