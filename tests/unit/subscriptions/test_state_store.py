"""The state store of queues: writes are read back in order and once, in any location and despite failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from random import Random
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import pytest

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.kafka.apis.subscription_apis import LoadQueueState, ReadQueueFrames, WriteQueueStates
from millstream.broker.kafka.subscription_service import _build_image
from millstream.broker.subscriptions import routed_store as state_lane
from millstream.broker.subscriptions import state_shard
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.frame import FrameHeader, read_header, write_frame
from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.broker.subscriptions.routed_store import RoutedStateStore
from millstream.broker.subscriptions.snapshot import read_snapshot
from millstream.broker.subscriptions.state_shard import (
    DELTAS,
    SNAPSHOT,
    LedgerRetention,
    LoadedState,
    LoadQueue,
    Overflow,
    QueueRecord,
    ReadFrames,
    StateCoordinator,
    StateShard,
    WriteQueues,
    read_record,
    write_record,
)
from millstream.broker.subscriptions.state_store import QueueWrite
from millstream.core.config import Config
from millstream.core.errors import (
    BrokerUnreachable,
    CorruptState,
    FencedLeaderEpoch,
    MillstreamError,
    NotCoordinator,
    OutOfOrderSequence,
    StorageFailure,
)
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.core.topic import SUBSCRIPTIONS, TopicPartition
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryPartition, MemoryTopics

ME, OTHER = NodeId(1), NodeId(2)


class Joined:
    """An image that is the concatenation of its deltas."""

    has_ledger = False
    is_broken = False

    def __init__(self, _key: QueueKey, snapshot: bytes | None) -> None:
        self._content = snapshot or b""

    @property
    def fold(self) -> Fold:
        raise NotImplementedError

    def replay(self, deltas: bytes) -> None:
        self._content += deltas

    @property
    def is_large(self) -> bool:
        return len(self._content) > 100

    def capture(self) -> Callable[[], bytes]:
        return partial(bytes, self._content)


class FakePeers:
    """Another node, whose coordinator responds in this process; `trouble` holds the errors of the next requests."""

    def __init__(self, states: StateCoordinator) -> None:
        self.trouble: Iterator[MillstreamError | None] = iter(())
        self.lost_responses = 0
        self._load = LoadQueueState(states)
        self._write = WriteQueueStates(states)
        self._frames = ReadQueueFrames(states)

    async def send(self, node: NodeId, request: object) -> object:
        raise NotImplementedError

    async def send_private(self, node: NodeId, api_key: int, body: bytes) -> memoryview:
        assert node == OTHER
        error = next(self.trouble, None)
        if error is not None:
            raise error
        response: object
        if api_key == LoadQueue.KEY:
            response = await self._carry_out(self._load, msgspec.msgpack.decode(body, type=LoadQueue))
        elif api_key == ReadFrames.KEY:
            response = await self._carry_out(self._frames, msgspec.msgpack.decode(body, type=ReadFrames))
        else:
            assert api_key == WriteQueues.KEY
            response = await self._carry_out(self._write, msgspec.msgpack.decode(body, type=WriteQueues))
        if self.lost_responses:
            self.lost_responses -= 1
            raise BrokerUnreachable("the connection was lost before the response came")
        return memoryview(msgspec.msgpack.encode(response))

    async def _carry_out(self, api: LoadQueueState | WriteQueueStates | ReadQueueFrames, request: object) -> object:
        try:
            return await api.handle(request)  # type: ignore[arg-type]
        except MillstreamError as error:
            from millstream.broker.kafka.api import error_code

            return api.response_type(int(error_code(error)), str(error))


def coordinator(topics: MemoryTopics, clock: ManualClock | None = None) -> StateCoordinator:
    config = Config(subscriptions_partitions=2)
    return StateCoordinator(topics, config, clock or ManualClock(), Joined, retry_first_s=0.001)


def key_at(states: StateCoordinator, index: int) -> QueueKey:
    """A queue that is stored in the given partition."""
    while True:
        key = QueueKey(uuid4(), uuid4(), PartitionIndex(3))
        if states.partition_of(key) == index:
            return key


async def opened(
    topics: MemoryTopics, clock: ManualClock | None = None
) -> tuple[StateCoordinator, FakePeers, RoutedStateStore]:
    states = coordinator(topics, clock)
    await states.ensure()
    await states.wait_loaded()
    peers = FakePeers(states)
    return states, peers, RoutedStateStore(states, peers, Random(1), me=ME)


def state_partition(topics: MemoryTopics, index: int) -> MemoryPartition:
    topic = topics.get(SUBSCRIPTIONS)
    assert topic is not None
    return topics.partitions_of(topic)[index]


@pytest.fixture(params=[ME, OTHER], ids=["kept here", "kept by another node"])
def topics(request: pytest.FixtureRequest) -> MemoryTopics:
    made = MemoryTopics()
    made.leader = request.param
    return made


async def test_written_state_is_read_back_by_the_next_leader(topics: MemoryTopics) -> None:
    states, _, store = await opened(topics)
    key = key_at(states, 1)
    assert await store.load(key, Epoch(3)) == (None, -1)
    await asyncio.gather(*(store.write(QueueWrite(key, Epoch(3), number, b"%d" % number)) for number in range(10)))
    assert await store.load(key, Epoch(3)) == (b"0123456789", 9)
    assert await store.load(key, Epoch(4)) == (b"0123456789", 9)
    with pytest.raises(FencedLeaderEpoch):
        await store.write(QueueWrite(key, Epoch(3), 10, b"late"))
    with pytest.raises(FencedLeaderEpoch):
        await store.load(key, Epoch(3))
    await store.write(QueueWrite(key, Epoch(4), 10, b"!"))
    _, _, again = await opened(topics.after_crash())
    assert await again.load(key, Epoch(4)) == (b"0123456789!", 10)
    await again.close()
    await store.close()


async def test_the_frames_about_a_message_are_found_in_the_log(topics: MemoryTopics) -> None:
    clock = ManualClock()
    states, _, store = await opened(topics, clock)
    key, other = key_at(states, 1), key_at(states, 1)
    times: list[int] = []
    for number in range(20):
        clock.advance_ms(1000)
        times.append(clock.now_ms())
        for queue_key in (key, other):
            if not number:
                await store.load(queue_key, Epoch(0))
            # Each frame covers ten messages: the first 0 to 9, the second 5 to 14.
            delta = Delta(DeltaKind.ACQUIRED, 5 * number, 5 * number + 9, 1, 0, "w", clock.now_ms())
            frame = write_frame(FrameHeader(queue_key, 0, number, 0), [delta])
            await store.write(QueueWrite(queue_key, Epoch(0), number, frame))

    async def found(offset: int, since_ms: int) -> list[int]:
        return [read_header(frame).sequence for frame in await store.frames(key, offset, since_ms)]

    assert await found(27, 0) == [4, 5]
    assert await found(27, times[5]) == [5]
    assert await found(27, times[6]) == []
    assert await found(1000, 0) == []
    assert await found(0, times[0]) == [0]
    await store.close()


async def test_a_search_for_frames_does_not_stall_the_loop() -> None:
    topics = MemoryTopics()
    states, _, store = await opened(topics)
    key = key_at(states, 1)
    await store.load(key, Epoch(0))
    deltas = [Delta(DeltaKind.ACQUIRED, offset, offset, 1, 0, "w", 1) for offset in range(1000)]
    frames = [write_frame(FrameHeader(key, 0, number, 0), deltas) for number in range(200)]
    await asyncio.gather(
        *(store.write(QueueWrite(key, Epoch(0), number, frame)) for number, frame in enumerate(frames))
    )
    searching = asyncio.ensure_future(store.frames(key, 500, 0))
    yields = 0
    while not searching.done():
        yields += 1
        await asyncio.sleep(0)
    assert await searching == frames
    assert yields >= len(frames) // state_shard.SEARCHED_BETWEEN_YIELDS
    await store.close()


async def test_a_repeated_write_counts_once_and_a_gap_is_refused(topics: MemoryTopics) -> None:
    states, _, store = await opened(topics)
    key = key_at(states, 0)
    await store.load(key, Epoch(0))
    await store.write(QueueWrite(key, Epoch(0), 0, b"a"))
    await store.write(QueueWrite(key, Epoch(0), 0, b"a"))
    with pytest.raises(OutOfOrderSequence):
        await store.write(QueueWrite(key, Epoch(0), 2, b"c"))
    assert await store.load(key, Epoch(0)) == (b"a", 0)
    await store.close()


async def test_transient_errors_lose_neither_a_write_nor_the_order() -> None:
    topics = MemoryTopics()
    topics.leader = OTHER
    states, peers, store = await opened(topics)
    key, other = key_at(states, 0), key_at(states, 0)
    await store.load(key, Epoch(0))
    await store.load(other, Epoch(0))
    peers.trouble = iter([BrokerUnreachable("gone"), None, NotCoordinator("moved"), BrokerUnreachable("gone"), None])
    peers.lost_responses = 2
    written = []
    for number in range(20):
        written.append(store.write(QueueWrite(key, Epoch(0), number, bytes([97 + number]))))
        if number < 5:
            written.append(store.write(QueueWrite(other, Epoch(0), number, b"o")))
        await asyncio.sleep(0)
    await asyncio.gather(*written)
    assert await store.load(key, Epoch(0)) == (b"abcdefghijklmnopqrst", 19)
    assert await store.load(other, Epoch(0)) == (b"ooooo", 4)
    await store.close()


async def test_a_failed_sync_is_survived() -> None:
    topics = MemoryTopics()
    states, _, store = await opened(topics)
    key = key_at(states, 0)
    await store.load(key, Epoch(0))
    partition = state_partition(topics, 0)
    partition.acknowledges = False
    written = [store.write(QueueWrite(key, Epoch(0), number, b"x")) for number in range(3)]
    await asyncio.sleep(0.001)
    assert not any(write.is_done for write in written)
    partition.fail(StorageFailure("the sync failed"))
    partition.acknowledges = True
    await asyncio.gather(*written)
    assert await store.load(key, Epoch(0)) == (b"xxx", 2)
    await store.close()


async def test_unwritten_state_is_bounded_and_reported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_lane, "UNWRITTEN_BYTES_MAX", 10)
    monkeypatch.setattr("millstream.broker.subscriptions.routed_store.CLOSE_S", 0.01)
    topics = MemoryTopics()
    states, _, store = await opened(topics)
    key = key_at(states, 0)
    await store.load(key, Epoch(0))
    partition = state_partition(topics, 0)
    partition.acknowledges = False
    written = store.write(QueueWrite(key, Epoch(0), 0, b"x" * 10))
    assert not store.has_room(key)
    await store.close()
    with pytest.raises(NotCoordinator):
        await written
    with pytest.raises(NotCoordinator):
        await store.write(QueueWrite(key, Epoch(0), 1, b"x"))
    assert store.has_room(key)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_failing", [True, False], ids=["fails already", "fails meanwhile"])
async def test_closing_does_not_wait_for_a_node_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    monkeypatch.setattr("millstream.broker.subscriptions.routed_store.CLOSE_S", 1000.0)
    topics = MemoryTopics()
    topics.leader = OTHER
    states, peers, store = await opened(topics)
    key = key_at(states, 0)
    await store.load(key, Epoch(0))
    peers.trouble = repeat(BrokerUnreachable("stopped"))
    written = store.write(QueueWrite(key, Epoch(0), 0, b"x"))
    while is_failing and store._lanes[PartitionIndex(0)]._pause_task is None:
        await asyncio.sleep(0)
    await store.close()
    with pytest.raises(NotCoordinator):
        await written


async def test_queues_of_deleted_subscriptions_are_removed() -> None:
    topics = MemoryTopics()
    states, _, store = await opened(topics)
    stays, goes = key_at(states, 0), key_at(states, 1)
    for key in (stays, goes):
        await store.load(key, Epoch(0))
        await store.write(QueueWrite(key, Epoch(0), 0, b"x"))
    assert await states.forget(goes.__eq__) == 1
    assert states.queues == 1
    restarted, _, again = await opened(topics.after_crash())
    assert restarted.queues == 1
    assert await again.load(stays, Epoch(0)) == (b"x", 0)
    assert await again.load(goes, Epoch(0)) == (None, -1)
    await store.close()
    await again.close()


def test_invalid_records_are_reported() -> None:
    with pytest.raises(CorruptState):
        read_record(StateRecord(b"short", b""))
    with pytest.raises(CorruptState, match="newer"):
        read_record(StateRecord(bytes([9]) + bytes(36), bytes(12)))
    with pytest.raises(CorruptState):
        read_record(StateRecord(bytes(37), b"short"))


async def test_a_queue_is_read_after_its_pending_writes() -> None:
    """Otherwise the next write would reuse the number of a pending one, and count as its repetition."""
    topics = MemoryTopics()
    topics.leader = OTHER
    states, peers, store = await opened(topics)
    key = key_at(states, 0)
    await store.load(key, Epoch(0))
    peers.trouble = iter([BrokerUnreachable("gone"), BrokerUnreachable("gone")])
    first = store.write(QueueWrite(key, Epoch(0), 0, b"a"))
    await asyncio.sleep(0)
    loaded = await store.load(key, Epoch(0))
    assert first.is_done
    assert loaded == (b"a", 0)
    await store.close()


async def test_a_write_behind_a_lost_one_is_lost_too() -> None:
    topics = MemoryTopics()
    topics.leader = OTHER
    states, peers, store = await opened(topics)
    key, other = key_at(states, 0), key_at(states, 0)
    await store.load(key, Epoch(0))
    await store.load(other, Epoch(0))
    peers.trouble = iter([CorruptState("what cannot pass")])
    lost = store.write(QueueWrite(key, Epoch(0), 0, b"a"))
    with pytest.raises(CorruptState):
        await lost
    peers.trouble = iter([BrokerUnreachable("gone")])
    before = store.write(QueueWrite(other, Epoch(0), 0, b"o"))
    behind = store.write(QueueWrite(key, Epoch(0), 1, b"b"))
    await before
    with pytest.raises(OutOfOrderSequence):
        await behind
    assert await store.load(key, Epoch(0)) == (None, -1)
    await store.close()


class Large(Joined):
    """An image whose snapshot is made beside the loop, when the test says so."""

    is_large = True
    captures: Callable[[], None] = staticmethod(lambda: None)

    def capture(self) -> Callable[[], bytes]:
        content = self._content

        def made() -> bytes:
            self.captures()
            return content

        return made


def written(key: QueueKey, epoch: int, sequence: int, deltas: bytes) -> StateRecord:
    return write_record(QueueRecord(DELTAS, key, Epoch(epoch), sequence, deltas))


async def test_a_large_queue_continues_while_its_snapshot_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    key, held = QueueKey(uuid4(), uuid4(), PartitionIndex(3)), threading.Event()
    monkeypatch.setattr(Large, "captures", staticmethod(lambda: held.wait(60)))
    shard = StateShard(Large)
    shard.replay(written(key, 0, 0, b"a"))
    late = shard.durable_record(key)
    assert late is not None
    assert not isinstance(late, StateRecord)
    making = asyncio.ensure_future(late.make())
    await asyncio.sleep(0)
    shard.replay(written(key, 0, 1, b"b"))
    shard.replay(written(key, 1, 1, b""))
    held.set()
    await making
    again = StateShard(Joined)
    for record in late.records():
        again.replay(record)
    _, loaded = again.load(key, Epoch(1))
    assert isinstance(loaded, LoadedState)
    assert loaded.snapshot is not None
    assert (loaded.snapshot(), loaded.sequence) == (b"ab", 1)
    with pytest.raises(FencedLeaderEpoch):
        again.load(key, Epoch(0))


async def test_a_large_queue_deleted_meanwhile_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    key = QueueKey(uuid4(), uuid4(), PartitionIndex(3))
    shard = StateShard(Large)
    shard.replay(written(key, 0, 0, b"a"))
    late, failing = shard.durable_record(key), shard.durable_record(key)
    assert late is not None
    assert not isinstance(late, StateRecord)
    await late.make()
    shard.replay(write_record(QueueRecord(SNAPSHOT, key, Epoch(-1), -1, None)))
    assert late.records() == []
    assert failing is not None
    assert not isinstance(failing, StateRecord)
    await failing.make()
    assert failing.records() == []


def started(key: QueueKey, count: int) -> list[bytes]:
    """The frames of a queue: its start, and one scan each."""
    deltas = [Delta(DeltaKind.START, 0, 0, 0, 0, "", 1)]
    deltas += [Delta(DeltaKind.SCANNED, offset, offset, 0, 0, "", 1) for offset in range(count - 1)]
    return [write_frame(FrameHeader(key, 0, number, 0), [delta]) for number, delta in enumerate(deltas, 1)]


def test_an_unreadable_queue_does_not_block_the_storing_of_others() -> None:
    good, bad = (QueueKey(uuid4(), uuid4(), PartitionIndex(index)) for index in range(2))
    shard = StateShard(_build_image)
    for key in (good, bad):
        for number, frame in enumerate(started(key, 40)):
            if (key, number) != (bad, 3):
                shard.replay(written(key, 0, number, frame))
    assert not shard.has_ledger
    rewritten = StateShard(_build_image)
    for name in shard.durable_keys():
        record = shard.durable_record(name)
        assert isinstance(record, StateRecord)
        rewritten.replay(record)
    for state in (shard, rewritten):
        assert [key for key, _ in state.changed(lambda _key, _sequence: True)] == [good]
        snapshots: dict[QueueKey, bytes] = {}
        for key in (good, bad):
            _, loaded = state.load(key, Epoch(0))
            assert isinstance(loaded, LoadedState)
            assert loaded.snapshot is not None
            assert loaded.sequence == 39
            snapshots[key] = loaded.snapshot()
        assert read_snapshot(snapshots[good]).window.end == 39
        with pytest.raises(CorruptState, match=r"frame 4 of queue .* is missing"):
            read_snapshot(snapshots[bad])
    assert all(frame in snapshots[bad] for frame in started(bad, 40)[4:])


class Ledgered(Joined):
    has_ledger = True


class _Segment(NamedTuple):
    size: int
    next_offset: int


class _Log(NamedTuple):
    partition: TopicPartition
    segments: list[_Segment]


class _Partition(NamedTuple):
    log: _Log
    log_start: int = 0


def kept_from(landed: int, sizes: Sequence[int], *, has_ledger: bool = True) -> tuple[int, list[Overflow]]:
    """The retained part of a log of 100 offsets per segment, of which the last two are the rewrite."""
    retention = LedgerRetention(ManualClock(), bytes_max=1000)
    retention.landed = lambda _partition: landed
    segments = [_Segment(size, 100 * number) for number, size in enumerate(sizes, 1)]
    place = TopicPartition(SUBSCRIPTIONS, PartitionIndex(0))
    shard = StateShard(Ledgered if has_ledger else Joined)
    shard.replay(written(QueueKey(uuid4(), uuid4(), PartitionIndex(0)), 0, 0, b"a"))
    partition: Any = _Partition(_Log(place, segments))
    start, records = retention.keep_from(shard, partition, Offset(100 * (len(sizes) - 2)))
    return start, [Overflow.read(content) for record in records if (content := read_record(record).content) is not None]


def test_deltas_are_kept_until_they_have_landed_and_overflow_is_recorded() -> None:
    assert kept_from(0, [300, 300, 300, 10], has_ledger=False) == (200, [])
    assert kept_from(0, [300, 300, 300, 10]) == (0, [])
    assert kept_from(150, [300, 300, 300, 10]) == (150, [])
    assert kept_from(390, [300, 300, 300, 10]) == (200, [])
    start, (overflow,) = kept_from(50, [600, 600, 300, 10])
    assert start == 100
    assert (overflow.start, overflow.end) == (50, 100)
    # The part that the node itself needs is never deleted, at any size.
    start, _overflow = kept_from(0, [300, 300, 900, 900])
    assert start == 200
