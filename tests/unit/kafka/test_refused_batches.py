"""Batches sent behind a refused one of the same producer are refused too: no reordering, no gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import cast
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.produce.v9 import request as messages

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis import produce as produce_api
from millstream.broker.kafka.apis.produce import BATCHES_BEHIND_MAX, Produce
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.log.store import LogStore
from millstream.broker.net.response import Promise
from millstream.broker.replication.partition import Partition
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.messages.codec import read_request_header, read_response
from millstream_testing.api_requests import write_request
from millstream_testing.batches import encode_values
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

ME, OTHER = NodeId(1), NodeId(2)
TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=1, replication=1, overrides={}, created_ms=0)
NONE, NOT_LEADER, OUT_OF_ORDER = (
    ErrorCode.none,
    ErrorCode.not_leader_or_follower,
    ErrorCode.out_of_order_sequence_number,
)


class Restarted:
    """A restarted node: it hosts a partition and listens, and leads once `lead` is called."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        log = store.open_log(TOPIC.topic_id, TopicPartition("orders", PartitionIndex(0)), TopicSettings(flush="os"))
        self.opened = Partition(TOPIC, PartitionIndex(0), log, store, alone=False, clock=ManualClock())
        quota = QuotaMeter(ClientQuotas(CatalogDeclarations(Catalog("sqlite://"))), PRODUCER_BYTE_RATE)
        self._produce = Produce(cast("Topics", self), quota)

    def partition(self, _name: str, _index: int) -> Partition:
        return self.opened

    def lead(self, epoch: int = 1) -> None:
        """Elect the node, which is the only one in sync."""
        state = PartitionState(replicas=(ME,), leader=ME, leader_epoch=Epoch(epoch), in_sync=(ME,))
        self.opened.apply(Versioned(state, epoch), me=ME)

    def lead_with_another(self, epoch: int, leader: NodeId) -> None:
        """Elect one of two replicas that are both in sync."""
        state = PartitionState(replicas=(ME, OTHER), leader=leader, leader_epoch=Epoch(epoch), in_sync=(ME, OTHER))
        self.opened.apply(Versioned(state, epoch), me=ME)

    async def send(
        self, client: ClientInfo, sequence: int, *, producer_id: int = 9, epoch: int = 0, records: bytes | None = None
    ) -> ErrorCode:
        """Send one batch; return the error code."""
        batch = (
            encode_values(producer_id=producer_id, producer_epoch=epoch, sequence=sequence)
            if records is None
            else records
        )
        data = messages.TopicProduceData(
            name="orders",  # type: ignore[arg-type]
            partition_data=(messages.PartitionProduceData(index=0, records=bytes(batch)),),  # type: ignore[arg-type]
        )
        request = messages.ProduceRequest(
            transactional_id=None,
            acks=-1,  # type: ignore[arg-type]
            timeout=timedelta(seconds=30),  # type: ignore[arg-type]
            topic_data=(data,),
        )
        frame = memoryview(bytearray(write_request(1, "test", request)[4:]))
        response = self._produce.handle_frame(frame, read_request_header(frame), client)
        buffers = await response if isinstance(response, Promise) else response
        encoded = b"".join(map(bytes, cast("list[bytes]", buffers)))
        code: ErrorCode = read_response(0, 9, encoded[4:]).responses[0].partition_responses[0].error_code
        return code


@pytest.fixture
async def node() -> AsyncIterator[Restarted]:
    """A node that does not lead yet."""
    files, clock = MemoryFiles(), ManualClock()
    store = memory_store(files, clock, journal_bytes=100_000)
    yield Restarted(store)
    await store.close()


def connection(number: int = 1) -> ClientInfo:
    return ClientInfo(connection_id=number, host="here")


@pytest.mark.parametrize("stored_before", [0, 2])
async def test_a_batch_behind_one_refused_before_the_election_is_not_stored_first(
    node: Restarted, stored_before: int
) -> None:
    for sequence in range(stored_before):
        node.opened.log.append(encode_values(producer_id=9, sequence=sequence), leader_epoch=Epoch(0))
    client = connection()
    assert await node.send(client, stored_before) == NOT_LEADER
    node.lead()
    assert await node.send(client, stored_before + 1) == NOT_LEADER
    assert node.opened.log.end_offset == stored_before
    assert [await node.send(client, stored_before + more) for more in range(3)] == [NONE] * 3
    assert node.opened.log.end_offset == stored_before + 3
    assert not client.refused_batches


async def test_a_batch_behind_one_that_failed_after_its_append_is_not_stored_first(node: Restarted) -> None:
    client = connection()
    node.lead_with_another(epoch=1, leader=ME)
    waiting = [asyncio.create_task(node.send(client, sequence)) for sequence in range(2)]
    await asyncio.sleep(0)
    assert node.opened.log.end_offset == 2
    node.lead_with_another(epoch=2, leader=OTHER)
    assert await asyncio.gather(*waiting) == [NOT_LEADER] * 2
    # The other leader had neither of them, and this node leads again before the third batch is read.
    node.opened.log.truncate_to(0)
    node.lead(epoch=3)
    assert await node.send(client, 2) == NOT_LEADER
    assert [await node.send(client, sequence) for sequence in range(3)] == [NONE] * 3
    assert node.opened.log.end_offset == 3
    assert not client.refused_batches


async def test_a_duplicate_from_before_the_restart_is_recognised(node: Restarted) -> None:
    for sequence in range(2):
        node.opened.log.append(encode_values(producer_id=9, sequence=sequence), leader_epoch=Epoch(0))
    client = connection()
    assert [await node.send(client, sequence) for sequence in range(2)] == [NOT_LEADER] * 2
    node.lead()
    assert [await node.send(client, sequence) for sequence in range(3)] == [NONE] * 3
    assert node.opened.log.end_offset == 3


async def test_a_batch_that_another_leader_has_stored_since_blocks_nothing(node: Restarted) -> None:
    client = connection()
    assert await node.send(client, 0) == NOT_LEADER
    for sequence in range(5):
        node.opened.log.append(encode_values(producer_id=9, sequence=sequence), leader_epoch=Epoch(0))
    node.lead()
    assert [await node.send(client, sequence) for sequence in range(5, 10)] == [NONE] * 5
    assert not client.refused_batches


async def test_a_real_gap_is_reported_once_no_batch_can_be_in_flight(node: Restarted) -> None:
    node.opened.log.append(encode_values(producer_id=9, sequence=0), leader_epoch=Epoch(0))
    client = connection()
    assert await node.send(client, 1) == NOT_LEADER
    node.lead()
    responses = [await node.send(client, 2 + number) for number in range(BATCHES_BEHIND_MAX + 1)]
    assert responses == [NOT_LEADER] * BATCHES_BEHIND_MAX + [OUT_OF_ORDER]


async def test_other_producers_epochs_and_connections_are_not_blocked(node: Restarted) -> None:
    client = connection()
    assert await node.send(client, 0) == NOT_LEADER
    node.lead()
    assert await node.send(client, 0, producer_id=10) == NONE
    assert await node.send(client, 0, epoch=1) == NONE
    assert await node.send(connection(2), 1, epoch=1) == NONE
    assert not client.refused_batches


async def test_a_batch_with_a_fatal_error_blocks_nothing(node: Restarted) -> None:
    node.lead()
    client = connection()
    batch = encode_values(producer_id=9, sequence=0)
    batch[16] = 1  # an old format, which the client must not send again
    assert not (await node.send(client, 0, records=bytes(batch))).retriable
    assert not client.refused_batches
    assert await node.send(client, 1) == NONE


async def test_sequences_wrap(node: Restarted) -> None:
    client = connection()
    assert await node.send(client, 2**31 - 1) == NOT_LEADER
    node.lead()
    assert await node.send(client, 0) == NOT_LEADER
    assert await node.send(client, 2**31 - 1) == NONE
    assert await node.send(client, 0) == NONE


async def test_the_state_per_connection_is_bounded(node: Restarted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_api, "REFUSED_PRODUCERS_MAX", 3)
    client = connection()
    for producer_id in range(5):
        assert await node.send(client, 0, producer_id=producer_id) == NOT_LEADER
    assert [key[2] for key in client.refused_batches] == [2, 3, 4]
