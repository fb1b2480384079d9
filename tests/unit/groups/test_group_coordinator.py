"""The coordinator on the runtime, with topics in memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import (
    CommitRequest,
    ConsumerHeartbeat,
    JoinRequest,
    JoinResponse,
    LeavingMember,
    MemberRef,
    PartitionCommit,
    SyncRequest,
)
from millstream.broker.groups.share.group import ShareHeartbeat
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import (
    CoordinatorLoading,
    InvalidGroupId,
    InvalidSessionTimeout,
    MemberIdRequired,
    NotCoordinator,
    StorageFailure,
    UnknownGroup,
)
from millstream.core.topic import CONSUMER_OFFSETS
from millstream_testing.state_log import MemoryTopics

CONFIG = Config(group_initial_delay_ms=1, group_session_min_ms=10)


def coordinator_on(topics: MemoryTopics) -> GroupCoordinator:
    return GroupCoordinator(topics, CONFIG, SystemClock(), retry_first_s=0.0)


@pytest.fixture
async def topics() -> MemoryTopics:
    topics = MemoryTopics()
    topics.add("orders", partitions=3)
    return topics


@pytest.fixture
async def groups(topics: MemoryTopics) -> AsyncIterator[GroupCoordinator]:
    groups = coordinator_on(topics)
    await groups.start()
    yield groups
    await groups.close()


def join_request(group_id: str, member_id: str = "", *, session_ms: int = 10_000) -> JoinRequest:
    return JoinRequest(
        group_id=group_id,
        member_id=member_id,
        client_id="client",
        client_host="/127.0.0.1",
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=(("range", b""),),
    )


async def joined(groups: GroupCoordinator, group_id: str) -> JoinResponse:
    with pytest.raises(MemberIdRequired) as required:
        await groups.join(join_request(group_id))
    return await groups.join(join_request(group_id, required.value.member_id))


def commit_request(group_id: str, offset: int, topic: str = "orders") -> CommitRequest:
    return CommitRequest(
        member=MemberRef(group_id=group_id, member_id=""),
        topics={topic: (PartitionCommit(partition=0, offset=offset),)},
    )


async def fetched(groups: GroupCoordinator, group_id: str) -> int:
    return (await groups.fetch(group_id, {"orders": [0]}))["orders"][0].offset


async def test_two_consumers_share_a_group(groups: GroupCoordinator) -> None:
    first, second = await asyncio.gather(joined(groups, "g"), joined(groups, "g"))
    while first.generation != second.generation:
        # The second joins after the first generation; the first learns of it and rejoins.
        first = await groups.join(join_request("g", first.member_id))
    leader, follower = (first, second) if first.members else (second, first)

    async def sync(member: JoinResponse, assignments: dict[str, bytes]) -> bytes:
        who = MemberRef(group_id="g", member_id=member.member_id, generation=member.generation)
        return (await groups.sync(SyncRequest(member=who, assignments=assignments))).assignment

    shares = await asyncio.gather(sync(follower, {}), sync(leader, {leader.member_id: b"L", follower.member_id: b"F"}))

    assert tuple(shares) == (b"F", b"L")
    described = await groups.describe("g")
    assert (described.state, len(described.members)) == ("Stable", 2)
    await groups.heartbeat(MemberRef(group_id="g", member_id=first.member_id, generation=first.generation))
    results = await groups.leave("g", [LeavingMember(first.member_id), LeavingMember(second.member_id)])
    assert [result.error for result in results] == [None, None]
    assert (await groups.describe("g")).state == "Empty"


async def test_sessions_expire_by_themselves(groups: GroupCoordinator) -> None:
    with pytest.raises(MemberIdRequired) as required:
        await groups.join(join_request("g"))
    member = await groups.join(join_request("g", required.value.member_id, session_ms=20))
    assert member.generation == 1

    async def emptied() -> None:
        while (await groups.describe("g")).state != "Empty":
            await asyncio.sleep(0.01)

    await asyncio.wait_for(emptied(), 60)


async def test_the_offsets_topic_is_created_on_first_use(groups: GroupCoordinator, topics: MemoryTopics) -> None:
    assert await groups.list_groups() == []
    assert topics.get(CONSUMER_OFFSETS) is None

    await groups.commit(commit_request("g", 1))

    topic = topics.get(CONSUMER_OFFSETS)
    assert topic is not None
    assert topic.partitions == CONFIG.offsets_partitions
    assert topic.overrides["cleanup.policy"] == "compact"


async def test_offsets_survive_a_restart(groups: GroupCoordinator, topics: MemoryTopics) -> None:
    for number in range(20):
        await groups.commit(commit_request(f"g{number}", number))

    restarted = coordinator_on(topics.after_crash())
    await restarted.start()
    with pytest.raises(CoordinatorLoading):
        await restarted.list_groups()
    await restarted.wait_loaded()

    assert [await fetched(restarted, f"g{number}") for number in range(20)] == list(range(20))
    assert {listing.group_id for listing in await restarted.list_groups()} == {f"g{number}" for number in range(20)}
    await restarted.close()


async def test_offsets_of_a_deleted_topic_are_deleted(groups: GroupCoordinator, topics: MemoryTopics) -> None:
    await groups.commit(commit_request("g", 5))
    topics.remove("orders")
    assert await fetched(groups, "g") == -1

    groups.topic_deleted()

    async def gone() -> None:
        while await groups.list_groups():
            await asyncio.sleep(0)

    await asyncio.wait_for(gone(), 60)


async def test_deleting_groups_and_offsets(groups: GroupCoordinator) -> None:
    await groups.commit(commit_request("g", 5))
    assert await groups.delete_offsets("g", {"orders": [0]}) == {"orders": {0: None}}
    assert await fetched(groups, "g") == -1
    await groups.commit(commit_request("g", 6))

    await groups.delete("g")

    with pytest.raises(UnknownGroup):
        await groups.describe("g")
    assert await groups.fetch("g", None) == {}


async def test_invalid_requests_are_refused_without_loading_the_group(groups: GroupCoordinator) -> None:
    no_one = MemberRef(group_id="", member_id="m")
    with pytest.raises(InvalidGroupId):
        await groups.join(join_request(""))
    with pytest.raises(InvalidGroupId):
        await groups.sync(SyncRequest(member=no_one, assignments={}))
    with pytest.raises(InvalidGroupId):
        await groups.heartbeat(no_one)
    with pytest.raises(InvalidGroupId):
        await groups.leave("", [])
    with pytest.raises(InvalidGroupId):
        await groups.delete_offsets("", {})
    with pytest.raises(InvalidGroupId):
        await groups.fetch("g" * 2000, None)
    for session_ms in (1, 2_000_000):
        with pytest.raises(InvalidSessionTimeout):
            await groups.join(join_request("g", session_ms=session_ms))
    await groups.commit(commit_request("", 3))
    assert await fetched(groups, "") == 3


async def test_a_full_disk_refuses_only_commits(groups: GroupCoordinator, topics: MemoryTopics) -> None:
    await groups.commit(commit_request("g", 1))
    topic = topics.get(CONSUMER_OFFSETS)
    assert topic is not None
    for partition in topics.partitions_of(topic):
        partition.refusal = StorageFailure("the disk is full")

    with pytest.raises(NotCoordinator):
        await groups.commit(commit_request("g", 2))

    assert await fetched(groups, "g") == 1
    for partition in topics.partitions_of(topic):
        partition.refusal = None
    await groups.commit(commit_request("g", 3))
    assert await fetched(groups, "g") == 3


async def test_closing_redirects_members(topics: MemoryTopics) -> None:
    groups = GroupCoordinator(topics, CONFIG.replace(group_initial_delay_ms=60_000), SystemClock())
    joining = asyncio.create_task(joined(groups, "g"))
    while topics.get(CONSUMER_OFFSETS) is None:
        await asyncio.sleep(0)
    await groups.wait_loaded()
    while not [listing for listing in await groups.list_groups() if listing.state == "PreparingRebalance"]:
        await asyncio.sleep(0)

    await groups.close()

    with pytest.raises(NotCoordinator):
        await joining
    with pytest.raises(NotCoordinator):
        await groups.commit(commit_request("g", 1))


async def test_a_refused_response_without_a_waiting_client_is_not_logged_as_an_error(
    topics: MemoryTopics, groups: GroupCoordinator
) -> None:
    await groups.ensure()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    partitions = topics.partitions_of(next(topic for topic in topics.all() if topic.name == CONSUMER_OFFSETS))
    for partition in partitions:
        partition.acknowledges = False
    request = CommitRequest(
        member=MemberRef(group_id="g", member_id="", instance_id=None, generation=-1),
        topics={"orders": (PartitionCommit(partition=0, offset=1),)},
    )
    committing = asyncio.ensure_future(groups.commit(request))
    await asyncio.sleep(0)
    groups.topic_deleted()
    for partition in partitions:
        partition.acknowledges = True
        partition.fail(StorageFailure("the disk is gone"))
    with pytest.raises(NotCoordinator):
        await committing
    gc.collect()
    assert not complaints


async def test_consumers_cannot_join_the_group_of_a_pipeline(topics: MemoryTopics) -> None:
    pipelines = {"pipeline-mine": "mine"}
    groups = GroupCoordinator(topics, CONFIG, SystemClock(), pipeline_of=pipelines.get)
    beat = ConsumerHeartbeat(group_id="pipeline-mine", member_id="m", epoch=0)
    share = ShareHeartbeat(
        group_id="pipeline-mine",
        member_id="m",
        epoch=0,
        rack_id=None,
        topics=frozenset({"orders"}),
        client_id="c",
        client_host="/h",
        session_ms=10_000,
        heartbeat_ms=1000,
    )
    requests = (
        groups.join(join_request("pipeline-mine")),
        groups.consumer_heartbeat(beat),
        groups.share_heartbeat(share),
    )
    for refused in requests:
        with pytest.raises(InvalidGroupId, match="belongs to pipeline 'mine'"):
            await refused
    await groups.start()
    with pytest.raises(MemberIdRequired):
        await groups.join(join_request("pipeline-yours"))
    with pytest.raises(MemberIdRequired):
        await groups.join(replace(join_request("pipeline-mine"), protocol_type="pipeline"))
    await groups.close()
