"""WriteTxnMarkers (key 27), versions 1 to 2: writes the commit or abort markers of transactions to partitions.

Sent by the coordinators of other nodes, and by tools that end a hanging transaction. A marker that exists already is
not written again. One of a replaced coordinator gets TRANSACTION_COORDINATOR_FENCED, one of an outdated producer epoch
INVALID_PRODUCER_EPOCH. Markers for `__consumer_offsets` decide the offsets that the transaction has committed.

A coordinator epoch above all that this node knows gets UNKNOWN_LEADER_EPOCH, so that a forged request cannot fence the
existing coordinators; a coordinator that this node does not know yet retries. Producer ids and
epochs below 0 get INVALID_REQUEST, and the other internal topics, where no transaction writes, INVALID_TOPIC_EXCEPTION.

Version notes: 2 adds the version of the protocol, from which a partition knows whether the marker's epoch is above
that of the transaction's records (KIP-890), which distinguishes late copies from new ones.
"""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode
from kio.schema.write_txn_markers.v2.request import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from kio.schema.write_txn_markers.v2.response import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersResponse,
)

from millstream.broker.kafka.api import Api, ClientInfo, error_code
from millstream.broker.kafka.transaction_service import PartitionMarkers
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION
from millstream.core.errors import InvalidRequest, InvalidTopicName, MillstreamError
from millstream.core.ids import PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.topic import CONSUMER_OFFSETS, INTERNAL_TOPICS, TopicPartition
from millstream.protocol.records.control import Marker


class WriteTxnMarkers(Api[WriteTxnMarkersRequest, WriteTxnMarkersResponse]):
    key = 27
    versions = (1, 2)
    changes = None

    def __init__(self, markers: PartitionMarkers) -> None:
        self._markers = markers

    async def handle(self, request: WriteTxnMarkersRequest, client: ClientInfo) -> WriteTxnMarkersResponse:
        results = await asyncio.gather(*(self._write_all(marker) for marker in request.markers))
        return WriteTxnMarkersResponse(markers=tuple(results))

    async def _write_all(self, transaction_marker: WritableTxnMarker) -> WritableTxnMarkerResult:
        marker = Marker(
            producer_id=ProducerId(transaction_marker.producer_id),
            producer_epoch=ProducerEpoch(transaction_marker.producer_epoch),
            commit=transaction_marker.transaction_result,
            coordinator_epoch=transaction_marker.coordinator_epoch,
            bumps_epoch=transaction_marker.transaction_version >= EPOCH_PER_TRANSACTION,
        )
        topics = await asyncio.gather(*(self._write_topic(marker, topic) for topic in transaction_marker.topics))
        return WritableTxnMarkerResult(producer_id=transaction_marker.producer_id, topics=tuple(topics))

    async def _write_topic(self, marker: Marker, topic: WritableTxnMarkerTopic) -> WritableTxnMarkerTopicResult:
        indexes = topic.partition_indexes
        partitions = (TopicPartition(topic.name, PartitionIndex(index)) for index in indexes)
        codes = await asyncio.gather(*(self._write(marker, partition) for partition in partitions))
        return WritableTxnMarkerTopicResult(
            name=topic.name,
            partitions=tuple(
                WritableTxnMarkerPartitionResult(partition_index=index, error_code=code)
                for index, code in zip(indexes, codes, strict=True)
            ),
        )

    async def _write(self, marker: Marker, partition: TopicPartition) -> ErrorCode:
        try:
            _check(marker, partition)
            await self._markers.write(marker, partition)
        except MillstreamError as error:
            return error_code(error)
        return ErrorCode.none


def _check(marker: Marker, partition: TopicPartition) -> None:
    if marker.producer_id < 0 or marker.producer_epoch < 0:
        raise InvalidRequest(f"no producer has the id {marker.producer_id} and the epoch {marker.producer_epoch}")
    if partition.topic in INTERNAL_TOPICS and partition.topic != CONSUMER_OFFSETS:
        raise InvalidTopicName(f"topic {partition.topic!r} cannot be part of a transaction")
