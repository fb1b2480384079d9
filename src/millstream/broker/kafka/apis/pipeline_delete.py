"""PipelineDelete (key 32052), version 0: deletes a pipeline.

    {"name": "land-orders"}     answer: {"error": 0, "message": null}

Its rules are deleted with it; its tables stay. An unknown name is RESOURCE_NOT_FOUND.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.protocol.private.message import Response
from millstream.protocol.private.pipeline_messages import DELETE_KEY, DeletePipelineRequest


class PipelineDelete(PrivateApi[DeletePipelineRequest, Response]):
    """Deletes pipelines."""

    key = DELETE_KEY
    request_type = DeletePipelineRequest
    response_type = Response

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    async def needs(self, request: DeletePipelineRequest) -> Sequence[Need]:
        """ALTER on the cluster: a pipeline acts with the rights of its node."""
        return [(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: DeletePipelineRequest) -> Response:
        """Take it out durably."""
        await self._pipelines.delete(request.name)
        return Response()
