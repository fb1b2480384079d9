"""Join, sync, heartbeat and leave as in Kafka's classic groups."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_group
from millstream.broker.groups.requests import LeavingMember
from millstream.core.errors import (
    BatchTooLarge,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    MillstreamError,
    RebalanceInProgress,
    UnknownMember,
)
from millstream_testing.group_harness import INITIAL_DELAY_MS, REBALANCE_MS, SESSION_MS, GroupHarness


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    assert later.completed
    with pytest.raises(kind):
        later.result()


def waits(later: Deferred[Any]) -> bool:
    return not later.completed


# Joining a new group


def test_a_new_member_gets_an_id_first() -> None:
    harness = GroupHarness()

    error = harness.join().error

    assert isinstance(error, MemberIdRequired)
    assert error.member_id == "client-1"
    assert harness.log == []


def test_an_old_client_joins_without_an_id() -> None:
    harness = GroupHarness()
    joining = harness.join(version=3)
    assert waits(joining)

    harness.advance_ms(INITIAL_DELAY_MS)

    assert joining.result().member_id == "client-1"


def test_the_first_generation() -> None:
    harness = GroupHarness()
    first, joining = harness.new_member(protocols=(("range", b"one"),))
    second, joining_too = harness.new_member(protocols=(("range", b"two"),))
    harness.finish_joining()

    leader, follower = joining.result(), joining_too.result()

    assert leader.generation == follower.generation == 1
    assert leader.leader_id == follower.leader_id == first
    assert leader.protocol_name == "range"
    assert leader.protocol_type == "consumer"
    assert {member.member_id: member.metadata for member in leader.members} == {first: b"one", second: b"two"}
    assert follower.members == ()
    assert harness.group().state is GroupState.COMPLETING


def test_a_new_group_waits_while_members_join_but_not_for_ever() -> None:
    harness = GroupHarness()
    _, joining = harness.new_member(rebalance_ms=4 * INITIAL_DELAY_MS)
    for _ in range(3):
        harness.advance_ms(INITIAL_DELAY_MS - 1)
        harness.new_member()
        assert waits(joining)
    harness.advance_ms(INITIAL_DELAY_MS + 10)

    assert joining.completed


def test_a_member_with_an_id_cannot_join_a_missing_group() -> None:
    refused(GroupHarness().join("somebody"), UnknownMember)


def test_an_unused_id_expires_and_the_group_with_it() -> None:
    harness = GroupHarness()
    harness.join()
    assert len(harness.shard.groups) == 1

    harness.advance_ms(SESSION_MS)

    assert len(harness.shard.groups) == 0
    assert harness.log == []


def test_an_unsupported_protocol_is_refused() -> None:
    harness = GroupHarness()
    refused(harness.join(protocols=()), InconsistentProtocol)
    refused(harness.join(protocol_type=""), InconsistentProtocol)
    assert len(harness.shard.groups) == 0
    harness.stable_group(1)

    refused(harness.join(protocols=(("sticky", b""),)), InconsistentProtocol)
    refused(harness.join(protocol_type="connect"), InconsistentProtocol)


def test_the_common_protocol_with_most_votes_is_chosen() -> None:
    harness = GroupHarness()
    harness.new_member(protocols=(("only-me", b""), ("range", b""), ("sticky", b"")))
    harness.new_member(protocols=(("sticky", b""), ("range", b"")))
    _, joining = harness.new_member(protocols=(("sticky", b""), ("range", b"")))
    harness.finish_joining()

    assert joining.result().protocol_name == "sticky"


# Syncing


def test_every_member_gets_its_assignment_when_the_leader_syncs() -> None:
    harness = GroupHarness()
    leader, _ = harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    syncing = harness.sync(follower)
    assert waits(syncing)

    led = harness.sync(leader, assignments={leader: b"L", follower: b"F"})

    assert (led.result().assignment, syncing.result().assignment) == (b"L", b"F")
    assert syncing.result().protocol_name == "range"
    assert harness.group().state is GroupState.STABLE
    assert read_group(harness.log[-1]).generation == 1


def test_a_member_without_an_assignment_gets_an_empty_one() -> None:
    harness = GroupHarness()
    leader, _ = harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    harness.sync(leader, assignments={leader: b"all", "a stranger": b"nothing"})

    assert harness.sync(follower).result().assignment == b""


def test_syncs_are_refused_for_these_reasons() -> None:
    harness = GroupHarness()
    refused(harness.sync("nobody"), UnknownMember)
    leader, follower = harness.stable_group()

    refused(harness.sync("nobody"), UnknownMember)
    refused(harness.sync(leader, generation=7), IllegalGeneration)
    refused(harness.sync(leader, protocol_name="sticky"), InconsistentProtocol)
    assert harness.sync(follower, protocol_name="range").result().assignment == follower.encode()

    harness.new_member()
    refused(harness.sync(leader), RebalanceInProgress)


def test_parked_syncs_are_refused_when_a_member_joins() -> None:
    harness = GroupHarness()
    harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    syncing = harness.sync(follower)

    harness.new_member()

    refused(syncing, RebalanceInProgress)
    assert harness.group().state is GroupState.PREPARING


def test_members_that_do_not_sync_in_time_are_removed() -> None:
    harness = GroupHarness()
    leader, _ = harness.new_member(session_ms=2 * REBALANCE_MS)
    follower, _ = harness.new_member(session_ms=2 * REBALANCE_MS)
    harness.finish_joining()
    syncing = harness.sync(follower)

    harness.advance_ms(REBALANCE_MS)

    refused(syncing, RebalanceInProgress)
    assert list(harness.group().members) == [follower]
    rejoining = harness.join(follower)
    assert rejoining.result().leader_id == follower
    assert leader not in harness.group().members


def test_a_second_sync_of_a_member_replaces_the_first() -> None:
    harness = GroupHarness()
    leader, _ = harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    first, second = harness.sync(follower), harness.sync(follower)

    harness.sync(leader, assignments={follower: b"F"})

    refused(first, RebalanceInProgress)
    assert second.result().assignment == b"F"


def test_an_assignment_that_is_too_large_is_refused_and_reassigned() -> None:
    harness = GroupHarness(generation_bytes_max=1000)
    leader, _ = harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    syncing = harness.sync(follower)

    led = harness.sync(leader, assignments={leader: b"x" * 2000})

    refused(led, BatchTooLarge)
    refused(syncing, RebalanceInProgress)
    assert harness.group().state is GroupState.PREPARING
    assert harness.log == []


# Rejoining


def test_a_rejoining_leader_starts_a_rebalance() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    rejoining = harness.join(leader)
    assert waits(rejoining)
    refused(harness.heartbeat(follower), RebalanceInProgress)

    harness.join(follower)

    assert rejoining.result().generation == 2


def test_an_unchanged_rejoining_follower_changes_nothing() -> None:
    harness = GroupHarness()
    _, follower = harness.stable_group()

    assert harness.join(follower).result().generation == 1
    assert harness.group().state is GroupState.STABLE


def test_a_follower_with_new_metadata_starts_a_rebalance() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()

    harness.join(follower, protocols=(("range", b"new"),))

    assert harness.group().state is GroupState.PREPARING
    joined = harness.join(leader).result()
    assert {member.metadata for member in joined.members} == {b"new", b"r"}


def test_a_member_that_missed_its_response_gets_it_again() -> None:
    harness = GroupHarness()
    leader, joining = harness.new_member()
    follower, joining_too = harness.new_member()
    harness.finish_joining()

    assert harness.join(leader).result() == joining.result()
    assert harness.join(follower).result() == joining_too.result()


def test_a_second_join_of_a_member_replaces_the_first() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    first, second = harness.join(leader), harness.join(leader)
    harness.join(follower)

    refused(first, RebalanceInProgress)
    assert second.result().generation == 2


def test_dynamic_members_that_do_not_rejoin_in_time_are_removed() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group(session_ms=2 * REBALANCE_MS)
    rejoining = harness.join(follower, protocols=(("range", b"new"),))

    harness.advance_ms(REBALANCE_MS)

    joined = rejoining.result()
    assert joined.leader_id == follower
    assert [member.member_id for member in joined.members] == [follower]
    refused(harness.heartbeat(leader), UnknownMember)


# Sessions


def test_a_member_whose_session_expires_is_removed() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    for _ in range(3):
        harness.advance_ms(SESSION_MS - 1000)
        harness.heartbeat(leader).result()
        harness.heartbeat(follower).result()
    harness.advance_ms(SESSION_MS // 2)
    harness.heartbeat(leader).result()

    harness.advance_ms(SESSION_MS // 2)

    assert list(harness.group().members) == [leader]
    refused(harness.heartbeat(follower), UnknownMember)
    refused(harness.heartbeat(leader), RebalanceInProgress)


def test_a_parked_request_counts_as_a_heartbeat() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    rejoining = harness.join(leader)
    for _ in range(5):
        harness.advance_ms(SESSION_MS - 1000)
        harness.heartbeat(follower)

    assert waits(rejoining)
    assert leader in harness.group().members


def test_a_new_member_is_not_waited_for_indefinitely() -> None:
    harness = GroupHarness(new_member_ms=20_000)
    leader, _ = harness.stable_group(session_ms=100_000)
    _, joining = harness.new_member(session_ms=100_000)

    harness.advance_ms(20_000)

    refused(joining, UnknownMember)
    assert harness.group().state is GroupState.PREPARING
    assert leader in harness.group().members


def test_heartbeats_are_refused_for_these_reasons() -> None:
    harness = GroupHarness()
    refused(harness.heartbeat("nobody"), UnknownMember)
    leader, _ = harness.stable_group()

    refused(harness.heartbeat("nobody"), UnknownMember)
    refused(harness.heartbeat(leader, generation=0), IllegalGeneration)


def test_heartbeats_are_accepted_while_the_leader_assigns() -> None:
    harness = GroupHarness()
    leader, _ = harness.new_member()
    harness.advance_ms(INITIAL_DELAY_MS)

    assert harness.group().state is GroupState.COMPLETING
    harness.heartbeat(leader).result()


def test_a_group_without_members_becomes_empty_in_the_log() -> None:
    harness = GroupHarness()
    harness.stable_group()

    harness.advance_ms(2 * SESSION_MS)

    assert harness.group().state is GroupState.EMPTY
    stored = read_group(harness.log[-1])
    assert (stored.generation, stored.members, stored.protocol_type) == (2, (), "consumer")


# Leaving


def test_a_leave_starts_a_rebalance_at_once() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()

    (result,) = harness.leave(LeavingMember(leader, reason="stopping"))

    assert result.error is None
    refused(harness.heartbeat(follower), RebalanceInProgress)
    assert harness.join(follower).result().leader_id == follower


def test_several_members_leave_in_one_request_with_a_result_each() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()

    results = harness.leave(LeavingMember(leader), LeavingMember("nobody"), LeavingMember(follower))

    assert [type(result.error) for result in results] == [type(None), UnknownMember, type(None)]
    assert harness.group().state is GroupState.EMPTY
    assert harness.group().generation == 2


def test_leaving_a_missing_group_is_refused() -> None:
    (result,) = GroupHarness().leave(LeavingMember("nobody"))

    assert isinstance(result.error, UnknownMember)


def test_a_parked_join_of_a_leaving_member_is_refused() -> None:
    harness = GroupHarness()
    harness.new_member()
    follower, joining = harness.new_member()

    harness.leave(LeavingMember(follower))

    refused(joining, UnknownMember)


def test_a_parked_sync_of_a_leaving_member_is_refused() -> None:
    harness = GroupHarness()
    harness.new_member()
    follower, _ = harness.new_member()
    harness.finish_joining()
    syncing = harness.sync(follower)
    assert waits(syncing)

    harness.leave(LeavingMember(follower))

    refused(syncing, UnknownMember)


def test_a_pending_member_can_leave() -> None:
    harness = GroupHarness()
    error = harness.join().error
    assert isinstance(error, MemberIdRequired)

    (result,) = harness.leave(LeavingMember(error.member_id))

    assert result.error is None
    assert len(harness.shard.groups) == 0


def test_a_rebalance_waits_for_the_member_that_was_just_given_an_id() -> None:
    harness = GroupHarness()
    (leader,) = harness.stable_group(1)
    error = harness.join().error
    assert isinstance(error, MemberIdRequired)
    rejoining = harness.join(leader)
    assert waits(rejoining)

    joining = harness.join(error.member_id)

    assert rejoining.result().generation == joining.result().generation == 2


def test_a_rebalance_completes_when_the_last_missing_member_leaves() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    rejoining = harness.join(leader)

    harness.leave(LeavingMember(follower))

    assert rejoining.result().generation == 2
