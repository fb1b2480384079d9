"""The share group APIs over bytes, on a node with real logs: their responses, and Kafka's error codes."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka import share_codec
from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.kafka.served_apis import ApiDependencies, ServedApis
from millstream.broker.net.response import Buffers, Parked, Promise
from millstream.broker.replication.partition import ACKS_ALL
from millstream.broker.security.rights import Rights
from millstream.broker.security.state import SecurityState
from millstream.broker.subscriptions.delivery import Delivery, Demand, ReceivedMessages
from millstream.core.acl import Acl, AclFilter, Operation, ResourceType
from millstream.core.credential import new_token
from millstream.core.errors import CoordinatorUnavailable, NotLeader
from millstream.core.ids import Epoch, NodeId
from millstream.core.partition_state import PartitionState
from millstream.core.quota import CONSUMER_BYTE_RATE, QuotaEntity
from millstream.core.subscription import ATTEMPTS, DELIVERY, LEASE, START
from millstream.protocol.messages.codec import (
    load_request_class,
    read_request_header,
    read_response,
)
from millstream.protocol.messages.shape import default_of
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.api_requests import send_request, write_request
from millstream_testing.waiting import until

GROUP = "workers"
TOPIC = "orders"
ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
ALTER, DESCRIBE_CONFIGS, LIST_CONFIGS = 44, 32, 74
HEARTBEAT, DESCRIBE, FETCH, ACKNOWLEDGE, OFFSETS, MOVE, FORGET, DELETE_GROUPS = 76, 77, 78, 79, 90, 91, 92, 42
LIMITS: dict[str, Any] = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "max_records": 500, "batch_size": 500}
NO_LIMITS: dict[str, Any] = {"max_wait": 0, "min_bytes": 0, "max_bytes": 0, "max_records": 0, "is_renew_ack": True}
UNKNOWN_TOPIC = UUID(int=99)


def built(key: int, version: int, name: str | None = None, **arguments: Any) -> Any:
    """Build a request, or a part of it; missing fields have their default, or are empty."""
    request = load_request_class(key, version)
    kind = request if name is None else getattr(importlib.import_module(request.__module__), name)
    values = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    for field in ("max_wait",):
        if isinstance(arguments.get(field), int):
            arguments[field] = i32Timedelta.parse(timedelta(milliseconds=arguments[field]))
    return kind(**{**values, **{name: value for name, value in arguments.items() if name in values}})


class ShareNode:
    """A node with a topic, and the subscription of the share group."""

    def __init__(self, served: ServedApis, topics: Topics, subscriptions: Subscriptions) -> None:
        self.apis = {api.key: cast("Api[Any, Any]", api) for api in served.apis}
        self.topics = topics
        self.subscriptions = subscriptions
        self.service = served._subscriptions

    @property
    def topic_id(self) -> UUID:
        topic = self.topics.get(TOPIC)
        assert topic is not None
        return topic.topic_id

    async def ask(self, key: int, version: int, client: ClientInfo | None = None, /, **arguments: Any) -> Any:
        return await send_request(self.apis[key], built(key, version, **arguments), client=client)

    async def publish(self, *values: str, partition: int = 0, topic: str = TOPIC) -> None:
        partition_object = self.topics.partition(topic, partition)
        batch = encode_batch([NewRecord(key=None, value=value.encode()) for value in values])
        waiting = partition_object.acknowledged(partition_object.write(bytearray(batch), acks=ACKS_ALL))
        if waiting is not None:
            await waiting

    async def offsets(self, *partitions: int, topic: str = TOPIC, version: int = 1) -> Any:
        requested = None
        if partitions:
            part = "DescribeShareGroupOffsetsRequestTopic"
            requested = (built(OFFSETS, version, part, topic_name=topic, partitions=partitions),)
        group = built(OFFSETS, version, "DescribeShareGroupOffsetsRequestGroup", group_id=GROUP, topics=requested)
        (reported,) = (await self.ask(OFFSETS, version, groups=(group,))).groups
        return reported

    async def starts(self, *partitions: int) -> list[tuple[int, int]]:
        reported = await self.offsets(*partitions)
        assert reported.error_code == ErrorCode.none
        return [
            (partition.partition_index, partition.start_offset)
            for topic in reported.topics
            for partition in topic.partitions
        ]

    async def move(self, offset: int, *, partition: int = 0, topic: str = TOPIC) -> Any:
        place = built(MOVE, 0, "AlterShareGroupOffsetsRequestPartition", partition_index=partition, start_offset=offset)
        named = built(MOVE, 0, "AlterShareGroupOffsetsRequestTopic", topic_name=topic, partitions=(place,))
        return await self.ask(MOVE, 0, group_id=GROUP, topics=(named,))

    async def forget(self, topic: str = TOPIC) -> Any:
        named = built(FORGET, 0, "DeleteShareGroupOffsetsRequestTopic", topic_name=topic)
        return await self.ask(FORGET, 0, group_id=GROUP, topics=(named,))


class Sharer:
    """A share consumer on its own connection, one request at a time."""

    def __init__(self, share_node: ShareNode, member_id: str, *, group: str = GROUP) -> None:
        self.share_node = share_node
        self.member_id = member_id
        self.group = group
        self.epoch = 0
        self.session = 0
        self.wait_ms = 0
        self.client = ClientInfo(connection_id=1, host="127.0.0.1", client_id="test")

    async def send_heartbeat(self, **arguments: Any) -> Any:
        names = (TOPIC,) if arguments.get("member_epoch", self.epoch) == 0 else None
        values = {"group_id": self.group, "member_id": self.member_id, "member_epoch": self.epoch}
        response = await self.share_node.ask(HEARTBEAT, 1, **{**values, "subscribed_topic_names": names, **arguments})
        if response.error_code == ErrorCode.none:
            self.epoch = response.member_epoch
        return response

    async def fetch(self, *batches: tuple[int, ...], version: int = 2, places: Any = None, **arguments: Any) -> Any:
        opens = arguments.get("share_session_epoch", self.session) == 0
        requested = places if places is not None else ((self.share_node.topic_id, 0),) if opens or batches else ()
        parts = {"topic": "FetchTopic", "partition": "FetchPartition"}
        topics = self._topics(FETCH, version, requested, batches, parts)
        values = {**self._who(), **LIMITS, "max_wait": self.wait_ms, "topics": topics, **arguments}
        return self._counted(await self.share_node.ask(FETCH, version, self.client, **values), arguments)

    async def acknowledge(
        self, *batches: tuple[int, ...], version: int = 2, places: Any = None, **arguments: Any
    ) -> Any:
        requested = places if places is not None else ((self.share_node.topic_id, 0),) if batches else ()
        parts = {"topic": "AcknowledgeTopic", "partition": "AcknowledgePartition"}
        values = {**self._who(), "topics": self._topics(ACKNOWLEDGE, version, requested, batches, parts), **arguments}
        return self._counted(await self.share_node.ask(ACKNOWLEDGE, version, self.client, **values), arguments)

    async def codes(self, *batches: tuple[int, ...], **arguments: Any) -> list[str]:
        """The result of ShareAcknowledge: the code of the request, and those of partitions."""
        response = await self.acknowledge(*batches, **arguments)
        partitions = [partition.error_code for topic in response.responses for partition in topic.partitions]
        return [code.name for code in (response.error_code, *partitions)]

    async def got(self, *batches: tuple[int, ...], **arguments: Any) -> list[tuple[int, int, int]]:
        """The result of ShareFetch, as ranges with their delivery counts."""
        response = await self.fetch(*batches, **arguments)
        assert response.error_code == ErrorCode.none
        return ranges(response)

    def _who(self) -> dict[str, Any]:
        return {"group_id": self.group, "member_id": self.member_id, "share_session_epoch": self.session}

    def _counted(self, response: Any, arguments: dict[str, Any]) -> Any:
        if response.error_code == ErrorCode.none and "share_session_epoch" not in arguments:
            self.session += 1
        return response

    def _topics(self, key: int, version: int, places: Any, batches: Any, parts: dict[str, str]) -> Any:
        named = tuple(
            built(
                key,
                version,
                "AcknowledgementBatch",
                first_offset=first,
                last_offset=last,
                acknowledge_types=tuple(types),
            )
            for first, last, *types in batches
        )
        return tuple(
            built(
                key,
                version,
                parts["topic"],
                topic_id=topic_id,
                partitions=(
                    built(key, version, parts["partition"], partition_index=index, acknowledgement_batches=named),
                ),
            )
            for topic_id, index in places
        )


def partitions_of(response: Any) -> list[Any]:
    return [partition for topic in response.responses for partition in topic.partitions]


def ranges(response: Any) -> list[tuple[int, int, int]]:
    """The acquired ranges; adjacent ones are joined."""
    merged: list[tuple[int, int, int]] = []
    for acquired in (record for partition in partitions_of(response) for record in partition.acquired_records):
        first, last, count = acquired.first_offset, acquired.last_offset, acquired.delivery_count
        if merged and (merged[-1][1] + 1, merged[-1][2]) == (first, count):
            first = merged.pop()[0]
        merged.append((first, last, count))
    return merged


def refusals(response: Any) -> list[tuple[str, int]]:
    return [(partition.error_code.name, partition.acknowledge_error_code) for partition in partitions_of(response)]


@pytest.fixture
async def share_node(api_dependencies: ApiDependencies) -> AsyncIterator[ShareNode]:
    topics, subscriptions = api_dependencies.topics, api_dependencies.declared.subscriptions
    served = ServedApis(api_dependencies)
    await served.start()
    await topics.create(TOPIC, partitions=2)
    await subscriptions.create(GROUP, (), {START: "earliest", LEASE: "600000"})
    yield ShareNode(served, topics, subscriptions)
    await served.close()


@pytest.fixture(params=[0, 1], ids=["without a wait", "with a wait"])
async def one(share_node: ShareNode, request: pytest.FixtureRequest) -> Sharer:
    """A member with ten messages; requests that may wait get a response without a task."""
    await share_node.publish(*map(str, range(10)))
    made = Sharer(share_node, "one")
    made.wait_ms = request.param
    assert (await made.send_heartbeat()).error_code == ErrorCode.none
    return made


async def test_fetches_of_share_consumers_count_towards_their_quota(one: Sharer, quotas: ClientQuotas) -> None:
    await quotas.alter(QuotaEntity.of([("client-id", "test")]), {CONSUMER_BYTE_RATE: 1.0})
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    response = await one.fetch((0, 3, ACCEPT), max_wait=1)
    assert (refusals(response), ranges(response)) == ([("none", 0)], [])


# ShareGroupHeartbeat, ShareGroupDescribe


async def test_a_member_joins_lives_and_leaves(share_node: ShareNode) -> None:
    one = Sharer(share_node, "one")
    joined = await one.send_heartbeat()
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (ErrorCode.none, "one", 1)
    assert joined.heartbeat_interval == timedelta(seconds=5)
    assert [(reported.topic_id, reported.partitions) for reported in joined.assignment.topic_partitions] == [
        (share_node.topic_id, (0, 1))
    ]
    lives = await one.send_heartbeat()
    assert (lives.error_code, lives.member_epoch, lives.assignment) == (ErrorCode.none, 1, None)
    (described,) = (await share_node.ask(DESCRIBE, 1, group_ids=(GROUP,))).groups
    assert (described.group_state, described.group_epoch, described.assignor_name) == ("Stable", 1, "simple")
    (member,) = described.members
    assert (member.member_id, member.client_host, member.subscribed_topic_names) == ("one", "/127.0.0.1", (TOPIC,))
    response = await one.send_heartbeat(member_epoch=-1)
    assert (response.error_code, response.member_epoch) == (ErrorCode.none, -1)
    (described,) = (await share_node.ask(DESCRIBE, 1, group_ids=(GROUP,))).groups
    assert (described.group_state, described.members) == ("Empty", ())


REFUSED_HEARTBEATS: list[tuple[dict[str, Any], str]] = [
    ({"member_id": ""}, "invalid_request"),
    ({"group_id": " "}, "invalid_request"),
    ({"rack_id": ""}, "invalid_request"),
    ({"member_epoch": -2}, "invalid_request"),
    ({"member_epoch": 0, "subscribed_topic_names": None}, "invalid_request"),
    ({"member_epoch": 0, "subscribed_topic_names": ()}, "invalid_request"),
    ({"member_epoch": 77}, "fenced_member_epoch"),
    ({"member_id": "two", "member_epoch": 1}, "unknown_member_id"),
    ({"group_id": "nowhere", "member_epoch": 1}, "group_id_not_found"),
]


async def test_invalid_heartbeats_are_refused(share_node: ShareNode) -> None:
    one = Sharer(share_node, "one")
    await one.send_heartbeat()
    for values, code in REFUSED_HEARTBEATS:
        response = await one.send_heartbeat(**values)
        assert (values, response.error_code.name, response.member_epoch) == (values, code, 0)
        assert response.error_message


async def test_a_group_is_declared_by_its_first_member_and_deleted_with_it(share_node: ShareNode) -> None:
    one = Sharer(share_node, "one", group="undeclared")
    await one.send_heartbeat()
    assert share_node.subscriptions.existing("undeclared").topics == ()
    busy = await share_node.ask(DELETE_GROUPS, 2, groups_names=("undeclared",))
    assert busy.results[0].error_code == ErrorCode.non_empty_group
    await one.send_heartbeat(member_epoch=-1)
    gone = await share_node.ask(DELETE_GROUPS, 2, groups_names=("undeclared",))
    assert gone.results[0].error_code == ErrorCode.none
    assert share_node.subscriptions.get("undeclared") is None
    (described,) = (await share_node.ask(DESCRIBE, 1, group_ids=("undeclared",))).groups
    assert described.error_code == ErrorCode.group_id_not_found


# Sessions


@pytest.fixture
async def security(catalog: Catalog, share_node: ShareNode) -> SecurityState:
    """Rules by which alice and bob may use the group, but only alice may read its topic."""
    state = SecurityState(CatalogDeclarations(catalog), ())
    state.topic_name = {share_node.topic_id: TOPIC}.get
    await state.add_acls([*(may_read(user, ResourceType.GROUP, GROUP) for user in ("alice", "bob")), ALICE_READS])
    return state


def may_read(user: str, kind: ResourceType, name: str) -> Acl:
    return Acl(principal=f"User:{user}", resource_type=kind, resource_name=name, operation=Operation.READ)


ALICE_READS = may_read("alice", ResourceType.TOPIC, TOPIC)


async def test_the_declaration_of_a_group_by_its_first_member_is_audited(
    share_node: ShareNode, security: SecurityState
) -> None:
    alice = Sharer(share_node, "m")
    alice.client.rights = Rights(security, "User:alice", "127.0.0.1")
    await security.add_acls([may_read("alice", ResourceType.GROUP, "another")])
    for member in ("one", "two"):
        joined = await share_node.ask(
            HEARTBEAT, 1, alice.client, group_id="another", member_id=member, subscribed_topic_names=(TOPIC,)
        )
        assert joined.error_code == ErrorCode.none
    (event,) = [entry for entry in security.audit.take() if "entity" in entry]
    assert (event["entity"]["type"], event["entity"]["name"]) == ("subscription", "another")
    assert (event["actor"]["user"]["uid"], event["api"]["operation"]) == ("User:alice", "ShareGroupHeartbeat")


async def test_a_session_is_of_one_principal(one: Sharer, security: SecurityState) -> None:
    other = Sharer(one.share_node, one.member_id)
    one.client.rights = Rights(security, "User:alice", "127.0.0.1")
    other.client.rights = Rights(security, "User:bob", "127.0.0.1")
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    for epoch in (1, -1):
        taken = await other.fetch(share_session_epoch=epoch)
        assert (taken.error_code, taken.responses) == (ErrorCode.share_session_not_found, ())
    await security.add_acls([may_read("bob", ResourceType.TOPIC, TOPIC)])
    assert (await other.fetch(places=())).error_code == ErrorCode.none, "bob has a session of his own"
    assert await other.codes((0, 3, ACCEPT)) == ["none", "invalid_record_state"]
    assert await one.codes((0, 3, ACCEPT)) == ["none", "none"]


async def test_a_token_does_not_end_the_session_of_its_owner(one: Sharer, security: SecurityState) -> None:
    other = Sharer(one.share_node, one.member_id)
    scope = frozenset({may_read("alice", ResourceType.GROUP, GROUP)})
    token, _ = new_token("User:alice", scope=scope, parent="", created_ms=0, expires_ms=2**53)
    one.client.rights = Rights(security, "User:alice", "127.0.0.1")
    other.client.rights = Rights(security, "User:alice", "127.0.0.1", tokens=(token,))
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    for epoch in (1, -1):
        taken = await other.fetch(share_session_epoch=epoch)
        assert (taken.error_code, taken.responses) == (ErrorCode.share_session_not_found, ())
    assert (await other.fetch(places=())).error_code == ErrorCode.none, "the token has a session of its own"
    assert await one.codes((0, 3, ACCEPT)) == ["none", "none"]


async def test_a_session_ends_where_the_right_to_read_ends(one: Sharer, security: SecurityState) -> None:
    one.client.rights = Rights(security, "User:alice", "127.0.0.1")
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    await security.delete_acls(AclFilter(resource_type=ResourceType.TOPIC))
    response = await one.fetch()
    assert (refusals(response), ranges(response)) == ([("topic_authorization_failed", 0)], [])


async def test_a_topic_that_may_not_be_read_does_not_end_the_wait_for_others(
    one: Sharer, security: SecurityState
) -> None:
    one.client.rights = Rights(security, "User:alice", "127.0.0.1")
    other = await one.share_node.topics.create("other", partitions=1)
    security.topic_name = {one.share_node.topic_id: TOPIC, other.topic_id: "other"}.get
    await security.add_acls([may_read("alice", ResourceType.TOPIC, "other")])
    assert await one.got(places=((one.share_node.topic_id, 0), (other.topic_id, 0))) == [(0, 9, 1)]
    await security.delete_acls(AclFilter(resource_type=ResourceType.TOPIC, resource_name=TOPIC))
    waiting = asyncio.create_task(one.fetch(max_wait=120_000))
    engine = await one.share_node.service.engine()
    while not any(delivery.waiting for delivery in engine.deliveries):
        assert not waiting.done()
        await asyncio.sleep(0.01)
    await one.share_node.publish("late", topic="other")
    response = await waiting
    assert sorted(refusals(response)) == [("none", 0), ("topic_authorization_failed", 0)]
    assert ranges(response) == [(0, 0, 1)]
    await security.add_acls([ALICE_READS])
    await one.share_node.publish("again")
    assert await one.got() == [(10, 10, 1)]


async def test_a_member_that_waits_gets_nothing_after_the_right_to_read_ends(
    one: Sharer, security: SecurityState
) -> None:
    one.client.rights = Rights(security, "User:alice", "127.0.0.1")
    assert await one.got() == [(0, 9, 1)]
    waiting = asyncio.create_task(one.fetch(max_wait=120_000))
    engine = await one.share_node.service.engine()
    await until(lambda: any(delivery.waiting for delivery in engine.deliveries))
    await security.delete_acls(AclFilter(resource_type=ResourceType.TOPIC))
    await one.share_node.publish("late")
    response = await waiting
    assert (refusals(response), ranges(response)) == ([("topic_authorization_failed", 0)], [])
    await security.add_acls([ALICE_READS])
    assert await one.got() == [(10, 10, 1)]


async def test_the_granted_lease_duration_is_reported(one: Sharer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def altered_meanwhile(_delivery: Delivery) -> None:
        await one.share_node.subscriptions.alter(GROUP, {LEASE: "900000"})

    monkeypatch.setattr(Delivery, "leases_durable", altered_meanwhile)
    assert (await one.fetch()).acquisition_lock_timeout == timedelta(seconds=600)


def continue_session(one: Sharer, *batches: tuple[int, ...]) -> Buffers | Promise | None:
    """Send a request that continues the session of a member and may wait; return what its connection gets."""
    parts = {"topic": "FetchTopic", "partition": "FetchPartition"}
    topics = one._topics(FETCH, 1, ((one.share_node.topic_id, 0),), batches, parts)
    request = built(FETCH, 1, **{**one._who(), **LIMITS, "max_wait": 60_000, "topics": topics})
    frame = memoryview(write_request(9, "test", request)[4:])
    one.session += 1
    return one.share_node.apis[FETCH].respond_to_frame(frame, read_request_header(frame), one.client)


async def test_a_waiting_member_gets_the_first_message_without_a_task(
    one: Sharer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request with acknowledgements waits for 20 ms, in which a busy machine may not store the message.
    monkeypatch.setattr("millstream.broker.kafka.apis.share_fetch._ACKNOWLEDGED_MS_MAX", 60_000)
    assert await one.got() == [(0, 9, 1)]
    tasks = asyncio.all_tasks()
    waiting = continue_session(one, (0, 9, ACCEPT))
    assert isinstance(waiting, Parked)
    await one.share_node.publish("late")
    encoded = await waiting
    assert isinstance(encoded, list)
    response = read_response(FETCH, 1, b"".join(encoded)[4:])
    assert (ranges(response), refusals(response)) == ([(10, 10, 1)], [("none", 0)])
    assert asyncio.all_tasks() == tasks
    assert await one.share_node.starts(0) == [(0, 10)]


async def test_refused_acknowledgements_are_reported_together_with_messages(one: Sharer) -> None:
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    encoded = continue_session(one, (5, 6, ACCEPT))
    assert isinstance(encoded, list)
    response = read_response(FETCH, 1, b"".join(encoded)[4:])
    assert refusals(response) == [("none", int(ErrorCode.invalid_record_state))]
    assert ranges(response) == [(4, 9, 1)]


async def test_a_failing_queue_is_reported_together_with_acknowledgements(
    one: Sharer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_delivery: Delivery, _demand: Demand) -> ReceivedMessages:
        raise NotLeader("moved")

    assert await one.got() == [(0, 9, 1)]
    monkeypatch.setattr(Delivery, "try_receive", fails)
    response = await one.fetch((0, 9, ACCEPT))
    assert (response.error_code, refusals(response)) == (ErrorCode.none, [("not_leader_or_follower", 0)])
    assert await one.share_node.starts(0) == [(0, 10)]


@pytest.mark.parametrize("error", [CoordinatorUnavailable("the states cannot be read now"), KeyError("a bug")])
async def test_a_queue_that_keeps_failing_is_not_polled_in_a_busy_loop(
    one: Sharer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(_delivery: Delivery, _demand: Demand) -> ReceivedMessages:
        raise error

    assert await one.got() == [(0, 9, 1)]
    monkeypatch.setattr(Delivery, "try_receive", fails)
    monkeypatch.setattr("millstream.broker.kafka.apis.share_fetch._PAUSE_MS", 60_000)
    waiting = continue_session(one)
    assert isinstance(waiting, Parked)
    waiting.abandon()
    if isinstance(error, CoordinatorUnavailable):
        versioned = asyncio.ensure_future(one.fetch())
        await asyncio.wait([versioned], timeout=0.05)
        assert versioned.cancel()
        await asyncio.wait([versioned])


async def test_a_response_that_cannot_be_encoded_is_an_error_and_returns_its_messages(
    one: Sharer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await one.got(max_records=4, share_acquire_mode=1) == [(0, 3, 1)]
    with monkeypatch.context() as broken:
        broken.setattr(share_codec, "write_plain", lambda *_: 1 / 0)
        encoded = continue_session(one)
    assert isinstance(encoded, list)
    assert read_response(FETCH, 1, b"".join(encoded)[4:]).error_code == ErrorCode.unknown_server_error
    two = Sharer(one.share_node, "two")
    await two.send_heartbeat()
    assert await two.got() == [(4, 9, 1)]


async def test_a_member_that_leaves_while_waiting_leases_nothing(one: Sharer) -> None:
    assert await one.got() == [(0, 9, 1)]
    waiting = continue_session(one)
    assert isinstance(waiting, Parked)
    waiting.abandon()
    assert await waiting is None
    await one.share_node.publish("late")
    two = Sharer(one.share_node, "two")
    await two.send_heartbeat()
    assert await two.got() == [(10, 10, 1)]


async def test_messages_are_delivered_once_and_acknowledged_with_the_next_request(one: Sharer) -> None:
    response = await one.fetch()
    assert response.acquisition_lock_timeout == timedelta(seconds=600)
    assert ranges(response) == [(0, 9, 1)]
    (partition,) = partitions_of(response)
    assert [record.value for record in decode_records(partition.records)] == [b"%d" % n for n in range(10)]
    response = await one.fetch((0, 9, ACCEPT))
    assert refusals(response) == [("none", 0)]
    assert ranges(response) == []
    assert await one.share_node.starts() == [(0, 10)]


async def test_the_requested_bytes_are_not_exceeded(one: Sharer) -> None:
    """A session opened with a limit of zero bytes gets no record; of two partitions one may exceed the limit."""
    await one.share_node.publish("x" * 1000, partition=1)
    both = ((one.share_node.topic_id, 0), (one.share_node.topic_id, 1))
    assert await one.got(max_bytes=0, places=both) == []
    served = []
    for _ in range(2):
        (partition,) = partitions_of(await one.fetch(max_bytes=1))
        served.append(partition.partition_index)
    assert sorted(served) == [0, 1]


async def test_unknown_sessions_and_wrong_session_epochs_are_refused(one: Sharer) -> None:
    assert (await one.fetch(share_session_epoch=5)).error_code == ErrorCode.share_session_not_found
    assert (await one.fetch(share_session_epoch=-1)).error_code == ErrorCode.share_session_not_found
    assert await one.codes((0, 0, ACCEPT), share_session_epoch=3) == ["share_session_not_found"]
    # Nothing can be acknowledged before a session exists.
    assert (await one.fetch((0, 0, ACCEPT))).error_code == ErrorCode.invalid_request
    assert await one.codes((0, 0, ACCEPT)) == ["invalid_share_session_epoch"]
    assert await one.got() == [(0, 9, 1)]
    assert (await one.fetch(share_session_epoch=9)).error_code == ErrorCode.invalid_share_session_epoch
    assert (await one.fetch(share_session_epoch=-2)).error_code == ErrorCode.invalid_share_session_epoch
    assert await one.codes((0, 0, ACCEPT), share_session_epoch=9) == ["invalid_share_session_epoch"]
    assert (await one.fetch(member_id="x" * 37)).error_code == ErrorCode.invalid_request
    assert (await one.fetch(member_id=None)).error_code == ErrorCode.invalid_request
    assert await one.codes((0, 0, ACCEPT), member_id="") == ["invalid_request"]
    assert (await one.fetch(group_id=None)).error_code == ErrorCode.share_session_not_found
    stranger = Sharer(one.share_node, "two", group="nowhere")
    assert (await stranger.fetch()).error_code == ErrorCode.group_id_not_found


async def test_closing_a_session_releases_its_messages(one: Sharer) -> None:
    two = Sharer(one.share_node, "two")
    assert await one.got() == [(0, 9, 1)]
    assert await two.got() == []
    assert await one.codes((0, 3, ACCEPT), share_session_epoch=-1) == ["none", "none"]
    assert await two.got() == [(4, 9, 2)]
    closing = await two.fetch((4, 5, ACCEPT), share_session_epoch=-1)
    assert (refusals(closing), ranges(closing)) == ([("none", 0)], [])
    assert (await two.fetch()).error_code == ErrorCode.share_session_not_found
    one.session = 0
    assert await one.got() == [(6, 9, 3)]


async def test_a_reopened_session_keeps_its_leases(one: Sharer) -> None:
    assert await one.got() == [(0, 9, 1)]
    one.session = 0
    assert await one.got() == []
    assert await one.codes((0, 9, ACCEPT)) == ["none", "none"]


async def test_the_messages_of_a_lost_connection_are_redelivered(one: Sharer) -> None:
    two = Sharer(one.share_node, "two")
    assert await one.got() == [(0, 9, 1)]
    waits = asyncio.create_task(two.got(max_wait=60_000))
    await asyncio.sleep(0)
    one.client.presence.end()
    assert await waits == [(0, 9, 2)]
    assert (await one.fetch()).error_code == ErrorCode.share_session_not_found
    assert await one.codes((0, 9, ACCEPT)) == ["share_session_not_found"]


async def test_session_partitions_are_added_and_forgotten(share_node: ShareNode, one: Sharer) -> None:
    assert await one.got() == [(0, 9, 1)]
    await share_node.publish("a", partition=1)
    assert await one.got() == []
    assert await one.got(places=((share_node.topic_id, 1),)) == [(0, 0, 1)]
    await share_node.publish("b", partition=1)
    assert await one.got() == [(1, 1, 1)]
    await share_node.publish("c", partition=1)
    forgotten = built(FETCH, 2, "ForgottenTopic", topic_id=share_node.topic_id, partitions=(1,))
    assert await one.got(forgotten_topics_data=(forgotten,)) == []
    assert await one.codes((0, 1, ACCEPT), places=((share_node.topic_id, 1),)) == ["none", "none"]


# Limits


async def test_batches_are_delivered_whole_unless_records_are_limited(share_node: ShareNode) -> None:
    await share_node.publish("a", "b", "c")
    await share_node.publish("d", "e", "f")
    one = Sharer(share_node, "one")
    await one.send_heartbeat()
    assert await one.got(max_records=2) == [(0, 2, 1)]
    assert await one.got(max_records=2, share_acquire_mode=1) == [(3, 4, 1)]
    assert await one.got(max_records=0) == []
    assert await one.got(max_records=-1) == []
    assert await one.got(max_bytes=1) == [(5, 5, 1)]


async def test_a_request_waits_for_new_messages(share_node: ShareNode) -> None:
    one = Sharer(share_node, "one")
    await one.send_heartbeat()
    waits = asyncio.create_task(one.got(max_wait=60_000))
    await asyncio.sleep(0)
    await share_node.publish("a")
    assert await waits == [(0, 0, 1)]


# Acknowledgements


async def test_accept_release_reject_and_gaps(one: Sharer) -> None:
    await one.fetch()
    assert await one.codes((0, 3, ACCEPT, RELEASE, REJECT, 0), (5, 6, RELEASE)) == ["none", "none"]
    assert await one.got() == [(1, 1, 2), (5, 6, 2)]
    assert await one.codes((1, 1, ACCEPT), (4, 9, ACCEPT)) == ["none", "none"]
    assert await one.share_node.starts(0) == [(0, 10)]
    # An offset without a message may be named although it is not leased.
    assert await one.codes((3, 3, 0)) == ["none", "none"]
    assert await one.codes() == ["none"]


REFUSED: list[tuple[list[tuple[int, ...]], str]] = [
    ([(3, 2, ACCEPT)], "invalid_request"),
    ([(0, 1, ACCEPT), (1, 2, ACCEPT)], "invalid_request"),
    ([(4, 5, ACCEPT), (0, 1, ACCEPT)], "invalid_request"),
    ([(0, 1)], "invalid_request"),
    ([(0, 2, ACCEPT, ACCEPT)], "invalid_request"),
    ([(0, 0, 5)], "invalid_request"),
    ([(0, 0, RENEW)], "invalid_request"),
    ([(9, 10, ACCEPT)], "invalid_request"),
    ([(100, 100, ACCEPT)], "invalid_request"),
    ([(7, 8, ACCEPT)], "invalid_record_state"),
    ([(0, 1, ACCEPT), (8, 8, RELEASE)], "invalid_record_state"),
]


async def test_refused_acknowledgements_change_nothing(one: Sharer) -> None:
    await one.fetch()
    await one.acknowledge((8, 8, ACCEPT))
    for batches, code in REFUSED:
        for version in (1, 2):
            assert [batches, *await one.codes(*batches, version=version)] == [batches, "none", code]
            response = await one.fetch(*batches, version=version)
            assert [batches, *refusals(response)] == [batches, ("none", int(ErrorCode[code]))]
    assert await one.codes((0, 7, ACCEPT), (9, 9, ACCEPT)) == ["none", "none"]


async def test_a_member_cannot_acknowledge_for_others(one: Sharer) -> None:
    two = Sharer(one.share_node, "two")
    await one.fetch()
    await two.fetch()
    assert await two.codes((0, 0, ACCEPT)) == ["none", "invalid_record_state"]
    assert await one.codes((0, 0, ACCEPT)) == ["none", "none"]


async def test_a_message_over_its_attempt_limit_is_not_redelivered(one: Sharer) -> None:
    await one.share_node.subscriptions.alter(GROUP, {ATTEMPTS: "2"})
    await one.fetch()
    await one.acknowledge((0, 8, ACCEPT))
    assert await one.got((9, 9, RELEASE)) == [(9, 9, 2)]
    assert await one.got((9, 9, RELEASE)) == []
    assert await one.share_node.starts() == [(0, 10)]


async def test_leases_are_renewed(one: Sharer) -> None:
    await one.fetch()
    assert (await one.fetch((0, 4, RENEW), is_renew_ack=True)).error_code == ErrorCode.invalid_request
    for name in ("max_wait", "min_bytes", "max_bytes", "max_records"):
        limits = {**NO_LIMITS, name: 1}
        assert (await one.fetch((0, 4, RENEW), **limits)).error_code == ErrorCode.invalid_request
    assert refusals(await one.fetch((0, 4, RENEW), **NO_LIMITS)) == [("none", 0)]
    assert await one.codes((0, 4, RENEW), is_renew_ack=True) == ["none", "none"]
    assert await one.codes((0, 1, RENEW, ACCEPT), is_renew_ack=True) == ["none", "none"]
    assert await one.codes((1, 1, RENEW), is_renew_ack=True) == ["none", "invalid_record_state"]
    # The request announces that it may renew; it need not.
    assert await one.codes((0, 0, ACCEPT), is_renew_ack=True) == ["none", "none"]


# Leadership and offsets


async def test_missing_topics_and_partitions_are_refused(one: Sharer) -> None:
    places = ((UNKNOWN_TOPIC, 0), (one.share_node.topic_id, 9))
    response = await one.fetch(places=places)
    assert refusals(response) == [("unknown_topic_id", 0), ("unknown_topic_or_partition", 0)]
    assert await one.codes((0, 0, ACCEPT), places=places) == ["none", "unknown_topic_id", "unknown_topic_or_partition"]


class LiveNodes:
    def __init__(self) -> None:
        nodes = [Node(node_id=NodeId(number), host=f"node-{number}", port=9090 + number) for number in (5, 7)]
        self.live = {node.node_id: node for node in nodes}
        self.controller = NodeId(5)


async def test_a_partition_led_by_another_node_is_refused(
    share_node: ShareNode, one: Sharer, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(topic_id: UUID, index: int) -> None:
        raise NotLeader(f"{topic_id} {index} is led by 7")

    led = PartitionState(replicas=(NodeId(7),), in_sync=(NodeId(7),), leader=NodeId(7), leader_epoch=Epoch(3))
    await one.fetch()
    monkeypatch.setattr(membership, "_cluster", LiveNodes())
    monkeypatch.setattr(share_node.topics, "partition_by_id", moved)
    monkeypatch.setattr(share_node.topics, "state_of", lambda _topic, _index: led)
    for response in (await one.fetch((0, 0, ACCEPT)), await one.acknowledge((0, 0, ACCEPT))):
        (partition,) = partitions_of(response)
        assert partition.error_code == ErrorCode.not_leader_or_follower
        assert (partition.current_leader.leader_id, partition.current_leader.leader_epoch) == (7, 3)
        assert [(node.node_id, node.host, node.port) for node in response.node_endpoints] == [(7, "node-7", 9097)]


async def test_errors_without_a_share_group_code_are_mapped(
    one: Sharer, share_node: ShareNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> None:
        raise CoordinatorUnavailable("the states cannot be read now")

    monkeypatch.setattr(await share_node.service.engine(), "delivery", unavailable)
    response = await one.fetch()
    assert (response.error_code, refusals(response)) == (ErrorCode.none, [("unknown_server_error", 0)])
    assert await one.codes((0, 0, ACCEPT)) == ["none", "coordinator_not_available"]


async def test_at_most_once_messages_are_settled_on_delivery(one: Sharer) -> None:
    await one.share_node.subscriptions.alter(GROUP, {DELIVERY: "at-most-once"})
    assert await one.got() == [(0, 9, 1)]
    assert await one.codes((0, 3, ACCEPT), (5, 9, ACCEPT)) == ["none", "none"]
    assert await one.codes((4, 4, RELEASE)) == ["none", "invalid_record_state"]
    assert await one.share_node.starts() == [(0, 10)]


# Offsets


async def test_offsets_are_listed_reset_and_deleted(share_node: ShareNode, one: Sharer) -> None:
    await one.fetch()
    await one.acknowledge((0, 3, ACCEPT))
    reported = await share_node.offsets()
    ((place,),) = [topic.partitions for topic in reported.topics]
    assert (place.partition_index, place.start_offset, place.lag, place.error_code) == (0, 4, 6, ErrorCode.none)
    assert await share_node.starts(0, 1) == [(0, 4), (1, -1)]
    reported = await share_node.offsets(0, topic="nowhere")
    assert reported.topics[0].partitions[0].error_code == ErrorCode.unknown_topic_or_partition
    assert (await share_node.move(2)).error_code == ErrorCode.non_empty_group
    assert (await share_node.forget()).error_code == ErrorCode.non_empty_group
    await one.send_heartbeat(member_epoch=-1)
    assert partitions_of(await share_node.move(2))[0].error_code == ErrorCode.none
    assert partitions_of(await share_node.move(2, partition=9))[0].error_code == ErrorCode.unknown_topic_or_partition
    assert (
        partitions_of(await share_node.move(2, topic="nowhere"))[0].error_code == ErrorCode.unknown_topic_or_partition
    )
    assert await share_node.starts() == [(0, 2)]
    two = Sharer(share_node, "two")
    assert await two.got() == [(2, 9, 1)]
    assert (await share_node.forget("nowhere")).responses[0].error_code == ErrorCode.unknown_topic_or_partition
    assert (await share_node.forget()).responses[0].error_code == ErrorCode.none
    assert await share_node.starts() == []
    three = Sharer(share_node, "three")
    assert await three.got() == [(0, 9, 1)]


async def test_offsets_of_queues_that_are_not_loaded_are_listed(share_node: ShareNode, one: Sharer) -> None:
    await one.fetch()
    await one.acknowledge((0, 3, ACCEPT))
    engine = await share_node.service.engine()
    subscription = share_node.subscriptions.existing(GROUP)
    engine.close_queues(subscription.subscription_id, share_node.topic_id)
    assert engine.open_count == 0
    assert await share_node.starts() == [(0, 4)]
    assert engine.open_count == 1


async def test_a_missing_group_has_no_offsets_and_is_created_by_a_reset(share_node: ShareNode) -> None:
    await share_node.publish("a", "b", "c")
    assert await share_node.starts() == []
    assert await share_node.starts(0) == [(0, -1)]
    assert (await share_node.forget()).error_code == ErrorCode.group_id_not_found
    await share_node.subscriptions.delete(GROUP)
    assert await share_node.starts(0) == [(0, -1)]
    assert partitions_of(await share_node.move(2))[0].error_code == ErrorCode.none
    (described,) = (await share_node.ask(DESCRIBE, 1, group_ids=(GROUP,))).groups
    assert (described.error_code, described.group_state) == (ErrorCode.none, "Empty")
    one = Sharer(share_node, "one")
    assert (await one.send_heartbeat()).member_epoch == 1
    assert await one.got() == [(2, 2, 1)]
    # A group of another type is not taken over.
    names = {"group_id": "consumers", "member_id": "m", "member_epoch": 0, "subscribed_topic_names": (TOPIC,)}
    timeout = i32Timedelta.parse(timedelta(minutes=1))
    await share_node.ask(68, 1, **names, rebalance_timeout=timeout, topic_partitions=())
    refused = await share_node.ask(MOVE, 0, group_id="consumers", topics=())
    assert refused.error_code == ErrorCode.group_id_not_found


# Settings of consumer groups


async def alter_group(share_node: ShareNode, group: str, operation: int, **changes: str | None) -> Any:
    configs = tuple(
        dataclasses.replace(
            built(ALTER, 1, "AlterableConfig", config_operation=operation, value=value), name=name.replace("_", ".")
        )
        for name, value in changes.items()
    )
    resource = built(ALTER, 1, "AlterConfigsResource", resource_type=32, resource_name=group, configs=configs)
    (response,) = (await share_node.ask(ALTER, 1, resources=(resource,))).responses
    return response


async def described(share_node: ShareNode, group: str) -> dict[str, tuple[str, int]]:
    resource = built(DESCRIBE_CONFIGS, 4, "DescribeConfigsResource", resource_type=32, resource_name=group)
    (response,) = (await share_node.ask(DESCRIBE_CONFIGS, 4, resources=(resource,))).results
    return {config.name: (config.value, config.config_source) for config in response.configs}


async def test_a_consumer_group_has_its_own_settings_and_is_not_a_subscription(share_node: ShareNode) -> None:
    set_, delete = 0, 1
    session, heartbeat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    changes = {"consumer_session_timeout_ms": "9000", "consumer_heartbeat_interval_ms": "700"}
    assert (await alter_group(share_node, "readers", set_, **changes)).error_code is ErrorCode.none
    assert share_node.subscriptions.get("readers") is None
    response = await share_node.ask(LIST_CONFIGS, 1, resource_types=(32,))
    assert "readers" in [resource.resource_name for resource in response.config_resources]
    reported = await described(share_node, "readers")
    assert (reported[session], reported[heartbeat]) == (("9000", 8), ("700", 8))
    assert (await described(share_node, "others"))[session] == ("45000", 5)
    member = {"member_id": "m", "member_epoch": 0, "rebalance_timeout": timedelta(seconds=60)}
    for group, milliseconds in (("readers", 700), ("others", 5000)):
        joined = await share_node.ask(
            68, 1, group_id=group, subscribed_topic_names=(TOPIC,), topic_partitions=(), **member
        )
        assert (joined.error_code, joined.heartbeat_interval) == (ErrorCode.none, timedelta(milliseconds=milliseconds))
    for wrong in ({"consumer_session_timeout_ms": "600"}, {"consumer_heartbeat_interval_ms": "soon"}):
        refused = await alter_group(share_node, "readers", set_, **wrong)
        assert refused.error_code is ErrorCode.invalid_config
        assert "consumer." in refused.error_message
    assert (await alter_group(share_node, "readers", delete, **dict.fromkeys(changes))).error_code is ErrorCode.none
    assert (await described(share_node, "readers"))[session] == ("45000", 5)


async def test_there_are_no_default_settings_for_all_groups(share_node: ShareNode) -> None:
    assert (
        await alter_group(share_node, "", 0, consumer_session_timeout_ms="9000")
    ).error_code is ErrorCode.invalid_request
    resource = built(DESCRIBE_CONFIGS, 4, "DescribeConfigsResource", resource_type=32, resource_name="")
    (response,) = (await share_node.ask(DESCRIBE_CONFIGS, 4, resources=(resource,))).results
    assert (response.error_code, response.configs) == (ErrorCode.invalid_request, ())


async def test_settings_that_no_group_has_declare_nothing(share_node: ShareNode) -> None:
    assert (
        await alter_group(share_node, "readers", 0, streams_session_timeout_ms="9000")
    ).error_code is not ErrorCode.none
    await alter_group(share_node, "readers", 1, share_session_timeout_ms=None)
    assert share_node.subscriptions.get("readers") is None
