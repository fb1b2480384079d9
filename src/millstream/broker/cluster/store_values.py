"""The values in the coordination store, as JSON: registrations, topics, deletions, placements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millstream.broker.cluster.membership import Node
from millstream.core.errors import CorruptState
from millstream.core.ids import NodeId
from millstream.core.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistration:
    """A running node, as it registered itself."""

    node: Node
    http: str
    incarnation: str
    """Differs with each registration."""
    version: str
    unclean: bool
    """Whether its log may have a hole: the machine went down without a clean stop, or the folder is another one."""
    revision: int = 0

    def to_json(self) -> str:
        """Encode it for the coordination store."""
        content = {
            "host": self.node.host,
            "port": self.node.port,
            "rack": self.node.rack,
            "endpoints": self.node.endpoints,
            "assertion_key": self.node.assertion_key,
            "machine": self.node.machine,
            "secret": self.node.secret,
            "http": self.http,
            "incarnation": self.incarnation,
            "version": self.version,
            "unclean": self.unclean,
        }
        return _compact(content)

    @classmethod
    def from_json(cls, node_id: NodeId, text: str, revision: int) -> NodeRegistration:
        """Decode it; unknown fields are ignored."""
        try:
            content = json.loads(text)
            return cls(
                node=Node(
                    node_id=node_id,
                    host=str(content["host"]),
                    port=int(content["port"]),
                    rack=content.get("rack"),
                    endpoints={
                        str(name): (str(host), int(port)) for name, (host, port) in content["endpoints"].items()
                    },
                    assertion_key=str(content.get("assertion_key", "")),
                    machine=content.get("machine"),
                    secret=str(content.get("secret", "")),
                ),
                http=str(content.get("http", "")),
                incarnation=str(content["incarnation"]),
                version=str(content.get("version", "")),
                unclean=bool(content["unclean"]),
                revision=revision,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptState(f"a node's registration cannot be read ({error!r}): {text[:200]!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A topic whose files may be removed."""

    name: str
    replicas: tuple[NodeId, ...]
    """Every node that may have files of it."""

    def to_json(self) -> str:
        """Encode it for the coordination store."""
        return _compact({"name": self.name, "replicas": self.replicas})

    @classmethod
    def from_json(cls, text: str) -> Deletion:
        """Decode it."""
        try:
            content = json.loads(text)
            return cls(name=str(content["name"]), replicas=tuple(NodeId(int(one)) for one in content["replicas"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptState(f"a deletion cannot be read ({error!r}): {text[:200]!r}") from error


def topic_to_json(topic: Topic) -> str:
    """Encode a topic for the coordination store."""
    content = {
        "name": topic.name,
        "partitions": topic.partitions,
        "replication": topic.replication,
        "overrides": dict(topic.overrides),
        "created_ms": topic.created_ms,
        "mirror": topic.mirror,
        "is_draining": topic.is_draining,
        "origins": topic.origins,
    }
    return _compact(content)


def topic_from_json(topic_id: UUID, text: str) -> Topic:
    """Decode a topic."""
    try:
        content = json.loads(text)
        return Topic(
            name=str(content["name"]),
            topic_id=topic_id,
            partitions=int(content["partitions"]),
            replication=int(content["replication"]),
            overrides={str(name): str(value) for name, value in content["overrides"].items()},
            created_ms=int(content["created_ms"]),
            mirror=str(content["mirror"]),
            is_draining=bool(content["is_draining"]),
            origins=tuple(str(cluster_id) for cluster_id in content["origins"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptState(f"a topic cannot be read ({error!r}): {text[:200]!r}") from error


def settings_to_json(overrides: Mapping[str, str]) -> str:
    """Encode the settings of nodes for the coordination store."""
    return _compact(dict(overrides))


def settings_from_json(text: str) -> dict[str, str]:
    """Decode the settings of nodes."""
    try:
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise CorruptState(f"settings of nodes cannot be read ({error!r}): {text[:200]!r}") from error


Placement = Mapping[int, tuple[NodeId, ...]]
"""Replicas chosen by the user, by partition."""


def placement_to_json(placement: Placement) -> str:
    """Encode replicas chosen by the user."""
    return _compact({str(index): replicas for index, replicas in placement.items()})


def placement_from_json(text: str) -> Placement:
    """Decode replicas chosen by the user."""
    try:
        return {int(index): tuple(NodeId(int(one)) for one in replicas) for index, replicas in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptState(f"a placement cannot be read ({error!r}): {text[:200]!r}") from error


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
