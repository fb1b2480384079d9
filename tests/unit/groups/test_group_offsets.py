"""Committing, fetching, expiring and deleting offsets and groups."""

from __future__ import annotations

import struct
from typing import Any
from uuid import uuid4

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_key
from millstream.broker.groups.requests import LeavingMember
from millstream.core.errors import (
    GroupNotEmpty,
    IllegalGeneration,
    MetadataTooLarge,
    MillstreamError,
    RebalanceInProgress,
    SubscribedToTopic,
    UnknownGroup,
    UnknownMember,
)
from millstream_testing.group_harness import GROUP, SESSION_MS, GroupHarness

DAY_MS = 24 * 3600 * 1000
ORDERS_ONLY = (("range", struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">i", 0)),)


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    with pytest.raises(kind):
        later.result()


def test_a_consumer_without_a_group_commits() -> None:
    harness = GroupHarness()
    assert harness.committed() == -1

    assert harness.commit(17, metadata="note").result() == {"orders": {0: None}}

    fetched = harness.all_committed()["orders"][0]
    assert (fetched.offset, fetched.metadata, fetched.leader_epoch) == (17, "note", -1)
    assert harness.group().state is GroupState.EMPTY
    assert harness.group().protocol_type is None


def test_a_later_commit_wins_and_survives_a_reload() -> None:
    harness = GroupHarness()
    harness.commit(17)
    harness.commit(5)

    harness.reload()

    assert harness.committed() == 5


def test_a_member_commits_in_its_generation() -> None:
    harness = GroupHarness()
    leader, _ = harness.stable_group()

    harness.commit(9, member_id=leader, generation=1).result()

    assert harness.committed() == 9


def test_commits_are_refused_for_these_reasons() -> None:
    harness = GroupHarness()
    refused(harness.commit(member_id="m", generation=3), UnknownGroup)
    refused(harness.commit(member_id="m", generation=3, version=8), IllegalGeneration)
    leader, _ = harness.stable_group()

    refused(harness.commit(), UnknownMember)
    refused(harness.commit(member_id="nobody", generation=1), UnknownMember)
    refused(harness.commit(member_id=leader, generation=0), IllegalGeneration)
    refused(harness.commit(member_id=leader, generation=-1), IllegalGeneration)
    assert harness.committed() == -1


def test_commits_during_a_rebalance() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    harness.new_member()
    harness.commit(3, member_id=leader, generation=1).result()
    newcomer = next(iter(set(harness.group().members) - {leader, follower}))
    harness.join(leader)
    harness.join(follower)
    assert harness.group().state is GroupState.COMPLETING

    refused(harness.commit(4, member_id=newcomer, generation=2), RebalanceInProgress)
    assert harness.committed() == 3


def test_a_commit_counts_as_a_heartbeat() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1)
    for number in range(5):
        harness.advance_ms(SESSION_MS - 1000)
        harness.commit(number, member_id=member, generation=1).result()

    assert harness.group().state is GroupState.STABLE


def test_commits_without_a_member_are_accepted_once_the_group_is_empty() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1)
    harness.leave(LeavingMember(member))

    harness.commit(8).result()

    assert harness.committed() == 8
    refused(harness.commit(member_id=member, generation=2), UnknownMember)


def test_the_size_of_metadata_is_bounded() -> None:
    harness = GroupHarness()

    response = harness.commit(1, metadata="x" * 4097).result()

    assert isinstance(response["orders"][0], MetadataTooLarge)
    assert harness.committed() == -1
    assert harness.commit(1, metadata="x" * 4096).result() == {"orders": {0: None}}


# Deleted topics


def test_offsets_of_a_deleted_topic_do_not_apply_to_a_recreated_one() -> None:
    harness = GroupHarness()
    harness.commit(17)
    del harness.topics["orders"]
    assert harness.committed() == -1
    assert harness.all_committed() == {}

    harness.topics["orders"] = uuid4()

    assert harness.committed() == -1
    harness.commit(1)
    assert harness.committed() == 1


def test_offsets_of_a_deleted_topic_are_removed() -> None:
    harness = GroupHarness()
    harness.commit(17)
    harness.commit(4, topic="bills")
    del harness.topics["orders"]

    harness.shard.sweep_soon()
    harness.advance_ms(0)

    assert harness.log[-1].value is None
    assert harness.committed("bills") == 4
    harness.reload()
    assert list(harness.all_committed()) == ["bills"]


def test_a_removal_interrupted_by_a_crash_is_finished_on_load() -> None:
    harness = GroupHarness()
    harness.commit(17)
    del harness.topics["orders"]
    harness.reload()

    harness.advance_ms(0)

    assert [record.value for record in harness.log[-2:]] == [None, None]
    assert len(harness.shard.groups) == 0


# Expiry


def test_offsets_of_a_simple_consumer_expire_by_their_own_age() -> None:
    harness = GroupHarness()
    harness.commit(1, partition=0)
    harness.advance_ms(4 * DAY_MS)
    harness.commit(2, partition=1)

    harness.advance_ms(3 * DAY_MS + DAY_MS // 2)

    assert harness.committed(partition=0) == -1
    assert harness.committed(partition=1) == 2
    harness.advance_ms(4 * DAY_MS)
    assert len(harness.shard.groups) == 0


def test_offsets_of_a_group_are_kept_while_it_has_members_and_expire_later() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1, protocols=ORDERS_ONLY, session_ms=3600 * 1000)
    harness.commit(1, member_id=member, generation=1)
    for _ in range(20 * 24 * 2):
        harness.advance_ms(1800 * 1000)
        harness.heartbeat(member).result()
    assert harness.committed() == 1
    harness.leave(LeavingMember(member))
    harness.advance_ms(6 * DAY_MS)
    assert harness.committed() == 1

    harness.advance_ms(DAY_MS + DAY_MS // 2)

    assert len(harness.shard.groups) == 0
    harness.reload()
    assert len(harness.shard.groups) == 0


def test_a_live_group_loses_offsets_of_unsubscribed_topics() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1, protocols=ORDERS_ONLY, session_ms=3600 * 1000)
    harness.commit(1, member_id=member, generation=1, topic="bills")
    harness.commit(2, member_id=member, generation=1, topic="orders")
    for _ in range(8 * 24 * 2):
        harness.advance_ms(1800 * 1000)
        harness.heartbeat(member)

    assert harness.committed("bills") == -1
    assert harness.committed("orders") == 2


def test_offsets_of_pipelines_do_not_expire() -> None:
    harness = GroupHarness()
    harness.commit(1, group_id="pipeline-copy")
    harness.commit(1)
    harness.advance_ms(100 * DAY_MS)
    harness.reload()
    assert harness.committed() == -1
    assert harness.committed(group_id="pipeline-copy") == 1


def test_a_retention_requested_by_the_client_applies() -> None:
    harness = GroupHarness()
    harness.commit(1, retention_ms=DAY_MS)
    harness.advance_ms(DAY_MS // 2)
    harness.reload()
    assert harness.committed() == 1

    harness.advance_ms(DAY_MS)

    assert harness.committed() == -1


def test_expiry_runs_in_bounded_steps() -> None:
    harness = GroupHarness(tombstones_max=10)
    for number in range(35):
        harness.commit(number, partition=number)
    harness.advance_ms(7 * DAY_MS + 600_000)

    harness.advance_ms(1000)

    assert len(harness.shard.groups) == 0


# Deleting


def test_deleting_a_group_removes_all_of_its_records() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1)
    harness.commit(1, member_id=member, generation=1)
    refused(harness.run(lambda shard: shard.delete(GROUP)), GroupNotEmpty)
    harness.leave(LeavingMember(member))

    assert harness.run(lambda shard: shard.delete(GROUP)).result() is True

    assert len(harness.shard.groups) == 0
    refused(harness.run(lambda shard: shard.delete(GROUP)), UnknownGroup)
    harness.reload()
    assert len(harness.shard.groups) == 0
    assert harness.shard.durable_keys() == []


def test_a_large_group_is_deleted_in_steps() -> None:
    harness = GroupHarness(tombstones_max=10)
    for number in range(25):
        harness.commit(number, partition=number)

    steps: list[bool] = []
    while not steps or not steps[-1]:
        steps.append(harness.run(lambda shard: shard.delete(GROUP)).result())

    assert steps == [False, False, True]
    assert len(harness.shard.groups) == 0


def test_a_pending_member_id_is_deleted_with_its_group() -> None:
    harness = GroupHarness()
    harness.commit(1)
    harness.join()
    harness.run(lambda shard: shard.delete(GROUP)).result()

    harness.advance_ms(SESSION_MS)

    assert len(harness.shard.groups) == 0


def test_deleting_offsets() -> None:
    harness = GroupHarness()
    refused(harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})), UnknownGroup)
    harness.commit(1, partition=0)
    harness.commit(1, partition=1)

    response = harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0, 7], "bills": [0]})).result()

    assert response == {"orders": {0: None, 7: None}, "bills": {0: None}}
    assert set(harness.all_committed()["orders"]) == {1}


def test_offsets_of_subscribed_topics_are_not_deleted() -> None:
    harness = GroupHarness()
    (member,) = harness.stable_group(1, protocols=ORDERS_ONLY)
    harness.commit(1, member_id=member, generation=1, topic="orders")
    harness.commit(1, member_id=member, generation=1, topic="bills")

    response = harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0], "bills": [0]})).result()

    assert isinstance(response["orders"][0], SubscribedToTopic)
    assert response["bills"][0] is None
    assert (harness.committed("orders"), harness.committed("bills")) == (1, -1)


def test_a_group_of_unknown_protocol_keeps_its_offsets_while_it_has_members() -> None:
    harness = GroupHarness()
    harness.stable_group(1, protocol_type="connect")

    refused(harness.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})), GroupNotEmpty)


# Listing


def test_listing_and_describing() -> None:
    harness = GroupHarness()
    leader, follower = harness.stable_group()
    harness.commit(1, group_id="other")
    refused(harness.run(lambda shard: shard.describe("missing")), UnknownGroup)

    listings = harness.run(lambda shard: shard.list_groups()).result()
    described = harness.run(lambda shard: shard.describe(GROUP)).result()

    assert {(listing.group_id, listing.state, listing.protocol_type) for listing in listings} == {
        (GROUP, "Stable", "consumer"),
        ("other", "Empty", ""),
    }
    assert (described.state, described.protocol_name, described.generation) == ("Stable", "range", 1)
    assert {member.member_id: member.assignment for member in described.members} == {
        leader: leader.encode(),
        follower: follower.encode(),
    }
    harness.new_member()
    rebalancing = harness.run(lambda shard: shard.describe(GROUP)).result()
    assert rebalancing.state == "PreparingRebalance"
    assert {member.assignment for member in rebalancing.members} == {b""}
    assert rebalancing.protocol_name == ""


# Rewriting the state


def test_the_rewritten_state_equals_the_original() -> None:
    harness = GroupHarness()
    leader, _ = harness.stable_group()
    harness.commit(7, member_id=leader, generation=1, metadata="note")
    harness.commit(8, member_id=leader, generation=1, partition=3)
    harness.commit(9, group_id="other", retention_ms=1000)
    harness.new_member()

    records = [harness.shard.durable_record(key) for key in harness.shard.durable_keys()]

    copy = GroupHarness()
    copy.topics = harness.topics
    copy.log = [record for record in records if record is not None]
    harness.reload()
    copy.reload()
    assert copy.all_committed() == harness.all_committed()
    assert copy.all_committed("other") == harness.all_committed("other")
    describe = [t.run(lambda shard: shard.describe(GROUP)).result() for t in (copy, harness)]
    assert describe[0] == describe[1]
    assert {read_key(record.key) for record in copy.log} == set(harness.shard.durable_keys())


def test_deleted_state_is_not_rewritten() -> None:
    harness = GroupHarness()
    harness.commit(7)
    keys = harness.shard.durable_keys()
    harness.run(lambda shard: shard.delete(GROUP))

    assert [harness.shard.durable_record(key) for key in keys] == [None]
    assert harness.shard.durable_record("something else") is None


def test_a_group_tombstone_written_elsewhere_keeps_the_offsets() -> None:
    harness = GroupHarness()
    harness.stable_group(1)
    harness.log.pop()
    harness.commit(1, group_id="g")
    tombstone = harness.log[-1]._replace(key=struct.pack(">hh", 2, 1) + b"g", value=None)

    harness.append([tombstone])

    assert harness.committed(group_id="g") == 1
