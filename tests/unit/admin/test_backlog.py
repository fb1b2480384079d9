"""Pipeline backlogs: where each starts, which offsets are requested, and the result while a leader is down."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from millstream.client.admin import backlog
from millstream.client.admin.backlog import Backlogs, Reader, reader_of
from millstream.client.admin.topic_notes import ReadingPipeline
from millstream.core.errors import CoordinatorUnavailable, MillstreamError, NotLeader
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.core.topic import TopicPartition
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata
from millstream.protocol.wire.list_offsets import Listed, ListedOffset
from millstream_testing.pipeline_script import landing

EARLIEST, LATEST = -2, -1


def at(topic: str, number: int = 0) -> TopicPartition:
    return TopicPartition(topic, PartitionIndex(number))


def read(pipeline: Pipeline) -> Reader:
    reader = reader_of(pipeline)
    assert reader is not None
    return reader


class Cluster:
    """A client stand-in with topics of one partition each."""

    def __init__(self, **bounds: tuple[int, int]) -> None:
        self.bounds = bounds
        self.committed: dict[str, dict[TopicPartition, int] | MillstreamError] = {}
        self.away: set[str] = set()
        self.asked: list[tuple[int, set[str]]] = []

    def topic(self, name: str) -> TopicMetadata:
        one = PartitionMetadata(
            partition=PartitionIndex(0), leader_id=NodeId(1), leader_epoch=Epoch(0), replicas=(), in_sync=()
        )
        is_internal = name.startswith("__")
        return TopicMetadata(name=name, topic_id=uuid.uuid4(), is_internal=is_internal, partitions={one.partition: one})

    async def metadata(self, topics: Sequence[str] | None) -> ClusterMetadata:
        names = self.bounds if topics is None else [name for name in topics if name in self.bounds]
        found_topics = {name: self.topic(name) for name in names}
        return ClusterMetadata(cluster_id="c", controller_id=NodeId(1), nodes={}, topics=found_topics, errors={})

    async def list_offsets_of(self, times_ms: Mapping[TopicPartition, int], *, isolation: int) -> Listed:
        if times_ms:
            self.asked.append((next(iter(times_ms.values())), {where.topic for where in times_ms}))
        return {where: self._listed(where, time_ms) for where, time_ms in times_ms.items()}

    def _listed(self, where: TopicPartition, time_ms: int) -> ListedOffset | MillstreamError:
        if where.topic in self.away:
            return NotLeader("its leader is away")
        start, end = self.bounds[where.topic]
        return ListedOffset(Offset(end if time_ms == LATEST else start), -1, Epoch(0))

    async def committed_by_group(self, client: Any, names: Sequence[str]) -> dict[str, Any]:
        return {name: self.committed.get(name, {}) for name in names}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(orders=(10, 100), parcels=(0, 50), __own=(0, 5))
    monkeypatch.setattr(backlog, "committed_by_group", made.committed_by_group)
    return made


def backlogs_of(cluster: Cluster) -> Backlogs:
    client: Any = cluster
    return Backlogs(client)


async def test_pipelines_without_commits_lag_by_the_whole_topic_or_by_nothing(cluster: Cluster) -> None:
    route = Pipeline(
        pipeline_id=uuid.uuid4(),
        name="route",
        kind=PipelineKind.ROUTE,
        overrides={"from": "latest"},
        rules=tuple(Rule(name=name, topic=name, targets=("queue",)) for name in ("orders", "parcels")),
    )
    newest = landing("newest", topics="", pattern=".*", **{"from": "latest"})
    readers = [read(one) for one in (landing("all", topics="", pattern=".*"), newest, route)]
    backlogs = backlogs_of(cluster)
    assert await backlogs.lags(readers) == {"all": 140, "newest": 0, "route": 0}
    # Once it has commits, a pipeline lands a new topic from its first message; a route starts each topic at its end.
    cluster.committed = {reader.group: {at("orders"): 100} for reader in readers}
    assert await backlogs.lags(readers) == {"all": 50, "newest": 50, "route": 0}
    cluster.committed = {reader.group: {at("orders"): 3, at("parcels"): 70} for reader in readers}
    assert set((await backlogs.lags(readers)).values()) == {90}


async def test_only_required_offsets_are_requested(cluster: Cluster) -> None:
    reader = read(landing("mine", topics="orders,parcels"))
    cluster.committed = {reader.group: {at("orders"): 100, at("parcels"): 49}}
    backlogs = backlogs_of(cluster)
    assert await backlogs.lags([reader]) == {"mine": 1}
    assert cluster.asked == [(LATEST, {"orders", "parcels"}), (EARLIEST, {"parcels"})]
    assert await backlogs.in_topic([reader], cluster.topic("orders")) == {"mine": (90, 0)}
    assert cluster.asked[2:] == [(LATEST, {"orders"}), (EARLIEST, {"orders"})]


async def test_last_known_offsets_are_used_while_a_leader_is_unavailable(cluster: Cluster) -> None:
    reader, other = read(landing("mine", topics="orders,parcels")), read(landing("other", topics="parcels"))
    cluster.committed = {reader.group: {at("orders"): 90, at("parcels"): 0}}
    backlogs = backlogs_of(cluster)
    cluster.away = {"orders"}
    assert await backlogs.lags([reader, other]) == {"other": 50}
    cluster.away = set()
    assert await backlogs.lags([reader, other]) == {"mine": 60, "other": 50}
    cluster.away, cluster.bounds["parcels"] = {"orders"}, (0, 70)
    assert await backlogs.lags([reader, other]) == {"mine": 80, "other": 70}
    cluster.committed[other.group] = CoordinatorUnavailable("it moves")
    assert await backlogs.lags([reader, other]) == {"mine": 80}


def test_a_summary_states_what_deleting_a_topic_would_lose() -> None:
    whole, newest = read(landing("whole")), read(landing("newest", **{"from": "latest"}))
    done = backlog.Backlog(5, 0)
    assert ReadingPipeline(whole, None).sentence("orders") == (
        "Pipeline whole lands orders; the number of messages that are not landed yet is unknown."
    )
    assert ReadingPipeline(whole, done).sentence("orders") == "Pipeline whole lands orders; every message is landed."
    assert ReadingPipeline(newest, done).sentence("orders") == (
        "Pipeline newest lands orders; every message since it began is landed."
    )
    assert ReadingPipeline(whole, backlog.Backlog(5, 1200)).sentence("orders") == (
        "Pipeline whole lands orders, of which 1,200 messages are not landed yet."
    )
