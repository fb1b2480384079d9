"""The committed offsets of consumer groups, over Kafka's APIs, so that they can be read and set on any Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from millstream.core.errors import CoordinatorUnavailable, GroupNotEmpty, MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire.client import GROUP_COORDINATOR, Client
from millstream.protocol.wire.error_codes import error_from_code, no_coordinator_error

CLASSIC: Final = "classic"
MIRRORED: Final = "mirrored"
"""The metadata of offsets that a mirror has committed. Kafka Streams decodes metadata from base64, which this is."""
_UNKNOWN_MEMBER_ID: Final = 25
_UNSTABLE: Final = 88
_GROUPS_ASKED_MAX: Final = 100
"""The number of groups in one request."""

Committed = dict[TopicPartition, int]
"""The committed offset of each partition."""


class GroupMember(NamedTuple):
    """The member of a group that commits offsets, or none, which only a group without members accepts."""

    member_id: str = ""
    generation: int = -1
    instance_id: str | None = None


class Commit(NamedTuple):
    """A committed offset, and the text that was committed with it."""

    offset: int
    metadata: str


Commits = dict[TopicPartition, Commit]


async def list_groups(client: Client) -> list[tuple[str, str, str]]:
    """Return the name, state and type of every group, from every node."""
    groups: dict[str, tuple[str, str, str]] = {}
    for node in (await client.metadata([])).nodes:
        response = await client.send(node, build_request("list_groups", 5))
        if response.error_code:
            raise error_from_code(response.error_code, None, about="the list of groups")
        for group in response.groups:
            groups[group.group_id] = (group.group_id, group.group_state, group.group_type or CLASSIC)
    return sorted(groups.values())


async def committed_offsets(client: Client, name: str) -> Committed:
    return _offsets(await commits_of(client, name))


async def commits_of(client: Client, name: str) -> Commits:
    return _commits(await _send_offset_fetch(client, await client.coordinator(name), [name]), name)


async def stable_offsets(client: Client, name: str) -> Committed:
    """Return a group's committed offsets, waiting for transactions that are about to change them."""

    async def attempt(node: NodeId) -> Committed:
        responses = await _send_offset_fetch(client, node, [name], is_stable=True)
        commits = _commits(responses, name)
        for topic in responses[name].topics:
            for partition in topic.partitions:
                about = f"the offset of group {name!r} in {topic.name}-{partition.partition_index}"
                if partition.error_code == _UNSTABLE:
                    # Transient, like everything that a coordinator asks to retry.
                    raise CoordinatorUnavailable(f"an open transaction holds {about}")
                if partition.error_code:
                    raise error_from_code(partition.error_code, None, about=about)
        return _offsets(commits)

    return await client.call_coordinator(name, attempt, kind=GROUP_COORDINATOR)


async def committed_by_group(client: Client, names: Sequence[str]) -> dict[str, Committed | MillstreamError]:
    """Return the committed offsets of several groups; one that could not be read has an error instead."""
    by_group = await commits_by_group(client, names)
    return {name: group if isinstance(group, MillstreamError) else _offsets(group) for name, group in by_group.items()}


def _offsets(commits: Commits) -> Committed:
    return {where: commit.offset for where, commit in commits.items()}


async def commits_by_group(client: Client, names: Sequence[str]) -> dict[str, Commits | MillstreamError]:
    """Return the committed offsets of several groups, with few requests per coordinator.

    A group that could not be read has an error instead.
    """
    by_node: dict[NodeId, list[str]] = {}
    commits: dict[str, Commits | MillstreamError] = {}
    for name, where in (await _find_coordinators(client, names)).items():
        if isinstance(where, MillstreamError):
            commits[name] = where
        else:
            by_node.setdefault(where, []).append(name)
    requests = [(node, part) for node, groups in by_node.items() for part in _parts(groups)]
    for responses in await gather_or_cancel(_commits_or_errors(client, *request) for request in requests):
        commits.update(responses)
    return commits


async def _find_coordinators(client: Client, names: Sequence[str]) -> dict[str, NodeId | MillstreamError]:
    coordinators: dict[str, NodeId | MillstreamError] = {}
    for part in _parts(names):
        request = build_request("find_coordinator", 6, key_type=GROUP_COORDINATOR, coordinator_keys=part)
        for coordinator in (await client.send(None, request)).coordinators:
            refused = (
                no_coordinator_error(coordinator.error_code, coordinator.error_message, coordinator.key)
                if coordinator.error_code
                else None
            )
            coordinators[coordinator.key] = refused or NodeId(coordinator.node_id)
    return coordinators


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[at : at + _GROUPS_ASKED_MAX] for at in range(0, len(names), _GROUPS_ASKED_MAX)]


async def _commits_or_errors(
    client: Client, node: NodeId, names: Sequence[str]
) -> dict[str, Commits | MillstreamError]:
    try:
        responses = await _send_offset_fetch(client, node, names)
    except MillstreamError as error:
        return dict.fromkeys(names, error)
    commits: dict[str, Commits | MillstreamError] = {}
    for name in names:
        try:
            commits[name] = _commits(responses, name)
        except MillstreamError as error:
            commits[name] = error
    return commits


async def _send_offset_fetch(
    client: Client, node: NodeId, names: Sequence[str], *, is_stable: bool = False
) -> dict[str, Any]:
    groups = [{"group_id": name} for name in names]
    request = build_request("offset_fetch", 9, groups=groups, require_stable=is_stable)
    response = await client.send(node, request)
    return {group.group_id: group for group in response.groups}


def _commits(responses: Mapping[str, Any], name: str) -> Commits:
    response = responses.get(name)
    if response is None:
        raise ProtocolViolation(f"the response with offsets does not include group {name!r}")
    if response.error_code:
        raise error_from_code(response.error_code, None, about=f"offsets of group {name!r}")
    return {
        TopicPartition(topic.name, PartitionIndex(partition.partition_index)): Commit(
            partition.committed_offset, partition.metadata or ""
        )
        for topic in response.topics
        for partition in topic.partitions
        if partition.committed_offset >= 0
    }


async def commit_offsets(
    client: Client,
    name: str,
    offsets: Mapping[TopicPartition, int],
    *,
    member: GroupMember | None = None,
    metadata: str = "",
) -> None:
    """Commit offsets as a member; without one, move a group that has no members to these offsets."""
    by_topic: dict[str, list[Any]] = {}
    for where, offset in offsets.items():
        partition = {"partition_index": where.partition, "committed_offset": offset, "committed_metadata": metadata}
        by_topic.setdefault(where.topic, []).append(partition)
    who = member or GroupMember()
    request = build_request(
        "offset_commit",
        9,
        group_id=name,
        generation_id_or_member_epoch=who.generation,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        topics=[{"name": topic, "partitions": partitions} for topic, partitions in by_topic.items()],
    )

    async def attempt(node: NodeId) -> None:
        response = await client.send(node, request)
        for topic in response.topics:
            for partition in topic.partitions:
                if member is None and partition.error_code == _UNKNOWN_MEMBER_ID:
                    raise GroupNotEmpty(busy_sentence(name))
                if partition.error_code:
                    about = f"offset of group {name!r} in {topic.name}-{partition.partition_index}"
                    raise error_from_code(partition.error_code, None, about=about)

    await client.call_coordinator(name, attempt, kind=GROUP_COORDINATOR)


def busy_sentence(name: str) -> str:
    """Return advice for a group that is in use."""
    return f"group {name!r} has members; stop its consumers first, then try again"
