"""Publishing once: duplicates are detected across endpoints and leaders, within the window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis import publish_once as api
from millstream.broker.kafka.apis.publish_once import PublishOnce
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.replication import published_ids
from millstream.broker.replication.partition import Partition
from millstream.core.errors import InvalidBatch, InvalidRequest, InvalidTimestamp, NotLeader, RequestTimedOut
from millstream.core.ids import Epoch, NodeId
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.core.topic import Topic
from millstream.protocol.private.publish_once import PublishOnceRequest, partition_of
from millstream.protocol.records.batch import COMPRESSION_NONE, COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.queue_bench import Workbench

WINDOW_MS = 120_000
QUOTAS = ClientQuotas(cast("Declarations", None))


class Place:
    """The one partition, as `Topics` would return it."""

    def __init__(self, partition: Partition) -> None:
        self.there = partition
        self.listeners: list[Callable[[Topic], None]] = []

    def on_deletion(self, listener: Callable[[Topic], None]) -> None:
        self.listeners.append(listener)

    def partition(self, _topic: str, _index: int) -> Partition:
        return self.there


class PublishOnceFixture:
    """PublishOnce on a partition in memory."""

    def __init__(self) -> None:
        self.bench = Workbench()
        self.api = self.restarted()

    def restarted(self) -> PublishOnce:
        """Simulate a failover: nothing is cached."""
        self.place = Place(self.bench.partition)
        self.api = PublishOnce(cast("Topics", self.place), QuotaMeter(QUOTAS, PRODUCER_BYTE_RATE))
        return self.api

    def record(self, name: str) -> NewRecord:
        return NewRecord(None, name.encode(), (("message-id", name.encode()),), self.bench.clock.now_ms())

    async def publish(self, *names: str, compression: int = COMPRESSION_NONE) -> list[tuple[int, bool]]:
        batch = bytes(encode_batch([self.record(name) for name in names], compression=compression))
        response = await self.api.handle(PublishOnceRequest("orders", 0, batch))
        return [(offset, is_new) for offset, _, is_new in response.placed]

    def publish_otherwise(self, name: str, compression: int = COMPRESSION_NONE) -> int:
        batch = encode_batch([self.record(name)], compression=compression)
        return int(self.bench.partition.write(batch, acks=-1).base_offset)

    def publish_in_transaction(self, name: str, producer_id: int, *, commit: bool | None) -> None:
        guard = self.bench.partition.start_transaction(producer_id, 0, 0, bumps_epoch=False)
        batch = encode_batch(
            [self.record(name)], producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
        )
        self.bench.partition.write(batch, acks=-1, guard=guard)
        if commit is not None:
            self.bench.end_transaction(producer_id, commit=commit)

    def stored(self) -> list[str]:
        log = self.bench.partition.log
        records = decode_records(log.read(0, max_bytes=1 << 30, up_to=log.end_offset)) if log.end_offset else ()
        return [(record.value or b"").decode() for record in records]


async def test_a_duplicate_message_is_not_stored_again() -> None:
    fixture = PublishOnceFixture()
    assert await fixture.publish("a", "b", "a") == [(0, True), (1, True), (0, False)]
    assert await fixture.publish("b", "c", compression=COMPRESSION_ZSTD) == [(1, False), (2, True)]
    assert fixture.stored() == ["a", "b", "c"]
    assert fixture.api.duplicates == 2


async def test_batches_that_decompress_to_much_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, beside = PublishOnceFixture(), []

    async def to_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        beside.append(work.__name__)
        if work.__name__ == "_build_checked" and len(beside) == 2:
            fixture.publish_otherwise("7")
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    names = [str(number) for number in range(5000)]
    await fixture.publish("4999")
    placed = await fixture.publish(*names, compression=COMPRESSION_ZSTD)
    assert beside == ["_read_messages", "_build_checked", "_build_checked"]
    assert [at for at, (_, is_new) in enumerate(placed) if not is_new] == [7, 4999]
    assert fixture.stored() == ["4999", "7", *names[:7], *names[8:4999]]


async def test_a_message_without_a_timestamp_is_stamped_now() -> None:
    fixture = PublishOnceFixture()
    batch = bytes(encode_batch([NewRecord(None, b"x", (("message-id", b"a"),))]))
    for is_new in (True, False):
        ((offset, timestamp_ms, was_new),) = (await fixture.api.handle(PublishOnceRequest("orders", 0, batch))).placed
        assert (offset, timestamp_ms, was_new) == (0, fixture.bench.clock.now_ms(), is_new)


async def test_messages_published_through_other_apis_are_detected() -> None:
    fixture = PublishOnceFixture()
    fixture.publish_otherwise("a", COMPRESSION_ZSTD)
    fixture.publish_in_transaction("gone", 1, commit=False)
    fixture.publish_in_transaction("kept", 2, commit=True)
    fixture.publish_in_transaction("open", 3, commit=None)
    placed = await fixture.publish("a", "gone", "kept", "open")
    assert [is_new for _, is_new in placed] == [False, True, False, True]


async def test_many_ids_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ids, "ON_LOOP_BYTES", 0)
    monkeypatch.setattr(published_ids, "READ_BYTES", 1)
    fixture = PublishOnceFixture()
    for number in range(20):
        fixture.publish_otherwise(str(number))
    placed = await asyncio.gather(fixture.publish("7", "new"), fixture.publish("new", "8"))
    assert sorted(offset for both in placed for offset, _ in both) == [7, 8, 20, 20]


async def test_ids_beyond_the_limit_are_forgotten_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ids, "IDS_MAX", 2)
    fixture = PublishOnceFixture()
    await fixture.publish("a", "b", "c")
    assert await fixture.publish("b", "c") == [(1, False), (2, False)]
    assert await fixture.publish("a") == [(3, True)]
    forgotten = {metric.name: next(iter(metric.samples)).value for metric in fixture.api.metrics()}
    assert forgotten["millstream_deduplication_ids"] == 2
    assert forgotten["millstream_deduplication_ids_forgotten_total"] == 1


async def test_partitions_evicted_from_the_cache_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "NODE_IDS_MAX", 1)
    monkeypatch.setattr(api, "COUNT_EVERY", 1)
    fixture = PublishOnceFixture()
    first = fixture.bench.partition
    for _ in range(2):
        await fixture.publish("a", "b")
    cast("Place", fixture.api._topics).there = fixture.bench.make_partition(1)
    await fixture.publish("a")
    assert len(fixture.api._ids) == 1
    cast("Place", fixture.api._topics).there = first
    assert await fixture.publish("b") == [(1, False)]


async def test_a_node_that_does_not_lead_refuses() -> None:
    fixture = PublishOnceFixture()
    await fixture.publish("a")
    state = PartitionState(
        replicas=(NodeId(1), NodeId(2)), in_sync=(NodeId(1), NodeId(2)), leader=NodeId(2), leader_epoch=Epoch(5)
    )
    fixture.bench.partition.apply(Versioned(state, 7), me=NodeId(1))
    with pytest.raises(NotLeader):
        await fixture.publish("a")


async def test_a_duplicate_is_acknowledged_together_with_the_original() -> None:
    fixture = PublishOnceFixture()
    partition = fixture.bench.partition
    state = PartitionState(
        replicas=(NodeId(1), NodeId(2)), in_sync=(NodeId(1), NodeId(2)), leader=NodeId(1), leader_epoch=Epoch(5)
    )
    partition.apply(Versioned(state, 7), me=NodeId(1))
    first = asyncio.ensure_future(fixture.publish("a"))
    again = asyncio.ensure_future(fixture.publish("a"))
    await asyncio.sleep(0)
    batch = bytes(encode_batch([fixture.record("a")]))
    with pytest.raises(RequestTimedOut):
        await fixture.api.handle(PublishOnceRequest("orders", 0, batch, 1))
    assert not first.done()
    assert not again.done()
    partition.read_for_follower(NodeId(2), offset=partition.log.end_offset, last_epoch=5, leader_epoch=5, max_bytes=1)
    assert (await first, await again) == ([(0, True)], [(0, False)])


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (encode_batch([NewRecord(None, b"x")]), InvalidRequest),
        (encode_batch([NewRecord(None, b"x", (("message-id", b"a"),))], producer_id=7), InvalidBatch),
        (2 * encode_batch([NewRecord(None, b"x", (("message-id", b"a"),))]), InvalidBatch),
    ],
)
async def test_messages_that_cannot_be_deduplicated_are_refused(batch: bytearray, error: type[Exception]) -> None:
    fixture = PublishOnceFixture()
    with pytest.raises(error):
        await fixture.api.handle(PublishOnceRequest("orders", 0, bytes(batch)))
    assert fixture.stored() == []


def test_a_message_always_goes_to_the_same_partition() -> None:
    assert partition_of(b"key", b"id", 8) == partition_of(b"key", b"other", 8)
    assert {partition_of(None, str(number).encode(), 8) for number in range(100)} == set(range(8))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("once"), st.lists(st.sampled_from("abcd"), min_size=1, max_size=3)),
        st.tuples(st.just("otherwise"), st.sampled_from("abcd")),
        st.tuples(st.just("wait"), st.integers(1, WINDOW_MS)),
        st.tuples(st.just("failover"), st.none()),
    ),
    max_size=25,
)


@given(STEPS)
def test_it_behaves_like_a_dictionary(steps: list[tuple[str, object]]) -> None:
    asyncio.run(_follow(steps))


async def _follow(steps: list[tuple[str, object]]) -> None:
    fixture = PublishOnceFixture()
    clock = fixture.bench.clock
    known: dict[str, list[tuple[int, int]]] = {}
    end = 0

    def within_window(name: str) -> list[tuple[int, int]]:
        return [publication for publication in known.get(name, ()) if publication[1] >= clock.now_ms() - WINDOW_MS]

    for step, detail in steps:
        if step == "wait":
            clock.advance_ms(cast("int", detail))
        elif step == "failover":
            fixture.restarted()
        elif step == "otherwise":
            name = cast("str", detail)
            fixture.publish_otherwise(name)
            known.setdefault(name, []).append((end, clock.now_ms()))
            end += 1
        else:
            expected = []
            for name in cast("list[str]", detail):
                is_new = not within_window(name)
                if is_new:
                    known.setdefault(name, []).append((end, clock.now_ms()))
                    end += 1
                expected.append((within_window(name)[-1][0], is_new))
            assert await fixture.publish(*cast("list[str]", detail)) == expected


async def test_deleted_partitions_and_those_led_elsewhere_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = PublishOnceFixture()
    await fixture.publish("a")
    assert len(fixture.api._ids) == 1
    for listener in fixture.place.listeners:
        listener(fixture.bench.partition.topic)
    assert not fixture.api._ids
    # A partition that this node no longer leads is evicted too, once others have been used often enough.
    await fixture.publish("a")
    monkeypatch.setattr(api, "COUNT_EVERY", 1)
    monkeypatch.setattr(published_ids.PublishedIds, "is_current", property(lambda self: self._partition is not there))
    there, fixture.place.there = fixture.bench.partition, Workbench().partition
    await fixture.publish("b")
    assert list(fixture.api._ids) == [fixture.place.there]


@pytest.mark.parametrize("compression", [COMPRESSION_NONE, COMPRESSION_ZSTD])
async def test_a_timestamp_far_ahead_is_refused(compression: int) -> None:
    fixture = PublishOnceFixture()
    ahead = NewRecord(
        None, bytes(100_000), (("message-id", b"a"),), fixture.bench.clock.now_ms() + 30 * 365 * 24 * 3600 * 1000
    )
    batch = bytes(encode_batch([ahead], compression=compression))
    with pytest.raises(InvalidTimestamp):
        await fixture.api.handle(PublishOnceRequest("orders", 0, batch))
