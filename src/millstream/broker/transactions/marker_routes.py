"""Delivers markers: directly to partitions that this node leads, through WriteTxnMarkers to all others.

Markers for a node that arrive while a request to it is in flight are sent together in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from kio.schema.types import ProducerId as WireProducerId
from kio.schema.types import TopicName
from kio.schema.write_txn_markers.v2.request import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from kio.static.primitive import i8, i16, i32

from millstream.broker.coordination.peers import Peers
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION
from millstream.core.errors import MillstreamError, NotLeader, UnknownTopic, UnknownTopicId
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.marker import Marker
from millstream.core.partition_state import PartitionState
from millstream.core.topic import Topic, TopicPartition, by_topic
from millstream.protocol.wire.error_codes import error_from_code

MARKERS_AT_ONCE_MAX: Final = 500

Answers = Mapping[TopicPartition, MillstreamError | None]


class LocalMarkers(Protocol):
    """Writes markers to partitions that this node leads."""

    async def write(self, marker: Marker, partition: TopicPartition) -> None:
        """Write one marker and wait until it is acknowledged; raise a `MillstreamError` if it is not."""


class LedTopics(Protocol):
    """The leaders of partitions."""

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name, if it exists."""

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the replicas and leader of a partition; None if they are not agreed on yet."""


class _MarkerBatch(NamedTuple):
    marker: Marker
    partitions: tuple[TopicPartition, ...]
    answers: asyncio.Future[Answers]


class MarkerRoutes:
    """Finds the leaders of partitions and writes markers there."""

    def __init__(self, topics: LedTopics, local: LocalMarkers, peers: Peers, *, me: NodeId) -> None:
        self._topics = topics
        self._local = local
        self._peers = peers
        self._me = me
        self._waiting: dict[NodeId, list[_MarkerBatch]] = {}
        self._sending: dict[NodeId, asyncio.Task[None]] = {}

    async def write(self, marker: Marker, partitions: Iterable[TopicPartition]) -> Answers:
        """Write one marker to these partitions, to all of them at once."""
        answers: dict[TopicPartition, MillstreamError | None] = {}
        by_leader: dict[NodeId, list[TopicPartition]] = {}
        for partition in partitions:
            try:
                by_leader.setdefault(self._leader_of(partition), []).append(partition)
            except MillstreamError as error:
                answers[partition] = error
        here = by_leader.pop(self._me, [])
        pending = [self._write_here(marker, partition) for partition in here]
        pending += [self._enqueue(node, marker, tuple(there)) for node, there in by_leader.items()]
        for answered in await asyncio.gather(*pending):
            answers.update(answered)
        return answers

    async def close(self) -> None:
        """Cancel all pending requests."""
        sending = list(self._sending.values())
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)

    def _leader_of(self, partition: TopicPartition) -> NodeId:
        topic = self._topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < topic.partitions:
            raise UnknownTopic(f"{partition} no longer exists")
        state = self._topics.state_of(topic, partition.partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"{partition} has no leader")
        return state.leader

    async def _write_here(self, marker: Marker, partition: TopicPartition) -> Answers:
        try:
            await self._local.write(marker, partition)
        except MillstreamError as error:
            return {partition: _retryable(error)}
        return {partition: None}

    async def _enqueue(self, node: NodeId, marker: Marker, partitions: tuple[TopicPartition, ...]) -> Answers:
        batch = _MarkerBatch(marker, partitions, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(node, []).append(batch)
        if node not in self._sending:
            self._sending[node] = asyncio.get_running_loop().create_task(self._send(node), name=f"markers to {node}")
        return await batch.answers

    async def _send(self, node: NodeId) -> None:
        waiting = self._waiting[node]
        batches: list[_MarkerBatch] = []
        try:
            while waiting:
                batches, waiting[:] = waiting[:MARKERS_AT_ONCE_MAX], waiting[MARKERS_AT_ONCE_MAX:]
                await self._send_batches(node, batches)
        finally:
            del self._sending[node], self._waiting[node]
            for batch in (*batches, *waiting):
                batch.answers.cancel()

    async def _send_batches(self, node: NodeId, batches: list[_MarkerBatch]) -> None:
        request = WriteTxnMarkersRequest(markers=tuple(_to_wire(batch) for batch in batches))
        try:
            answer = await self._peers.send(node, request)
            results = [_answers(batch, result) for batch, result in zip(batches, answer.markers, strict=True)]
        except (MillstreamError, ValueError) as error:
            lost = error if isinstance(error, MillstreamError) else NotLeader(f"node {node} omitted results")
            results = [dict.fromkeys(batch.partitions, lost) for batch in batches]
        for batch, answers in zip(batches, results, strict=True):
            if not batch.answers.done():
                batch.answers.set_result(answers)


def _to_wire(batch: _MarkerBatch) -> WritableTxnMarker:
    marker = batch.marker
    return WritableTxnMarker(
        producer_id=WireProducerId(marker.producer_id),
        producer_epoch=i16(marker.producer_epoch),
        transaction_result=marker.commit,
        topics=tuple(
            WritableTxnMarkerTopic(name=TopicName(name), partition_indexes=tuple(map(i32, indexes)))
            for name, indexes in by_topic(batch.partitions).items()
        ),
        coordinator_epoch=i32(marker.coordinator_epoch),
        transaction_version=i8(EPOCH_PER_TRANSACTION if marker.bumps_epoch else 0),
    )


def _answers(batch: _MarkerBatch, result: Any) -> Answers:
    answers: dict[TopicPartition, MillstreamError | None] = {}
    for topic in result.topics:
        for one in topic.partitions:
            partition = TopicPartition(topic.name, PartitionIndex(one.partition_index))
            code = one.error_code
            error = error_from_code(code, None, about=f"a marker for {partition}") if code else None
            answers[partition] = None if error is None else _retryable(error)
    return answers


def _retryable(error: MillstreamError) -> MillstreamError:
    """Turn an unknown topic into a retryable error: the leader may not know it yet, and deletion is decided here."""
    return NotLeader(str(error)) if isinstance(error, UnknownTopic | UnknownTopicId) else error
