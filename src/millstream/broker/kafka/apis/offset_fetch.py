"""OffsetFetch (key 9), versions 1 to 10: returns the committed offsets of groups.

An offset of -1 means that none is committed. From 2 on, a null list of topics means all of them, including partitions
whose committed offset is -1. Every response is durable: it waits for offsets whose append is not acknowledged yet. With
`require_stable` (from 7 on), a partition whose offset an open transaction is about to change gets
UNSTABLE_OFFSET_COMMIT. Version notes: up to 7 for one group, from 8 on for several; 1 has no error for the group, so
that each partition carries it. Versions 2 to 7 repeat it in each partition, because aiokafka reads only that and would
otherwise start again from the beginning. 10 names topics by id, where an unknown one gets UNKNOWN_TOPIC_ID. From 9 on a
member of a consumer group sends its id and epoch: an unknown one gets UNKNOWN_MEMBER_ID, another epoch
STALE_MEMBER_EPOCH.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.offset_fetch.v7 import response as single
from kio.schema.offset_fetch.v9 import response as by_name
from kio.schema.offset_fetch.v10 import response as by_id
from kio.schema.types import TopicName
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import FetchedOffset, FetchedOffsets
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_FIRST_WITH_MANY: Final = 8
_FIRST_BY_ID: Final = 10
_NO_OFFSET: Final = FetchedOffset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicQuery:
    """Partitions of one topic, by its name or by its id, as the version has it."""

    name: str = ""
    topic_id: UUID | None = None
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """The request for one group; None means all its topics."""

    version: int
    group_id: str
    member_id: str | None = None
    member_epoch: int = -1
    require_stable: bool = False
    topics: tuple[TopicQuery, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicResponse:
    name: str
    topic_id: UUID | None
    partitions: tuple[tuple[int, FetchedOffset, ErrorCode], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResponse:
    """Offsets of one group, or why there are none."""

    group_id: str
    topics: tuple[TopicResponse, ...]
    code: ErrorCode = ErrorCode.none


class OffsetFetch(Api[tuple[GroupQuery, ...], tuple[GroupResponse, ...]]):
    key = 9
    versions = (1, 10)
    changes = None
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    async def handle(self, request: tuple[GroupQuery, ...], client: ClientInfo) -> tuple[GroupResponse, ...]:
        if len(request) == 1:
            return (await self._fetch(request[0]),)
        return tuple(await asyncio.gather(*(self._fetch(query) for query in request)))

    def refuse(self, query: GroupQuery, code: ErrorCode) -> GroupResponse:
        in_partitions = query.version < _FIRST_WITH_MANY
        topics = tuple(self.refuse_topic(topic, code) for topic in query.topics or ()) if in_partitions else ()
        return GroupResponse(group_id=query.group_id, topics=topics, code=code)

    @staticmethod
    def refuse_topic(topic: TopicQuery, code: ErrorCode) -> TopicResponse:
        return TopicResponse(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=tuple((index, _NO_OFFSET, code) for index in topic.partitions),
        )

    def upgrade(self, version: int, request: Any) -> tuple[GroupQuery, ...]:
        """Convert every version to one form."""
        groups = request.groups if version >= _FIRST_WITH_MANY else (request,)
        return tuple(
            GroupQuery(
                version=version,
                group_id=group.group_id,
                member_id=getattr(group, "member_id", None),
                member_epoch=getattr(group, "member_epoch", -1),
                require_stable=getattr(request, "require_stable", False),
                topics=None if group.topics is None else tuple(_topic_query(topic) for topic in group.topics),
            )
            for group in groups
        )

    def downgrade(self, version: int, response: tuple[GroupResponse, ...]) -> Any:
        """Respond in the shape of the version."""
        if version >= _FIRST_BY_ID:
            return _response(response, by_id, "topic_id")
        if version >= _FIRST_WITH_MANY:
            return reshape(_response(response, by_name, "name"), load_response_class(self.key, version))
        return reshape(_single_response(response[0]), load_response_class(self.key, version))

    async def _fetch(self, query: GroupQuery) -> GroupResponse:
        try:
            if query.topics is None:
                fetched = await self._fetch_offsets(query, None)
                return GroupResponse(group_id=query.group_id, topics=self._all_topics(query.version, fetched))
            return GroupResponse(group_id=query.group_id, topics=await self._fetch_topics(query, query.topics))
        except MillstreamError as error:
            return self.refuse(query, error_code(error))

    async def _fetch_topics(self, query: GroupQuery, topics: tuple[TopicQuery, ...]) -> tuple[TopicResponse, ...]:
        names = [self._name_of(query.version, topic) for topic in topics]
        requested: dict[str, list[int]] = {}
        for name, topic in zip(names, topics, strict=True):
            if name is not None:
                requested.setdefault(name, []).extend(topic.partitions)
        fetched = await self._fetch_offsets(query, requested)
        return tuple(
            self.refuse_topic(topic, ErrorCode.unknown_topic_id)
            if name is None
            else _topic_response(topic, fetched[name])
            for name, topic in zip(names, topics, strict=True)
        )

    async def _fetch_offsets(self, query: GroupQuery, requested: dict[str, list[int]] | None) -> FetchedOffsets:
        return await self._groups.fetch(
            query.group_id,
            requested,
            member_id=query.member_id,
            epoch=query.member_epoch,
            require_stable=query.require_stable,
        )

    def _all_topics(self, version: int, fetched: FetchedOffsets) -> tuple[TopicResponse, ...]:
        responses = []
        for name, offsets in fetched.items():
            topic = self._topics.get(name)
            topic_id = None if topic is None else topic.topic_id
            if topic_id is None and version >= _FIRST_BY_ID:
                # A topic without an id cannot be named any more.
                continue
            query = TopicQuery(name=name, topic_id=topic_id, partitions=tuple(offsets))
            responses.append(_topic_response(query, offsets))
        return tuple(responses)

    def _name_of(self, version: int, topic: TopicQuery) -> str | None:
        if version < _FIRST_BY_ID:
            return topic.name
        known = None if topic.topic_id is None else self._topics.by_id(topic.topic_id)
        return None if known is None else known.name


def _topic_query(topic: Any) -> TopicQuery:
    return TopicQuery(
        name=getattr(topic, "name", ""),
        topic_id=getattr(topic, "topic_id", None),
        partitions=tuple(topic.partition_indexes),
    )


def _topic_response(topic: TopicQuery, offsets: Any) -> TopicResponse:
    return TopicResponse(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=tuple(_stable_offset(index, offsets[index]) for index in topic.partitions),
    )


def _stable_offset(index: int, offset: FetchedOffset) -> tuple[int, FetchedOffset, ErrorCode]:
    if offset.is_stable:
        return index, offset, ErrorCode.none
    return index, _NO_OFFSET, ErrorCode.unstable_offset_commit


def _response(groups: tuple[GroupResponse, ...], shape: Any, key: str) -> Any:
    """Build a response of the messages in `shape`, which name topics by the field `key`."""
    return shape.OffsetFetchResponse(
        throttle_time=NO_THROTTLE,
        groups=tuple(
            shape.OffsetFetchResponseGroup(
                group_id=group.group_id,
                topics=tuple(
                    shape.OffsetFetchResponseTopics(
                        **{key: getattr(topic, key)},
                        partitions=_partitions(shape.OffsetFetchResponsePartitions, topic),
                    )
                    for topic in group.topics
                ),
                error_code=group.code,
            )
            for group in groups
        ),
    )


def _single_response(group: GroupResponse) -> single.OffsetFetchResponse:
    return single.OffsetFetchResponse(
        throttle_time=NO_THROTTLE,
        topics=tuple(
            single.OffsetFetchResponseTopic(
                name=TopicName(topic.name), partitions=_partitions(single.OffsetFetchResponsePartition, topic)
            )
            for topic in group.topics
        ),
        error_code=group.code,
    )


def _partitions(kind: Any, topic: TopicResponse) -> tuple[Any, ...]:
    """Return the partitions of a topic as the class of one version, which all have the same fields."""
    return tuple(
        kind(
            partition_index=i32(index),
            committed_offset=i64(fetched.offset),
            committed_leader_epoch=i32(fetched.leader_epoch),
            metadata=fetched.metadata,
            error_code=code,
        )
        for index, fetched, code in topic.partitions
    )
