"""DeleteShareGroupOffsets (key 92), version 0: deletes the offsets of a share group for some topics (KIP-932).

The group must have no members (NON_EMPTY_GROUP). It then starts on these topics again, at the position of its
`share.auto.offset.reset`.
"""

from __future__ import annotations

from kio.schema.delete_share_group_offsets.v0.request import DeleteShareGroupOffsetsRequest
from kio.schema.delete_share_group_offsets.v0.response import (
    DeleteShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsResponseTopic,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.kafka.share_consumers import ShareOffsets
from millstream.broker.security.changes import offsets_changed
from millstream.core.errors import GroupNotEmpty, MillstreamError, UnknownTopic


class DeleteShareGroupOffsets(Api[DeleteShareGroupOffsetsRequest, DeleteShareGroupOffsetsResponse]):
    key = 92
    versions = (0, 0)
    changes = staticmethod(offsets_changed)

    def __init__(self, groups: GroupCoordinator, offsets: ShareOffsets, topics: Topics) -> None:
        self._groups = groups
        self._offsets = offsets
        self._topics = topics

    async def handle(
        self, request: DeleteShareGroupOffsetsRequest, client: ClientInfo
    ) -> DeleteShareGroupOffsetsResponse:
        group = await self._groups.describe_share_group(request.group_id)
        if group.members:
            raise GroupNotEmpty(f"share group {request.group_id!r} has members")
        responses = [await self._delete_offsets(request.group_id, topic.topic_name) for topic in request.topics]
        return DeleteShareGroupOffsetsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, responses=tuple(responses)
        )

    async def _delete_offsets(self, group_id: str, name: str) -> DeleteShareGroupOffsetsResponseTopic:
        topic = self._topics.get(name)
        error: MillstreamError | None = None
        if topic is None:
            error = UnknownTopic(f"there is no topic {name!r}")
        else:
            try:
                await self._offsets.forget(group_id, topic)
            except MillstreamError as failed:
                error = failed
        return DeleteShareGroupOffsetsResponseTopic(
            topic_name=TopicName(name),
            topic_id=None if topic is None else topic.topic_id,
            error_code=ErrorCode.none if error is None else error_code(error),
            error_message=None if error is None else error_message(error),
        )
