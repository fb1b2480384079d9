"""Common parts of the heartbeats and descriptions of consumer groups and share groups.

Kafka has separate messages for both, with the same fields; so the caller passes the class to build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeVar
from uuid import UUID

from kio.schema.types import TopicName
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.kafka.api import error_code, error_message
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


def milliseconds(value: int) -> i32Timedelta:
    """Return a time in the type that responses use."""
    return i32Timedelta.parse(timedelta(milliseconds=value))


def partitions_by_topic(part: Callable[..., T], assignment: Mapping[UUID, Collection[int]]) -> tuple[T, ...]:
    return tuple(
        part(topic_id=topic_id, partitions=tuple(map(i32, sorted(partitions))))
        for topic_id, partitions in sorted(assignment.items())
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
