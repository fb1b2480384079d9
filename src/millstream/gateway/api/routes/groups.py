"""Consumer groups: list, describe, reset, delete."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.groups import (
    commit_offsets,
    delete_group,
    describe_group,
    group_document,
    group_summary,
    list_groups,
    plan_reset,
    progress_of,
)
from millstream.client.admin.position import parse_position
from millstream.gateway.api.parts import Parts
from millstream.gateway.api.route import Asked, Nothing, Route

AT_ONCE_MAX: Final = 16
"""Groups that are asked about at the same time."""


class GroupSummary(msgspec.Struct, frozen=True):
    """A group in one line; `lag` is null where nothing is committed."""

    group: str
    state: str
    type: str
    members: int
    lag: int | None


class GroupList(msgspec.Struct, frozen=True):
    """Groups, by their names."""

    groups: list[GroupSummary]


class GroupMember(msgspec.Struct, frozen=True):
    """One member, and the topics and partitions it reads."""

    member: str
    client: str
    host: str
    partitions: list[tuple[str, int]]


class GroupOffset(msgspec.Struct, frozen=True):
    """How far a group is in one partition."""

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
    """Where to go on: start, end, an offset, a time, or how long ago."""

    to: Annotated[str, Meta(min_length=1, max_length=100)]
    topics: Annotated[list[str], Meta(max_length=1000)] | None = None
    partitions: Annotated[list[int], Meta(max_length=10_000)] | None = None
    dry_run: bool = False
    """Tell what would be done, and do nothing."""


class MovedOffset(msgspec.Struct, frozen=True):
    """From where to where a group moves in one partition."""

    topic: str
    partition: int
    before: int | None
    after: int


class MovedGroup(msgspec.Struct, frozen=True):
    """From where to where a group moves."""

    group: str
    dry_run: bool
    offsets: list[MovedOffset]


async def list_all(parts: Parts, asked: Asked[Nothing, Nothing]) -> GroupList:
    """All groups with their lag."""
    turn = asyncio.Semaphore(AT_ONCE_MAX)

    async def summary(listed: tuple[str, str, str]) -> dict[str, Any]:
        async with turn:
            return await group_summary(parts.client, *listed)

    found = await asyncio.gather(*(summary(listed) for listed in await list_groups(parts.client)))
    return GroupList(msgspec.convert(list(found), list[GroupSummary]))


async def describe(parts: Parts, asked: Asked[Nothing, Nothing]) -> GroupDescription:
    """One group."""
    group = await describe_group(parts.client, asked.path["group"])
    return msgspec.convert(group_document(group, await progress_of(parts.client, group)), GroupDescription)


async def reset(parts: Parts, asked: Asked[Nothing, GroupReset]) -> MovedGroup:
    """Move a group to another place; its consumers must be stopped first."""
    name, said = asked.path["group"], asked.body
    moves = await plan_reset(parts.client, name, said.topics, said.partitions, parse_position(said.to))
    if not said.dry_run:
        await commit_offsets(parts.client, name, {where: after for where, _, after in moves})
    told = [MovedOffset(where.topic, where.partition, before, after) for where, before, after in moves]
    return MovedGroup(name, said.dry_run, told)


async def delete(parts: Parts, asked: Asked[Nothing, Nothing]) -> None:
    """Delete a group and the offsets it committed."""
    await describe_group(parts.client, asked.path["group"])
    await delete_group(parts.client, asked.path["group"])


_SHARED: Final[dict[str, Any]] = {"tag": "groups", "query": Nothing}

ROUTES: Final = (
    Route(
        method="GET",
        path="/groups",
        summary="List consumer groups",
        handle=list_all,
        body=Nothing,
        answer=GroupList,
        **_SHARED,
    ),
    Route(
        method="GET",
        path="/groups/{group}",
        summary="Describe a consumer group",
        handle=describe,
        body=Nothing,
        answer=GroupDescription,
        **_SHARED,
    ),
    Route(
        method="POST",
        path="/groups/{group}/reset",
        summary="Move a consumer group to another place",
        handle=reset,
        body=GroupReset,
        answer=MovedGroup,
        **_SHARED,
    ),
    Route(
        method="DELETE",
        path="/groups/{group}",
        summary="Delete a consumer group and its offsets",
        handle=delete,
        body=Nothing,
        answer=None,
        status=HTTPStatus.NO_CONTENT,
        **_SHARED,
    ),
)
