"""PipelineDelete (key 32052), version 0: Millstream's private request that takes a pipeline away.

    {"name": "land-orders"}     answer: {"error": 0, "message": null}

Its rules go with it; what it has written stays. An unknown name is RESOURCE_NOT_FOUND.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.broker.kafka.api import PrivateApi
from millstream.broker.pipelines.declared import Pipelines
from millstream.protocol.private.pipeline_messages import DELETE_KEY


class GonePipeline(msgspec.Struct, frozen=True):
    """Which one."""

    name: str


class PipelineDelete(PrivateApi[GonePipeline]):
    """Deletes pipelines."""

    key = DELETE_KEY
    asks = GonePipeline

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    async def handle(self, request: GonePipeline) -> dict[str, Any]:
        """Take it out durably."""
        await self._pipelines.delete(request.name)
        return {}
