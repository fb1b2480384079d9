"""PipelineCreate (key 32050), version 0: creates a pipeline.

    {"name": "land-orders", "kind": "land", "settings": {"topics": "orders"}, "rules": [], "wanted": true,
    "validate_only": false}
    answer: {"error": 0, "message": null, "pipeline_id": "…", "notes": ["There is no topic 'orders' yet; …"]}

A name that is taken is DUPLICATE_RESOURCE. Settings are those of docs/configuration.md; rules are written as in
RuleChange. Notes are what its owner should know, and no reason to refuse it.

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
from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import DECODE, GROUP_PREFIX, kind_of
from millstream.protocol.private.pipeline_messages import CREATE_KEY, CreatePipelineResponse, NewPipeline


class PipelineCreate(PrivateApi[NewPipeline, CreatePipelineResponse]):
    """Declares pipelines."""

    key = CREATE_KEY
    request_type = NewPipeline
    response_type = CreatePipelineResponse

    def __init__(self, pipelines: Pipelines, subscriptions: Subscriptions, notes: PipelineAdvice) -> None:
        self._pipelines = pipelines
        self._subscriptions = subscriptions
        self._notes = notes

    async def needs(self, request: NewPipeline) -> Sequence[Need]:
        """ALTER on the cluster: a pipeline acts with the rights of its node."""
        return [(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: NewPipeline) -> CreatePipelineResponse:
        """Declare it durably."""
        group = f"{GROUP_PREFIX}{request.name}"
        if self._subscriptions.get(group) is not None:
            raise InvalidPipeline(f"the pipeline's group {group!r} is a subscription's; choose another name")
        rules = [rule.rule() for rule in request.rules]
        await check_filters_of(rules, self._subscriptions, decode=request.settings.get(DECODE, ""))
        made = await self._pipelines.create(
            request.name,
            kind_of(request.kind),
            request.settings,
            rules=rules,
            is_wanted=request.wanted,
            validate_only=request.validate_only,
        )
        return CreatePipelineResponse(pipeline_id=str(made.pipeline_id), notes=self._notes.notes_for(made))
