"""Produce requests that time out before they are acknowledged get a response, and hold no memory."""

from __future__ import annotations

from datetime import timedelta
from typing import cast
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.produce.v9 import request as messages

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.net.response import Promise
from millstream.broker.replication.partition import Partition
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.messages.codec import read_request_header, read_response
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.clock import ManualClock
from millstream_testing.logs import memory_store

ME, OTHER = NodeId(1), NodeId(2)
TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=1, replication=2, overrides={}, created_ms=0)
STATE = PartitionState(replicas=(ME, OTHER), leader=ME, leader_epoch=Epoch(1), in_sync=(ME, OTHER))


class OnePartition:
    """Topics with one partition, whose follower never fetches."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def partition(self, _name: str, _index: int) -> Partition:
        return self._partition


async def test_timed_out_requests_get_a_response_and_are_freed_while_the_high_watermark_stands_still() -> None:
    store = memory_store()
    log = store.open_log(TOPIC.topic_id, TopicPartition("orders", PartitionIndex(0)), TopicSettings(flush="os"))
    partition = Partition(TOPIC, PartitionIndex(0), log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(STATE, 1), me=ME)
    quota = QuotaMeter(ClientQuotas(CatalogDeclarations(Catalog("sqlite://"))), PRODUCER_BYTE_RATE)
    produce = Produce(cast("Topics", OnePartition(partition)), quota)
    promises = []
    for number in range(10):
        records = bytes(encode_batch([NewRecord(None, b"%d" % number, (), 1000)]))
        data = messages.TopicProduceData(
            name="orders",  # type: ignore[arg-type]
            partition_data=(messages.PartitionProduceData(index=0, records=records),),  # type: ignore[arg-type]
        )
        request = messages.ProduceRequest(
            transactional_id=None,
            acks=-1,  # type: ignore[arg-type]
            timeout=timedelta(0),  # type: ignore[arg-type]
            topic_data=(data,),
        )
        frame = memoryview(bytearray(write_request(number, "test", request)[4:]))
        promise = produce.handle_frame(frame, read_request_header(frame), ClientInfo(connection_id=1, host="here"))
        assert isinstance(promise, Promise)
        promises.append(promise)
    assert partition.waiting == 10
    for promise in promises:
        buffers = await promise
        encoded = b"".join(map(bytes, cast("list[bytes]", buffers)))
        response = read_response(0, 9, encoded[4:])
        assert response.responses[0].partition_responses[0].error_code == ErrorCode.request_timed_out
    assert partition.waiting == 0
    store.close_now()
