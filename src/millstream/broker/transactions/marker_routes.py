"""Where markers go: to partitions that this node leads directly, to all others through WriteTxnMarkers.

Markers for one node that come while a request to it is under way are sent together with the next one.
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

from millstream.broker.transactions.peers import Peers
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
        """Write one marker and wait until it is acknowledged; a `MillstreamError` when it is not."""


class LedTopics(Protocol):
    """Who leads what."""

    def get(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Who carries and leads one partition; None when that is not agreed on yet."""


class _Parcel(NamedTuple):
    marker: Marker
    partitions: tuple[TopicPartition, ...]
    answers: asyncio.Future[Answers]


class MarkerRoutes:
    """Finds the leaders of partitions and has markers written there."""

    def __init__(self, topics: LedTopics, local: LocalMarkers, peers: Peers, *, me: NodeId) -> None:
        self._topics = topics
        self._local = local
        self._peers = peers
        self._me = me
        self._waiting: dict[NodeId, list[_Parcel]] = {}
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
        told = [self._write_here(marker, partition) for partition in here]
        told += [self._hand_over(node, marker, tuple(there)) for node, there in by_leader.items()]
        for answered in await asyncio.gather(*told):
            answers.update(answered)
        return answers

    async def close(self) -> None:
        """Give up what is under way."""
        sending = list(self._sending.values())
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)

    def _leader_of(self, partition: TopicPartition) -> NodeId:
        topic = self._topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < topic.partitions:
            raise UnknownTopic(f"{partition} does not exist any more")
        state = self._topics.state_of(topic, partition.partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"nobody leads {partition}")
        return state.leader

    async def _write_here(self, marker: Marker, partition: TopicPartition) -> Answers:
        try:
            await self._local.write(marker, partition)
        except MillstreamError as error:
            return {partition: _to_be_tried_again(error)}
        return {partition: None}

    async def _hand_over(self, node: NodeId, marker: Marker, partitions: tuple[TopicPartition, ...]) -> Answers:
        parcel = _Parcel(marker, partitions, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(node, []).append(parcel)
        if node not in self._sending:
            self._sending[node] = asyncio.get_running_loop().create_task(self._send(node), name=f"markers to {node}")
        return await parcel.answers

    async def _send(self, node: NodeId) -> None:
        waiting = self._waiting[node]
        parcels: list[_Parcel] = []
        try:
            while waiting:
                parcels, waiting[:] = waiting[:MARKERS_AT_ONCE_MAX], waiting[MARKERS_AT_ONCE_MAX:]
                await self._deliver(node, parcels)
        finally:
            del self._sending[node], self._waiting[node]
            for parcel in (*parcels, *waiting):
                parcel.answers.cancel()

    async def _deliver(self, node: NodeId, parcels: list[_Parcel]) -> None:
        request = WriteTxnMarkersRequest(markers=tuple(_as_written(parcel) for parcel in parcels))
        try:
            answer = await self._peers.ask(node, request)
            told = [_answers(parcel, result) for parcel, result in zip(parcels, answer.markers, strict=True)]
        except (MillstreamError, ValueError) as error:
            lost = error if isinstance(error, MillstreamError) else NotLeader(f"node {node} left answers out")
            told = [dict.fromkeys(parcel.partitions, lost) for parcel in parcels]
        for parcel, answers in zip(parcels, told, strict=True):
            if not parcel.answers.done():
                parcel.answers.set_result(answers)


def _as_written(parcel: _Parcel) -> WritableTxnMarker:
    marker = parcel.marker
    return WritableTxnMarker(
        producer_id=WireProducerId(marker.producer_id),
        producer_epoch=i16(marker.producer_epoch),
        transaction_result=marker.commit,
        topics=tuple(
            WritableTxnMarkerTopic(name=TopicName(name), partition_indexes=tuple(map(i32, indexes)))
            for name, indexes in by_topic(parcel.partitions).items()
        ),
        coordinator_epoch=i32(marker.coordinator_epoch),
        transaction_version=i8(EPOCH_PER_TRANSACTION if marker.bumps_epoch else 0),
    )


def _answers(parcel: _Parcel, result: Any) -> Answers:
    answers: dict[TopicPartition, MillstreamError | None] = {}
    for topic in result.topics:
        for one in topic.partitions:
            partition = TopicPartition(topic.name, PartitionIndex(one.partition_index))
            code = one.error_code
            error = error_from_code(code, None, about=f"a marker for {partition}") if code else None
            answers[partition] = None if error is None else _to_be_tried_again(error)
    return answers


def _to_be_tried_again(error: MillstreamError) -> MillstreamError:
    """A leader that does not know the topic may only not have heard of it yet; whether it is gone is decided here."""
    return NotLeader(str(error)) if isinstance(error, UnknownTopic | UnknownTopicId) else error
