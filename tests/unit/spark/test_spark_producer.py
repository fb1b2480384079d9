"""Writing rows to partitions: batched, in sequence order, and without unnoticed failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millstream.core.errors import InvalidBatch, MillstreamError
from millstream.core.ids import Offset, ProducerId
from millstream.core.topic import murmur2
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.row_producer import RowProducer
from millstream.protocol.private.transactions import TransactionalProducer
from millstream.protocol.records.batch import read_header
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.produce import Produced

PARTITIONS = 3
IDENTITY = TransactionalProducer("spark/q/0/0/a", ProducerId(7), 0)


class Broker:
    """Accepts batches; delays the first one of every partition behind the others."""

    def __init__(self) -> None:
        self.taken: dict[int, list[tuple[int, int]]] = {}
        self.records: dict[tuple[str, int], list[Record]] = {}
        self.fails = False

    async def metadata(self, topics: list[str], *, create: bool = False) -> Any:
        known = {topic: SimpleNamespace(partitions=range(PARTITIONS)) for topic in topics}
        return SimpleNamespace(errors={}, topics=known)

    async def produce(self, topic: str, partition: int, batch: bytes, *, transactional_id: str | None) -> Produced:
        if self.fails:
            raise InvalidBatch("no")
        if partition not in self.taken:
            await asyncio.sleep(0.05)
        header = read_header(batch)
        self.taken.setdefault(partition, []).append((header.base_sequence, header.record_count))
        self.records.setdefault((topic, partition), []).extend(decode_records(batch))
        return Produced(Offset(0), -1)

    async def close(self) -> None:
        pass


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def link(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    async def connect(self: Link, client_id: str, timeout_s: float, patience_s: float) -> Any:
        return broker

    monkeypatch.setattr(Link, "_connect", connect)
    link = Link("nowhere:1", "test", 1.0)
    yield link
    link.close()


@pytest.fixture
def producer(link: Link) -> RowProducer:
    return RowProducer(link, WriteOptions(topic="orders"), IDENTITY, transactional=True)


def rows(count: int, size: int) -> pa.RecordBatch:
    keys = [b"%d" % number for number in range(count)]
    return pa.RecordBatch.from_pydict({"key": keys, "value": [b"x" * size] * count})


def test_batches_of_a_partition_arrive_in_sequence_order(broker: Broker, producer: RowProducer) -> None:
    for _ in range(8):
        producer.write(rows(1000, 2000))
    producer.flush()
    assert set(broker.taken) == set(range(PARTITIONS))
    for taken in broker.taken.values():
        assert len(taken) > 1
        nexts = [base + count for base, count in taken]
        assert [base for base, _ in taken] == [0, *nexts[:-1]]
    assert sum(count for taken in broker.taken.values() for _, count in taken) == producer.rows == 8000


def test_a_few_rows_are_batched_with_later_ones(broker: Broker, producer: RowProducer) -> None:
    for _ in range(10):
        producer.write(rows(100, 100))
    assert not broker.taken
    producer.flush()
    assert [len(taken) for taken in broker.taken.values()] == [1] * PARTITIONS


def test_a_refusal_by_the_broker_is_raised(broker: Broker, producer: RowProducer) -> None:
    broker.fails = True
    producer.write(rows(1, 100))
    with pytest.raises(MillstreamError):
        producer.flush()


def test_without_rows_nothing_is_sent(broker: Broker, producer: RowProducer) -> None:
    producer.flush()
    assert (broker.taken, producer.rows) == ({}, 0)


def test_every_row_arrives_intact_and_in_order_in_its_partition(broker: Broker, link: Link) -> None:
    count = 300
    topics = [f"topic-{number * 7 % 5}" for number in range(count)]
    keys = [None if number % 11 == 0 else b"k%d" % (number % 13) for number in range(count)]
    values = [None if number % 17 == 0 else b"%d" % number for number in range(count)]
    headers = [[{"key": "n", "value": b"%d" % number}] * (number % 3) or None for number in range(count)]
    named = [number % PARTITIONS if number % 5 == 2 or number % 11 == 0 else None for number in range(count)]
    columns = {"topic": topics, "key": keys, "value": values, "headers": headers}
    batch = pa.RecordBatch.from_pydict({**columns, "partition": pa.array(named, pa.int32())})
    producer = RowProducer(link, WriteOptions(), IDENTITY, transactional=True)
    for part in (batch.slice(0, 100), batch.slice(100)):
        producer.write(part)
    producer.flush()
    expected: dict[tuple[str, int], list[tuple[bytes | None, bytes | None, int]]] = {}
    for topic, key, value, own, partition in zip(topics, keys, values, headers, named, strict=True):
        where = partition if partition is not None else (murmur2(key or b"") & 0x7FFFFFFF) % PARTITIONS
        expected.setdefault((topic, where), []).append((key, value, len(own or ())))
    reported = {
        where: [(record.key, record.value, len(record.headers)) for record in records]
        for where, records in broker.records.items()
    }
    assert reported == expected


def test_more_rows_are_batched_for_many_partitions(monkeypatch: pytest.MonkeyPatch, broker: Broker, link: Link) -> None:
    monkeypatch.setitem(globals(), "PARTITIONS", 300)
    producer = RowProducer(link, WriteOptions(topic="orders"), IDENTITY, transactional=True)
    for _ in range(12):
        producer.write(rows(10_000, 100))
    producer.flush()
    assert len(broker.taken) == 300
    assert {len(taken) for taken in broker.taken.values()} == {2}
    assert producer.rows == 120_000
