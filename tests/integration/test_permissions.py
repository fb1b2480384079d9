"""Every API, asked by a user that may do nothing: what Kafka answers, nothing told, nothing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import pytest
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64

from millstream.broker.security.guards import AUTHORIZE_THEMSELVES, guarded_keys
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.embedded import EmbeddedBroker
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.private.publish_once import publish_once
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.security import declare_security

TOPIC_DENIED, GROUP_DENIED = ErrorCode.topic_authorization_failed, ErrorCode.group_authorization_failed
CLUSTER_DENIED, ID_DENIED = ErrorCode.cluster_authorization_failed, ErrorCode.transactional_id_authorization_failed
NOW = i32Timedelta.parse(timedelta(seconds=5))
ADMIN = Credentials(user="admin", password="admin-password")
NOBODY = Credentials(user="nobody", password="nobody-password")
OPEN: Final = frozenset({17, 18, 36, 60})
"""SaslHandshake, ApiVersions, SaslAuthenticate and DescribeCluster are for everybody."""


def make(package: str, version: int, kind: str, /, **fields: Any) -> Any:
    """A message of kio's; what has no default and is not given is null."""
    message = getattr(import_module(f"kio.schema.{package}.v{version}.request"), kind)
    absent = (field.name for field in dataclasses.fields(message) if field.default is dataclasses.MISSING)
    return message(**{**dict.fromkeys(absent), **fields})


Questions = Iterator[tuple[Any, set[ErrorCode]]]


def ask(package: str, version: int, **fields: Any) -> Any:
    name = "".join(word.capitalize() for word in package.split("_")) + "Request"
    return make(package, version, name, **fields)


def metadata_questions() -> Questions:
    p = make("list_offsets", 11, "ListOffsetsPartition", partition_index=i32(0), timestamp=i64(-1))
    topic = make("list_offsets", 11, "ListOffsetsTopic", name="t", partitions=(p,))
    yield ask("list_offsets", 11, replica_id=-1, isolation_level=i8(0), topics=(topic,), timeout=NOW), {TOPIC_DENIED}
    topic = make("metadata", 13, "MetadataRequestTopic", topic_id=None, name="t")
    yield (
        ask("metadata", 13, topics=(topic,), allow_auto_topic_creation=True, include_topic_authorized_operations=True),
        {TOPIC_DENIED},
    )
    topic = make("metadata", 13, "MetadataRequestTopic", topic_id=None, name="new")
    yield (
        ask("metadata", 13, topics=(topic,), allow_auto_topic_creation=True, include_topic_authorized_operations=True),
        {TOPIC_DENIED},
    )
    yield (
        ask("metadata", 13, topics=None, allow_auto_topic_creation=True, include_topic_authorized_operations=True),
        set(),
    )


def group_questions() -> Questions:
    commit = make("offset_commit", 9, "OffsetCommitRequestPartition", partition_index=i32(0), committed_offset=i64(0))
    topic = make("offset_commit", 9, "OffsetCommitRequestTopic", name="t", partitions=(commit,))
    yield ask("offset_commit", 9, group_id="g", member_id="", topics=(topic,)), {GROUP_DENIED}
    topic = make("offset_fetch", 9, "OffsetFetchRequestTopics", name="t", partition_indexes=(i32(0),))
    group = make("offset_fetch", 9, "OffsetFetchRequestGroup", group_id="g", topics=(topic,))
    yield ask("offset_fetch", 9, groups=(group,), require_stable=False), {GROUP_DENIED}
    yield ask("find_coordinator", 6, key_type=i8(0), coordinator_keys=("g",)), {GROUP_DENIED}
    yield ask("find_coordinator", 6, key_type=i8(1), coordinator_keys=("x",)), {ID_DENIED}
    protocol = make("join_group", 9, "JoinGroupRequestProtocol", name="range", metadata=b"")
    yield (
        ask(
            "join_group",
            9,
            group_id="g",
            session_timeout=i32Timedelta.parse(timedelta(seconds=10)),
            member_id="",
            protocol_type="consumer",
            protocols=(protocol,),
        ),
        {GROUP_DENIED},
    )
    yield ask("heartbeat", 4, group_id="g", generation_id=i32(1), member_id="m"), {GROUP_DENIED}
    yield ask("leave_group", 5, group_id="g", members=()), {GROUP_DENIED}
    yield ask("sync_group", 5, group_id="g", generation_id=i32(1), member_id="m", assignments=()), {GROUP_DENIED}
    yield ask("describe_groups", 6, groups=("g",), include_authorized_operations=True), {GROUP_DENIED}
    yield ask("list_groups", 5, states_filter=(), types_filter=()), set()


def topic_questions() -> Questions:
    topic = make(
        "create_topics",
        7,
        "CreatableTopic",
        name="new",
        num_partitions=i32(1),
        replication_factor=i16(1),
        assignments=(),
        configs=(),
    )
    yield ask("create_topics", 7, topics=(topic,), timeout=NOW), {TOPIC_DENIED}
    topic = make("delete_topics", 6, "DeleteTopicState", name="t", topic_id=None)
    yield ask("delete_topics", 6, topics=(topic,), timeout=NOW), {TOPIC_DENIED}
    partition = make("delete_records", 2, "DeleteRecordsPartition", partition_index=i32(0), offset=i64(-1))
    topic = make("delete_records", 2, "DeleteRecordsTopic", name="t", partitions=(partition,))
    yield ask("delete_records", 2, topics=(topic,), timeout=NOW), {TOPIC_DENIED}


def transaction_questions() -> Questions:
    yield ask("init_producer_id", 5, transactional_id="x", transaction_timeout=NOW), {ID_DENIED}
    yield ask("init_producer_id", 5, transactional_id=None, transaction_timeout=NOW), {CLUSTER_DENIED}
    partition = make("offset_for_leader_epoch", 4, "OffsetForLeaderPartition", partition=i32(0), leader_epoch=i32(0))
    topic = make("offset_for_leader_epoch", 4, "OffsetForLeaderTopic", topic="t", partitions=(partition,))
    yield ask("offset_for_leader_epoch", 4, topics=(topic,)), {TOPIC_DENIED}
    topic = make("add_partitions_to_txn", 3, "AddPartitionsToTxnTopic", name="t", partitions=(i32(0),))
    yield (
        ask(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=i64(1),
            v3_and_below_producer_epoch=i16(0),
            v3_and_below_topics=(topic,),
        ),
        {ID_DENIED},
    )
    yield ask("add_partitions_to_txn", 5, transactions=()), {CLUSTER_DENIED}
    producer = {"transactional_id": "x", "producer_id": i64(1), "producer_epoch": i16(0)}
    yield ask("add_offsets_to_txn", 4, group_id="g", **producer), {ID_DENIED}
    yield ask("end_txn", 5, committed=True, **producer), {ID_DENIED}
    partition = make(
        "txn_offset_commit",
        5,
        "TxnOffsetCommitRequestPartition",
        partition_index=i32(0),
        committed_offset=i64(0),
        committed_metadata="",
    )
    topic = make("txn_offset_commit", 5, "TxnOffsetCommitRequestTopic", name="t", partitions=(partition,))
    yield ask("txn_offset_commit", 5, group_id="g", topics=(topic,), **producer), {ID_DENIED}
    topic = make("write_txn_markers", 2, "WritableTxnMarkerTopic", name="t", partition_indexes=(i32(0),))
    marker = make(
        "write_txn_markers",
        2,
        "WritableTxnMarker",
        producer_id=i64(1),
        producer_epoch=i16(0),
        transaction_result=True,
        topics=(topic,),
        coordinator_epoch=i32(0),
        transaction_version=i8(1),
    )
    yield ask("write_txn_markers", 2, markers=(marker,)), {CLUSTER_DENIED}


def rule_questions() -> Questions:
    everything = {"operation": i8(1), "permission_type": i8(1), "principal_filter": None, "host_filter": None}
    everything |= {"resource_type_filter": i8(1), "resource_name_filter": None, "pattern_type_filter": i8(1)}
    yield ask("describe_acls", 3, **everything), {CLUSTER_DENIED}
    yield ask("delete_acls", 3, filters=(make("delete_acls", 3, "DeleteAclsFilter", **everything),)), {CLUSTER_DENIED}
    rule = make(
        "create_acls",
        3,
        "AclCreation",
        resource_type=i8(2),
        resource_name="t",
        resource_pattern_type=i8(3),
        principal="User:nobody",
        host="*",
        operation=i8(2),
        permission_type=i8(3),
    )
    yield ask("create_acls", 3, creations=(rule,)), {CLUSTER_DENIED}
    for kind, name, code in ((2, "t", TOPIC_DENIED), (4, "1", CLUSTER_DENIED), (32, "g", GROUP_DENIED)):
        resource = {"resource_type": i8(kind), "resource_name": name}
        described = make("describe_configs", 4, "DescribeConfigsResource", configuration_keys=None, **resource)
        yield ask("describe_configs", 4, resources=(described,)), {code}
        altered = make("incremental_alter_configs", 1, "AlterConfigsResource", configs=(), **resource)
        yield ask("incremental_alter_configs", 1, resources=(altered,), validate_only=False), {code}
        altered = make("alter_configs", 2, "AlterConfigsResource", configs=(), **resource)
        yield ask("alter_configs", 2, resources=(altered,), validate_only=False), {code}
    yield ask("list_config_resources", 1, resource_types=()), {CLUSTER_DENIED}


def cluster_questions() -> Questions:
    topic = make("alter_replica_log_dirs", 2, "AlterReplicaLogDirTopic", name="t", partitions=(i32(0),))
    folder = make("alter_replica_log_dirs", 2, "AlterReplicaLogDir", path="/x", topics=(topic,))
    yield ask("alter_replica_log_dirs", 2, dirs=(folder,)), {CLUSTER_DENIED}
    yield ask("describe_log_dirs", 5, topics=None), {CLUSTER_DENIED}
    topic = make("create_partitions", 3, "CreatePartitionsTopic", name="t", count=i32(5), assignments=None)
    yield ask("create_partitions", 3, topics=(topic,), timeout=NOW, validate_only=False), {TOPIC_DENIED}
    yield ask("delete_groups", 2, groups_names=("g",)), {GROUP_DENIED}
    topic = make("elect_leaders", 2, "TopicPartitions", topic="t", partitions=(i32(0),))
    yield ask("elect_leaders", 2, election_type=i8(0), topic_partitions=(topic,), timeout=NOW), {CLUSTER_DENIED}
    partition = make("alter_partition_reassignments", 1, "ReassignablePartition", partition_index=i32(0), replicas=None)
    topic = make("alter_partition_reassignments", 1, "ReassignableTopic", name="t", partitions=(partition,))
    yield ask("alter_partition_reassignments", 1, timeout=NOW, topics=(topic,)), {CLUSTER_DENIED}
    yield ask("list_partition_reassignments", 0, timeout=NOW, topics=None), {CLUSTER_DENIED}
    partition = make("offset_delete", 0, "OffsetDeleteRequestPartition", partition_index=i32(0))
    topic = make("offset_delete", 0, "OffsetDeleteRequestTopic", name="t", partitions=(partition,))
    yield ask("offset_delete", 0, group_id="g", topics=(topic,)), {GROUP_DENIED}
    yield ask("describe_client_quotas", 1, components=(), strict=False), {CLUSTER_DENIED}
    entity = make("alter_client_quotas", 1, "EntityData", entity_type="client-id", entity_name="c")
    entry = make("alter_client_quotas", 1, "EntryData", entity=(entity,), ops=())
    yield ask("alter_client_quotas", 1, entries=(entry,), validate_only=False), {CLUSTER_DENIED}
    yield ask("describe_user_scram_credentials", 0, users=None), {CLUSTER_DENIED}
    gone = make("alter_user_scram_credentials", 0, "ScramCredentialDeletion", name="admin", mechanism=i8(1))
    yield ask("alter_user_scram_credentials", 0, deletions=(gone,), upsertions=()), {CLUSTER_DENIED}
    yield ask("update_features", 2, feature_updates=()), {CLUSTER_DENIED}


def newer_questions() -> Questions:
    topic = make("describe_producers", 0, "TopicRequest", name="t", partition_indexes=(i32(0),))
    yield ask("describe_producers", 0, topics=(topic,)), {TOPIC_DENIED}
    yield ask("describe_transactions", 0, transactional_ids=("x",)), {ID_DENIED}
    yield ask("list_transactions", 2, state_filters=(), producer_id_filters=()), set()
    member = UUID(int=7)
    member_fields = {"member_id": str(member), "member_epoch": i32(0), "subscribed_topic_names": ("t",)}
    yield (
        ask(
            "consumer_group_heartbeat",
            1,
            group_id="g",
            rebalance_timeout=NOW,
            subscribed_topic_regex=None,
            topic_partitions=(),
            **member_fields,
        ),
        {GROUP_DENIED},
    )
    yield ask("consumer_group_describe", 1, group_ids=("g",), include_authorized_operations=True), {GROUP_DENIED}
    topic = make("describe_topic_partitions", 0, "TopicRequest", name="t")
    yield ask("describe_topic_partitions", 0, topics=(topic,), cursor=None), {TOPIC_DENIED}
    yield ask("share_group_heartbeat", 1, group_id="g", **member_fields), {GROUP_DENIED}
    yield ask("share_group_describe", 1, group_ids=("g",), include_authorized_operations=True), {GROUP_DENIED}
    share = {"group_id": "g", "member_id": str(member), "share_session_epoch": i32(0), "topics": ()}
    yield (
        ask(
            "share_fetch",
            1,
            max_wait=NOW,
            min_bytes=i32(1),
            max_bytes=i32(1000),
            max_records=i32(1),
            batch_size=i32(1),
            forgotten_topics_data=(),
            **share,
        ),
        {GROUP_DENIED},
    )
    yield ask("share_acknowledge", 1, **share), {GROUP_DENIED}
    group = make("describe_share_group_offsets", 1, "DescribeShareGroupOffsetsRequestGroup", group_id="g", topics=None)
    yield ask("describe_share_group_offsets", 1, groups=(group,)), {GROUP_DENIED}
    yield ask("alter_share_group_offsets", 0, group_id="g", topics=()), {GROUP_DENIED}
    yield ask("delete_share_group_offsets", 0, group_id="g", topics=()), {GROUP_DENIED}


def questions() -> Questions:
    """A request of each API about topic `t`, group `g` and transactional id `x`, with the codes that Kafka gives."""
    for some in (
        metadata_questions,
        group_questions,
        topic_questions,
        transaction_questions,
        rule_questions,
        cluster_questions,
        newer_questions,
    ):
        yield from some()


def codes_in(message: Any) -> set[ErrorCode]:
    """Every error code of an answer."""
    found: set[ErrorCode] = set()
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, ErrorCode):
            found.add(value)
        for one in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(one):
                found |= codes_in(one)
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    data: Path = tmp_path_factory.mktemp("locked") / "data"
    declare_security(data, {"admin": "admin-password", "nobody": "nobody-password"})
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
async def nobody(broker: EmbeddedBroker, admin: Client) -> AsyncIterator[Client]:
    async with Client.connect(broker.kafka_address, credentials=NOBODY) as client:
        yield client


def test_every_api_is_asked() -> None:
    asked = {int(request.__api_key__) for request, _ in questions()}
    # Produce and Fetch are asked by a test of their own.
    assert asked == (guarded_keys() | AUTHORIZE_THEMSELVES) - OPEN - {0, 1}


async def test_nobody_is_told_or_given_anything(nobody: Client, admin: Client) -> None:
    channel = await (await nobody.pool_for(None)).shared()
    for request, expected in questions():
        response = await channel.call(request, timeout_s=30)
        assert isinstance(response, load_response_class(request.__api_key__, request.__version__))
        codes = codes_in(response)
        name = type(request).__name__
        if expected:
            assert expected <= codes, f"{name}: {response}"
            assert codes <= expected | {ErrorCode.none}, f"{name}: {response}"
        else:
            assert codes <= {ErrorCode.none}, f"{name}: {response}"
            hidden = [getattr(response, field, ()) for field in ("topics", "groups", "transaction_states")]
            assert not any(hidden), f"{name}: {response}"
        if name == "DescribeGroupsRequest":
            assert response.groups[0].authorized_operations == -(2**31)
    assert channel.is_open
    assert set((await admin.metadata()).topics) >= {"t"}
    assert "new" not in (await admin.metadata()).topics


async def test_nobody_may_produce_or_fetch(nobody: Client, admin: Client) -> None:
    batch = encode_batch([NewRecord(None, b"x")])
    await admin.produce("t", 0, batch)
    with pytest.raises(NotAuthorized):
        await nobody.produce("t", 0, batch)
    with pytest.raises(NotAuthorized):
        await nobody.fetch("t", 0, 0)


async def test_nobody_may_make_private_requests(nobody: Client, admin: Client) -> None:
    await SubscriptionClient(admin).create("g", ["t"], {})
    subscriptions = SubscriptionClient(nobody)
    with pytest.raises(NotAuthorized):
        await subscriptions.create("g2", ["t"], {})
    with pytest.raises(NotAuthorized):
        await subscriptions.delete("g")
    assert await subscriptions.describe() == []
    with pytest.raises(NotAuthorized):
        await subscriptions.describe(["g"])
    with pytest.raises(MillstreamError):
        await publish_once(nobody, "t", 0, [NewRecord(None, b"x")])
    for key in (32000, 32001):
        answer = msgspec.msgpack.decode(bytes(await nobody.private(None, key, b"")))
        assert answer["error"] == int(CLUSTER_DENIED)
        assert set(answer) == {"error", "message"}
    assert not msgspec.msgpack.decode(bytes(await admin.private(None, 32001, b"")))["error"]
