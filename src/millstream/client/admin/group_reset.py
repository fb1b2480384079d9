"""Moving a consumer group to another place in its topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.client.admin.groups import committed_offsets, refuse_members
from millstream.client.admin.topics import find_topic, offsets_at
from millstream.core.errors import NotFound
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition

if TYPE_CHECKING:
    from millstream.client.admin.position import Position
    from millstream.protocol.wire.client import Client


async def plan_reset(
    client: Client, name: str, topics: list[str] | None, partitions: list[int] | None, position: Position
) -> list[tuple[TopicPartition, int | None, int]]:
    """Which partitions move from where to where."""
    await refuse_members(client, name, may_be_new=bool(topics))
    committed = await committed_offsets(client, name)
    moves: list[tuple[TopicPartition, int | None, int]] = []
    for topic in topics or sorted({where.topic for where in committed}):
        known = (await find_topic(client, topic)).partitions
        chosen = [index for index in known if partitions is None or index in partitions]
        for index, after in (await offsets_at(client, topic, chosen, position)).items():
            where = TopicPartition(topic, PartitionIndex(index))
            moves.append((where, committed.get(where), after))
    if not moves:
        raise NotFound(f"there is nothing to move: group {name!r} has no offsets there; name topics to move it in")
    return moves
