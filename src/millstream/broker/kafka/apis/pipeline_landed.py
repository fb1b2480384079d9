"""PipelineLanded (key 32055), version 0: reports how far topics are landed.

    {"pipeline_id": "…", "lake": "", "format": "delta", "topics": [{"topic_id": "…", "offsets": {"0": 1200, "1": 900}}]}
    answer: {"error": 0, "message": null}

The driver sends it to all nodes after each batch, with the lake and the format that the pipeline is declared with. A
topic with `retention.until.landed` keeps what lies beyond.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.pipelines.landed_board import LandedBoard
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.protocol.private.message import Response
from millstream.protocol.private.pipeline_messages import LANDED_KEY, Landed


class PipelineLanded(PrivateApi[Landed, Response]):
    """Hears how far pipelines have come."""

    key = LANDED_KEY
    request_type = Landed
    response_type = Response

    def __init__(self, board: LandedBoard) -> None:
        self._board = board

    async def needs(self, request: Landed) -> Sequence[Need]:
        """CLUSTER_ACTION: only processes of nodes send it."""
        return [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: Landed) -> Response:
        """Note it."""
        for topic in request.topics:
            self._board.take(request.pipeline_id, (request.lake, request.format), topic.topic_id, topic.offsets)
        return Response()
