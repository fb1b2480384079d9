"""Operations on topics, over Kafka's APIs, so that they also work against Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millstream.client.admin.position import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, Position
from millstream.core.errors import InvalidSetting, UnknownTopic
from millstream.core.ids import NodeId, OffsetRange
from millstream.core.setting import suggestion
from millstream.core.topic import CONTRACT, DESCRIPTION, OWNER
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire.admin_requests import NODE_RESOURCE, TOPIC_RESOURCE, describe_configs, topic_configs
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.fetch import READ_UNCOMMITTED

if TYPE_CHECKING:
    from millstream.client.admin.cluster_status import DamagedOffsets


CARD = {"owner": OWNER, "description": DESCRIPTION, "contract": CONTRACT}
"""The descriptive fields of a topic, and the settings that hold them."""


async def describe_topic(
    client: Client,
    name: str,
    *,
    advice: str | None = None,
    with_damage: bool = True,
    with_settings: bool = True,
) -> dict[str, Any]:
    """Return a topic's partitions, offsets, settings and damage, which takes the whole status of its leaders.

    Settings need a right of their own.
    """
    from millstream.client.admin.cluster_status import find_damage

    topic = await find_topic(client, name, advice=advice)
    bounds, configs = await asyncio.gather(
        offset_bounds(client, name, list(topic.partitions)),
        topic_configs(client, name) if with_settings else asyncio.sleep(0, {}),
    )
    lost = await find_damage(client, topic, topic.partitions) if with_damage else None
    return {
        "topic": name,
        "id": str(topic.topic_id),
        "internal": topic.is_internal,
        **{word: configs[key].value or None if key in configs else None for word, key in CARD.items()},
        "partitions": [
            {
                "partition": partition.partition,
                "leader": partition.leader_id,
                "replicas": list(partition.replicas),
                "in_sync": list(partition.in_sync),
                "start": bounds[partition.partition][0],
                "end": bounds[partition.partition][1],
                "damage": _damage_of(lost, partition.partition),
            }
            for partition in topic.partitions.values()
        ],
        "settings": {key: config.value for key, config in configs.items()},
        "overrides": {key: config.value for key, config in configs.items() if config.is_override},
    }


def _damage_of(lost: list[DamagedOffsets] | None, partition: int) -> list[dict[str, int]] | None:
    if lost is None:
        return None
    return [
        {"start": damaged_range.start, "end": damaged_range.end}
        for damaged_range in lost
        if damaged_range.partition == partition
    ]


_SET, _DELETE = 0, 1

_MIN_IN_SYNC = "min.insync.replicas"

_DEFAULT_REPLICATION, _ETCD = "default-replication", "etcd"

_TIMEOUT = timedelta(seconds=30)


async def find_topic(client: Client, name: str, *, advice: str | None = None) -> TopicMetadata:
    """Find a topic, or raise `UnknownTopic` with advice: how to create it, unless other advice is given."""
    metadata = await client.metadata([name])
    if name in metadata.topics:
        return metadata.topics[name]
    needs = "DESCRIBE, which READ and WRITE include"
    error = error_from_code(metadata.errors.get(name, 3), None, about=f"topic {name!r}", needs=needs)
    if isinstance(error, UnknownTopic):
        what_to_do = advice or f"create it with: millstream topic create {name}"
        raise UnknownTopic(f"topic {name!r} does not exist; {what_to_do}")
    raise error


async def create_topic(
    client: Client, name: str, *, partitions: int, replication: int, settings: Mapping[str, str]
) -> Any:
    """Create a topic; -1 lets the broker choose a number."""
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": replication,
        "configs": [{"name": key, "value": value} for key, value in settings.items()],
    }
    response = await client.send(None, build_request("create_topics", 7, topics=[topic], timeout=_TIMEOUT))
    return _checked(response.topics[0], f"create topic {name!r}")


async def delete_topic(client: Client, name: str) -> None:
    response = await client.send(None, build_request("delete_topics", 6, topics=[{"name": name}], timeout=_TIMEOUT))
    _checked(response.responses[0], f"delete topic {name!r}")


async def grow_topic(client: Client, name: str, partitions: int) -> None:
    request = build_request("create_partitions", 3, topics=[{"name": name, "count": partitions}], timeout=_TIMEOUT)
    _checked((await client.send(None, request)).results[0], f"grow topic {name!r}")


async def alter_topic(client: Client, name: str, changes: Mapping[str, str | None]) -> None:
    """Change settings of a topic; None restores the node's default."""
    configs = [
        {"name": key, "config_operation": _DELETE if value is None else _SET, "value": value}
        for key, value in changes.items()
    ]
    resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configs": configs}
    request = build_request("incremental_alter_configs", 1, resources=[resource])
    _checked((await client.send(None, request)).responses[0], f"alter topic {name!r}")


async def check_settings_exist(client: Client, topic: str, names: Sequence[str]) -> None:
    """Raise `InvalidSetting` for the first name that is not a topic setting of this broker."""
    known = await topic_configs(client, topic) if names else {}
    for name in names:
        if name not in known:
            raise InvalidSetting(f"topics have no setting {name!r}{suggestion(name, known)}")


async def node_configs(client: Client, node: NodeId, keys: Sequence[str]) -> dict[str, str | None]:
    """Return some settings of a node; nothing if the client may not see them."""
    (result,) = await describe_configs(client, NODE_RESOURCE, [str(node)], keys, node=node)
    return {} if result.error_code else {config.name: config.value for config in result.configs}


async def default_replication(client: Client, node: NodeId) -> int | None:
    """Return the default number of replicas; None on a single node or if unknown."""
    values = await node_configs(client, node, (_DEFAULT_REPLICATION, _ETCD))
    replicas = values.get(_DEFAULT_REPLICATION)
    return int(replicas) if values.get(_ETCD) and replicas else None


async def min_in_sync(client: Client, names: Sequence[str]) -> dict[str, int]:
    """Return `min.insync.replicas` of those topics for which the broker reports it."""
    results = await describe_configs(client, TOPIC_RESOURCE, names, [_MIN_IN_SYNC]) if names else ()
    return {
        result.resource_name: int(config.value)
        for result in results
        if not result.error_code
        for config in result.configs
        if config.name == _MIN_IN_SYNC and config.value
    }


async def offset_bounds(
    client: Client, topic: str, partitions: Sequence[int], *, isolation: int = READ_UNCOMMITTED
) -> dict[int, OffsetRange]:
    starts = await client.list_offsets(topic, dict.fromkeys(partitions, EARLIEST_TIMESTAMP))
    ends = await client.list_offsets(topic, dict.fromkeys(partitions, LATEST_TIMESTAMP), isolation=isolation)
    return {partition: OffsetRange(starts[partition].offset, ends[partition].offset) for partition in partitions}


async def offsets_at(
    client: Client, topic: str, partitions: Sequence[int], position: Position, *, isolation: int = READ_UNCOMMITTED
) -> dict[int, int]:
    """Return the offset of a position in each partition; a time after the last record means the end."""
    timestamp = position.lookup_timestamp
    if timestamp is None:
        bounds = await offset_bounds(client, topic, partitions, isolation=isolation)
        return {partition: min(max(position.value, start), end) for partition, (start, end) in bounds.items()}
    listed_offsets = await client.list_offsets(topic, dict.fromkeys(partitions, timestamp), isolation=isolation)
    beyond = [partition for partition, listed in listed_offsets.items() if listed.offset < 0]
    latest = dict.fromkeys(beyond, LATEST_TIMESTAMP)
    ends = await client.list_offsets(topic, latest, isolation=isolation) if beyond else {}
    return {partition: ends.get(partition, listed).offset for partition, listed in listed_offsets.items()}


def _checked(result: Any, about: str) -> Any:
    if result.error_code:
        raise error_from_code(result.error_code, getattr(result, "error_message", None), about=about)
    return result
