"""Committing, fetching, expiring and deleting offsets and groups."""

from __future__ import annotations

import struct
from typing import Any
from uuid import uuid4

import pytest

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.records import read_key
from millstream.broker.groups.requests import Leaver
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
from millstream_testing.group_trial import GROUP, SESSION_MS, GroupTrial

DAY_MS = 24 * 3600 * 1000
ORDERS_ONLY = (("range", struct.pack(">hih", 0, 1, 6) + b"orders" + struct.pack(">i", 0)),)


def refused(later: Deferred[Any], kind: type[MillstreamError]) -> None:
    with pytest.raises(kind):
        later.result()


def test_a_consumer_without_a_group_commits() -> None:
    trial = GroupTrial()
    assert trial.committed() == -1

    assert trial.commit(17, metadata="note").result() == {"orders": {0: None}}

    fetched = trial.all_committed()["orders"][0]
    assert (fetched.offset, fetched.metadata, fetched.leader_epoch) == (17, "note", -1)
    assert trial.group().state is GroupState.EMPTY
    assert trial.group().protocol_type is None


def test_a_later_commit_wins_and_survives_a_reload() -> None:
    trial = GroupTrial()
    trial.commit(17)
    trial.commit(5)

    trial.reload()

    assert trial.committed() == 5


def test_a_member_commits_in_its_generation() -> None:
    trial = GroupTrial()
    leader, _ = trial.stable_group()

    trial.commit(9, member_id=leader, generation=1).result()

    assert trial.committed() == 9


def test_commits_are_refused_for_these_reasons() -> None:
    trial = GroupTrial()
    refused(trial.commit(member_id="m", generation=3), UnknownGroup)
    refused(trial.commit(member_id="m", generation=3, version=8), IllegalGeneration)
    leader, _ = trial.stable_group()

    refused(trial.commit(), UnknownMember)
    refused(trial.commit(member_id="nobody", generation=1), UnknownMember)
    refused(trial.commit(member_id=leader, generation=0), IllegalGeneration)
    refused(trial.commit(member_id=leader, generation=-1), IllegalGeneration)
    assert trial.committed() == -1


def test_commits_during_a_rebalance() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    trial.new_member()
    trial.commit(3, member_id=leader, generation=1).result()
    newcomer = next(iter(set(trial.group().members) - {leader, follower}))
    trial.join(leader)
    trial.join(follower)
    assert trial.group().state is GroupState.COMPLETING

    refused(trial.commit(4, member_id=newcomer, generation=2), RebalanceInProgress)
    assert trial.committed() == 3


def test_a_commit_counts_as_a_heartbeat() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1)
    for number in range(5):
        trial.pass_ms(SESSION_MS - 1000)
        trial.commit(number, member_id=member, generation=1).result()

    assert trial.group().state is GroupState.STABLE


def test_commits_without_a_member_are_accepted_once_the_group_is_empty() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1)
    trial.leave(Leaver(member))

    trial.commit(8).result()

    assert trial.committed() == 8
    refused(trial.commit(member_id=member, generation=2), UnknownMember)


def test_the_size_of_metadata_is_bounded() -> None:
    trial = GroupTrial()

    response = trial.commit(1, metadata="x" * 4097).result()

    assert isinstance(response["orders"][0], MetadataTooLarge)
    assert trial.committed() == -1
    assert trial.commit(1, metadata="x" * 4096).result() == {"orders": {0: None}}


# Deleted topics


def test_offsets_of_a_deleted_topic_do_not_apply_to_a_recreated_one() -> None:
    trial = GroupTrial()
    trial.commit(17)
    del trial.topics["orders"]
    assert trial.committed() == -1
    assert trial.all_committed() == {}

    trial.topics["orders"] = uuid4()

    assert trial.committed() == -1
    trial.commit(1)
    assert trial.committed() == 1


def test_offsets_of_a_deleted_topic_are_removed() -> None:
    trial = GroupTrial()
    trial.commit(17)
    trial.commit(4, topic="bills")
    del trial.topics["orders"]

    trial.shard.sweep_soon()
    trial.pass_ms(0)

    assert trial.log[-1].value is None
    assert trial.committed("bills") == 4
    trial.reload()
    assert list(trial.all_committed()) == ["bills"]


def test_a_removal_interrupted_by_a_crash_is_finished_on_load() -> None:
    trial = GroupTrial()
    trial.commit(17)
    del trial.topics["orders"]
    trial.reload()

    trial.pass_ms(0)

    assert [record.value for record in trial.log[-2:]] == [None, None]
    assert len(trial.shard.groups) == 0


# Expiry


def test_offsets_of_a_simple_consumer_expire_by_their_own_age() -> None:
    trial = GroupTrial()
    trial.commit(1, partition=0)
    trial.pass_ms(4 * DAY_MS)
    trial.commit(2, partition=1)

    trial.pass_ms(3 * DAY_MS + DAY_MS // 2)

    assert trial.committed(partition=0) == -1
    assert trial.committed(partition=1) == 2
    trial.pass_ms(4 * DAY_MS)
    assert len(trial.shard.groups) == 0


def test_offsets_of_a_group_are_kept_while_it_has_members_and_expire_later() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1, protocols=ORDERS_ONLY, session_ms=3600 * 1000)
    trial.commit(1, member_id=member, generation=1)
    for _ in range(20 * 24 * 2):
        trial.pass_ms(1800 * 1000)
        trial.heartbeat(member).result()
    assert trial.committed() == 1
    trial.leave(Leaver(member))
    trial.pass_ms(6 * DAY_MS)
    assert trial.committed() == 1

    trial.pass_ms(DAY_MS + DAY_MS // 2)

    assert len(trial.shard.groups) == 0
    trial.reload()
    assert len(trial.shard.groups) == 0


def test_a_live_group_loses_offsets_of_unsubscribed_topics() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1, protocols=ORDERS_ONLY, session_ms=3600 * 1000)
    trial.commit(1, member_id=member, generation=1, topic="bills")
    trial.commit(2, member_id=member, generation=1, topic="orders")
    for _ in range(8 * 24 * 2):
        trial.pass_ms(1800 * 1000)
        trial.heartbeat(member)

    assert trial.committed("bills") == -1
    assert trial.committed("orders") == 2


def test_offsets_of_pipelines_do_not_expire() -> None:
    trial = GroupTrial()
    trial.commit(1, group_id="pipeline-copy")
    trial.commit(1)
    trial.pass_ms(100 * DAY_MS)
    trial.reload()
    assert trial.committed() == -1
    assert trial.committed(group_id="pipeline-copy") == 1


def test_a_retention_requested_by_the_client_applies() -> None:
    trial = GroupTrial()
    trial.commit(1, retention_ms=DAY_MS)
    trial.pass_ms(DAY_MS // 2)
    trial.reload()
    assert trial.committed() == 1

    trial.pass_ms(DAY_MS)

    assert trial.committed() == -1


def test_expiry_runs_in_bounded_steps() -> None:
    trial = GroupTrial(tombstones_max=10)
    for number in range(35):
        trial.commit(number, partition=number)
    trial.pass_ms(7 * DAY_MS + 600_000)

    trial.pass_ms(1000)

    assert len(trial.shard.groups) == 0


# Deleting


def test_deleting_a_group_removes_all_of_its_records() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1)
    trial.commit(1, member_id=member, generation=1)
    refused(trial.run(lambda shard: shard.delete(GROUP)), GroupNotEmpty)
    trial.leave(Leaver(member))

    assert trial.run(lambda shard: shard.delete(GROUP)).result() is True

    assert len(trial.shard.groups) == 0
    refused(trial.run(lambda shard: shard.delete(GROUP)), UnknownGroup)
    trial.reload()
    assert len(trial.shard.groups) == 0
    assert trial.shard.durable_keys() == []


def test_a_large_group_is_deleted_in_steps() -> None:
    trial = GroupTrial(tombstones_max=10)
    for number in range(25):
        trial.commit(number, partition=number)

    steps: list[bool] = []
    while not steps or not steps[-1]:
        steps.append(trial.run(lambda shard: shard.delete(GROUP)).result())

    assert steps == [False, False, True]
    assert len(trial.shard.groups) == 0


def test_a_pending_member_id_is_deleted_with_its_group() -> None:
    trial = GroupTrial()
    trial.commit(1)
    trial.join()
    trial.run(lambda shard: shard.delete(GROUP)).result()

    trial.pass_ms(SESSION_MS)

    assert len(trial.shard.groups) == 0


def test_deleting_offsets() -> None:
    trial = GroupTrial()
    refused(trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})), UnknownGroup)
    trial.commit(1, partition=0)
    trial.commit(1, partition=1)

    response = trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0, 7], "bills": [0]})).result()

    assert response == {"orders": {0: None, 7: None}, "bills": {0: None}}
    assert set(trial.all_committed()["orders"]) == {1}


def test_offsets_of_subscribed_topics_are_not_deleted() -> None:
    trial = GroupTrial()
    (member,) = trial.stable_group(1, protocols=ORDERS_ONLY)
    trial.commit(1, member_id=member, generation=1, topic="orders")
    trial.commit(1, member_id=member, generation=1, topic="bills")

    response = trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0], "bills": [0]})).result()

    assert isinstance(response["orders"][0], SubscribedToTopic)
    assert response["bills"][0] is None
    assert (trial.committed("orders"), trial.committed("bills")) == (1, -1)


def test_a_group_of_unknown_protocol_keeps_its_offsets_while_it_has_members() -> None:
    trial = GroupTrial()
    trial.stable_group(1, protocol_type="connect")

    refused(trial.run(lambda shard: shard.delete_offsets(GROUP, {"orders": [0]})), GroupNotEmpty)


# Listing


def test_listing_and_describing() -> None:
    trial = GroupTrial()
    leader, follower = trial.stable_group()
    trial.commit(1, group_id="other")
    refused(trial.run(lambda shard: shard.describe("missing")), UnknownGroup)

    listings = trial.run(lambda shard: shard.list_groups()).result()
    described = trial.run(lambda shard: shard.describe(GROUP)).result()

    assert {(one.group_id, one.state, one.protocol_type) for one in listings} == {
        (GROUP, "Stable", "consumer"),
        ("other", "Empty", ""),
    }
    assert (described.state, described.protocol_name, described.generation) == ("Stable", "range", 1)
    assert {member.member_id: member.assignment for member in described.members} == {
        leader: leader.encode(),
        follower: follower.encode(),
    }
    trial.new_member()
    rebalancing = trial.run(lambda shard: shard.describe(GROUP)).result()
    assert rebalancing.state == "PreparingRebalance"
    assert {member.assignment for member in rebalancing.members} == {b""}
    assert rebalancing.protocol_name == ""


# Rewriting the state


def test_the_rewritten_state_equals_the_original() -> None:
    trial = GroupTrial()
    leader, _ = trial.stable_group()
    trial.commit(7, member_id=leader, generation=1, metadata="note")
    trial.commit(8, member_id=leader, generation=1, partition=3)
    trial.commit(9, group_id="other", retention_ms=1000)
    trial.new_member()

    records = [trial.shard.durable_record(key) for key in trial.shard.durable_keys()]

    copy = GroupTrial()
    copy.topics = trial.topics
    copy.log = [record for record in records if record is not None]
    trial.reload()
    copy.reload()
    assert copy.all_committed() == trial.all_committed()
    assert copy.all_committed("other") == trial.all_committed("other")
    describe = [t.run(lambda shard: shard.describe(GROUP)).result() for t in (copy, trial)]
    assert describe[0] == describe[1]
    assert {read_key(record.key) for record in copy.log} == set(trial.shard.durable_keys())


def test_deleted_state_is_not_rewritten() -> None:
    trial = GroupTrial()
    trial.commit(7)
    keys = trial.shard.durable_keys()
    trial.run(lambda shard: shard.delete(GROUP))

    assert [trial.shard.durable_record(key) for key in keys] == [None]
    assert trial.shard.durable_record("something else") is None


def test_a_group_tombstone_written_elsewhere_keeps_the_offsets() -> None:
    trial = GroupTrial()
    trial.stable_group(1)
    trial.log.pop()
    trial.commit(1, group_id="g")
    tombstone = trial.log[-1]._replace(key=struct.pack(">hh", 2, 1) + b"g", value=None)

    trial.append([tombstone])

    assert trial.committed(group_id="g") == 1
