"""Topics and their settings through confluent-kafka's and kafka-python's admin clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic
from conformance.question import Broker
from kafka.admin import KafkaAdminClient
from kafka.admin import NewTopic as KafkaPythonNewTopic
from kafka.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError

from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture
def admin(server: Server) -> AdminClient:
    return AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})


@pytest.fixture
def other_admin(server: Server) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=server.kafka)
    yield client
    client.close()


def create(admin: AdminClient, name: str, **settings: Any) -> None:
    (created,) = admin.create_topics([NewTopic(name, **settings)]).values()
    created.result(WAIT_S)


def delete(admin: AdminClient, name: str) -> None:
    (deleted,) = admin.delete_topics([name]).values()
    deleted.result(WAIT_S)


def code_of(work: Callable[[], object]) -> int:
    with pytest.raises(KafkaException) as raised:
        work()
    return int(raised.value.args[0].code())


def test_create_list_describe_delete(admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=3, replication_factor=1)
    described = admin.list_topics(topic, timeout=WAIT_S).topics[topic]
    assert sorted(described.partitions) == [0, 1, 2]
    for partition in described.partitions.values():
        assert (partition.leader, partition.replicas, partition.isrs) == (1, [1], [1])
    assert topic in admin.list_topics(timeout=WAIT_S).topics
    delete(admin, topic)
    wait_until(lambda: topic not in admin.list_topics(timeout=WAIT_S).topics)


def test_a_deleted_topic_can_be_recreated_and_is_empty(server: Server, admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=1)
    first = produce_one(server, topic)
    assert produce_one(server, topic) == first + 1
    delete(admin, topic)
    create(admin, topic, num_partitions=1)
    assert produce_one(server, topic) == 0


def produce_one(server: Server, topic: str) -> int:
    """Produce with its own client and return the offset."""
    offsets: list[int | None] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    producer.produce(topic, b"x", partition=0, on_delivery=lambda _, message: offsets.append(message.offset()))
    assert producer.flush(WAIT_S) == 0
    assert offsets[0] is not None
    return offsets[0]


def test_invalid_topics_are_refused(admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=1)
    assert code_of(lambda: create(admin, topic, num_partitions=1)) == KafkaError.TOPIC_ALREADY_EXISTS
    assert code_of(lambda: create(admin, "no spaces", num_partitions=1)) == KafkaError.TOPIC_EXCEPTION
    invalid = f"{topic}-invalid"
    assert code_of(lambda: create(admin, invalid, num_partitions=0)) == KafkaError.INVALID_PARTITIONS
    assert (
        code_of(lambda: create(admin, invalid, num_partitions=1, replication_factor=5))
        == KafkaError.INVALID_REPLICATION_FACTOR
    )
    assert (
        code_of(lambda: create(admin, invalid, num_partitions=1, config={"retention.ms": "soon"}))
        == KafkaError.INVALID_CONFIG
    )
    assert code_of(lambda: delete(admin, f"{topic}-absent")) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_validating_creates_nothing(admin: AdminClient, topic: str) -> None:
    (validated,) = admin.create_topics([NewTopic(topic, 1, 1)], validate_only=True).values()
    validated.result(WAIT_S)
    assert topic not in admin.list_topics(timeout=WAIT_S).topics


def test_settings_are_described_and_changed(admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=1, config={"retention.ms": "60000"})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    assert settings_of(admin, resource)["retention.ms"] == "60000"
    assert settings_of(admin, resource)["cleanup.policy"] == "delete"
    change = ConfigEntry("retention.ms", "120000", incremental_operation=AlterConfigOpType.SET)
    alter(admin, ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change]))
    assert settings_of(admin, resource)["retention.ms"] == "120000"
    back = ConfigEntry("retention.ms", "", incremental_operation=AlterConfigOpType.DELETE)
    alter(admin, ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[back]))
    assert settings_of(admin, resource)["retention.ms"] == str(7 * 24 * 3600 * 1000)


def settings_of(admin: AdminClient, resource: ConfigResource) -> dict[str, str | None]:
    (described,) = admin.describe_configs([resource]).values()
    return {name: entry.value for name, entry in described.result(WAIT_S).items()}


def alter(admin: AdminClient, resource: ConfigResource) -> None:
    (altered,) = admin.incremental_alter_configs([resource]).values()
    altered.result(WAIT_S)


def test_partitions_are_added_but_never_removed(admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=1)
    (grown,) = admin.create_partitions([NewPartitions(topic, 3)]).values()
    grown.result(WAIT_S)
    assert len(admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions) == 3
    (shrunk,) = admin.create_partitions([NewPartitions(topic, 2)]).values()
    assert code_of(lambda: shrunk.result(WAIT_S)) == KafkaError.INVALID_PARTITIONS


def test_the_cluster_is_described(server: Server, admin: AdminClient) -> None:
    cluster = admin.describe_cluster(request_timeout=WAIT_S).result(WAIT_S)
    assert cluster.cluster_id
    (node,) = cluster.nodes
    assert f"{node.host}:{node.port}" == server.kafka
    assert cluster.controller.id == node.id


def test_kafka_python_creates_lists_and_deletes(other_admin: KafkaAdminClient, topic: str) -> None:
    other_admin.create_topics([KafkaPythonNewTopic(name=topic, num_partitions=2, replication_factor=1)])
    assert topic in other_admin.list_topics()
    (described,) = other_admin.describe_topics([topic])
    assert len(described["partitions"]) == 2
    with pytest.raises(TopicAlreadyExistsError):
        other_admin.create_topics([KafkaPythonNewTopic(name=topic, num_partitions=2, replication_factor=1)])
    other_admin.delete_topics([topic])
    assert topic not in other_admin.list_topics()
    with pytest.raises(UnknownTopicOrPartitionError):
        other_admin.delete_topics([topic])


def test_settings_of_a_consumer_group_do_not_declare_a_subscription(server: Server, topic: str) -> None:
    """No client of these tests can send them; Kafka's kafka-configs.sh does, with `--entity-type groups`."""
    broker, group = Broker(server.kafka), {"resource_type": 32, "resource_name": topic}
    session = {"name": "consumer.session.timeout.ms", "config_operation": 0, "value": "9000"}
    (altered,) = broker.ask(44, 1, {"resources": [{**group, "configs": [session]}]})["responses"]
    assert altered["error_code"] == "none"
    (described,) = broker.ask(32, 4, {"resources": [group]})["results"]
    assert ("consumer.session.timeout.ms", "9000") in [
        (config["name"], config["value"]) for config in described["configs"]
    ]
    subscriptions = CommandLine(server.kafka)("subscription", "list", "--json").document["subscriptions"]
    assert topic not in [subscription["subscription"] for subscription in subscriptions]


def test_a_node_has_settings_under_kafkas_names(admin: AdminClient) -> None:
    (described,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, "1")]).values()
    entries = described.result(WAIT_S)
    assert {"log.retention.ms", "message.max.bytes", "num.partitions", "min.insync.replicas"} <= entries.keys()


def test_moving_replicas_between_folders_gets_a_response(server: Server, admin: AdminClient, topic: str) -> None:
    create(admin, topic, num_partitions=1, replication_factor=1)
    folders = [{"path": "/elsewhere", "topics": [{"name": topic, "partitions": [0]}]}]
    (moved,) = Broker(server.kafka).ask(34, 2, {"dirs": folders})["results"]
    assert [partition["error_code"] for partition in moved["partitions"]] == ["log_dir_not_found"]
