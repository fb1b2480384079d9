"""PipelineList (key 32053), version 0: lists pipelines and their progress.

    {"names": ["land-orders"]}, or null for all
    answer: {"error": 0, "message": null, "pipelines": [{"name": …, "pipeline_id": …, "kind": "land", "group": …,
    "settings": {…}, "overrides": {…}, "wanted": true, "parked": "", "created_ms": …, "version": …, "rules": [{…}],
    "lag": …, "report": {"state": "running", "rows": …, "rows_per_s": …, "lag": …, "batches": …, "restarts": …,
    "last_error": "", "last_error_ms": 0, "failing_ms": 0, "counts": {…}, "node": 1}}]}

Every node knows all pipelines; `report` and `lag` are null unless the node that is asked runs the driver, so a client
asks all nodes. The description with the highest `version`, which counts changes, is current. Rules, of which there may
be many, are only returned for pipelines that are named.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.report_board import PipelineBoard
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation
from millstream.core.pipeline import Pipeline, Rule
from millstream.protocol.private.pipeline_messages import LIST_KEY, ListPipelinesResponse, PipelineNames, RuleMessage


class PipelineList(PrivateApi[PipelineNames, ListPipelinesResponse]):
    """Lists pipelines."""

    key = LIST_KEY
    request_type = PipelineNames
    response_type = ListPipelinesResponse

    def __init__(self, pipelines: Pipelines, board: PipelineBoard) -> None:
        self._pipelines = pipelines
        self._board = board

    async def needs(self, request: PipelineNames) -> Sequence[Need]:
        """Nothing: the list contains the pipelines whose group the client may describe."""
        return ()

    def redact(self, response: ListPipelinesResponse, rights: Rights) -> ListPipelinesResponse:
        """Leave out the pipelines that the client may not describe."""
        visible = [one for one in response.pipelines if rights.group(Operation.DESCRIBE, one["group"])]
        return msgspec.structs.replace(response, pipelines=visible)

    async def handle(self, request: PipelineNames) -> ListPipelinesResponse:
        """Describe some or all pipelines."""
        if request.names is None:
            return ListPipelinesResponse(pipelines=[self._describe(one, ()) for one in self._pipelines.all()])
        wanted = [await self._pipelines.find(name) for name in request.names]
        return ListPipelinesResponse(pipelines=[self._describe(one, one.rules) for one in wanted])

    def _describe(self, pipeline: Pipeline, rules: Iterable[Rule]) -> dict[str, Any]:
        return {
            "name": pipeline.name,
            "pipeline_id": str(pipeline.pipeline_id),
            "kind": pipeline.kind,
            "group": pipeline.group,
            "settings": pipeline.settings.as_strings(),
            "overrides": pipeline.shown_overrides(),
            "wanted": pipeline.is_wanted,
            "parked": pipeline.idle_reason,
            "created_ms": pipeline.created_ms,
            "version": pipeline.version,
            "rules": [RuleMessage.of(rule) for rule in rules],
            "lag": self._board.lag(pipeline.name),
            "report": self._board.describe(pipeline.name),
        }
