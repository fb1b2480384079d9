"""Markers are retried until written, through failures, restarts and changes of coordinators and leaders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from random import Random
from typing import Any

import pytest

from millstream.broker.kafka.transaction_service import CoordinatorGate
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.marker_sender import MarkerRoutes, MarkerSender
from millstream.broker.transactions.transaction import InitRequest, InitResponse, ProducerRef, TransactionFilter
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import (
    BrokerUnreachable,
    ConcurrentTransactions,
    FencedProducer,
    InvalidRequest,
    InvalidTransactionTimeout,
    MillstreamError,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    StorageFailure,
    TransactionAbortable,
    TransactionCoordinatorFenced,
    UnknownTopic,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.topic import TRANSACTION_STATE, TopicPartition
from millstream.protocol.records.control import Marker
from millstream_testing.state_log import MemoryTopics
from millstream_testing.waiting import until

ME, OTHER = NodeId(1), NodeId(2)
PARTITION = TopicPartition("t", PartitionIndex(0))
SECOND = TopicPartition("t", PartitionIndex(1))


class Ids:
    def __init__(self) -> None:
        self.last = 0
        self.error: MillstreamError | None = None

    async def next(self) -> ProducerId:
        if self.error is not None:
            raise self.error
        self.last += 1
        return ProducerId(self.last)


class Writer:
    """Partitions that accept markers, or first raise the errors set by a test."""

    def __init__(self) -> None:
        self.errors: dict[TopicPartition, list[MillstreamError]] = {}
        self.written: list[tuple[TopicPartition, Marker]] = []
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def write(
        self, marker: Marker, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        self.asked.set()
        await self.open.wait()
        responses: dict[TopicPartition, MillstreamError | None] = {}
        for partition in sorted(partitions, key=str):
            errors = self.errors.get(partition)
            responses[partition] = errors.pop(0) if errors else None
            if responses[partition] is None:
                self.written.append((partition, marker))
        return responses


class Node:
    def __init__(self, topics: MemoryTopics) -> None:
        self.topics = topics
        self.ids = Ids()
        self.writer = Writer()
        config = Config(transactions_partitions=1)
        self.coordinator = TransactionCoordinator(topics, config, SystemClock(), self.ids, retry_first_s=0.001)
        self.latest_epoch = 0
        self.sender = MarkerSender(
            lambda: self.coordinator.shards,
            self.writer,
            Random(1),
            latest_epoch=lambda: self.latest_epoch,
            pause_s=0.01,
        )
        self.coordinator.on_transaction_ending(self.sender.wake)

    async def begin(self, name: str = "tx", *partitions: TopicPartition, version: int = 0) -> ProducerRef:
        who = await self.coordinator.init(InitRequest(transactional_id=name, timeout_ms=60_000))
        ref = ProducerRef(name, *who)
        await self.coordinator.add_partitions(ref, partitions or (PARTITION,), version=version)
        return ref

    async def state(self, name: str = "tx") -> str:
        return (await self.coordinator.describe(name)).state.value

    async def ended(self, name: str = "tx") -> str:
        await self.coordinator._run(name, lambda shard: shard.wait_ended(name))
        return await self.state(name)

    async def close(self) -> None:
        await self.sender.close()
        await self.coordinator.close()


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node(MemoryTopics())
    yield made
    await made.close()


async def test_markers_follow_the_decision(node: Node) -> None:
    who = await node.begin("tx", PARTITION, SECOND, version=2)
    assert await node.coordinator.end(who, commit=True, version=2) == InitResponse(who.producer_id, 1)
    assert await node.ended() == "CompleteCommit"
    marker = Marker(
        producer_id=who.producer_id,
        producer_epoch=ProducerEpoch(1),
        commit=True,
        coordinator_epoch=0,
        bumps_epoch=True,
    )
    assert node.writer.written == [(PARTITION, marker), (SECOND, marker)]


async def test_markers_are_retried_until_written(node: Node) -> None:
    who = await node.begin("tx", PARTITION, SECOND)
    node.writer.errors = {PARTITION: [NotLeader("moved"), NotEnoughReplicas("few")], SECOND: [UnknownTopic("gone")]}
    await node.coordinator.end(who, commit=False, version=0)
    assert await node.ended() == "CompleteAbort"
    assert [partition for partition, _ in node.writer.written] == [PARTITION]
    assert node.sender.retries == 2


async def test_a_partition_with_a_later_epoch_needs_no_marker(node: Node) -> None:
    who = await node.begin()
    node.writer.errors = {PARTITION: [FencedProducer("later")]}
    await node.coordinator.end(who, commit=True, version=0)
    assert await node.ended() == "CompleteCommit"


async def test_a_marker_never_has_the_epoch_of_another_leader(node: Node) -> None:
    who = await node.begin()
    node.writer.errors[PARTITION] = [NotLeader("wait")]
    topic = node.topics.get(TRANSACTION_STATE)
    assert topic is not None
    # The partition is notified before the coordinator resigns.
    node.topics.partitions_of(topic)[0].leader_epoch = Epoch(7)
    await node.coordinator.end(who, commit=True, version=0)
    assert await node.ended() == "CompleteCommit"
    assert [marker.coordinator_epoch for _, marker in node.writer.written] == [0]


async def test_a_replaced_coordinator_stops(node: Node) -> None:
    who = await node.begin()
    node.writer.errors = {PARTITION: [TransactionCoordinatorFenced("replaced")] * 1}
    await node.coordinator.end(who, commit=True, version=0)
    # It retries, since it still believes to be the coordinator; its next attempt is accepted here.
    assert await node.ended() == "CompleteCommit"


async def test_a_coordinator_that_can_still_write_was_not_replaced(node: Node) -> None:
    who = await node.begin("tx", PARTITION, SECOND)
    # A marker was written with the epoch of another coordinator.
    node.writer.errors = {PARTITION: [TransactionCoordinatorFenced("replaced")]}
    node.latest_epoch = 57
    await node.coordinator.end(who, commit=True, version=0)
    assert await node.ended() == "CompleteCommit"
    assert [(where, marker.coordinator_epoch) for where, marker in node.writer.written] == [
        (SECOND, 0),
        (PARTITION, 57),
    ]


async def test_a_coordinator_that_cannot_write_is_not_trusted(node: Node) -> None:
    who = await node.begin()
    (shard,) = node.coordinator.shards
    node.latest_epoch = 57
    node.writer.open.clear()
    node.writer.errors = {PARTITION: [TransactionCoordinatorFenced("replaced")]}
    await node.coordinator.end(who, commit=True, version=0)
    await node.writer.asked.wait()
    partition: Any = shard.partition
    written, partition.write = partition.write, _refuse
    node.writer.open.set()
    node.writer.asked.clear()
    await node.writer.asked.wait()
    partition.write = written
    assert await node.ended() == "CompleteCommit"
    assert {marker.coordinator_epoch for _, marker in node.writer.written} == {0}


def _refuse(*_arguments: Any, **_named: Any) -> Any:
    raise NotLeader("another node leads")


async def test_an_exception_and_a_full_disk_do_not_stop_retries(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    who = await node.begin()
    tries = 0

    async def broken(marker: Marker, partitions: Iterable[TopicPartition]) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("a defect")
        return dict.fromkeys(partitions)

    node.writer.write = broken  # type: ignore[method-assign]
    (log,) = node.topics.partitions_of(node.topics.get(TRANSACTION_STATE))  # type: ignore[arg-type]
    await node.coordinator.end(who, commit=True, version=0)
    log.refusal = StorageFailure("the disk is full")
    await until(lambda: tries >= 4)
    log.refusal = None
    assert await node.ended() == "CompleteCommit"
    assert "a defect" in caplog.text


async def test_a_hanging_partition_blocks_no_other_transaction(node: Node) -> None:
    slow = await node.begin("slow", SECOND)
    node.writer.errors = {SECOND: [NotLeader("none")] * 10_000}
    await node.coordinator.end(slow, commit=True, version=0)
    who = await node.begin()
    await node.coordinator.end(who, commit=True, version=0)
    assert await node.ended() == "CompleteCommit"
    assert await node.state("slow") == "PrepareCommit"


async def test_the_remaining_markers_are_written_after_a_restart(node: Node) -> None:
    who = await node.begin("tx", PARTITION, SECOND)
    node.writer.errors = {SECOND: [NotLeader("none")] * 10_000}
    await node.coordinator.end(who, commit=True, version=0)
    await node.writer.asked.wait()
    await node.close()
    restarted = Node(node.topics.after_crash())
    try:
        await restarted.coordinator.start()
        await restarted.coordinator.wait_loaded()
        assert await restarted.ended() == "CompleteCommit"
        assert {partition for partition, _ in restarted.writer.written} == {PARTITION, SECOND}
    finally:
        await restarted.close()


async def test_a_restarting_shard_completes_its_decisions(node: Node) -> None:
    who = await node.begin()
    node.writer.open.clear()
    await node.coordinator.end(who, commit=True, version=0)
    await node.writer.asked.wait()
    (partition,) = node.topics.partitions_of(node.topics.get(TRANSACTION_STATE))  # type: ignore[arg-type]
    partition.acknowledges = False
    other = asyncio.ensure_future(node.coordinator.init(InitRequest(transactional_id="b", timeout_ms=1)))
    await until(lambda: partition.end_offset > partition.high_watermark)
    partition.fail(StorageFailure("the disk failed"))
    partition.acknowledges = True
    with pytest.raises(NotCoordinator):
        await other
    node.writer.open.set()
    await node.coordinator.wait_loaded()
    assert await node.ended() == "CompleteCommit"


async def test_a_producer_waits_briefly_for_its_last_transaction(node: Node) -> None:
    who = await node.begin()
    node.writer.open.clear()
    await node.coordinator.end(who, commit=True, version=0)
    adding = asyncio.ensure_future(node.coordinator.add_partitions(who, (SECOND,), version=0))
    await node.writer.asked.wait()
    assert not adding.done()
    node.writer.open.set()
    await adding
    assert await node.state() == "Ongoing"
    # A new producer finds it aborted, and need not retry.
    begun = await node.coordinator.init(InitRequest(transactional_id="tx", timeout_ms=60_000))
    assert begun.epoch == 2


async def test_invalid_requests_are_refused_before_the_state(node: Node) -> None:
    with pytest.raises(InvalidRequest):
        await node.coordinator.init(InitRequest(transactional_id="", timeout_ms=1))
    with pytest.raises(InvalidRequest):
        await node.coordinator.describe("x" * 5000)
    for timeout_ms in (0, -1, 900_001):
        with pytest.raises(InvalidTransactionTimeout):
            await node.coordinator.init(InitRequest(transactional_id="a", timeout_ms=timeout_ms))
    node.ids.error = StorageFailure("the catalog is away")
    with pytest.raises(MillstreamError, match="the catalog is away"):
        await node.coordinator.init(InitRequest(transactional_id="a", timeout_ms=1))


async def test_transactions_are_listed_for_administrators(node: Node) -> None:
    who = await node.begin("spark/q/0/0/a")
    assert len(await node.coordinator.listing(TransactionFilter())) == 1
    await node.coordinator.prepare(who)
    assert node.coordinator.counts()["Prepared"] == 1
    assert await node.coordinator.abort_batch("q", 0) == 1
    await node.coordinator._run("spark/q/0/0/a", lambda shard: shard.wait_ended("spark/q/0/0/a"))
    assert await node.coordinator.listing(TransactionFilter()) == []
    assert await node.coordinator.complete_batch("q", 0, ())
    assert await node.coordinator.last_batch("q") == 0
    again = await node.begin("tx")
    assert await node.coordinator.abort("tx") == "Ongoing"
    assert again.transactional_id == "tx"


class Peer:
    """Another node, with responses set by a test."""

    def __init__(self, *responses: Any) -> None:
        self.responses = list(responses)
        self.asked: list[Any] = []

    async def send(self, node: NodeId, request: Any) -> Any:
        self.asked.append(request)
        response = self.responses.pop(0)
        if isinstance(response, MillstreamError):
            raise response
        return response(request)

    async def send_private(self, node: NodeId, api_key: int, body: bytes) -> memoryview:
        raise NotImplementedError


class Local:
    def __init__(self) -> None:
        self.written: list[TopicPartition] = []

    async def write(self, marker: Marker, partition: TopicPartition) -> None:
        if partition == SECOND:
            raise NotEnoughReplicas("few")
        self.written.append(partition)


def marker() -> Marker:
    return Marker(producer_id=ProducerId(7), producer_epoch=ProducerEpoch(3), commit=True, coordinator_epoch=Epoch(5))


async def test_partitions_of_this_node_are_written_directly() -> None:
    topics = MemoryTopics()
    topics.add("t", partitions=2)
    local = Local()
    routes = MarkerRoutes(topics, local, Peer(), me=ME)
    gone = TopicPartition("gone", PartitionIndex(0))
    responses = await routes.write(marker(), [PARTITION, SECOND, gone])
    assert responses[PARTITION] is None
    assert isinstance(responses[SECOND], NotEnoughReplicas)
    assert isinstance(responses[gone], UnknownTopic)
    await routes.close()


@pytest.mark.parametrize("here", [True, False])
async def test_a_leader_that_does_not_know_a_topic_yet_is_retried(here: bool) -> None:
    class Unreachable:
        async def write(self, marker: Marker, partition: TopicPartition) -> None:
            raise UnknownTopic("not yet")

    topics = MemoryTopics()
    topics.add("t", partitions=2)
    topics.leader = ME if here else OTHER
    routes = MarkerRoutes(topics, Unreachable(), Peer(lambda request: refused(request, unknown=True)), me=ME)
    assert isinstance((await routes.write(marker(), [SECOND]))[SECOND], NotLeader)
    await routes.close()


def refused(request: Any, *, unknown: bool = False) -> Any:
    from kio.schema.errors import ErrorCode
    from kio.schema.write_txn_markers.v2 import response

    messages: Any = response
    code = ErrorCode.unknown_topic_or_partition if unknown else ErrorCode.not_leader_or_follower
    return messages.WriteTxnMarkersResponse(
        markers=tuple(
            messages.WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=tuple(
                    messages.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=tuple(
                            messages.WritableTxnMarkerPartitionResult(
                                partition_index=index,
                                error_code=code if index else ErrorCode.none,
                            )
                            for index in topic.partition_indexes
                        ),
                    )
                    for topic in marker.topics
                ),
            )
            for marker in request.markers
        )
    )


async def test_markers_for_another_node_are_batched() -> None:
    topics = MemoryTopics()
    topics.add("t", partitions=2)
    topics.leader = OTHER
    peer = Peer(refused, BrokerUnreachable("down"))
    routes = MarkerRoutes(topics, Local(), peer, me=ME)
    first, second = await asyncio.gather(routes.write(marker(), [PARTITION, SECOND]), routes.write(marker(), [SECOND]))
    assert first[PARTITION] is None
    assert isinstance(first[SECOND], NotLeader)
    assert isinstance(second[SECOND], NotLeader)
    assert [len(request.markers) for request in peer.asked] == [2]
    assert isinstance((await routes.write(marker(), [PARTITION]))[PARTITION], BrokerUnreachable)
    await routes.close()


async def test_the_gate_asks_the_coordinator_of_this_node(node: Node) -> None:
    gate = CoordinatorGate(node.coordinator, Peer(), me=ME)
    away = await gate.admit("tx", 1, 0, [PARTITION], add=True)
    assert isinstance(away[PARTITION], NotEnoughReplicas)
    who = await node.begin()
    assert await gate.admit(*who, [PARTITION], add=False) == {PARTITION: None}
    assert isinstance((await gate.admit(*who, [SECOND], add=False))[SECOND], TransactionAbortable)
    assert await gate.admit(*who, [SECOND], add=True) == {SECOND: None}
    assert isinstance((await gate.admit("tx", who.producer_id, 9, [SECOND], add=True))[SECOND], FencedProducer)
    node.writer.open.clear()
    await node.coordinator.end(who, commit=True, version=0)
    for add in (False, True):
        assert isinstance((await gate.admit(*who, [SECOND], add=add))[SECOND], ConcurrentTransactions)


def admitted(request: Any) -> Any:
    from kio.schema.add_partitions_to_txn.v5 import response
    from kio.schema.errors import ErrorCode

    messages: Any = response
    (transaction,) = request.transactions
    return messages.AddPartitionsToTxnResponse(
        throttle_time=None,
        error_code=ErrorCode.none,
        results_by_transaction=(
            messages.AddPartitionsToTxnResult(
                transactional_id=transaction.transactional_id,
                topic_results=tuple(
                    messages.AddPartitionsToTxnTopicResult(
                        name=topic.name,
                        results_by_partition=tuple(
                            messages.AddPartitionsToTxnPartitionResult(
                                partition_index=index,
                                partition_error_code=ErrorCode.producer_fenced if index else ErrorCode.none,
                            )
                            for index in topic.partitions
                        ),
                    )
                    for topic in transaction.topics
                ),
            ),
        ),
    )


async def test_the_gate_asks_another_node(node: Node) -> None:
    await node.begin()
    node.topics.leader = OTHER
    peer = Peer(admitted, BrokerUnreachable("down"))
    gate = CoordinatorGate(node.coordinator, peer, me=ME)
    responses = await gate.admit("tx", 1, 0, [PARTITION, SECOND], add=False)
    assert responses[PARTITION] is None
    assert isinstance(responses[SECOND], FencedProducer)
    assert peer.asked[0].transactions[0].verify_only
    assert isinstance((await gate.admit("tx", 1, 0, [PARTITION], add=True))[PARTITION], NotEnoughReplicas)
