"""Filters over batches, in process and in a child process: equal results, one decoding, and a child that may die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from millstream.broker.subscriptions import batch_scan as look_module
from millstream.broker.subscriptions.batch_scan import LIGHT_RECORDS_MAX, BatchScan, BatchTooHeavy, scan_batch
from millstream.broker.subscriptions.filter_cache import FilterCache, QueueFilter
from millstream.broker.subscriptions.filter_worker import INLINE_BYTES_MAX, INLINE_MESSAGES_MAX, FilterWorker
from millstream.core.errors import CorruptBatch, FilterUnavailable
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.filter.filter import SCAN_OFFSET_MAX, Messages, compile_filter, evaluate
from millstream.protocol.records.batch import COMPRESSION_ZSTD, read_header
from millstream.protocol.records.record import NewRecord, encode_batch, records_section
from millstream.protocol.records.rewrite import raw_records, rebuild_batch

FILTERS = [
    compile_filter("payload.total > 2"),
    compile_filter("headers['region'] = 'eu' AND topic = 'orders'"),
    compile_filter("partition = 1 AND offset < 13"),
]


DEADLY_CHILD = """
import os
from millstream.broker.subscriptions import filter_worker_child as child

respond = child.respond

def die_or_respond(request):
    if b"deadly" in (request.batch if isinstance(request, child.BatchRequest) else request.batches):
        os._exit(1)
    return respond(request)

child.respond = die_or_respond
child.main()
"""


def batch(count: int, *, base_offset: int = 10, compression: int = 0) -> bytes:
    records = [
        NewRecord(b"k", b'{"total": %d}' % (at % 5), (("region", b"eu" if at % 2 else b"us"),), at)
        for at in range(count)
    ]
    return bytes(encode_batch(records, base_offset=base_offset, compression=compression))


def messages(batches: bytes, start_offset: int = 0, end_offset: int = SCAN_OFFSET_MAX) -> Messages:
    return Messages(topic="orders", partition=1, batches=batches, start_offset=start_offset, end_offset=end_offset)


def expected(offsets: range) -> list[list[bool]]:
    return [
        [(offset - 10) % 5 > 2 for offset in offsets],
        [(offset - 10) % 2 == 1 for offset in offsets],
        [offset < 13 for offset in offsets],
    ]


@pytest.fixture
async def worker() -> AsyncIterator[FilterWorker]:
    worker = FilterWorker(response_s_max=250, backoff_min_s=0.01)
    yield worker
    await worker.stop()
    assert worker.pid is None


async def check(worker: FilterWorker, request: Messages, offsets: range) -> None:
    response = await worker.evaluate(request, FILTERS)
    assert response.offsets.tolist() == list(offsets)
    assert [column.tolist() for column in response.matches] == expected(offsets)


async def test_a_few_messages_are_evaluated_in_process(worker: FilterWorker) -> None:
    await check(worker, messages(batch(8) + batch(4, base_offset=20)[:-3]), range(10, 18))
    await check(worker, messages(batch(8), start_offset=12, end_offset=15), range(12, 15))
    assert (worker.evaluated_inline, worker.evaluated_in_child, worker.pid) == (2, 0, None)


async def test_many_messages_are_evaluated_by_the_child(worker: FilterWorker) -> None:
    count = INLINE_MESSAGES_MAX + 1
    await check(worker, messages(batch(count)), range(10, 10 + count))
    await check(worker, messages(batch(10_000), start_offset=12, end_offset=9_000), range(12, 9_000))
    assert (worker.evaluated_inline, worker.evaluated_in_child) == (0, 2)


async def test_batches_that_decompress_to_much_are_evaluated_by_the_child(worker: FilterWorker) -> None:
    record = NewRecord(None, b'{"total": 3, "x": "' + b"x" * INLINE_BYTES_MAX + b'"}')
    response = await worker.evaluate(messages(bytes(encode_batch([record], compression=COMPRESSION_ZSTD))), FILTERS)
    assert [column.tolist() for column in response.matches] == [[True], [False], [True]]
    assert (worker.evaluated_inline, worker.evaluated_in_child) == (0, 1)


async def test_no_messages_and_no_filters(worker: FilterWorker) -> None:
    response = await worker.evaluate(messages(b""), FILTERS)
    assert [column.size for column in response.matches] == [0, 0, 0]
    response = await worker.evaluate(messages(batch(3)), [])
    assert response.offsets.tolist() == [10, 11, 12]
    assert response.matches == ()


async def test_aborted_transactions_are_skipped(worker: FilterWorker) -> None:
    records = [NewRecord(None, b'{"total": 3}')] * 3
    written = bytes(encode_batch(records, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True))
    for padding in (b"", batch(INLINE_MESSAGES_MAX, base_offset=10)):
        request = Messages(topic="orders", partition=1, batches=written + padding, aborted=[(5, 0)])
        response = await worker.evaluate(request, FILTERS)
        assert 0 not in response.offsets


async def test_corrupt_batches_are_reported_by_both(worker: FilterWorker) -> None:
    for count in (3, INLINE_MESSAGES_MAX + 1):
        broken = bytearray(batch(count))
        broken[61:66] = b"\xff" * 5
        with pytest.raises(CorruptBatch):
            await worker.evaluate(messages(bytes(broken)), FILTERS)
    await check(worker, messages(batch(100)), range(10, 110))


async def test_a_dead_child_is_restarted(worker: FilterWorker) -> None:
    await check(worker, messages(batch(100)), range(10, 110))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    await check(worker, messages(batch(100)), range(10, 110))
    assert worker.evaluated_in_child == 2


async def test_a_request_that_killed_the_child_is_retried_once(worker: FilterWorker) -> None:
    await check(worker, messages(batch(100)), range(10, 110))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    check_task = asyncio.create_task(check(worker, messages(batch(100)), range(10, 110)))
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    await check_task
    assert worker.restarts == 1


async def test_a_child_that_cannot_start_makes_filters_unavailable(
    worker: FilterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker._children, "_module", "this")
    with pytest.raises(FilterUnavailable):
        await worker.evaluate(messages(batch(100)), FILTERS)
    monkeypatch.undo()
    await check(worker, messages(batch(100)), range(10, 110))


@pytest.fixture
def deadly(worker: FilterWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A batch that kills the child."""
    (tmp_path / "deadly_child.py").write_text(DEADLY_CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(worker._children, "_module", "deadly_child")
    return bytes(encode_batch([NewRecord(b"k", b"deadly" + bytes(INLINE_BYTES_MAX), (), 1)] * 2, base_offset=10))


async def test_a_batch_that_keeps_killing_the_child_is_unreadable(worker: FilterWorker, deadly: bytes) -> None:
    for _ in range(2):
        assert await worker.scan_batch(deadly, 10, with_keys=True) == "the process that reads it died 2 times"
        # It is not retried for another queue.
        assert worker.restarts == 2
    with pytest.raises(CorruptBatch, match="died 2 times"):
        await worker.evaluate(messages(deadly), FILTERS)
    await check(worker, messages(batch(100)), range(10, 110))


async def test_queues_continue_behind_a_batch_that_keeps_killing_the_child(worker: FilterWorker, deadly: bytes) -> None:
    sieve = FilterCache(worker)
    queue = QueueFilter(sieve, TopicPartition("orders", PartitionIndex(1)), FILTERS[0])
    match = await queue.matches(deadly + batch(100, base_offset=12), Offset(10), Offset(112))
    assert match.bits.tolist() == [False, False, *(at % 5 > 2 for at in range(100))]
    assert match.unreadable == ((10, 11, "the process that reads it died 2 times"),)


async def test_a_missing_response_times_out() -> None:
    worker = FilterWorker(response_s_max=0.001, backoff_min_s=0.001)
    with pytest.raises(FilterUnavailable):
        await worker.evaluate(messages(batch(100)), FILTERS)
    assert worker.pid is None
    await worker.stop()


async def test_abandoning_a_request_does_not_mix_up_responses(worker: FilterWorker) -> None:
    await check(worker, messages(batch(100)), range(10, 110))
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    given_up = asyncio.create_task(worker.evaluate(messages(batch(200)), FILTERS))
    for _ in range(5):
        await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await check(worker, messages(batch(100)), range(10, 110))
    assert not psutil.pid_exists(pid)


async def test_requests_are_serialised(worker: FilterWorker) -> None:
    counts = (100, 300, 200)
    await asyncio.gather(*(check(worker, messages(batch(count)), range(10, 10 + count)) for count in counts))
    assert worker.evaluated_in_child == len(counts)


async def test_an_idle_child_exits_and_is_restarted() -> None:
    worker = FilterWorker(idle_s=0)
    await check(worker, messages(batch(100)), range(10, 110))
    await asyncio.sleep(0.01)
    assert worker.pid is None
    await check(worker, messages(batch(100)), range(10, 110))
    await worker.stop()


async def test_a_stopped_worker_refuses_requests(worker: FilterWorker) -> None:
    await worker.stop()
    with pytest.raises(FilterUnavailable, match="stopping"):
        await worker.evaluate(messages(batch(100)), FILTERS)


async def test_a_child_with_a_request_has_ended_when_the_worker_has_stopped(worker: FilterWorker) -> None:
    await check(worker, messages(batch(100)), range(10, 110))
    assert worker.pid is not None
    child = psutil.Process(worker.pid)
    folder = Path(child.cmdline()[-1])
    assert folder.is_dir()
    child.suspend()
    pending = asyncio.create_task(worker.evaluate(messages(batch(200)), FILTERS))
    for _ in range(5):
        await asyncio.sleep(0)
    await worker.stop()
    assert not child.is_running()
    assert not folder.exists()
    with pytest.raises(FilterUnavailable, match="stopping"):
        await pending


def test_large_payloads_are_parsed_in_parts_with_the_same_result() -> None:
    values = [b'{"total": %d, "x": "%s", "o": {"a": 1}}' % (at, b"y" * 300_000) for at in range(9)]
    raw = bytes(encode_batch([NewRecord(None, value) for value in values]))
    response = evaluate(messages(raw), [compile_filter("payload.total > 4 AND payload.o IS NOT NULL")])
    assert response.matches[0].tolist() == [at > 4 for at in range(9)]


# -- decompressing batches for queues --------------------------------------------------------------------------------


def delayed(count: int, *, compression: int = 0) -> bytes:
    headers = ((), (("deliver-at", b"9000"),), (("deliver-at", b"soon"), ("deliver-at", b"7")))
    records = [NewRecord(None if at % 4 == 3 else b"%d" % (at % 5), b"v", headers[at % 3], 1) for at in range(count)]
    return bytes(encode_batch(records, base_offset=100, compression=compression))


def sparse(count: int) -> bytes:
    """A batch as compaction leaves it."""
    batch = delayed(count)
    header = read_header(batch)
    section = records_section(batch, header)
    records = [record for at, record in enumerate(raw_records(section, header)) if at % 3 and at < count - 2]
    return bytes(rebuild_batch(header, section, records))


@pytest.mark.parametrize("kind", ["delayed", "sparse", "plain"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_compiled_and_plain_code_decode_equally(kind: str, with_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"delayed": delayed(300), "sparse": sparse(300), "plain": batch(300, base_offset=100)}[kind]
    plain = scan_batch(data, read_header(data), 107, with_keys=with_keys)
    monkeypatch.setattr(look_module, "COMPILED_RECORDS_MIN", 1)
    compiled = scan_batch(data, read_header(data), 107, with_keys=with_keys)
    assert (compiled.absent, compiled.delayed) == (plain.absent, plain.delayed)
    assert bool(plain.absent) == (kind == "sparse")
    assert bool(plain.delayed) == (kind != "plain")
    if plain.keys is None:
        assert compiled.keys is None
    else:
        assert compiled.keys is not None
        assert compiled.keys.tolist() == plain.keys.tolist()
        assert len(set(plain.keys.tolist())) > 1 or kind == "plain"


async def test_the_child_decompresses_batches_too_large_for_the_loop(worker: FilterWorker) -> None:
    heavy = delayed(LIGHT_RECORDS_MAX + 1, compression=COMPRESSION_ZSTD)
    with pytest.raises(BatchTooHeavy):
        scan_batch(heavy, read_header(heavy), 100, with_keys=True)
    expected = scan_batch(heavy, read_header(heavy), 105, with_keys=True, light=False)
    scan = await worker.scan_batch(heavy, 105, with_keys=True)
    assert isinstance(scan, BatchScan)
    assert (scan.absent, scan.delayed) == (expected.absent, expected.delayed)
    assert scan.keys is not None
    assert expected.keys is not None
    assert scan.keys.tolist() == expected.keys.tolist()
    bomb = bytes(encode_batch([NewRecord(None, bytes(65 * 1024 * 1024), (), 1)], compression=COMPRESSION_ZSTD))
    reason = await worker.scan_batch(bomb, 0, with_keys=False)
    assert isinstance(reason, str)
    assert "decompress to more than" in reason
    assert worker.scanned_in_child == 2
