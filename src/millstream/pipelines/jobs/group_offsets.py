"""A pipeline's progress: the offsets of its consumer group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.core.errors import CoordinatorUnavailable
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire import group_offsets
from millstream.protocol.wire.client import GROUP_COORDINATOR, Client
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.group_offsets import GroupMember

_UNSTABLE: Final = 88

Offsets = Mapping[str, Mapping[int, int]]
"""The next offset to read, by topic and partition."""


async def stable_offsets(client: Client, group: str) -> dict[str, dict[int, int]]:
    """Return a group's committed offsets, waiting for transactions that are about to change them."""
    request = build_request("offset_fetch", 9, groups=[{"group_id": group}], require_stable=True)

    async def attempt(node: NodeId) -> dict[str, dict[int, int]]:
        response = (await client.send(node, request)).groups[0]
        if response.error_code:
            raise error_from_code(response.error_code, None, about=f"offsets of group {group!r}")
        offsets: dict[str, dict[int, int]] = {}
        for topic in response.topics:
            for one in topic.partitions:
                if one.error_code == _UNSTABLE:
                    # Transient, like everything that a coordinator asks to retry.
                    raise CoordinatorUnavailable(
                        f"an open transaction holds the offset of group {group!r} in {topic.name}-{one.partition_index}"
                    )
                if one.error_code:
                    raise error_from_code(one.error_code, None, about=f"offsets of group {group!r}")
                if one.committed_offset >= 0:
                    offsets.setdefault(topic.name, {})[one.partition_index] = one.committed_offset
        return offsets

    return await client.call_coordinator(group, attempt, kind=GROUP_COORDINATOR)


async def commit_offsets(client: Client, group: str, offsets: Offsets, member: GroupMember) -> None:
    """Commit the offsets of work that is already durable, so that the group shows it."""
    commits = {
        TopicPartition(topic, PartitionIndex(number)): offset
        for topic, numbers in offsets.items()
        for number, offset in numbers.items()
    }
    await group_offsets.commit_offsets(client, group, commits, member=member)
