"""An old source that is truncated at the cuts before it follows, and histories that part."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.mirror.copier import Copier, Copy
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.service import MirrorRun, MirrorService
from millstream.broker.replication.partition import Partition
from millstream.broker.replication.replica import diverging_end
from millstream.core.clock import SystemClock
from millstream.core.errors import (
    CopyDiverged,
    MillstreamError,
    NotLeader,
    StoreUnavailable,
    UnknownTopicId,
)
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.private.message import Response
from millstream.protocol.private.mirror_messages import ExposeRequest, FenceRequest
from millstream.protocol.records.batch import iterate_whole_headers, place_batch
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.records.rewrite import empty_batch
from millstream.protocol.wire.fetch import FetchedPartition
from millstream_testing.clock import ManualClock
from millstream_testing.logs import memory_store

NAME = "paris"
EU, US = "orders.eu", "orders.us"
ME, OTHER = NodeId(1), NodeId(2)


def service_of(topics: Any, mirrors: Any = None) -> Any:
    membership = SimpleNamespace(me=SimpleNamespace(node_id=ME), node=lambda _: None, controller_id=ME)
    made: Any = MirrorService
    return made(topics, membership, mirrors, None, None, None, None, None, SystemClock(), None)


class OldSource:
    """A node of an old source that leads one partition, with a real log."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.topic = Topic(
            name=EU, topic_id=UUID(int=1), partitions=2, replication=1, overrides={}, created_ms=0, mirror=NAME
        )
        self.logs = memory_store(clock=clock, journal_bytes=100_000)
        where = TopicPartition(EU, PartitionIndex(0))
        log = self.logs.open_log(self.topic.topic_id, where, TopicSettings(flush="os"))
        self.partition_0 = Partition(self.topic, PartitionIndex(0), log, self.logs, alone=False, clock=clock)
        self.lead(ME, epoch=3)
        self.partition_0.append_mirrored(b"".join(empty_batch(at, at + 1, 3) for at in range(5)), exposed=None)
        self.service = service_of(self)

    def lead(self, leader: NodeId, *, epoch: int, in_sync: tuple[NodeId, ...] = ()) -> None:
        replicas = in_sync or (leader,)
        state = PartitionState(replicas=replicas, leader=leader, leader_epoch=Epoch(epoch), in_sync=replicas)
        self.partition_0.apply(Versioned(state, revision=epoch), me=ME)

    def all(self) -> list[Topic]:
        return [self.topic]

    def hosted(self) -> list[Partition]:
        return [self.partition_0]

    def partitions_of(self, _topic: Topic) -> list[Partition]:
        return self.hosted()

    async def await_revision(self, _revision: int) -> None:
        pass

    def partition(self, _name: str, _index: int) -> Partition:
        return self.partition_0

    async def await_mirror(self, *_: Any) -> None:
        pass

    async def truncate(self, cut: int) -> None:
        request = FenceRequest(mirror=NAME, topic_ids=[self.topic.topic_id], cuts={EU: {0: cut}})
        await self.service.fence(request)


@pytest.fixture
async def old_source() -> AsyncIterator[OldSource]:
    made = OldSource()
    running = asyncio.create_task(made.logs.run())
    yield made
    running.cancel()
    await asyncio.wait([running])
    made.logs.close_now()


async def test_an_old_source_is_truncated_at_the_cut(old_source: OldSource) -> None:
    log = old_source.partition_0.log
    await old_source.truncate(7)
    assert log.end_offset == 5
    await old_source.truncate(2)
    assert log.end_offset == 2
    # The new source has removed its first records by compaction. A replica here that was down until now keeps nothing.
    old_source.lead(ME, epoch=1003)
    old_source.partition_0.append_mirrored(empty_batch(8, 9, 1003), exposed=None)
    diverging = diverging_end(log, Offset(5), 3)
    assert diverging is not None
    assert diverging.end_offset == 2


async def test_a_log_compacted_beyond_the_cut_is_fetched_again_as_a_whole(old_source: OldSource) -> None:
    partition, log = old_source.partition_0, old_source.partition_0.log
    log.record_superseding(3)
    await old_source.truncate(3)
    assert (log.start_offset, log.end_offset) == (0, 3)
    log.record_superseding(3)
    await old_source.truncate(2)
    assert (log.start_offset, log.end_offset, partition.high_watermark) == (0, 0, 0)
    # So is that of a follower.
    partition.append_mirrored(b"".join(empty_batch(at, at + 1, 3) for at in range(5)), exposed=None)
    log.record_superseding(4)
    old_source.lead(OTHER, epoch=1003)
    cut = partition.truncate(EpochEnd(Epoch(3), Offset(2)), leader_epoch=Epoch(1003))
    assert cut is not None
    await cut
    assert (log.start_offset, log.end_offset) == (0, 0)


@pytest.mark.parametrize(
    ("exposed", "is_restarted", "kept"),
    [(2, False, 2), (4, False, 0), (2, True, 0)],
    ids=["cut of a failover", "cut of a reverse", "unknown high watermark"],
)
async def test_a_follower_in_sync_keeps_its_log_in_a_failover(
    old_source: OldSource, exposed: int, is_restarted: bool, kept: int
) -> None:
    """It led the copy before, and its source had compacted records because of later ones."""
    partition, log = old_source.partition_0, old_source.partition_0.log
    log.record_superseding(5)
    partition.expose(Offset(exposed))
    if is_restarted:
        partition = old_source.partition_0 = Partition(
            old_source.topic, PartitionIndex(0), log, old_source.logs, alone=False, clock=ManualClock()
        )
    old_source.lead(OTHER, epoch=1003, in_sync=(OTHER, ME))
    cut = partition.truncate(EpochEnd(Epoch(3), Offset(2)), leader_epoch=Epoch(1003))
    assert cut is not None
    await cut
    assert (log.start_offset, log.end_offset) == (0, kept)


async def test_a_failover_never_drops_more_than_it_cuts(old_source: OldSource) -> None:
    partition, log = old_source.partition_0, old_source.partition_0.log
    log.record_superseding(4)
    await partition.cut_mirrored(Offset(3), refetches=False)
    assert (log.start_offset, log.end_offset) == (0, 3)


async def test_a_partition_led_by_another_node_is_not_skipped(old_source: OldSource) -> None:
    old_source.lead(OTHER, epoch=4)
    with pytest.raises(NotLeader):
        await old_source.truncate(2)


async def test_an_old_source_does_not_follow_before_every_partition_is_truncated(old_source: OldSource) -> None:
    service, asked = old_source.service, set()

    async def ask_leader(where: TopicPartition, request: FenceRequest) -> Response:
        asked.add((where.partition, request.cuts[where.topic][where.partition]))
        if where.partition == 1:
            raise NotLeader(f"{where} has no leader")
        return Response()

    service.ask_leader = ask_leader
    cuts = {EU: {0: 2, 1: 7}, US: {0: 1}}
    with pytest.raises(MillstreamError, match="no leader"):
        await service.truncate_everywhere(NAME, [old_source.topic], cuts)
    assert asked == {(0, 2), (1, 7)}


# -- histories ----------------------------------------------------------------------------------------------------


MARK = 1004
"""The epoch of an empty batch with which a cut begins."""


def filled_batch(base: int, epoch: int) -> bytes:
    batch = bytearray(encode_batch([NewRecord(b"k", b"v")]))
    (header,) = iterate_whole_headers(memoryview(batch))
    place_batch(batch, header, base, epoch)
    return bytes(batch)


@pytest.mark.parametrize(
    ("epochs", "source", "cut", "kept", "diverged"),
    [
        pytest.param((3, 3, MARK), {3: 5}, None, 2, False, id="a switch was undone"),
        pytest.param((3, 3, MARK), {3: 1}, None, 2, True, id="a switch was undone, and the source has lost a record"),
        pytest.param((3, 4, 5), {3: 1}, None, 3, True, id="the source has lost its last epochs"),
        pytest.param((3, 3, 3), {3: 1, 1003: 5}, 1, 1, False, id="an old source that was not truncated"),
        pytest.param((3, 3, 3), {2: 1, 1003: 5}, 2, 0, False, id="the new source has compacted an epoch away"),
        pytest.param((3, 1003, 1003), {3: 1, 1003: 2}, 1, 3, True, id="the new source has lost a copied record"),
        pytest.param((3, 1003, 1003), {3: 2}, 1, 3, True, id="the new source has lost everything since the cut"),
    ],
)
async def test_only_records_acknowledged_by_no_side_are_truncated(
    old_source: OldSource, epochs: tuple[int, ...], source: dict[int, int], cut: int | None, kept: int, diverged: bool
) -> None:
    """The copy has a batch of each of these epochs, and the source's epochs have these ends."""
    partition, log = old_source.partition_0, old_source.partition_0.log
    await partition.restart_mirrored(Offset(0))
    old_source.lead(ME, epoch=MARK)
    for at, epoch in enumerate(epochs):
        batch = empty_batch(at, at + 1, epoch) if epoch == MARK else filled_batch(at, epoch)
        partition.append_mirrored(batch, exposed=None)

    async def end_of_epoch(_where: TopicPartition, asked: int) -> EpochEnd:
        known = max((epoch for epoch in source if epoch <= asked), default=asked)
        is_known = asked <= max(source)
        return EpochEnd(Epoch(known), Offset(source.get(known, 0))) if is_known else EpochEnd(Epoch(-1), Offset(-1))

    made: Any = Copier
    copier = made(
        None,
        SimpleNamespace(end_of_epoch=end_of_epoch),
        SystemClock(),
        rate=0,
        gates=False,
        cut_of=lambda _: cut,
        note_gaps=None,
        on_commit=None,
    )
    copy = Copy(partition, TopicPartition(EU, PartitionIndex(0)))
    with pytest.raises(CopyDiverged) if diverged else nullcontext():
        await copier._check_history(copy)
    assert log.end_offset == kept


@pytest.mark.parametrize("is_running", [True, False], ids=["while it is copied", "before it is copied"])
@pytest.mark.parametrize("cause", ["", "has replicas", "is compacted", "was recreated", "cannot be opened"])
async def test_offsets_that_no_replica_has_are_fetched_from_the_source_again(
    old_source: OldSource, cause: str, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, log = old_source.partition_0, old_source.partition_0.log
    partition.topic = dataclasses.replace(old_source.topic, original_id=UUID(int=1))
    await partition.restart_mirrored(Offset(0))
    batches = [filled_batch(at, 3) for at in range(5)]
    for batch in batches:
        partition.append_mirrored(batch, exposed=None)
    old_source.logs.checkpoint_now(log)
    files: Any = log.open_files.files
    files.flip_bit(log.segments.containing(2).path, 3 * len(batches[0]) - 1, 0)
    while old_source.logs.scrub_once():
        pass
    assert log.damaged_ranges == ((2, 3),)
    if cause == "has replicas":
        log.damage.has_replicas = True
    elif cause == "is compacted":
        log.change_settings(TopicSettings(flush="os", cleanup_policy="compact"))
    elif cause == "cannot be opened":
        monkeypatch.setattr(Partition, "restore_range", AsyncMock(side_effect=OSError(errno.EROFS, "read-only")))
    where = TopicPartition(EU, PartitionIndex(0))

    async def end_of_epoch(*_: Any) -> EpochEnd:
        return EpochEnd(Epoch(3), Offset(5))

    async def fetch(_leader: NodeId, positions: dict[Any, Offset], *_: Any) -> dict[Any, Any]:
        # The last batch of a response may be cut off.
        records = memoryview(b"".join(batches[positions[where] :])[: len(batches[0]) + 70])
        fetched_partition = FetchedPartition(records, Offset(5), Offset(0), Offset(5))
        return {where: UnknownTopicId("it has another id") if cause == "was recreated" else fetched_partition}

    made: Any = Copier
    client = SimpleNamespace(leader_of=AsyncMock(return_value=OTHER))
    source = SimpleNamespace(end_of_epoch=end_of_epoch, fetch=fetch, client=client)
    clock = ManualClock()
    copier = made(None, source, clock, rate=0, gates=False, cut_of=lambda _: None, note_gaps=None, on_commit=None)
    copy = Copy(partition, where, compared_epoch=partition.leader_epoch if is_running else -2)
    copier.follow([copy])
    if is_running:
        nothing = FetchedPartition(memoryview(b""), Offset(5), Offset(0), Offset(5))
        await copier._apply_responses(copier.copies, {copy.key: Offset(5)}, {where: nothing})
        # It may hold commits, so it is compared again.
        assert copy.is_compared == bool(cause)
    else:
        await copier._check_history(copy)
    assert log.damaged_ranges == (((2, 3),) if cause else ())
    if not cause:
        assert bytes(log.read(2, max_bytes=1, up_to=3)) == batches[2]


@pytest.mark.parametrize("is_compared", [True, False])
async def test_a_copy_that_is_to_be_compared_again_stays_so_when_its_epoch_is_raised(
    old_source: OldSource, is_compared: bool
) -> None:
    partition, where = old_source.partition_0, TopicPartition(EU, PartitionIndex(0))

    async def raise_epoch(_topic: Topic, _index: int, epoch: Epoch) -> None:
        old_source.lead(ME, epoch=epoch)

    made: Any = Copier
    topics = SimpleNamespace(raise_epoch=raise_epoch)
    copier = made(topics, None, ManualClock(), rate=0, gates=False, cut_of=None, note_gaps=None, on_commit=None)
    copy = Copy(partition, where, compared_epoch=partition.leader_epoch if is_compared else -2)
    copier.follow([copy])
    batch = FetchedPartition(memoryview(filled_batch(5, 9)), Offset(6), Offset(0), Offset(6))
    await copier._apply_responses(copier.copies, {copy.key: Offset(5)}, {where: batch})
    assert (partition.leader_epoch, partition.log.end_offset, copy.is_compared) == (9, 6, is_compared)


class ContinuedSource:
    """A source that continues after a switch was undone: with a commit where the copy has the mark of the cut.

    It is also its client.
    """

    def __init__(self) -> None:
        self.client = self
        self.is_reachable = asyncio.Event()

    async def leader_of(self, *_: Any) -> NodeId:
        return NodeId(1)

    async def end_of_epoch(self, _where: TopicPartition, asked: int) -> EpochEnd:
        await self.is_reachable.wait()
        return EpochEnd(Epoch(3), Offset(3)) if asked == 3 else EpochEnd(Epoch(-1), Offset(-1))

    async def fetch(self, _leader: NodeId, positions: dict[TopicPartition, Offset], *_: Any) -> dict[Any, Any]:
        if list(positions.values()) != [2]:
            await asyncio.Event().wait()
        marker = Marker(producer_id=ProducerId(1), producer_epoch=ProducerEpoch(0), commit=True, coordinator_epoch=0)
        batch = encode_marker(marker, 0)
        (header,) = iterate_whole_headers(memoryview(batch))
        place_batch(batch, header, 2, 3)
        return dict.fromkeys(positions, FetchedPartition(memoryview(batch), Offset(3), Offset(0), Offset(3)))


async def test_records_that_are_still_to_be_truncated_are_not_taken_for_those_of_the_source(
    old_source: OldSource,
) -> None:
    """Otherwise a transaction would count as whole before it has arrived, and would later stay hidden."""
    partition, source = old_source.partition_0, ContinuedSource()
    await partition.restart_mirrored(Offset(0))
    old_source.lead(ME, epoch=MARK)
    for at, epoch in enumerate((3, 3, MARK)):
        partition.append_mirrored(empty_batch(at, at + 1, epoch), exposed=Offset(2))
    copier = Copier(
        None,  # type: ignore[arg-type]
        source,  # type: ignore[arg-type]
        SystemClock(),
        rate=0,
        gates=True,
        cut_of=lambda _: None,
        note_gaps=None,  # type: ignore[arg-type]
        on_commit=lambda: None,
    )
    copier.follow([Copy(partition, TopicPartition(EU, PartitionIndex(0)))])
    run = MirrorRun(SimpleNamespace(name=NAME, settings=None), old_source.service)  # type: ignore[arg-type]
    old_source.service._runs[NAME], run.copier = run, copier

    async def reached(**options: Any) -> int:
        response = await old_source.service.expose(ExposeRequest(mirror=NAME, offsets={EU: {0: 3}}, **options))
        offset: int = response.reached[EU][0]
        return offset

    copying = asyncio.create_task(copier.run())
    assert (await reached(), await reached(is_readable=True)) == (0, 0)
    # A barrier at which another node led the copy: this one does not know the commits beyond yet.
    copier.verify({EU: {0: 1}})
    assert partition.high_watermark == 2
    waiting = asyncio.create_task(reached(wait_ms=600_000))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    source.is_reachable.set()
    assert await waiting == 3
    assert partition.high_watermark == 2
    await reached(is_verified=True)
    assert partition.high_watermark == 3
    copying.cancel()
    await asyncio.wait([copying])


# -- a new leader of a compacted copy -----------------------------------------------------------------------------


class NewLeader(OldSource):
    """A node that becomes the leader of a compacted copy, and does not know of a gap that the last leader recorded."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.partition_0.log.change_settings(TopicSettings(flush="os", cleanup_policy="compact"))
        self.catalog_mirrors = Mirrors(CatalogDeclarations(catalog), SystemClock())
        self.mirrors = Mirrors(CatalogDeclarations(catalog), SystemClock())
        self.service = service_of(self, self.mirrors)

    def become_leader(self) -> None:
        self.lead(OTHER, epoch=4)
        self.partition_0.high_watermark = Offset(1)
        self.lead(ME, epoch=5)
        self.service._roles_changed([self.partition_0])


async def test_a_new_leader_reads_the_gaps_before_it_exposes_a_compacted_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog.open_folder(tmp_path)
    node = NewLeader(catalog)
    running = asyncio.create_task(node.logs.run())
    mirror = await node.catalog_mirrors.create(NAME, {"from": "paris:9092"}, is_enabled=True)
    await node.mirrors.load()
    await node.catalog_mirrors.note_gaps(mirror, {TopicPartition(EU, PartitionIndex(0)): 3})
    node.become_leader()
    partition, run = node.partition_0, MirrorRun(mirror, node.service)
    assert (partition.high_watermark, list(run._led_copies(mirror))) == (1, [])

    async def fail() -> None:
        raise StoreUnavailable("the catalog is away")

    with monkeypatch.context() as away:
        away.setattr(node.mirrors, "load", fail)
        await node.service._restrict_compacted()
    assert (partition.high_watermark, partition.awaits_exposure) == (1, True)
    await node.service._restrict_compacted()
    assert (partition.high_watermark, partition.log.end_offset) == (3, 5)
    (copy,) = run._led_copies(await node.mirrors.find(NAME))
    assert copy.gap == 3
    running.cancel()
    await asyncio.wait([running])
    node.logs.close_now()
    catalog.close()
