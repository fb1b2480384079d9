"""Common parts of the heartbeats and descriptions of consumer groups and share groups.

Kafka has separate messages for both, with the same fields; so the caller passes the class to build.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.groups.consumer.member import NamedPartitions
from millstream.broker.groups.requests import ConsumerGroupDescription, ConsumerMemberDescription, HeartbeatResult
from millstream.broker.kafka.api import GROUP_OPERATIONS, NO_THROTTLE, NOT_REQUESTED, error_code, error_message
from millstream.core.errors import InvalidRequest, MillstreamError

_NAME_LENGTH_MAX: Final = 1024

T = TypeVar("T")


def check_text(name: str, text: str | None) -> None:
    """Raise `InvalidRequest` for an invalid name or id; None is valid."""
    if text is None:
        return
    if not text.strip():
        raise InvalidRequest(f"the {name} cannot be empty")
    if len(text) > _NAME_LENGTH_MAX:
        raise InvalidRequest(f"the {name} has at most {_NAME_LENGTH_MAX} characters, not {len(text)}")


def _partitions_by_topic(part: Callable[..., T], assignment: Mapping[UUID, Collection[int]]) -> tuple[T, ...]:
    return tuple(
        part(topic_id=topic_id, partitions=tuple(map(i32, sorted(partitions))))
        for topic_id, partitions in sorted(assignment.items())
    )


def heartbeat_response(
    response: Callable[..., T], assignment: Callable[..., Any], part: Callable[..., Any], result: HeartbeatResult
) -> T:
    assigned = result.assignment
    return response(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none,
        member_id=result.member_id,
        member_epoch=i32(result.epoch),
        heartbeat_interval=i32Timedelta.parse(timedelta(milliseconds=result.heartbeat_ms)),
        assignment=None if assigned is None else assignment(topic_partitions=_partitions_by_topic(part, assigned)),
    )


class _Request(Protocol):
    @property
    def group_ids(self) -> Iterable[GroupId]:
        """The groups that are asked for."""

    @property
    def include_authorized_operations(self) -> bool:
        """Whether to say what the client may do with them."""


async def describe_groups(
    group: Callable[..., T],
    member: Callable[[ConsumerMemberDescription], Any],
    describe: Callable[[GroupId], Awaitable[ConsumerGroupDescription]],
    request: _Request,
) -> tuple[T, ...]:
    """Describe groups, or say for each why it cannot be described."""
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_REQUESTED

    async def describe_one(group_id: GroupId) -> T:
        try:
            found = await describe(group_id)
        except MillstreamError as error:
            return refused_group(group, group_id, error_code(error), error_message(error))
        return group(
            error_code=ErrorCode.none,
            group_id=group_id,
            group_state=found.state,
            group_epoch=i32(found.epoch),
            assignment_epoch=i32(found.target_epoch),
            assignor_name=found.assignor,
            members=tuple(map(member, found.members)),
            authorized_operations=operations,
        )

    return tuple(await asyncio.gather(*map(describe_one, request.group_ids)))


def named_partitions(part: Callable[..., T], named: NamedPartitions) -> tuple[T, ...]:
    """Build the assignment of a member with topic names."""
    return tuple(
        part(topic_id=topic_id, topic_name=TopicName(name), partitions=tuple(map(i32, numbers)))
        for topic_id, name, numbers in named
    )


def refused_group(group: Callable[..., T], group_id: GroupId, code: ErrorCode, message: str | None) -> T:
    """Return the response for a group that cannot be described."""
    return group(
        error_code=code,
        error_message=message,
        group_id=group_id,
        group_state="",
        group_epoch=i32(0),
        assignment_epoch=i32(0),
        assignor_name="",
        members=(),
    )
