"""Operations on consumer groups, over Kafka's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.client.admin.mirrors import MirrorClient
from millstream.client.admin.position import LATEST_TIMESTAMP
from millstream.client.admin.topics import find_topic, offset_bounds, offsets_at
from millstream.core.errors import (
    GroupNotAuthorized,
    GroupNotEmpty,
    InvalidRequest,
    MillstreamError,
    MirroredTopic,
    NotAuthorized,
    NotFound,
    ProtocolViolation,
    UnknownGroup,
    UnknownTopic,
)
from millstream.core.ids import OffsetRange, PartitionIndex
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request
from millstream.protocol.messages.primitives import Reader
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.group_offsets import (
    CLASSIC,
    MIRRORED,
    Committed,
    busy_sentence,
    commits_of,
    committed_by_group,
    committed_offsets,
    list_groups,
)

if TYPE_CHECKING:
    from millstream.client.admin.position import Position


async def group_summaries(client: Client, listed: Sequence[tuple[str, str, str]] | None = None) -> list[dict[str, Any]]:
    """Return every group, or some that were listed, as one row each, except groups that end meanwhile.

    The list itself may name groups that the client may not describe; they have no numbers.
    """
    turn = asyncio.Semaphore(_GROUPS_AT_ONCE_MAX)

    async def summarize(name: str, state: str, kind: str) -> dict[str, Any] | None:
        summary: dict[str, Any] = {"group": name, "state": state, "type": kind, "members": None, "lag": None}
        async with turn:
            try:
                group = await describe_group(client, name)
                summary["members"] = len(group.members)
                summary["lag"] = total_lag(await progress_of(client, group))
            except UnknownGroup:
                return None
            except NotAuthorized:
                pass
        return summary

    selected = await list_groups(client) if listed is None else listed
    summaries = await gather_or_cancel(summarize(*group) for group in selected)
    return [summary for summary in summaries if summary is not None]


async def lag_of_groups(client: Client, names: Sequence[str]) -> int:
    """Return the lag of several groups together, where they have committed offsets, with few requests."""
    committed = [
        offsets for offsets in (await committed_by_group(client, names)).values() if not isinstance(offsets, Exception)
    ]
    partitions: dict[str, set[int]] = {}
    for where in (where for offsets in committed for where in offsets):
        partitions.setdefault(where.topic, set()).add(where.partition)
    turn = asyncio.Semaphore(_GROUPS_AT_ONCE_MAX)

    async def ends_of(topic: str) -> dict[TopicPartition, int]:
        async with turn:
            try:
                listed_offsets = await client.list_offsets(topic, dict.fromkeys(partitions[topic], LATEST_TIMESTAMP))
            except MillstreamError:
                # It was deleted meanwhile, or has no leader.
                return {}
        return {TopicPartition(topic, PartitionIndex(index)): offset.offset for index, offset in listed_offsets.items()}

    ends = {
        where: end
        for topic_ends in await gather_or_cancel(map(ends_of, partitions))
        for where, end in topic_ends.items()
    }
    return sum(max(0, ends.get(where, 0) - offset) for offsets in committed for where, offset in offsets.items())


def total_lag(progress: list[Progress]) -> int | None:
    """Return the lag over all partitions; None if nothing is committed."""
    known = [partition_progress.lag for partition_progress in progress if partition_progress.lag is not None]
    return sum(known) if known else None


def group_document(group: Group, progress: list[Progress]) -> dict[str, Any]:
    """Return a group's members, offsets and lag."""
    owners = {where: member.member_id for member in group.members for where in member.partitions}
    return {
        "group": group.name,
        "type": group.kind,
        "state": group.state,
        "protocol": group.protocol,
        "lag": total_lag(progress),
        "members": [
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.host,
                "partitions": [[where.topic, where.partition] for where in member.partitions],
            }
            for member in group.members
        ],
        "offsets": [
            {
                "topic": partition_progress.where.topic,
                "partition": partition_progress.where.partition,
                "committed": partition_progress.committed,
                "start": partition_progress.start,
                "end": partition_progress.end,
                "lag": partition_progress.lag,
                "member": owners.get(partition_progress.where),
            }
            for partition_progress in progress
        ],
    }


DEAD = "Dead"

CONSUMER = "consumer"
"""A group of the newer protocol (KIP-848), in which the broker assigns partitions."""

SHARE = "share"
"""A group whose members share the messages of a partition (KIP-932)."""

_GROUP_ID_NOT_FOUND = 69

_GROUPS_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True)
class Member:
    member_id: str
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    state: str
    protocol: str
    """The assignor."""
    members: tuple[Member, ...]
    kind: str = CLASSIC
    protocol_type: str = ""
    """The type of its members, if known: "consumer" for consumers."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A group's position in one partition. None: nothing is committed, or the partition is gone."""

    where: TopicPartition
    committed: int | None
    start: int | None
    end: int | None

    @property
    def lag(self) -> int | None:
        """Return the number of offsets between the committed one and the end."""
        if self.committed is None or self.end is None:
            return None
        return max(0, self.end - self.committed)


async def describe_group(client: Client, name: str) -> Group:
    try:
        return await _find_group(client, name)
    except GroupNotAuthorized:
        raise GroupNotAuthorized(f"not authorized; describing a group needs DESCRIBE on group:{name}") from None


async def _find_group(client: Client, name: str) -> Group:
    group = await _describe_classic(client, name)
    for kind in (CONSUMER, SHARE):
        group = group or await _describe_newer(client, name, kind)
    if group is None:
        raise _unknown_group(name)
    return group


def _unknown_group(name: str) -> UnknownGroup:
    return UnknownGroup(
        f"group {name!r} does not exist; `millstream group list` and GET /v1/groups list those that do, "
        "`millstream subscription list` and GET /v1/subscriptions the subscriptions"
    )


async def _describe_newer(client: Client, name: str, kind: str) -> Group | None:
    """Return a group whose broker assigns the partitions."""
    request = build_request(f"{kind}_group_describe", 1, group_ids=[name])
    try:
        described = (await client.send(await client.coordinator(name), request)).groups[0]
    except InvalidRequest:
        # A broker without the newer protocol has no such groups.
        return None
    if described.error_code == _GROUP_ID_NOT_FOUND:
        return None
    if described.error_code:
        raise error_from_code(described.error_code, described.error_message, about=f"group {name!r}")
    members = tuple(
        Member(
            member.member_id,
            member.client_id,
            member.client_host,
            _named_partitions(member.assignment.topic_partitions),
        )
        for member in described.members
    )
    return Group(name, described.group_state, described.assignor_name, members, kind, kind)


def _named_partitions(topics: Any) -> tuple[TopicPartition, ...]:
    return tuple(
        TopicPartition(topic.topic_name, PartitionIndex(index)) for topic in topics for index in topic.partitions
    )


async def _describe_classic(client: Client, name: str) -> Group | None:
    request = build_request("describe_groups", 6, groups=[name])
    described = (await client.send(await client.coordinator(name), request)).groups[0]
    if described.error_code == _GROUP_ID_NOT_FOUND or described.group_state == DEAD:
        return None
    if described.error_code:
        raise error_from_code(described.error_code, described.error_message, about=f"group {name!r}")
    members = tuple(
        Member(member.member_id, member.client_id, member.client_host, assigned_partitions(member.member_assignment))
        for member in described.members
    )
    return Group(name, described.group_state, described.protocol_data, members, CLASSIC, described.protocol_type)


def assigned_partitions(assignment: bytes) -> tuple[TopicPartition, ...]:
    """Parse the assignment of a classic consumer group's member; empty if it is of another kind."""
    if not assignment:
        return ()
    reader = Reader(assignment, flexible=False)
    partitions: list[TopicPartition] = []
    try:
        reader.int16()
        for _ in range(reader.array_length(item_bytes_min=6)):
            topic = reader.string()
            partitions += [TopicPartition(topic, PartitionIndex(index)) for index in reader.int32_array()]
    except ProtocolViolation:
        return ()
    return tuple(partitions)


async def share_offsets(client: Client, name: str) -> Committed:
    """Return the oldest unfinished message of a share group in every partition on which it has started."""
    request = build_request("describe_share_group_offsets", 1, groups=[{"group_id": name}])
    response = (await client.send(await client.coordinator(name), request)).groups[0]
    if response.error_code:
        raise error_from_code(response.error_code, response.error_message, about=f"offsets of group {name!r}")
    return {
        TopicPartition(topic.topic_name, PartitionIndex(partition.partition_index)): partition.start_offset
        for topic in response.topics
        for partition in topic.partitions
        if partition.start_offset >= 0
    }


async def progress_of(client: Client, group: Group) -> list[Progress]:
    """Return a group's progress in every partition that it reads or has committed."""
    ask_offsets = share_offsets if group.kind == SHARE else committed_offsets
    committed = await ask_offsets(client, group.name)
    read = {where for member in group.members for where in member.partitions}
    by_topic: dict[str, list[int]] = {}
    for where in {*committed, *read}:
        by_topic.setdefault(where.topic, []).append(where.partition)
    progress: list[Progress] = []
    for topic in sorted(by_topic):
        bounds: dict[int, OffsetRange] = {}
        # The offsets of a topic that was deleted are still listed.
        with suppress(UnknownTopic):
            bounds = await offset_bounds(client, topic, by_topic[topic])
        for index in sorted(by_topic[topic]):
            where = TopicPartition(topic, PartitionIndex(index))
            start, end = bounds.get(index, (None, None))
            progress.append(Progress(where, committed.get(where), start, end))
    return progress


async def refuse_members(client: Client, name: str, *, may_be_new: bool) -> None:
    """Raise `GroupNotEmpty` if the group is in use, `UnknownGroup` if it must exist but does not."""
    try:
        group = await _find_group(client, name)
    except UnknownGroup:
        if may_be_new:
            return
        raise
    if group.kind == SHARE:
        raise InvalidRequest(f"group {name!r} is a share group; move it with millstream subscription seek {name}")
    if group.members:
        raise GroupNotEmpty(busy_sentence(name))


async def delete_group(client: Client, name: str) -> None:
    request = build_request("delete_groups", 2, groups_names=[name])
    try:
        result = (await client.send(await client.coordinator(name), request)).results[0]
        if result.error_code:
            raise error_from_code(result.error_code, None, about=f"delete group {name!r}")
    except GroupNotEmpty:
        raise GroupNotEmpty(busy_sentence(name)) from None
    except UnknownGroup:
        raise _unknown_group(name) from None
    except GroupNotAuthorized:
        raise GroupNotAuthorized(f"not authorized; deleting a group needs DELETE on group:{name}") from None


async def plan_reset(
    client: Client, name: str, topics: list[str] | None, partitions: list[int] | None, position: Position
) -> list[tuple[TopicPartition, int | None, int]]:
    """Return the partitions that move, with their old and new offsets."""
    await refuse_members(client, name, may_be_new=bool(topics))
    commits = await commits_of(client, name)
    moves: list[tuple[TopicPartition, int | None, int]] = []
    for topic in topics or sorted({where.topic for where in commits}):
        known = (await find_topic(client, topic)).partitions
        chosen = [index for index in known if partitions is None or index in partitions]
        for index, after in (await offsets_at(client, topic, chosen, position)).items():
            where = TopicPartition(topic, PartitionIndex(index))
            moves.append((where, commits[where].offset if where in commits else None, after))
    if not moves:
        raise NotFound(f"nothing to move: group {name!r} has no offsets there; name topics to move it in")
    mirrored = {where.topic for where, _, _ in moves if where in commits and commits[where].metadata == MIRRORED}
    await _refuse_copies(client, name, mirrored)
    return moves


async def _refuse_copies(client: Client, name: str, topics: Set[str]) -> None:
    """Raise `MirroredTopic` if a topic in which a mirror has committed a group's offsets is still a copy."""
    try:
        mirrors = await MirrorClient(client).describe() if topics else []
    except NotAuthorized:
        # Such a user can still move groups after a failover.
        return
    for mirror in mirrors:
        for topic in sorted(topics & set(mirror["topics"])):
            raise MirroredTopic(
                f"the offsets of group {name!r} in topic {topic!r} come from mirror {mirror['mirror']!r}; move the "
                "group at the source, or here after a failover"
            )
