"""PipelineDelete (key 32052), version 0: deletes a pipeline.

    {"name": "land-orders"}     answer: {"error": 0, "message": null}

Its rules are deleted with it; its tables stay. An unknown name is RESOURCE_NOT_FOUND.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from millstream.broker.kafka.api import PrivateApi
from millstream.broker.pipelines.declared import Pipelines
from millstream.protocol.private.message import Response
from millstream.protocol.private.pipeline_messages import DELETE_KEY, DeletePipelineRequest


class PipelineDelete(PrivateApi[DeletePipelineRequest, Response]):
    """Deletes pipelines."""

    key = DELETE_KEY
    request_type = DeletePipelineRequest
    response_type = Response

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    async def handle(self, request: DeletePipelineRequest) -> Response:
        """Take it out durably."""
        await self._pipelines.delete(request.name)
        return Response()
