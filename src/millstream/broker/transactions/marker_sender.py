"""Writes the markers of decided transactions, and reports when all of them are written.

A decision is durable before the first marker is written, and a shard that is loaded writes the missing markers again;
so a crash at any point only means that a marker is written twice, which partitions recognize. Each transaction has its
own task, so that a partition without a leader delays no other transaction. Their number is bounded: further
transactions wait in the state.

A marker goes straight to a partition that this node leads, and through WriteTxnMarkers to all others; markers for a
node that arrive while a request to it is in flight are sent together in the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from kio.schema.types import ProducerId as WireProducerId
from kio.schema.types import TopicName
from kio.schema.write_txn_markers.v2.request import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from kio.static.primitive import i8, i16, i32

from millstream.broker.coordination.peers import Peers
from millstream.broker.coordination.runtime import StateTopics
from millstream.broker.coordination.shard import Shard
from millstream.broker.transactions.shard import TransactionShard
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, UnmarkedTransaction
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    FencedProducer,
    MillstreamError,
    NotLeader,
    TransactionCoordinatorFenced,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import NodeId, PartitionIndex, ProducerEpoch
from millstream.core.partition_state import FIRST_EPOCH
from millstream.core.tasks import cancel_and_wait
from millstream.core.topic import TopicPartition, by_topic
from millstream.protocol.records.control import Marker
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

MARKERS_AT_ONCE_MAX: Final = 500

PartitionErrors = Mapping[TopicPartition, MillstreamError | None]


class LocalMarkers(Protocol):
    """Writes markers to partitions that this node leads."""

    async def write(self, marker: Marker, partition: TopicPartition) -> None:
        """Write one marker and wait until it is acknowledged; raise a `MillstreamError` if it is not."""


class _MarkerBatch(NamedTuple):
    marker: Marker
    partitions: tuple[TopicPartition, ...]
    errors: asyncio.Future[PartitionErrors]


class MarkerRoutes:
    """Finds the leaders of partitions and writes markers there."""

    def __init__(self, topics: StateTopics, local: LocalMarkers, peers: Peers, *, me: NodeId) -> None:
        self._topics = topics
        self._local = local
        self._peers = peers
        self._me = me
        self._waiting: dict[NodeId, list[_MarkerBatch]] = {}
        self._sending: dict[NodeId, asyncio.Task[None]] = {}

    async def write(self, marker: Marker, partitions: Iterable[TopicPartition]) -> PartitionErrors:
        """Write one marker to these partitions, to all of them at once."""
        errors: dict[TopicPartition, MillstreamError | None] = {}
        by_leader: dict[NodeId, list[TopicPartition]] = {}
        for partition in partitions:
            try:
                by_leader.setdefault(self._leader_of(partition), []).append(partition)
            except MillstreamError as error:
                errors[partition] = error
        here = by_leader.pop(self._me, [])
        pending = [self._write_here(marker, partition) for partition in here]
        pending += [
            self._enqueue(node, marker, tuple(partitions_there)) for node, partitions_there in by_leader.items()
        ]
        for written in await asyncio.gather(*pending):
            errors.update(written)
        return errors

    async def close(self) -> None:
        """Cancel all pending requests."""
        await cancel_and_wait(*self._sending.values())

    def _leader_of(self, partition: TopicPartition) -> NodeId:
        topic = self._topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < topic.partitions:
            raise UnknownTopic(f"{partition} no longer exists")
        state = self._topics.state_of(topic, partition.partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"{partition} has no leader")
        return state.leader

    async def _write_here(self, marker: Marker, partition: TopicPartition) -> PartitionErrors:
        try:
            await self._local.write(marker, partition)
        except MillstreamError as error:
            return {partition: _retryable(error)}
        return {partition: None}

    async def _enqueue(self, node: NodeId, marker: Marker, partitions: tuple[TopicPartition, ...]) -> PartitionErrors:
        batch = _MarkerBatch(marker, partitions, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(node, []).append(batch)
        if node not in self._sending:
            self._sending[node] = asyncio.get_running_loop().create_task(self._send(node), name=f"markers to {node}")
        return await batch.errors

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
                batch.errors.cancel()

    async def _send_batches(self, node: NodeId, batches: list[_MarkerBatch]) -> None:
        request = WriteTxnMarkersRequest(markers=tuple(_to_wire(batch) for batch in batches))
        try:
            response = await self._peers.send(node, request)
            results = [
                _partition_errors(batch, result) for batch, result in zip(batches, response.markers, strict=True)
            ]
        except (MillstreamError, ValueError) as error:
            lost = error if isinstance(error, MillstreamError) else NotLeader(f"node {node} omitted results")
            results = [dict.fromkeys(batch.partitions, lost) for batch in batches]
        for batch, errors in zip(batches, results, strict=True):
            if not batch.errors.done():
                batch.errors.set_result(errors)


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


def _partition_errors(batch: _MarkerBatch, result: Any) -> PartitionErrors:
    errors: dict[TopicPartition, MillstreamError | None] = {}
    for topic in result.topics:
        for response in topic.partitions:
            partition = TopicPartition(topic.name, PartitionIndex(response.partition_index))
            code = response.error_code
            error = error_from_code(code, None, about=f"a marker for {partition}") if code else None
            errors[partition] = None if error is None else _retryable(error)
    return errors


def _retryable(error: MillstreamError) -> MillstreamError:
    """Turn an unknown topic into a retryable error: the leader may not know it yet, and deletion is decided here."""
    return NotLeader(str(error)) if isinstance(error, UnknownTopic | UnknownTopicId) else error


AT_ONCE_MAX: Final = 1000
PAUSE_S: Final = 1.0
"""The pause before a transaction is retried that could not be ended for a reason other than its partitions."""
_NOT_NEEDED: Final = (UnknownTopic, FencedProducer)
"""The topic was deleted, or the partition has seen a later epoch of this producer."""

MarkedShard = Shard[TransactionShard]


class MarkerWriter(Protocol):
    """Writes markers, on this node and on others."""

    async def write(
        self, marker: Marker, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        """Write one marker to these partitions; return for each None if it is durable there, else the error."""


class MarkerSender:
    """Every ending transaction of this node's shards."""

    def __init__(
        self,
        shards: Callable[[], Iterable[MarkedShard]],
        writer: MarkerWriter,
        random: Random,
        *,
        latest_epoch: Callable[[], int] = lambda: FIRST_EPOCH,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._shards = shards
        self._latest_epoch = latest_epoch
        self._pause_s = pause_s
        self._writer = writer
        self._random = random
        self._wakes = 0
        self._scheduled: asyncio.Handle | None = None
        self._collecting: set[MarkedShard] = set()
        self._in_flight: set[tuple[MarkedShard, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.retries = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def wake(self) -> None:
        """Schedule a scan for decided transactions. Cheap, since operations call it."""
        self._wakes += 1
        if self._scheduled is None and not self._closed:
            self._scheduled = asyncio.get_running_loop().call_soon(self._scan_shards)

    async def close(self) -> None:
        """Stop; unfinished transactions are ended after the next start."""
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        await cancel_and_wait(*self._tasks)

    def _scan_shards(self) -> None:
        self._scheduled = None
        for shard in self._shards():
            if shard not in self._collecting and shard.state is not None and shard.state.has_endings:
                self._collecting.add(shard)
                self._start(self._collect(shard), name=f"endings of {shard.name}")

    async def _collect(self, shard: MarkedShard) -> None:
        """Start ending what a shard has decided, once the decision is durable."""
        try:
            seen = -1
            while seen != self._wakes:
                seen = self._wakes
                known = [transactional_id for owner, transactional_id in self._in_flight if owner is shard]
                room = AT_ONCE_MAX - len(self._in_flight)
                if room <= 0:
                    return
                decided = partial(TransactionShard.endings, known=known, limit=room)
                for ending in await shard.run(decided, pure=True):
                    self._in_flight.add((shard, ending.transactional_id))
                    self._start(self._finish(shard, ending), name=f"end {ending.transactional_id}")
        except MillstreamError:
            # The shard is reloading or led elsewhere; its next leader scans again.
            return
        finally:
            self._collecting.discard(shard)

    async def _finish(self, shard: MarkedShard, ending: UnmarkedTransaction) -> None:
        try:
            reason = await self._try_to_finish(shard, ending)
            if reason is not None:
                # The decision is final, so it is retried here or by the next coordinator.
                details = {"transactional_id": ending.transactional_id, "reason": reason}
                _logger.info("a transaction has not ended yet", extra=details)
                await asyncio.sleep(self._pause_s)
        finally:
            self._in_flight.discard((shard, ending.transactional_id))
            self.wake()

    async def _try_to_finish(self, shard: MarkedShard, ending: UnmarkedTransaction) -> str | None:
        """Return the error, or None on success."""
        try:
            if not await self._write_all(shard, ending):
                return "this node no longer coordinates it"
            await shard.run(lambda state: state.complete(ending), pure=True)
        except MillstreamError as error:
            return str(error)
        except Exception:
            _logger.exception("a transaction could not be ended because of a bug")
            return "a defect"
        return None

    async def _write_all(self, shard: MarkedShard, ending: UnmarkedTransaction) -> bool:
        """Write every marker, however long it takes; return False if this node is no longer the coordinator.

        Coordinators use the epochs of their partitions, and a forged request may have left a higher epoch in a
        partition. A coordinator that is fenced but can still write its decision was not replaced: it continues with the
        latest epoch of any coordinator.
        """
        unsettled = set(ending.partitions)
        backoff = Backoff(self._random)
        claimed = int(FIRST_EPOCH)
        while unsettled:
            if shard.state is None:
                return False
            epoch = max(shard.epoch, claimed)
            errors = await self._writer.write(_to_marker(ending, epoch), unsettled)
            if any(isinstance(error, TransactionCoordinatorFenced) for error in errors.values()):
                claimed = self._latest_epoch()
                if claimed <= epoch or not await shard.run(lambda state: state.confirmed(ending), pure=True):
                    return False
            unsettled = {
                partition
                for partition in unsettled
                if not _is_settled(ending, partition, errors.get(partition, _NO_RESPONSE))
            }
            if unsettled:
                self.retries += 1
                await backoff.pause()
        return True

    def _start(self, work: Any, *, name: str) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("a transaction could not be ended because of a bug", exc_info=task.exception())


def _to_marker(ending: UnmarkedTransaction, coordinator_epoch: int) -> Marker:
    return Marker(
        producer_id=ending.producer_id,
        producer_epoch=ProducerEpoch(ending.epoch),
        commit=ending.commit,
        coordinator_epoch=coordinator_epoch,
        bumps_epoch=ending.version >= EPOCH_PER_TRANSACTION,
    )


_NO_RESPONSE: Final = MillstreamError("no response came")


def _is_settled(ending: UnmarkedTransaction, partition: TopicPartition, error: MillstreamError | None) -> bool:
    if error is None:
        return True
    if isinstance(error, _NOT_NEEDED):
        _logger.warning(
            "a marker is not needed",
            extra={
                "transactional_id": ending.transactional_id,
                "partition": str(partition),
                "error": str(error),
            },
        )
        return True
    return False
