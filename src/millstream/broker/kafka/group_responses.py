"""Common parts of the heartbeats and descriptions of consumer groups and share groups.

Kafka has separate messages for both, with the same fields; so the caller passes the class to build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.groups.requests import HeartbeatResult
from millstream.broker.kafka.api import NO_THROTTLE, error_code, error_message
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


def named_partitions(part: Callable[..., T], named: Iterable[tuple[UUID, str, Sequence[int]]]) -> tuple[T, ...]:
    """Build the assignment of a member with topic names."""
    return tuple(
        part(topic_id=topic_id, topic_name=TopicName(name), partitions=tuple(map(i32, numbers)))
        for topic_id, name, numbers in named
    )


def describe_failure(group: Callable[..., T], group_id: str, error: MillstreamError) -> T:
    """Return the response for a group that cannot be described."""
    return group(
        error_code=error_code(error),
        error_message=error_message(error),
        group_id=group_id,
        group_state="",
        group_epoch=i32(0),
        assignment_epoch=i32(0),
        assignor_name="",
        members=(),
    )
