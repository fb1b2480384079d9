"""The keys of the coordination store, their contents, and the JSON encoding of values.

nodes/<id>                      a running node, as JSON; leased
admitted/<id>                   the incarnation of that node which the controller has admitted
locations/<id>                  the machine and rack of a node, as JSON, also while it is away
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
settings/<id>, settings/default      settings of a node, or of all nodes, changed at run time, as JSON
pipelines-owner                 the id of the node that runs the pipelines; leased
catalog-version                 changed after each catalog change: its author, its success, and a unique text
cluster-id                      the id that clients see
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from millstream.broker.cluster.membership import Node
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import decode_value
from millstream.core.topic import Topic

NODES = "nodes/"
ADMITTED = "admitted/"
LOCATIONS = "locations/"
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
    return f"{NODES}{node}"


def admitted_key(node: NodeId) -> str:
    return f"{ADMITTED}{node}"


def location_key(node: NodeId) -> str:
    return f"{LOCATIONS}{node}"


def leaving_key(node: NodeId) -> str:
    return f"{LEAVING}{node}"


def topic_key(topic_id: UUID) -> str:
    return f"{TOPICS}{topic_id}"


def partition_key(partition: PartitionKey) -> str:
    return f"{PARTITIONS}{partition[0]}/{partition[1]}"


def reassignment_key(partition: PartitionKey) -> str:
    return f"{REASSIGNMENTS}{partition[0]}/{partition[1]}"


def removed_key(partition: PartitionKey, node: NodeId) -> str:
    return f"{REMOVED}{partition[0]}/{partition[1]}/{node}"


def placement_key(topic_id: UUID) -> str:
    return f"{PLACEMENTS}{topic_id}"


def deleted_key(topic_id: UUID) -> str:
    return f"{DELETED}{topic_id}"


def done_key(topic_id: UUID, node: NodeId) -> str:
    return f"{DELETED}{topic_id}{DONE}{node}"


def drained_key(node: NodeId) -> str:
    return f"{DRAINED}{node}"


def plan_moves_key(plan_id: str, number: int) -> str:
    return f"{PLAN_MOVES}{plan_id}/{number}"


def settings_key(scope: str) -> str:
    """Return the key of a node's settings, or of all nodes' settings if the scope is empty."""
    return f"{SETTINGS}{scope or _ALL_NODES}"


def parse_scope(rest: str) -> str:
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

    @classmethod
    def from_json(cls, text: str, revision: int) -> NodeRegistration:
        return replace(decode_value(text, cls, "a node's registration"), revision=revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A topic whose files may be removed."""

    name: str
    replicas: tuple[NodeId, ...]
    """Every node that may have files of it."""

    @classmethod
    def from_json(cls, text: str) -> Deletion:
        return decode_value(text, cls, "a deletion")


def topic_from_json(text: str) -> Topic:
    return decode_value(text, Topic, "a topic")


def settings_from_json(text: str) -> dict[str, str]:
    return decode_value(text, dict[str, str], "settings of nodes")


Placement = Mapping[int, tuple[NodeId, ...]]
"""Replicas chosen by the user, by partition."""


def placement_from_json(text: str) -> Placement:
    return decode_value(text, dict[int, tuple[NodeId, ...]], "a placement")
