"""Tailing a topic: one poll per node, and partitions that are added meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from uuid import UUID

import pytest

from millstream.client.admin import tailer as following
from millstream.client.admin.tailer import Tailer
from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata
from millstream.protocol.wire.fetch import FetchedPartition, FetchLimits
from millstream_testing.waiting import until

ONE, TWO = NodeId(1), NodeId(2)
HANG_S = 60.0


class Cluster(Client):
    """Partitions with their leaders and messages; a fetch waits until there is a message."""

    def __init__(self, leaders: dict[int, NodeId]) -> None:
        self.leaders = leaders
        self.logs: dict[int, list[bytes]] = {}
        self.changed = asyncio.Condition()
        self.away = 0
        self.polls = 0

    async def publish(self, partition: int, value: bytes) -> None:
        async with self.changed:
            self.logs.setdefault(partition, []).append(value)
            self.changed.notify_all()

    async def move(self, partition: int, leader: NodeId) -> None:
        async with self.changed:
            self.leaders[partition] = leader
            self.changed.notify_all()

    async def metadata(self, topics: Iterable[str] | None = (), **_: object) -> ClusterMetadata:
        if self.away:
            self.away -= 1
            raise BrokerUnreachable("away")
        partitions = {
            PartitionIndex(index): PartitionMetadata(
                partition=PartitionIndex(index), leader_id=leader, leader_epoch=Epoch(0), replicas=(), in_sync=()
            )
            for index, leader in self.leaders.items()
        }
        topic = TopicMetadata(name="t", topic_id=UUID(int=1), is_internal=False, partitions=partitions)
        return ClusterMetadata(cluster_id="", controller_id=ONE, nodes={}, topics={"t": topic}, errors={})

    async def fetch_many(
        self, positions: Mapping[TopicPartition, Offset], limits: FetchLimits
    ) -> dict[TopicPartition, FetchedPartition]:
        """Respond as a node that leads all of them; partitions that have moved away are missing from the response."""
        leaders = {where: self.leaders[where.partition] for where in positions}
        self.polls += 1
        try:
            async with self.changed:
                while True:
                    led = [where for where in positions if self.leaders[where.partition] == leaders[where]]
                    responses = {where: self._read(where, positions[where]) for where in led}
                    if len(responses) < len(positions) or any(len(response.records) for response in responses.values()):
                        return responses
                    await self.changed.wait()
        finally:
            self.polls -= 1

    def _read(self, where: TopicPartition, at: Offset) -> FetchedPartition:
        values = self.logs.get(where.partition, [])[at:]
        records = encode_batch([NewRecord(None, value) for value in values], base_offset=at) if values else b""
        return FetchedPartition(memoryview(records), Offset(0), Offset(0), Offset(0))


async def test_messages_of_one_node_do_not_wait_for_the_others() -> None:
    cluster = Cluster({0: ONE, 1: TWO})
    tailer = Tailer(cluster, "t", {0: 0, 1: 0}, patience_s=HANG_S, note=pytest.fail)
    async with asyncio.timeout(HANG_S), aclosing(tailer.follow()) as messages:
        for partition, value in ((0, b"a"), (1, b"b"), (1, b"c"), (0, b"d")):
            await cluster.publish(partition, value)
            message = await anext(messages)
            assert (message.partition, message.record.value) == (partition, value)
    assert cluster.polls == 0, "nothing is requested when there is no reader any more"


@pytest.mark.parametrize("is_whole", [True, False])
async def test_added_partitions_are_followed_from_their_start(monkeypatch: pytest.MonkeyPatch, is_whole: bool) -> None:
    monkeypatch.setattr(following, "CHECK_INTERVAL_S", 0.0)
    cluster = Cluster({0: ONE})
    tailer = Tailer(cluster, "t", {0: 0}, patience_s=HANG_S, is_whole=is_whole, note=pytest.fail)
    async with asyncio.timeout(HANG_S), aclosing(tailer.follow()) as messages:
        await cluster.publish(0, b"a")
        assert (await anext(messages)).record.value == b"a"
        await cluster.move(1, TWO)
        await cluster.publish(1, b"new")
        # A message in a known partition triggers the metadata refresh.
        await cluster.publish(0, b"b")
        await cluster.publish(0, b"c")
        seen = [await anext(messages) for _ in range(3 if is_whole else 2)]
    reported = [(message.partition, message.record.value) for message in seen]
    assert [one for one in reported if one[0] == 0] == [(0, b"b"), (0, b"c")]
    assert [one for one in reported if one[0] == 1] == ([(1, b"new")] if is_whole else [])


async def test_a_partition_that_moves_is_followed_at_its_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_RETRY_S", 0.001)
    cluster = Cluster({0: ONE, 1: TWO})
    notes: list[str] = []
    tailer = Tailer(cluster, "t", {0: 0, 1: 0}, patience_s=HANG_S, note=notes.append)
    async with asyncio.timeout(HANG_S), aclosing(tailer.follow()) as messages:
        first = asyncio.ensure_future(anext(messages))
        await until(lambda: cluster.polls >= 2)
        cluster.away = 3
        await cluster.move(0, TWO)
        await until(lambda: not cluster.away)
        await cluster.publish(0, b"b")
        await cluster.publish(1, b"c")
        seen = [await first, await anext(messages)]
    assert sorted(message.record.value or b"" for message in seen) == [b"b", b"c"]
    assert len(notes) == 1
    assert "Lost the connection to the broker" in notes[0]
