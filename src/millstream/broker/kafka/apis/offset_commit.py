"""OffsetCommit (key 8), versions 2 to 10: commits the offsets of a group, durably.

Without generation and member id it comes from a consumer outside any group, and is taken if the group has no members.
A partition that does not exist gets UNKNOWN_TOPIC_OR_PARTITION, or UNKNOWN_TOPIC_ID from 10 on, where topics are
named by id; the others are kept. Version notes: 2 to 4 can ask for a retention of their own; 6 adds the leader epoch;
7 adds static members; a group that does not exist is GROUP_ID_NOT_FOUND from 9 on and ILLEGAL_GENERATION before.
Members of consumer groups commit from 9 on (UNSUPPORTED_VERSION before), and send their epoch instead of a generation
(STALE_MEMBER_EPOCH if it is one to come, or if the member did not have the partition in it).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.offset_commit.v9 import response as by_name
from kio.schema.offset_commit.v10 import response as by_id
from kio.schema.types import TopicName
from kio.static.primitive import i32

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import CommitRequest, MemberRef, PartitionCommit
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.kafka.errors import error_code
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_WITH_UNKNOWN_GROUP: Final = 9
_FIRST_BY_ID: Final = 10
_RETENTION_VERSIONS: Final = range(2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCommit:
    """Offsets of one topic, by its name or by its id, as the version has it."""

    name: str = ""
    topic_id: UUID | None = None
    partitions: tuple[PartitionCommit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommitCall:
    """A request of any version."""

    version: int
    member: MemberRef
    topics: tuple[TopicCommit, ...]
    retention_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicResult:
    """The outcome for the offsets of one topic, in the order of the request."""

    name: str
    topic_id: UUID | None
    partitions: tuple[tuple[int, ErrorCode], ...]


class OffsetCommit(Api[OffsetCommitCall, tuple[TopicResult, ...]]):
    """Keeps offsets."""

    key = 8
    versions = (2, 10)
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    async def handle(self, request: OffsetCommitCall, client: ClientInfo) -> tuple[TopicResult, ...]:
        """Keep the offsets of partitions that exist."""
        names = [self._name_of(request.version, topic) for topic in request.topics]
        valid: dict[str, list[PartitionCommit]] = {}
        refused: dict[tuple[str | None, int], ErrorCode] = {}
        for name, topic in zip(names, request.topics, strict=True):
            for commit in topic.partitions:
                code = self._check_exists(name, commit.partition)
                if name is None or code is not None:
                    refused[name, commit.partition] = code or ErrorCode.unknown_topic_id
                else:
                    valid.setdefault(name, []).append(commit)
        refused.update(await self._commit(request, valid))
        return tuple(
            TopicResult(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(
                    (commit.partition, refused.get((name, commit.partition), ErrorCode.none))
                    for commit in topic.partitions
                ),
            )
            for name, topic in zip(names, request.topics, strict=True)
        )

    def refuse(self, topic: TopicCommit, code: ErrorCode) -> TopicResult:
        """Answer all partitions of a topic with one code."""
        partitions = tuple((commit.partition, code) for commit in topic.partitions)
        return TopicResult(name=topic.name, topic_id=topic.topic_id, partitions=partitions)

    def upgrade(self, version: int, request: Any) -> OffsetCommitCall:
        """Bring every version into one form."""
        retention_ms = request.retention_time // _MILLISECOND if version in _RETENTION_VERSIONS else -1
        return OffsetCommitCall(
            version=version,
            member=MemberRef(
                group_id=request.group_id,
                member_id=request.member_id,
                instance_id=getattr(request, "group_instance_id", None),
                generation=request.generation_id_or_member_epoch,
            ),
            topics=tuple(
                TopicCommit(
                    name=getattr(topic, "name", ""),
                    topic_id=getattr(topic, "topic_id", None),
                    partitions=tuple(_partition_commit(partition) for partition in topic.partitions),
                )
                for topic in request.topics
            ),
            retention_ms=None if retention_ms < 0 else retention_ms,
        )

    def downgrade(self, version: int, response: tuple[TopicResult, ...]) -> Any:
        """Answer by id or by name."""
        if version >= _FIRST_BY_ID:
            return by_id.OffsetCommitResponse(
                throttle_time=NO_THROTTLE,
                topics=tuple(
                    by_id.OffsetCommitResponseTopic(
                        topic_id=topic.topic_id,
                        partitions=tuple(
                            by_id.OffsetCommitResponsePartition(partition_index=i32(index), error_code=code)
                            for index, code in topic.partitions
                        ),
                    )
                    for topic in response
                ),
            )
        named = by_name.OffsetCommitResponse(
            throttle_time=NO_THROTTLE,
            topics=tuple(
                by_name.OffsetCommitResponseTopic(
                    name=TopicName(topic.name),
                    partitions=tuple(
                        by_name.OffsetCommitResponsePartition(partition_index=i32(index), error_code=code)
                        for index, code in topic.partitions
                    ),
                )
                for topic in response
            ),
        )
        return reshape(named, load_response_class(self.key, version))

    async def _commit(
        self, request: OffsetCommitCall, valid: dict[str, list[PartitionCommit]]
    ) -> dict[tuple[str | None, int], ErrorCode]:
        """Commit the offsets; return the codes of those that were refused."""
        if not valid:
            return {}
        try:
            answer = await self._groups.commit(
                CommitRequest(
                    member=request.member,
                    topics={name: tuple(commits) for name, commits in valid.items()},
                    retention_ms=request.retention_ms,
                    knows_unknown_group=request.version >= _FIRST_WITH_UNKNOWN_GROUP,
                )
            )
        except MillstreamError as error:
            code = error_code(error)
            return {(name, commit.partition): code for name, commits in valid.items() for commit in commits}
        return {
            (name, partition): error_code(error)
            for name, partitions in answer.items()
            for partition, error in partitions.items()
            if error is not None
        }

    def _name_of(self, version: int, topic: TopicCommit) -> str | None:
        if version < _FIRST_BY_ID:
            return topic.name
        known = None if topic.topic_id is None else self._topics.by_id(topic.topic_id)
        return None if known is None else known.name

    def _check_exists(self, name: str | None, partition: int) -> ErrorCode | None:
        if name is None:
            return ErrorCode.unknown_topic_id
        topic = self._topics.get(name)
        if topic is None or not 0 <= partition < topic.partitions:
            return ErrorCode.unknown_topic_or_partition
        return None


def _partition_commit(partition: Any) -> PartitionCommit:
    return PartitionCommit(
        partition=partition.partition_index,
        offset=partition.committed_offset,
        leader_epoch=getattr(partition, "committed_leader_epoch", -1),
        metadata=partition.committed_metadata,
    )
