"""A follower reports to its leader only what is stored, and reports all of it again after a new registration."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator
from random import Random
from uuid import UUID

import pytest

from millstream.broker.cluster import replica_fetcher
from millstream.broker.cluster.replica_fetcher import FetchLimits, ReplicaFetcher, Throttle
from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.core.errors import StorageFailure
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_headers, place_batch
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.replica_fetch import PartitionKey, ReplicaFetch, ReplicaResponse, ReplicaResponses
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

ME, LEADER = NodeId(2), NodeId(1)
UNKNOWN_TOPIC_ID = 100
TOPIC = Topic(name="t", topic_id=UUID(int=1), partitions=1, replication=2, overrides={}, created_ms=0)
STATE = PartitionState(replicas=(LEADER, ME), leader=LEADER, leader_epoch=Epoch(1), in_sync=(LEADER, ME))


class Link:
    """A leader without new records that responds when the test allows it."""

    def __init__(self) -> None:
        self.fetches: asyncio.Queue[ReplicaFetch] = asyncio.Queue()
        self.responses: asyncio.Queue[ReplicaResponses] = asyncio.Queue()

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        self.fetches.put_nowait(fetch)
        return await self.responses.get()

    async def close(self) -> None:
        pass


@pytest.fixture
async def store() -> AsyncIterator[LogStore]:
    store = memory_store()
    yield store
    store.close_now()


def follower(store: LogStore, flush: str) -> Partition:
    index = PartitionIndex(0)
    log = store.open_log(TOPIC.topic_id, TopicPartition("t", index), TopicSettings(flush=flush))
    log.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(0))
    partition = Partition(TOPIC, index, log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(STATE, 1), me=ME)
    return partition


def fetcher(link: Link, registrations: list[int], throttle: Throttle | None = None) -> ReplicaFetcher:
    return ReplicaFetcher(
        LEADER,
        ME,
        link,
        limits=FetchLimits(),
        random=Random(1),
        registration=lambda: registrations[-1],
        throttle=throttle,
    )


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_everything_is_reported_again_after_a_new_registration(store: LogStore) -> None:
    """An idle partition is named once per session, and the leader tracks it by the registration it was named under."""
    link, registrations = Link(), [7]
    fetching = fetcher(link, registrations)
    fetching.follow(follower(store, "os"))
    task = asyncio.create_task(fetching.run())
    output = []
    for session in (5, 5, 6):
        fetch = await link.fetches.get()
        output.append((fetch.registration, fetch.session_id, len(fetch.positions)))
        if len(output) == 2:
            registrations.append(8)
        link.responses.put_nowait(ReplicaResponses(0, session))
    assert output == [(7, 0, 1), (7, 5, 0), (8, 0, 1)]
    await end(task)


async def test_records_left_unsynced_by_an_earlier_fetcher_are_not_reported_as_stored(store: LogStore) -> None:
    link = Link()
    fetching = fetcher(link, [7])
    partition = follower(store, "always")
    fetching.follow(partition)
    task = asyncio.create_task(fetching.run())
    await asyncio.sleep(0.01)
    assert link.fetches.empty()
    store.commit_once()
    fetch = await link.fetches.get()
    assert [position.offset for position in fetch.positions.values()] == [1]
    assert partition.promised_offset == 1
    await end(task)


@pytest.mark.parametrize(
    ("in_sync", "watermark", "end"),
    [((LEADER,), 1, 1), ((LEADER,), 2, 3), ((LEADER, ME), 1, 3)],
)
async def test_lost_unacknowledged_records_are_truncated_when_nothing_behind_them_counts(
    in_sync: tuple[NodeId, ...], watermark: int, end: int
) -> None:
    files, where = MemoryFiles(), TopicPartition("t", PartitionIndex(0))
    for attempt in range(2):
        store = memory_store(files)
        log = store.open_log(TOPIC.topic_id, where, TopicSettings(flush="os"))
        if attempt == 0:
            for _ in range(3):
                log.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(0))
            path = next(path for path in files.walk() if path.endswith(".log"))
            files.flip_bit(path, log.size_bytes // 2, 3)
            files.kill()
    partition = Partition(TOPIC, where.partition, log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(dataclasses.replace(STATE, in_sync=in_sync), 1), me=ME)
    assert log.damaged_ranges == ((1, 2),)
    log.damage.has_replicas = True
    cut = partition.truncate_damage(Offset(watermark))
    if cut is not None:
        await cut
    assert log.end_offset == end
    store.close_now()


class SlowFiles(MemoryFiles):
    """Files whose syncs wait until the test allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.threads: set[int] = set()

    def sync(self, descriptor: int) -> None:
        """Sync once the test allows it."""
        self.threads.add(threading.get_ident())
        assert self.may_sync.wait(60)
        super().sync(descriptor)


@pytest.mark.parametrize(
    ("in_sync", "eligible", "end"),
    [((LEADER, ME), (), 1), ((LEADER,), (ME,), 1), ((LEADER,), (), 0)],
    ids=["in sync", "eligible", "neither"],
)
async def test_a_compacted_log_is_not_dropped_while_it_counts_as_in_sync(
    in_sync: tuple[NodeId, ...], eligible: tuple[NodeId, ...], end: int
) -> None:
    """A log found with gaps after a crash may be compacted up to its end, which the high watermark never reached."""
    store = memory_store()
    partition = follower(store, "os")
    partition.apply(Versioned(dataclasses.replace(STATE, in_sync=in_sync, eligible=eligible), 2), me=ME)
    partition.log.append(encode_batch([NewRecord(None, b"y", (), 1000)]), leader_epoch=Epoch(0))
    partition.log.record_superseding(int(partition.log.end_offset))
    cut = partition.truncate(EpochEnd(Epoch(0), Offset(1)), leader_epoch=Epoch(1))
    if cut is not None:
        await cut
    assert partition.log.end_offset == end


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_log_is_truncated_beside_the_loop_and_refuses_appends_until_then(restarted: bool) -> None:
    files = SlowFiles()
    store = memory_store(files)
    partition = follower(store, "os")
    batch = encode_batch([NewRecord(None, b"y", (), 1000)])
    partition.log.append(bytearray(batch), leader_epoch=Epoch(0))
    files.threads.clear()
    files.may_sync.clear()
    if restarted:
        cut = partition.restart_at(Offset(70), leader_epoch=Epoch(1))
    else:
        cut = partition.truncate(EpochEnd(Epoch(0), Offset(1)), leader_epoch=Epoch(1))
    end = 70 if restarted else 1
    assert cut is not None
    assert partition.log.end_offset == end
    given_batch = memoryview(encode_batch([NewRecord(None, b"z", (), 1000)]))
    with pytest.raises(StorageFailure, match="truncation is on disk"):
        partition.append_fetched(given_batch, leader_epoch=Epoch(1), high_watermark=Offset(0), log_start=Offset(0))
    # Even if it becomes the leader meanwhile.
    partition.apply(Versioned(dataclasses.replace(STATE, leader=ME, leader_epoch=Epoch(2)), 2), me=ME)
    with pytest.raises(StorageFailure, match="truncation is on disk"):
        partition.write(bytearray(batch), acks=1)
    files.may_sync.set()
    await cut
    assert threading.get_ident() not in files.threads
    assert partition.write(bytearray(batch), acks=1).base_offset == end
    files.kill()
    again = memory_store(files)
    log = again.open_log(TOPIC.topic_id, TopicPartition("t", PartitionIndex(0)), TopicSettings(flush="os"))
    assert (log.end_offset, log.latest_epoch) == (end + 1, 2)
    again.close_now()


async def test_a_failed_truncation_is_reported_and_retried_before_the_log_continues() -> None:
    files, clock = MemoryFiles(), ManualClock()
    store = memory_store(files, clock)
    partition = follower(store, "os")
    files.fail_next_syncs("checkpoints")
    cut = partition.truncate(EpochEnd(Epoch(0), Offset(0)), leader_epoch=Epoch(1))
    assert cut is not None
    with pytest.raises(StorageFailure, match="truncating the end"):
        await cut
    partition.apply(Versioned(dataclasses.replace(STATE, leader=ME, leader_epoch=Epoch(2)), 2), me=ME)
    batch = encode_batch([NewRecord(None, b"x", (), 1000)])
    with pytest.raises(StorageFailure, match="until the disk works again"):
        partition.write(bytearray(batch), acks=1)
    clock.advance_ms(2000)
    assert partition.write(bytearray(batch), acks=1).base_offset == 0
    assert not partition.log.health.is_truncating
    files.kill()


async def test_a_topic_that_a_leader_does_not_know_yet_is_a_warning_only_if_it_persists(
    store: LogStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = ReplicaResponse(UNKNOWN_TOPIC_ID, Offset(-1), Offset(-1), None, b"")
    link, partition = Link(), follower(store, "os")
    fetching = fetcher(link, [7])
    fetching.follow(partition)
    task = asyncio.create_task(fetching.run())
    responses = ReplicaResponses(0, 5, {(TOPIC.topic_id, PartitionIndex(0)): unknown})
    for _ in range(2):
        await link.fetches.get()
        link.responses.put_nowait(responses)
    await link.fetches.get()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    monkeypatch.setattr(replica_fetcher, "GRACE_S", 0.0)
    for _ in range(2):
        link.responses.put_nowait(responses)
        await link.fetches.get()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["a replica could not be followed; retrying"]
    await end(task)


class Hours:
    """A throttle that lets everything wait for hours, until the test lifts it."""

    def __init__(self) -> None:
        self.charged: list[int] = []
        self.asked_again = asyncio.Event()
        self.is_lifted = False

    def bytes_max(self, _key: PartitionKey, _size: int) -> int:
        return 70

    def pause_after(self, _key: PartitionKey, size: int) -> float:
        if size:
            self.charged.append(size)
        else:
            self.asked_again.set()
        return 0.0 if self.is_lifted else 36_000.0


async def test_a_throttled_partition_asks_for_little_and_goes_on_when_the_throttle_is_lifted(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_fetcher, "THROTTLE_CHECK_S", 0.001)
    link, throttle = Link(), Hours()
    fetching = fetcher(link, [7], throttle)
    fetching.follow(follower(store, "os"))
    task = asyncio.create_task(fetching.run())
    key = (TOPIC.topic_id, PartitionIndex(0))

    def records(base: int, watermark: int) -> ReplicaResponses:
        batch = encode_batch([NewRecord(None, b"y", (), 1000)])
        place_batch(batch, next(iter(iterate_headers(batch))), base, leader_epoch=1)
        return ReplicaResponses(0, 5, {key: ReplicaResponse(0, Offset(watermark), Offset(0), None, memoryview(batch))})

    fetch = await link.fetches.get()
    assert fetch.positions[key].max_bytes == 70
    link.responses.put_nowait(records(1, 9))
    await throttle.asked_again.wait()
    assert link.fetches.empty()
    throttle.is_lifted = True
    fetch = await link.fetches.get()
    assert fetch.positions[key].offset == 2
    # The end of a log is neither charged nor delayed, so that a move can end.
    throttle.is_lifted = False
    link.responses.put_nowait(records(2, 3))
    fetch = await link.fetches.get()
    assert fetch.positions[key].offset == 3
    assert len(throttle.charged) == 1
    await end(task)
