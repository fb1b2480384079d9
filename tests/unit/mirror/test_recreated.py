"""A topic that was deleted on the source and created again: nothing of it is copied into the copy of the old one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.mirror import failover
from millstream.broker.mirror.barriers import Barriers
from millstream.broker.mirror.copier import Copier, Copy
from millstream.broker.mirror.follower import Follower
from millstream.broker.mirror.service import MirrorService
from millstream.broker.mirror.source import Source
from millstream.broker.replication.partition import Partition
from millstream.cli.exit_code import CommandFailed
from millstream.cli.mirror import _check_recreated, _print_removed
from millstream.core.clock import SystemClock
from millstream.core.errors import (
    InvalidMirror,
    MillstreamError,
    UnknownTopic,
    UnknownTopicId,
    UnsupportedVersion,
)
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex
from millstream.core.mirror import Mirror, MirrorSettings
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.messages.primitives import Writer
from millstream.protocol.private.mirror_messages import AdoptRequest, AdoptResponse, FenceRequest, ReverseResponse
from millstream.protocol.records.batch import iterate_whole_headers, place_batch
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, TopicMetadata
from millstream.protocol.wire.fetch import BY_ID, FetchedPartition, FetchLimits, read_fetched, write_fetch
from millstream_testing.clock import ManualClock
from millstream_testing.logs import memory_store
from millstream_testing.waiting import until

OLD, NEW = UUID(int=1), UUID(int=2)
ME = NodeId(1)
LIMITS = FetchLimits(max_bytes=1000, max_wait_ms=0)
COPY = Topic(
    name="x.orders",
    topic_id=UUID(int=9),
    partitions=1,
    replication=1,
    overrides={},
    created_ms=0,
    mirror="m",
    original_id=OLD,
)
ORIGINAL = TopicPartition("orders", PartitionIndex(0))


def records(value: bytes, base: int, epoch: int = 0) -> memoryview:
    batch = bytearray(encode_batch([NewRecord(None, value)]))
    (header,) = iterate_whole_headers(memoryview(batch))
    place_batch(batch, header, base, epoch)
    return memoryview(bytes(batch))


def described(**topic_ids: UUID) -> ClusterMetadata:
    topics = {
        name: TopicMetadata(name=name, topic_id=topic_id, is_internal=False, partitions={})
        for name, topic_id in topic_ids.items()
    }
    return ClusterMetadata(cluster_id="there", controller_id=ME, nodes={}, topics=topics, errors={})


class Broker:
    """The only node of a source, as its client sees it: it has one topic, and one record at each offset up to 4."""

    def __init__(self, topic_id: UUID = OLD, *, fetches_by_id: bool = True) -> None:
        self.topic_id = topic_id
        self.fetches_by_id = fetches_by_id
        self.fetched = 0
        self.partitions = 1

    async def leader_of(self, topic: str, partition: int) -> NodeId:
        if partition >= self.partitions:
            raise UnknownTopic(f"topic {topic!r} has no partition {partition}")
        return ME

    def forget_leaders(self) -> None:
        pass

    async def metadata(self, _names: Any = None, *, node: NodeId | None = None) -> ClusterMetadata:
        return described(orders=self.topic_id)

    async def fetch_from(
        self,
        _leader: NodeId,
        positions: Mapping[TopicPartition, Offset],
        _limits: FetchLimits,
        topic_ids: Mapping[str, UUID] | None = None,
    ) -> dict[TopicPartition, FetchedPartition | MillstreamError]:
        await asyncio.sleep(0)
        if topic_ids is not None and not self.fetches_by_id:
            raise UnsupportedVersion("before 3.1")
        self.fetched += 1
        results: dict[TopicPartition, FetchedPartition | MillstreamError] = {}
        for where, offset in positions.items():
            if topic_ids is not None and topic_ids[where.topic] != self.topic_id:
                results[where] = UnknownTopicId("the broker responded with UNKNOWN_TOPIC_ID")
            else:
                data = records(b"v", offset) if offset < 4 else memoryview(b"")
                results[where] = FetchedPartition(data, Offset(4), Offset(0), Offset(4))
        return results

    def source(self) -> Any:
        source = Source.__new__(Source)
        client: Any = self
        source.client = client
        return source


class Target:
    """A node that leads a copy with a real log."""

    def __init__(self, broker: Broker) -> None:
        clock = ManualClock()
        self.logs = memory_store(clock=clock, journal_bytes=100_000)
        log = self.logs.open_log(COPY.topic_id, TopicPartition(COPY.name, PartitionIndex(0)), TopicSettings(flush="os"))
        self.partition = Partition(COPY, PartitionIndex(0), log, self.logs, alone=False, clock=clock)
        state = PartitionState(replicas=(ME,), leader=ME, leader_epoch=Epoch(0), in_sync=(ME,))
        self.partition.apply(Versioned(state, revision=1), me=ME)
        self.cut: int | None = None
        self.source = broker.source()
        self.source.end_of_epoch = self.end_of_epoch
        self.source_end = 100
        make: Any = Copier
        self.copier: Copier = make(
            None,
            self.source,
            SystemClock(),
            rate=0,
            gates=False,
            cut_of=lambda _: self.cut,
            note_gaps=None,
            on_commit=None,
        )

    async def end_of_epoch(self, _where: TopicPartition, epoch: int) -> EpochEnd:
        return EpochEnd(Epoch(epoch), Offset(self.source_end))

    def begin(self, index: int = 0) -> Copy:
        copy = Copy(self.partition, TopicPartition("orders", PartitionIndex(index)))
        self.copier.follow([copy])
        return copy

    async def copy_until_idle(self, copy: Copy) -> None:
        """Copy until everything has arrived, or an error stops it."""
        running = asyncio.create_task(self.copier.run())
        try:
            await until(lambda: copy.error or copy.end >= 4)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def broker() -> Broker:
    return Broker()


@pytest.fixture
async def target(broker: Broker) -> AsyncIterator[Target]:
    made = Target(broker)
    running = asyncio.create_task(made.logs.run())
    yield made
    running.cancel()
    await asyncio.wait([running])
    made.logs.close_now()


@pytest.mark.parametrize("fetches_by_id", [True, False], ids=["by id", "Kafka before 3.1"])
@pytest.mark.parametrize("is_recreated", [True, False])
async def test_nothing_is_copied_from_another_topic_of_the_same_name(
    broker: Broker, target: Target, fetches_by_id: bool, is_recreated: bool
) -> None:
    broker.topic_id, broker.fetches_by_id = NEW if is_recreated else OLD, fetches_by_id
    copy = target.begin()
    await target.copy_until_idle(copy)
    assert broker.fetched
    assert (copy.end, bool(copy.error)) == ((0, True) if is_recreated else (4, False))
    if is_recreated:
        assert "'orders' was deleted on the source and created again" in copy.error
        assert "delete its copy here" in copy.error


async def test_the_reason_is_given_if_the_new_topic_has_fewer_partitions(broker: Broker, target: Target) -> None:
    broker.topic_id = NEW
    copy = target.begin(index=3)
    await target.copy_until_idle(copy)
    assert "created again" in copy.error


async def test_a_topic_that_only_its_leader_does_not_know_is_not_gone(broker: Broker, target: Target) -> None:
    broker.partitions = 0
    copy = target.begin()
    await target.copy_until_idle(copy)
    assert copy.error.startswith("orders-0 exists")
    assert copy.unknown_since is None


@pytest.mark.parametrize("is_recreated", [True, False])
async def test_a_copy_is_not_truncated_where_the_history_of_another_topic_ends(
    broker: Broker, target: Target, is_recreated: bool
) -> None:
    for at in range(3):
        target.partition.append_mirrored(records(b"v", at), exposed=None)
    broker.topic_id = NEW if is_recreated else OLD
    # As an old source that follows, it may drop what is beyond the common history.
    target.cut, target.source_end = 2, 1
    copy = target.begin()
    if is_recreated:
        with pytest.raises(UnknownTopicId):
            await target.copier._check_history(copy)
    else:
        await target.copier._check_history(copy)
    assert copy.end == (3 if is_recreated else 1)


async def test_topics_without_an_id_are_fetched_by_name(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TopicPartition("other", PartitionIndex(0))
    asked: list[tuple[set[str], bool]] = []
    fetch_from = broker.fetch_from

    async def recorded(leader: NodeId, positions: Any, limits: Any, topic_ids: Any = None) -> Any:
        asked.append(({where.topic for where in positions}, topic_ids is not None))
        return await fetch_from(leader, positions, limits, topic_ids)

    monkeypatch.setattr(broker, "fetch_from", recorded)
    positions = {ORIGINAL: Offset(0), other: Offset(0)}
    results = await broker.source().fetch(ME, positions, LIMITS, {"orders": OLD, "other": None})
    assert results.keys() == positions.keys()
    assert sorted(asked, key=str) == [({"orders"}, True), ({"other"}, False)]


def test_a_fetch_by_id_names_no_topic_and_its_response_is_matched_by_id() -> None:
    body = bytes(write_fetch(BY_ID, {ORIGINAL: Offset(7)}, LIMITS, {"orders": OLD}))
    assert OLD.bytes in body
    assert b"orders" not in body
    writer = Writer(flexible=True)
    writer.int32(0)  # correlation id
    writer.no_tags()
    writer.int32(0)
    writer.int16(0)
    writer.int32(0)
    writer.array_length(1)
    writer.uuid(OLD)
    writer.array_length(1)
    writer.int32(0)
    writer.int16(100)
    for _ in range(3):
        writer.int64(-1)
    writer.array_length(0)
    writer.int32(-1)
    writer.array_length(0)
    writer.no_tags()
    writer.no_tags()
    writer.no_tags()
    results = read_fetched(BY_ID, memoryview(bytes(writer.buffer)), {"orders": OLD})
    assert isinstance(results[ORIGINAL], UnknownTopicId)


# -- what is not records ------------------------------------------------------------------------------------------


class Followed:
    """A follower of a source with one topic, and a group that has committed an offset there."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.altered: list[str] = []
        self.topics = {COPY.name: COPY}
        mirror = Mirror(mirror_id=UUID(int=5), name="m", overrides={"rename": "x."})
        service = SimpleNamespace(
            copied_topics=lambda _: list(self.topics.values()),
            topics=SimpleNamespace(
                get=self.topics.get, alter=self.alter, add_partitions=self.alter, set_origins=self.set_origins
            ),
            membership=SimpleNamespace(cluster_id="here"),
        )
        run = SimpleNamespace(
            service=service,
            settings=MirrorSettings(rename="x."),
            mirror=mirror,
            notes={},
            groups={},
            wants_barrier=asyncio.Event(),
            refreshed=asyncio.Event(),
        )
        source = broker.source()
        source.is_millstream, source.cluster_id = False, "there"
        make: Any = Follower
        self.follower: Any = make(run, source)
        monkeypatch.setattr("millstream.broker.mirror.follower.list_groups", self.list_groups)
        monkeypatch.setattr("millstream.broker.mirror.follower.committed_by_group", self.committed_by_group)

    async def alter(self, name: str, *_: Any, **__: Any) -> None:
        self.altered.append(name)

    async def set_origins(self, name: str, origins: tuple[str, ...], original_id: UUID | None) -> None:
        self.topics[name] = dataclasses.replace(COPY, origins=origins, original_id=original_id)

    async def list_groups(self, _client: Any) -> list[tuple[str, str, str]]:
        return [("g", "", "classic")]

    async def committed_by_group(self, _client: Any, names: list[str]) -> dict[str, dict[TopicPartition, int]]:
        return {name: {ORIGINAL: 3} for name in names}


@pytest.mark.parametrize("is_recreated", [True, False])
async def test_offsets_of_groups_in_another_topic_are_not_taken(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, is_recreated: bool
) -> None:
    followed = Followed(broker, monkeypatch)
    broker.topic_id = NEW if is_recreated else OLD
    await followed.follower._read_groups()
    where = TopicPartition(COPY.name, PartitionIndex(0))
    assert followed.follower._applicable == ({} if is_recreated else {"g": {where: 3}})


@pytest.mark.parametrize("is_recreated", ["before", "meanwhile", ""])
async def test_settings_and_partitions_of_another_topic_are_not_taken(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, is_recreated: str
) -> None:
    followed = Followed(broker, monkeypatch)

    async def overrides(_name: str) -> dict[str, str]:
        broker.topic_id = NEW if is_recreated else OLD
        return {"retention.ms": "1"}

    followed.follower._overrides = overrides
    original: Any = SimpleNamespace(
        name="orders",
        topic_id=NEW if is_recreated == "before" else OLD,
        partitions=[0] if is_recreated == "meanwhile" else [0, 1],
    )
    await followed.follower._sync_topic(original, (), checks_configs=True)
    assert followed.altered == ([] if is_recreated else [COPY.name, COPY.name])


async def test_the_id_is_recorded_once_the_source_has_ids(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(broker, monkeypatch)
    followed.topics[COPY.name] = dataclasses.replace(COPY, original_id=None)
    for topic_id, recorded in ((UUID(int=0), None), (OLD, OLD), (UUID(int=0), OLD), (NEW, OLD)):
        original = described(orders=topic_id).topics["orders"]
        await followed.follower._sync_topic(original, (), checks_configs=False)
        assert followed.topics[COPY.name].original_id == recorded


def test_a_barrier_leaves_out_topics_that_have_another_id() -> None:
    made: Any = Barriers
    topics = {"orders": dataclasses.replace(COPY, name="orders", topic_id=NEW)}
    barriers = made(SimpleNamespace(topics=topics), None, None)
    assert not barriers._has_id("orders", {"orders": OLD})
    assert not barriers._has_id("gone", {"gone": OLD})
    assert barriers._has_id("orders", {"orders": NEW})
    assert barriers._has_id("orders", {})


# -- failover and reverse -----------------------------------------------------------------------------------------


async def test_a_failover_does_not_know_what_is_missing_of_a_topic_that_was_recreated(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReachedOffsets:
        async def __aenter__(self) -> Any:
            source = broker.source()
            source.ends = self.ends
            return source

        async def __aexit__(self, *_: object) -> None:
            pass

        async def ends(self, partitions: Any) -> dict[TopicPartition, int]:
            return dict.fromkeys(partitions, 3)

    monkeypatch.setattr(failover, "Source", lambda *_, **__: ReachedOffsets())
    mirror = Mirror(mirror_id=UUID(int=5), name="m", overrides={"from": "paris:9092", "rename": "x."})
    where = TopicPartition(COPY.name, PartitionIndex(0))
    assert await failover._source_ends(mirror, [COPY]) == ({where: 3}, "")
    broker.topic_id = NEW
    ends, problem = await failover._source_ends(mirror, [COPY])
    assert ends == {}
    assert f"{COPY.name} was deleted at the source and created again" in problem


async def test_a_failover_names_what_the_source_has_deleted_and_what_it_did_not_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ReachedOffsets:
        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
            return {where: 3 for where in partitions if where.topic == "orders" and where.partition == 0}

        async def metadata(self, _topics: Any) -> ClusterMetadata:
            errors = {"gone": int(ErrorCode.unknown_topic_or_partition)}
            return ClusterMetadata(cluster_id="", controller_id=ME, nodes={}, topics={}, errors=errors)

    monkeypatch.setattr(failover, "Source", lambda *_, **__: ReachedOffsets())
    mirror = Mirror(mirror_id=UUID(int=5), name="m", overrides={"from": "paris:9092"})
    copies = [dataclasses.replace(COPY, name=name, partitions=2) for name in ("orders", "gone")]
    ends, problem = await failover._source_ends(mirror, copies)
    assert ends == {TopicPartition("orders", PartitionIndex(0)): 3}
    assert problem == "gone was deleted at the source; the source did not respond for orders-1"


@pytest.mark.parametrize("step", ["fence", "follow"])
async def test_an_old_source_leaves_a_topic_alone_that_it_has_recreated(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    same = dataclasses.replace(COPY, name="same", topic_id=OLD, mirror="")
    other = dataclasses.replace(COPY, name="orders", topic_id=NEW, mirror="")
    fenced: list[str] = []
    followed: list[AdoptRequest] = []

    async def declared() -> list[Topic]:
        return [same, other]

    async def set_mirror(_service: Any, topics: list[Topic], *_: Any, **__: Any) -> None:
        fenced.extend(topic.name for topic in topics)

    async def follow(_service: Any, request: AdoptRequest, _topics: Any) -> AdoptResponse:
        followed.append(request)
        return AdoptResponse()

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(failover, "_set_mirror", set_mirror)
    monkeypatch.setattr(failover, "_follow", follow)
    monkeypatch.setattr(failover, "_check_reachable", nothing)
    service: Any = SimpleNamespace(
        topics=SimpleNamespace(declared=declared),
        mirrors=SimpleNamespace(get=lambda _: None, create=nothing),
        fence_everywhere=nothing,
    )
    request: Any = AdoptRequest(
        name="m",
        step=step,  # type: ignore[arg-type]
        topic_ids=[OLD, UUID(int=3)],
        names=["same", "orders"],
        cuts={"same": {0: 1}, "orders": {0: 1}},
    )
    if step == "fence":
        with pytest.raises(InvalidMirror, match="orders was deleted on the source and created again"):
            await failover._adopt(service, request)
        assert fenced == []
    else:
        assert (await failover._adopt(service, request)).recreated == ["orders"]
        assert fenced == ["same"]
        # With a cut, this cluster would take it for a topic that was failed over here.
        assert followed[0].cuts == {"same": {0: 1}}


async def test_a_topic_that_is_recreated_before_the_truncation_is_not_truncated() -> None:
    partition = SimpleNamespace(topic=dataclasses.replace(COPY, topic_id=NEW), is_leader=True)

    async def await_mirror(*_: Any) -> None:
        pass

    service: Any = SimpleNamespace(topics=SimpleNamespace(await_mirror=await_mirror, partition=lambda *_: partition))
    with pytest.raises(InvalidMirror, match="created again"):
        await MirrorService.fence(service, FenceRequest(mirror="m", topic_ids=[OLD], cuts={COPY.name: {0: 1}}))


def test_a_reverse_that_leaves_a_topic_behind_does_not_report_success(capsys: pytest.CaptureFixture[str]) -> None:
    report = ReverseResponse(recreated=["orders"])
    _print_removed([], report)
    assert capsys.readouterr().out == ""
    with pytest.raises(CommandFailed, match="does not follow in orders"):
        _check_recreated(report)
    _check_recreated(ReverseResponse())
