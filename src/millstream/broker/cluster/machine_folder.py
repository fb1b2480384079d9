"""The data folder of a machine: the stores in it, and which node's logs are where.

A machine with one process has its logs in the folder itself. With several, each node has a subfolder. The agreed states
of partitions decide: `settle` changes them first, then moves every log to the folder of its node, before any node runs.
It can be interrupted and repeated at any point; a mark in the folder says that it is under way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from uuid import UUID

from millstream.broker.catalog.catalog import CATALOG_NAME, Catalog
from millstream.broker.catalog.sealing import Sealing
from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import FILE_NAME, CoordinationFile, EmbeddedService, EmbeddedStore
from millstream.broker.cluster.keys import Deletion, PartitionKey, parse_partition, partition_key, topic_from_json
from millstream.broker.cluster.last_run import FILE_NAME as LAST_RUN_NAME
from millstream.broker.cluster.last_run import UNKNOWN_NODE, FolderOwner, LastRun, read_boot_id
from millstream.broker.cluster.rebuild import Inventory, derive_states, replicas_of
from millstream.broker.cluster.rebuild import write as write_states
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Expect, Put
from millstream.broker.log.files import Files
from millstream.broker.log.folder import CLEAN_STOP_NAME, FORMAT_NAME, JOURNAL_NAME, LOCK_NAME, PARTITIONS_NAME
from millstream.broker.log.ledger import LEDGER_NAME, LogKey
from millstream.broker.log.scrub import SCRUB_NAME
from millstream.broker.log.state import replace_file
from millstream.broker.log.store import LogStore
from millstream.core.clock import Clock
from millstream.core.errors import ClusterMismatch, CorruptState, InvalidSetting
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import NO_LEADER, PartitionState, Versioned, encode_value
from millstream.core.topic import TopicPartition, TopicSettings

_logger = logging.getLogger(__name__)

NODE_PREFIX = "node-"
MARK_NAME = "moving"
ADOPTING_NAME = "adopting"
"""Marks a folder whose stores are being moved to those of a cluster."""
ID_STEP = 1000
"""The nodes of a machine whose first is 1 are 1, 1001, 2001: unique over machines with any number of cores."""

_JOURNAL_BYTES = 64 * 1024 * 1024
_NEVER_MS = 1 << 40
"""Forgetting expired producers is left to the node."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a machine, and the folders of their logs."""

    data: str
    folders: Mapping[NodeId, str]

    @classmethod
    def of(cls, data: str, first: int, cores: int) -> Layout:
        """Return the layout of a machine with this many processes, the first of which has this id."""
        if cores == 1:
            return cls(data, {NodeId(first): data})
        if first >= ID_STEP:
            raise InvalidSetting(
                f"with --cores {cores} the other nodes of this machine get ids from {first} in steps of {ID_STEP}; "
                f"pass a --node-id below {ID_STEP}"
            )
        ids = [NodeId(first + number * ID_STEP) for number in range(cores)]
        return cls(data, {node: f"{data}/{NODE_PREFIX}{node}" for node in ids})

    def without(self, node: NodeId) -> Layout:
        return Layout(self.data, {node_id: folder for node_id, folder in self.folders.items() if node_id != node})

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Return the nodes, the first of the machine first."""
        return tuple(self.folders)

    def present(self, files: Files) -> dict[str, NodeId]:
        """Return every folder with logs in it, and the node that it belongs to."""
        nodes_by_folder = {}
        if files.exists(f"{self.data}/{PARTITIONS_NAME}"):
            owner = FolderOwner.read(files, self.data).node_id
            nodes_by_folder[self.data] = self.nodes[0] if owner == UNKNOWN_NODE and self.nodes else NodeId(owner)
        for name in sorted(files.names(self.data)):
            number = name.removeprefix(NODE_PREFIX)
            if number != name and number.isdigit():
                nodes_by_folder[f"{self.data}/{name}"] = NodeId(int(number))
        return nodes_by_folder

    def check_owner(self, files: Files, *, in_cluster: bool) -> None:
        """Raise if the folder belongs to a cluster and is started without one or with other nodes, or vice versa."""
        if files.exists(f"{self.data}/{ADOPTING_NAME}"):
            raise ClusterMismatch(
                f"{self.data} is being adopted by a cluster, which was interrupted; repeat `millstream cluster adopt "
                f"--data {self.data} …`, or go back with --undo"
            )
        if in_cluster:
            if files.exists(f"{self.data}/{CATALOG_NAME}"):
                raise ClusterMismatch(
                    f"{self.data} belongs to a standalone machine; `millstream cluster adopt --data {self.data}` with "
                    "the same --etcd and --catalog makes it the first of a cluster, or pass another --data"
                )
            if not self.fits(files):
                present_nodes = sorted(set(self.present(files).values()))
                nodes = f"node{'s' if len(present_nodes) > 1 else ''} {', '.join(map(str, present_nodes))}"
                raise ClusterMismatch(
                    f"{self.data} has the logs of {nodes}, and in a cluster logs are not moved between the "
                    f"processes of a machine; pass {self.used_flags(files)} as before, or another --data"
                )
            present = self.present(files).values()
            added = [int(node) for node in self.nodes if present and node > max(present)]
            if added:
                _logger.warning(
                    "--cores was raised, and cannot be lowered again in a cluster; the new nodes start empty",
                    extra={"new_nodes": str(added)},
                )
        elif any(FolderOwner.read(files, folder).cluster for folder in self.present(files)):
            raise ClusterMismatch(
                f"{self.data} belongs to a node of a cluster; pass --etcd and --catalog too, or another --data"
            )

    def used_flags(self, files: Files) -> str:
        """Return the flags for the nodes that last had the folder; it may lack those that could not be started."""
        present = self.present(files)
        numbered = [node for folder, node in present.items() if folder != self.data]
        if not numbered:
            return f"--node-id {present.get(self.data, NodeId(1))} --cores 1"
        return f"--node-id {numbered[0] % ID_STEP} --cores {max(2, max(numbered) // ID_STEP + 1)}"

    def fits(self, files: Files) -> bool:
        """Whether every log belongs to a node of this layout and is in its folder; the others have none yet."""
        expected = {folder: node for node, folder in self.folders.items()}
        return all(expected.get(folder) == node for folder, node in self.present(files).items())

    def is_settled(self, files: Files) -> bool:
        """Whether every log is in the folder that this layout assigns; checks few files."""
        present = self.present(files)
        if not present:
            return True
        expected = {folder: node for node, folder in self.folders.items()}
        return (
            present == expected
            and not files.exists(f"{self.data}/{MARK_NAME}")
            and (files.exists(f"{self.data}/{FILE_NAME}") or not any(_has_logs(files, folder) for folder in present))
        )


def _has_logs(files: Files, folder: str) -> bool:
    return bool(files.names(f"{folder}/{PARTITIONS_NAME}"))


def open_coordination(files: Files, data: str, clock: Clock) -> EmbeddedService:
    """Open the coordination store in a data folder whose lock is held."""
    return EmbeddedService(clock, file=CoordinationFile(files, data), history_max=1000)


async def adopt_known_topics(store: CoordinationStore, catalog: Catalog) -> None:
    """Restore the topics that the nodes have agreed on, and the cluster's id, in a new catalog after a loss."""
    known = (await store.read(keys.CLUSTER_ID)).entries.get(keys.CLUSTER_ID)
    if known is None or known.value == catalog.cluster_id:
        return
    topics = (await store.read(keys.TOPICS)).entries.values()
    restored = catalog.restore(known.value, [topic_from_json(entry.value) for entry in topics])
    _logger.warning(
        "the catalog is not the one that was used before; the topics stored here were added to it, but its "
        "subscriptions, pipelines, users and schemas are its own",
        extra={"topics": restored},
    )


def assign_partitions(current: Mapping[PartitionKey, NodeId], nodes: Sequence[NodeId]) -> dict[PartitionKey, NodeId]:
    """Return the node of each partition: balanced by topic and in total, with the fewest moves."""
    per_node_max = -(-len(current) // len(nodes))
    topic_sizes = Counter(topic_id for topic_id, _ in current)
    total: Counter[NodeId] = Counter()
    by_topic: Counter[tuple[UUID, NodeId]] = Counter()
    placed: dict[PartitionKey, NodeId] = {}

    def assign(key: PartitionKey, node: NodeId) -> None:
        placed[key] = node
        total[node] += 1
        by_topic[key[0], node] += 1

    homeless = []
    for key in sorted(current):
        node, topic_max = current[key], -(-topic_sizes[key[0]] // len(nodes))
        if node in nodes and by_topic[key[0], node] < topic_max and total[node] < per_node_max:
            assign(key, node)
        else:
            homeless.append(key)
    for key in homeless:
        assign(key, min(nodes, key=lambda node: (by_topic[key[0], node], total[node], node)))
    return placed


class FolderSettlement:
    """Moves the logs of a stopped machine to the folders that a layout assigns."""

    def __init__(self, layout: Layout, files: Files, clock: Clock, store: CoordinationStore) -> None:
        """The caller holds the lock of the machine's folder."""
        self._layout = layout
        self._files = files
        self._clock = clock
        self._store = store
        self._own_nodes: set[NodeId] = set()

    async def check(self) -> None:
        """Raise if a partition is being moved to or from a node that this layout lacks; change nothing."""
        await self._find_hosts(self._layout.present(self._files))

    async def run(self, catalog: Catalog) -> None:
        """Settle: states first, then logs."""
        layout, files = self._layout, self._files
        present = layout.present(files)
        for folder in present:
            await close_cleanly(folder, files, self._clock, is_locked=folder == layout.data)
        if not (await self._store.read(keys.CLUSTER_ID)).entries:
            await self._rebuild(present, catalog)
        await self._remove_copies(present)
        await self._change_states(present)
        await self._move_logs(present)
        for folder, node in present.items():
            if layout.folders.get(node) != folder and files.exists(f"{folder}/{LAST_RUN_NAME}"):
                # It is the folder of another node now.
                files.remove(f"{folder}/{LAST_RUN_NAME}")
                files.sync_directory(folder)
        files.remove(f"{layout.data}/{MARK_NAME}")
        files.sync_directory(layout.data)
        _logger.info(
            "the logs of this machine are in the folders of their nodes",
            extra={"nodes": ", ".join(map(str, layout.nodes))},
        )

    def _open(self, folder: str) -> LogStore:
        return _open_logs(folder, self._files, self._clock, is_locked=folder == self._layout.data)

    async def _rebuild(self, present: Mapping[str, NodeId], catalog: Catalog) -> None:
        """Derive the agreed states from the logs: the file with them is missing or new."""
        inventories = []
        for folder, node in present.items():
            store = self._open(folder)
            try:
                last_run = LastRun(self._files, folder, boot_id=read_boot_id(), stopped_clean=True)
                replicas = replicas_of(store)
            finally:
                await store.close()
            inventories.append(
                Inventory(
                    node_id=node, cluster="", cluster_id="", whole=last_run.complete_incarnation, replicas=replicas
                )
            )
        rebuilt = derive_states(inventories, catalog.topics(), catalog.deleted_topic_ids())
        await write_states(self._store, rebuilt, catalog.cluster_id)
        _logger.warning(
            "partition states were derived from the logs, because the file %r does not have them",
            FILE_NAME,
            extra={"partitions": len(rebuilt.states)},
        )

    # -- the agreed states ----------------------------------------------------------------------------------

    async def _remove_copies(self, present: Mapping[str, NodeId]) -> None:
        """Remove the logs that nodes have yet to remove after a move, while the states still identify them."""
        removed = (await self._store.read(keys.REMOVED)).entries
        if not removed:
            return
        states = (await self._store.read(keys.PARTITIONS)).entries
        async with AsyncExitStack() as stack:
            stores: dict[NodeId, LogStore] = {}
            for folder, node in present.items():
                stores[node] = self._open(folder)
                stack.push_async_callback(stores[node].close)
            stored = {node: set(store.stored()) for node, store in stores.items()}
            for name in removed:
                partition, _, number = name.removeprefix(keys.REMOVED).rpartition("/")
                key, node = parse_partition(partition), NodeId(int(number))
                entry = states.get(partition_key(key))
                hosts = () if entry is None else PartitionState.from_json(entry.value).replicas
                is_copy = node not in hosts and any(key in stored.get(host, ()) for host in hosts)
                if is_copy and key in stored.get(node, ()):
                    log = stores[node].open_log(key[0], TopicPartition(str(key[0]), key[1]), TopicSettings())
                    stores[node].delete_log(log, topic_remains=True)
        await self._change(map(Delete, removed))

    async def _find_hosts(self, present: Mapping[str, NodeId]) -> dict[PartitionKey, tuple[NodeId, Versioned]]:
        """Return the state and the node of each partition that one node of this machine hosts.

        A partition that is being moved between two of them is left alone if both keep their folders.
        """
        states = {
            parse_partition(key.removeprefix(keys.PARTITIONS)): Versioned(
                PartitionState.from_json(entry.value), entry.revision
            )
            for key, entry in (await self._store.read(keys.PARTITIONS)).entries.items()
        }
        # Every node that a state names is one of this machine, which shares its stores with no other; it may be one
        # that never ran, because a start with more processes was interrupted.
        named = (node for versioned in states.values() for node in versioned.state.replicas)
        self._own_nodes = {*present.values(), *self._layout.nodes, *named}
        remaining_nodes = self._remaining_nodes(present)
        hosts = {}
        for key, state in states.items():
            nodes = state.state.replicas
            if len(nodes) == 1:
                hosts[key] = nodes[0], state
            elif not remaining_nodes.issuperset(nodes):
                topic = (await self._store.read(keys.topic_key(key[0]))).entries.values()
                name = next((topic_from_json(entry.value).name for entry in topic), key[0])
                raise ClusterMismatch(
                    f"partition {key[1]} of topic {name} is being moved between nodes "
                    f"{' and '.join(map(str, nodes))} of this machine; let that finish with "
                    f"{self._layout.used_flags(self._files)} as before, or end it with `millstream cluster cancel`"
                )
        return hosts

    def _remaining_nodes(self, present: Mapping[str, NodeId]) -> set[NodeId]:
        return {node for folder, node in present.items() if self._layout.folders.get(node) == folder}

    async def _change_states(self, present: Mapping[str, NodeId]) -> None:
        hosts = await self._find_hosts(present)
        placed = assign_partitions({key: node for key, (node, _) in hosts.items()}, self._layout.nodes)
        batch: list[tuple[Change, Expect]] = []
        for key, node in placed.items():
            current, (state, revision) = hosts[key]
            if node != current:
                name = partition_key(key)
                batch.append((Put(name, encode_value(_replace_node(state, current, node))), Expect(name, revision)))
        await self._write(batch)
        await self._change_records(present)

    async def _write(self, batch: Sequence[tuple[Change, Expect]]) -> None:
        rest = iter(batch)
        while some := list(islice(rest, CHANGES_MAX)):
            if await self._store.change([change for change, _ in some], [expect for _, expect in some]) is None:
                raise ClusterMismatch("the state of a partition was changed meanwhile; start again")

    async def _change_records(self, present: Mapping[str, NodeId]) -> None:
        """Drop nodes that this machine no longer has; its first node takes over their pending removals."""
        layout, first = self._layout, self._layout.nodes[0]
        remaining_nodes = self._remaining_nodes(present)
        removed_nodes = self._own_nodes - set(layout.nodes)
        changes: list[Change] = [Delete(keys.admitted_key(node)) for node in self._own_nodes - remaining_nodes]
        changes += [Delete(key(node)) for node in removed_nodes for key in (keys.drained_key, keys.location_key)]
        for entry in (await self._store.read(keys.DELETED)).entries.values():
            if keys.DONE in entry.key:
                continue
            deletion = Deletion.from_json(entry.value)
            replicas = {first if node in self._own_nodes else node for node in deletion.replicas}
            if replicas != set(deletion.replicas):
                changes.append(Put(entry.key, encode_value(replace(deletion, replicas=tuple(sorted(replicas))))))
        await self._change(changes)

    async def _change(self, changes: Iterable[Change]) -> None:
        rest = iter(changes)
        while some := list(islice(rest, CHANGES_MAX)):
            await self._store.change(some)

    # -- the logs -------------------------------------------------------------------------------------------

    async def _move_logs(self, present: Mapping[str, NodeId]) -> None:
        layout, first = self._layout, self._layout.nodes[0]
        entries = (await self._store.read(keys.PARTITIONS)).entries
        async with AsyncExitStack() as stack:
            stores: dict[str, LogStore] = {}
            for folder in {**present, **{folder: node for node, folder in layout.folders.items()}}:
                stores[folder] = self._open(folder)
                stack.push_async_callback(stores[folder].close)
            for folder in present:
                moves: dict[str, list[LogKey]] = {}
                for key in tuple(stores[folder].stored()):
                    entry = entries.get(partition_key((key[0], PartitionIndex(key[1]))))
                    # The first node keeps logs of undeclared topics.
                    nodes = (first,) if entry is None else PartitionState.from_json(entry.value).replicas
                    target = layout.folders[nodes[0]]
                    if target != folder and len(nodes) == 1:
                        moves.setdefault(target, []).append(key)
                for target, logs in moves.items():
                    stores[folder].hand_over(logs, stores[target])
        for folder in present:
            if folder not in layout.folders.values():
                self._remove_emptied(folder)

    def _remove_emptied(self, folder: str) -> None:
        """Remove the remains in a folder that no longer belongs to a node."""
        files = self._files
        for name in files.names(f"{folder}/{PARTITIONS_NAME}"):
            # Of a topic whose last log was moved when this was interrupted.
            files.remove_directory(f"{folder}/{PARTITIONS_NAME}/{name}")
        for name in (JOURNAL_NAME, PARTITIONS_NAME):
            if files.exists(f"{folder}/{name}"):
                files.remove_directory(f"{folder}/{name}")
        for name in (LEDGER_NAME, CLEAN_STOP_NAME, LAST_RUN_NAME, SCRUB_NAME, FORMAT_NAME):
            if files.exists(f"{folder}/{name}"):
                files.remove(f"{folder}/{name}")
        if folder != self._layout.data:
            for name in files.names(folder):
                files.remove(f"{folder}/{name}")
            files.remove_directory(folder)
        files.sync_directory(self._layout.data)


def _replace_node(state: PartitionState, old: NodeId, new: NodeId) -> PartitionState:
    """Return a state with another node of the same machine, which gets the same log."""

    def renamed(nodes: Sequence[NodeId]) -> Iterator[NodeId]:
        return (new if node == old else node for node in nodes)

    changed = replace(
        state,
        replicas=tuple(renamed(state.replicas)),
        in_sync=tuple(renamed(state.in_sync)),
        eligible=tuple(renamed(state.eligible)),
    )
    return changed.elected(NO_LEADER) if state.leader == old else changed


def _open_logs(folder: str, files: Files, clock: Clock, *, is_locked: bool) -> LogStore:
    return LogStore.open(
        Path(folder),
        files=files,
        clock=clock,
        journal_bytes=_JOURNAL_BYTES,
        producer_expiry_ms=_NEVER_MS,
        is_locked=is_locked,
    )


async def close_cleanly(folder: str, files: Files, clock: Clock, *, is_locked: bool) -> None:
    """Recover the logs of a folder after an unclean stop, so that they consist of their files alone."""
    store = _open_logs(folder, files, clock, is_locked=is_locked)
    try:
        LastRun(files, folder, boot_id=read_boot_id(), stopped_clean=store.clean_start)
        for topic_id, index in tuple(store.unrecovered):
            store.open_log(topic_id, TopicPartition(str(topic_id), index), TopicSettings())
    finally:
        await store.close()
    if store.stop_failure is not None:
        raise CorruptState(f"{folder}: {store.stop_failure}")


async def settle(
    layout: Layout, files: Files, clock: Clock, *, sealing: Sealing | None = None, is_locked: bool = False
) -> None:
    """Convert a standalone machine to a layout, unless it has it already."""
    if layout.is_settled(files):
        return
    with ExitStack() as stack:
        if not is_locked:
            stack.callback(files.close, files.lock(f"{layout.data}/{LOCK_NAME}"))
        if not files.exists(f"{layout.data}/{FILE_NAME}"):
            # Before it is created: it would look complete.
            mark(layout, files)
        service = stack.enter_context(closing(open_coordination(files, layout.data, clock)))
        catalog = stack.enter_context(closing(Catalog.open_folder(Path(layout.data), sealing=sealing)))
        await move_logs(layout, files, clock, service, catalog)


async def move_logs(layout: Layout, files: Files, clock: Clock, service: EmbeddedService, catalog: Catalog) -> None:
    """Convert a stopped machine to a layout; after an interruption, the next start continues."""
    settlement = FolderSettlement(layout, files, clock, EmbeddedStore(service, clock))
    await settlement.check()
    mark(layout, files)
    await settlement.run(catalog)


def mark(layout: Layout, files: Files) -> None:
    """Mark the folder as being converted, before anything in it is changed."""
    replace_file(files, layout.data, MARK_NAME, b"logs are moved between the folders of nodes\n")
