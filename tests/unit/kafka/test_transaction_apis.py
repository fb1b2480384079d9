"""The transaction APIs over the wire format, in every version, on a coordinator in memory."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from random import Random
from typing import Any, cast

import msgspec
import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import WirePeers
from millstream.broker.coordination.shard import Shard
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import PrivateApi
from millstream.broker.kafka.apis.add_offsets_to_txn import AddOffsetsToTxn
from millstream.broker.kafka.apis.add_partitions_to_txn import AddPartitionsToTxn
from millstream.broker.kafka.apis.batch_transactions import (
    AbortBatch,
    AbortTransaction,
    CompleteBatch,
    LastBatch,
    PrepareTransaction,
)
from millstream.broker.kafka.apis.end_txn import EndTxn
from millstream.broker.kafka.apis.init_producer_id import InitProducerId
from millstream.broker.kafka.apis.transaction_listings import DescribeTransactions, ListTransactions
from millstream.broker.kafka.apis.txn_offset_commit import TxnOffsetCommit
from millstream.broker.kafka.apis.write_txn_markers import WriteTxnMarkers
from millstream.broker.kafka.transaction_service import CoordinatorGate, PartitionMarkers
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.marker_sender import MarkerRoutes, MarkerSender
from millstream.broker.transactions.transaction import TransactionState
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import FencedProducer, UnknownTopic
from millstream.core.ids import NodeId, ProducerId
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.records.control import Marker
from millstream_testing.api_requests import client_info, send_in_version, send_request
from millstream_testing.state_log import MemoryTopics

ID = "tx"


def messages(name: str, version: int, kind: str = "request") -> Any:
    return importlib.import_module(f"kio.schema.{name}.v{version}.{kind}")


class Ids:
    last = 0

    async def next(self) -> ProducerId:
        self.last += 1
        return ProducerId(self.last)


class MarkedPartition:
    """Accepts markers of epochs up to a limit."""

    def __init__(self) -> None:
        self.markers: list[Marker] = []

    def write_marker(self, marker: Marker) -> object:
        if marker.producer_epoch > 30_000:
            raise FencedProducer("too late")
        self.markers.append(marker)
        return marker

    def acknowledged(self, appended: object) -> None:
        return None


class MarkedTopics(MemoryTopics):
    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[tuple[str, int], MarkedPartition] = {}

    def partition(self, name: str, index: int) -> MarkedPartition:
        if name == "absent":
            raise UnknownTopic(name)
        return self.marked.setdefault((name, index), MarkedPartition())


class Broker:
    def __init__(self) -> None:
        self.topics = MarkedTopics()
        self.topics.add("t", partitions=2)
        self.latest_coordinator = 3
        config = Config(transactions_partitions=1, offsets_partitions=1)
        known = cast("Topics", self.topics)
        ids = Ids()
        self.groups = GroupCoordinator(self.topics, config, SystemClock())
        self.coordinator = TransactionCoordinator(self.topics, config, SystemClock(), ids)
        self.local = PartitionMarkers(known, self.groups, lambda: self.latest_coordinator)
        self.peers = WirePeers(lambda _: None, me=NodeId(1))
        self.routes = MarkerRoutes(self.topics, self.local, self.peers, me=NodeId(1))
        self.sender = MarkerSender(lambda: self.coordinator.shards, self.routes, Random(1))
        self.coordinator.on_transaction_ending(self.sender.wake)
        gate = CoordinatorGate(self.coordinator, self.peers, me=NodeId(1))
        self.init = InitProducerId(ids, self.coordinator)
        self.add = AddPartitionsToTxn(self.coordinator, known)
        self.add_offsets = AddOffsetsToTxn(self.coordinator, self.groups)
        self.end = EndTxn(self.coordinator)
        self.commit_offsets = TxnOffsetCommit(self.groups, known, gate)
        self.markers = WriteTxnMarkers(self.local)
        self.describe = DescribeTransactions(self.coordinator)
        self.list = ListTransactions(self.coordinator)

    async def close(self) -> None:
        await self.sender.close()
        await self.routes.close()
        await self.coordinator.close()
        await self.groups.close()
        await self.peers.close()

    async def begin(self, name: str = ID, version: int = 5, **expected: int) -> Any:
        request = messages("init_producer_id", 5).InitProducerIdRequest(
            transactional_id=name, transaction_timeout=timedelta(minutes=1), **expected
        )
        return await send_in_version(self.init, version, request)

    async def add_to(
        self, producer_id: int, epoch: int, *, version: int = 3, topic: str = "t", verify: bool = False
    ) -> Any:
        """Send one version; return the code of partition 1."""
        if version >= 4:
            module = messages("add_partitions_to_txn", version)
            requested_topic = module.AddPartitionsToTxnTopic(name=topic, partitions=(1,))
            transaction = module.AddPartitionsToTxnTransaction(
                transactional_id=ID,
                producer_id=producer_id,
                producer_epoch=epoch,
                verify_only=verify,
                topics=(requested_topic,),
            )
            response = await send_request(self.add, module.AddPartitionsToTxnRequest(transactions=(transaction,)))
            topics = response.results_by_transaction[0].topic_results
        else:
            module = messages("add_partitions_to_txn", version)
            requested_topic = module.AddPartitionsToTxnTopic(name=topic, partitions=(1,))
            request = module.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=ID,
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=(requested_topic,),
            )
            topics = (await send_request(self.add, request)).results_by_topic_v3_and_below
        return topics[0].results_by_partition[0].partition_error_code

    async def end_it(self, producer_id: int, epoch: int, *, commit: bool = True, version: int = 4) -> Any:
        request = messages("end_txn", 5).EndTxnRequest(
            transactional_id=ID, producer_id=producer_id, producer_epoch=epoch, committed=commit
        )
        return await send_in_version(self.end, version, request)

    async def offsets(self, producer_id: int, epoch: int, *, version: int, topic: str = "t") -> Any:
        module = messages("txn_offset_commit", 5)
        partition = module.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=5, committed_leader_epoch=-1, committed_metadata="m"
        )
        request = module.TxnOffsetCommitRequest(
            transactional_id=ID,
            group_id="g",
            producer_id=producer_id,
            producer_epoch=epoch,
            topics=(module.TxnOffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
        )
        return (await send_in_version(self.commit_offsets, version, request)).topics[0].partitions[0].error_code


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    yield made
    await made.close()


@pytest.mark.parametrize("version", range(6))
async def test_a_transaction_in_every_version(broker: Broker, version: int) -> None:
    begun = await broker.begin(version=version)
    assert (begun.error_code, begun.producer_epoch) == (ErrorCode.none, 0)
    who = (begun.producer_id, 0)
    assert await broker.add_to(*who, version=version) is ErrorCode.none
    ended = await broker.end_it(*who, version=version)
    assert ended.error_code is ErrorCode.none
    assert (ended.producer_id, ended.producer_epoch) == ((who[0], 1) if version == 5 else (-1, -1))
    next_epoch = 1 if version == 5 else 0
    assert await broker.add_to(who[0], next_epoch, version=version) is ErrorCode.none
    (marker,) = broker.topics.marked["t", 1].markers
    assert (marker.commit, marker.producer_epoch, marker.bumps_epoch) == (True, next_epoch, version == 5)


@pytest.mark.parametrize("version", range(6))
async def test_a_fenced_producer_gets_the_error_of_its_version(broker: Broker, version: int) -> None:
    first = await broker.begin()
    await broker.begin()
    older = ErrorCode.invalid_producer_epoch
    code = await broker.add_to(first.producer_id, 0, version=version)
    assert code is (older if version < 2 else ErrorCode.producer_fenced)
    ended = await broker.end_it(first.producer_id, 0, version=version)
    expected = older if version < 2 else ErrorCode.producer_fenced
    assert ended.error_code is expected
    if version >= 3:
        again = await broker.begin(version=version, producer_id=first.producer_id, producer_epoch=0)
        assert again.error_code is (older if version < 4 else ErrorCode.producer_fenced)
    request = messages("add_offsets_to_txn", 4).AddOffsetsToTxnRequest(
        transactional_id=ID, producer_id=first.producer_id, producer_epoch=0, group_id="g"
    )
    offsets = await send_in_version(broker.add_offsets, min(version, 4), request)
    assert offsets.error_code is expected


async def test_invalid_initialisations_are_refused(broker: Broker) -> None:
    assert (await broker.begin("")).error_code is ErrorCode.invalid_request
    request = messages("init_producer_id", 5).InitProducerIdRequest(
        transactional_id=ID, transaction_timeout=timedelta(days=1)
    )
    assert (await send_request(broker.init, request)).error_code is ErrorCode.invalid_transaction_timeout


@pytest.mark.parametrize("version", range(6))
async def test_partitions_that_cannot_be_added_are_refused(broker: Broker, version: int) -> None:
    begun = await broker.begin()
    code = await broker.add_to(begun.producer_id, 0, version=version, topic="nothing")
    assert code is ErrorCode.unknown_topic_or_partition
    await broker.groups.ensure()
    assert broker.topics.get("__consumer_offsets") is not None
    code = await broker.add_to(begun.producer_id + 9, 0, version=version)
    assert code is ErrorCode.invalid_producer_id_mapping


async def test_each_refusal_of_a_fenced_producer_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millstream.broker.kafka.api")
    begun = await broker.begin()
    who = begun.producer_id, begun.producer_epoch
    assert await broker.add_to(*who) is ErrorCode.none
    assert caplog.records == []
    late = begun.producer_id, begun.producer_epoch + 1
    assert await broker.add_to(*late) is ErrorCode.producer_fenced
    assert await broker.offsets(*late, version=5) is ErrorCode.invalid_producer_epoch
    request = messages("end_txn", 5).EndTxnRequest(
        transactional_id=ID, producer_id=late[0], producer_epoch=late[1], committed=True
    )
    assert (await send_in_version(broker.end, 5, request)).error_code is ErrorCode.producer_fenced
    lines = [vars(record) for record in caplog.records]
    assert [(line["msg"], line["levelname"], line["client_id"]) for line in lines] == [
        ("a producer is fenced", "INFO", "test")
    ] * 3
    assert {line["reason"] for line in lines} == {f"producer {late[0]} of 'tx' is at epoch 0, not 1"}


@pytest.mark.parametrize("version", [4, 5])
async def test_partitions_are_verified(broker: Broker, version: int) -> None:
    begun = await broker.begin()
    absent = await broker.add_to(begun.producer_id, 0, version=version, verify=True)
    assert absent is ErrorCode.transaction_abortable
    await broker.add_to(begun.producer_id, 0, version=version)
    assert await broker.add_to(begun.producer_id, 0, version=version, verify=True) is ErrorCode.none


@pytest.mark.parametrize("version", range(6))
async def test_offsets_of_a_transaction(broker: Broker, version: int) -> None:
    begun = await broker.begin()
    who = (begun.producer_id, 0)
    assert await broker.offsets(*who, version=version, topic="nothing") is ErrorCode.unknown_topic_or_partition
    if version < 5:
        absent = await broker.offsets(*who, version=version)
        assert absent is (ErrorCode.transaction_abortable if version == 4 else ErrorCode.invalid_txn_state)
        request = messages("add_offsets_to_txn", 4).AddOffsetsToTxnRequest(
            transactional_id=ID, producer_id=who[0], producer_epoch=0, group_id="g"
        )
        assert (await send_in_version(broker.add_offsets, min(version, 4), request)).error_code is ErrorCode.none
    assert await broker.offsets(*who, version=version) is ErrorCode.none
    assert await broker.offsets(who[0], 7, version=version) is ErrorCode.invalid_producer_epoch
    fetched = (await broker.groups.fetch("g", {"t": [0]}))["t"][0]
    assert (fetched.offset, fetched.is_stable) == (-1, False)
    await broker.end_it(*who, version=version)
    await broker.coordinator._run(ID, lambda shard: shard.wait_ended(ID))
    fetched = (await broker.groups.fetch("g", {"t": [0]}))["t"][0]
    assert (fetched.offset, fetched.is_stable) == (5, True)


async def test_a_decision_that_was_held_back_is_not_made_during_the_next_hold(broker: Broker) -> None:
    begun = await broker.begin()
    assert await broker.add_to(begun.producer_id, 0) is ErrorCode.none
    async with broker.coordinator.hold_decisions():
        ending = asyncio.create_task(broker.end_it(begun.producer_id, 0))
        await turns()
        assert not ending.done()
    async with broker.coordinator.hold_decisions():
        before = await broker.coordinator.describe(ID), list(broker.topics.marked)
        await turns()
        assert (await broker.coordinator.describe(ID), list(broker.topics.marked)) == before
    assert (await ending).error_code is ErrorCode.none


async def test_a_decision_that_waited_for_its_coordinator_to_load_is_not_made_during_a_hold(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await broker.begin()
    assert await broker.add_to(begun.producer_id, 0) is ErrorCode.none
    is_loaded, run = asyncio.Event(), Shard.run

    async def run_when_loaded(shard: Any, *arguments: Any, **more: Any) -> Any:
        await is_loaded.wait()
        return await run(shard, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Shard, "run", run_when_loaded)
        ending = asyncio.create_task(broker.end_it(begun.producer_id, 0))
        await turns()
    async with broker.coordinator.hold_decisions():
        is_loaded.set()
        await turns()
        assert (await broker.coordinator.describe(ID)).state is TransactionState.ONGOING
    assert (await ending).error_code is ErrorCode.none


async def test_holds_that_overlap_do_not_delay_a_decision_forever(broker: Broker) -> None:
    begun = await broker.begin()
    assert await broker.add_to(begun.producer_id, 0) is ErrorCode.none

    async def hold_repeatedly() -> None:
        while True:
            async with broker.coordinator.hold_decisions():
                await turns(5)

    holding = [asyncio.create_task(hold_repeatedly()) for _ in range(3)]
    await turns()
    ending = asyncio.create_task(broker.end_it(begun.producer_id, 0))
    await turns(1000)
    assert ending.done()
    for task in holding:
        task.cancel()
    await asyncio.wait(holding)


async def turns(count: int = 50) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("version", [1, 2])
async def test_markers_from_another_node(broker: Broker, version: int) -> None:
    module = messages("write_txn_markers", 2)

    def marker(epoch: int, topic: str, producer_id: int = 7) -> Any:
        return module.WritableTxnMarker(
            producer_id=producer_id,
            producer_epoch=epoch,
            transaction_result=False,
            topics=(module.WritableTxnMarkerTopic(name=topic, partition_indexes=(0,)),),
            coordinator_epoch=3,
            transaction_version=2,
        )

    requested_topic = (
        marker(1, "t"),
        marker(1, "absent"),
        marker(31_000, "t"),
        marker(1, "__consumer_offsets"),
        marker(1, "__transaction_state"),
        marker(1, "__audit"),
        marker(-1, "t"),
        marker(1, "t", producer_id=-1),
    )
    response = await send_in_version(broker.markers, version, module.WriteTxnMarkersRequest(markers=requested_topic))
    assert [marker.topics[0].partitions[0].error_code for marker in response.markers] == [
        ErrorCode.none,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.not_leader_or_follower,
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_request,
        ErrorCode.invalid_request,
    ]
    (written,) = broker.topics.marked["t", 0].markers
    assert (written.coordinator_epoch, written.commit, written.bumps_epoch) == (3, False, version == 2)
    assert written.latest_coordinator == 3


async def test_offsets_of_transactions_are_protected_from_unknown_coordinators(broker: Broker) -> None:
    begun = await broker.begin()
    assert await broker.offsets(begun.producer_id, 0, version=5) is ErrorCode.none
    module = messages("write_txn_markers", 2)

    async def mark(coordinator_epoch: int) -> ErrorCode:
        marker = module.WritableTxnMarker(
            producer_id=begun.producer_id,
            producer_epoch=0,
            transaction_result=False,
            topics=(module.WritableTxnMarkerTopic(name="__consumer_offsets", partition_indexes=(0,)),),
            coordinator_epoch=coordinator_epoch,
        )
        response = await send_in_version(broker.markers, 2, module.WriteTxnMarkersRequest(markers=(marker,)))
        code: ErrorCode = response.markers[0].topics[0].partitions[0].error_code
        return code

    (pending,) = await broker.groups.pending_producers(0)
    assert (pending.producer_id, pending.epoch, pending.coordinator_epoch) == (begun.producer_id, 0, -1)
    assert await mark(2**31 - 1) is ErrorCode.unknown_leader_epoch
    assert await mark(4) is ErrorCode.unknown_leader_epoch
    assert await mark(3) is ErrorCode.none
    assert await mark(2) is ErrorCode.transaction_coordinator_fenced
    assert await broker.groups.pending_producers(0) == []


async def test_transactions_are_listed_and_described(broker: Broker) -> None:
    begun = await broker.begin()
    await broker.add_to(begun.producer_id, 0)
    module = messages("list_transactions", 2)

    async def listed(**filters: Any) -> Any:
        return await send_request(broker.list, module.ListTransactionsRequest(**filters))

    (transaction,) = (await listed()).transaction_states
    assert (transaction.transactional_id, transaction.producer_id, transaction.transaction_state) == (
        ID,
        begun.producer_id,
        "Ongoing",
    )
    unknown = await listed(state_filters=("Odd",))
    assert (unknown.unknown_state_filters, unknown.transaction_states) == (("Odd",), ())
    assert len((await listed(state_filters=("Odd", "Ongoing"))).transaction_states) == 1
    assert len((await listed(transactional_id_pattern="t.")).transaction_states) == 1
    assert len((await listed(transactional_id_pattern="t")).transaction_states) == 0
    assert (await listed(transactional_id_pattern="(")).error_code is ErrorCode.invalid_regular_expression
    assert (await listed(duration_filter=10**9)).transaction_states == ()

    versioned = messages("describe_transactions", 0).DescribeTransactionsRequest(transactional_ids=(ID, "nobody", ""))
    known, absent, empty = (await send_request(broker.describe, versioned)).transaction_states
    assert (known.error_code, known.transaction_state) == (ErrorCode.none, "Ongoing")
    assert [(topic.topic, topic.partitions) for topic in known.topics] == [("t", (1,))]
    assert known.transaction_timeout == timedelta(minutes=1)
    assert absent.error_code is ErrorCode.transactional_id_not_found
    assert empty.error_code is ErrorCode.invalid_request


async def versioned(api: PrivateApi[Any, Any], body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    header = RequestHeader(api_key=api.key, version=0, correlation_id=1, client_id="c", body_at=0, flexible=False)
    given_response = cast("Any", api.handle_frame(memoryview(content), header, client_info()))
    buffers = given_response if isinstance(given_response, list) else await given_response
    response: dict[str, Any] = msgspec.msgpack.decode(buffers[1])
    return response


async def test_the_requests_of_the_batch_commit(broker: Broker) -> None:
    coordinator = broker.coordinator
    begun = await broker.begin("spark/q/0/0/a")
    member = {"transactional_id": "spark/q/0/0/a", "producer_id": begun.producer_id, "producer_epoch": 0}
    whole = {"query": "q", "batch": 0, "members": [member]}
    failed = await versioned(CompleteBatch(coordinator), whole)
    assert failed["error"] == ErrorCode.invalid_txn_state
    assert "Empty" in failed["message"]
    assert (await versioned(PrepareTransaction(coordinator), member))["error"] == 0
    assert await versioned(LastBatch(coordinator), {"query": "q"}) == {"error": 0, "message": None, "batch": -1}
    assert await versioned(CompleteBatch(coordinator), whole) == {"error": 0, "message": None, "done_now": True}
    assert (await versioned(CompleteBatch(coordinator), whole))["done_now"] is False
    assert (await versioned(LastBatch(coordinator), {"query": "q"}))["batch"] == 0
    assert (await versioned(AbortBatch(coordinator), {"query": "q", "batch": 1}))["aborted"] == 0
    again = await broker.begin()
    await broker.add_to(again.producer_id, 0)
    assert (await versioned(AbortTransaction(coordinator), {"transactional_id": ID}))["state"] == "Ongoing"
    for odd in (b"", b"{}", b"[1]", {"query": 7}):
        assert (await versioned(LastBatch(coordinator), odd))["error"] == ErrorCode.invalid_request
