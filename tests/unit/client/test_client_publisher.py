"""The publisher against a broker that fails as it is told to: every message once and in order, or a true error."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.client.publisher import Publisher
from millstream.client.receipt import Receipt
from millstream.model.errors import (
    BatchTooLarge,
    InvalidRequest,
    OutOfOrderSequence,
    PublishFailed,
    RequestTimedOut,
    UnknownTopic,
)
from millstream.model.partitioner import partition_for_key
from millstream.records.batch import read_header
from millstream.records.record import NewRecord, decode_records
from millstream.testing.scripted_broker import METADATA, PRODUCE, ScriptedBroker
from millstream.wire import codec
from millstream.wire.client import Client

INIT_PRODUCER_ID = 22


class Ledger:
    """What a broker stores of idempotent producers, and how it fails: a list of faults, one per request."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.stored: dict[tuple[str, int], list[bytes]] = {}
        self.faults: list[str] = []
        self.values_max = 10**9
        self.requests = 0
        self.producers = 0
        self._state: dict[tuple[str, int, int], tuple[int, dict[int, int]]] = {}
        broker.served |= {INIT_PRODUCER_ID: (0, 5), PRODUCE: (3, 12)}
        broker.handlers[PRODUCE] = self.produce
        broker.handlers[INIT_PRODUCER_ID] = self.init

    async def init(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.init_producer_id.v5.response")
        self.producers += 1
        return messages.InitProducerIdResponse(
            throttle_time=timedelta(0), error_code=ErrorCode.none, producer_id=self.producers, producer_epoch=0
        )

    async def produce(self, header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.produce.v12.response")
        request = codec.read_request(PRODUCE, header.version, frame, header.body_at)
        fault = self.faults.pop(0) if self.faults else ""
        self.requests += 1
        if fault == "hang up before":
            raise EOFError
        topics = []
        for topic in request.topic_data:
            answers = [self._append(topic.name, one.index, bytes(one.records), fault) for one in topic.partition_data]
            partitions = tuple(
                messages.PartitionProduceResponse(
                    index=one.index, error_code=code, base_offset=offset, record_errors=(), error_message=None
                )
                for one, (code, offset) in zip(topic.partition_data, answers, strict=True)
            )
            topics.append(messages.TopicProduceResponse(name=topic.name, partition_responses=partitions))
        if fault == "hang up after":
            raise EOFError
        return messages.ProduceResponse(responses=tuple(topics), throttle_time=timedelta(0)) if request.acks else None

    def _append(self, topic: str, partition: int, batch: bytes, fault: str) -> tuple[ErrorCode, int]:
        if fault == "not leader":
            return ErrorCode.not_leader_or_follower, -1
        if fault == "broken sequence":
            return ErrorCode.out_of_order_sequence_number, -1
        header = read_header(batch)
        if header.record_count > self.values_max:
            return ErrorCode.message_too_large, -1
        log = self.stored.setdefault((topic, partition), [])
        if header.producer_id >= 0:
            expected, seen = self._state.get((topic, partition, header.producer_id), (header.base_sequence, {}))
            if header.base_sequence in seen:
                return ErrorCode.none, seen[header.base_sequence]
            if header.base_sequence != expected:
                return ErrorCode.out_of_order_sequence_number, -1
            seen = {**dict(list(seen.items())[-4:]), header.base_sequence: len(log)}
            self._state[topic, partition, header.producer_id] = header.last_sequence + 1, seen
        base = len(log)
        log += [record.value or b"" for record in decode_records(batch)]
        if fault == "after append":
            return ErrorCode.not_enough_replicas_after_append, -1
        return ErrorCode.none, base


@pytest.fixture
async def ledger() -> AsyncIterator[Ledger]:
    broker = ScriptedBroker()
    await broker.start()
    yield Ledger(broker)
    await broker.stop()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left


@asynccontextmanager
async def publishing(ledger: Ledger, **options: Any) -> AsyncIterator[Publisher]:
    async with Client.connect(ledger.broker.address, timeout_s=10) as client:
        publisher = Publisher(client, **options)
        try:
            yield publisher
        finally:
            await publisher.close()


def record(value: str, key: str | None = None) -> NewRecord:
    return NewRecord(None if key is None else key.encode(), value.encode())


async def test_receipts_tell_where_messages_lie(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        first = await publisher.publish("orders", record("a"), partition=1)
        named = NewRecord(b"k", b"b", (("message-id", b"order-7"),), 1234)
        second = await publisher.publish("orders", named, partition=1)
    assert (first.partition, first.offset) == (1, 0)
    assert first.id == f"{first.topic_id}/1/0"
    assert (second.offset, second.timestamp_ms, second.id) == (1, 1234, "order-7")


async def test_keys_go_where_kafka_clients_send_them(ledger: Ledger) -> None:
    ledger.broker.topics["orders"] = 7
    async with publishing(ledger) as publisher:
        for key in ("a", "customer-7", ""):
            for _ in range(2):
                placed = await publisher.publish("orders", record("v", key))
                assert placed.partition == partition_for_key(key.encode(), 7)


async def test_what_is_published_in_one_turn_goes_in_one_request(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        await publisher.publish("orders", record("first"))
        before = ledger.requests
        receipts = await asyncio.gather(*(publisher.publish("orders", record(f"{at}", f"k{at}")) for at in range(500)))
        assert ledger.requests == before + 1
    assert len({(one.partition, one.offset) for one in receipts}) == 500


async def test_many_at_once_keep_their_order_and_wake_the_caller_once(ledger: Ledger) -> None:
    async with publishing(ledger, batch_bytes=2000, buffer_bytes=20_000) as publisher:
        receipts = await publisher.publish_many("orders", [record(f"{at}", f"k{at % 3}") for at in range(2000)])
    for at, placed in enumerate(receipts):
        assert ledger.stored["orders", placed.partition][placed.offset] == f"{at}".encode()
    by_partition: dict[int, list[int]] = {}
    for placed in receipts:
        by_partition.setdefault(placed.partition, []).append(placed.offset)
    assert all(offsets == sorted(offsets) for offsets in by_partition.values())


@pytest.mark.parametrize("seed", range(4))
async def test_faults_lose_and_double_nothing(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    kinds = ["", "", "", "not leader", "hang up before", "hang up after", "after append"]
    async with publishing(ledger, batch_bytes=3000, timeout_s=60) as publisher:
        await publisher.publish_many("orders", [record("-1")])
        ledger.faults = [chance.choice(kinds) for _ in range(8)]
        if seed % 2:
            ledger.values_max = 20

        async def work(name: int) -> list[Receipt]:
            return [await publisher.publish("orders", record(f"{name}:{at}", f"k{name}")) for at in range(10)]

        many = publisher.publish_many("orders", [record(f"m:{at}") for at in range(300)], partition=0)
        *workers, together = await asyncio.gather(*(work(name) for name in range(6)), many)
    everything = [value for log in ledger.stored.values() for value in log]
    assert len(everything) == len(set(everything)) == 361
    for name, receipts in enumerate(workers):
        assert [ledger.stored["orders", one.partition][one.offset] for one in receipts] == [
            f"{name}:{at}".encode() for at in range(10)
        ]
        assert [one.offset for one in receipts] == sorted(one.offset for one in receipts)
    assert [ledger.stored["orders", 0][one.offset] for one in together] == [f"m:{at}".encode() for at in range(300)]


async def test_a_batch_that_is_too_large_is_halved_and_a_message_that_is_gives_an_error(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        await publisher.publish("orders", record("first"), partition=0)
        ledger.values_max = 3
        receipts = await publisher.publish_many("orders", [record(f"{at}") for at in range(10)], partition=0)
        assert [one.offset for one in receipts] == list(range(1, 11))
        ledger.values_max = 0
        with pytest.raises(BatchTooLarge):
            await publisher.publish("orders", record("x"), partition=0)
        with pytest.raises(PublishFailed) as failed:
            await publisher.publish_many("orders", [record("x"), record("y")], partition=0)
        assert all(isinstance(outcome, BatchTooLarge) for outcome in failed.value.outcomes)
        ledger.values_max = 100
        assert (await publisher.publish("orders", record("y"), partition=0)).offset == 11


async def test_a_broken_sequence_fails_its_batch_and_others_go_on_under_a_new_number(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["broken sequence"]
        with pytest.raises(OutOfOrderSequence):
            await publisher.publish("orders", record("b"), partition=0)
        assert (await publisher.publish("orders", record("c"), partition=0)).offset == 1
    assert ledger.producers == 2


async def test_time_that_runs_out_is_told_and_later_messages_go(ledger: Ledger) -> None:
    async with publishing(ledger, timeout_s=0.2) as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["not leader"] * 50
        with pytest.raises(RequestTimedOut, match="was not stored"):
            await publisher.publish("orders", record("b"), partition=0)
        ledger.faults = ["hang up after"] + ["not leader"] * 50
        with pytest.raises(RequestTimedOut, match="may have been stored"):
            await publisher.publish("orders", record("c"), partition=0)
        ledger.faults = []
        await publisher.publish("orders", record("d"), partition=0)
    assert ledger.stored["orders", 0] == [b"a", b"c", b"d"]


async def test_an_unknown_topic_is_told_with_a_hint(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        with pytest.raises(UnknownTopic, match="millstream topic create nothing"):
            await publisher.publish("nothing", record("a"))
        with pytest.raises(UnknownTopic, match="no partition 9"):
            await publisher.publish("orders", record("a"), partition=9)


async def test_without_acknowledgements_offsets_are_unknown(ledger: Ledger) -> None:
    async with publishing(ledger, acks=0) as publisher:
        placed = await publisher.publish("orders", record("a"), partition=0)
        assert placed.offset == -1
        await publisher.flush()
    assert ledger.producers == 0


async def test_one_acknowledgement_without_sequences_doubles_nothing(ledger: Ledger) -> None:
    async with publishing(ledger, acks=1) as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["hang up after"]
        with pytest.raises(RequestTimedOut, match="not known"):
            await publisher.publish("orders", record("b"), partition=0)
        ledger.faults = ["not leader"]
        await publisher.publish("orders", record("c"), partition=0)
    assert ledger.stored["orders", 0] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_batches_can_be_compressed(ledger: Ledger, compression: str) -> None:
    async with publishing(ledger, compression=compression, linger_s=0.001) as publisher:
        await publisher.publish_many("orders", [record(f"{at}") for at in range(50)], partition=0)
    assert ledger.stored["orders", 0] == [f"{at}".encode() for at in range(50)]


async def test_a_publisher_that_is_closed_refuses_and_gives_up_what_waits(ledger: Ledger) -> None:
    async with Client.connect(ledger.broker.address, timeout_s=10) as client:
        publisher = Publisher(client, timeout_s=0.5)
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["not leader"] * 100
        waiting = asyncio.create_task(publisher.publish("orders", record("b"), partition=0))
        await asyncio.sleep(0)
        await publisher.close()
        with pytest.raises(RequestTimedOut):
            await waiting
        with pytest.raises(InvalidRequest, match="closed"):
            await publisher.publish("orders", record("c"))


@pytest.mark.parametrize("options", [{"compression": "zip"}, {"acks": 2}])
async def test_options_that_cannot_be_are_refused(ledger: Ledger, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        async with publishing(ledger, **options):
            pass


async def test_only_bytes_are_published(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        with pytest.raises(InvalidRequest, match="not str"):
            await publisher.publish("orders", NewRecord(None, "text"))  # type: ignore[arg-type]
        await publisher.publish("orders", NewRecord(bytearray(b"k"), memoryview(b"v")))  # type: ignore[arg-type]


async def test_a_topic_that_grows_is_used_whole(ledger: Ledger) -> None:
    async with publishing(ledger) as publisher:
        await publisher.publish("orders", record("a"))
        ledger.broker.topics["orders"] = 5
        ledger.faults = ["not leader"]
        await publisher.publish("orders", record("b"), partition=0)
        await publisher.publish("orders", record("c"), partition=4)
        assert ledger.broker.asked(METADATA) >= 2
    assert ledger.stored["orders", 4] == [b"c"]
