"""PipelineAlter (key 32051), version 0: Millstream's private request that changes, starts, stops or parks a pipeline.

    {"name": "land-orders", "settings": {"every.ms": "10000", "compact": null}, "wanted": true, "parked": null}
    answer: {"error": 0, "message": null}

A setting of null goes back to its default. `wanted` starts or stops it, null leaves that as it is. `parked` is the
reason why it is not tried any more, null leaves that as it is. A pipeline that is parked is tried again when it is
started, or when its settings or rules are changed. An unknown name is RESOURCE_NOT_FOUND.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from typing import Any

from millstream.cluster.pipelines import Pipelines
from millstream.kafka.private import PrivateApi
from millstream.wire.pipeline_messages import ALTER_KEY, PipelineChanges


class PipelineAlter(PrivateApi[PipelineChanges]):
    """Changes pipelines."""

    key = ALTER_KEY
    asks = PipelineChanges

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    async def handle(self, request: PipelineChanges) -> dict[str, Any]:
        """Change it durably."""
        if request.settings or request.validate_only:
            await self._pipelines.alter(request.name, request.settings, validate_only=request.validate_only)
        if request.validate_only:
            return {}
        if request.wanted is not None:
            await (self._pipelines.start if request.wanted else self._pipelines.stop)(request.name)
        if request.parked:
            await self._pipelines.park(await self._pipelines.find(request.name), request.parked)
        return {}
