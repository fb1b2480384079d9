"""DescribeProducers (key 61), version 0: describes the known producers of partitions, and their open transactions.

A producer is known for `producer-expiry-ms`, and while it has an open transaction. The epoch of its coordinator is
known once that has ended a transaction here.

In `__consumer_offsets` these are the producers with undecided transactions that have committed offsets. Such offsets
are not stored as batches of the transaction, so its start offset is given as 0.
"""

from __future__ import annotations

from typing import Final

from kio.schema.describe_producers.v0.request import DescribeProducersRequest
from kio.schema.describe_producers.v0.response import (
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.transactional_offsets import PendingProducer
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.log.transactions import Producer
from millstream.core.errors import MillstreamError
from millstream.core.ids import NO_EPOCH
from millstream.core.topic import CONSUMER_OFFSETS, check_topic_name

_NO_SEQUENCE: Final = -1


class DescribeProducers(Api[DescribeProducersRequest, DescribeProducersResponse]):
    key = 61
    versions = (0, 0)
    changes = None

    def __init__(self, topics: Topics, groups: GroupCoordinator) -> None:
        self._topics = topics
        self._groups = groups

    async def handle(self, request: DescribeProducersRequest, client: ClientInfo) -> DescribeProducersResponse:
        topics = [
            TopicResponse(
                name=topic.name,
                partitions=tuple(
                    [await self._partition_response(topic.name, index) for index in topic.partition_indexes]
                ),
            )
            for topic in request.topics
        ]
        return DescribeProducersResponse(throttle_time=NO_THROTTLE, topics=tuple(topics))

    async def _partition_response(self, topic: str, index: i32) -> PartitionResponse:
        try:
            check_topic_name(topic)
            partition = self._topics.partition(topic, index)
            partition.check_leader_epoch(NO_EPOCH)
            producers = (
                [_pending_state(producer) for producer in await self._groups.pending_producers(index)]
                if topic == CONSUMER_OFFSETS
                else [_producer_state(producer) for producer in partition.log.producers]
            )
        except MillstreamError as error:
            return PartitionResponse(
                partition_index=index,
                error_code=error_code(error),
                error_message=error_message(error),
                active_producers=(),
            )
        return PartitionResponse(partition_index=index, error_code=ErrorCode.none, active_producers=tuple(producers))


def _pending_state(producer: PendingProducer) -> ProducerState:
    return ProducerState(
        producer_id=ProducerId(producer.producer_id),
        producer_epoch=i32(producer.epoch),
        last_sequence=i32(_NO_SEQUENCE),
        last_timestamp=i64(producer.last_ms),
        coordinator_epoch=i32(producer.coordinator_epoch),
        current_txn_start_offset=i64(0),
    )


def _producer_state(producer: Producer) -> ProducerState:
    last_sequence = producer.batches[-1].last_sequence if producer.batches else _NO_SEQUENCE
    return ProducerState(
        producer_id=ProducerId(producer.producer_id),
        producer_epoch=i32(producer.epoch),
        last_sequence=i32(last_sequence),
        last_timestamp=i64(producer.last_ms),
        coordinator_epoch=i32(producer.coordinator_epoch),
        current_txn_start_offset=i64(producer.open_from),
    )
