"""The pipelines that read a topic, and how far each of them has come in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

from millstream.client.admin.backlog import Backlog, Backlogs, Reader, reader_of
from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.protocol.private.pipeline_messages import ToldRule
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata


class Reading(NamedTuple):
    """A pipeline that reads a topic, and how far it is; None if that is not known now."""

    reader: Reader
    backlog: Backlog | None

    def sentence(self, topic: str) -> str:
        """What whoever is about to delete the topic should know."""
        lands = self.reader.kind is PipelineKind.LAND
        verb, done = ("lands", "landed") if lands else ("reads", "taken")
        said = f"Pipeline {self.reader.name} {verb} {topic}"
        if self.backlog is None:
            return f"{said}; how much of it is {done} is not known now."
        left = self.backlog.left
        if left:
            messages = "1 message is" if left == 1 else f"{left:,} messages are"
            return f"{said}, of which {messages} not {done} yet."
        which = "message since it began" if self.reader.from_latest else "message"
        return f"{said}; every {which} is {done}."


def pipeline_of(told: Mapping[str, Any]) -> Pipeline:
    """A pipeline as nodes tell of it; it has its rules if it was asked for by name."""
    return Pipeline(
        pipeline_id=UUID(told["pipeline_id"]),
        name=told["name"],
        kind=PipelineKind(told["kind"]),
        overrides=told["overrides"],
        rules=tuple(ToldRule(**rule).rule() for rule in told["rules"]),
    )


async def readings_of(client: Client, topic: TopicMetadata) -> list[Reading]:
    """The pipelines that read a topic, by their names; empty if that cannot be told."""
    # Another kind of broker answers nothing that could be read.
    with suppress(MillstreamError, ValueError):
        pipelines = PipelineClient(client)
        found = await pipelines.describe()
        # Rules are told only of pipelines that are named.
        routes = [told["name"] for told in found if told["kind"] == PipelineKind.ROUTE]
        ruled = {told["name"]: told for told in await pipelines.describe(routes)} if routes else {}
        declared = [reader_of(pipeline_of(ruled.get(told["name"], told))) for told in found]
        readers = [one for one in declared if one is not None and one.takes(topic)]
        backlogs: Mapping[str, Backlog] = {}
        with suppress(MillstreamError):
            backlogs = await Backlogs(client).in_topic(readers, topic)
        return [Reading(one, backlogs.get(one.name)) for one in readers]
    return []
