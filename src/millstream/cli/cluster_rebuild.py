"""Inspects the data folders of stopped nodes, and rebuilds the coordination state from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.broker.cluster.last_run import read_boot_id
from millstream.broker.cluster.rebuild import (
    Inventory,
    RebuiltState,
    check_unknown,
    derive_states,
    take_inventory,
    write,
)
from millstream.broker.log.files import DiskFiles
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.output import counted
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import ClusterMismatch, CorruptState, InvalidSetting
from millstream.core.ids import NodeId

_NAMED_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The rebuilt state, and whether it was written."""

    nodes: list[int]
    rebuilt: RebuiltState
    written: bool

    def described(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "partitions": len(self.rebuilt.states),
            "missing": self.rebuilt.missing,
            "incomplete": self.rebuilt.short,
            "fewer_replicas": self.rebuilt.fewer,
            "unknown_topics": sorted(map(str, self.rebuilt.unknown_topics)),
            "written": self.written,
        }


def existing_folder(path: Path) -> Path:
    """Return the absolute path of a folder, which has to exist."""
    if not path.is_dir():
        raise CommandFailed(f"--data: there is no folder {path}", ExitCode.NOT_FOUND)
    return path.absolute()


async def inventory_of(data: Path) -> Inventory:
    """Inspect the data folder of a stopped node."""
    return await take_inventory(str(data), DiskFiles(), SystemClock(), boot_id=read_boot_id())


async def rebuild(
    config: Config,
    folders: Sequence[Path],
    files: Sequence[Path],
    *,
    replaced: Sequence[int],
    accept_loss: bool,
    dry_run: bool,
) -> Outcome:
    """Rebuild the coordination state, and write it to an etcd that has none."""
    if not config.etcd or not config.catalog:
        raise InvalidSetting("name the etcd and catalog of the cluster with --etcd and --catalog, or --config FILE")
    inventories = [_inventory(file) for file in files]
    store = EtcdStore(EtcdAddress.of(config), config.cluster, SystemClock())
    catalog = Catalog.of_cluster(config)
    try:
        await check_unknown(store)
        # Late, because inspecting a folder takes a while.
        inventories += [await inventory_of(folder) for folder in folders]
        _check_cluster(inventories, config)
        catalog.prepare()
        replaced_ids = [NodeId(number) for number in sorted(set(replaced))]
        rebuilt = derive_states(inventories, catalog.topics(), catalog.deleted_topic_ids(), replaced_ids)
        if not dry_run:
            _check_safe(rebuilt, accept_loss=accept_loss)
            await write(store, rebuilt, inventories[0].cluster_id or catalog.cluster_id)
    finally:
        catalog.close()
        await store.close()
    return Outcome(nodes=sorted(inventory.node_id for inventory in inventories), rebuilt=rebuilt, written=not dry_run)


def _inventory(file: Path) -> Inventory:
    try:
        return Inventory.from_json(file.read_bytes())
    except OSError as error:
        raise CommandFailed(f"cannot read {file}: {error.strerror}", ExitCode.NOT_FOUND) from error
    except CorruptState as error:
        raise CorruptState(f"{file}: {error}; `millstream cluster inventory` creates one") from error


def _check_cluster(inventories: Sequence[Inventory], config: Config) -> None:
    if not inventories:
        raise InvalidSetting("pass the data folder of every node with --data, or its `cluster inventory` with --from")
    other = next((inventory for inventory in inventories if inventory.cluster not in ("", config.cluster)), None)
    if other is not None:
        raise ClusterMismatch(
            f"node {other.node_id} belongs to the cluster {other.cluster!r}; pass --cluster {other.cluster}"
        )


def _check_safe(rebuilt: RebuiltState, *, accept_loss: bool) -> None:
    if rebuilt.is_safe or accept_loss:
        return
    lacking = [*rebuilt.missing, *rebuilt.short]
    named = ", ".join(lacking[:_NAMED_MAX]) + (", …" if len(lacking) > _NAMED_MAX else "")
    raise CommandFailed(
        f"logs of some replicas of {counted(len(lacking), 'partition')} are missing, which may be the only ones with "
        f"everything that was acknowledged: {named}; pass the folders of all nodes, or "
        "--accept-loss if these are permanently lost"
    )
