"""Filters of a partition: looked at once for all queues, never with what another log had, and past broken batches."""

from __future__ import annotations

import crc32c
import pytest

from millstream.model.ids import Offset, PartitionIndex
from millstream.model.topic import TopicPartition
from millstream.records.batch import COMPRESSION_ZSTD
from millstream.records.record import NewRecord, encode_batch
from millstream.subscriptions.filter.evaluation import Evaluation, Messages
from millstream.subscriptions.filter.filter import Filter, compile_filter
from millstream.subscriptions.filter.worker import FilterWorker
from millstream.subscriptions.sieve import QueueSieve, Sieve

PLACE = TopicPartition("orders", PartitionIndex(0))


class CountingWorker(FilterWorker):
    """Evaluates here, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def evaluate(self, messages: Messages, filters: list[Filter]) -> Evaluation:  # type: ignore[override]
        self.asked += 1
        return await super().evaluate(messages, filters)


def batch(base_offset: int, *keys: str, compression: int = 0) -> bytearray:
    records = [NewRecord(key.encode(), b"x" * 100, (), 1) for key in keys]
    return encode_batch(records, base_offset=base_offset, compression=compression)


@pytest.fixture
async def worker() -> CountingWorker:
    return CountingWorker()


async def test_queues_of_a_partition_share_what_was_found(worker: CountingWorker) -> None:
    sieve = Sieve(worker)
    one = QueueSieve(sieve, PLACE, compile_filter("key = 'a'"))
    two = QueueSieve(sieve, PLACE, compile_filter("key = 'b'"))
    records = batch(10, "a", "b", "a")
    assert (await one.matches(records, Offset(10), Offset(13))).tolist() == [True, False, True]
    assert (await two.matches(records, Offset(10), Offset(13))).tolist() == [False, True, False]
    assert worker.asked == 1
    await sieve.stop()


async def test_a_partition_without_queues_is_forgotten(worker: CountingWorker) -> None:
    sieve = Sieve(worker)
    wanted = compile_filter("key = 'a'")
    before = QueueSieve(sieve, PLACE, wanted)
    assert (await before.matches(batch(0, "a"), Offset(0), Offset(1))).tolist() == [True]
    before.close()
    after = QueueSieve(sieve, PLACE, wanted)
    assert (await after.matches(batch(0, "b"), Offset(0), Offset(1))).tolist() == [False]
    assert sieve.kept_bytes == 1
    await sieve.stop()


async def test_a_batch_that_cannot_be_opened_goes_through_and_the_others_are_filtered(worker: CountingWorker) -> None:
    broken = batch(2, "a", "a", compression=COMPRESSION_ZSTD)
    broken[62:] = bytes(len(broken) - 62)
    broken[17:21] = crc32c.crc32c(bytes(broken[21:])).to_bytes(4, "big")
    records = batch(0, "a", "b") + broken + batch(4, "b", "a")
    sieve = Sieve(worker)
    one = QueueSieve(sieve, PLACE, compile_filter("key = 'a'"))
    found = await one.matches(records, Offset(1), Offset(6))
    assert found.tolist() == [False, True, True, False, True]
    await sieve.stop()
