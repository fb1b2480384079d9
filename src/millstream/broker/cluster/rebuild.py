"""Rebuilds the agreed state from the nodes' logs and the catalog, after etcd has lost it.

For each partition, the longest of the logs that end in the latest epoch has everything that was acknowledged: the
leader of an epoch had all of the epochs before it, and every log of one epoch is a prefix of its leader's. That holds
if all replicas are given, or at least one that was in sync. Which replicas were in sync is no longer known, so only
those with the same log begin in sync; the others fetch the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from uuid import UUID

import msgspec

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey, partition_key
from millstream.broker.cluster.last_run import UNKNOWN_NODE, FolderOwner, LastRun
from millstream.broker.cluster.membership import NO_LOCATION, Location
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Put
from millstream.broker.log.files import Files
from millstream.broker.log.store import LogStore
from millstream.core.clock import Clock
from millstream.core.errors import ClusterMismatch, CorruptState, DataFolderInvalid
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import NO_LEADER, PartitionState, encode_value
from millstream.core.topic import Topic, TopicPartition, TopicSettings

_JOURNAL_BYTES = 64 * 1024 * 1024
_NEVER_MS = 1 << 40
"""Forgetting expired producers is left to the node."""


class ReplicaSummary(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: str
    partition: int
    end: int
    epoch: int
    """The epoch of the leader that wrote its last record; -1 if the log is empty."""
    damaged: bool
    """Whether the disk lost records in the middle of it."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    node_id: int
    cluster: str
    cluster_id: str
    whole: str
    """An incarnation whose logs are complete; empty if a log may have a hole."""
    replicas: list[ReplicaSummary]
    location: Location = NO_LOCATION

    def to_json(self) -> str:
        """Encode it, to be carried from one machine to another."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: bytes) -> Inventory:
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise CorruptState(f"not an inventory of a node: {error}") from error


async def take_inventory(folder: str, files: Files, clock: Clock, *, boot_id: str) -> Inventory:
    """List every log of a folder whose node is stopped."""
    owner = FolderOwner.read(files, folder)
    if owner.node_id == UNKNOWN_NODE:
        raise DataFolderInvalid(f"{folder} is not the data folder of a node that was part of a cluster")
    store = LogStore.open(
        Path(folder), files=files, clock=clock, journal_bytes=_JOURNAL_BYTES, producer_expiry_ms=_NEVER_MS
    )
    try:
        last_run = LastRun(files, folder, boot_id=boot_id, stopped_clean=store.clean_start)
        replicas = replicas_of(store)
    finally:
        await store.close()
    return Inventory(
        node_id=owner.node_id,
        cluster=owner.cluster,
        cluster_id=owner.cluster_id,
        whole=last_run.complete_incarnation,
        replicas=replicas,
        location=owner.location,
    )


def replicas_of(store: LogStore) -> list[ReplicaSummary]:
    """Open every log of a folder, which recovers it, and describe it."""
    replicas = []
    for topic_id, index in tuple(store.stored()):
        log = store.open_log(topic_id, TopicPartition(str(topic_id), index), TopicSettings())
        replicas.append(
            ReplicaSummary(
                topic_id=str(topic_id),
                partition=index,
                end=log.end_offset,
                epoch=log.latest_epoch,
                damaged=bool(log.damaged_ranges),
            )
        )
    return replicas


EPOCHS_SKIPPED = 1000
"""Added to epochs: those without records left no trace, but clients may know them, so none may be reused."""

NOT_WHOLE = "rebuilt"
"""The incarnation of a node whose log may have a hole: no node has this name, so it is not trusted."""

ReplicasByNode = Mapping[NodeId, ReplicaSummary]
"""The logs of one partition."""


@dataclass(slots=True)
class RebuiltState:
    """The new contents of the coordination store, and the problems found."""

    states: dict[PartitionKey, PartitionState] = field(default_factory=dict)
    topics: list[Topic] = field(default_factory=list)
    """The topics with a state for every partition; the controller creates the missing states of others."""
    admitted: dict[NodeId, str] = field(default_factory=dict)
    locations: dict[NodeId, Location] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Partitions without any log: they would begin empty."""
    short: list[str] = field(default_factory=list)
    """Partitions with fewer logs than replicas: the best one may be missing."""
    fewer: list[str] = field(default_factory=list)
    """Partitions that get fewer replicas than declared, because no node was named to replace lost ones."""
    unknown_topics: set[UUID] = field(default_factory=set)
    """Topics with files that the catalog does not know; they are left alone."""

    @property
    def is_safe(self) -> bool:
        """Whether every log was found, so that no acknowledged record can be lost."""
        return not self.missing and not self.short


def derive_states(
    inventories: Sequence[Inventory],
    topics: Iterable[Topic],
    deleted: Collection[UUID],
    replaced: Collection[NodeId] = (),
) -> RebuiltState:
    """Derive the states of all partitions that the catalog declares or has a deletion record of.

    Nodes that are `replaced` lost their folder and begin with an empty one: they get copies that are missing.
    """
    _check_one_cluster(inventories, replaced)
    rebuilt = RebuiltState(
        admitted={NodeId(inventory.node_id): inventory.whole or NOT_WHOLE for inventory in inventories},
        locations={NodeId(inventory.node_id): inventory.location for inventory in inventories},
    )
    replicas: dict[PartitionKey, dict[NodeId, ReplicaSummary]] = {}
    for inventory in inventories:
        for replica in inventory.replicas:
            key = UUID(replica.topic_id), PartitionIndex(replica.partition)
            replicas.setdefault(key, {})[NodeId(inventory.node_id)] = replica
    known = set(deleted)
    for topic in topics:
        known.add(topic.topic_id)
        whole = [
            _add(rebuilt, topic, index, replicas.get((topic.topic_id, index), {}), replaced)
            for index in map(PartitionIndex, range(topic.partitions))
        ]
        if all(whole):
            rebuilt.topics.append(topic)
    for key, logs in replicas.items():
        if key[0] in deleted:
            # The nodes then remove their files.
            rebuilt.states[key] = state_of(logs, key[1], len(logs))
    rebuilt.unknown_topics = {key[0] for key in replicas} - known
    return rebuilt


def state_of(logs: ReplicasByNode, index: int, replication: int, replaced: Collection[NodeId] = ()) -> PartitionState:
    """Return the state of a partition with these logs. It has no leader until the controller elects one.

    Where there are fewer logs than replicas, `replaced` nodes fill up: out of sync, because they have nothing.
    """
    best = max((log.epoch, log.end) for log in logs.values())
    same = [node for node, log in logs.items() if (log.epoch, log.end) == best]
    # A damaged replica could not be repaired if it led.
    in_sync = [node for node in same if not logs[node].damaged] or same
    by_worth = sorted(logs, key=lambda node: (node in in_sync, logs[node].epoch, logs[node].end), reverse=True)
    turn = index % max(len(replaced), 1)
    others = [node for node in (*sorted(replaced)[turn:], *sorted(replaced)[:turn]) if node not in logs]
    replicas_kept = sorted([*by_worth, *others][:replication])
    turned = index % len(replicas_kept)
    replicas = tuple(replicas_kept[turned:] + replicas_kept[:turned])
    return PartitionState(
        replicas=replicas,
        leader=NO_LEADER,
        leader_epoch=Epoch(max(log.epoch for log in logs.values()) + EPOCHS_SKIPPED),
        in_sync=tuple(node for node in replicas if node in in_sync),
    )


def _add(
    rebuilt: RebuiltState, topic: Topic, index: PartitionIndex, replicas: ReplicasByNode, replaced: Collection[NodeId]
) -> bool:
    """Add the state of a partition; return False if there is no log of it."""
    name = f"{topic.name}-{index}"
    if not replicas:
        rebuilt.missing.append(name)
        return False
    if len(replicas) < topic.replication:
        rebuilt.short.append(name)
    state = rebuilt.states[topic.topic_id, index] = state_of(replicas, index, topic.replication, replaced)
    if len(state.replicas) < topic.replication:
        rebuilt.fewer.append(name)
    return True


def _check_one_cluster(inventories: Sequence[Inventory], replaced: Collection[NodeId]) -> None:
    nodes = [inventory.node_id for inventory in inventories]
    both = set(replaced) & set(nodes)
    if both:
        raise ClusterMismatch(f"node {min(both)} is to be replaced, but its folder is given too; omit one of them")
    twice = {node for node in nodes if nodes.count(node) > 1}
    if twice:
        raise ClusterMismatch(f"node {min(twice)} is given twice; pass each node's folder once, the newest")
    clusters = {(inventory.cluster, inventory.cluster_id) for inventory in inventories}
    if len(clusters) > 1:
        raise ClusterMismatch(f"these are folders of several clusters: {sorted(clusters)}")


async def write(store: CoordinationStore, rebuilt: RebuiltState, cluster_id: str) -> None:
    """Write the state into a store that knows nothing of this cluster. Nodes are refused until all of it is written."""
    await check_unknown(store)
    unexpected = (await store.read(keys.PARTITIONS)).entries.keys() - {partition_key(key) for key in rebuilt.states}
    changes: list[Change] = [Delete(key) for key in unexpected]
    changes += [Put(partition_key(key), encode_value(state)) for key, state in rebuilt.states.items()]
    changes += [Put(keys.topic_key(topic.topic_id), encode_value(topic)) for topic in rebuilt.topics]
    changes += [Put(keys.location_key(node), encode_value(location)) for node, location in rebuilt.locations.items()]
    # The key that lets nodes start is written last, so that an interrupted attempt must be repeated.
    changes += [Put(keys.admitted_key(node), incarnation) for node, incarnation in rebuilt.admitted.items()]
    changes.append(Put(keys.CLUSTER_ID, cluster_id))
    rest = iter(changes)
    while batch := list(islice(rest, CHANGES_MAX)):
        await store.change(batch)


async def check_unknown(store: CoordinationStore) -> None:
    """Refuse if the store knows nodes of the cluster: then nothing is lost, or a new cluster was begun."""
    for prefix in (keys.ADMITTED, keys.NODES, keys.CLUSTER_ID):
        if (await store.read(prefix)).entries:
            raise ClusterMismatch(
                "etcd knows this cluster, so there is nothing to rebuild; if a new node has started a new cluster, "
                "stop it and delete its keys: etcdctl del --prefix /millstream/NAME/, with the name of the cluster"
            )
