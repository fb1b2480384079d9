"""Metadata in every version."""

from __future__ import annotations

import importlib
import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import CLUSTER_OPERATIONS, NOT_REQUESTED, TOPIC_OPERATIONS
from millstream.broker.kafka.apis.metadata import Metadata
from millstream.core.config import Config
from millstream_testing.api_requests import send_request

VERSIONS = range(14)


def request(version: int, *names: str | uuid.UUID, every: bool = False, **flags: bool) -> Any:
    messages: Any = importlib.import_module(f"kio.schema.metadata.v{version}.request")
    topics = []
    for name in names:
        by_id = {"topic_id": name if isinstance(name, uuid.UUID) else None} if version >= 10 else {}
        topics.append(messages.MetadataRequestTopic(name=None if isinstance(name, uuid.UUID) else name, **by_id))
    if version >= 4:
        flags.setdefault("allow_auto_topic_creation", False)
    if version >= 8:
        flags.setdefault("include_topic_authorized_operations", False)
    if 8 <= version <= 10:
        flags.setdefault("include_cluster_authorized_operations", False)
    return messages.MetadataRequest(topics=None if every and version else tuple(topics), **flags)


@pytest.fixture
def api(topics: Topics, membership: Membership) -> Metadata:
    return Metadata(topics, membership)


@pytest.mark.parametrize("version", VERSIONS)
async def test_nodes_topics_and_leaders_are_reported(api: Metadata, topics: Topics, version: int) -> None:
    topic = await topics.create("orders", partitions=3)
    response = await send_request(api, request(version, "orders"))
    assert [(broker.node_id, broker.host, broker.port) for broker in response.brokers] == [(5, "broker.example", 9092)]
    (described,) = response.topics
    assert (described.name, described.error_code) == ("orders", ErrorCode.none)
    assert [partition.partition_index for partition in described.partitions] == [0, 1, 2]
    for partition in described.partitions:
        assert (partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (5, (5,), (5,))
        assert version < 7 or partition.leader_epoch == 0
    assert version < 1 or (response.controller_id, response.brokers[0].rack) == (5, "cellar")
    assert version < 1 or described.is_internal is False
    assert version < 2 or response.cluster_id == "test-cluster"
    assert version < 10 or described.topic_id == topic.topic_id
    assert version < 8 or described.topic_authorized_operations == NOT_REQUESTED
    assert version < 13 or response.error_code is ErrorCode.none


@pytest.mark.parametrize("version", VERSIONS)
async def test_metadata_of_all_topics_or_none(api: Metadata, topics: Topics, version: int) -> None:
    await topics.create("b")
    await topics.create("a")
    everything = await send_request(api, request(version, every=True))
    assert [topic.name for topic in everything.topics] == ["a", "b"]
    nothing = await send_request(api, request(version))
    assert [topic.name for topic in nothing.topics] == (["a", "b"] if version == 0 else [])


@pytest.mark.parametrize("version", VERSIONS)
async def test_missing_topics_are_created_when_allowed(api: Metadata, topics: Topics, version: int) -> None:
    flags = {"allow_auto_topic_creation": True} if version >= 4 else {}
    (described,) = (await send_request(api, request(version, "fresh", **flags))).topics
    assert described.error_code is ErrorCode.none
    assert len(described.partitions) == 2
    assert topics.get("fresh") is not None


async def test_missing_topics_are_reported_when_creation_is_not_allowed(api: Metadata, topics: Topics) -> None:
    response = await send_request(api, request(12, "missing", "bad name!", ""))
    assert [topic.error_code for topic in response.topics] == [
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_topic_exception,
    ]
    assert topics.all() == []


class TestWithoutAutoCreation:
    @pytest.fixture
    def config(self) -> Config:
        return Config(auto_create_topics=False)

    async def test_missing_topics_stay_missing(self, api: Metadata, topics: Topics) -> None:
        response = await send_request(api, request(12, "missing", "bad name!", allow_auto_topic_creation=True))
        assert [topic.error_code for topic in response.topics] == [
            ErrorCode.unknown_topic_or_partition,
            ErrorCode.invalid_topic_exception,
        ]
        assert topics.all() == []


async def test_invalid_names_are_reported(api: Metadata, topics: Topics) -> None:
    metadata_request = request(9, "bad name!", "__consumer_offsets", allow_auto_topic_creation=True)
    invalid, internal = (await send_request(api, metadata_request)).topics
    assert invalid.error_code is ErrorCode.invalid_topic_exception
    assert internal.error_code is not ErrorCode.none
    assert internal.is_internal
    assert topics.all() == []


@pytest.mark.parametrize("version", [12, 13])
async def test_topics_can_be_requested_by_id(api: Metadata, topics: Topics, version: int) -> None:
    topic, unknown = await topics.create("orders"), uuid.uuid4()
    topic_entry, missing = (await send_request(api, request(version, topic.topic_id, unknown))).topics
    assert (topic_entry.name, topic_entry.topic_id, topic_entry.error_code) == (
        "orders",
        topic.topic_id,
        ErrorCode.none,
    )
    assert (missing.name, missing.topic_id) == (None, unknown)
    assert missing.error_code is ErrorCode.unknown_topic_id


@pytest.mark.parametrize("version", [10, 11])
async def test_ids_in_old_versions_are_refused(api: Metadata, topics: Topics, version: int) -> None:
    topic = await topics.create("orders")
    (refused,) = (await send_request(api, request(version, topic.topic_id))).topics
    assert refused.error_code is ErrorCode.invalid_request


async def test_a_topic_without_name_and_id_is_skipped(api: Metadata) -> None:
    messages: Any = importlib.import_module("kio.schema.metadata.v12.request")
    nameless = messages.MetadataRequestTopic(name=None, topic_id=None)
    versioned = messages.MetadataRequest(topics=(nameless,), include_topic_authorized_operations=False)
    assert (await send_request(api, versioned)).topics == ()


async def test_a_topic_named_twice_is_reported_once(api: Metadata, topics: Topics) -> None:
    await topics.create("orders")
    assert len((await send_request(api, request(5, "orders", "orders"))).topics) == 1


@pytest.mark.parametrize("version", [8, 9, 10])
async def test_operations_are_reported_on_request(api: Metadata, topics: Topics, version: int) -> None:
    await topics.create("orders")
    versioned = request(
        version,
        "orders",
        "missing",
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    response = await send_request(api, versioned)
    assert response.cluster_authorized_operations == CLUSTER_OPERATIONS
    assert [topic.topic_authorized_operations for topic in response.topics] == [TOPIC_OPERATIONS] * 2
    response = await send_request(api, request(version, "orders"))
    assert response.cluster_authorized_operations == response.topics[0].topic_authorized_operations == NOT_REQUESTED
