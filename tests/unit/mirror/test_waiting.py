"""How a mirror waits for copies to arrive and for nodes that lead them, without polling."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID, uuid4

import pytest

from millstream.broker.cluster.new_topics import CreationContext
from millstream.broker.mirror import follower
from millstream.broker.mirror.copier import GONE_S, SILENT_MS, Copier, Copy
from millstream.broker.mirror.follower import Follower
from millstream.broker.mirror.service import MirrorRun, MirrorService
from millstream.cli import mirror as mirror_commands
from millstream.cli.broker_check import check_mirrors
from millstream.cli.doctor import Severity
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import Common
from millstream.client.admin.mirrors import MirrorClient
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidMirror,
    MillstreamError,
    RequestTimedOut,
    TopicExists,
    UnknownTopic,
)
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.mirror import Mirror, Problem
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.private.message import encode
from millstream.protocol.private.mirror_messages import (
    BarrierRequest,
    BarrierResponse,
    CutPartition,
    ExposeRequest,
    ExposeResponse,
    FailoverResponse,
    ListMirrorsResponse,
    OfferResponse,
)
from millstream.protocol.records.batch import iterate_whole_headers, place_batch
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.records.rewrite import empty_batch
from millstream.protocol.wire.fetch import FetchedPartition
from millstream.protocol.wire.group_offsets import Commit
from millstream_testing.clock import ManualClock

ORDERS = Topic(name="orders", topic_id=UUID(int=1), partitions=1, replication=1, overrides={}, created_ms=0)
WHERE = TopicPartition("orders", PartitionIndex(0))


class Cluster:
    """The cluster of an owner, which asks its nodes how far the copies are; it is also its topics."""

    def __init__(self, *responses: dict[str, dict[int, int]]) -> None:
        self.responses = list(responses)
        self.asked: list[ExposeRequest] = []
        self.states_revision = 7
        self.changed = asyncio.Event()
        self.clock = SystemClock()
        self.topics = self
        self.others: list[NodeId] = []
        service: Any = self
        make: Any = Follower
        run = SimpleNamespace(service=service, settings=None, mirror=SimpleNamespace(name="m"))
        self.follower: Follower = make(run, None)

    async def expose(self, request: ExposeRequest) -> ExposeResponse:
        self.asked.append(request)
        return ExposeResponse(reached=self.responses.pop(0))

    async def await_revision(self, revision: int, timeout_s: float) -> None:
        assert revision == self.states_revision + 1
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            raise RequestTimedOut("no change") from None
        self.states_revision += 1

    async def drain(self) -> None:
        await self.follower.drain({"orders": {0: 5}}, self.clock.monotonic() + 60)


async def test_a_copy_without_a_leader_is_waited_for_until_the_cluster_changes() -> None:
    cluster = Cluster({}, {"orders": {0: 5}})
    draining = asyncio.create_task(cluster.drain())
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(cluster.asked) == 1
    cluster.changed.set()
    await draining
    assert [request.revision for request in cluster.asked] == [7, 8]
    assert all(request.wait_ms > 0 for request in cluster.asked)


async def test_a_copy_that_is_behind_is_requested_at_once() -> None:
    cluster = Cluster({"orders": {0: 3}}, {"orders": {0: 4}}, {"orders": {0: 5}})
    await cluster.drain()
    assert len(cluster.asked) == 3


async def test_a_drain_ends_in_time() -> None:
    cluster = Cluster({"orders": {0: 3}})
    with pytest.raises(RequestTimedOut, match="orders-0 did not catch up in time"):
        await cluster.follower.drain({"orders": {0: 5}}, cluster.clock.monotonic())


# -- what was fetched before a copy was truncated ---------------------------------------------------------------


class CopiedPartition:
    """A partition with a log that only knows where it ends."""

    is_leader, leader_epoch, index, topic, high_watermark = True, 0, PartitionIndex(0), ORDERS, Offset(0)

    def __init__(self) -> None:
        settings = SimpleNamespace(compacts=False)
        self.log = SimpleNamespace(
            end_offset=Offset(3), start_offset=Offset(0), settings=settings, partition=WHERE, damage=()
        )
        self.appended: list[bytes] = []
        self.exposed: list[Offset | None] = []

    def append_mirrored(self, records: memoryview, *, exposed: Offset | None, compacted_until: int) -> None:
        self.appended.append(bytes(records))
        for header in iterate_whole_headers(memoryview(records)):
            self.log.end_offset = header.next_offset
        self.expose(exposed)

    def expose(self, offset: Offset | None) -> None:
        self.exposed.append(offset)

    @property
    def replicated_offset(self) -> Offset:
        offset: Offset = self.log.end_offset
        return offset


@pytest.mark.parametrize(("asked", "is_taken"), [(3, True), (9, False), (0, False)])
async def test_records_requested_before_a_truncation_are_not_appended(asked: int, is_taken: bool) -> None:
    partition: Any = CopiedPartition()
    make: Any = Copier
    copier = make(None, None, SystemClock(), rate=0, gates=False, cut_of=None, note_gaps=None, on_commit=None)
    copy = Copy(partition, WHERE, commits=array("q"))
    copier.follow([copy])
    records = bytes(empty_batch(asked, asked + 5, 0))
    response = FetchedPartition(memoryview(records), Offset(asked + 5), Offset(0), Offset(asked + 5))
    await copier._apply_responses({copy.key: copy}, {copy.key: Offset(asked)}, {WHERE: response})
    assert partition.appended == ([records] if is_taken else [])


# -- records that the source has compacted away -----------------------------------------------------------------


@pytest.mark.parametrize("recorded", [2, 9])
async def test_clients_read_up_to_a_gap_until_all_records_that_may_explain_it_are_copied(recorded: int) -> None:
    partition: Any = CopiedPartition()
    partition.log.settings.compacts = True
    noted: list[dict[TopicPartition, int | None]] = []

    async def note(gaps: dict[TopicPartition, int | None]) -> dict[str, dict[int, int]]:
        noted.append(dict(gaps))
        # An earlier leader has recorded a gap that this node does not know of.
        return {"orders": {0: min(recorded, gaps[WHERE] or 0)}}

    make: Any = Copier
    copier = make(None, None, SystemClock(), rate=0, gates=False, cut_of=None, note_gaps=note, on_commit=None)
    copy = Copy(partition, WHERE, commits=array("q"))
    copier.follow([copy])

    async def take(records: bytes, high_watermark: int) -> None:
        response = FetchedPartition(memoryview(records), Offset(high_watermark), Offset(0), Offset(high_watermark))
        await copier._apply_responses({copy.key: copy}, {copy.key: copy.end}, {WHERE: response})

    def whole(base: int) -> bytes:
        batch = bytearray(encode_batch([NewRecord(b"k", b"v")]))
        (header,) = iterate_whole_headers(memoryview(batch))
        place_batch(batch, header, base, 0)
        return bytes(batch)

    await take(whole(3), 20)
    assert (noted, partition.exposed) == ([], [None])
    # Offset 4 is missing. It may have been removed because of any record below 20.
    await take(whole(5), 20)
    assert (noted, partition.exposed[-1]) == ([{WHERE: 4}], min(recorded, 4))
    waiting = asyncio.create_task(copier.without_gaps())
    # Meanwhile the source gets more records, which are not the reason; another gap extends the range.
    await take(whole(6) + whole(10), 30)
    await take(whole(11), 40)
    assert (noted, partition.exposed[-1], waiting.done()) == ([{WHERE: 4}], min(recorded, 4), False)
    await take(b"".join(whole(at) for at in range(12, 30)), 50)
    await waiting
    assert (noted, partition.exposed[-1]) == ([{WHERE: 4}, {WHERE: None}], None)


async def test_a_copy_takes_a_gap_from_the_declaration() -> None:
    partition: Any = CopiedPartition()
    make: Any = Copier
    copier = make(None, None, SystemClock(), rate=0, gates=False, cut_of=None, note_gaps=None, on_commit=None)
    copier.follow([Copy(partition, WHERE)])
    copier.follow([Copy(partition, WHERE, gap=2)])
    (copy,) = copier.copies.values()
    assert (copy.gap, partition.exposed) == (2, [2])


# -- unknown lags -----------------------------------------------------------------------------------------------


def described_by(node: int, copies: int, *lags: int | None) -> dict[str, Any]:
    """Return one node's description of a mirror with so many copies."""
    partitions = [
        {"topic": "orders", "partition": node * 10 + at, "source_end": None, "lag": lag, "lag_ms": lag, "error": ""}
        for at, lag in enumerate(lags)
    ]
    report = {"state": "running", "error": "", "source_cluster": "", "partitions": partitions, "notes": []}
    numbers = {"bytes": 0, "bytes_per_s": 0.0, "groups": 0, "queues": 0}
    return {
        "name": "paris",
        "mirror_id": "1",
        "settings": {"from": "paris:9092"},
        "overrides": {},
        "enabled": True,
        "problem": "",
        "created_ms": 0,
        "version": 1,
        "topics": ["orders"],
        "copies": {"orders": copies, "other": 1},
        "cuts": {},
        "cutting": [],
        "notes": [],
        "report": {**report, **numbers},
    }


class Nodes:
    """Two nodes, of which the second may not respond."""

    def __init__(self, *responses: dict[str, Any] | None) -> None:
        self.responses = responses

    async def metadata(self, _topics: Any) -> Any:
        return SimpleNamespace(nodes=dict.fromkeys(NodeId(at) for at in range(len(self.responses))))

    async def private(self, node: NodeId, _key: int, _body: bytes, *, waits: bool) -> memoryview:
        response = self.responses[node]
        if response is None:
            raise RequestTimedOut(f"node {node} does not respond")
        return memoryview(encode(ListMirrorsResponse(mirrors=[response])))


@pytest.mark.parametrize(("is_behind", "lag"), [(False, None), (True, 5)])
@pytest.mark.parametrize("failure", ["an error", "silence"])
def test_a_complete_copy_has_no_known_lag_while_its_source_fails(
    is_behind: bool, lag: int | None, failure: str
) -> None:
    partition: Any = SimpleNamespace(high_watermark=10)
    copy = Copy(partition, WHERE, source_end=15 if is_behind else 10, heard_ms=1000)
    now_ms = 1000
    assert copy.lag(now_ms) == (lag or 0)
    if failure == "an error":
        copy.error = "the source cannot be reached"
    else:
        now_ms += SILENT_MS + 1
    assert copy.lag(now_ms) == lag
    assert copy.lag_ms(1000 + SILENT_MS + 1) == 1000 + SILENT_MS + 1 - (0 if is_behind else 1000)


@pytest.mark.parametrize(("source_end", "shown"), [(-1, None), (0, 0)])
def test_an_unknown_end_of_the_source_is_not_shown_as_a_number(source_end: int, shown: int | None) -> None:
    make: Any = MirrorRun
    service = SimpleNamespace(membership=SimpleNamespace(me=SimpleNamespace(node_id=NodeId(1))))
    run = make(Mirror(mirror_id=UUID(int=3), name="paris"), service)
    partition: Any = CopiedPartition()
    copies = {(ORDERS.topic_id, 0): Copy(partition, WHERE, source_end=source_end)}
    run.copier = SimpleNamespace(copies=copies, bytes_copied=0, bytes_per_s=0.0)
    (described,) = run.describe(now_ms=0)["partitions"]
    assert described["source_end"] == shown


def test_a_copy_whose_original_is_gone_neither_fails_nor_lags() -> None:
    partition: Any = SimpleNamespace(high_watermark=10, log=SimpleNamespace(partition=WHERE))
    copy, clock = Copy(partition, WHERE, source_end=15), ManualClock()
    make: Any = Copier
    copier = make(None, None, clock, rate=0, gates=False, cut_of=None, note_gaps=None, on_commit=None)

    def held(error: MillstreamError) -> tuple[str, int | None, bool]:
        copier._suspend(copy, error)
        return copy.error, copy.lag(clock.now_ms()), copy.lag_ms(clock.now_ms()) == 0

    unknown, unreachable = UnknownTopic("no such topic"), BrokerUnreachable("no broker responded")
    # A node of the source that has just started may not know it yet.
    assert held(unknown) == ("no such topic", 5, False)
    clock.advance_ms(int(GONE_S * 1000))
    assert held(unknown) == ("", 0, True)
    assert held(unreachable) == ("no broker responded", 5, False)
    clock.advance_ms(int(GONE_S * 1000))
    assert held(unknown) == ("no such topic", 5, False)


async def test_a_failing_mirror_is_a_finding_of_doctor() -> None:
    healthy, failing = described_by(0, 1, 0), described_by(0, 1, 0)
    failing["report"] |= {"state": "retrying", "error": "refused"}
    interrupted = {**described_by(0, 1, 0), "interrupted": "a switch has not finished"}
    clients: list[Any] = [Nodes(healthy), Nodes(failing), Nodes(healthy, interrupted), Nodes(None)]
    findings = [mirror for client in clients for mirror in await check_mirrors(client)]
    assert [finding.severity for finding in findings] == [Severity.OK, *[Severity.WARNING] * 3]
    assert findings[1].detail == "mirror paris is retrying: refused"
    assert findings[2].detail == "mirror paris is running: a switch has not finished"


async def test_unknown_lags_are_counted() -> None:
    clients: list[Any] = [
        Nodes(described_by(0, 4, 5, 0), described_by(1, 4, 7, 0)),
        Nodes(described_by(0, 4, 5, None), described_by(1, 4, 7, 0)),
        Nodes(described_by(0, 4, 0, 0), None),
        Nodes(described_by(0, 1, None)),
    ]
    documents = [(await MirrorClient(client).describe())[0] for client in clients]
    assert [(mirror["lag"], mirror["lag_unknown"]) for mirror in documents] == [(12, 1), (12, 2), (0, 3), (None, 2)]


async def test_a_cutover_waits_for_silent_nodes() -> None:
    client: Any = Nodes(described_by(0, 4, 0, 0), None)
    with pytest.raises(RequestTimedOut, match="unknown for 3 partitions"):
        await MirrorClient(client).settle("paris", wait_s=0.0, idle_s=0.0)
    with pytest.raises(RequestTimedOut, match="unknown for 2 partitions"):
        await MirrorClient(client).settle("paris", ["orders"], wait_s=0.0, idle_s=0.0)
    with pytest.raises(InvalidMirror, match="no copies that match order"):
        await MirrorClient(client).settle("paris", ["order"], wait_s=60.0, idle_s=0.0)
    client = Nodes(described_by(0, 2, 0, 0))
    assert await MirrorClient(client).settle("paris", ["orders"], wait_s=60.0, idle_s=0.0) is not None


@pytest.mark.parametrize("topics", [None, ["orders|other"]])
@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_started_cutover_waits_for_nothing(topics: list[str] | None, is_writable: bool) -> None:
    described = described_by(0, 4)
    described["report"] = None
    if is_writable:
        described |= {"copies": {}, "cuts": {"orders": {0: 5}}}
    else:
        described["cutting"] = ["orders", "other"]
    client: Any = Nodes(described)
    assert await MirrorClient(client).settle("paris", topics, wait_s=60.0, idle_s=60.0) is None


@pytest.mark.parametrize(
    ("source_ends", "complete"),
    [([5, 5], True), ([5, None], None), ([None, None], None), ([None, 7], False)],
)
def test_a_cutover_is_complete_only_once_the_source_confirms_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source_ends: list[int | None],
    complete: bool | None,
) -> None:
    cuts = [
        CutPartition(topic="orders", partition=at, offset=5, epoch=3, source_end=end)
        for at, end in enumerate(source_ends)
    ]
    responses: list[Any] = [1.0, FailoverResponse(partitions=cuts)]
    monkeypatch.setattr(mirror_commands, "_call_mirrors", lambda *_: responses.pop(0))
    with nullcontext() if complete is not False else pytest.raises(CommandFailed, match="lacks its last 2 offsets"):
        mirror_commands.cutover("paris", yes=True, common=Common(as_json=True))
    assert json.loads(capsys.readouterr().out)["complete"] is complete


# -- offsets of groups --------------------------------------------------------------------------------------------


class Groups:
    """A follower of a source with one group, which is also a group here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_millstream: bool = False) -> None:
        self.here: dict[TopicPartition, int] = {}
        self.metadata: dict[TopicPartition, str] = {}
        self.there = {WHERE: 30}
        self.is_there, self.mirror = True, SimpleNamespace(name="m", cuts={}, source_name=lambda topic: topic.name)
        self.topic_ids = {"orders": ORDERS.topic_id, "audit": ORDERS.topic_id}
        """The ids that the originals have at the source."""
        service = SimpleNamespace(
            mirrors=SimpleNamespace(get=lambda _: self.mirror),
            copied_topics=lambda _: [ORDERS],
            exposed_offsets=self.exposed_offsets,
            client=lambda: self,
            is_owner=True,
        )
        settings = SimpleNamespace(rename="", groups=True, subscriptions=False)
        self.run = SimpleNamespace(
            service=service, settings=settings, mirror=self.mirror, groups={}, notes={}, wants_barrier=asyncio.Event()
        )
        make: Any = Follower
        source = SimpleNamespace(client=None, is_millstream=is_millstream, metadata=self.source_metadata)
        self.follower: Any = make(self.run, source)
        for name in ("list_groups", "committed_by_group", "commits_by_group", "commit_offsets"):
            monkeypatch.setattr(follower, name, getattr(self, name))

    async def source_metadata(self, _names: Any) -> Any:
        return SimpleNamespace(
            topics={name: SimpleNamespace(topic_id=topic_id) for name, topic_id in self.topic_ids.items()}
        )

    async def exposed_offsets(self, _where: Any) -> dict[TopicPartition, int]:
        return {WHERE: 100}

    async def list_groups(self, _client: Any) -> list[tuple[str, str, str]]:
        return [("g", "", "classic")]

    async def committed_by_group(self, _client: Any, names: list[str]) -> dict[str, dict[TopicPartition, int]]:
        return {name: dict(self.there) for name in names}

    async def commits_by_group(self, _client: Any, names: list[str]) -> dict[str, dict[TopicPartition, Commit]]:
        here = {where: Commit(offset, self.metadata.get(where, "")) for where, offset in self.here.items()}
        return dict.fromkeys(names, here)

    async def commit_offsets(
        self, _client: Any, _group: str, offsets: dict[TopicPartition, int], *, metadata: str
    ) -> None:
        self.here |= offsets
        self.metadata |= dict.fromkeys(offsets, metadata)


async def test_a_group_that_has_read_further_here_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    # It was moved here while another node was the owner.
    groups.here[WHERE] = 50
    await groups.follower.sync_all({"orders"})
    assert (groups.here[WHERE], list(groups.run.notes)) == (50, ["group g"])
    groups.there[WHERE] = 60
    await groups.follower.sync_all({"orders"})
    assert (groups.here[WHERE], groups.run.notes) == (60, {})
    # An offset that the mirror itself applied follows the source, even if another node was the owner then.
    groups.run.groups.clear()
    groups.there[WHERE] = 10
    await groups.follower.sync_all({"orders"})
    assert groups.here[WHERE] == 10


@pytest.mark.parametrize("stale", ["dropped by a reverse", "beyond the end"])
async def test_offsets_of_records_that_are_not_copied_are_replaced(monkeypatch: pytest.MonkeyPatch, stale: str) -> None:
    groups = Groups(monkeypatch)
    groups.here[WHERE] = 50 if stale == "dropped by a reverse" else 101
    if stale == "dropped by a reverse":
        groups.mirror.cuts = {"orders": {0: 20}}
    await groups.follower.sync_all({"orders"})
    assert groups.here[WHERE] == 30


async def test_offsets_deleted_here_are_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    await groups.follower.sync_all({"orders"})
    groups.here.clear()
    await groups.follower.sync_all({"orders"})
    assert groups.here == {WHERE: 30}


@pytest.mark.parametrize(
    ("cuts", "origins", "advice"),
    [({"orders": {0: 20}}, ("there",), None), ({}, (), "delete it, or"), ({}, ("there",), "would lose")],
    ids=["failed over", "of this cluster", "failed over by a mirror that was deleted"],
)
async def test_no_advice_is_given_to_delete_a_failed_over_topic(
    monkeypatch: pytest.MonkeyPatch, cuts: dict[str, dict[int, int]], origins: tuple[str, ...], advice: str | None
) -> None:
    groups = Groups(monkeypatch)
    groups.run.service.topics = SimpleNamespace(get=lambda _: SimpleNamespace(mirror="", origins=origins))
    groups.run.service.membership = SimpleNamespace(cluster_id="here")
    groups.follower._source.cluster_id = "there"
    groups.mirror.cuts = cuts
    with nullcontext() if advice is None else pytest.raises(TopicExists, match=advice):
        await groups.follower._sync_topic(SimpleNamespace(name="orders"), (), checks_configs=True)


@pytest.mark.parametrize("origin", ["here", "elsewhere"])
async def test_a_copy_on_the_source_is_a_problem_unless_its_original_is_here(
    monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    groups = Groups(monkeypatch, is_millstream=True)
    groups.run.service.membership = SimpleNamespace(cluster_id="here")
    groups.run.service.copied_topics, groups.run.service.clock = lambda _: [], ManualClock()
    groups.run.settings.takes = lambda _: True
    source = groups.follower._source
    copy = SimpleNamespace(name="orders", is_internal=False)
    source.metadata = AsyncMock(return_value=SimpleNamespace(topics={"orders": copy}))
    source.ask = AsyncMock(return_value=OfferResponse(mirrored=["orders"], origins={"orders": [origin]}))
    await groups.follower._sync_topics()
    (note,) = groups.run.notes.values()
    assert "is not mirrored again" in note
    assert isinstance(note, Problem) == (origin == "elsewhere")


@pytest.mark.parametrize("is_reversed", [True, False])
async def test_only_a_mirror_that_was_reversed_restores_copies_of_records_that_came_from_here(
    monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    groups = Groups(monkeypatch)
    groups.run.service.topics = SimpleNamespace(get=lambda _: None)
    groups.run.service.membership = SimpleNamespace(cluster_id="here")
    groups.run.settings.returning = False
    groups.follower._source.cluster_id = "there"
    groups.follower._create = create = AsyncMock()
    groups.mirror.cuts = {"orders": {0: 20}} if is_reversed else {}
    original = SimpleNamespace(name="orders")
    with nullcontext() if is_reversed else pytest.raises(InvalidMirror, match="came from this cluster"):
        await groups.follower._sync_topic(original, ("here",), checks_configs=True)
    assert [call.args for call in create.await_args_list] == [(original, "orders", ("there",))] * is_reversed


@pytest.mark.parametrize(
    ("original", "requested", "machines", "expected"),
    [(1, 0, 5, 3), (5, 0, 5, 5), (1, 0, 2, 2), (3, 0, 1, 1), (3, 1, 5, 1), (3, 4, 2, 2)],
    ids=["default here", "that of the original", "few machines", "one machine", "fixed", "fixed and few machines"],
)
async def test_a_copy_has_no_fewer_replicas_than_its_original_and_other_topics_here(
    monkeypatch: pytest.MonkeyPatch, original: int, requested: int, machines: int, expected: int
) -> None:
    groups, create = Groups(monkeypatch), AsyncMock(return_value=[None])
    service = groups.run.service
    service.mirrors.forget_topic = AsyncMock()
    service.topics = SimpleNamespace(create_all=create)
    groups.run.settings.replication, groups.run.refreshed = requested, asyncio.Event()
    monkeypatch.setattr(groups.follower, "_overrides", AsyncMock(return_value={}))
    there = SimpleNamespace(name="orders", topic_id=UUID(int=9), partitions=[0], replication=original)
    await groups.follower._create(there, "orders", ())
    terms = CreationContext(
        names=(),
        metric_names={},
        config=Config(default_replication=3),
        defaults=TopicSettings(),
        failure_domains=machines,
        new_id=uuid4,
        now_ms=0,
    )
    (declared,) = terms.declare_all(create.await_args_list[0].args[0])
    assert isinstance(declared, Topic)
    assert declared.replication == expected


AUDIT = TopicPartition("audit", PartitionIndex(0))


class StuckGroups(Groups):
    """A mirror of Millstream with two copies, of which `audit` cannot be continued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, is_millstream=True)
        monkeypatch.setattr(follower, "ARRIVAL_S", 0.0)
        self.there[AUDIT] = 20
        self.reached = {"orders": {0: 30}, "audit": {0: 5}}
        self.waiting: list[tuple[str, int]] = []
        self.transactional: list[str] = []
        self.at_barrier: dict[str, dict[int, int]] = {}
        """What transactional groups have committed at the moment of a barrier."""
        self.groups_omitted = False
        self.mirror.verified = {}
        service = self.run.service
        service.mirrors.note_verified = AsyncMock()
        service.mirrors.unfinished_cuts = lambda _: ()
        service.copied_topics = lambda _: [ORDERS, dataclasses.replace(ORDERS, name="audit")]
        service.others, service.clock, service.expose = [], SystemClock(), self.expose
        self.topics: dict[str, Any] = {"output": SimpleNamespace(mirror="")}
        service.topics = SimpleNamespace(states_revision=1, get=self.topics.get)
        made: Any = MirrorService
        service.taken_over = partial(made.taken_over, service)
        self.follower._source.ask = self.ask

    async def exposed_offsets(self, where: Any) -> dict[TopicPartition, int]:
        return {partition: self.reached[partition.topic][partition.partition] for partition in where}

    async def ask(self, _node: Any, request: BarrierRequest, **_: Any) -> BarrierResponse:
        groups = {} if self.groups_omitted else dict.fromkeys(self.transactional, self.at_barrier)
        offsets = {topic: {0: 30} for topic in request.topics}
        return BarrierResponse(offsets=offsets, groups=groups, groups_omitted=self.groups_omitted)

    async def sync(self, *, is_planned: bool) -> None:
        if is_planned:
            await self.follower.sync_all({"orders", "audit"})
        else:
            await self.follower._sync_groups()
            await self.follower._sync_transactions()

    async def expose(self, _request: ExposeRequest) -> ExposeResponse:
        return ExposeResponse(reached=self.reached, waiting=self.waiting)


async def test_a_cutover_of_some_topics_does_not_wait_for_a_copy_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = StuckGroups(monkeypatch)
    await groups.follower.sync_all({"orders"})
    assert groups.here == {WHERE: 30}
    # The others still wait, and those that were applied stay.
    with pytest.raises(RequestTimedOut, match="audit-0 has not arrived"):
        await groups.follower._sync_transactions()
    await groups.follower._sync_groups()
    assert groups.here == {WHERE: 30}


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("transactional", [[], ["g"]], ids=["no transaction", "transactional group"])
@pytest.mark.parametrize("cut", [None, 20, 30], ids=["failover not finished", "records cut off", "nothing cut off"])
async def test_offsets_are_not_applied_without_records_that_a_failover_of_other_topics_has_cut_off(
    monkeypatch: pytest.MonkeyPatch, cut: int | None, transactional: list[str], is_planned: bool
) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0], groups.transactional = 30, transactional
    if cut is None:
        groups.run.service.mirrors.unfinished_cuts = lambda _: {"output"}
    else:
        groups.mirror.cuts = {"output": {0: cut}}
    await groups.sync(is_planned=is_planned)
    is_whole = cut == 30 or transactional == []
    assert groups.here == ({WHERE: 30, AUDIT: 20} if is_whole else {})
    assert list(groups.run.notes) == ([] if is_whole else [follower.HELD_BACK])


async def test_a_copy_of_a_reversed_mirror_that_was_deleted_here_does_not_count_as_failed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0], groups.transactional = 30, ["g"]
    groups.mirror.cuts = {"output": {0: 20}}
    groups.topics.clear()
    await groups.sync(is_planned=False)
    assert (groups.here, groups.run.notes) == ({WHERE: 30, AUDIT: 20}, {})


@pytest.mark.parametrize("is_planned", [True, False])
async def test_only_transactional_groups_keep_their_offsets_where_records_were_cut_off(
    monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0] = 30
    there = {"exact": {WHERE: 10}, "plain": {AUDIT: 10}}
    listed_groups = [(name, "", "classic") for name in there]
    monkeypatch.setattr(follower, "list_groups", AsyncMock(return_value=listed_groups))
    monkeypatch.setattr(follower, "committed_by_group", AsyncMock(return_value=there))
    await groups.sync(is_planned=is_planned)
    assert groups.here == {WHERE: 10, AUDIT: 10}
    groups.mirror.cuts, groups.transactional = {"output": {0: 20}}, ["exact", "elsewhere"]
    there |= {"exact": {WHERE: 20}, "plain": {AUDIT: 20}}
    for _ in range(2):
        await groups.sync(is_planned=is_planned)
        assert groups.here == {WHERE: 10, AUDIT: 20}
        assert (
            "are not mirrored any more (exact), because of the failover of output:"
            in (groups.run.notes[follower.HELD_BACK])
        )
        # What is lost here comes back: the same as before.
        groups.here.clear()
    there["exact"] = {WHERE: 10}
    await groups.sync(is_planned=False)
    assert (groups.here, groups.run.notes) == ({WHERE: 10, AUDIT: 20}, {})


@pytest.mark.parametrize("is_transactional", [True, False])
async def test_offsets_of_transactions_wait_if_a_failover_begins_while_copies_arrive(
    monkeypatch: pytest.MonkeyPatch, is_transactional: bool
) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0], groups.transactional = 30, ["g"] * is_transactional

    async def expose(request: ExposeRequest) -> ExposeResponse:
        if request.offsets:
            groups.mirror.cuts = {"output": {0: 20}}
        return await groups.expose(request)

    groups.run.service.expose = expose
    await groups.sync(is_planned=False)
    assert groups.here == ({} if is_transactional else {WHERE: 30, AUDIT: 20})
    assert list(groups.run.notes) == [follower.HELD_BACK] * is_transactional


async def test_offsets_of_transactions_are_those_of_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0], groups.transactional = 30, ["g"]
    # The offsets were read before the barrier; a transaction has committed more since.
    groups.there, groups.at_barrier = {WHERE: 10, AUDIT: 20}, {"orders": {0: 25}, "unknown": {0: 1}}
    await groups.sync(is_planned=False)
    assert groups.here == {WHERE: 25, AUDIT: 20}
    noted = groups.run.service.mirrors.note_verified
    assert noted.await_args.args[2] == {"g": {"orders": {0: 25}, "audit": {0: 20}}}
    # Only those that are not applied yet are recorded.
    groups.there, groups.at_barrier = {WHERE: 25, AUDIT: 20}, {"orders": {0: 28}, "audit": {0: 20}}
    await groups.follower._sync_transactions()
    assert noted.await_count == 1
    groups.waiting = [("orders", 0)]
    await groups.follower._sync_transactions()
    assert noted.await_args.args[2] == {"g": {"orders": {0: 28}}}
    assert groups.here == {WHERE: 28, AUDIT: 20}


async def test_too_many_offsets_of_transactions_are_mirrored_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["audit"][0], groups.transactional, groups.groups_omitted = 30, ["g"], True
    groups.there, groups.at_barrier = {WHERE: 10}, {"orders": {0: 25}}
    await groups.sync(is_planned=False)
    assert groups.here == {WHERE: 10}
    assert list(groups.run.notes) == [follower.LEFT_OUT]
    # Any group may be one of a transaction whose records were cut off.
    groups.there, groups.mirror.cuts = {WHERE: 11}, {"output": {0: 20}}
    await groups.sync(is_planned=False)
    assert groups.here == {WHERE: 10}
    groups.mirror.cuts, groups.groups_omitted = {}, False
    await groups.sync(is_planned=False)
    assert (groups.here, groups.run.notes) == ({WHERE: 25}, {})


@pytest.mark.parametrize("created", ["while copies arrive", "while groups are read", "before offsets are applied"])
async def test_offsets_of_a_topic_are_not_those_of_a_copy_created_since(
    monkeypatch: pytest.MonkeyPatch, created: str
) -> None:
    groups, copies = StuckGroups(monkeypatch), list[str]()
    groups.reached["audit"][0], groups.transactional, groups.waiting = 30, ["g"], [("audit", 0), ("orders", 0)]
    groups.at_barrier = {"orders": {0: 25}, "audit": {0: 25}}
    service, expose, read = groups.run.service, groups.expose, groups.committed_by_group
    verified: list[Any] = []

    async def create_all(requested: list[Any]) -> list[None]:
        copies.extend(topic.name for topic in requested)
        return [None]

    async def create() -> None:
        if not copies:
            copies.append("begun")
            original: Any = SimpleNamespace(name="audit", topic_id=UUID(int=9), partitions=[0], replication=1)
            async with groups.follower._creating:
                await groups.follower._create(original, "audit", ())

    async def expose_later(request: ExposeRequest) -> ExposeResponse:
        if request.is_verified:
            verified.append(request.offsets)
        elif request.offsets and created == "while copies arrive":
            await create()
        return await expose(request)

    async def read_later(client: Any, names: list[str]) -> dict[str, dict[TopicPartition, int]]:
        backlogs = await read(client, names)
        if created == "while groups are read":
            await create()
        return backlogs

    async def note_later(*_: Any) -> None:
        if created == "before offsets are applied":
            late.append(asyncio.create_task(create()))
            await asyncio.sleep(0)

    late: list[asyncio.Task[None]] = []
    service.topics.create_all = create_all
    service.mirrors.forget_topic, service.mirrors.note_verified = AsyncMock(), AsyncMock(side_effect=note_later)
    groups.run.settings.replication, groups.run.refreshed = 0, asyncio.Event()
    monkeypatch.setattr(groups.follower, "_overrides", AsyncMock(return_value={}))
    monkeypatch.setattr(follower, "committed_by_group", read_later)
    service.expose = expose_later
    await groups.follower._sync_groups()
    if created == "while groups are read":
        assert groups.follower._committed == {"g": {WHERE: 30}}
        return
    await groups.follower._sync_transactions()
    recorded = service.mirrors.note_verified.await_args.args
    is_before = created == "while copies arrive"
    names = {"orders"} if is_before else {"orders", "audit"}
    assert (
        set(recorded[1])
        == set(recorded[2]["g"])
        == set(verified[0])
        == {partition.topic for partition in groups.here}
        == names
    )
    # One that is created later waits until they are applied, and forgets them.
    for task in late:
        await task
    assert copies == ["begun", "audit"]
    assert groups.follower._applicable == {"g": {WHERE: 25}}


@pytest.mark.parametrize("arrives", [0, 1], ids=["before the barrier", "with the barrier"])
async def test_a_cutover_of_some_topics_waits_for_transactions_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, arrives: int
) -> None:
    groups = StuckGroups(monkeypatch)
    waiting: list[list[tuple[str, int]]] = [[]] * arrives

    async def expose(_request: ExposeRequest) -> ExposeResponse:
        return ExposeResponse(reached=groups.reached, waiting=waiting.pop() if waiting else [("orders", 0)])

    groups.run.service.expose = expose
    with pytest.raises(RequestTimedOut, match="audit-0 has not arrived"):
        await groups.follower.sync_all({"orders"})
    assert groups.here == {}


async def test_a_cutover_does_not_wait_for_the_timeout_of_another_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = StuckGroups(monkeypatch)
    monkeypatch.setattr(follower, "ARRIVAL_S", 3600.0)
    waits = asyncio.Event()

    async def expose(request: ExposeRequest) -> ExposeResponse:
        if "audit" in request.offsets:
            waits.set()
        await asyncio.sleep(0)
        return await groups.expose(request)

    groups.run.service.expose = expose
    await groups.follower._read_groups()
    regular = asyncio.create_task(groups.follower._sync_transactions())
    await waits.wait()
    await groups.follower.sync_all({"orders"})
    assert groups.here == {WHERE: 30}
    with pytest.raises(RequestTimedOut, match="audit-0 has not arrived"):
        await regular


async def test_a_cutover_applies_offsets_only_when_the_transactions_that_committed_them_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = StuckGroups(monkeypatch)
    groups.reached["orders"][0] = 29
    with pytest.raises(RequestTimedOut, match="orders-0 has not arrived"):
        await groups.follower.sync_all({"orders"})
    assert groups.here == {}


class Sourced:
    """A source with one node that fails as the test says, and then never responds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fetched = asyncio.Event()
        self.fails: list[str] = []
        self.asked: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def forget_leaders(self) -> None:
        self.asked.append("forget")

    async def leader_of(self, topic: str, _partition: int) -> NodeId:
        self.asked.append(topic)
        if topic == "slow":
            # The second time, the other copy is suspended, which ends meanwhile.
            self.now += 60 * (self.asked.count(topic) == 2)
        elif self.fails == ["leader"]:
            self.fails.clear()
            raise BrokerUnreachable("no broker responded")
        return NodeId(1)

    async def fetch(self, _leader: NodeId, positions: dict[TopicPartition, Offset], *_: object) -> None:
        if self.fails == ["fetch"]:
            self.fails.clear()
            raise RequestTimedOut("it did not respond within 30 s")
        if any(where.topic == "orders" for where in positions):
            self.fetched.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("fails", ["leader", "fetch"])
async def test_a_copy_is_fetched_again_after_a_failure(fails: str) -> None:
    source = Sourced()
    source.fails = [fails]
    make: Any = Copier
    copier = make(
        None,
        SimpleNamespace(client=source, fetch=source.fetch),
        source,
        rate=0,
        gates=False,
        cut_of=None,
        note_gaps=None,
        on_commit=None,
    )
    for number, name in enumerate(["orders", "slow"] if fails == "leader" else ["orders"]):
        where = TopicPartition(name, PartitionIndex(0))
        topic = dataclasses.replace(ORDERS, name=name, topic_id=UUID(int=number))
        log = SimpleNamespace(end_offset=Offset(0), partition=where)
        partition: Any = SimpleNamespace(topic=topic, index=0, leader_epoch=1, is_leader=True, log=log)
        copy = Copy(partition, where, compared_epoch=1)
        copier.copies[copy.key] = copy
    running = asyncio.create_task(copier.run())
    try:
        async with asyncio.timeout(60):
            await source.fetched.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not source.fails
