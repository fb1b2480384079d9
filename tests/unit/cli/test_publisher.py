from __future__ import annotations

import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.cli import publisher as publisher_module
from millstream.cli.publisher import Placed, Publisher
from millstream.model.errors import BatchTooLarge, RequestTimedOut, StorageFailure, UnknownTopic
from millstream.model.ids import Offset
from millstream.model.partitioner import partition_for_key
from millstream.records.batch import read_header
from millstream.records.record import NewRecord, decode_batch
from millstream.wire.client import Client
from millstream.wire.producing import Produced


class Broker:
    """Stands in for the client: keeps what is produced, and checks sequences as a broker does."""

    def __init__(self, partitions: int = 1, *, batch_bytes_max: int = 1 << 20) -> None:
        self.partitions = partitions
        self.batch_bytes_max = batch_bytes_max
        self.stored: dict[int, list[bytes | None]] = defaultdict(list)
        self.batches = 0
        self.broken: set[int] = set()
        self.producer_error = 0

    async def metadata(self, topics: list[str], *, create: bool) -> Any:
        if topics == ["missing"]:
            return SimpleNamespace(topics={}, errors={"missing": 3})
        if topics == ["waiting"]:
            return SimpleNamespace(topics={}, errors={"waiting": 5})
        topic = SimpleNamespace(topic_id=UUID(int=1), partitions=dict.fromkeys(range(self.partitions)))
        return SimpleNamespace(topics={topics[0]: topic}, errors={})

    async def private(self, node: None, key: int, body: bytes) -> bytes:
        return b'{"reasons": [], "warnings": ["the catalog is away since noon"]}'

    async def send(self, node: None, request: Any) -> Any:
        if self.producer_error:
            return SimpleNamespace(error_code=self.producer_error, producer_id=-1, producer_epoch=-1)
        assert type(request).__name__ == "InitProducerIdRequest"
        return SimpleNamespace(error_code=0, producer_id=77, producer_epoch=0)

    async def produce(self, topic: str, partition: int, batch: bytearray) -> Produced:
        if partition in self.broken:
            raise StorageFailure("the disk is full")
        if len(batch) > self.batch_bytes_max:
            raise BatchTooLarge(f"{len(batch)} bytes are too many")
        header = read_header(batch)
        stored = self.stored[partition]
        assert (header.producer_id, header.base_sequence) == (77, len(stored))
        base_offset = len(stored)
        stored += [record.value for record in decode_batch(batch, header)]
        self.batches += 1
        return Produced(Offset(base_offset), -1)


async def started(broker: Broker, topic: str = "t", *, partition: int | None = None) -> Publisher:
    made = Publisher(cast("Client", broker), topic, partition=partition)
    await made.start()
    return made


def messages(number: int, *, key: bytes | None = None, size: int = 10) -> list[NewRecord]:
    return [NewRecord(key, str(index).encode().rjust(size), (), 0) for index in range(number)]


async def test_messages_are_stored_once_in_order_and_placed() -> None:
    broker = Broker()
    publisher = await started(broker)
    first, second = messages(3), messages(2)
    assert await publisher.publish(first) == [Placed(0, 0), Placed(0, 1), Placed(0, 2)]
    assert await publisher.publish(second) == [Placed(0, 3), Placed(0, 4)]
    assert broker.stored[0] == [record.value for record in first + second]


async def test_much_input_goes_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BATCH_BYTES_MAX", 1000)
    broker = Broker()
    records = messages(100, size=90)
    await (await started(broker)).publish(records)
    assert broker.batches > 5
    assert broker.stored[0] == [record.value for record in records]


async def test_a_topic_that_takes_little_gets_smaller_batches() -> None:
    broker = Broker(batch_bytes_max=500)
    records = messages(64, size=50)
    placed = await (await started(broker)).publish(records)
    assert [one.offset for one in placed] == list(range(64))
    assert broker.stored[0] == [record.value for record in records]


async def test_one_message_that_is_too_large_is_refused() -> None:
    publisher = await started(Broker(batch_bytes_max=500))
    with pytest.raises(BatchTooLarge):
        await publisher.publish(messages(1, size=600))


@settings(max_examples=30)
@given(keys=st.lists(st.none() | st.binary(max_size=3), min_size=1, max_size=40), partitions=st.integers(1, 5))
async def test_keys_go_where_the_rule_says(keys: list[bytes | None], partitions: int) -> None:
    broker = Broker(partitions)
    records = [NewRecord(key, str(index).encode(), (), 0) for index, key in enumerate(keys)]
    placed = await (await started(broker)).publish(records)
    for record, where in zip(records, placed, strict=True):
        assert broker.stored[where.partition][where.offset] == record.value
        if record.key is not None:
            assert where.partition == partition_for_key(record.key, partitions)
    for stored in broker.stored.values():
        numbers = [int(value or b"") for value in stored]
        assert numbers == sorted(numbers)


async def test_messages_without_key_take_turns_in_groups() -> None:
    broker = Broker(3)
    publisher = await started(broker)
    used = [{where.partition for where in await publisher.publish(messages(4))} for _ in range(3)]
    assert all(len(partitions) == 1 for partitions in used)
    assert set.union(*used) == {0, 1, 2}


async def test_a_fixed_partition_wins_over_keys() -> None:
    broker = Broker(4)
    await (await started(broker, partition=2)).publish(messages(5, key=b"k"))
    assert list(broker.stored) == [2]


async def test_what_does_not_exist_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnknownTopic, match=re.escape("create it with: millstream topic create missing")):
        await started(Broker(), "missing")
    with pytest.raises(UnknownTopic, match="has no partition 9; the last is 1"):
        await started(Broker(2), partition=9)


async def test_a_failure_in_one_partition_lets_the_others_finish() -> None:
    broker = Broker(2)
    publisher = await started(broker)
    keys = {partition_for_key(str(n).encode(), 2): str(n).encode() for n in range(20)}
    broker.broken = {0}
    with pytest.raises(StorageFailure):
        await publisher.publish([NewRecord(keys[0], b"a", (), 0), NewRecord(keys[1], b"b", (), 0)])
    assert broker.stored[1] == [b"b"]


async def test_what_the_cluster_cannot_do_now_is_told_with_the_reason() -> None:
    broker = Broker()
    with pytest.raises(RequestTimedOut, match="topic 'waiting' cannot be created now: the catalog is away since noon"):
        await started(broker, "waiting")
    broker.producer_error = 7
    with pytest.raises(RequestTimedOut, match="no producer id can be had now: the catalog is away since noon"):
        await started(broker)
