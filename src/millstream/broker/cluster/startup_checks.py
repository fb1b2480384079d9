"""What a starting node verifies before it opens its log: that its folder, etcd and the catalog belong together.

A wrong setting fails at once, a store that does not answer after the configured wait. A node that was admitted before
starts without the catalog, because all declarations are in etcd too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.keys import NodeRegistration
from millstream.broker.cluster.last_run import UNKNOWN_NODE, FolderOwner
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.registration import cluster_forgotten, node_id_taken
from millstream.broker.cluster.store import CoordinationStore
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import (
    CatalogDenied,
    CatalogUnavailable,
    ClusterMismatch,
    StoreDenied,
    StoreUnavailable,
)
from millstream.core.ids import NodeId

_logger = logging.getLogger(__name__)

CATALOG_S_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What the node was started as."""

    node_id: NodeId
    cluster: str
    etcd: str
    """The addresses of etcd, without passwords."""
    data: str
    etcd_wait_s: float
    """How long to wait for etcd; 0 means forever."""


class StartupChecks:
    """The checks of one start."""

    def __init__(
        self,
        claim: NodeIdentity,
        owner: FolderOwner,
        store: CoordinationStore,
        declarations: Declarations,
        *,
        clock: Clock,
        backoff: Callable[[], Backoff],
        is_running: Callable[[Node], Awaitable[bool]],
        report: Callable[[str], Awaitable[None]],
    ) -> None:
        """`is_running` asks whether a node runs at an address; `report` is called with what the node waits for."""
        self._claim = claim
        self._owner = owner
        self._store = store
        self._declarations = declarations
        self._clock = clock
        self._backoff = backoff
        self._is_running = is_running
        self._report = report

    async def check(self) -> None:
        """Return when the node may start; raise if its settings are wrong, or etcd did not answer."""
        self._check_folder()
        known = await self._ask_store()
        self._check_known(known)
        await self._check_place(known.get(keys.node_key(self._claim.node_id)))
        await self._check_catalog(known.get(keys.CLUSTER_ID))

    def _check_folder(self) -> None:
        """Check the folder first: it identifies the wrong setting best."""
        claim, owner = self._claim, self._owner
        if owner.node_id not in (UNKNOWN_NODE, claim.node_id):
            raise ClusterMismatch(
                f"{claim.data} is the folder of node {owner.node_id}, but this node is started as {claim.node_id}; "
                f"give --node-id {owner.node_id}, or another --data"
            )
        if owner.cluster not in ("", claim.cluster):
            raise ClusterMismatch(
                f"{claim.data} belongs to the cluster {owner.cluster!r}, but this node is started for "
                f"{claim.cluster!r}; give --cluster {owner.cluster}, or another --data"
            )

    def _check_known(self, known: Mapping[str, str]) -> None:
        """Check that this etcd knows the folder."""
        claim, owner = self._claim, self._owner
        found = known.get(keys.CLUSTER_ID)
        if found is not None and owner.cluster_id not in ("", found):
            raise ClusterMismatch(
                f"{claim.data} belongs to another cluster ({owner.cluster_id}) than the one that etcd at {claim.etcd} "
                f"knows as {claim.cluster!r} ({found}); check --etcd, or give another --data"
            )
        if owner.was_admitted and keys.admitted_key(claim.node_id) not in known:
            raise cluster_forgotten(claim.node_id)

    async def _check_place(self, held: str | None) -> None:
        """Refuse at once if a node with this id answers; one that does not is waited for when registering."""
        if held is None:
            return
        other = NodeRegistration.from_json(self._claim.node_id, held, 0)
        if other.incarnation not in self._owner.incarnations and await self._is_running(other.node):
            raise node_id_taken(other.node)

    # -- the stores -----------------------------------------------------------------------------------------

    async def _ask_store(self) -> dict[str, str]:
        """Return what etcd knows of this node and its cluster; wait until it answers, or as long as configured."""
        claim, backoff = self._claim, self._backoff()
        began, since_ms = self._clock.monotonic(), self._clock.now_ms()
        while True:
            try:
                return await self._read_known()
            except StoreDenied as error:
                raise StoreDenied(f"{error}; check the user and password in --etcd, at {claim.etcd}") from error
            except StoreUnavailable as error:
                waited_s = self._clock.monotonic() - began
                if claim.etcd_wait_s and waited_s >= claim.etcd_wait_s:
                    raise StoreUnavailable(
                        f"no answer from etcd at {claim.etcd} within {waited_s:.0f} s ({error}); "
                        "check --etcd and that etcd runs, or wait longer with --etcd-wait-ms"
                    ) from error
                await self._wait(f"waits for etcd at {claim.etcd}", error, since_ms, backoff)

    async def _read_known(self) -> dict[str, str]:
        known: dict[str, str] = {}
        for key in (keys.CLUSTER_ID, keys.node_key(self._claim.node_id), keys.admitted_key(self._claim.node_id)):
            entry = (await self._store.read(key)).entries.get(key)
            if entry is not None:
                known[key] = entry.value
        return known

    async def _check_catalog(self, known: str | None) -> None:
        """Check that the catalog belongs to this cluster; wait for it if nothing is known here."""
        backoff, since_ms = self._backoff(), self._clock.now_ms()
        while True:
            try:
                # A node that may start without the catalog does not wait long for one that hangs.
                async with asyncio.timeout(CATALOG_S_MAX if self._owner.was_admitted else None):
                    declared = await self._declarations.call(Catalog.read_cluster_id)
                break
            except CatalogDenied:
                raise
            except (CatalogUnavailable, TimeoutError) as error:
                if self._owner.was_admitted:
                    _logger.warning(
                        "starting without the catalog, with the declarations in etcd", extra={"error": str(error)}
                    )
                    return
                await self._wait("waits for the catalog, which it has not read yet", error, since_ms, backoff)
        if known not in (None, declared):
            raise ClusterMismatch(
                f"the catalog belongs to another cluster ({declared}) than the one that etcd at {self._claim.etcd} "
                f"knows as {self._claim.cluster!r} ({known}); check --catalog and --etcd"
            )

    async def _wait(self, what: str, error: Exception, since_ms: int, backoff: Backoff) -> None:
        since = datetime.fromtimestamp(since_ms / 1000, tz=UTC).isoformat(timespec="seconds")
        _logger.warning("the node %s", what, extra={"error": str(error), "since": since})
        await self._report(f"the node {what}, since {since}: {error}")
        await backoff.pause()
