"""How far topics were landed, as retention asks for it."""

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
from millstream.protocol.private.pipeline_messages import Landed, LandedTopic
from millstream_testing.clock import ManualClock

PLACE = TopicPartition("orders", PartitionIndex(0))


class Topics:
    """One topic with one partition, as this node carries it."""

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


class Desk:
    """The board, and the request that fills it."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.pipelines = pipelines
        self.topics = Topics()
        self.board = LandedBoard(pipelines, cast("Any", self.topics))
        self.board.start()

    async def declare(self, name: str, **settings: str) -> None:
        await self.pipelines.create(name, PipelineKind.LAND, settings)

    async def report(self, name: str, offset: int, topic_id: UUID | None = None, lake: str = "") -> None:
        found = self.pipelines.get(name)
        reported = LandedTopic(topic_id=topic_id or self.topics.topic_id, offsets={0: offset})
        pipeline_id = uuid4() if found is None else found.pipeline_id
        body = msgspec.msgpack.encode(Landed(pipeline_id=pipeline_id, lake=lake, format="delta", topics=[reported]))
        assert await PipelineLanded(self.board).handle(msgspec.msgpack.decode(body, type=Landed)) == Response()

    def floor(self) -> int:
        found: int = self.topics.floor(PLACE)
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    catalog = Catalog.open_folder(tmp_path)
    catalog.prepare()
    yield Desk(Pipelines(CatalogDeclarations(catalog), ManualClock()))
    catalog.close()


async def test_what_no_one_has_landed_stays(desk: Desk) -> None:
    assert desk.floor() == 0
    await desk.declare("one", topics="orders,bills")
    assert desk.floor() == 0
    await desk.report("one", 30)
    assert desk.floor() == 30
    assert desk.topics.floor(TopicPartition("unknown", PartitionIndex(0))) == 0


async def test_every_pipeline_that_lands_the_topic_counts(desk: Desk) -> None:
    await desk.declare("one", topics="orders")
    await desk.declare("all", pattern="ord.*", lake="/lake")
    await desk.declare("other", topics="bills")
    await desk.report("one", 30)
    assert desk.floor() == 0
    await desk.report("all", 20, lake="/lake")
    assert desk.floor() == 20
    await desk.pipelines.delete("all")
    assert desk.floor() == 30


async def test_a_recreated_topic_restarts(desk: Desk) -> None:
    await desk.declare("one", topics="orders")
    await desk.report("one", 30)
    desk.topics.topic_id = uuid4()
    assert desk.floor() == 0
    await desk.report("one", 3)
    assert desk.floor() == 3
    await desk.report("one", 90, topic_id=uuid4())
    await desk.report("nobody", 90)
    assert desk.floor() == 3


async def test_only_the_leader_decides(desk: Desk) -> None:
    await desk.declare("one", topics="orders")
    await desk.report("one", 30)
    desk.topics.is_leader = False
    assert desk.floor() == 7
    desk.topics.is_here = False
    assert desk.floor() == 0


async def test_what_is_landed_elsewhere_is_not_landed(desk: Desk) -> None:
    await desk.declare("one", topics="orders")
    await desk.report("one", 30, lake="/by/hand")
    assert desk.floor() == 0
    await desk.report("one", 30)
    await desk.pipelines.alter("one", {"every.ms": "1000"})
    assert desk.floor() == 30
    await desk.pipelines.alter("one", {"lake": "/other"})
    assert desk.floor() == 0, "the tables of the other lake have nothing yet"
    await desk.report("one", 30)
    assert desk.floor() == 0, "a job that ended with the change came late"
    await desk.report("one", 20, lake="/other")
    assert desk.floor() == 20
    await desk.pipelines.delete("one")
    assert desk.floor() == 0
    await desk.declare("one", topics="orders", lake="/other")
    assert desk.floor() == 0, "it has the name of the other and nothing else"


async def test_pipelines_are_read_when_they_change_and_not_when_retention_asks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.declare("one", pattern="ord.*")
    await desk.report("one", 30)
    assert desk.floor() == 30
    monkeypatch.setattr(LandSettings, "from_strings", lambda _: pytest.fail("settings were read again"))
    monkeypatch.setattr("millstream.core.pipeline.compile_regex", lambda _: pytest.fail("compiled again"))
    desk.topics.version += 1
    assert desk.floor() == 30
