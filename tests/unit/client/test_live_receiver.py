"""A live listener requires all of its topics, and does not keep messages after handing them out."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.client.admin import tailer
from millstream.client.admin.cluster_status import DamagedOffsets
from millstream.client.live_receiver import LiveReceiver
from millstream.client.message import Lease
from millstream.core.errors import CorruptBatch, UnknownTopic
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.tasks import run_until_first
from millstream.core.topic import TopicPartition
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.fetch import FetchedPartition

PLACE = TopicPartition("orders", PartitionIndex(0))


async def test_received_messages_are_not_kept() -> None:
    client: Any = None
    receiver = LiveReceiver(client, ["orders"])
    receiver._positions[PLACE] = Offset(0)
    receiver._topic_ids["orders"] = topic_id = bytes(range(16))
    for number in range(20):
        batch = encode_batch([NewRecord(None, b"value")] * 100, base_offset=number * 100)
        end = Offset(number * 100 + 100)
        receiver._receive({PLACE: FetchedPartition(memoryview(batch), end, Offset(0), end)})
        assert len(receiver.take_many(1000)) == 100
    gc.collect()
    assert not [lease for lease in gc.get_objects() if type(lease) is Lease and lease._topic_id is topic_id]


@pytest.mark.parametrize("topics", [["orders", "missing", "gone"], ["missing", "orders", "gone"]])
async def test_a_missing_topic_is_named_wherever_it_is_listed(topics: list[str]) -> None:
    class Cluster:
        async def metadata(self, topics: object) -> Any:
            return SimpleNamespace(topics={"orders": SimpleNamespace(topic_id=UUID(int=1), partitions={})})

    client: Any = Cluster()
    receiver = LiveReceiver(client, topics)
    with pytest.raises(UnknownTopic, match="topic 'missing', 'gone' does not exist"):
        await receiver.start()


async def test_offsets_that_the_disk_lost_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cluster:
        async def fetch_many(self, positions: dict[TopicPartition, Offset], limits: object) -> Any:
            if positions[PLACE] < 10:
                raise CorruptBatch("the broker responded with CORRUPT_MESSAGE")
            batch = memoryview(encode_batch([NewRecord(None, b"after")], base_offset=10))
            receiver._moved.set()
            return {PLACE: FetchedPartition(batch, Offset(11), Offset(0), Offset(11))}

    async def step_over(client: object, topic: str, positions: dict[TopicPartition, Offset]) -> list[DamagedOffsets]:
        positions[PLACE] = Offset(10)
        return [DamagedOffsets(topic, 0, 0, 10)]

    monkeypatch.setattr(tailer, "step_over_damage", step_over)
    client: Any = Cluster()
    receiver = LiveReceiver(client, ["orders"])
    receiver._positions[PLACE] = Offset(0)
    receiver._topic_ids["orders"] = b"0" * 16
    await run_until_first((receiver._moved.wait(), receiver._read_from_node([PLACE])))
    assert [message.value for message in receiver.take_many(10)] == [b"after"]
