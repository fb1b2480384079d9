"""The group APIs in every served version: requests and responses pass through kio's codec both ways."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.kafka.apis.classic_members import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from millstream.broker.kafka.apis.delete_groups import DeleteGroups
from millstream.broker.kafka.apis.describe_groups import DescribeGroups
from millstream.broker.kafka.apis.find_coordinator import FindCoordinator
from millstream.broker.kafka.apis.list_groups import ListGroups
from millstream.broker.kafka.apis.offset_commit import OffsetCommit
from millstream.broker.kafka.apis.offset_delete import OffsetDelete
from millstream.broker.kafka.apis.offset_fetch import OffsetFetch
from millstream.broker.kafka.dispatch import RawApi
from millstream.broker.net.response import Promise
from millstream.broker.security.audit import AuditTrail
from millstream.broker.security.authorizer import AclSnapshot
from millstream.broker.security.rights import Rights
from millstream.broker.security.state import SecurityState
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.acl import Acl, Operation, ResourceType
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import ProtocolViolation, StorageFailure
from millstream.core.ids import NodeId, ProducerId
from millstream.core.topic import CONSUMER_OFFSETS, TRANSACTION_STATE
from millstream.protocol.messages.codec import (
    RequestHeader,
    load_request_class,
    load_response_class,
    read_request,
    read_request_header,
    read_response,
    write_entity,
    write_response,
)
from millstream.protocol.messages.shape import default_of
from millstream_testing import api_requests
from millstream_testing.api_requests import write_request
from millstream_testing.state_log import MemoryPartition, MemoryTopics

CLIENT = ClientInfo(connection_id=1, host="10.0.0.7", client_id="app")


def build(kind: Any, arguments: dict[str, Any]) -> Any:
    """Build a message of some version from plain values.

    Fields the version lacks are dropped; missing ones have their default.
    """
    values = {}
    for field in dataclasses.fields(kind):
        if field.name not in arguments:
            values[field.name] = default_of(field)
            continue
        value = arguments[field.name]
        nested = nested_class(field.type)
        if nested is not None and value is not None:
            value = tuple(build(nested, item) for item in value)
        elif isinstance(value, int) and "timedelta" in field.metadata.get("kafka_type", ""):
            value = i32Timedelta.parse(timedelta(milliseconds=value))
        values[field.name] = value
    return kind(**values)


def nested_class(annotation: Any) -> Any:
    arguments = getattr(annotation, "__args__", ())
    for argument in arguments:
        if dataclasses.is_dataclass(argument):
            return argument
        inner = nested_class(argument)
        if inner is not None:
            return inner
    return None


async def send(api: Api[Any, Any] | RawApi, version: int, **arguments: Any) -> Any:
    """Send a request of one version over the wire format, and read the response back from it."""
    request = build(load_request_class(api.key, version), arguments)
    if not isinstance(api, Api):
        return await api_requests.send_request(api, request, client=CLIENT)
    received = read_request(api.key, version, write_entity(request), 0)
    assert received == request
    response = await api.respond(version, received, CLIENT)
    assert type(response) is load_response_class(api.key, version)
    frame = write_response(api.key, version, 1, response)[4:]
    assert read_response(api.key, version, frame) == response
    return response


def versions_of(api: type[Api[Any, Any] | RawApi], since: int = 0) -> list[int]:
    return list(range(max(since, api.versions[0]), api.versions[1] + 1))


class NoProducerIds:
    async def next(self) -> ProducerId:
        raise NotImplementedError


class Broker:
    """The APIs on one coordinator."""

    def __init__(self) -> None:
        self.topics = MemoryTopics()
        self.topics.leader = NodeId(7)
        self.orders = self.topics.add("orders", partitions=2).topic_id
        config = Config(group_initial_delay_ms=0, group_session_min_ms=10)
        self.groups = GroupCoordinator(self.topics, config, SystemClock())
        known = cast("Topics", self.topics)
        me = Node(node_id=NodeId(7), host="broker", port=9092)
        transactions = TransactionCoordinator(self.topics, config, SystemClock(), NoProducerIds())
        self.find = FindCoordinator(self.groups, transactions, Membership("cluster", me))
        self.join = JoinGroup(self.groups)
        self.sync = SyncGroup(self.groups)
        self.beat = Heartbeat(self.groups)
        self.leave = LeaveGroup(self.groups)
        self.commit = OffsetCommit(self.groups, known)
        self.fetch = OffsetFetch(self.groups, known)
        self.list = ListGroups(self.groups)
        self.describe = DescribeGroups(self.groups)
        self.delete = DeleteGroups(self.groups)
        self.delete_offsets = OffsetDelete(self.groups, known)

    async def member(self, group_id: str, version: int = 9, **more: Any) -> Any:
        """Join a group alone, as a client of this version does."""
        values: dict[str, Any] = {
            "group_id": group_id,
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\0"}],
            **more,
        }
        response = await send(self.join, version, **values)
        if response.error_code is ErrorCode.member_id_required:
            values["member_id"] = response.member_id
            response = await send(self.join, version, **values)
        return response

    async def committed(self, group_id: str, offset: int) -> None:
        """Commit from outside the group."""
        partitions = [{"partition_index": 0, "committed_offset": offset, "committed_metadata": "note"}]
        topics = [{"name": "orders", "partitions": partitions}]
        response = await send(self.commit, 9, group_id=group_id, member_id="", topics=topics)
        assert response.topics[0].partitions[0].error_code is ErrorCode.none


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    broker = Broker()
    await broker.groups.start()
    yield broker
    await broker.groups.close()


# Finding the coordinator


@pytest.mark.parametrize("version", versions_of(FindCoordinator))
async def test_find_coordinator(broker: Broker, version: int) -> None:
    response = await send(broker.find, version, key="g", coordinator_keys=("g", "h"), key_type=0)

    coordinators = response.coordinators if version >= 4 else [response]
    assert [
        (coordinator.error_code, coordinator.node_id, coordinator.host, coordinator.port)
        for coordinator in coordinators
    ] == [(ErrorCode.none, 7, "broker", 9092)] * (2 if version >= 4 else 1)
    assert broker.topics.get(CONSUMER_OFFSETS) is not None


@pytest.mark.parametrize("version", versions_of(FindCoordinator, since=1))
async def test_transactional_ids_have_a_coordinator_too(broker: Broker, version: int) -> None:
    response = await send(broker.find, version, key="t", coordinator_keys=("t",), key_type=1)

    only = response.coordinators[0] if version >= 4 else response
    assert (only.error_code, only.node_id, only.port) == (ErrorCode.none, 7, 9092)
    assert broker.topics.get(TRANSACTION_STATE) is not None
    share = await send(broker.find, version, key="t", coordinator_keys=("t",), key_type=2)
    assert (share.coordinators[0] if version >= 4 else share).error_code is ErrorCode.invalid_request


async def test_no_coordinator_after_closing(broker: Broker) -> None:
    await broker.groups.close()

    response = await send(broker.find, 6, coordinator_keys=("g",))

    assert response.coordinators[0].error_code is ErrorCode.not_coordinator


# Membership


@pytest.mark.parametrize("version", versions_of(JoinGroup))
async def test_join_group(broker: Broker, version: int) -> None:
    response = await broker.member("g", version)

    assert response.error_code is ErrorCode.none
    assert response.generation_id == 1
    assert response.protocol_name == "range"
    assert response.leader == response.member_id
    assert response.member_id.startswith("app-")
    assert [member.metadata for member in response.members] == [b"\0\0\0\0\0\0"]
    described = await broker.groups.describe("g")
    assert described.members[0].client_host == "/10.0.0.7"


@pytest.mark.parametrize("version", versions_of(JoinGroup))
async def test_join_group_refused(broker: Broker, version: int) -> None:
    for values, code in (
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"session_timeout": 1}, ErrorCode.invalid_session_timeout),
        ({"protocols": []}, ErrorCode.inconsistent_group_protocol),
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
    ):
        response = await broker.member(values.pop("group_id", "g"), version, **values)  # type: ignore[arg-type]
        assert response.error_code is code
        assert response.generation_id == -1
        assert response.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize("version", versions_of(JoinGroup, since=4))
async def test_join_group_assigns_an_id_first(broker: Broker, version: int) -> None:
    response = await send(
        broker.join,
        version,
        group_id="g",
        session_timeout=10_000,
        member_id="",
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
    )

    assert response.error_code is ErrorCode.member_id_required
    assert response.member_id.startswith("app-")


@pytest.mark.parametrize("version", versions_of(JoinGroup, since=5))
async def test_join_group_as_a_static_member(broker: Broker, version: int) -> None:
    first = await broker.member("g", version, group_instance_id="me")
    await send(broker.sync, 3, group_id="g", generation_id=1, member_id=first.member_id, group_instance_id="me")

    second = await broker.member("g", version, group_instance_id="me")

    assert second.member_id != first.member_id
    assert second.generation_id == 1
    if version >= 9:
        assert second.skip_assignment
        assert second.leader == second.member_id
    else:
        assert second.leader == first.member_id
    fenced = await broker.member("g", version, group_instance_id="me", member_id=first.member_id)
    assert fenced.error_code is ErrorCode.fenced_instance_id


@pytest.mark.parametrize("version", versions_of(SyncGroup))
async def test_sync_group(broker: Broker, version: int) -> None:
    member = await broker.member("g")
    values = {
        "group_id": "g",
        "generation_id": 1,
        "member_id": member.member_id,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": member.member_id, "assignment": b"mine"}],
    }

    response = await send(broker.sync, version, **values)

    assert (response.error_code, response.assignment) == (ErrorCode.none, b"mine")
    if version >= 5:
        assert (response.protocol_type, response.protocol_name) == ("consumer", "range")
        nameless = await send(broker.sync, version, **{**values, "protocol_name": None})
        assert nameless.error_code is ErrorCode.inconsistent_group_protocol
    stale = await send(broker.sync, version, **{**values, "generation_id": 0})
    assert (stale.error_code, stale.assignment) == (ErrorCode.illegal_generation, b"")


@pytest.mark.parametrize("version", versions_of(Heartbeat))
async def test_heartbeat(broker: Broker, version: int) -> None:
    member = await broker.member("g")
    values = {"group_id": "g", "generation_id": 1, "member_id": member.member_id}

    assert (await send(broker.beat, version, **values)).error_code is ErrorCode.none
    for more, code in (
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
        ({"generation_id": 9}, ErrorCode.illegal_generation),
        ({"group_id": ""}, ErrorCode.invalid_group_id),
    ):
        assert (await send(broker.beat, version, **{**values, **more})).error_code is code


async def test_a_heartbeat_while_loading_succeeds(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    await broker.committed("g", 1)
    monkeypatch.setattr("millstream.broker.coordination.shard.LOAD_WAIT_S", 0.001)
    restarted = GroupCoordinator(broker.topics, Config(), SystemClock())
    await restarted._runtime._load_slot.acquire()
    await restarted.start()

    response = await send(Heartbeat(restarted), 4, group_id="g", generation_id=1, member_id="m")
    joining = await send(JoinGroup(restarted), 9, group_id="g", session_timeout=10_000, member_id="")

    assert response.error_code is ErrorCode.none
    assert joining.error_code is ErrorCode.coordinator_load_in_progress
    await restarted.close()


@pytest.mark.parametrize("version", versions_of(LeaveGroup))
async def test_leave_group(broker: Broker, version: int) -> None:
    member = await broker.member("g")
    leaver = {"member_id": member.member_id, "group_instance_id": None}

    response = await send(
        broker.leave,
        version,
        group_id="g",
        member_id=member.member_id,
        members=[leaver, {"member_id": "nobody", "group_instance_id": None}],
    )

    assert response.error_code is ErrorCode.none
    if version >= 3:
        assert [(member.member_id, member.error_code) for member in response.members] == [
            (member.member_id, ErrorCode.none),
            ("nobody", ErrorCode.unknown_member_id),
        ]
    again = await send(broker.leave, version, group_id="g", member_id=member.member_id, members=[leaver])
    code = again.members[0].error_code if version >= 3 else again.error_code
    assert code is ErrorCode.unknown_member_id
    nameless = await send(broker.leave, version, group_id="", member_id="m", members=[leaver])
    assert nameless.error_code is ErrorCode.invalid_group_id


# Offsets


def commit_topics(broker: Broker, version: int, partition: int, offset: int, topic: str = "orders") -> Any:
    known: dict[str, UUID] = {"orders": broker.orders}
    return [
        {
            "name": topic,
            "topic_id": known.get(topic) or uuid4(),
            "partitions": [
                {
                    "partition_index": partition,
                    "committed_offset": offset,
                    "committed_leader_epoch": 4,
                    "committed_metadata": f"v{version}",
                }
            ],
        }
    ]


@pytest.mark.parametrize("version", versions_of(OffsetCommit))
async def test_offset_commit(broker: Broker, version: int) -> None:
    response = await send(
        broker.commit, version, group_id="g", member_id="", topics=commit_topics(broker, version, 1, 42)
    )

    topic = response.topics[0]
    assert topic.topic_id == broker.orders if version >= 10 else topic.name == "orders"
    assert [(partition.partition_index, partition.error_code) for partition in topic.partitions] == [
        (1, ErrorCode.none)
    ]
    fetched = (await broker.groups.fetch("g", None))["orders"][1]
    assert (fetched.offset, fetched.metadata) == (42, f"v{version}")
    assert fetched.leader_epoch == (4 if version >= 6 else -1)


@pytest.mark.parametrize("version", versions_of(OffsetCommit))
async def test_offset_commit_refused(broker: Broker, version: int) -> None:
    async def code_of(topics: Any, **more: Any) -> ErrorCode:
        response = await send(broker.commit, version, group_id="g", member_id="", **more, topics=topics)
        code: ErrorCode = response.topics[0].partitions[0].error_code
        return code

    good = commit_topics(broker, version, 0, 1)
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
    assert await code_of(commit_topics(broker, version, 0, 1, topic="nowhere")) is unknown
    assert await code_of(commit_topics(broker, version, 7, 1)) is ErrorCode.unknown_topic_or_partition
    no_group = ErrorCode.group_id_not_found if version >= 9 else ErrorCode.illegal_generation
    assert await code_of(good, generation_id_or_member_epoch=3) is no_group
    large = commit_topics(broker, version, 0, 1)
    large[0]["partitions"][0]["committed_metadata"] = "x" * 5000
    assert await code_of(large) is ErrorCode.offset_metadata_too_large
    await broker.member("g")
    assert await code_of(good) is ErrorCode.unknown_member_id
    assert await broker.groups.fetch("g", None) == {}


async def test_offset_commits_are_completed_synchronously_with_their_acknowledgement(broker: Broker) -> None:
    await broker.committed("g", 1)
    partition = hold_acknowledgements(broker)
    commits = [broker.commit.handle_frame(*commit_frame(broker, version=9, offset=offset), CLIENT) for offset in (2, 3)]

    pending = [commit for commit in commits if isinstance(commit, Promise)]
    assert [promise.is_resolved for promise in pending] == [False, False]
    partition.acknowledge(1)
    assert [promise.is_resolved for promise in pending] == [True, False]
    partition.acknowledge()
    assert [promise.is_resolved for promise in pending] == [True, True]


async def test_offset_commits_are_refused_synchronously_when_the_log_fails(broker: Broker) -> None:
    await broker.committed("g", 1)
    partition = hold_acknowledgements(broker)
    commit = broker.commit.handle_frame(*commit_frame(broker, version=9, offset=2), CLIENT)
    assert isinstance(commit, Promise)

    partition.fail(StorageFailure("the disk is gone"))

    assert isinstance(commit.buffers, list)
    response = read_response(8, 9, b"".join(commit.buffers)[4:])
    assert response.topics[0].partitions[0].error_code is ErrorCode.not_coordinator


@pytest.mark.parametrize("version", versions_of(OffsetCommit))
async def test_a_malformed_offset_commit_is_refused_as_a_whole(broker: Broker, version: int) -> None:
    frame, header = commit_frame(broker, version=version, offset=1)
    for end in range(header.body_at, len(frame)):
        with pytest.raises(ProtocolViolation):
            broker.commit.handle_frame(frame[:end], header, CLIENT)
    no_topics = build(load_request_class(8, version), {"group_id": "g", "member_id": "", "topics": ()})
    null_topics = bytearray(write_request(7, "app", no_topics)[4:])
    if header.flexible:
        null_topics[-2:] = b"\0\0"
    else:
        null_topics[-4:] = b"\xff" * 4
    with pytest.raises(ProtocolViolation):
        broker.commit.handle_frame(memoryview(null_topics), header, CLIENT)
    assert await broker.groups.fetch("g", None) == {}


@pytest.mark.parametrize("version", versions_of(OffsetCommit))
async def test_an_offset_commit_needs_read_on_the_group_and_on_each_topic(broker: Broker, version: int) -> None:
    secret = broker.topics.add("secret").topic_id
    topics = [*commit_topics(broker, version, 0, 1), *commit_topics(broker, version, 0, 1, topic="secret")]
    topics[1]["topic_id"] = secret
    request = build(load_request_class(8, version), {"group_id": "g", "member_id": "", "topics": topics})

    async def codes_with(*readable: tuple[ResourceType, str]) -> list[ErrorCode]:
        rules = [
            Acl(resource_type=kind, resource_name=name, principal="User:alice", operation=Operation.READ)
            for kind, name in readable
        ]
        state = cast("SecurityState", SimpleNamespace(snapshot=AclSnapshot(rules), audit=AuditTrail()))
        client = dataclasses.replace(CLIENT, rights=Rights(state, "User:alice", CLIENT.host))
        response = await api_requests.send_request(broker.commit, request, client=client)
        return [topic.partitions[0].error_code for topic in response.topics]

    group, orders = (ResourceType.GROUP, "g"), (ResourceType.TOPIC, "orders")
    no_group, no_topic = ErrorCode.group_authorization_failed, ErrorCode.topic_authorization_failed
    assert await codes_with(orders, (ResourceType.TOPIC, "secret")) == [no_group, no_group]
    assert await codes_with(group) == [no_topic, no_topic]
    await broker.groups.ensure()
    assert await broker.groups.fetch("g", None) == {}
    assert await codes_with(group, orders) == [ErrorCode.none, no_topic]
    assert list(await broker.groups.fetch("g", None)) == ["orders"]


def hold_acknowledgements(broker: Broker) -> MemoryPartition:
    offsets = broker.topics.get(CONSUMER_OFFSETS)
    assert offsets is not None
    partition = broker.topics.partitions_of(offsets)[broker.groups.partition_of("g")]
    partition.acknowledges = False
    return partition


def commit_frame(broker: Broker, *, version: int, offset: int) -> tuple[memoryview, RequestHeader]:
    values = {"group_id": "g", "member_id": "", "topics": commit_topics(broker, version, 0, offset)}
    request = build(load_request_class(8, version), values)
    frame = memoryview(bytearray(write_request(7, "app", request)[4:]))
    return frame, read_request_header(frame)


async def test_offset_commit_stores_the_valid_partitions(broker: Broker) -> None:
    topics = [
        *commit_topics(broker, 9, 0, 1),
        *commit_topics(broker, 9, 0, 2, topic="nowhere"),
        *commit_topics(broker, 9, 1, 3),
    ]

    response = await send(broker.commit, 9, group_id="g", member_id="", topics=topics)

    codes = [(topic.name, topic.partitions[0].error_code) for topic in response.topics]
    assert codes == [
        ("orders", ErrorCode.none),
        ("nowhere", ErrorCode.unknown_topic_or_partition),
        ("orders", ErrorCode.none),
    ]
    assert {
        index: committed.offset for index, committed in (await broker.groups.fetch("g", None))["orders"].items()
    } == {
        0: 1,
        1: 3,
    }


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_offset_commit_with_a_retention(broker: Broker, version: int) -> None:
    await send(
        broker.commit,
        version,
        group_id="g",
        member_id="",
        retention_time=0,
        topics=commit_topics(broker, version, 0, 1),
    )

    broker.groups.topic_deleted()  # Removes everything that has expired.

    async def gone() -> None:
        while await broker.groups.fetch("g", None):
            await asyncio.sleep(0)

    await asyncio.wait_for(gone(), 60)


@pytest.mark.parametrize("version", versions_of(OffsetFetch))
async def test_offset_fetch(broker: Broker, version: int) -> None:
    await broker.committed("g", 42)
    topics = [{"name": "orders", "topic_id": broker.orders, "partition_indexes": (0, 1)}]
    groups = [{"group_id": "g", "topics": topics}, {"group_id": "h", "topics": topics}]

    response = await send(broker.fetch, version, group_id="g", topics=topics, groups=groups)

    found_groups = response.groups if version >= 8 else [response]
    assert len(found_groups) == (2 if version >= 8 else 1)
    topic = found_groups[0].topics[0]
    assert topic.topic_id == broker.orders if version >= 10 else topic.name == "orders"
    offsets = [
        (partition.partition_index, partition.committed_offset, partition.metadata, partition.error_code)
        for partition in topic.partitions
    ]
    assert offsets == [(0, 42, "note", ErrorCode.none), (1, -1, "", ErrorCode.none)]
    if version >= 8:
        assert [partition.committed_offset for partition in found_groups[1].topics[0].partitions] == [-1, -1]


@pytest.mark.parametrize("version", versions_of(OffsetFetch, since=2))
async def test_offset_fetch_of_everything(broker: Broker, version: int) -> None:
    await broker.committed("g", 42)

    response = await send(broker.fetch, version, group_id="g", topics=None, groups=[{"group_id": "g", "topics": None}])

    group = response.groups[0] if version >= 8 else response
    assert [[partition.committed_offset for partition in topic.partitions] for topic in group.topics] == [[42]]
    assert group.error_code is ErrorCode.none


@pytest.mark.parametrize("version", versions_of(OffsetFetch, since=2))
async def test_everything_includes_an_offset_committed_as_minus_one(broker: Broker, version: int) -> None:
    await broker.committed("g", -1)

    response = await send(broker.fetch, version, group_id="g", topics=None, groups=[{"group_id": "g", "topics": None}])

    group = response.groups[0] if version >= 8 else response
    assert [[partition.committed_offset for partition in topic.partitions] for topic in group.topics] == [[-1]]


@pytest.mark.parametrize("version", versions_of(OffsetFetch))
async def test_offset_fetch_refused(broker: Broker, version: int) -> None:
    await broker.committed("g", 42)
    await broker.groups.close()
    topics = [{"name": "orders", "topic_id": broker.orders, "partition_indexes": (0,)}]

    response = await send(
        broker.fetch, version, group_id="g", topics=topics, groups=[{"group_id": "g", "topics": topics}]
    )

    group = response.groups[0] if version >= 8 else response
    assert version == 1 or group.error_code is ErrorCode.not_coordinator
    partitions = [
        (partition.error_code, partition.committed_offset) for topic in group.topics for partition in topic.partitions
    ]
    assert partitions == ([(ErrorCode.not_coordinator, -1)] if version < 8 else [])


async def test_offset_fetch_of_missing_topics(broker: Broker) -> None:
    by_id = [{"topic_id": uuid4(), "partition_indexes": (0,)}]
    response = await send(broker.fetch, 10, groups=[{"group_id": "g", "topics": by_id}])
    assert response.groups[0].topics[0].partitions[0].error_code is ErrorCode.unknown_topic_id

    by_name = [{"name": "nowhere", "partition_indexes": (0,)}]
    response = await send(broker.fetch, 9, groups=[{"group_id": "g", "topics": by_name}])
    partition = response.groups[0].topics[0].partitions[0]
    assert (partition.error_code, partition.committed_offset) == (ErrorCode.none, -1)


async def test_offset_delete(broker: Broker) -> None:
    topics = [{"name": "orders", "partitions": [{"partition_index": 0}, {"partition_index": 9}]}]
    missing = await send(broker.delete_offsets, 0, group_id="g", topics=topics)
    assert missing.error_code is ErrorCode.group_id_not_found
    await broker.committed("g", 42)

    response = await send(broker.delete_offsets, 0, group_id="g", topics=topics)

    assert response.error_code is ErrorCode.none
    assert [partition.error_code for partition in response.topics[0].partitions] == [
        ErrorCode.none,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert await broker.groups.fetch("g", None) == {}


# Groups


@pytest.mark.parametrize("version", versions_of(ListGroups))
async def test_list_groups(broker: Broker, version: int) -> None:
    assert (await send(broker.list, version)).groups == ()
    await broker.committed("alone", 1)
    await broker.member("together")

    everything = await send(broker.list, version)
    filtered = await send(broker.list, version, states_filter=("empty",))
    other_type = await send(broker.list, version, types_filter=("share",))

    groups = {group.group_id: group for group in everything.groups}
    assert {name: group.protocol_type for name, group in groups.items()} == {"alone": "", "together": "consumer"}
    assert everything.error_code is ErrorCode.none
    if version >= 4:
        assert groups["together"].group_state == "CompletingRebalance"
        assert [group.group_id for group in filtered.groups] == ["alone"]
    if version >= 5:
        assert groups["alone"].group_type == "classic"
        assert other_type.groups == ()
    await broker.groups.close()
    assert (await send(broker.list, version)).error_code is ErrorCode.not_coordinator


@pytest.mark.parametrize("version", versions_of(DescribeGroups))
async def test_describe_groups(broker: Broker, version: int) -> None:
    member = await broker.member("g")
    await send(
        broker.sync,
        3,
        group_id="g",
        generation_id=1,
        member_id=member.member_id,
        assignments=[{"member_id": member.member_id, "assignment": b"mine"}],
    )

    response = await send(broker.describe, version, groups=("g", "missing"), include_authorized_operations=True)

    group, missing = response.groups
    assert (group.error_code, group.group_state, group.protocol_type, group.protocol_data) == (
        ErrorCode.none,
        "Stable",
        "consumer",
        "range",
    )
    assert [(member.client_id, member.client_host, member.member_assignment) for member in group.members] == [
        ("app", "/10.0.0.7", b"mine")
    ]
    if version >= 3:
        assert group.authorized_operations > 0
    assert missing.group_state == "Dead"
    assert missing.error_code is (ErrorCode.group_id_not_found if version >= 6 else ErrorCode.none)
    await broker.groups.close()
    gone = (await send(broker.describe, version, groups=("g",))).groups[0]
    assert (gone.error_code, gone.group_state) == (ErrorCode.not_coordinator, "")


@pytest.mark.parametrize("version", versions_of(DeleteGroups))
async def test_delete_groups(broker: Broker, version: int) -> None:
    await broker.committed("alone", 1)
    await broker.member("together")

    response = await send(broker.delete, version, groups_names=("alone", "together", "missing", "alone"))

    assert [(result.group_id, result.error_code) for result in response.results] == [
        ("alone", ErrorCode.none),
        ("together", ErrorCode.non_empty_group),
        ("missing", ErrorCode.group_id_not_found),
    ]
