"""What a follower tells its leader: no more than is stored, and all of it again when it has registered anew."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from millstream.cluster.replica_fetcher import FetchLimits, ReplicaFetcher
from millstream.log.store import LogStore
from millstream.model.ids import Epoch, NodeId, PartitionIndex
from millstream.model.partition_state import PartitionState, Versioned
from millstream.model.topic import Topic, TopicPartition, TopicSettings
from millstream.records.record import NewRecord, encode_batch
from millstream.replication.partition import Partition
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.wire.replica_fetching import ReplicaAnswers, ReplicaFetch

ME, LEADER = NodeId(2), NodeId(1)
TOPIC = Topic(name="t", topic_id=UUID(int=1), partitions=1, replication=2, overrides={}, created_ms=0)
STATE = PartitionState(replicas=(LEADER, ME), leader=LEADER, leader_epoch=Epoch(1), in_sync=(LEADER, ME))


class Link:
    """A leader that has nothing to tell and answers when the test lets it."""

    def __init__(self) -> None:
        self.fetches: asyncio.Queue[ReplicaFetch] = asyncio.Queue()
        self.answers: asyncio.Queue[ReplicaAnswers] = asyncio.Queue()

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaAnswers:
        self.fetches.put_nowait(fetch)
        return await self.answers.get()

    async def close(self) -> None:
        pass


@pytest.fixture
async def store() -> AsyncIterator[LogStore]:
    store = LogStore.open(
        Path("/data"), files=MemoryFiles(), clock=ManualClock(), journal_bytes=10_000, producer_expiry_ms=10**9
    )
    yield store
    store.close_now()


def follower(store: LogStore, flush: str) -> Partition:
    index = PartitionIndex(0)
    log = store.open_log(TOPIC.topic_id, TopicPartition("t", index), TopicSettings(flush=flush))
    log.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(0))
    partition = Partition(TOPIC, index, log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(STATE, 1), me=ME)
    return partition


def fetcher(link: Link, registrations: list[int]) -> ReplicaFetcher:
    return ReplicaFetcher(
        LEADER, ME, link, limits=FetchLimits(), random=Random(1), registration=lambda: registrations[-1]
    )


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_after_another_registration_everything_is_said_anew(store: LogStore) -> None:
    """An idle partition is named once in a session, and the leader counts it by the registration it was named under."""
    link, registrations = Link(), [7]
    fetching = fetcher(link, registrations)
    fetching.follow(follower(store, "os"))
    task = asyncio.create_task(fetching.run())
    said = []
    for session in (5, 5, 6):
        fetch = await link.fetches.get()
        said.append((fetch.registration, fetch.session_id, len(fetch.wanted)))
        if len(said) == 2:
            registrations.append(8)
        link.answers.put_nowait(ReplicaAnswers(0, session))
    assert said == [(7, 0, 1), (7, 5, 0), (8, 0, 1)]
    await end(task)


async def test_what_an_earlier_fetcher_left_unsynced_is_not_called_stored(store: LogStore) -> None:
    link = Link()
    fetching = fetcher(link, [7])
    partition = follower(store, "always")
    fetching.follow(partition)
    task = asyncio.create_task(fetching.run())
    await asyncio.sleep(0.01)
    assert link.fetches.empty()
    store.commit_once()
    fetch = await link.fetches.get()
    assert [position.offset for position in fetch.wanted.values()] == [1]
    assert partition.promised_offset == 1
    await end(task)


@pytest.mark.parametrize(("in_sync", "end"), [((LEADER,), 1), ((LEADER, ME), 3)])
def test_what_the_disk_lost_is_fetched_anew_when_nobody_counts_on_the_rest(
    in_sync: tuple[NodeId, ...], end: int
) -> None:
    files, where = MemoryFiles(), TopicPartition("t", PartitionIndex(0))
    for attempt in range(2):
        store = LogStore.open(
            Path("/data"), files=files, clock=ManualClock(), journal_bytes=10_000, producer_expiry_ms=10**9
        )
        log = store.open_log(TOPIC.topic_id, where, TopicSettings(flush="os"))
        if attempt == 0:
            for _ in range(3):
                log.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(0))
            path = next(path for path in files.walk() if path.endswith(".log"))
            files.flip_bit(path, log.size_bytes // 2, 3)
            files.kill()
    partition = Partition(TOPIC, where.partition, log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(dataclasses.replace(STATE, in_sync=in_sync), 1), me=ME)
    assert log.damage == ((1, 2),)
    partition.cut_damage()
    assert log.end_offset == end
    store.close_now()
