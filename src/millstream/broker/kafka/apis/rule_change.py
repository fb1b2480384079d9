"""RuleChange (key 32054), version 0: changes the rules of a route pipeline.

    {"name": "director", "put": [{"name": "large", "topic": "orders", "targets": ["large-orders"],
    "condition": "payload.total > 1000", "subscription": ""}], "delete": ["small"]}
    answer: {"error": 0, "message": null, "rules": 17, "notes": []}

Rules are put in the place of those that have their names. All of it is done, or nothing. A rule that takes the filter
of a subscription names it instead of a condition. A condition that is wrong is refused with the place. What is to be
deleted and is not there is RESOURCE_NOT_FOUND. Notes are as in PipelineCreate.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.pipelines.advice import PipelineAdvice
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.errors import FilterError, InvalidPipeline
from millstream.core.pipeline import DECODE, NO_DECODING, Rule
from millstream.core.subscription import FILTER
from millstream.protocol.private.pipeline_messages import RULES_KEY, RuleChangeResponse, RuleChanges


class RuleChange(PrivateApi[RuleChanges, RuleChangeResponse]):
    """Changes rules."""

    key = RULES_KEY
    request_type = RuleChanges
    response_type = RuleChangeResponse

    def __init__(self, pipelines: Pipelines, subscriptions: Subscriptions, notes: PipelineAdvice) -> None:
        self._pipelines = pipelines
        self._subscriptions = subscriptions
        self._notes = notes

    async def needs(self, request: RuleChanges) -> Sequence[Need]:
        """ALTER on the cluster: a pipeline acts with the rights of its node."""
        return [(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: RuleChanges) -> RuleChangeResponse:
        """Change them durably."""
        rules = [rule.rule() for rule in request.put]
        now = await self._pipelines.find(request.name)
        await check_filters_of(rules, self._subscriptions, decode=now.overrides.get(DECODE, ""))
        changed = await self._pipelines.change_rules(
            request.name, rules, gone=request.delete, validate_only=request.validate_only
        )
        return RuleChangeResponse(rules=len(changed.rules), notes=self._notes.notes_for(changed))


async def check_filters_of(rules: Collection[Rule], subscriptions: Subscriptions, *, decode: str) -> None:
    """Raise `UnknownSubscription` when a rule takes the filter of one that is not there.

    Raise `InvalidPipeline` for a condition that is wrong, or looks at what is not decoded: the pipeline could route
    nothing at all with it.
    """
    conditions = {rule.name: rule.condition for rule in rules if rule.condition}
    for rule in rules:
        if rule.subscription:
            conditions[rule.name] = (await subscriptions.find(rule.subscription)).overrides.get(FILTER, "")
    if any(conditions.values()):
        # Thousands of them take seconds.
        await asyncio.to_thread(_check_conditions, conditions, decode)


def _check_conditions(conditions: Mapping[str, str], decode: str) -> None:
    from millstream.protocol.filter.filter import compile_filter

    for name, condition in conditions.items():
        try:
            if condition and compile_filter(condition).uses.payload and decode == NO_DECODING:
                raise InvalidPipeline(f"rule {name!r} reads payloads, which decode={NO_DECODING} does not decode")
        except FilterError as error:
            raise InvalidPipeline(f"rule {name!r}: {error}") from error
