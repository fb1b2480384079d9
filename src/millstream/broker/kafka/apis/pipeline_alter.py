"""PipelineAlter (key 32051), version 0: changes, starts, stops or parks a pipeline.

    {"name": "land-orders", "settings": {"every.ms": "10000", "compact": null}, "wanted": true, "parked": null}
    answer: {"error": 0, "message": null, "notes": []}

A setting of null goes back to its default. `wanted` starts or stops it, null leaves that as it is. `parked` is the
reason why it is not tried any more, null leaves that as it is. A pipeline that is parked is tried again when it is
started, or when its settings or rules are changed. An unknown name is RESOURCE_NOT_FOUND. Notes are as in
PipelineCreate, about settings that are changed.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.apis.rule_change import check_filters_of
from millstream.broker.pipelines.advice import PipelineAdvice
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.pipeline import DECODE, NO_DECODING
from millstream.protocol.private.pipeline_messages import ALTER_KEY, AlterPipelineResponse, PipelineChanges


class PipelineAlter(PrivateApi[PipelineChanges, AlterPipelineResponse]):
    """Changes pipelines."""

    key = ALTER_KEY
    request_type = PipelineChanges
    response_type = AlterPipelineResponse

    def __init__(self, pipelines: Pipelines, subscriptions: Subscriptions, notes: PipelineAdvice) -> None:
        self._pipelines = pipelines
        self._subscriptions = subscriptions
        self._notes = notes

    async def needs(self, request: PipelineChanges) -> Sequence[Need]:
        """ALTER on the cluster: a pipeline acts with the rights of its node."""
        return [(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: PipelineChanges) -> AlterPipelineResponse:
        """Change it durably."""
        notes: list[str] = []
        if request.settings or request.validate_only:
            notes = await self._change_settings(request)
        if request.validate_only:
            return AlterPipelineResponse(notes=notes)
        if request.wanted is not None:
            await (self._pipelines.start if request.wanted else self._pipelines.stop)(request.name)
        if request.parked:
            await self._pipelines.park(await self._pipelines.find(request.name), request.parked)
        return AlterPipelineResponse(notes=notes)

    async def _change_settings(self, request: PipelineChanges) -> list[str]:
        if request.settings.get(DECODE) == NO_DECODING:
            now = await self._pipelines.find(request.name)
            await check_filters_of(now.rules, self._subscriptions, decode=NO_DECODING)
        changed = await self._pipelines.alter(request.name, request.settings, validate_only=request.validate_only)
        return self._notes.notes_for(changed)
