"""Filter results of a partition: shared by all queues, never those of another log, and past unreadable batches."""

from __future__ import annotations

import asyncio

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.subscriptions import filter_cache
from millstream.broker.subscriptions.filter_cache import FilterCache, QueueFilter
from millstream.broker.subscriptions.filter_worker import FilterWorker
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.filter.filter import Evaluation, Filter, Messages, compile_filter
from millstream.protocol.records.batch import COMPRESSION_ZSTD, iterate_whole_headers
from millstream.protocol.records.record import NewRecord, encode_batch

PLACE = TopicPartition("orders", PartitionIndex(0))


class CountingWorker(FilterWorker):
    """Evaluates in process, and counts evaluations."""

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


async def test_queues_of_a_partition_share_results(worker: CountingWorker) -> None:
    cache = FilterCache(worker)
    queue_filter = QueueFilter(cache, PLACE, compile_filter("key = 'a'"))
    two = QueueFilter(cache, PLACE, compile_filter("key = 'b'"))
    records = batch(10, "a", "b", "a")
    assert (await queue_filter.matches(records, Offset(10), Offset(13))).bits.tolist() == [True, False, True]
    assert (await two.matches(records, Offset(10), Offset(13))).bits.tolist() == [False, True, False]
    assert worker.asked == 1
    await cache.stop()


async def test_concurrent_queues_share_an_evaluation(worker: CountingWorker) -> None:
    cache = FilterCache(worker)
    queues = [QueueFilter(cache, PLACE, compile_filter(f"key = '{key}'")) for key in "abcdefgh"]
    records = batch(0, "a", "b", "c")
    matches = await asyncio.gather(*(queue.matches(records, Offset(0), Offset(3)) for queue in queues))
    assert [match.bits.tolist() for match in matches[:2]] == [[True, False, False], [False, True, False]]
    assert worker.asked == 1
    await cache.stop()


async def test_ranges_of_other_lengths_share_results(worker: CountingWorker) -> None:
    cache = FilterCache(worker)
    queue_filter = QueueFilter(cache, PLACE, compile_filter("key = 'a'"))
    two = QueueFilter(cache, PLACE, compile_filter("key = 'b'"))
    first, second = batch(0, "a", "b", "a"), batch(5, "b", "a")
    assert (await queue_filter.matches(first, Offset(0), Offset(2))).bits.tolist() == [True, False]
    assert worker.asked == 1
    # The unscanned rest of a batch is known as well, and so is the gap behind it.
    assert (await two.matches(first + second, Offset(1), Offset(7))).bits.tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert worker.asked == 2
    assert (await queue_filter.matches(first + second, Offset(2), Offset(6))).bits.tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert worker.asked == 2
    three = QueueFilter(cache, PLACE, compile_filter("key <> 'a'"))
    assert (await three.matches(first + second, Offset(0), Offset(7))).bits.tolist() == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert (await queue_filter.matches(second, Offset(5), Offset(7))).bits.tolist() == [False, True]
    assert worker.asked == 3
    await cache.stop()


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), min_size=1, max_size=20), st.integers(0, 200))
async def test_queues_find_the_same_in_any_order_of_ranges(looks: list[tuple[int, int]], kept_bytes_max: int) -> None:
    worker = CountingWorker()
    keys = "abcdabcaab" * 4
    batches = [batch(start, *keys[start : start + 4]) for start in range(0, 40, 4) if start != 12]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(filter_cache, "CACHED_BYTES_MAX", kept_bytes_max)
        cache = FilterCache(worker)
        queues = [QueueFilter(cache, PLACE, compile_filter(f"key = '{key}'")) for key in "abc"]
        for at, (start, length) in enumerate(looks):
            end = min(start + length, 40)
            records = b"".join(bytes(batch) for batch in batches if _overlaps(batch, start, end))
            match = await queues[at % 3].matches(records, Offset(start), Offset(end))
            expected = "abc"[at % 3]
            assert match.bits.tolist() == [keys[o] == expected and not 12 <= o < 16 for o in range(start, end)]
            assert cache._cached_bytes <= kept_bytes_max
    await cache.stop()


def _overlaps(data: bytearray, start: int, end: int) -> bool:
    (header,) = iterate_whole_headers(data)
    return header.base_offset < end and header.next_offset > start


async def test_a_partition_without_queues_is_evicted(worker: CountingWorker) -> None:
    cache = FilterCache(worker)
    row_filter = compile_filter("key = 'a'")
    before = QueueFilter(cache, PLACE, row_filter)
    assert (await before.matches(batch(0, "a"), Offset(0), Offset(1))).bits.tolist() == [True]
    before.close()
    after = QueueFilter(cache, PLACE, row_filter)
    assert (await after.matches(batch(0, "b"), Offset(0), Offset(1))).bits.tolist() == [False]
    assert cache._cached_bytes == 1
    await cache.stop()


async def test_an_undecodable_batch_is_reported_and_the_others_are_filtered(worker: CountingWorker) -> None:
    broken = batch(2, "a", "a", compression=COMPRESSION_ZSTD)
    broken[62:] = bytes(len(broken) - 62)
    broken[17:21] = crc32c.crc32c(bytes(broken[21:])).to_bytes(4, "big")
    records = batch(0, "a", "b") + broken + batch(4, "b", "a")
    cache = FilterCache(worker)
    queue_filter = QueueFilter(cache, PLACE, compile_filter("key = 'a'"))
    match = await queue_filter.matches(records, Offset(1), Offset(6))
    assert match.bits.tolist() == [False, False, False, False, True]
    assert [place[:2] for place in match.unreadable] == [(2, 3)]
    # The cache gives the same result for another range.
    again = await queue_filter.matches(records, Offset(3), Offset(6))
    assert [place[:2] for place in again.unreadable] == [(3, 3)]
    await cache.stop()
