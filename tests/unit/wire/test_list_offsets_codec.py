"""Offset look-ups by a client, for one topic or many, against a scripted broker."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.core.errors import BrokerUnreachable, NotLeader, UnknownTopic
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages import codec
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.list_offsets import ListedOffset
from millstream_testing.scripted_broker import LIST_OFFSETS, METADATA, ScriptedBroker


def connect(broker: ScriptedBroker) -> Client:
    return Client.connect(broker.address, client_id="test", timeout_s=60.0)


async def hang_up(header: codec.RequestHeader, frame: memoryview) -> Any:
    raise EOFError


async def look_up(header: codec.RequestHeader, frame: memoryview) -> Any:
    """Respond with the timestamp as an offset, but with an error for partition 7."""
    request = codec.read_request(LIST_OFFSETS, header.version, frame, header.body_at)
    messages: Any = importlib.import_module("kio.schema.list_offsets.v10.response")

    def respond(partition: Any) -> Any:
        code = ErrorCode.unknown_topic_or_partition if partition.partition_index == 7 else ErrorCode.none
        return messages.ListOffsetsPartitionResponse(
            partition_index=partition.partition_index, error_code=code, offset=partition.timestamp + 100, timestamp=5
        )

    topics = tuple(
        messages.ListOffsetsTopicResponse(name=topic.name, partitions=tuple(map(respond, topic.partitions)))
        for topic in request.topics
    )
    return messages.ListOffsetsResponse(throttle_time=timedelta(0), topics=topics)


@pytest.mark.parametrize("newest", range(2, 12))
async def test_offsets_are_looked_up_by_time(broker: ScriptedBroker, newest: int) -> None:
    broker.served[LIST_OFFSETS] = (1, newest)
    broker.handlers[LIST_OFFSETS] = look_up
    async with connect(broker) as client:
        offsets = await client.list_offsets("orders", {0: -2, 1: -1})
    assert {partition: offset_entry.offset for partition, offset_entry in offsets.items()} == {0: 98, 1: 99}
    assert offsets[0].timestamp_ms == 5


async def test_offsets_of_many_topics_are_looked_up_with_few_requests(broker: ScriptedBroker) -> None:
    broker.handlers[LIST_OFFSETS] = look_up
    broker.topics = {f"topic-{at}": 3 for at in range(300)} | {"wide": 8}
    requested = {TopicPartition(f"topic-{at}", PartitionIndex(number)): -2 for at in range(300) for number in range(3)}
    odd = {TopicPartition(*where): -1 for where in (("wide", PartitionIndex(7)), ("gone", PartitionIndex(0)))}
    async with connect(broker) as client:
        offsets = await client.list_offsets_of({**requested, **odd})
        counts = [broker.request_count(key) for key in (METADATA, LIST_OFFSETS)]
        await client.list_offsets_of(requested)
    assert counts == [1, 2]
    # The leaders are known by then.
    assert [broker.request_count(key) for key in (METADATA, LIST_OFFSETS)] == [1, 4]
    assert {result.offset for where in requested if isinstance(result := offsets[where], ListedOffset)} == {98}
    unknown, gone = (offsets[where] for where in odd)
    assert isinstance(unknown, UnknownTopic)
    assert isinstance(gone, NotLeader)


async def test_an_unavailable_leader_is_reported_in_place_of_its_offsets(broker: ScriptedBroker) -> None:
    broker.handlers[LIST_OFFSETS] = hang_up
    where = TopicPartition("orders", PartitionIndex(0))
    async with connect(broker) as client:
        assert isinstance((await client.list_offsets_of({where: -1}))[where], BrokerUnreachable)
        broker.handlers[LIST_OFFSETS] = look_up
        assert isinstance((await client.list_offsets_of({where: -1}))[where], ListedOffset)
        assert await client.list_offsets_of({}) == {}
