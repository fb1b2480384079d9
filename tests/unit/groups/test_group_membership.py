"""Join, sync, heartbeat and leave as in Kafka's classic groups."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_group
from millstream.broker.groups.requests import Leaver
from millstream.core.errors import (
    BatchTooLarge,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    MillstreamError,
    RebalanceInProgress,
    UnknownMember,
)
from millstream_testing.group_trial import INITIAL_DELAY_MS, REBALANCE_MS, SESSION_MS, GroupTrial


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    assert later.completed
    with pytest.raises(kind):
        later.result()


def waits(later: Deferred[Any]) -> bool:
    return not later.completed


# Joining a new group


def test_a_new_member_gets_an_id_first() -> None:
    trial = GroupTrial()

    error = trial.join().error

    assert isinstance(error, MemberIdRequired)
    assert error.member_id == "client-1"
    assert trial.log == []


def test_an_old_client_joins_without_an_id() -> None:
    trial = GroupTrial()
    joining = trial.join(version=3)
    assert waits(joining)

    trial.pass_ms(INITIAL_DELAY_MS)

    assert joining.result().member_id == "client-1"


def test_the_first_generation() -> None:
    trial = GroupTrial()
    first, joining = trial.new_member(protocols=(("range", b"one"),))
    second, joining_too = trial.new_member(protocols=(("range", b"two"),))
    trial.finish_joining()

    leader, follower = joining.result(), joining_too.result()

    assert leader.generation == follower.generation == 1
    assert leader.leader_id == follower.leader_id == first
    assert leader.protocol_name == "range"
    assert leader.protocol_type == "consumer"
    assert {member.member_id: member.metadata for member in leader.members} == {first: b"one", second: b"two"}
    assert follower.members == ()
    assert trial.group().state is GroupState.COMPLETING


def test_a_new_group_waits_while_members_join_but_not_for_ever() -> None:
    trial = GroupTrial()
    _, joining = trial.new_member(rebalance_ms=4 * INITIAL_DELAY_MS)
    for _ in range(3):
        trial.pass_ms(INITIAL_DELAY_MS - 1)
        trial.new_member()
        assert waits(joining)
    trial.pass_ms(INITIAL_DELAY_MS + 10)

    assert joining.completed


def test_a_member_with_an_id_cannot_join_a_missing_group() -> None:
    refused(GroupTrial().join("somebody"), UnknownMember)


def test_an_unused_id_expires_and_the_group_with_it() -> None:
    trial = GroupTrial()
    trial.join()
    assert len(trial.shard.groups) == 1

    trial.pass_ms(SESSION_MS)

    assert len(trial.shard.groups) == 0
    assert trial.log == []


def test_an_unsupported_protocol_is_refused() -> None:
    trial = GroupTrial()
    refused(trial.join(protocols=()), InconsistentProtocol)
    refused(trial.join(protocol_type=""), InconsistentProtocol)
    assert len(trial.shard.groups) == 0
    trial.stable_group(1)

    refused(trial.join(protocols=(("sticky", b""),)), InconsistentProtocol)
    refused(trial.join(protocol_type="connect"), InconsistentProtocol)


def test_the_common_protocol_with_most_votes_is_chosen() -> None:
    trial = GroupTrial()
    trial.new_member(protocols=(("only-me", b""), ("range", b""), ("sticky", b"")))
    trial.new_member(protocols=(("sticky", b""), ("range", b"")))
    _, joining = trial.new_member(protocols=(("sticky", b""), ("range", b"")))
    trial.finish_joining()

    assert joining.result().protocol_name == "sticky"


# Syncing


def test_every_member_gets_its_assignment_when_the_leader_syncs() -> None:
    trial = GroupTrial()
    leader, _ = trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    syncing = trial.sync(follower)
    assert waits(syncing)

    led = trial.sync(leader, assignments={leader: b"L", follower: b"F"})

    assert (led.result().assignment, syncing.result().assignment) == (b"L", b"F")
    assert syncing.result().protocol_name == "range"
    assert trial.group().state is GroupState.STABLE
    assert read_group(trial.log[-1]).generation == 1


def test_a_member_without_an_assignment_gets_an_empty_one() -> None:
    trial = GroupTrial()
    leader, _ = trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    trial.sync(leader, assignments={leader: b"all", "a stranger": b"nothing"})

    assert trial.sync(follower).result().assignment == b""


def test_syncs_are_refused_for_these_reasons() -> None:
    trial = GroupTrial()
    refused(trial.sync("nobody"), UnknownMember)
    leader, follower = trial.stable_group()

    refused(trial.sync("nobody"), UnknownMember)
    refused(trial.sync(leader, generation=7), IllegalGeneration)
    refused(trial.sync(leader, protocol_name="sticky"), InconsistentProtocol)
    assert trial.sync(follower, protocol_name="range").result().assignment == follower.encode()

    trial.new_member()
    refused(trial.sync(leader), RebalanceInProgress)


def test_parked_syncs_are_refused_when_a_member_joins() -> None:
    trial = GroupTrial()
    trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    syncing = trial.sync(follower)

    trial.new_member()

    refused(syncing, RebalanceInProgress)
    assert trial.group().state is GroupState.PREPARING


def test_members_that_do_not_sync_in_time_are_removed() -> None:
    trial = GroupTrial()
    leader, _ = trial.new_member(session_ms=2 * REBALANCE_MS)
    follower, _ = trial.new_member(session_ms=2 * REBALANCE_MS)
    trial.finish_joining()
    syncing = trial.sync(follower)

    trial.pass_ms(REBALANCE_MS)

    refused(syncing, RebalanceInProgress)
    assert list(trial.group().members) == [follower]
    rejoining = trial.join(follower)
    assert rejoining.result().leader_id == follower
    assert leader not in trial.group().members


def test_a_second_sync_of_a_member_replaces_the_first() -> None:
    trial = GroupTrial()
    leader, _ = trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    first, second = trial.sync(follower), trial.sync(follower)

    trial.sync(leader, assignments={follower: b"F"})

    refused(first, RebalanceInProgress)
    assert second.result().assignment == b"F"


def test_an_assignment_that_is_too_large_is_refused_and_reassigned() -> None:
    trial = GroupTrial(generation_bytes_max=1000)
    leader, _ = trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    syncing = trial.sync(follower)

    led = trial.sync(leader, assignments={leader: b"x" * 2000})

    refused(led, BatchTooLarge)
    refused(syncing, RebalanceInProgress)
    assert trial.group().state is GroupState.PREPARING
    assert trial.log == []


# Rejoining


def test_a_rejoining_leader_starts_a_rebalance() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    rejoining = trial.join(leader)
    assert waits(rejoining)
    refused(trial.heartbeat(follower), RebalanceInProgress)

    trial.join(follower)

    assert rejoining.result().generation == 2


def test_an_unchanged_rejoining_follower_changes_nothing() -> None:
    trial = GroupTrial()
    _, follower = trial.stable_group()

    assert trial.join(follower).result().generation == 1
    assert trial.group().state is GroupState.STABLE


def test_a_follower_with_new_metadata_starts_a_rebalance() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()

    trial.join(follower, protocols=(("range", b"new"),))

    assert trial.group().state is GroupState.PREPARING
    joined = trial.join(leader).result()
    assert {member.metadata for member in joined.members} == {b"new", b"r"}


def test_a_member_that_missed_its_response_gets_it_again() -> None:
    trial = GroupTrial()
    leader, joining = trial.new_member()
    follower, joining_too = trial.new_member()
    trial.finish_joining()

    assert trial.join(leader).result() == joining.result()
    assert trial.join(follower).result() == joining_too.result()


def test_a_second_join_of_a_member_replaces_the_first() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    first, second = trial.join(leader), trial.join(leader)
    trial.join(follower)

    refused(first, RebalanceInProgress)
    assert second.result().generation == 2


def test_dynamic_members_that_do_not_rejoin_in_time_are_removed() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group(session_ms=2 * REBALANCE_MS)
    rejoining = trial.join(follower, protocols=(("range", b"new"),))

    trial.pass_ms(REBALANCE_MS)

    joined = rejoining.result()
    assert joined.leader_id == follower
    assert [member.member_id for member in joined.members] == [follower]
    refused(trial.heartbeat(leader), UnknownMember)


# Sessions


def test_a_member_whose_session_expires_is_removed() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    for _ in range(3):
        trial.pass_ms(SESSION_MS - 1000)
        trial.heartbeat(leader).result()
        trial.heartbeat(follower).result()
    trial.pass_ms(SESSION_MS // 2)
    trial.heartbeat(leader).result()

    trial.pass_ms(SESSION_MS // 2)

    assert list(trial.group().members) == [leader]
    refused(trial.heartbeat(follower), UnknownMember)
    refused(trial.heartbeat(leader), RebalanceInProgress)


def test_a_parked_request_counts_as_a_heartbeat() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    rejoining = trial.join(leader)
    for _ in range(5):
        trial.pass_ms(SESSION_MS - 1000)
        trial.heartbeat(follower)

    assert waits(rejoining)
    assert leader in trial.group().members


def test_a_new_member_is_not_waited_for_indefinitely() -> None:
    trial = GroupTrial(new_member_ms=20_000)
    leader, _ = trial.stable_group(session_ms=100_000)
    _, joining = trial.new_member(session_ms=100_000)

    trial.pass_ms(20_000)

    refused(joining, UnknownMember)
    assert trial.group().state is GroupState.PREPARING
    assert leader in trial.group().members


def test_heartbeats_are_refused_for_these_reasons() -> None:
    trial = GroupTrial()
    refused(trial.heartbeat("nobody"), UnknownMember)
    leader, _ = trial.stable_group()

    refused(trial.heartbeat("nobody"), UnknownMember)
    refused(trial.heartbeat(leader, generation=0), IllegalGeneration)


def test_heartbeats_are_accepted_while_the_leader_assigns() -> None:
    trial = GroupTrial()
    leader, _ = trial.new_member()
    trial.pass_ms(INITIAL_DELAY_MS)

    assert trial.group().state is GroupState.COMPLETING
    trial.heartbeat(leader).result()


def test_a_group_without_members_becomes_empty_in_the_log() -> None:
    trial = GroupTrial()
    trial.stable_group()

    trial.pass_ms(2 * SESSION_MS)

    assert trial.group().state is GroupState.EMPTY
    stored = read_group(trial.log[-1])
    assert (stored.generation, stored.members, stored.protocol_type) == (2, (), "consumer")


# Leaving


def test_a_leave_starts_a_rebalance_at_once() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()

    (left,) = trial.leave(Leaver(leader, reason="stopping"))

    assert left.error is None
    refused(trial.heartbeat(follower), RebalanceInProgress)
    assert trial.join(follower).result().leader_id == follower


def test_several_members_leave_in_one_request_with_a_result_each() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()

    results = trial.leave(Leaver(leader), Leaver("nobody"), Leaver(follower))

    assert [type(left.error) for left in results] == [type(None), UnknownMember, type(None)]
    assert trial.group().state is GroupState.EMPTY
    assert trial.group().generation == 2


def test_leaving_a_missing_group_is_refused() -> None:
    (left,) = GroupTrial().leave(Leaver("nobody"))

    assert isinstance(left.error, UnknownMember)


def test_a_parked_join_of_a_leaving_member_is_refused() -> None:
    trial = GroupTrial()
    trial.new_member()
    follower, joining = trial.new_member()

    trial.leave(Leaver(follower))

    refused(joining, UnknownMember)


def test_a_parked_sync_of_a_leaving_member_is_refused() -> None:
    trial = GroupTrial()
    trial.new_member()
    follower, _ = trial.new_member()
    trial.finish_joining()
    syncing = trial.sync(follower)
    assert waits(syncing)

    trial.leave(Leaver(follower))

    refused(syncing, UnknownMember)


def test_a_pending_member_can_leave() -> None:
    trial = GroupTrial()
    error = trial.join().error
    assert isinstance(error, MemberIdRequired)

    (left,) = trial.leave(Leaver(error.member_id))

    assert left.error is None
    assert len(trial.shard.groups) == 0


def test_a_rebalance_completes_when_the_last_missing_member_leaves() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    rejoining = trial.join(leader)

    trial.leave(Leaver(follower))

    assert rejoining.result().generation == 2
