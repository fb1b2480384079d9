"""The keys of the coordination store, each with what it holds, and the values that are JSON.

nodes/<id>                      a running node, as JSON; leased
admitted/<id>                   the incarnation of that node which the controller has admitted
leaving/<id>                    a node that is about to stop and should lead nothing; leased
controller                      the id of the node that decides; leased. Its revision fences the node before it
topics/<topic id>               a topic as the catalog declares it, as JSON
partitions/<topic id>/<index>   the `PartitionState` of a partition, as JSON
reassignments/<topic id>/<index>     a move of a partition to other nodes that is under way, as JSON
removed/<topic id>/<index>/<id>      a node that no longer hosts the partition, and may remove its files
placements/<topic id>           replicas that a user chose for partitions that do not exist yet, as JSON
deleted/<topic id>              a topic whose files may be removed, as JSON
deleted/<topic id>/done/<id>    a node that has no files of it left
drained/<id>                    a node that gets no new leaders and replicas
plan                            the last plan of moves that was proposed, without its moves, as JSON
plan-moves/<plan id>/<number>   some of its moves, as JSON
settings/<id>, settings/default      what was set for a node while it ran, or for all nodes, as JSON
pipelines-owner                 the id of the node that runs the pipelines; leased
catalog-version                 changed after each change of the catalog: who made it, if it succeeded, and a new text
cluster-id                      the id that clients see
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millstream.broker.cluster.membership import Node
from millstream.core.errors import CorruptState
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import Topic

NODES = "nodes/"
ADMITTED = "admitted/"
LEAVING = "leaving/"
CONTROLLER = "controller"
TOPICS = "topics/"
PARTITIONS = "partitions/"
REASSIGNMENTS = "reassignments/"
REMOVED = "removed/"
PLACEMENTS = "placements/"
DELETED = "deleted/"
DONE = "/done/"
SETTINGS = "settings/"
DRAINED = "drained/"
PLAN = "plan"
PLAN_MOVES = "plan-moves/"
PIPELINES_OWNER = "pipelines-owner"
CATALOG_VERSION = "catalog-version"
CLUSTER_ID = "cluster-id"

_ALL_NODES = "default"

PartitionKey = tuple[UUID, PartitionIndex]
"""One partition, by the topic's id."""


def node_key(node: NodeId) -> str:
    """Return where a node registers."""
    return f"{NODES}{node}"


def admitted_key(node: NodeId) -> str:
    """Return where the controller admits a node."""
    return f"{ADMITTED}{node}"


def leaving_key(node: NodeId) -> str:
    """Return where a node announces that it is about to stop."""
    return f"{LEAVING}{node}"


def topic_key(topic_id: UUID) -> str:
    """Return where a topic is published."""
    return f"{TOPICS}{topic_id}"


def partition_key(partition: PartitionKey) -> str:
    """Return where the state of a partition is kept."""
    return f"{PARTITIONS}{partition[0]}/{partition[1]}"


def reassignment_key(partition: PartitionKey) -> str:
    """Return where a move of a partition is published."""
    return f"{REASSIGNMENTS}{partition[0]}/{partition[1]}"


def removed_key(partition: PartitionKey, node: NodeId) -> str:
    """Return where a node is asked to remove its files of a partition."""
    return f"{REMOVED}{partition[0]}/{partition[1]}/{node}"


def placement_key(topic_id: UUID) -> str:
    """Return where replicas chosen by the user wait for the controller."""
    return f"{PLACEMENTS}{topic_id}"


def deleted_key(topic_id: UUID) -> str:
    """Return where the deletion of a topic is published."""
    return f"{DELETED}{topic_id}"


def done_key(topic_id: UUID, node: NodeId) -> str:
    """Return where a node reports that it has removed a deleted topic's files."""
    return f"{DELETED}{topic_id}{DONE}{node}"


def drained_key(node: NodeId) -> str:
    """Return where a node is marked as drained."""
    return f"{DRAINED}{node}"


def plan_moves_key(plan_id: str, number: int) -> str:
    """Return where a piece of a plan's moves is kept."""
    return f"{PLAN_MOVES}{plan_id}/{number}"


def settings_key(scope: str) -> str:
    """Return where the settings of a node are published, or of all nodes if the scope is empty."""
    return f"{SETTINGS}{scope or _ALL_NODES}"


def parse_scope(rest: str) -> str:
    """Read what follows `settings/`."""
    return "" if rest == _ALL_NODES else rest


def parse_partition(rest: str) -> PartitionKey:
    """Parse what follows `partitions/`; raise ValueError if it is not a partition."""
    topic_id, _, index = rest.partition("/")
    return UUID(topic_id), PartitionIndex(int(index))


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
