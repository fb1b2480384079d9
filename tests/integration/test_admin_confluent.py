"""Requests of confluent-kafka's admin client beyond topics and partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from kio.schema.incremental_alter_configs.v1.request import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from kio.static.primitive import i8

from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

WAIT_S = 60.0


@pytest.fixture(scope="module")
def admin(server: Server) -> AdminClient:
    return AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})


@pytest.fixture
def created(admin: AdminClient, topic: str) -> str:
    (future,) = admin.create_topics([NewTopic(topic, num_partitions=2)]).values()
    future.result(WAIT_S)
    return topic


def refusal(work: Callable[[], object]) -> KafkaError:
    with pytest.raises(KafkaException) as raised:
        work()
    error: KafkaError = raised.value.args[0]
    return error


def test_topics_are_described_with_ids_and_operations(admin: AdminClient, created: str) -> None:
    described = admin.describe_topics(
        TopicCollection([created]), include_authorized_operations=True, request_timeout=WAIT_S
    )
    topic = described[created].result(WAIT_S)
    assert (topic.name, topic.is_internal, len(topic.partitions)) == (created, False, 2)
    assert str(topic.topic_id)
    assert AclOperation.WRITE in topic.authorized_operations
    assert {partition.leader.id for partition in topic.partitions} == {1}
    cluster = admin.describe_cluster(request_timeout=WAIT_S).result(WAIT_S)
    assert (cluster.controller.id, [node.id for node in cluster.nodes]) == (1, [1])


def alter(admin: AdminClient, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    (future,) = admin.incremental_alter_configs([resource]).values()
    future.result(WAIT_S)


def value_of(admin: AdminClient, topic: str, name: str) -> str:
    (future,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    return str(future.result(WAIT_S)[name].value)


@pytest.mark.filterwarnings("ignore:alter_configs has been deprecated")
def test_settings_are_replaced_by_the_old_request(admin: AdminClient, created: str) -> None:
    for settings in ({"retention.ms": "5000", "segment.ms": "7000"}, {"retention.ms": "6000"}):
        resource = ConfigResource(ResourceType.TOPIC, created, set_config=settings)
        (future,) = admin.alter_configs([resource]).values()
        future.result(WAIT_S)
    assert value_of(admin, created, "retention.ms") == "6000"
    assert value_of(admin, created, "segment.ms") == "3600000"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("local.retention.ms", "5", "remote storage is not available"),
        ("local.retention.ms", "1", "a setting of Kafka that Millstream does not have"),
        ("remote.storage.enable", "true", "is always false"),
        ("no.such.setting", "1", "unknown setting 'no.such.setting' of a topic"),
        ("retention.ms", "x", "whole number"),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(
    admin: AdminClient, created: str, name: str, value: str, says: str
) -> None:
    error = refusal(lambda: alter(admin, created, name, value))
    assert error.code() == KafkaError.INVALID_CONFIG
    assert says in error.str()


def test_requests_of_tools_are_accepted(admin: AdminClient, created: str) -> None:
    for name, value in (("unclean.leader.election.enable", "false"), ("segment.jitter.ms", "5")):
        alter(admin, created, name, value)
        assert value_of(admin, created, name) == value


def test_one_node_needs_no_elections(admin: AdminClient, created: str) -> None:
    partition = TopicPartition(created, 0)
    elected = admin.elect_leaders(ElectionType.PREFERRED, [partition]).result(WAIT_S)
    assert elected[partition].code() == KafkaError.ELECTION_NOT_NEEDED


def test_there_are_no_access_rules(admin: AdminClient) -> None:
    rule = AclBinding(
        ResourceType.TOPIC,
        "orders",
        ResourcePatternType.LITERAL,
        "User:a",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    (future,) = admin.create_acls([rule], request_timeout=WAIT_S).values()
    assert refusal(lambda: future.result(WAIT_S)).code() == KafkaError.SECURITY_DISABLED


def test_records_are_deleted_and_offsets_listed(server: Server, admin: AdminClient, created: str) -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for _ in range(5):
        producer.produce(created, b"x", partition=1)
    assert producer.flush(WAIT_S) == 0
    partition = TopicPartition(created, 1, 3)
    (deleted,) = admin.delete_records([partition], request_timeout=WAIT_S).values()
    assert deleted.result(WAIT_S).low_watermark == 3
    where = TopicPartition(created, 1)
    specs: Any = OffsetSpec
    for spec, offset in ((specs.earliest(), 3), (specs.latest(), 5)):
        (listed_offset,) = admin.list_offsets({where: spec}, request_timeout=WAIT_S).values()
        assert listed_offset.result(WAIT_S).offset == offset


async def set_for_all_nodes(server: Server, **settings: str) -> None:
    """Alter as kafka-configs.sh --entity-default does; confluent-kafka refuses the empty name."""
    configs = tuple(
        AlterableConfig(name=name.replace("_", "."), config_operation=i8(0), value=value)
        for name, value in settings.items()
    )
    resource = AlterConfigsResource(resource_type=i8(4), resource_name="", configs=configs)
    async with Client.connect(server.kafka) as client:
        request = IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
        (response,) = (await client.send(None, request)).responses
    assert (response.error_code, response.error_message) == (0, None)


def refused_to(server: Server, topic: str, value: bytes) -> KafkaError | None:
    reported: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    producer.produce(topic, value, on_delivery=lambda error, _: reported.append(error))
    assert producer.flush(WAIT_S) == 0
    return reported[0]


def test_settings_of_nodes_are_changed_while_they_run(start_server: Callable[..., Server]) -> None:
    """As kafka-configs.sh --alter --entity-type brokers, for one node and for all of them."""
    server = start_server()
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    (future,) = admin.create_topics([NewTopic("followed", num_partitions=1)]).values()
    future.result(WAIT_S)

    def set_for_node(name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        (future,) = admin.incremental_alter_configs([resource]).values()
        future.result(WAIT_S)

    def shown(kind: ResourceType, name: str, setting: str) -> tuple[str, int, bool]:
        (future,) = admin.describe_configs([ConfigResource(kind, name)]).values()
        config = future.result(WAIT_S)[setting]
        return config.value, config.source, config.is_read_only

    asyncio.run(set_for_all_nodes(server, log_retention_ms="3600000", message_max_bytes="2000"))
    set_for_node("log.retention.ms", "7200000")
    for _ in range(2):
        assert shown(ResourceType.BROKER, "1", "message.max.bytes") == ("2000", 3, False)
        assert shown(ResourceType.BROKER, "1", "log.retention.ms") == ("7200000", 2, False)
        assert shown(ResourceType.TOPIC, "followed", "retention.ms")[0] == "7200000"
        refused = refused_to(server, "followed", b"x" * 5000)
        assert refused is not None
        assert refused.code() == KafkaError.MSG_SIZE_TOO_LARGE
        # The settings survive a kill.
        server.kill()
        server.start()
    error = refusal(lambda: set_for_node("num.partitions", "7"))
    assert error.code() == KafkaError.INVALID_REQUEST
    assert "num.partitions: set default-partitions in the node's flags" in error.str()
