"""Tells the brokers how far topics were landed, for topics whose retention waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

import msgspec

from millstream.core.ids import NodeId
from millstream.core.pipeline import LandSettings, Pipeline
from millstream.protocol.private.pipeline_messages import LANDED_KEY, Landed, LandedTopic
from millstream.protocol.wire.client import Client


async def tell_landed(client: Client, pipeline: Pipeline, landed: Mapping[str, Mapping[int, int]]) -> None:
    """Tell every node, by the id of the topic and the partition, the next offset that is not landed."""
    settings = LandSettings.from_strings(pipeline.overrides)
    topics = [LandedTopic(topic_id=UUID(topic_id), offsets=dict(offsets)) for topic_id, offsets in landed.items()]
    if not topics:
        return
    told = Landed(pipeline_id=pipeline.pipeline_id, lake=settings.lake, format=settings.format, topics=topics)
    body = msgspec.json.encode(told)
    nodes = (await client.metadata(())).nodes
    # Who does not hear it keeps more than it must, until the next batch tells it again.
    await asyncio.gather(*(client.private(NodeId(node), LANDED_KEY, body) for node in nodes), return_exceptions=True)
