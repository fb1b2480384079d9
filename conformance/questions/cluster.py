"""Requests about the broker itself and its topics."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import BAD_NAME, NOWHERE, TOPIC, UNKNOWN_ID, Key, Question, question


def _metadata(about: str, version: int, *topics: dict[str, Any], **more: Any) -> Question:
    return question(about, Key.METADATA, version, topics=topics, **more)


def _pages(about: str, topic: str, limit: int, **more: Any) -> Question:
    topics = [{"name": topic}]
    return question(about, Key.DESCRIBE_TOPIC_PARTITIONS, 0, topics=topics, response_partition_limit=limit, **more)


def _producers(about: str, topic: str, partition: int) -> Question:
    topics = [{"name": topic, "partition_indexes": [partition]}]
    return question(about, Key.DESCRIBE_PRODUCERS, 0, topics=topics)


def _log_dirs(about: str, *topics: dict[str, Any]) -> Question:
    return question(about, Key.DESCRIBE_LOG_DIRS, 4, topics=topics)


def _elect(about: str, topics: list[dict[str, Any]] | None, kind: int = 0) -> Question:
    return question(about, Key.ELECT_LEADERS, 2, election_type=kind, topic_partitions=topics, timeout=1000)


QUESTIONS = (
    question("bad software name", Key.API_VERSIONS, 3, client_software_name="-b-", client_software_version="1"),
    _metadata("bad name", 1, {"name": BAD_NAME}),
    _metadata("bad name", 12, {"name": BAD_NAME}),
    *(_metadata("unknown", version, {"name": NOWHERE}, allow_auto_topic_creation=False) for version in (4, 9, 12)),
    _metadata("fixture", 12, {"name": TOPIC}),
    _metadata("fixture twice", 12, {"name": TOPIC}, {"name": TOPIC}),
    _metadata("name and unknown id", 12, {"name": "nobody", "topic_id": UNKNOWN_ID}),
    _metadata("unknown id", 12, {"name": None, "topic_id": UNKNOWN_ID}),
    _metadata("neither name nor id", 12, {"name": None}),
    _metadata("empty name", 12, {"name": ""}),
    _metadata("no topics", 12),
    _metadata(
        "what one may do",
        8,
        {"name": TOPIC},
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=True,
    ),
    _metadata("what one may do", 12, {"name": TOPIC}, include_topic_authorized_operations=True),
    _pages("fixture", TOPIC, 10),
    _pages("one at a time", TOPIC, 1),
    _pages("from a cursor", TOPIC, 5, cursor={"topic_name": TOPIC, "partition_index": 1}),
    _pages("from a bad cursor", TOPIC, 5, cursor={"topic_name": TOPIC, "partition_index": -1}),
    _pages("unknown", NOWHERE, 10),
    _pages("bad name", BAD_NAME, 10),
    question("plain", Key.DESCRIBE_CLUSTER, 0),
    question("what one may do", Key.DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=True),
    question("controllers", Key.DESCRIBE_CLUSTER, 1, endpoint_type=2),
    question("unknown endpoints", Key.DESCRIBE_CLUSTER, 1, endpoint_type=9),
    _producers("unknown topic", NOWHERE, 0),
    _producers("unknown partition", TOPIC, 9),
    _producers("bad name", BAD_NAME, 0),
    _log_dirs("fixture", {"topic": TOPIC, "partitions": [0, 9]}),
    _log_dirs("unknown topic", {"topic": NOWHERE, "partitions": [0]}),
    _log_dirs("no topics"),
    question(
        "without an authorizer",
        Key.DESCRIBE_ACLS,
        2,
        resource_type_filter=1,
        pattern_type_filter=1,
        operation=1,
        permission_type=1,
    ),
    question("all", Key.LIST_PARTITION_REASSIGNMENTS, 0, timeout=1000, topics=None),
    question(
        "unknown topic",
        Key.LIST_PARTITION_REASSIGNMENTS,
        0,
        timeout=1000,
        topics=[{"name": NOWHERE, "partition_indexes": [0]}],
    ),
    _elect("fixture", [{"topic": TOPIC, "partitions": [0, 9]}]),
    _elect("unknown topic", [{"topic": NOWHERE, "partitions": [0]}]),
    _elect("unknown type", [{"topic": TOPIC, "partitions": [0]}], 7),
    _elect("all", None),
)
