"""Transactions as seen by a partition: through Produce, markers, Fetch and ListOffsets, over the wire format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis import produce
from millstream.broker.kafka.apis.describe_producers import DescribeProducers
from millstream.broker.kafka.apis.fetch import Fetch
from millstream.broker.kafka.apis.list_offsets import ListOffsets
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.net.budget import Budget
from millstream.broker.net.response import Stream
from millstream.broker.replication.partition import Partition
from millstream.core.errors import (
    ConcurrentTransactions,
    CoordinatorLoading,
    FencedProducer,
    MillstreamError,
    ProducerFenced,
    TransactionAbortable,
    TransactionCoordinatorFenced,
)
from millstream.core.ids import Offset, ProducerEpoch, ProducerId
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import load_request_class, read_request_header, read_response
from millstream.protocol.messages.shape import reshape
from millstream.protocol.records.control import Marker
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.node_group import single_node

CLIENT = ClientInfo(connection_id=1, host="127.0.0.1")
PRODUCER = 70
COMMITTED, UNCOMMITTED = 1, 0


class Gate:
    """Returns scripted verifications, and records the requests."""

    def __init__(self) -> None:
        self.versioned: list[tuple[str, int, int, tuple[TopicPartition, ...], bool]] = []
        self.errors: list[MillstreamError] = []
        self.meanwhile: Any = None
        self.silent = False

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        self.versioned.append((transactional_id, producer_id, producer_epoch, tuple(partitions), add))
        await asyncio.sleep(60 if self.silent else 0)
        if self.meanwhile is not None:
            self.meanwhile()
        error = self.errors.pop(0) if self.errors else None
        return dict.fromkeys(partitions, error)


class Broker:
    def __init__(self, topics: Topics, topic_id: UUID) -> None:
        self.topics = topics
        self.topic_id = topic_id
        self.gate = Gate()
        quota = QuotaMeter(ClientQuotas(CatalogDeclarations(Catalog("sqlite://"))), PRODUCER_BYTE_RATE)
        self._produce = Produce(topics, quota, self.gate)
        self._fetch = Fetch(topics, Budget(1 << 30), quota, bytes_max=1 << 25)

    @property
    def partition(self) -> Partition:
        return self.topics.partition("t", 0)

    async def ask(self, api: Produce | Fetch, request: Any) -> Any:
        frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
        response = api.handle_frame(frame, read_request_header(frame), CLIENT)
        # The memory of a frame is reused at once.
        frame[8:] = bytes(len(frame) - 8)
        if response is not None and not isinstance(response, list | Stream):
            response = await response
        return None if response is None else read_response(api.key, request.__version__, b"".join(response)[4:])

    async def produce(
        self,
        batches: dict[int, bytes],
        *,
        version: int = 12,
        transactional_id: str | None = "tx",
    ) -> dict[int, ErrorCode]:
        cls = load_request_class(0, version)
        module = __import__(cls.__module__, fromlist=["*"])
        name = {"topic_id": self.topic_id} if version >= 13 else {"name": "t"}
        parts = tuple(module.PartitionProduceData(index=index, records=batch) for index, batch in batches.items())
        data = module.TopicProduceData(partition_data=parts, **name)
        request = cls(transactional_id=transactional_id, acks=-1, timeout=timedelta(seconds=5), topic_data=(data,))
        response = await self.ask(self._produce, request)
        return {int(partition.index): partition.error_code for partition in response.responses[0].partition_responses}

    async def write(self, sequence: int, value: bytes = b"v", *, epoch: int = 0, **other: Any) -> ErrorCode:
        response = await self.produce({0: batch(sequence, value, epoch=epoch, **other)})
        return response[0]

    async def fetch(self, offset: int = 0, *, isolation: int = COMMITTED, version: int = 12, wait_ms: int = 0) -> Any:
        from kio.schema.fetch.v12 import request as named
        from kio.schema.fetch.v18 import request as newest

        module: Any = newest if version >= 13 else named
        name = {"topic_id": self.topic_id} if version >= 13 else {"topic": "t"}
        fetch_partition = module.FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
        request = module.FetchRequest(
            max_wait=timedelta(milliseconds=wait_ms),
            min_bytes=1,
            isolation_level=isolation,
            topics=(module.FetchTopic(partitions=(fetch_partition,), **name),),
            forgotten_topics_data=(),
        )
        response = await self.ask(self._fetch, reshape(request, load_request_class(1, version)))
        return response.responses[0].partitions[0]

    async def end(self, *, commit: bool = True, epoch: int = 0, coordinator: int = 0, bumps: bool = False) -> None:
        appended = self.partition.write_marker(
            Marker(
                producer_id=ProducerId(PRODUCER),
                producer_epoch=ProducerEpoch(epoch),
                commit=commit,
                coordinator_epoch=coordinator,
                bumps_epoch=bumps,
            )
        )
        acknowledged = self.partition.acknowledged(appended)
        if acknowledged is not None:
            await acknowledged


def batch(
    sequence: int, value: bytes = b"v", *, epoch: int = 0, producer_id: int = PRODUCER, transactional: bool = True
) -> bytes:
    return bytes(
        encode_batch(
            [NewRecord(b"k", value, (), 1000)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
    )


@asynccontextmanager
async def broker_in(data: Path) -> AsyncIterator[Broker]:
    async with single_node(data) as topics:
        topic = topics.get("t") or await topics.create("t", partitions=2)
        yield Broker(topics, topic.topic_id)


@pytest.mark.parametrize("version", range(4, 19))
async def test_committed_records_are_readable_once_their_marker_is_written(tmp_path: Path, version: int) -> None:
    async with broker_in(tmp_path) as broker:
        assert await broker.write(0, b"a") is ErrorCode.none
        assert await broker.write(1, b"b") is ErrorCode.none

        held = await broker.fetch(version=version)
        assert (held.high_watermark, held.last_stable_offset, held.records or b"") == (2, 0, b"")
        assert not held.aborted_transactions
        seen = await broker.fetch(isolation=UNCOMMITTED, version=version)
        assert len(seen.records) > 0
        assert seen.aborted_transactions is None

        await broker.end(commit=False)
        after = await broker.fetch(version=version)
        assert (after.high_watermark, after.last_stable_offset) == (3, 3)
        assert [(transaction.producer_id, transaction.first_offset) for transaction in after.aborted_transactions] == [
            (PRODUCER, 0)
        ]


@pytest.mark.parametrize("version", range(3, 14))
async def test_the_coordinator_verifies_each_transaction_once(tmp_path: Path, version: int) -> None:
    async with broker_in(tmp_path) as broker:
        for sequence in range(3):
            response = await broker.produce({0: batch(sequence), 1: batch(sequence)}, version=version)
            assert response == {0: ErrorCode.none, 1: ErrorCode.none}
        both = (TopicPartition("t", broker.partition.index), broker.topics.partition("t", 1).log.partition)
        assert broker.gate.versioned == [("tx", PRODUCER, 0, both, version >= 12)]

        await broker.end()
        assert await broker.write(3) is ErrorCode.none
        assert len(broker.gate.versioned) == 2


async def test_a_long_poll_is_woken_by_the_marker(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        await broker.write(0)
        poll = asyncio.create_task(broker.fetch(wait_ms=60_000))
        await asyncio.sleep(0)
        assert not poll.done()
        await broker.end()
        response = await asyncio.wait_for(poll, 60)
        assert len(response.records) > 0
        assert response.aborted_transactions == ()


async def test_records_behind_an_open_transaction_wake_no_read_committed_consumer(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        await broker.write(0)
        looks = 0
        read = Partition.read_committed_slice

        def counted(partition: Partition, offset: Offset, **limits: Any) -> Any:
            nonlocal looks
            looks += 1
            return read(partition, offset, **limits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Partition, "read_committed_slice", counted)
            poll = asyncio.create_task(broker.fetch(wait_ms=60_000))
            await asyncio.sleep(0)
            before = looks
            for sequence in range(1, 20):
                await broker.write(sequence)
            assert looks == before > 0
            await broker.end()
            assert len((await asyncio.wait_for(poll, 60)).records) > 0


async def test_records_behind_an_open_transaction_are_not_readable(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        plain = batch(0, b"plain", producer_id=9, transactional=False)
        assert await broker.produce({0: plain}, transactional_id=None) == {0: ErrorCode.none}
        await broker.write(0)
        assert await broker.produce({0: batch(1, producer_id=9, transactional=False)}, transactional_id=None) == {
            0: ErrorCode.none
        }
        assert broker.partition.last_stable_offset == 1
        assert broker.partition.has_open_transaction(PRODUCER, 0)
        assert [transaction.first_offset for transaction in broker.partition.open_transactions()] == [1]
        await broker.end()
        assert broker.partition.last_stable_offset == 4
        assert broker.partition.open_transactions() == []


@pytest.mark.parametrize(
    ("error", "version", "code"),
    [
        (CoordinatorLoading("loading"), 12, ErrorCode.not_enough_replicas),
        (ConcurrentTransactions("busy"), 11, ErrorCode.not_enough_replicas),
        (ProducerFenced("newer"), 12, ErrorCode.invalid_producer_epoch),
        (TransactionAbortable("no"), 10, ErrorCode.invalid_txn_state),
        (TransactionAbortable("no"), 11, ErrorCode.transaction_abortable),
    ],
)
async def test_refusals_have_the_error_of_the_version(
    tmp_path: Path, error: MillstreamError, version: int, code: ErrorCode
) -> None:
    async with broker_in(tmp_path) as broker:
        broker.gate.errors = [error]
        assert await broker.produce({0: batch(0)}, version=version) == {0: code}
        assert broker.partition.log.end_offset == 0


async def test_a_silent_coordinator_is_not_waited_for_indefinitely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce, "OPENING_TIMEOUT_S", 0.02)
    async with broker_in(tmp_path) as broker:
        broker.gate.silent = True
        assert await broker.produce({0: batch(0)}) == {0: ErrorCode.not_enough_replicas}


async def test_while_a_transaction_ends_the_next_is_verified_again(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        broker.gate.errors = [ConcurrentTransactions("busy"), ConcurrentTransactions("busy")]
        assert await broker.produce({0: batch(0)}) == {0: ErrorCode.none}
        assert len(broker.gate.versioned) == 3
        broker.gate.errors = [ConcurrentTransactions("busy")] * 100
        assert await broker.produce({1: batch(0)}) == {1: ErrorCode.concurrent_transactions}


async def test_a_marker_between_verification_and_append_refuses_the_batch(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        marker = Marker(
            producer_id=ProducerId(PRODUCER), producer_epoch=ProducerEpoch(0), commit=False, coordinator_epoch=0
        )
        broker.gate.meanwhile = lambda: broker.partition.write_marker(marker)
        assert await broker.produce({0: batch(0)}, version=11) == {0: ErrorCode.invalid_txn_state}
        assert await broker.produce({0: batch(0)}, version=11) == {0: ErrorCode.invalid_txn_state}
        broker.gate.meanwhile = None
        assert await broker.produce({0: batch(0)}, version=11) == {0: ErrorCode.none}


@pytest.mark.parametrize(("epoch", "code"), [(1, ErrorCode.none), (2, ErrorCode.invalid_producer_epoch)])
async def test_under_version_2_only_the_marker_of_the_same_transaction_refuses_the_batch(
    tmp_path: Path, epoch: int, code: ErrorCode
) -> None:
    async with broker_in(tmp_path) as broker:
        assert await broker.write(0) is ErrorCode.none
        marker = Marker(
            producer_id=ProducerId(PRODUCER),
            producer_epoch=ProducerEpoch(epoch),
            commit=True,
            coordinator_epoch=0,
            bumps_epoch=True,
        )
        # The coordinator may respond only when the previous transaction has its markers.
        broker.gate.meanwhile = lambda: broker.partition.write_marker(marker)
        assert await broker.write(0, epoch=1) is code


async def test_batches_inconsistent_with_their_transaction_are_refused(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        unnamed = await broker.produce({0: batch(0)}, transactional_id=None)
        assert unnamed == {0: ErrorCode.transactional_id_authorization_failed}
        two = await broker.produce({0: batch(0), 1: batch(0, producer_id=8)})
        assert two == {0: ErrorCode.invalid_producer_id_mapping, 1: ErrorCode.invalid_producer_id_mapping}
        assert await broker.write(0) is ErrorCode.none
        plain = await broker.produce({0: batch(1, transactional=False)})
        assert plain == {0: ErrorCode.invalid_txn_state}
        assert await broker.write(2) is ErrorCode.out_of_order_sequence_number


async def test_markers_that_bump_the_epoch_fence_late_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millstream.broker.kafka.api")
    async with broker_in(tmp_path) as broker:
        assert await broker.write(0) is ErrorCode.none
        await broker.end(epoch=1, coordinator=3, bumps=True)
        caplog.clear()
        assert await broker.write(1) is ErrorCode.invalid_producer_epoch
        (line,) = (vars(record) for record in caplog.records if record.name == "millstream.broker.kafka.api")
        assert (line["msg"], line["levelname"], line["transactional_id"]) == ("a producer is fenced", "INFO", "tx")
        assert line["reason"] == f"producer {PRODUCER} has epoch 0, but epoch 1 has written to this partition"
        end = broker.partition.log.end_offset
        await broker.end(epoch=1, coordinator=3, bumps=True)
        assert broker.partition.log.end_offset == end
        with pytest.raises(TransactionCoordinatorFenced):
            await broker.end(epoch=1, coordinator=2, bumps=True)
        with pytest.raises(FencedProducer):
            await broker.end(epoch=0, coordinator=3)
        assert await broker.write(0, epoch=1) is ErrorCode.none
        with pytest.raises(FencedProducer):
            await broker.end(epoch=1, coordinator=3, bumps=True)
        assert broker.partition.has_open_transaction(PRODUCER, 1)


async def test_offsets_and_producers_report_open_transactions(tmp_path: Path) -> None:
    from kio.schema.describe_producers.v0 import request as producers_of
    from kio.schema.list_offsets.v11 import request as offsets_of

    async def latest(broker: Broker, isolation: int) -> int:
        module: Any = offsets_of
        partition = module.ListOffsetsPartition(partition_index=0, timestamp=-1)
        topic = module.ListOffsetsTopic(name="t", partitions=(partition,))
        versioned = module.ListOffsetsRequest(
            replica_id=-1, isolation_level=isolation, topics=(topic,), timeout=timedelta(seconds=1)
        )
        response = await ListOffsets(broker.topics).handle(versioned, CLIENT)
        return int(response.topics[0].partitions[0].offset)

    async with broker_in(tmp_path) as broker:
        await broker.write(0)
        await broker.end(coordinator=4)
        await broker.write(1)
        assert (await latest(broker, UNCOMMITTED), await latest(broker, COMMITTED)) == (3, 2)
        module: Any = producers_of
        versioned = module.DescribeProducersRequest(topics=(module.TopicRequest(name="t", partition_indexes=(0,)),))
        response = await DescribeProducers(broker.topics, cast("Any", None)).handle(versioned, CLIENT)
        (producer,) = response.topics[0].partitions[0].active_producers
        assert (producer.coordinator_epoch, producer.current_txn_start_offset) == (4, 2)


async def test_the_state_is_restored_after_a_restart(tmp_path: Path) -> None:
    async with broker_in(tmp_path) as broker:
        await broker.write(0)
        await broker.end(commit=False)
        await broker.write(1)
    async with broker_in(tmp_path) as broker:
        assert broker.partition.last_stable_offset == 2
        assert broker.partition.aborted_in(Offset(0), Offset(2)) == [(PRODUCER, 0)]
        assert await broker.write(2) is ErrorCode.none
        assert broker.gate.versioned == []
        await broker.end()
        assert broker.partition.last_stable_offset == 5
