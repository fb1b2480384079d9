"""The publisher against a broker with scripted failures: every message is stored once and in order, or fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.client.message import Receipt
from millstream.client.publisher import Publisher
from millstream.core.errors import (
    BatchTooLarge,
    InvalidRequest,
    NotStoredInTime,
    OutOfOrderSequence,
    PublishFailed,
    RequestTimedOut,
    UnknownTopic,
)
from millstream.core.topic import partition_for_key
from millstream.protocol.records.record import NewRecord
from millstream.protocol.wire.client import Client
from millstream_testing.producer_ledger import ProducerLedger
from millstream_testing.scripted_broker import METADATA


@pytest.fixture
async def ledger() -> AsyncIterator[ProducerLedger]:
    async with ProducerLedger.started() as started:
        yield started


def record(value: str, key: str | None = None) -> NewRecord:
    return NewRecord(None if key is None else key.encode(), value.encode())


async def test_receipts_locate_messages(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        first = await publisher.publish("orders", record("a"), partition=1)
        named = NewRecord(b"k", b"b", (("message-id", b"order-7"),), 1234)
        second = await publisher.publish("orders", named, partition=1)
    assert (first.partition, first.offset) == (1, 0)
    assert first.id == f"{first.topic_id}/1/0"
    assert (second.offset, second.timestamp_ms, second.id) == (1, 1234, "order-7")


async def test_keys_map_to_the_partitions_of_kafka_clients(ledger: ProducerLedger) -> None:
    ledger.broker.topics["orders"] = 7
    async with ledger.publishing() as publisher:
        for key in ("a", "customer-7", ""):
            for _ in range(2):
                placed = await publisher.publish("orders", record("v", key))
                assert placed.partition == partition_for_key(key.encode(), 7)


async def test_messages_of_one_loop_turn_share_a_request(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        await publisher.publish("orders", record("first"))
        before = ledger.requests
        receipts = await asyncio.gather(*(publisher.publish("orders", record(f"{at}", f"k{at}")) for at in range(500)))
        assert ledger.requests == before + 1
    assert len({(receipt.partition, receipt.offset) for receipt in receipts}) == 500


async def test_publish_many_keeps_the_order_and_wakes_the_caller_once(ledger: ProducerLedger) -> None:
    async with ledger.publishing(batch_bytes=2000, buffer_bytes=20_000) as publisher:
        receipts = await publisher.publish_many("orders", [record(f"{at}", f"k{at % 3}") for at in range(2000)])
    for at, placed in enumerate(receipts):
        assert ledger.stored["orders", placed.partition][placed.offset] == f"{at}".encode()
    by_partition: dict[int, list[int]] = {}
    for placed in receipts:
        by_partition.setdefault(placed.partition, []).append(placed.offset)
    assert all(offsets == sorted(offsets) for offsets in by_partition.values())


@pytest.mark.parametrize("seed", range(4))
async def test_faults_neither_lose_nor_duplicate_messages(ledger: ProducerLedger, seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["", "", "", "not leader", "hang up before", "hang up after", "after append"]
    async with ledger.publishing(batch_bytes=3000, timeout_s=60) as publisher:
        await publisher.publish_many("orders", [record("-1")])
        if seed % 2:
            # A batch that may be stored already is not split, so no outcome is left open here.
            ledger.values_max, kinds = 20, ["", "", "not leader"]
        ledger.faults = [rng.choice(kinds) for _ in range(8)]

        async def work(name: int) -> list[Receipt]:
            return [await publisher.publish("orders", record(f"{name}:{at}", f"k{name}")) for at in range(10)]

        many = publisher.publish_many("orders", [record(f"m:{at}") for at in range(300)], partition=0)
        *workers, shared = await asyncio.gather(*(work(name) for name in range(6)), many)
    everything = [value for log in ledger.stored.values() for value in log]
    assert len(everything) == len(set(everything)) == 361
    for name, receipts in enumerate(workers):
        assert [ledger.stored["orders", receipt.partition][receipt.offset] for receipt in receipts] == [
            f"{name}:{at}".encode() for at in range(10)
        ]
        assert [receipt.offset for receipt in receipts] == sorted(receipt.offset for receipt in receipts)
    assert [ledger.stored["orders", 0][receipt.offset] for receipt in shared] == [
        f"m:{at}".encode() for at in range(300)
    ]


async def test_a_batch_that_is_too_large_is_split_and_a_message_that_is_too_large_fails(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        await publisher.publish("orders", record("first"), partition=0)
        ledger.values_max = 3
        receipts = await publisher.publish_many("orders", [record(f"{at}") for at in range(10)], partition=0)
        assert [receipt.offset for receipt in receipts] == list(range(1, 11))
        ledger.values_max = 0
        with pytest.raises(BatchTooLarge):
            await publisher.publish("orders", record("x"), partition=0)
        with pytest.raises(PublishFailed) as failed:
            await publisher.publish_many("orders", [record("x"), record("y")], partition=0)
        assert all(isinstance(outcome, BatchTooLarge) for outcome in failed.value.outcomes)
        assert str(failed.value).startswith("2 of 2 messages were not published (indexes 0, 1): ")
        ledger.values_max = 100
        assert (await publisher.publish("orders", record("y"), partition=0)).offset == 11


async def test_a_sequence_error_fails_its_batch_and_later_ones_use_a_new_producer_id(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["broken sequence"]
        with pytest.raises(OutOfOrderSequence):
            await publisher.publish("orders", record("b"), partition=0)
        assert (await publisher.publish("orders", record("c"), partition=0)).offset == 1
    assert ledger.producers == 2


async def test_a_timeout_is_reported_and_later_messages_are_sent(ledger: ProducerLedger) -> None:
    await ledger.warm_up()
    async with ledger.publishing() as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.give_time(publisher, 1)
        ledger.faults = ["not leader"] * 50
        with pytest.raises(NotStoredInTime, match=r"(was not|nothing was) stored"):
            await publisher.publish("orders", record("b"), partition=0)
        ledger.faults = ["hang up after"] + ["not leader"] * 50
        with pytest.raises(RequestTimedOut, match="may have been stored") as unknown:
            await publisher.publish("orders", record("c"), partition=0)
        assert not isinstance(unknown.value, NotStoredInTime)
        ledger.faults = []
        ledger.give_time(publisher, 60)
        await publisher.publish("orders", record("d"), partition=0)
    assert ledger.stored["orders", 0] == [b"a", b"c", b"d"]


async def test_an_unknown_topic_is_reported_with_a_hint(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        with pytest.raises(UnknownTopic, match="millstream topic create nothing"):
            await publisher.publish("nothing", record("a"))
        with pytest.raises(UnknownTopic, match="no partition 9"):
            await publisher.publish("orders", record("a"), partition=9)


async def test_without_acknowledgements_offsets_are_unknown(ledger: ProducerLedger) -> None:
    async with ledger.publishing(acks=0) as publisher:
        placed = await publisher.publish("orders", record("a"), partition=0)
        assert placed.offset == -1
        await publisher.flush()
    assert ledger.producers == 0


async def test_acks_1_without_sequences_duplicates_nothing(ledger: ProducerLedger) -> None:
    async with ledger.publishing(acks=1) as publisher:
        await publisher.publish("orders", record("a"), partition=0)
        ledger.faults = ["hang up after"]
        with pytest.raises(RequestTimedOut, match="unknown"):
            await publisher.publish("orders", record("b"), partition=0)
        ledger.faults = ["not leader"]
        await publisher.publish("orders", record("c"), partition=0)
    assert ledger.stored["orders", 0] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_batches_can_be_compressed(ledger: ProducerLedger, compression: str) -> None:
    async with ledger.publishing(compression=compression, linger_s=0.001) as publisher:
        await publisher.publish_many("orders", [record(f"{at}") for at in range(50)], partition=0)
    assert ledger.stored["orders", 0] == [f"{at}".encode() for at in range(50)]


async def test_a_closed_publisher_refuses_messages_and_fails_the_queued_ones(ledger: ProducerLedger) -> None:
    await ledger.warm_up()
    async with Client.connect(ledger.broker.address, timeout_s=60) as client:
        publisher = Publisher(client)
        await publisher.publish("orders", record("a"), partition=0)
        ledger.give_time(publisher, 1)
        ledger.faults = ["not leader"] * 100
        waiting = asyncio.create_task(publisher.publish("orders", record("b"), partition=0))
        await asyncio.sleep(0)
        await publisher.close()
        with pytest.raises(RequestTimedOut):
            await waiting
        with pytest.raises(InvalidRequest, match="closed"):
            await publisher.publish("orders", record("c"))


@pytest.mark.parametrize("options", [{"compression": "zip"}, {"acks": 2}])
async def test_invalid_options_are_refused(ledger: ProducerLedger, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        async with ledger.publishing(**options):
            pass


async def test_only_bytes_are_published(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        with pytest.raises(InvalidRequest, match="not str"):
            await publisher.publish("orders", NewRecord(None, "text"))  # type: ignore[arg-type]
        await publisher.publish("orders", NewRecord(bytearray(b"k"), memoryview(b"v")))  # type: ignore[arg-type]


async def test_added_partitions_are_used(ledger: ProducerLedger) -> None:
    async with ledger.publishing() as publisher:
        await publisher.publish("orders", record("a"))
        ledger.broker.topics["orders"] = 5
        ledger.faults = ["not leader"]
        await publisher.publish("orders", record("b"), partition=0)
        await publisher.publish("orders", record("c"), partition=4)
        assert ledger.broker.request_count(METADATA) >= 2
    assert ledger.stored["orders", 4] == [b"c"]
