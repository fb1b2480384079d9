"""DescribeTopicPartitions: paginated, in order, and with Kafka's errors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import TOPIC_OPERATIONS
from millstream.broker.kafka.apis import describe_topic_partitions
from millstream.broker.kafka.apis.describe_topic_partitions import DescribeTopicPartitions
from millstream_testing.api_requests import send_request

MESSAGES: Any = importlib.import_module("kio.schema.describe_topic_partitions.v0.request")


def request(*names: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
    return MESSAGES.DescribeTopicPartitionsRequest(
        topics=tuple(MESSAGES.TopicRequest(name=name) for name in names),
        response_partition_limit=limit,
        cursor=None if cursor is None else MESSAGES.Cursor(topic_name=cursor[0], partition_index=cursor[1]),
    )


@pytest.fixture
async def api(topics: Topics, membership: Membership) -> DescribeTopicPartitions:
    await topics.create("b", partitions=3)
    await topics.create("a", partitions=2)
    await topics.create("c", partitions=1)
    return DescribeTopicPartitions(topics, membership)


def page(response: Any) -> list[tuple[str, list[int]]]:
    return [(topic.name, [partition.partition_index for partition in topic.partitions]) for topic in response.topics]


def cursor_of(response: Any) -> tuple[str, int] | None:
    return response.next_cursor and (response.next_cursor.topic_name, response.next_cursor.partition_index)


async def test_a_topic_is_described(api: DescribeTopicPartitions, topics: Topics) -> None:
    response = await send_request(api, request("b"))
    (topic,) = response.topics
    known = topics.get("b")
    assert known is not None
    assert (topic.error_code, topic.topic_id, topic.is_internal) == (ErrorCode.none, known.topic_id, False)
    assert topic.topic_authorized_operations == TOPIC_OPERATIONS
    for index, partition in enumerate(topic.partitions):
        assert (partition.error_code, partition.partition_index) == (ErrorCode.none, index)
        assert (partition.leader_id, partition.leader_epoch) == (5, 0)
        assert (partition.replica_nodes, partition.isr_nodes, partition.offline_replicas) == ((5,), (5,), ())
        assert (partition.eligible_leader_replicas, partition.last_known_elr) == ((), ())
    assert response.next_cursor is None


async def test_without_names_all_topics_are_described_in_order(api: DescribeTopicPartitions) -> None:
    assert page(await send_request(api, request())) == [("a", [0, 1]), ("b", [0, 1, 2]), ("c", [0])]


@pytest.mark.parametrize("names", [(), ("c", "a", "b", "a")])
@pytest.mark.parametrize("limit", range(-1, 8))
async def test_the_pages_cover_everything_once(
    api: DescribeTopicPartitions, names: tuple[str, ...], limit: int
) -> None:
    partition_list: list[tuple[str, int]] = []
    cursor: tuple[str, int] | None = None
    for _ in range(10):
        response = await send_request(api, request(*names, limit=limit, cursor=cursor))
        partitions = [(name, index) for name, indexes in page(response) for index in indexes]
        assert 0 < len(partitions) <= max(1, limit)
        partition_list += partitions
        cursor = cursor_of(response)
        if cursor is None:
            break
    assert partition_list == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]


async def test_a_page_is_never_larger_than_the_brokers_own_limit(
    api: DescribeTopicPartitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe_topic_partitions, "PARTITIONS_MAX", 4)
    response = await send_request(api, request(limit=2000))
    assert page(response) == [("a", [0, 1]), ("b", [0, 1])]
    assert cursor_of(response) == ("b", 2)


async def test_a_cursor_of_a_deleted_topic_continues_behind_it(api: DescribeTopicPartitions, topics: Topics) -> None:
    await topics.delete("b")
    assert page(await send_request(api, request(cursor=("b", 1)))) == [("c", [0])]


async def test_missing_topics_are_reported_beside_the_others(api: DescribeTopicPartitions) -> None:
    response = await send_request(api, request("a", "bad name", "nope", limit=1))
    reported = {topic.name: topic.error_code for topic in response.topics}
    assert reported == {"a": ErrorCode.none}
    assert cursor_of(response) == ("a", 1)
    response = await send_request(api, request("a", "bad name", "nope", limit=2, cursor=("a", 1)))
    assert {topic.name: topic.error_code for topic in response.topics} == {
        "a": ErrorCode.none,
        "bad name": ErrorCode.invalid_topic_exception,
        "nope": ErrorCode.unknown_topic_or_partition,
    }


@pytest.mark.parametrize(
    "asked",
    [
        request("a", "b", cursor=("c", 0)),
        request("a", "b", cursor=("a", -1)),
    ],
)
async def test_an_invalid_request_gives_its_error_to_each_topic(api: DescribeTopicPartitions, asked: Any) -> None:
    response = await send_request(api, asked)
    assert [(topic.name, topic.error_code, topic.partitions) for topic in response.topics] == [
        ("a", ErrorCode.invalid_request, ()),
        ("b", ErrorCode.invalid_request, ()),
    ]
