"""How far topics are landed, as retention uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import msgspec
import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.kafka.apis.pipeline_apis import PipelineLanded
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.report_board import LandedBoard
from millstream.core.errors import UnknownTopic
from millstream.core.ids import PartitionIndex
from millstream.core.pipeline import LandSettings, PipelineKind
from millstream.core.topic import TopicPartition
from millstream.protocol.private.message import Response
from millstream.protocol.private.pipeline_messages import LandedTopic, RecordLandedRequest
from millstream_testing.clock import ManualClock

PLACE = TopicPartition("orders", PartitionIndex(0))


class Topics:
    """One topic with one partition hosted by this node."""

    def __init__(self) -> None:
        self.topic_id = uuid4()
        self.is_leader = True
        self.is_here = True
        self.version = 0
        self.floor: Any = None

    def use_landed_floor(self, floor: Any) -> None:
        self.floor = floor

    def get(self, name: str) -> Any:
        return SimpleNamespace(topic_id=self.topic_id) if name == "orders" else None

    def by_id(self, topic_id: UUID) -> Any:
        return self.get("orders") if topic_id == self.topic_id else None

    def partition(self, name: str, index: int) -> Any:
        if not self.is_here:
            raise UnknownTopic(f"{name}-{index} is not here")
        return SimpleNamespace(is_leader=self.is_leader, log_start=7)


class ReportingPipelines:
    """Pipelines that report to a landed board through its API."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.pipelines = pipelines
        self.topics = Topics()
        self.board = LandedBoard(pipelines, cast("Any", self.topics))
        self.board.start()

    async def declare(self, name: str, **settings: str) -> None:
        await self.pipelines.create(name, PipelineKind.LAND, settings)

    async def report(self, name: str, offset: int, topic_id: UUID | None = None, lake: str = "") -> None:
        pipeline = self.pipelines.get(name)
        reported = LandedTopic(topic_id=topic_id or self.topics.topic_id, offsets={0: offset})
        pipeline_id = uuid4() if pipeline is None else pipeline.pipeline_id
        body = msgspec.msgpack.encode(
            RecordLandedRequest(pipeline_id=pipeline_id, lake=lake, format="delta", topics=[reported])
        )
        assert (
            await PipelineLanded(self.board).handle(msgspec.msgpack.decode(body, type=RecordLandedRequest))
            == Response()
        )

    def floor(self) -> int:
        found_floor: int = self.topics.floor(PLACE)
        return found_floor


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[ReportingPipelines]:
    catalog = Catalog.open_folder(tmp_path)
    catalog.prepare()
    yield ReportingPipelines(Pipelines(CatalogDeclarations(catalog), ManualClock()))
    catalog.close()


async def test_records_that_are_not_landed_are_kept(reporting: ReportingPipelines) -> None:
    assert reporting.floor() == 0
    await reporting.declare("one", topics="orders,bills")
    assert reporting.floor() == 0
    await reporting.report("one", 30)
    assert reporting.floor() == 30
    assert reporting.topics.floor(TopicPartition("unknown", PartitionIndex(0))) == 0


async def test_every_pipeline_that_lands_the_topic_counts(reporting: ReportingPipelines) -> None:
    await reporting.declare("one", topics="orders")
    await reporting.declare("all", pattern="ord.*", lake="/lake")
    await reporting.declare("other", topics="bills")
    await reporting.report("one", 30)
    assert reporting.floor() == 0
    await reporting.report("all", 20, lake="/lake")
    assert reporting.floor() == 20
    await reporting.pipelines.delete("all")
    assert reporting.floor() == 30


async def test_a_recreated_topic_starts_over(reporting: ReportingPipelines) -> None:
    await reporting.declare("one", topics="orders")
    await reporting.report("one", 30)
    reporting.topics.topic_id = uuid4()
    assert reporting.floor() == 0
    await reporting.report("one", 3)
    assert reporting.floor() == 3
    await reporting.report("one", 90, topic_id=uuid4())
    await reporting.report("nobody", 90)
    assert reporting.floor() == 3


async def test_only_the_leader_decides(reporting: ReportingPipelines) -> None:
    await reporting.declare("one", topics="orders")
    await reporting.report("one", 30)
    reporting.topics.is_leader = False
    assert reporting.floor() == 7
    reporting.topics.is_here = False
    assert reporting.floor() == 0


async def test_offsets_landed_into_another_lake_do_not_count(reporting: ReportingPipelines) -> None:
    await reporting.declare("one", topics="orders")
    await reporting.report("one", 30, lake="/by/hand")
    assert reporting.floor() == 0
    await reporting.report("one", 30)
    await reporting.pipelines.alter("one", {"every.ms": "1000"})
    assert reporting.floor() == 30
    await reporting.pipelines.alter("one", {"lake": "/other"})
    assert reporting.floor() == 0, "the tables of the other lake have nothing yet"
    await reporting.report("one", 30)
    assert reporting.floor() == 0, "a job that ended with the change came late"
    await reporting.report("one", 20, lake="/other")
    assert reporting.floor() == 20
    await reporting.pipelines.delete("one")
    assert reporting.floor() == 0
    await reporting.declare("one", topics="orders", lake="/other")
    assert reporting.floor() == 0, "it has the name of the other and nothing else"


async def test_pipelines_are_read_on_change_and_not_by_retention(
    reporting: ReportingPipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reporting.declare("one", pattern="ord.*")
    await reporting.report("one", 30)
    assert reporting.floor() == 30
    monkeypatch.setattr(LandSettings, "from_strings", lambda _: pytest.fail("settings were read again"))
    monkeypatch.setattr("millstream.core.pipeline.compile_regex", lambda _: pytest.fail("compiled again"))
    reporting.topics.version += 1
    assert reporting.floor() == 30
