"""Every API with each missing permission gets the response of Apache Kafka; private requests need permission, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from conformance import permission_table
from kio.schema.alter_share_group_offsets.v0.request import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from kio.schema.describe_topic_partitions.v0.request import Cursor, DescribeTopicPartitionsRequest
from kio.schema.errors import ErrorCode
from kio.schema.incremental_alter_configs.v1.request import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i8, i32, i64

from millstream.broker.security.guards import AUTHORIZE_THEMSELVES, guarded_keys
from millstream.client.admin.security import add_acls, remove_acls
from millstream.core.acl import CLUSTER_NAME, Acl, AclFilter, Operation, ResourceType
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.subscription import DEAD_LETTER_TOPIC, DELIVERY, LEDGER, START, topic_of_start
from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.message import Request, decode, encode, request_private, response_type
from millstream.protocol.private.mirror_messages import BarrierRequest, OfferRequest
from millstream.protocol.private.publish_once import publish_once
from millstream.protocol.private.subscription_messages import (
    AlterSubscriptionRequest,
    PartitionSettles,
    ReceiveRequest,
    ReviveMessagesRequest,
    SeekSubscriptionRequest,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.private.subscriptions import LedgerMarkRequest, SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security
from millstream_testing.waiting import until_result

CLUSTER_DENIED = ErrorCode.cluster_authorization_failed
ADMIN = Credentials(user="admin", password="admin-password")
UNAUTHORIZED = Credentials(user="unauthorized", password="unauthorized-password")
OPEN: Final = frozenset({17, 18, 36})
"""SaslHandshake, ApiVersions and SaslAuthenticate are for everybody."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    data: Path = tmp_path_factory.mktemp("locked") / "data"
    declare_security(data, {"admin": "admin-password", "unauthorized": "unauthorized-password"})
    settings = {"auth": "required", "super-users": "admin"}
    started = EmbeddedBroker(data, kafka="127.0.0.1:0", http="", settings=settings)
    started.start_and_wait()
    yield started
    started.stop_and_wait()


@pytest.fixture
async def admin(broker: EmbeddedBroker) -> AsyncIterator[Client]:
    async with Client.connect(broker.kafka_address, credentials=ADMIN) as client:
        await client.metadata(["t"], create=True)
        yield client


@pytest.fixture
async def unauthorized(broker: EmbeddedBroker, admin: Client) -> AsyncIterator[Client]:
    async with Client.connect(broker.kafka_address, credentials=UNAUTHORIZED) as client:
        yield client


def test_every_api_is_covered() -> None:
    keys = {int(question.key) for question in permission_table.QUESTIONS}
    assert keys == (guarded_keys() | AUTHORIZE_THEMSELVES) - OPEN


def test_denied_requests_get_the_responses_of_kafka(tmp_path: Path) -> None:
    # Users without one permission, with all, or with none; `make compare` also checks users with a single one.
    users = [user for user in permission_table.USERS if not user.startswith("only-")]
    responses = permission_table.millstream_responses(tmp_path / "data", users)
    recorded = permission_table.recorded()
    expected = {name: {user: by_user[user] for user in users} for name, by_user in recorded.items()}
    differing = permission_table.differences(expected, responses)
    assert not differing, "\n".join(differing)
    # The intended differences still exist; otherwise they need no exception.
    accepted = {*permission_table.ACCEPTED, *permission_table.OTHERWISE}
    assert not [name for name in sorted(accepted) if responses[name] == expected[name]]


async def test_private_requests_are_denied_without_permission(unauthorized: Client, admin: Client) -> None:
    await SubscriptionClient(admin).create("g", ["t"], {})
    subscriptions = SubscriptionClient(unauthorized)
    with pytest.raises(NotAuthorized):
        await subscriptions.create("g2", ["t"], {})
    with pytest.raises(NotAuthorized):
        await subscriptions.delete("g")
    assert await subscriptions.describe() == []
    with pytest.raises(NotAuthorized):
        await subscriptions.describe(["g"])
    with pytest.raises(MillstreamError):
        await publish_once(unauthorized, "t", 0, [NewRecord(None, b"x")])
    for key in (32000, 32001):
        response = msgspec.msgpack.decode(bytes(await unauthorized.private(None, key, b"")))
        assert response["error"] == int(CLUSTER_DENIED)
        assert set(response) == {"error", "message"}
    assert not msgspec.msgpack.decode(bytes(await admin.private(None, 32001, b"")))["error"]


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
async def test_a_worker_that_waits_gets_nothing_after_its_permission_is_removed(
    unauthorized: Client, admin: Client, delivery: str
) -> None:
    name, subscriptions = f"waiting-{delivery}", SubscriptionClient(admin)
    kinds = (ResourceType.TOPIC, ResourceType.GROUP)
    rules = [rule_for(kind, name) for kind in kinds]
    await admin.metadata([name], create=True)
    await subscriptions.create(name, [name], {DELIVERY: delivery})
    await add_acls(admin, rules)
    worker = SubscriptionClient(unauthorized)
    # The first request opens the queue.
    assert await worker.receive(name, "w", max_records=1) == []
    waiting = asyncio.create_task(worker.receive(name, "w", max_records=1, wait_ms=120_000))

    async def is_waiting() -> bool:
        (described,) = await subscriptions.describe([name])
        return bool(sum(queue["waiting_workers"] for queue in described["queues"]))

    await until_result(is_waiting)
    await remove_acls(admin, [AclFilter(resource_type=ResourceType.TOPIC, resource_name=name)])
    await admin.produce(name, 0, encode_batch([NewRecord(None, b"x")]))
    with pytest.raises(NotAuthorized):
        await waiting
    (message,) = await subscriptions.receive(name, "w", max_records=1, wait_ms=120_000)
    assert message.attempt == 1, "it was not delivered"
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_a_subscription_gives_no_access_to_a_topic_that_it_does_not_deliver(
    unauthorized: Client, admin: Client
) -> None:
    own, hidden = "outside", "outside-secret"
    await admin.metadata([own, hidden], create=True)
    await admin.produce(hidden, 0, encode_batch([NewRecord(None, b"secret")]))
    await SubscriptionClient(admin).create(own, [own], {DELIVERY: "exactly-once"})
    reads = [(kind, own) for kind in (ResourceType.TOPIC, ResourceType.GROUP)]
    await add_acls(admin, [rule_for(kind, name) for kind, name in reads])

    async def ask(topic: str) -> list[Any]:
        """Name a topic in every request about a subscription that names one."""
        return [
            await refusal(unauthorized, ReceiveRequest(own, "w", 1, 1000, 0, [(topic, 0)])),
            await refusal(unauthorized, ReceiveRequest(own, "w", 1, 1000, 1, [(topic, 0)])),
            await refusal(unauthorized, SeekSubscriptionRequest(own, "earliest", topic)),
            await refusal(unauthorized, SettleRequest(own, "w", [PartitionSettles(topic, 0, [SettledRange(0, 1, 3)])])),
        ]

    denied = int(ErrorCode.topic_authorization_failed)
    assert await ask(hidden) == [denied, denied, denied, [[denied]]]
    assert await ask("missing") == [denied, denied, denied, [[denied]]], "it is not revealed which topics exist"
    # With the right to read both, too: the subscription would gain a queue that is not its own.
    await add_acls(admin, [rule_for(ResourceType.TOPIC, hidden)])
    unknown = int(ErrorCode.unknown_topic_or_partition)
    assert await ask(hidden) == [unknown, unknown, unknown, [[unknown]]]
    (described,) = await SubscriptionClient(admin).describe([own])
    assert {queue["topic"] for queue in described["queues"]} == {own}
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_the_topics_of_a_share_group_without_members_need_permission(unauthorized: Client, admin: Client) -> None:
    group, hidden = "left-behind", "left-behind-topic"
    await admin.metadata([hidden], create=True)
    place = AlterShareGroupOffsetsRequestPartition(partition_index=i32(0), start_offset=i64(0))
    topic = AlterShareGroupOffsetsRequestTopic(topic_name=TopicName(hidden), partitions=(place,))
    await admin.send(None, AlterShareGroupOffsetsRequest(group_id=GroupId(group), topics=(topic,)))
    await add_acls(admin, [rule_for(ResourceType.GROUP, group)])
    letters = "left-behind-letters"
    await add_acls(admin, [rule_for(ResourceType.GROUP, group, Operation.ALTER_CONFIGS)])
    await add_acls(admin, [rule_for(ResourceType.TOPIC, letters, Operation.WRITE)])
    denied = ErrorCode.topic_authorization_failed
    for request in (
        SeekSubscriptionRequest(group, "latest"),
        ReceiveRequest(group, "w", 1, 1000, 0),
        AlterSubscriptionRequest(group, {DEAD_LETTER_TOPIC: letters}),
    ):
        assert await refusal(unauthorized, request) == int(denied)
    config = AlterableConfig(name=DEAD_LETTER_TOPIC, config_operation=i8(0), value=letters)
    resource = AlterConfigsResource(resource_type=i8(32), resource_name=group, configs=(config,))
    changed = await unauthorized.send(None, IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False))
    assert [response.error_code for response in changed.responses] == [denied]
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_a_mirror_gets_nothing_about_what_its_user_may_not_read(unauthorized: Client, admin: Client) -> None:
    name = "offered"
    topics = (await admin.metadata([name, f"{name}-dlq"], create=True)).topics
    settings = {START: "earliest", DEAD_LETTER_TOPIC: f"{name}-dlq"}
    await SubscriptionClient(admin).create(name, [name], settings)
    assert await SubscriptionClient(admin).receive(name, "w", max_records=1) == []
    requests = OfferRequest(), OfferRequest(topics=[topics[name].topic_id])

    async def offered(client: Client) -> list[bool]:
        declared, stored = [await request_private(client, None, request) for request in requests]
        return [f"{name}-dlq" in declared.letters, bool(stored.subscriptions), bool(stored.queues)]

    await add_acls(admin, [rule_for(ResourceType.CLUSTER, CLUSTER_NAME, Operation.DESCRIBE)])
    assert await offered(admin) == [True, True, True]
    assert await offered(unauthorized) == [False, False, False]
    denied = int(ErrorCode.topic_authorization_failed)
    assert await refusal(unauthorized, BarrierRequest(topics=[name])) == denied
    await add_acls(admin, [rule_for(kind, "*") for kind in (ResourceType.TOPIC, ResourceType.GROUP)])
    assert await offered(unauthorized) == [True, True, True]
    assert await refusal(unauthorized, BarrierRequest(topics=[name])) == 0
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_a_mirror_learns_no_hidden_topic_of_a_subscription(unauthorized: Client, admin: Client) -> None:
    shown, hidden = "offer-shown", "offer-hidden"
    topics = (await admin.metadata([shown, hidden], create=True)).topics
    subscriptions = SubscriptionClient(admin)
    await subscriptions.create("offer-both", [shown, hidden], {START: "earliest"})
    await subscriptions.create("offer-only-hidden", [hidden], {START: "earliest"})
    requested = OfferRequest(topics=[topic.topic_id for topic in topics.values()])
    await add_acls(
        admin,
        [
            rule_for(ResourceType.CLUSTER, CLUSTER_NAME, Operation.DESCRIBE),
            rule_for(ResourceType.GROUP, "*"),
            rule_for(ResourceType.TOPIC, shown),
        ],
    )
    for client, visible in ((admin, [shown, hidden]), (unauthorized, [shown])):
        offered = await request_private(client, None, requested)
        (both,) = [subscription for subscription in offered.subscriptions if subscription.name == "offer-both"]
        assert (both.topics, {topic_of_start(start) for start in both.starts}) == (visible, set(visible))
        is_complete = "offer-only-hidden" in {subscription.name for subscription in offered.subscriptions}
        assert is_complete == (hidden in visible) == (not offered.has_hidden)
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_redriving_needs_permission_on_the_dead_letter_topic(unauthorized: Client, admin: Client) -> None:
    own, hidden = "redriven", "redriven-secret"
    known = await admin.metadata([own, hidden], create=True)
    topic_id, letter_topic_id = (known.topics[name].topic_id for name in (own, hidden))
    await SubscriptionClient(admin).create(own, [own], {DEAD_LETTER_TOPIC: hidden})
    await add_acls(admin, [rule_for(kind, own) for kind in (ResourceType.TOPIC, ResourceType.GROUP)])
    request = ReviveMessagesRequest(own, own, topic_id, 0, 0, letter_topic_id, [], [])
    response = decode(await unauthorized.private(None, request.KEY, encode(request)), response_type(request))
    assert response.error == int(ErrorCode.topic_authorization_failed)
    assert hidden not in str(response.message)
    await add_acls(admin, [rule_for(ResourceType.TOPIC, hidden)])
    assert not await refusal(unauthorized, request)
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_clients_that_may_only_describe_a_subscription_cannot_write_long_marks_to_it(
    unauthorized: Client, admin: Client
) -> None:
    await SubscriptionClient(admin).create("marked", ["t"], {LEDGER: "true"})
    kinds = (ResourceType.TOPIC, "t"), (ResourceType.GROUP, "marked")
    await add_acls(admin, [rule_for(kind, name, Operation.DESCRIBE) for kind, name in kinds])
    assert await refusal(unauthorized, LedgerMarkRequest("m" * 1000, ["marked"])) == int(ErrorCode.invalid_request)
    assert not await refusal(unauthorized, LedgerMarkRequest("m", ["marked"]))
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


async def test_pages_of_topics_do_not_name_hidden_ones(unauthorized: Client, admin: Client) -> None:
    await admin.metadata(["paged-a", "paged-b", "paged-c"], create=True)
    await add_acls(admin, [rule_for(ResourceType.TOPIC, name) for name in ("paged-a", "paged-c")])
    cursor: Cursor | None = None
    pages: list[tuple[list[str], str | None]] = []
    while not pages or cursor is not None:
        request = DescribeTopicPartitionsRequest(topics=(), response_partition_limit=i32(1), cursor=cursor)
        response = await unauthorized.send(None, request)
        following = response.next_cursor
        cursor = following and Cursor(topic_name=following.topic_name, partition_index=following.partition_index)
        pages.append(([topic.name for topic in response.topics], following and following.topic_name))
    assert pages == [(["paged-a"], "paged-c"), (["paged-c"], None)]
    await remove_acls(admin, [AclFilter(principal="User:unauthorized")])


def rule_for(kind: ResourceType, name: str, operation: Operation = Operation.READ) -> Acl:
    return Acl(principal="User:unauthorized", resource_type=kind, resource_name=name, operation=operation)


async def refusal(client: Client, request: Request[Any]) -> Any:
    """Return the error code of the response, or those of the settlements."""
    response = decode(await client.private(None, request.KEY, encode(request)), response_type(request))
    if isinstance(response, SettleResponse) and not response.error:
        return [[code for code, _ in partition] for partition in response.results]
    return response.error
