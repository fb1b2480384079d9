"""Every request of aiokafka's admin client against a single node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from millstream_testing.server import Server


@pytest.fixture
async def admin(server: Server) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=server.kafka)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def created(admin: AIOKafkaAdminClient, topic: str) -> str:
    response = await admin.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    assert [error[1] for error in response.topic_errors] == [0]
    return topic


async def test_the_cluster_and_its_topics(admin: AIOKafkaAdminClient, created: str) -> None:
    cluster = await admin.describe_cluster()
    assert cluster["controller_id"] == 1
    assert [node["node_id"] for node in cluster["brokers"]] == [1]
    assert created in await admin.list_topics()
    (described,) = await admin.describe_topics([created])
    assert described["topic"] == created
    assert sorted(partition["partition"] for partition in described["partitions"]) == [0, 1]


async def settings_of(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    ((code, _message, _kind, name, entries),) = response.resources
    assert (code, name) == (0, topic)
    return {entry[0]: entry[1] for entry in entries}


async def test_settings_are_replaced(admin: AIOKafkaAdminClient, created: str) -> None:
    async def alter(**settings: str) -> Any:
        named = {name.replace("_", "."): value for name, value in settings.items()}
        (response,) = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, created, named)])
        ((code, message, _kind, _name),) = response.resources
        return code, message

    assert (await alter(retention_ms="5000", segment_ms="7000"))[0] == 0
    settings = await settings_of(admin, created)
    assert (settings["retention.ms"], settings["segment.ms"]) == ("5000", "7000")
    # This request replaces all settings: those that it does not name return to their default.
    assert (await alter(retention_ms="6000"))[0] == 0
    settings = await settings_of(admin, created)
    assert (settings["retention.ms"], settings["segment.ms"]) == ("6000", "3600000")
    code, message = await alter(local_retention_ms="5")
    assert code == 40
    assert "remote storage is not available" in message


async def test_partitions_are_added_and_records_deleted(
    server: Server, admin: AIOKafkaAdminClient, created: str
) -> None:
    response = await admin.create_partitions({created: NewPartitions(4)})
    assert [error[1] for error in response.topic_errors] == [0]
    async with AIOKafkaProducer(bootstrap_servers=server.kafka) as producer:
        for _ in range(3):
            await producer.send_and_wait(created, b"x", partition=3)
    partition = TopicPartition(created, 3)
    assert await admin.delete_records({partition: RecordsToDelete(before_offset=2)}) == {partition: 2}


async def test_topics_are_deleted(admin: AIOKafkaAdminClient, created: str) -> None:
    response = await admin.delete_topics([created])
    assert [error[1] for error in response.topic_error_codes] == [0]
    assert created not in await admin.list_topics()
