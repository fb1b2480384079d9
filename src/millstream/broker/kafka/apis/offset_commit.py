"""OffsetCommit (key 8), versions 2 to 10: commits the offsets of a group, durably.

Without generation and member id it is from a consumer outside any group, and is accepted if the group has no members. A
partition that does not exist gets UNKNOWN_TOPIC_OR_PARTITION, or UNKNOWN_TOPIC_ID from 10 on, where topics are given by
id; the others are stored. Version notes: 2 to 4 can request a retention; 6 adds the leader epoch;
7 adds static members; a group that does not exist gets GROUP_ID_NOT_FOUND from 9 on and ILLEGAL_GENERATION before.
Members of consumer groups commit from 9 on (UNSUPPORTED_VERSION before), and send their epoch instead of a generation
(STALE_MEMBER_EPOCH if it is one to come, or if the member did not have the partition in it).

Decoded and encoded by hand, since consumers send it all the time. The offsets are appended before the frame is handled,
and the response is a promise that completes as soon as the log acknowledges them, so that it needs no task and no
iteration of the loop, and requests behind it on the connection share its sync.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import CommitRequest, CommitResult, MemberRef, PartitionCommit
from millstream.broker.kafka.api import ClientInfo, error_code, partition_exists
from millstream.broker.net.connection import EventualResponse
from millstream.broker.net.response import Buffers, Promise
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError, ProtocolViolation
from millstream.protocol.messages.codec import REQUEST_LIMITS, RequestHeader, response_head
from millstream.protocol.messages.primitives import Reader, Writer

_KEY: Final = 8
_FIRST_WITH_THROTTLE: Final = 3
_FIRST_WITH_EPOCH: Final = 6
_FIRST_WITH_INSTANCE: Final = 7
_FIRST_WITH_UNKNOWN_GROUP: Final = 9
_FIRST_BY_ID: Final = 10
_RETENTION_VERSIONS: Final = range(2, 5)
_NO_EPOCH: Final = -1
# Partition and offset, without and with the leader epoch.
_OFFSET: Final = struct.Struct(">iq")
_OFFSET_AND_EPOCH: Final = struct.Struct(">iqi")
_RESULT: Final = struct.Struct(">ih")

Refused = dict[tuple[str | None, int], ErrorCode]
"""The codes of offsets that are not kept, by topic and partition."""


class TopicCommit(NamedTuple):
    """Offsets of one topic, by its name or by its id, as the version has it."""

    topic: str | UUID
    partitions: list[PartitionCommit]


class OffsetCommitCall(NamedTuple):
    member: MemberRef
    retention_ms: int | None
    topics: list[TopicCommit]


class _Pending(Promise):
    """A request whose response waits for its offsets to be acknowledged."""

    __slots__ = ("_header", "_names", "_refused", "_topics", "_valid")

    def __init__(
        self,
        header: RequestHeader,
        topics: list[TopicCommit],
        names: list[str | None],
        valid: Mapping[str, list[PartitionCommit]],
        refused: Refused,
    ) -> None:
        super().__init__()
        self._header = header
        self._topics = topics
        self._names = names
        self._valid = valid
        self._refused = refused

    def release(self, response: Deferred[CommitResult]) -> None:
        """Pass the coordinator's response on to the client."""
        self.resolve(self.refuse(response.error) if response.error is not None else self.accept(response.result()))

    def accept(self, response: CommitResult) -> Buffers:
        """Return the response for offsets that are kept, except for those with an error."""
        for name, partitions in response.items():
            for partition, error in partitions.items():
                if error is not None:
                    self._refused[name, partition] = error_code(error)
        return self.write()

    def refuse(self, error: MillstreamError) -> Buffers:
        """Return the response when no offset is kept."""
        code = error_code(error)
        self._refused.update(
            {(name, commit.partition): code for name, commits in self._valid.items() for commit in commits}
        )
        return self.write()

    def write(self) -> Buffers:
        """Encode the response, in the order of the request."""
        header, refused = self._header, self._refused
        writer = Writer(flexible=header.flexible)
        if header.version >= _FIRST_WITH_THROTTLE:
            writer.int32(0)
        writer.array_length(len(self._topics))
        for name, (topic, commits) in zip(self._names, self._topics, strict=True):
            if isinstance(topic, str):
                writer.string(topic)
            else:
                writer.uuid(topic)
            writer.array_length(len(commits))
            for commit in commits:
                code = refused.get((name, commit.partition), ErrorCode.none) if refused else ErrorCode.none
                writer.buffer += _RESULT.pack(commit.partition, code.value)
                writer.no_tags()
            writer.no_tags()
        writer.no_tags()
        return [response_head(_KEY, header.version, header.correlation_id, len(writer.buffer)), writer.buffer]


class OffsetCommit:
    key = _KEY
    versions = (2, 10)

    def __init__(self, groups: GroupCoordinator, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Store the offsets of partitions that exist."""
        call = read(frame, header)
        names = [self._name_of(topic.topic) for topic in call.topics]
        valid: dict[str, list[PartitionCommit]] = {}
        refused: Refused = {}
        for name, topic in zip(names, call.topics, strict=True):
            denied = None if client.rights is None else _check_allowed(client.rights, call.member.group_id, name)
            for commit in topic.partitions:
                code = denied or self._check_exists(name, commit.partition)
                if name is None or code is not None:
                    refused[name, commit.partition] = code or ErrorCode.unknown_topic_id
                else:
                    valid.setdefault(name, []).append(commit)
        pending = _Pending(header, call.topics, names, valid, refused)
        if not valid:
            return pending.write()
        request = CommitRequest(
            member=call.member,
            topics={name: tuple(commits) for name, commits in valid.items()},
            retention_ms=call.retention_ms,
            supports_unknown_group=header.version >= _FIRST_WITH_UNKNOWN_GROUP,
        )
        try:
            if not self._groups.commit_now(request, pending.release):
                return self._commit_when_loaded(request, pending)
        except MillstreamError as error:
            return pending.refuse(error)
        return pending.buffers if pending.is_resolved else pending

    async def _commit_when_loaded(self, request: CommitRequest, pending: _Pending) -> Buffers:
        try:
            return pending.accept(await self._groups.commit(request))
        except MillstreamError as error:
            return pending.refuse(error)

    def _name_of(self, topic: str | UUID) -> str | None:
        if isinstance(topic, str):
            return topic
        known = self._topics.by_id(topic)
        return None if known is None else known.name

    def _check_exists(self, name: str | None, partition: int) -> ErrorCode | None:
        if name is None:
            return ErrorCode.unknown_topic_id
        return None if partition_exists(self._topics, name, partition) else ErrorCode.unknown_topic_or_partition


def _check_allowed(rights: Rights, group_id: str, name: str | None) -> ErrorCode | None:
    """Require READ on the group and on a topic; an unknown topic reveals nothing."""
    if not rights.check(Operation.READ, ResourceType.GROUP, group_id):
        return ErrorCode.group_authorization_failed
    if name is not None and not rights.check(Operation.READ, ResourceType.TOPIC, name):
        return ErrorCode.topic_authorization_failed
    return None


def read(frame: memoryview, header: RequestHeader) -> OffsetCommitCall:
    """Read the whole request before anything is done, so that a malformed one leaves no trace."""
    version = header.version
    if len(frame) > REQUEST_LIMITS.body_bytes:
        raise ProtocolViolation(f"OffsetCommit has {len(frame)} bytes, at most {REQUEST_LIMITS.body_bytes} are read")
    reader = Reader(frame, header.body_at, flexible=header.flexible)
    group_id = reader.string()
    generation = reader.int32()
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= _FIRST_WITH_INSTANCE else None
    retention_ms = reader.int64() if version in _RETENTION_VERSIONS else -1
    topics: list[TopicCommit] = []
    items = 0
    for _ in range(_read_count(reader)):
        topic: str | UUID = reader.uuid() if version >= _FIRST_BY_ID else reader.string()
        count = _read_count(reader)
        items += 1 + count
        if items > REQUEST_LIMITS.items:
            raise ProtocolViolation(f"OffsetCommit has more than {REQUEST_LIMITS.items} topics and partitions")
        topics.append(TopicCommit(topic, [_read_partition(reader, version) for _ in range(count)]))
        reader.skip_tags()
    reader.skip_tags()
    return OffsetCommitCall(
        MemberRef(group_id=group_id, member_id=member_id, instance_id=instance_id, generation=generation),
        None if retention_ms < 0 else retention_ms,
        topics,
    )


def _read_count(reader: Reader) -> int:
    count = reader.array_length()
    if count < 0:
        raise ProtocolViolation("an array is null where the protocol does not allow it")
    return count


def _read_partition(reader: Reader, version: int) -> PartitionCommit:
    if version >= _FIRST_WITH_EPOCH:
        partition, offset, epoch = reader.fields(_OFFSET_AND_EPOCH)
    else:
        (partition, offset), epoch = reader.fields(_OFFSET), _NO_EPOCH
    metadata = reader.nullable_string()
    reader.skip_tags()
    return PartitionCommit(partition=partition, offset=offset, leader_epoch=epoch, metadata=metadata)
