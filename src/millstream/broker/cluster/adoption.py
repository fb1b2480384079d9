"""Turning a stopped machine into the first member of a cluster: its stores move, its data stays.

The steps run in the order of `Adoption.run`, each of which can be repeated. A mark in the folder prevents every start
until the last step is done. The cluster's id is the last key written to etcd: once it exists, the stores are complete,
and a repeated attempt does not touch them, since nodes may have changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from millstream.broker.catalog.catalog import CATALOG_NAME, Catalog
from millstream.broker.catalog.database import with_flush
from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import FILE_NAME as COORDINATION_NAME
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.broker.cluster.keys import topic_from_json
from millstream.broker.cluster.last_run import FolderOwner, change_owner
from millstream.broker.cluster.machine_folder import ADOPTING_NAME, MARK_NAME, Layout, open_coordination
from millstream.broker.cluster.rebuild import EPOCHS_SKIPPED
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Put
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import LOCK_NAME
from millstream.broker.log.state import read_whole, replace_file
from millstream.core.clock import Clock, SystemClock
from millstream.core.config import Config
from millstream.core.errors import ClusterMismatch, CorruptState, DataFolderInvalid, InvalidSetting
from millstream.core.ids import Epoch
from millstream.core.partition_state import NO_LEADER, PartitionState, encode_value

ADOPTED_SUFFIX: Final = ".adopted"
_CARRIED: Final = (
    keys.PARTITIONS,
    keys.REASSIGNMENTS,
    keys.PLAN,
    keys.TOPICS,
    keys.SETTINGS,
    keys.DELETED,
    keys.REMOVED,
    keys.PLACEMENTS,
    keys.DRAINED,
    keys.LOCATIONS,
    keys.ADMITTED,
)
"""The agreed state apart from sessions, in the order in which it is written; `PLAN` with its moves."""


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    cluster_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionResult:
    cluster_id: str
    nodes: tuple[int, ...]
    flags: str
    """The flags of `millstream serve` for these nodes."""
    topics: int
    partitions: int
    has_secrets: bool
    """Whether the catalog has secrets, so that every node needs their keys."""


class Adoption:
    """An attempt to move the stores of a machine. The caller has connected to those of the cluster."""

    def __init__(
        self,
        data: str,
        cluster: str,
        store: CoordinationStore,
        catalog: Catalog,
        clock: Clock,
        *,
        flush: str,
        on_step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """`flush` is the setting that topics without one had here, and keep; `on_step` is called after each step."""
        self._data = data
        self._cluster = cluster
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._flush = flush
        self._on_step = on_step
        self._files = DiskFiles()

    async def run(self, *, is_checked_only: bool = False) -> AdoptionResult:
        """Check everything, then move the stores and give the folder to the cluster."""
        lock = self._files.lock(f"{self._data}/{LOCK_NAME}")
        try:
            return await self._run(is_checked_only=is_checked_only)
        finally:
            self._files.close(lock)

    async def undo(self) -> None:
        """Turn the folder back into that of a standalone machine, unless a node has started in the cluster."""
        lock = self._files.lock(f"{self._data}/{LOCK_NAME}")
        try:
            await self._undo()
        finally:
            self._files.close(lock)

    # -- the steps ------------------------------------------------------------------------------------------

    async def _run(self, *, is_checked_only: bool) -> AdoptionResult:
        mark = self._read_mark()
        is_done = mark is None and await self._is_done()
        if mark is None and not is_done:
            self._check_folder()
        source = self._open_source()
        cluster_id = mark.cluster_id if mark is not None else source.cluster_id
        is_written = await self._check_store(cluster_id)
        self._check_catalog(cluster_id)
        topics = source.topics()
        result = AdoptionResult(
            cluster_id=cluster_id,
            nodes=tuple(int(node) for node in self._list_nodes().values()),
            flags=Layout(self._data, {}).used_flags(self._files),
            topics=len(topics),
            partitions=sum(topic.partitions for topic in topics),
            has_secrets=bool(source.secrets()),
        )
        if is_checked_only or is_done:
            source.close()
            return result
        replace_file(
            self._files,
            self._data,
            ADOPTING_NAME,
            msgspec.json.encode(_Mark(cluster=self._cluster, cluster_id=cluster_id)),
        )
        self._on_step("mark")
        if not is_written:
            self._catalog.take_over(source, flush=self._flush)
            self._on_step("catalog")
            await self._write_states(cluster_id)
        source.close()
        self._on_step("states")
        self._transfer_folder(cluster_id)
        self._files.remove(f"{self._data}/{ADOPTING_NAME}")
        self._files.sync_directory(self._data)
        return result

    async def _write_states(self, cluster_id: str) -> None:
        service = open_coordination(self._files, self._data, self._clock)
        try:
            entries = service.read("").entries
        finally:
            service.close()
        carried = [
            Put(key, self._converted_value(key, entry.value))
            for prefix in _CARRIED
            for key, entry in entries.items()
            if key.startswith(prefix)
        ]
        # An undone attempt may have left other keys.
        unexpected = (await self._store.read("")).entries.keys() - {change.key for change in carried}
        changes: list[Change] = [*map(Delete, sorted(unexpected)), *carried]
        # Written last: it marks all others as complete.
        changes.append(Put(keys.CLUSTER_ID, cluster_id))
        rest = iter(changes)
        while some := list(islice(rest, CHANGES_MAX)):
            await self._store.change(some)
            self._on_step("some states")

    def _converted_value(self, key: str, value: str) -> str:
        if key.startswith(keys.TOPICS):
            topic = topic_from_json(value)
            # For a topic without a setting, the default of a cluster guarantees less.
            return encode_value(replace(topic, overrides=with_flush(dict(topic.overrides), self._flush)))
        if not key.startswith(keys.PARTITIONS):
            return value
        state = PartitionState.from_json(value)
        return encode_value(replace(state, leader=NO_LEADER, leader_epoch=Epoch(state.leader_epoch + EPOCHS_SKIPPED)))

    def _transfer_folder(self, cluster_id: str) -> None:
        for folder, node in self._list_nodes().items():
            change_owner(self._files, folder, FolderOwner(node_id=node, cluster=self._cluster, cluster_id=cluster_id))
        self._on_step("owner")
        for name in (COORDINATION_NAME, CATALOG_NAME):
            if self._files.exists(f"{self._data}/{name}"):
                self._files.rename(f"{self._data}/{name}", f"{self._data}/{name}{ADOPTED_SUFFIX}")
                self._files.sync_directory(self._data)
                self._on_step(name)

    async def _undo(self) -> None:
        owners = [FolderOwner.read(self._files, folder) for folder in self._list_nodes()]
        if self._read_mark() is None and not any(owner.cluster for owner in owners):
            raise ClusterMismatch(f"{self._data} was not adopted by a cluster, so there is nothing to undo")
        await self._check_unused()
        # So that another adoption writes everything again.
        await self._store.change([Delete(keys.CLUSTER_ID)])
        for name in (CATALOG_NAME, COORDINATION_NAME):
            if self._files.exists(f"{self._data}/{name}{ADOPTED_SUFFIX}"):
                self._files.rename(f"{self._data}/{name}{ADOPTED_SUFFIX}", f"{self._data}/{name}")
        for folder, node in self._list_nodes().items():
            change_owner(self._files, folder, FolderOwner(node_id=node))
        if self._files.exists(f"{self._data}/{ADOPTING_NAME}"):
            self._files.remove(f"{self._data}/{ADOPTING_NAME}")
        self._files.sync_directory(self._data)

    async def _check_unused(self) -> None:
        """Refuse if a node was admitted since the id of the cluster was written, which was the last step."""
        written = (await self._store.read(keys.CLUSTER_ID)).entries.get(keys.CLUSTER_ID)
        admitted = (await self._store.read(keys.ADMITTED)).entries.values()
        running = (await self._store.read(keys.NODES)).entries
        if written is not None and (running or any(entry.revision > written.revision for entry in admitted)):
            raise ClusterMismatch(
                "nodes have started in the cluster since, so the stores that this folder kept are out of date; "
                "go back by copying topics with a mirror instead"
            )

    # -- the current state ----------------------------------------------------------------------------------

    def _list_nodes(self) -> Mapping[str, int]:
        return Layout(self._data, {}).present(self._files)

    def _read_mark(self) -> _Mark | None:
        try:
            mark = msgspec.json.decode(read_whole(self._files, f"{self._data}/{ADOPTING_NAME}"), type=_Mark)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CorruptState(
                f"{self._data}/{ADOPTING_NAME} cannot be read ({error}); remove the file and adopt the folder again, "
                "if need be after `millstream cluster adopt --undo`"
            ) from error
        if mark.cluster != self._cluster:
            raise ClusterMismatch(
                f"{self._data} is being adopted by the cluster {mark.cluster!r}; pass --cluster {mark.cluster}"
            )
        return mark

    async def _is_done(self) -> bool:
        """Whether this cluster has adopted the folder already, by an attempt whose outcome was not reported."""
        if not self._files.exists(f"{self._data}/{CATALOG_NAME}{ADOPTED_SUFFIX}"):
            return False
        cluster_id = (await self._read_entries(keys.CLUSTER_ID)).get(keys.CLUSTER_ID)
        owners = [FolderOwner.read(self._files, folder) for folder in self._list_nodes()]
        return all((owner.cluster, owner.cluster_id) == (self._cluster, cluster_id) for owner in owners)

    def _check_folder(self) -> None:
        data, files = self._data, self._files
        if any(FolderOwner.read(files, folder).cluster for folder in self._list_nodes()):
            raise ClusterMismatch(f"{data} belongs to a cluster already; start its node with --etcd and --catalog")
        if not files.exists(f"{data}/{CATALOG_NAME}") or not files.exists(f"{data}/{COORDINATION_NAME}"):
            raise DataFolderInvalid(
                f"{data} is not the data folder of a standalone machine that has run: it lacks {CATALOG_NAME} or "
                f"{COORDINATION_NAME}; start it once with `millstream serve --data {data}`, and stop it"
            )
        if files.exists(f"{data}/{MARK_NAME}"):
            raise DataFolderInvalid(f"a change of --cores in {data} was interrupted; start it once, and stop it")

    def _open_source(self) -> Catalog:
        """Open the catalog of the machine, which an earlier attempt may have renamed."""
        path = Path(self._data, CATALOG_NAME)
        return Catalog.of_file(path if path.exists() else path.with_name(CATALOG_NAME + ADOPTED_SUFFIX))

    async def _read_entries(self, prefix: str) -> dict[str, str]:
        return {key: entry.value for key, entry in (await self._store.read(prefix)).entries.items()}

    async def _check_store(self, cluster_id: str) -> bool:
        """Check that etcd has no other cluster of this name; return whether it already has the complete state."""
        stored_id = (await self._read_entries(keys.CLUSTER_ID)).get(keys.CLUSTER_ID)
        if stored_id == cluster_id:
            return True
        others = await self._read_entries(keys.NODES)
        if stored_id is not None or others:
            raise ClusterMismatch(
                f"etcd knows another cluster as {self._cluster!r} ({stored_id}); choose another name for this one with "
                "--cluster, or join the other one with an empty folder"
            )
        return False

    def _check_catalog(self, cluster_id: str) -> None:
        if self._catalog.cluster_id != cluster_id and not self._catalog.is_empty():
            raise ClusterMismatch(
                f"the catalog is that of another cluster ({self._catalog.cluster_id}), and not empty; pass an empty "
                "database with --catalog"
            )


async def adopt(config: Config, data: Path, *, dry_run: bool, undo: bool) -> AdoptionResult | None:
    """Adopt a machine, or undo that; return what was moved."""
    if not config.etcd or not config.catalog:
        raise InvalidSetting("name the etcd and catalog of the cluster with --etcd and --catalog, or --config FILE")
    clock = SystemClock()
    store = EtcdStore(EtcdAddress.of(config), config.cluster, clock)
    catalog = Catalog.of_cluster(config)
    try:
        catalog.prepare(is_checked_only=dry_run)
        # The guarantee of topics without a setting on a standalone machine.
        flush = config.replace(etcd="").topic_flush
        adoption = Adoption(str(data), config.cluster, store, catalog, clock, flush=flush)
        if undo:
            await adoption.undo()
            return None
        return await adoption.run(is_checked_only=dry_run)
    finally:
        catalog.close()
        await store.close()
