"""A failover that is repeated, an old source that follows, and the steps of a switch."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import msgspec
import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.membership import NO_CONTROLLER
from millstream.broker.kafka.apis.mirror_apis import MirrorAdopt, MirrorFailover
from millstream.broker.mirror import failover
from millstream.broker.mirror import service as service_module
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.service import MirrorRun, MirrorService
from millstream.core.backoff import Backoff
from millstream.core.clock import SystemClock
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    GroupNotEmpty,
    InvalidMirror,
    MillstreamError,
    MirrorInUse,
    NotLeader,
    OffsetOutOfRange,
    RequestTimedOut,
    StoreUnavailable,
    UnknownMirror,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.mirror import Mirror
from millstream.core.partition_state import PartitionState
from millstream.core.regex import compile_regex
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.message import Request, Response
from millstream.protocol.private.mirror_messages import (
    AdoptRequest,
    AdoptResponse,
    CutPartition,
    FailoverRequest,
    FailoverResponse,
    OfferRequest,
    RemovedRange,
    ReverseRequest,
)
from millstream.protocol.records.batch import iterate_whole_headers, place_batch
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch
from millstream.protocol.wire.group_offsets import MIRRORED, Commit

NAME = "paris"
EU, EUX, US = "orders.eu", "orders-eu", "orders.us"
PATTERN = r"orders\.eu"
ME, OTHER = NodeId(1), NodeId(2)


def topic(name: str, number: int) -> Topic:
    return Topic(
        name=name, topic_id=UUID(int=number), partitions=2, replication=1, overrides={}, created_ms=0, mirror=NAME
    )


class Topics:
    """The topics of the target, all of which are copies at first."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.by_name = {name: topic(name, number) for number, name in enumerate((EU, EUX, US))}
        self.agrees = True

    def all(self) -> list[Topic]:
        return list(self.by_name.values())

    async def declared(self) -> list[Topic]:
        return list(self.by_name.values())

    def get(self, name: str) -> Topic | None:
        return self.by_name.get(name)

    def existing(self, names: Iterable[str]) -> list[Topic]:
        return [self.by_name[name] for name in names if name in self.by_name]

    def state_of(self, _topic: Topic, _index: int) -> PartitionState:
        return PartitionState(replicas=(OTHER,), leader=OTHER, leader_epoch=Epoch(3), in_sync=(OTHER,))

    def partition(self, _name: str, _index: int) -> Any:
        raise NotLeader("it is led elsewhere")

    async def set_mirror(self, name: str, mirror: str, *, is_draining: bool) -> None:
        changed = dataclasses.replace(self.by_name[name], mirror=mirror, is_draining=is_draining)
        self.by_name[name] = self.catalog.alter_topic(changed.topic_id, lambda _: changed)
        if not self.agrees:
            raise RequestTimedOut("node 2 has not agreed in time")


def service_of(topics: Any, mirrors: Any = None) -> Any:
    membership = SimpleNamespace(
        me=SimpleNamespace(node_id=ME), node=lambda _: None, controller_id=ME, cluster_id="berlin-id"
    )
    subscriptions = SimpleNamespace(
        track_letters=AsyncMock(), letter_topics=lambda: {US}, letter_origins=lambda: {US: {EU, EUX}}
    )
    made: Any = MirrorService
    return made(topics, membership, mirrors, subscriptions, None, None, None, None, SystemClock(), None)


class Target:
    """The cluster that holds the copies, with a real catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.topics = Topics(catalog)
        self.mirrors = Mirrors(CatalogDeclarations(catalog), SystemClock())
        self.service = service_of(self.topics, self.mirrors)
        self.service.cut_everywhere = self._cut
        self.cuts = 0
        self.has_leaders = True

    async def _cut(self, _mirror: Mirror, where: TopicPartition) -> CutPartition:
        if not self.has_leaders:
            raise NotLeader(f"{where} has no leader")
        self.cuts += 1
        return CutPartition(topic=where.topic, partition=where.partition, offset=40 + self.cuts, epoch=1003)

    async def fail_over(self, *patterns: str) -> FailoverResponse:
        return await failover.fail_over(self.service, FailoverRequest(name=NAME, topics=list(patterns) or None))

    async def mirror(self) -> Mirror:
        await self.mirrors.load()
        return await self.mirrors.find(NAME)

    async def notes(self) -> list[str]:
        notes: list[str] = self.service.describe(await self.mirror())["notes"]
        return notes

    async def interruption(self) -> str:
        text: str = self.service.describe(await self.mirror())["interrupted"]
        return text

    @property
    def copies(self) -> list[str]:
        return [topic.name for topic in self.service.copied_topics(NAME)]


@pytest.fixture
async def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Target]:
    async def unreachable(*_: Any) -> tuple[dict[TopicPartition, int], str]:
        return {}, "the source cannot be reached"

    monkeypatch.setattr(failover, "_source_ends", unreachable)
    monkeypatch.setattr(failover, "_check_reachable", AsyncMock())
    catalog = Catalog.open_folder(tmp_path)
    made = Target(catalog)
    await made.mirrors.create(NAME, {"from": "paris:9092"})
    catalog.add_topics(made.topics.all())
    yield made
    catalog.close()


def places(response: FailoverResponse) -> list[tuple[str, int, int]]:
    return [(partition.topic, partition.partition, partition.offset) for partition in response.partitions]


async def test_a_repeated_failover_of_some_copies_continues_with_the_others(target: Target) -> None:
    target.has_leaders = False
    with pytest.raises(NotLeader):
        await target.fail_over(PATTERN)
    assert not (await target.mirror()).is_enabled
    target.has_leaders = True
    done = await target.fail_over(PATTERN)
    mirror = await target.mirror()
    assert (mirror.is_enabled, mirror.resumes, mirror.cut_epochs) == (True, False, {})
    assert target.copies == [EUX, US]
    await target.mirrors.record_gated(mirror)
    (note,) = await target.notes()
    # A reverse is refused while there are other copies.
    assert f"`millstream mirror switch {NAME}`" in note
    assert "once the other copies are failed over" in note
    # Its response was lost.
    assert places(await target.fail_over(PATTERN)) == places(done) == [(EU, 0, 41), (EU, 1, 42)]
    assert (await target.mirror()).is_enabled
    with pytest.raises(InvalidMirror, match="has no copies that match"):
        await target.fail_over("nothing")


@pytest.mark.parametrize("overrides", [{}, {"rename": "copy-of-"}])
@pytest.mark.parametrize("is_gated", [True, False], ids=["from Millstream", "from Kafka"])
async def test_a_mirror_that_is_the_way_back_is_deleted_only_by_force(
    target: Target, overrides: dict[str, str], is_gated: bool
) -> None:
    with pytest.raises(MirrorInUse, match=f"still writes {EUX}, {EU}, {US};"):
        await target.service.delete(NAME, force=True)
    await target.mirrors.change(
        NAME, lambda now: dataclasses.replace(now, is_gated=is_gated, overrides={**now.overrides, **overrides})
    )
    await target.fail_over()
    is_reversible = is_gated and not overrides
    with pytest.raises(MirrorInUse, match=f"mirror reverse {NAME}") if is_reversible else nullcontext():
        await target.service.delete(NAME, force=False)
    if is_reversible:
        await target.service.delete(NAME, force=True)
    assert target.mirrors.get(NAME) is None


async def test_dead_letters_are_failed_over_with_the_last_topic_that_they_come_from(target: Target) -> None:
    await target.fail_over(PATTERN)
    assert target.copies == [EUX, US]
    await target.fail_over(EUX)
    assert target.copies == []
    assert {partition.topic for partition in (await target.fail_over(EUX)).partitions} == {EUX, US}


@pytest.mark.parametrize("returns", [True, False], ids=["coordinator returns", "coordinator stays away"])
async def test_a_failover_applies_the_offsets_of_groups_that_were_recorded_with_its_cut(
    target: Target, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    places = [TopicPartition(EU, PartitionIndex(index)) for index in range(3)]
    here: Any = {"g": {places[0]: Commit(5, MIRRORED), places[1]: Commit(9, "")}, "busy": {}}
    here["back"] = {places[0]: Commit(8, MIRRORED)}
    applied: dict[str, Any] = {}
    errors: dict[str, MillstreamError] = {"busy": GroupNotEmpty("it has members"), "g": NotLeader("no leader")}

    async def commit(_client: Any, group: str, offsets: Any, *, metadata: str) -> None:
        assert target.copies, "clients can write already"
        error = errors.pop(group, None) if returns else errors.get(group)
        if error is not None:
            raise error
        applied[group] = (offsets, metadata)

    async def read(_client: Any, groups: list[str]) -> Any:
        return {group: here[group] for group in groups}

    monkeypatch.setattr(failover, "APPLY_S", 600.0 if returns else 0.0)
    monkeypatch.setattr(target.service, "client", lambda: None)
    monkeypatch.setattr(target.service, "exposed_offsets", AsyncMock(return_value=dict.fromkeys(places[:2], 8)))
    monkeypatch.setattr(failover, "commits_by_group", read)
    monkeypatch.setattr(failover, "commit_offsets", commit)
    recorded = {group: {EU: {0: 7, 1: 8, 2: 4}} for group in here}
    await target.mirrors.note_verified(await target.mirror(), {}, recorded)
    await target.fail_over()
    # Where a client has committed a later offset here, or the partition is gone, nothing is applied.
    both = {places[0]: 7, places[1]: 8}
    assert applied.pop("back") == (both, MIRRORED)
    assert applied == ({"g": ({places[0]: 7}, MIRRORED)} if returns else {})
    assert (await target.mirror()).group_offsets == {}


async def test_a_failover_that_ends_before_that_is_recorded_continues_with_the_others(target: Target) -> None:
    target.topics.agrees = False
    with pytest.raises(RequestTimedOut):
        await target.fail_over(PATTERN)
    assert (await target.mirror()).cut_epochs
    assert places(await target.fail_over(PATTERN)) == [(EU, 0, 41), (EU, 1, 42)]
    mirror = await target.mirror()
    assert (mirror.is_enabled, mirror.resumes, mirror.cut_epochs) == (True, False, {})


async def test_a_paused_mirror_stays_paused(target: Target) -> None:
    await target.mirrors.set_enabled(NAME, is_enabled=False)
    await target.fail_over(PATTERN)
    assert not (await target.mirror()).is_enabled
    await target.mirrors.set_enabled(NAME, is_enabled=True)
    target.has_leaders = False
    with pytest.raises(NotLeader):
        await target.fail_over(US)
    await target.mirrors.set_enabled(NAME, is_enabled=False)
    target.has_leaders = True
    await target.fail_over(US)
    assert not (await target.mirror()).is_enabled


async def test_the_advice_after_an_interruption_cuts_no_other_copies(target: Target) -> None:
    assert await target.interruption() == ""
    target.has_leaders = False
    with pytest.raises(NotLeader):
        await target.fail_over(PATTERN)
    assert f"`millstream mirror failover {NAME} --topics '{PATTERN}'`" in await target.interruption()
    assert compile_regex(PATTERN).fullmatch(EU)
    assert not compile_regex(PATTERN).fullmatch(EUX)
    advice = f"run `millstream mirror failover {NAME}` again, or choose only other copies with --topics"
    with pytest.raises(NotLeader, match=advice):
        await target.fail_over()
    assert f"`millstream mirror failover {NAME}`" in await target.interruption()
    target.has_leaders = True
    # A dead letter topic comes with the last of the copies that use it.
    assert places(await target.fail_over(PATTERN)) == [(EU, 0, 41), (EU, 1, 42)]
    assert target.copies == [EUX, US]
    await target.fail_over()
    assert not (await target.mirror()).is_enabled
    assert await target.interruption() == ""
    (note,) = await target.notes()
    # The source was never reached, so it is not known to be one that can follow.
    assert "delete the mirror" in note
    await target.mirrors.record_gated(await target.mirror())
    (note,) = await target.notes()
    assert note == (
        f"clients can write to {EUX}, {EU}, {US} here since a failover; `millstream mirror reverse {NAME}` lets the "
        "old source follow"
    )


async def test_topics_fenced_by_a_switch_are_named_with_the_remedy(target: Target) -> None:
    await target.topics.set_mirror(US, NAME, is_draining=True)
    interruption = await target.interruption()
    assert interruption.startswith(f"clients cannot write to {US}, because a switch")
    assert f"`millstream mirror failover {NAME}`" in interruption
    assert (await target.service.offer(OfferRequest())).fenced == {US: NAME}


async def test_a_copy_that_cannot_be_read_to_its_end_is_named(target: Target) -> None:
    mirror = await target.mirror()
    where = TopicPartition(EU, PartitionIndex(1))
    await target.mirrors.note_gaps(mirror, {where: 40, TopicPartition(EU, PartitionIndex(0)): 7})
    await target.mirrors.note_gaps(mirror, {TopicPartition(EU, PartitionIndex(0)): None})
    # A later leader finds one further up.
    assert await target.mirrors.note_gaps(mirror, {where: 45}) == {EU: {1: 40}}
    (note,) = await target.notes()
    assert note.startswith(f"{EU}-1 can be read up to offset 40 until its copy has caught up")
    await target.fail_over(PATTERN)
    assert (await target.mirror()).gaps == {}


@pytest.mark.parametrize("change", ["pause", "other settings", "other source", "deletion"])
async def test_a_mirror_remembers_deleted_originals_until_its_source_changes(
    target: Target, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    service, connected = target.service, asyncio.Event()
    key = target.topics.by_name[EU].topic_id, 0

    class SilentSource:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def __aenter__(self) -> None:
            service._runs[NAME].copier = SimpleNamespace(copies={key: SimpleNamespace(key=key, is_gone=True)})
            connected.set()
            await asyncio.Event().wait()

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(service_module, "Source", SilentSource)
    monkeypatch.setattr(target.topics, "hosted", list, raising=False)
    service._supervise = lambda _name, task: asyncio.create_task(task)
    await service._apply()
    await connected.wait()
    await target.mirrors.set_enabled(NAME, is_enabled=False)
    if change == "other settings":
        await target.mirrors.alter(NAME, {"rate": "1000"})
    elif change == "other source":
        await target.mirrors.alter(NAME, {"from": "rome:9092"})
    elif change == "deletion":
        await target.fail_over()
        await target.mirrors.delete(NAME)
    await service._apply()
    assert list(service.gone.values()) == ([{key}] if change in ("pause", "other settings") else [])


# -- the old source -----------------------------------------------------------------------------------------------


async def test_a_repeated_reverse_names_the_records_dropped_by_the_first_attempt(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = RemovedRange(topic=EU, partition=0, start=5, end=9)
    beyond, is_led = [[lost], []], [False, True]

    async def nothing(*_: Any) -> dict[str, dict[int, int]]:
        return {}

    async def find_lost(*_: Any) -> list[Any]:
        return [(part, None) for part in beyond.pop(0)]

    async def truncate(*_: Any) -> None:
        if not is_led.pop(0):
            raise NotLeader("a partition has no leader")

    monkeypatch.setattr(failover, "_find_lost_ranges", find_lost)
    monkeypatch.setattr(failover, "_cut_queues", nothing)
    target.service.high_watermarks, target.service.truncate_everywhere = nothing, truncate
    request = AdoptRequest(name=NAME, step="follow", settings={"from": "berlin:9092"}, cuts={EU: {0: 5, 1: 7}})
    with pytest.raises(NotLeader):
        await failover._follow(target.service, request, [])
    # The first attempt has truncated what it found. The third comes after a response that was lost.
    for _ in range(2):
        assert (await failover._follow(target.service, request, [])).removed == [lost]
    mirror = await target.mirror()
    assert (mirror.is_enabled, mirror.cuts, mirror.dropped) == (True, {EU: {0: 5, 1: 7}}, {EU: {0: [(5, 9)]}})


async def test_an_old_source_that_enforces_no_access_rules_is_not_made_to_mirror_them(target: Target) -> None:
    await target.mirrors.change(NAME, lambda now: dataclasses.replace(now, is_enabled=False))
    request = AdoptRequest(
        name=NAME,
        step="fence",
        settings={"from": "paris:9092", "acls": "true"},
        topic_ids=[target.topics.by_name[EU].topic_id],
    )
    with pytest.raises(InvalidMirror, match="does not enforce them"):
        await failover.adopt(target.service, request)
    assert not target.topics.by_name[EU].is_draining


@pytest.mark.parametrize(
    ("patterns", "scanned"), [((), {EU, EUX, US}), ((PATTERN,), {EU})], ids=["all topics", "one topic"]
)
async def test_a_side_failed_over_since_it_followed_is_scanned_again(
    target: Target, monkeypatch: pytest.MonkeyPatch, patterns: tuple[str, ...], scanned: set[str]
) -> None:
    lost = RemovedRange(topic=EU, partition=0, start=41, end=44)
    scans: list[set[str]] = []
    beyond: list[RemovedRange] = []
    saved: list[RemovedRange] = []
    truncated: list[set[str]] = []
    is_fenced = True

    async def nothing(*_: Any) -> dict[str, dict[int, int]]:
        return {}

    async def find_lost(_service: Any, _request: AdoptRequest, cuts: dict[str, Any], _ends: Any) -> list[Any]:
        scans.append(set(cuts))
        return [(part, None) for part in beyond]

    async def save(_service: Any, removed_range: RemovedRange, *_: Any) -> None:
        saved.append(removed_range)

    async def truncate(_mirror: str, topics: list[Topic], cuts: dict[str, Any]) -> None:
        assert {topic.name for topic in topics} == set(cuts)
        truncated.append(set(cuts))

    async def fence(*_: Any) -> None:
        if not is_fenced:
            raise NotLeader("a node does not respond")

    monkeypatch.setattr(failover, "_find_lost_ranges", find_lost)
    monkeypatch.setattr(failover, "_publish_removed", save)
    monkeypatch.setattr(failover, "_cut_queues", nothing)
    service = target.service
    service.high_watermarks, service.truncate_everywhere, service.fence_everywhere = nothing, truncate, fence
    target.topics.by_name["lost"] = dataclasses.replace(topic("lost", 9), mirror="")
    request = AdoptRequest(
        name=NAME,
        step="follow",
        settings={"from": "paris:9092"},
        cuts={EU: {0: 41, 1: 42}, EUX: {0: 43, 1: 44}, US: {0: 45, 1: 46}},
        topic_ids=[target.topics.by_name[name].topic_id for name in (EU, EUX, US)],
        save_to="lost",
    )
    # The first response is lost, and nothing was copied before the failover. So it cuts at the same offsets.
    assert (await failover.adopt(service, request)).removed == []
    await target.fail_over(*patterns)
    assert (await target.mirror()).cuts == request.cuts
    beyond.append(lost)
    is_fenced = False
    with pytest.raises(NotLeader):
        await failover.adopt(service, request)
    mirror = await target.mirror()
    assert (mirror.is_enabled, scanned & set(mirror.cuts)) == (False, set())
    is_fenced = True
    # The last one comes after another response that was lost; the records beyond the cuts may be copies by then.
    for _ in range(2):
        assert (await failover.adopt(service, request)).removed == [lost]
    assert scans == truncated == [{EU, EUX, US}, scanned]
    assert saved == [lost]
    mirror = await target.mirror()
    assert (mirror.is_enabled, mirror.cuts, mirror.verified) == (True, request.cuts, request.cuts)
    # One that is only paused still follows.
    await target.mirrors.set_enabled(NAME, is_enabled=False)
    await failover.adopt(service, request)
    assert len(scans) == 2


class OneLog:
    """A partition of an old source that has some batches, and the topic to which records are saved."""

    def __init__(self, batches: list[bytearray], *, log_start: int = 0) -> None:
        self.log_start, self.end = log_start, 0
        self.batches = []
        self.saved: list[str] = []
        for batch in batches:
            (header,) = iterate_whole_headers(memoryview(batch))
            place_batch(batch, header, self.end, 3)
            (header,) = iterate_whole_headers(memoryview(batch))
            self.batches.append((header, bytes(batch)))
            self.end = header.next_offset

    def client(self) -> OneLog:
        return self

    async def fetch(self, _topic: str, _partition: int, offset: int, *, max_wait_ms: int) -> Any:
        assert max_wait_ms == 0
        if offset < self.log_start:
            raise OffsetOutOfRange("retention", start=self.log_start, end=self.end)
        # Two batches at a time, so that a scan has to continue.
        rest = [batch for header, batch in self.batches if header.next_offset > offset]
        return SimpleNamespace(records=memoryview(b"".join(rest[:2])))

    async def produce(self, _topic: str, _partition: int, batch: bytearray) -> None:
        (header,) = iterate_whole_headers(memoryview(batch))
        for record in decode_batch(memoryview(batch), header):
            self.saved.append((record.value or b"").decode())


def in_transaction(producer_id: int, *values: str) -> bytearray:
    return encode_batch(
        [NewRecord(None, value.encode()) for value in values],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )


def end_of(producer_id: int, *, commit: bool) -> bytearray:
    marker = Marker(
        producer_id=ProducerId(producer_id), producer_epoch=ProducerEpoch(0), commit=commit, coordinator_epoch=0
    )
    return encode_marker(marker, 0)


@pytest.mark.parametrize(
    ("log_start", "ranges", "saved"),
    [
        (0, [(2, 4), (6, 7), (10, 13)], ["c1", "c2", "c3", "new"]),
        (6, [(6, 7), (10, 13)], ["c3", "new"]),
    ],
    ids=["all", "after retention"],
)
async def test_records_below_the_cut_that_only_the_old_source_has_committed_are_lost_too(
    log_start: int, ranges: list[tuple[int, int]], saved: list[str]
) -> None:
    log: Any = OneLog(
        [
            in_transaction(1, "before"),
            end_of(1, commit=True),
            in_transaction(1, "c1", "c2"),
            in_transaction(2, "a1"),
            in_transaction(3, "whole"),
            in_transaction(1, "c3"),
            end_of(3, commit=True),
            in_transaction(4, "open"),
            encode_batch([NewRecord(None, b"shared")]),
            # The cut.
            end_of(1, commit=True),
            end_of(2, commit=False),
            encode_batch([NewRecord(None, b"new")]),
        ],
        log_start=log_start,
    )
    request = AdoptRequest(name=NAME, step="follow", cuts={EU: {0: 10}}, aborted={EU: {0: 2}})
    lost = await failover._find_lost_ranges(log, request, request.cuts, {EU: {0: log.end}})
    assert [(lost_range.start, lost_range.end) for lost_range, _ in lost] == ranges
    for lost_range, records in lost:
        await failover._publish_removed(log, lost_range, records, "saved")
    assert log.saved == saved


class SwitchSource:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
        self.asked: list[str] = []
        self.refused: dict[str, list[MillstreamError]] = {}
        """The errors with which it responds to each step, one after the other."""
        self.lost: dict[str, list[RemovedRange]] = {}
        """What it finds beyond the cuts, by step."""
        monkeypatch.setattr(failover, "Source", lambda *_, **__: self)
        target.service.follower_of = self.follower_of

    async def __aenter__(self) -> SwitchSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def ask(self, _node: Any, request: AdoptRequest, *, waits: bool) -> AdoptResponse:
        self.asked.append(request.step)
        if refused := self.refused.get(request.step):
            raise refused.pop(0)
        ends = {name: {0: 40, 1: 40} for name in (EU, EUX, US)}
        return AdoptResponse(ends=ends, removed=self.lost.get(request.step, ()))

    async def follower_of(self, *_: Any) -> SwitchSource:
        return self

    async def drain(self, *_: Any) -> None:
        pass

    async def sync_all(self, topics: Collection[str]) -> None:
        self.synced = set(topics)


@pytest.fixture
async def other_side(target: Target, monkeypatch: pytest.MonkeyPatch) -> SwitchSource:
    await target.mirrors.record_gated(await target.mirror())
    return SwitchSource(monkeypatch, target)


SWITCH = ReverseRequest(name=NAME, address="berlin:9092")


@pytest.mark.parametrize(
    "refused", [InvalidMirror("run `reverse --save-to TOPIC`"), NotLeader("the link is down")], ids=["advice", "link"]
)
async def test_a_switch_whose_old_source_does_not_follow_advises_to_save_its_records(
    target: Target, other_side: SwitchSource, refused: MillstreamError
) -> None:
    other_side.refused["follow"] = [refused]
    expected = InvalidMirror if isinstance(refused, InvalidMirror) else RequestTimedOut
    with pytest.raises(expected, match="clients can write here now") as raised:
        await failover.switch(target.service, SWITCH)
    assert str(refused) in str(raised.value)
    assert "--save-to TOPIC`" in str(raised.value)
    assert f"reverse {NAME}`" not in str(raised.value)
    interruption = await target.interruption()
    assert interruption.startswith(f"clients can write to {EUX}, {EU}, {US} here since a switch")
    assert f"`millstream mirror reverse {NAME}`" in interruption


async def test_only_a_switch_that_is_not_running_is_reported_as_unfinished(
    target: Target, other_side: SwitchSource
) -> None:
    run = MirrorRun(await target.mirror(), target.service)
    run.fenced = [EU]
    target.service._runs[NAME] = run
    reported = [await target.interruption()]

    async def drain(*_: Any) -> None:
        reported.append(await target.interruption())
        raise RequestTimedOut("too slow")

    other_side.drain = drain  # type: ignore[method-assign]
    with pytest.raises(RequestTimedOut, match="too slow"):
        await failover.switch(target.service, SWITCH)
    reported.append(await target.interruption())
    assert f"Run `millstream mirror switch {NAME}` again" in reported[0]
    assert reported == [reported[0], "", reported[0]]


async def test_a_switch_that_cannot_cut_every_copy_gives_the_source_its_role_back(
    target: Target, other_side: SwitchSource
) -> None:
    target.has_leaders = False
    other_side.refused["release"] = [BrokerUnreachable("the line is down for a moment")]
    with pytest.raises(NotLeader):
        await failover.switch(target.service, SWITCH)
    assert other_side.asked == ["fence", "release", "release"]
    mirror = await target.mirror()
    # It copies again, and nothing allows that acknowledged copies are truncated.
    assert (mirror.is_enabled, mirror.cut_epochs, mirror.cuts) == (True, {}, {})
    assert target.copies == [EU, EUX, US]
    target.has_leaders = True
    await failover.switch(target.service, SWITCH)
    assert other_side.asked[3:] == ["fence", "follow"]
    assert target.copies == []


@pytest.mark.parametrize(("step", "asked"), [("check", ["check"]), ("fence", ["check", "fence", "release"])])
async def test_a_switch_that_would_lose_records_stops_writers_only_if_they_came_after_the_check(
    target: Target, other_side: SwitchSource, step: str, asked: list[str]
) -> None:
    await target.fail_over(PATTERN)
    other_side.lost[step] = [RemovedRange(topic=EU, partition=0, start=41, end=44)]
    with pytest.raises(InvalidMirror, match="offsets 41 to 43"):
        await failover.switch(target.service, SWITCH)
    assert other_side.asked == asked
    assert target.copies == [EUX, US]


async def test_the_check_before_a_switch_changes_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RemovedRange(topic=EU, partition=0, start=41, end=44)
    service, find = target.service, AsyncMock(return_value=[(lost, None)])
    monkeypatch.setattr(failover, "_find_lost_ranges", find)
    service.high_watermarks = AsyncMock(return_value={EU: {0: 44}})
    for name in (EU, EUX, US):
        await target.topics.set_mirror(name, "", is_draining=False)
    await target.mirrors.delete(NAME)
    response = await failover.adopt(service, release(step="check", cuts={EU: {0: 41}}))
    assert (response.removed, find.await_args_list[0].args[3]) == ([lost], {EU: {0: 44}})
    service.high_watermarks.assert_awaited_once_with([EU])
    assert (target.mirrors.get(NAME), target.copies) == (None, [])


async def test_a_source_that_is_not_millstream_is_not_asked_to_follow(target: Target) -> None:
    for step in (failover.switch, failover.reverse):
        with pytest.raises(InvalidMirror, match=rf"not Millstream.*mirror cutover {NAME}`"):
            await step(target.service, SWITCH)
    await target.fail_over()
    with pytest.raises(InvalidMirror, match=r"not Millstream.*delete the mirror"):
        await failover.reverse(target.service, SWITCH)


async def test_a_cutover_that_is_repeated_does_not_need_the_source_again(
    target: Target, other_side: SwitchSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, target.has_leaders = FailoverRequest(name=NAME, is_planned=True), False
    with pytest.raises(NotLeader):
        await failover.fail_over(target.service, request)
    target.has_leaders = True
    # The mirror does not run any more.
    monkeypatch.delattr(SwitchSource, "sync_all")
    await failover.fail_over(target.service, request)
    assert target.copies == []


async def test_a_cutover_transfers_the_state_of_its_topics(target: Target, other_side: SwitchSource) -> None:
    await failover.fail_over(target.service, FailoverRequest(name=NAME, topics=[PATTERN], is_planned=True))
    assert other_side.synced == {EU}


async def test_a_cutover_of_a_mirror_that_does_not_run_is_refused_at_once(
    target: Target, other_side: SwitchSource
) -> None:
    await target.mirrors.set_enabled(NAME, is_enabled=False)
    with pytest.raises(InvalidMirror, match="resume it first"):
        await failover.fail_over(target.service, FailoverRequest(name=NAME, is_planned=True))
    assert target.copies == [EU, EUX, US]


async def test_a_switch_that_cannot_be_undone_leaves_the_source_fenced(
    target: Target, other_side: SwitchSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If released, the source would accept writes beside copies that the advised failover makes writable."""

    async def fail(*_: Any) -> None:
        raise StoreUnavailable("the catalog is away")

    target.has_leaders = False
    monkeypatch.setattr(target.service, "cancel_cut", fail)
    with pytest.raises(RequestTimedOut, match=f"the catalog is away.*mirror failover {NAME}`"):
        await failover.switch(target.service, SWITCH)
    assert other_side.asked == ["fence"]


async def test_a_source_that_cannot_be_notified_of_an_abandoned_switch_is_named(
    target: Target, other_side: SwitchSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "RELEASE_S", 0.0)
    target.has_leaders = False
    other_side.refused["release"] = [BrokerUnreachable("the line is down")]
    with pytest.raises(RequestTimedOut, match=rf"\(the line is down\).*mirror failover {NAME}` on the source"):
        await failover.switch(target.service, SWITCH)


async def test_a_release_waits_for_the_fence_that_it_undoes(target: Target) -> None:
    service, fencing, may_end = target.service, asyncio.Event(), asyncio.Event()

    async def fence(*_: Any) -> None:
        fencing.set()
        await may_end.wait()
        raise RequestTimedOut("records that were written before are not replicated yet")

    service.fence_everywhere = fence
    for name in (EU, EUX, US):
        await target.topics.set_mirror(name, "", is_draining=False)
    await target.mirrors.delete(NAME)
    request = AdoptRequest(
        name=NAME,
        step="fence",
        settings={"from": "paris:9092"},
        cuts={},
        topic_ids=[topic.topic_id for topic in target.topics.all()],
    )
    fence_step = asyncio.create_task(failover.adopt(service, request))
    await fencing.wait()
    # Topics that the step has not come to yet.
    target.topics.by_name[US] = dataclasses.replace(target.topics.by_name[US], mirror="", is_draining=False)
    release = asyncio.create_task(failover.adopt(service, msgspec.structs.replace(request, step="release")))
    await asyncio.sleep(0)
    await target.topics.set_mirror(US, NAME, is_draining=True)
    may_end.set()
    with pytest.raises(RequestTimedOut):
        await fence_step
    await release
    assert [topic.mirror for topic in target.topics.all()] == ["", "", ""]
    assert target.mirrors.get(NAME) is None


def release(**changes: Any) -> AdoptRequest:
    request = AdoptRequest(
        name=NAME,
        step="release",
        settings={"from": "paris:9092"},
        topic_ids=[topic(name, number).topic_id for number, name in enumerate((EU, EUX, US))],
    )
    return msgspec.structs.replace(request, **changes)


async def test_a_release_finds_topics_that_another_node_has_fenced(target: Target) -> None:
    for name in (EU, EUX):
        await target.topics.set_mirror(name, NAME, is_draining=True)
    await target.topics.set_mirror(US, "", is_draining=False)
    # This node has not been notified of the fence yet.
    known = [dataclasses.replace(topic, mirror="", is_draining=False) for topic in target.topics.all()]
    target.topics.all = lambda: known  # type: ignore[method-assign]
    await failover.adopt(target.service, release())
    assert [topic.mirror for topic in target.topics.by_name.values()] == ["", "", ""]
    assert target.mirrors.get(NAME) is None


async def test_a_release_keeps_a_mirror_that_topics_name_and_one_of_another_source(target: Target) -> None:
    await target.topics.set_mirror(US, NAME, is_draining=True)
    await failover.adopt(target.service, release(topic_ids=[target.topics.by_name[US].topic_id]))
    assert target.copies == [EU, EUX]
    assert target.mirrors.get(NAME) is not None
    for name in (EU, EUX):
        await target.topics.set_mirror(name, "", is_draining=False)
    await failover.adopt(target.service, release(settings={"from": "rome:9092"}))
    assert target.mirrors.get(NAME) is not None
    await failover.adopt(target.service, release())
    assert target.mirrors.get(NAME) is None


async def test_a_release_of_topics_that_are_fenced_again_and_again_ends_with_advice(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(backoff: Backoff) -> None:
        pauses.append(backoff.take_s())

    async def fail_to_release(_name: str, _mirror: str, *, is_draining: bool) -> None:
        assert not is_draining

    monkeypatch.setattr(Backoff, "pause", pause)
    await target.topics.set_mirror(US, NAME, is_draining=True)
    monkeypatch.setattr(target.topics, "set_mirror", fail_to_release)
    with pytest.raises(RequestTimedOut, match=f"keeps fencing topic '{US}'.*mirror failover {NAME}`"):
        await failover.adopt(target.service, release())
    assert len(pauses) == failover.RELEASE_ATTEMPTS
    assert pauses == sorted(pauses)


@pytest.mark.parametrize("is_late", [True, False], ids=["after the release", "during the release"])
async def test_a_former_owner_that_is_still_fencing_leaves_no_topic_without_a_mirror(
    target: Target, is_late: bool
) -> None:
    """Otherwise nothing could make the topic writable again."""
    topics, set_mirror, delete = target.topics, target.topics.set_mirror, target.mirrors.delete
    for name in (EU, EUX):
        await set_mirror(name, NAME, is_draining=True)
    await set_mirror(US, "", is_draining=False)

    async def delete_after_fence(name: str) -> Mirror:
        if topics.by_name[US].mirror != name and not fenced:
            fenced.append(US)
            await set_mirror(US, name, is_draining=True)
        return await delete(name)

    fenced = [US] if is_late else []
    target.mirrors.delete = delete_after_fence  # type: ignore[method-assign]
    await failover.adopt(target.service, release())
    assert target.mirrors.get(NAME) is None
    with pytest.raises(UnknownMirror):
        await set_mirror(US, NAME, is_draining=True)
    assert {topic.mirror for topic in topics.catalog.topics()} == {""}


async def test_a_delayed_step_is_not_carried_out_by_a_former_owner(
    target: Target,
) -> None:
    service = target.service
    async with service.adopting:
        step = asyncio.create_task(failover.adopt(service, release()))
        await asyncio.sleep(0)
        service.membership.controller_id = OTHER
    with pytest.raises(CoordinatorUnavailable):
        await step
    assert target.mirrors.get(NAME) is not None


@pytest.mark.parametrize("is_draining", [True, False])
async def test_the_owner_carries_out_what_concerns_a_fence(target: Target, is_draining: bool) -> None:
    service, asked = target.service, []

    async def ask_node(node: NodeId, request: Request[Any], **_: Any) -> Response:
        asked.append((node, type(request)))
        return Response()

    service.ask_node = ask_node
    await target.topics.set_mirror(US, NAME, is_draining=is_draining)
    service.membership.controller_id = OTHER
    await MirrorAdopt(service).handle(release())
    await MirrorFailover(service).handle(FailoverRequest(name=NAME))
    assert asked == [(OTHER, AdoptRequest), (OTHER, FailoverRequest)][: 1 + is_draining]
    await MirrorFailover(service).handle(FailoverRequest(name=NAME, is_planned=True))
    assert asked[1 + is_draining :] == [(OTHER, FailoverRequest)]
    service.membership.controller_id = NO_CONTROLLER
    with pytest.raises(CoordinatorUnavailable):
        await MirrorAdopt(service).handle(release())


async def test_nodes_that_disagree_on_the_owner_do_not_forward_to_each_other(target: Target) -> None:
    service, forwarded = target.service, []

    async def ask_node(_node: NodeId, request: AdoptRequest, **_: Any) -> Response:
        forwarded.append(request)
        # The other node considers this one the owner.
        return await MirrorAdopt(service).handle(request)

    service.ask_node = ask_node
    service.membership.controller_id = OTHER
    with pytest.raises(CoordinatorUnavailable, match="do not agree"):
        await MirrorAdopt(service).handle(release())
    assert forwarded == [release(is_forwarded=True)]
