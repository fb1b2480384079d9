"""Every request of kafka-python's admin client against a single node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    NewTopic,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from millstream_testing.server import Server


@pytest.fixture(scope="module")
def admin(server: Server) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=server.kafka)
    yield client
    client.close()


@pytest.fixture
def created(admin: KafkaAdminClient, topic: str) -> str:
    admin.create_topics([NewTopic(topic, num_partitions=3, replication_factor=1)])
    return topic


def refused(work: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        work()
    return str(raised.value)


def test_the_broker_is_recognised_as_kafka_4(server: Server, admin: KafkaAdminClient) -> None:
    features = admin.describe_features()
    assert features["metadata.version"]["finalized"] == (25, 25)
    assert features["metadata.version"]["finalized_epoch"] >= 25
    assert features["transaction.version"]["finalized"] == (2, 2)
    assert admin.get_broker_version_data(1).broker_version >= (4, 0)


def test_features_cannot_be_changed(admin: KafkaAdminClient) -> None:
    admin.update_features({"metadata.version": 25})
    refused(lambda: admin.update_features({"metadata.version": 26}), kafka_errors.InvalidUpdateVersionError)
    refused(lambda: admin.update_features({"no.such": 1}), kafka_errors.InvalidUpdateVersionError)


def test_log_folders_report_sizes(server: Server, admin: KafkaAdminClient, created: str) -> None:
    producer = KafkaProducer(bootstrap_servers=server.kafka, acks="all")
    producer.send(created, bytes(1000), partition=1).get(30)
    producer.close()
    (node,) = admin.describe_log_dirs({created: [0, 1]})
    (folder,) = node["log_dirs"]
    assert (node["broker"], folder["error_code"], folder["log_dir"]) == (1, 0, str(server.data))
    (described,) = folder["topics"]
    sizes = {partition["partition_index"]: partition["partition_size"] for partition in described["partitions"]}
    assert sizes[0] == 0
    assert sizes[1] > 1000
    assert folder["total_bytes"] > folder["usable_bytes"] > 0


def test_producers_are_described(server: Server, admin: KafkaAdminClient, created: str) -> None:
    producer = KafkaProducer(bootstrap_servers=server.kafka, acks="all", enable_idempotence=True)
    for _ in range(3):
        producer.send(created, b"x", partition=0).get(30)
    states = admin.describe_producers([TopicPartition(created, 0), TopicPartition(created, 1)])
    producer.close()
    (active,) = states[TopicPartition(created, 0)].active_producers
    assert (active.producer_epoch, active.last_sequence) == (0, 2)
    assert active.producer_id >= 0
    assert states[TopicPartition(created, 1)].active_producers == []


def test_topics_are_paginated(admin: KafkaAdminClient, created: str) -> None:
    first = admin.describe_topic_partitions([created], response_partition_limit=2)
    assert first["next_cursor"] == {"topic_name": created, "partition_index": 2}
    second = admin.describe_topic_partitions([created], response_partition_limit=2, cursor=first["next_cursor"])
    assert second["next_cursor"] is None
    indexes = [
        partition["partition_index"] for page in (first, second) for partition in page["topics"][0]["partitions"]
    ]
    assert indexes == [0, 1, 2]


def settings_of(admin: KafkaAdminClient, topic: str) -> dict[str, Any]:
    described = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    configs: dict[str, Any] = described["topic"][topic]
    return configs


@pytest.mark.parametrize("incremental", [True, False])
def test_settings_are_changed_in_both_ways(admin: KafkaAdminClient, created: str, incremental: bool) -> None:
    for settings in ({"retention.ms": "5000"}, {"millstream.owner": "me"}):
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, created, settings)], incremental=incremental)
    shown = settings_of(admin, created)
    assert (shown["retention.ms"]["value"], shown["millstream.owner"]["value"]) == ("5000", "me")
    reset = ConfigResource(ConfigResourceType.TOPIC, created, ["retention.ms"])
    admin.reset_configs([reset], incremental=incremental)
    assert settings_of(admin, created).keys() == {"millstream.owner"}


@pytest.mark.parametrize("incremental", [True, False])
def test_settings_of_a_node_are_changed_in_both_ways(admin: KafkaAdminClient, created: str, incremental: bool) -> None:
    admin.alter_configs(
        [ConfigResource(ConfigResourceType.BROKER, "1", {"log.retention.bytes": "5000"})], incremental=incremental
    )
    described = admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, "1", ["log.retention.bytes"])])
    assert described["broker"]["1"]["log.retention.bytes"]["value"] == "5000"
    reset = ConfigResource(ConfigResourceType.BROKER, "1", ["log.retention.bytes"])
    admin.reset_configs([reset], incremental=incremental)
    described = admin.describe_configs(
        [ConfigResource(ConfigResourceType.BROKER, "1", ["log.retention.bytes"])], config_filter="all"
    )
    assert described["broker"]["1"]["log.retention.bytes"]["value"] == "-1"


def test_resources_with_settings_are_listed(admin: KafkaAdminClient, created: str) -> None:
    resources = admin.list_config_resources()
    assert created in resources["topic"]
    assert resources["broker"] == ["1"]
    assert admin.list_config_resources(["CLIENT_METRICS"]) == {}


def test_one_node_needs_no_elections_and_moves_nothing(admin: KafkaAdminClient, created: str) -> None:
    (elected,) = admin.elect_leaders(0, {created: [0]}).replica_election_results
    assert [partition.error_code for partition in elected.partition_result] == [
        kafka_errors.ElectionNotNeededError.errno
    ]
    partition, other = TopicPartition(created, 0), TopicPartition(created, 1)
    moved = admin.alter_partition_reassignments({partition: [1], other: [2]})
    assert moved[partition] is None
    assert moved[other].errno == 39
    assert admin.list_partition_reassignments() == {}


def test_there_are_no_access_rules(admin: KafkaAdminClient) -> None:
    any_rule = ACLFilter(
        principal=None,
        host="*",
        operation=ACLOperation.ANY,
        permission_type=ACLPermissionType.ANY,
        resource_pattern=ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY),
    )
    with pytest.raises(kafka_errors.SecurityDisabledError):
        _raise_second(admin.describe_acls(any_rule))
    rule = ACL(
        principal="User:a",
        host="*",
        operation=ACLOperation.READ,
        permission_type=ACLPermissionType.ALLOW,
        resource_pattern=ResourcePattern(ResourceType.TOPIC, "orders"),
    )
    outcome = admin.create_acls([rule])
    assert outcome["succeeded"] == []
    assert "SecurityDisabledError" in repr(outcome["failed"])


def _raise_second(outcome: tuple[Any, Any]) -> None:
    raise outcome[1]
