"""Consumer groups: list, describe, reset, delete."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.groups import (
    delete_group,
    describe_group,
    group_document,
    group_summaries,
    plan_reset,
    progress_of,
)
from millstream.client.admin.position import parse_position
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services
from millstream.protocol.wire.group_offsets import commit_offsets


class GroupSummary(msgspec.Struct, frozen=True):
    """A group's summary: `lag` is null if nothing is committed; it and `members` are null without DESCRIBE on it."""

    group: str
    state: str
    type: str
    members: int | None
    lag: int | None


class GroupList(msgspec.Struct, frozen=True):
    """Groups, by name."""

    groups: list[GroupSummary]


class GroupMember(msgspec.Struct, frozen=True):
    """A member and its assignment."""

    member: str
    client: str
    host: str
    partitions: list[tuple[str, int]]


class GroupOffset(msgspec.Struct, frozen=True):
    """A group's position in one partition."""

    topic: str
    partition: int
    committed: int | None
    start: int | None
    end: int | None
    lag: int | None
    member: str | None


class GroupDescription(msgspec.Struct, frozen=True):
    """A group with its members and offsets."""

    group: str
    type: str
    state: str
    protocol: str
    lag: int | None
    members: list[GroupMember]
    offsets: list[GroupOffset]


class GroupReset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new position: start, end, an offset, a time, or an age."""

    to: Annotated[str, Meta(min_length=1, max_length=100)]
    topics: Annotated[list[str], Meta(max_length=1000)] | None = None
    partitions: Annotated[list[int], Meta(max_length=10_000)] | None = None
    dry_run: bool = False
    """Only return the changes, without making them."""


class MovedOffset(msgspec.Struct, frozen=True):
    """The old and new offset of one partition."""

    topic: str
    partition: int
    before: int | None
    after: int


class MovedGroup(msgspec.Struct, frozen=True):
    """The old and new offsets of a group."""

    group: str
    dry_run: bool
    offsets: list[MovedOffset]


async def list_all(services: Services, request: Request[NoFields, NoFields]) -> GroupList:
    return GroupList(msgspec.convert(await group_summaries(services.client), list[GroupSummary]))


async def describe(services: Services, request: Request[NoFields, NoFields]) -> GroupDescription:
    group = await describe_group(services.client, request.path["group"])
    return msgspec.convert(group_document(group, await progress_of(services.client, group)), GroupDescription)


async def reset(services: Services, request: Request[NoFields, GroupReset]) -> MovedGroup:
    """Reset a group's offsets; its consumers must be stopped first."""
    name, body = request.path["group"], request.body
    moves = await plan_reset(services.client, name, body.topics, body.partitions, parse_position(body.to))
    if not body.dry_run:
        await commit_offsets(services.client, name, {where: after for where, _, after in moves})
    moved = [MovedOffset(where.topic, where.partition, before, after) for where, before, after in moves]
    return MovedGroup(name, body.dry_run, moved)


async def delete(services: Services, request: Request[NoFields, NoFields]) -> None:
    await delete_group(services.client, request.path["group"])


ROUTES: Final = (
    Route("GET", "/groups", "List consumer groups", list_all, GroupList),
    Route("GET", "/groups/{group}", "Describe a consumer group", describe, GroupDescription),
    Route("POST", "/groups/{group}/reset", "Reset the offsets of a consumer group", reset, MovedGroup, body=GroupReset),
    Route("DELETE", "/groups/{group}", "Delete a consumer group and its offsets", delete, None),
)
