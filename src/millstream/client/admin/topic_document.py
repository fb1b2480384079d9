"""A topic as it is described: for programs, in one document."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from millstream.core.topic import CONTRACT, DESCRIPTION, OWNER

if TYPE_CHECKING:
    from millstream.client.admin.damage import LostOffsets
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

CARD = {"owner": OWNER, "description": DESCRIPTION, "contract": CONTRACT}
"""What is said about a topic, and the setting that holds it."""


def replication_of(topic: TopicMetadata) -> int:
    """How many copies a topic has."""
    return max((len(partition.replicas) for partition in topic.partitions.values()), default=0)


async def describe_topic(client: Client, name: str, *, advice: str | None = None) -> dict[str, Any]:
    """A topic's partitions, offsets and settings, and what the disk lost of it."""
    from millstream.client.admin.damage import ask_lost
    from millstream.client.admin.topics import find_topic, offset_bounds, topic_configs

    topic = await find_topic(client, name, advice=advice)
    bounds, configs = await asyncio.gather(
        offset_bounds(client, name, list(topic.partitions)), topic_configs(client, name)
    )
    lost = await ask_lost(client, topic, topic.partitions)
    return {
        "topic": name,
        "id": str(topic.topic_id),
        "internal": topic.is_internal,
        **{word: configs[key].value or None if key in configs else None for word, key in CARD.items()},
        "partitions": [
            {
                "partition": one.partition,
                "leader": one.leader_id,
                "replicas": list(one.replicas),
                "in_sync": list(one.in_sync),
                "start": bounds[one.partition][0],
                "end": bounds[one.partition][1],
                "damage": _damage_of(lost, one.partition),
            }
            for one in topic.partitions.values()
        ],
        "settings": {key: config.value for key, config in configs.items()},
        "overrides": {key: config.value for key, config in configs.items() if config.is_override},
    }


def _damage_of(lost: list[LostOffsets] | None, partition: int) -> list[dict[str, int]] | None:
    if lost is None:
        return None
    return [{"first": one.first, "next": one.next_offset} for one in lost if one.partition == partition]
