"""Static members, the limits of groups, and the state after a reload."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_group
from millstream.broker.groups.requests import Leaver
from millstream.core.errors import (
    FencedInstance,
    GroupFull,
    MemberIdRequired,
    MillstreamError,
    NotCoordinator,
    PolicyViolation,
    UnknownMember,
)
from millstream_testing.group_trial import REBALANCE_MS, SESSION_MS, GroupTrial


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    assert later.completed
    with pytest.raises(kind):
        later.result()


def waits(later: Deferred[Any]) -> bool:
    return not later.completed


# Static members


def static_group(trial: GroupTrial, *names: str) -> dict[str, str]:
    joins = {name: trial.join(instance_id=name) for name in names}
    trial.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name, member_id in ids.items():
        trial.sync(member_id, instance_id=name, assignments={other: other.encode() for other in ids.values()})
    assert trial.group().state is GroupState.STABLE
    return ids


def test_a_static_member_joins_without_getting_an_id_first() -> None:
    trial = GroupTrial()

    ids = static_group(trial, "a", "b")

    assert ids == {"a": "a-1", "b": "b-2"}


def test_a_returning_static_member_keeps_its_assignment_without_a_rebalance() -> None:
    trial = GroupTrial()
    ids = static_group(trial, "a", "b")
    records = len(trial.log)

    back = trial.join(instance_id="b").result()

    assert back.member_id != ids["b"]
    assert back.generation == 1
    assert not back.skip_assignment
    assert trial.group().state is GroupState.STABLE
    assert trial.sync(back.member_id, instance_id="b").result().assignment == ids["b"].encode()
    assert {member.member_id for member in read_group(trial.log[-1]).members} == {ids["a"], back.member_id}
    assert len(trial.log) == records + 1


def test_a_returning_static_leader_learns_that_the_assignment_stands() -> None:
    trial = GroupTrial()
    ids = static_group(trial, "a", "b")

    back = trial.join(instance_id="a").result()

    assert back.leader_id == back.member_id
    assert back.skip_assignment
    assert {member.instance_id for member in back.members} == {"a", "b"}
    old_client = trial.join(instance_id="a", version=8).result()
    assert old_client.leader_id == back.member_id != old_client.member_id
    assert old_client.members == ()
    assert ids["a"] not in trial.group().members


def test_the_replaced_process_of_a_static_member_is_fenced() -> None:
    trial = GroupTrial()
    ids = static_group(trial, "a", "b")
    trial.join(instance_id="a")

    refused(trial.heartbeat(ids["a"], instance_id="a"), FencedInstance)
    refused(trial.sync(ids["a"], instance_id="a"), FencedInstance)
    refused(trial.join(ids["a"], instance_id="a"), FencedInstance)
    refused(trial.commit(member_id=ids["a"], instance_id="a", generation=1), FencedInstance)
    (left,) = trial.leave(Leaver(ids["a"], "a"))
    assert isinstance(left.error, FencedInstance)
    refused(trial.heartbeat("x", instance_id="unknown"), UnknownMember)


def test_a_parked_join_of_the_replaced_process_is_fenced() -> None:
    trial = GroupTrial()
    first = trial.join(instance_id="a")
    second = trial.join(instance_id="a")
    trial.finish_joining()

    refused(first, FencedInstance)
    assert second.result().leader_id == second.result().member_id


def test_a_static_member_with_another_protocol_starts_a_rebalance() -> None:
    trial = GroupTrial()
    both = (("range", b""), ("sticky", b""))
    joins = {name: trial.join(instance_id=name, protocols=both) for name in ("a", "b")}
    trial.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        trial.sync(ids[name], instance_id=name)

    trial.join(instance_id="b", protocols=(("sticky", b""),))

    assert trial.group().state is GroupState.PREPARING


def test_a_static_member_that_returns_during_the_assignment_starts_a_rebalance() -> None:
    trial = GroupTrial()
    joins = [trial.join(instance_id=name) for name in ("a", "b")]
    trial.finish_joining()
    assert all(joining.completed for joining in joins)

    back = trial.join(instance_id="b")

    assert waits(back)
    assert trial.group().state is GroupState.PREPARING


def test_a_static_member_keeps_its_place_in_a_rebalance_while_its_session_lasts() -> None:
    trial = GroupTrial()
    joins = {name: trial.join(instance_id=name, session_ms=10 * REBALANCE_MS) for name in ("a", "b")}
    trial.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        trial.sync(ids[name], instance_id=name)
    rejoining = trial.join(ids["a"], instance_id="a", session_ms=10 * REBALANCE_MS)

    trial.pass_ms(REBALANCE_MS)

    assert {member.instance_id for member in rejoining.result().members} == {"a", "b"}


def test_a_static_leader_that_does_not_return_is_replaced() -> None:
    trial = GroupTrial()
    joins = {name: trial.join(instance_id=name, session_ms=10 * REBALANCE_MS) for name in ("a", "b")}
    trial.finish_joining()
    ids = {name: joining.result().member_id for name, joining in joins.items()}
    for name in ids:
        trial.sync(ids[name], instance_id=name)
    assert trial.group().leader_id == ids["a"]
    rejoining = trial.join(ids["b"], instance_id="b", protocols=(("range", b"new"),), session_ms=10 * REBALANCE_MS)

    trial.pass_ms(REBALANCE_MS)

    assert rejoining.result().leader_id == ids["b"]
    assert len(rejoining.result().members) == 2


def test_absent_static_members_do_not_accumulate() -> None:
    trial = GroupTrial(members_max=2, initial_delay_ms=0)
    for round_ in range(5):
        for name in ("x", "y"):
            trial.join(instance_id=f"{name}{round_}", session_ms=100 * REBALANCE_MS, rebalance_ms=10)
        trial.pass_ms(20)

    assert len(trial.group().members) <= 4


def test_without_returning_static_members_a_rebalance_waits_for_their_sessions() -> None:
    trial = GroupTrial()
    ids = static_group(trial, "a", "b")
    for name in ids:
        trial.heartbeat(ids[name], instance_id=name)
    trial.new_member()
    trial.leave(Leaver(next(iter(set(trial.group().members) - set(ids.values())))))
    assert trial.group().state is GroupState.PREPARING

    trial.pass_ms(REBALANCE_MS + SESSION_MS)

    assert trial.group().state is GroupState.EMPTY


def test_an_operator_removes_a_static_member_by_instance_id() -> None:
    trial = GroupTrial()
    ids = static_group(trial, "a", "b")

    results = trial.leave(Leaver("", "b"), Leaver("", "c"))

    assert [type(left.error) for left in results] == [type(None), UnknownMember]
    assert list(trial.group().members) == [ids["a"]]


def test_a_pending_member_cannot_become_static() -> None:
    trial = GroupTrial()
    error = trial.join().error
    assert isinstance(error, MemberIdRequired)

    refused(trial.join(error.member_id, instance_id="a"), UnknownMember)


# Limits


def test_the_number_of_members_is_bounded() -> None:
    trial = GroupTrial(members_max=2)
    first, second = trial.stable_group(2)

    refused(trial.join(), GroupFull)
    refused(trial.join(version=0), GroupFull)
    assert trial.group().state is GroupState.STABLE
    assert set(trial.group().members) == {first, second}


def test_pending_members_count_towards_the_limit() -> None:
    trial = GroupTrial(members_max=2)
    trial.join()
    trial.join()

    refused(trial.join(), GroupFull)


def test_the_last_to_rejoin_are_refused_by_a_group_over_its_limit() -> None:
    trial = GroupTrial(members_max=3)
    ids = trial.stable_group(3)
    small = GroupTrial(members_max=2)
    small.log = trial.log
    small.reload()
    small.pass_ms(0)
    assert small.group().state is GroupState.PREPARING

    responses = [small.join(member_id) for member_id in ids]

    refused(responses[2], GroupFull)
    assert responses[0].result().generation == 2
    assert set(small.group().members) == set(ids[:2])


def test_the_metadata_of_members_is_bounded() -> None:
    trial = GroupTrial(members_bytes_max=10_000)
    leader, _ = trial.new_member(protocols=(("range", b"x" * 4000),))

    refused(trial.join(protocols=(("range", b"x" * 6000),)), GroupFull)
    assert leader in trial.group().members


def test_the_number_of_groups_is_bounded() -> None:
    trial = GroupTrial(groups_max=2)
    trial.join(group_id="a")
    trial.commit(group_id="b")

    refused(trial.join(group_id="c"), PolicyViolation)
    refused(trial.commit(group_id="c"), PolicyViolation)
    trial.commit(group_id="b").result()


# Reloading


def test_a_stable_group_is_restored_with_its_members() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    trial.reload()

    assert trial.group().state is GroupState.STABLE
    assert trial.group().leader_id == leader
    trial.heartbeat(follower, generation=1).result()
    assert trial.sync(follower).result().assignment == follower.encode()

    trial.pass_ms(SESSION_MS)

    assert trial.group().state is GroupState.PREPARING or trial.group().state is GroupState.EMPTY
    assert leader not in trial.group().members


def test_a_rebalancing_group_is_restored_with_its_last_generation() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    _, joining = trial.new_member()
    rejoining = trial.join(leader)
    trial.reload()

    refused(joining, NotCoordinator)
    refused(rejoining, NotCoordinator)
    assert trial.group().generation == 1
    assert set(trial.group().members) == {leader, follower}
    trial.join(leader)
    assert trial.join(follower).result().generation == 2


def test_parked_syncs_are_refused_by_a_reload() -> None:
    trial = GroupTrial()
    trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    syncing = trial.sync(follower)

    trial.reload()

    refused(syncing, NotCoordinator)


def test_the_subscribed_topics_are_known_after_a_reload() -> None:
    trial = GroupTrial()
    topics = struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">i", 0)
    trial.stable_group(protocols=(("range", topics),))
    assert trial.group().subscribed == frozenset({"orders"})

    trial.reload()

    assert trial.group().subscribed == frozenset({"orders"})
