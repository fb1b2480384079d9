"""Connects to the stores of a cluster, and moves those of a machine there."""

from __future__ import annotations

from pathlib import Path

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.adoption import Adopted, Adoption
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import InvalidSetting


async def adopt(config: Config, data: Path, *, dry_run: bool, undo: bool) -> Adopted | None:
    """Adopt a machine, or undo it; returns what was moved."""
    if not config.etcd or not config.catalog:
        raise InvalidSetting("name the etcd and catalog of the cluster with --etcd and --catalog, or --config FILE")
    clock = SystemClock()
    store = EtcdStore(EtcdAddress.of(config), config.cluster, clock)
    catalog = Catalog.of_cluster(config)
    try:
        catalog.prepare()
        # What topics without a setting were promised on a standalone machine.
        flush = config.replace(etcd="").topic_flush
        adoption = Adoption(str(data), config.cluster, store, catalog, clock, flush=flush)
        if undo:
            await adoption.undo()
            return None
        return await adoption.run(is_checked_only=dry_run)
    finally:
        catalog.close()
        await store.close()
