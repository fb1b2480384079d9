"""The pipelines that read a topic, and how far each of them has come in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

from millstream.admin.groups import committed_offsets
from millstream.admin.pipelines import PipelineClient
from millstream.admin.position import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from millstream.model.errors import MillstreamError
from millstream.model.ids import PartitionIndex
from millstream.model.pipeline import LandSettings, Pipeline, PipelineKind
from millstream.model.topic import TopicPartition
from millstream.wire.client import Client
from millstream.wire.pipeline_messages import ToldRule


class Reading(NamedTuple):
    """A pipeline that reads a topic."""

    pipeline: str
    kind: PipelineKind
    passed: int
    """Messages that are there, and that it has behind it."""
    left: int
    """Messages that it has not taken yet."""

    def sentence(self, topic: str) -> str:
        """What whoever is about to delete the topic should know."""
        verb, done = ("lands", "landed") if self.kind is PipelineKind.LAND else ("reads", "taken")
        if not self.left:
            return f"Pipeline {self.pipeline} {verb} {topic}; every message is {done}."
        messages = "1 message is" if self.left == 1 else f"{self.left:,} messages are"
        return f"Pipeline {self.pipeline} {verb} {topic}, of which {messages} not {done} yet."


def pipeline_of(told: Mapping[str, Any]) -> Pipeline:
    """A pipeline as nodes tell of it; it has its rules if it was asked for by name."""
    return Pipeline(
        pipeline_id=UUID(told["pipeline_id"]),
        name=told["name"],
        kind=PipelineKind(told["kind"]),
        overrides=told["overrides"],
        rules=tuple(ToldRule(**rule).rule() for rule in told["rules"]),
    )


async def readings_of(client: Client, topic: str) -> list[Reading]:
    """The pipelines that read a topic, by their names; empty if that cannot be told."""
    # Another kind of broker answers nothing that could be read.
    with suppress(MillstreamError, ValueError):
        pipelines = PipelineClient(client)
        found = await pipelines.describe()
        # Rules are told only of pipelines that are named.
        routes = [told["name"] for told in found if told["kind"] == PipelineKind.ROUTE]
        ruled = {told["name"]: told for told in await pipelines.describe(routes)} if routes else {}
        declared = [pipeline_of(ruled.get(told["name"], told)) for told in found]
        return [await reading_of(client, one, topic) for one in declared if reads(one, topic)]
    return []


def reads(pipeline: Pipeline, topic: str) -> bool:
    """Whether a pipeline reads a topic, as far as it can be told without Spark."""
    with suppress(MillstreamError):
        settings = pipeline.settings
        return settings.takes(topic) if isinstance(settings, LandSettings) else topic in pipeline.flows()
    return False


async def reading_of(client: Client, pipeline: Pipeline, topic: str) -> Reading:
    """How far a pipeline has come in a topic, by the offsets of its group."""
    partitions = sorted((await client.metadata([topic])).topics[topic].partitions)
    starts = await client.list_offsets(topic, dict.fromkeys(partitions, EARLIEST_TIMESTAMP))
    ends = await client.list_offsets(topic, dict.fromkeys(partitions, LATEST_TIMESTAMP))
    committed = await committed_offsets(client, pipeline.group)
    passed = left = 0
    for number in partitions:
        first, end = starts[number].offset, ends[number].offset
        place = committed.get(TopicPartition(topic, PartitionIndex(number)), first)
        passed += max(0, min(place, end) - first)
        left += max(0, end - max(place, first))
    return Reading(pipeline.name, pipeline.kind, passed, left)
