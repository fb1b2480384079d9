"""A node's membership: startup checks, registration, admission, reregistration after a lost session, and leaving.

A node that registers is only joining. The controller first ensures that the cluster does not rely on the node's earlier
incarnation: the node leads nothing, and if its log may have a hole it is in no in-sync set. Then it admits the node.
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
from millstream.broker.cluster.last_run import UNKNOWN_NODE, FolderOwner, LastRun
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.store import ABSENT, CoordinationStore, Delete, Expect, Put, Session
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import (
    CatalogDenied,
    CatalogUnavailable,
    ClusterForgotten,
    ClusterMismatch,
    NodeIdTaken,
    RequestTimedOut,
    StoreDenied,
    StoreUnavailable,
)
from millstream.core.ids import NodeId
from millstream.core.partition_state import encode_value

_logger = logging.getLogger(__name__)

_TAKEN_TTLS = 3
"""The number of session lifetimes for which a node waits for its id; a holder that remains after that is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """The description that a node publishes about itself."""

    node: Node
    http: str
    version: str


class Registration:
    """Keeps this node registered."""

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        me: NodeDescription,
        last_run: LastRun,
        *,
        ttl_s: float,
        new_incarnation: Callable[[], str],
        backoff: Backoff,
    ) -> None:
        self._store = store
        self._view = view
        self._me = me
        self._last_run = last_run
        self._ttl_s = ttl_s
        self._new_incarnation = new_incarnation
        self._backoff = backoff
        self._session: Session | None = None
        self._lost = asyncio.Event()
        self._admitted = asyncio.Event()
        self._leaving = False
        self._on_admitted: list[Callable[[], None]] = []
        self.incarnation: str | None = None
        self.losses = 0
        """The number of times the cluster dropped this node while it ran."""
        view.listen(self._on_view_change)

    @property
    def mine(self) -> NodeRegistration | None:
        """The registration of this process; None while it is not registered, or another process has its id."""
        registered = self._view.nodes.get(self._me.node.node_id)
        return registered if registered is not None and registered.incarnation == self.incarnation else None

    @property
    def is_fenced(self) -> bool:
        """Return whether this node believes that the cluster does not currently rely on it."""
        if self.mine is None or self._session is None or not self._session.live:
            return True
        return not self._view.is_live(self._me.node.node_id)

    @property
    def is_certain(self) -> bool:
        """Whether the store has recently confirmed this node's session; otherwise the cluster may have dropped it."""
        return self._session is not None and self._session.confirmed

    def on_admitted(self, listener: Callable[[], None]) -> None:
        self._on_admitted.append(listener)

    async def admitted(self) -> None:
        await self._admitted.wait()

    async def run(self) -> None:
        """Stay registered.

        Raise `NodeIdTaken` if another node has this one's id, `ClusterForgotten` if the cluster no longer knows this
        one.
        """
        while True:
            try:
                self._lost.clear()
                self._session = await self._store.open_session(self._ttl_s, self._lost.set)
                await self._register()
                self._backoff.reset()
                await self._lost.wait()
                self.losses += 1
                _logger.warning("the cluster has dropped this node; registering again")
            except StoreUnavailable as error:
                _logger.warning("registration failed; retrying", extra={"error": str(error)})
                await self._close_session()
                await self._backoff.pause()

    async def leave(self, moved: Callable[[], bool], timeout_s: float) -> None:
        """Ask the controller to move leaderships away, and wait until it has or the timeout expires."""
        self._leaving = True
        node = self._me.node.node_id
        try:
            await self._store.change([Put(keys.leaving_key(node), "", leased=True)])
            await self._view.until(moved, timeout_s, what="moving leaderships away")
        except (StoreUnavailable, RequestTimedOut) as error:
            _logger.warning("the node is leaving although it still leads partitions", extra={"error": str(error)})

    async def withdraw(self) -> None:
        node = self._me.node.node_id
        registered = self.mine
        if registered is not None:
            try:
                deletions = [Delete(keys.node_key(node)), Delete(keys.leaving_key(node))]
                await self._store.change(deletions, [Expect(keys.node_key(node), registered.revision)])
            except StoreUnavailable as error:
                _logger.warning("the node is leaving without moving its leaderships", extra={"error": str(error)})
        await self._close_session()

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _register(self) -> None:
        key = keys.node_key(self._me.node.node_id)
        admitted = await self._read(keys.admitted_key(self._me.node.node_id))
        if admitted is None and self._last_run.was_admitted:
            raise cluster_forgotten(self._me.node.node_id)
        # A hole at the start counts only once: since its admission, this process has everything it acknowledged.
        unclean = not self._admitted.is_set() and self._last_run.is_unclean(admitted[0] if admitted else None)
        incarnation = self._new_incarnation()
        self._last_run.begin(incarnation)
        registered = NodeRegistration(
            node=self._me.node,
            http=self._me.http,
            incarnation=incarnation,
            version=self._me.version,
            unclean=unclean,
        )
        self.incarnation = incarnation
        revision = await self._await_free_id(key)
        changes = [Put(key, encode_value(registered), leased=True)]
        if self._leaving:
            changes.append(Put(keys.leaving_key(self._me.node.node_id), "", leased=True))
        while await self._store.change(changes, [Expect(key, revision)]) is None:
            revision = await self._await_free_id(key)
        _logger.info("registered", extra={"node": self._me.node.node_id, "unclean": unclean})

    async def _await_free_id(self, key: str) -> int:
        """Return the revision to write over: that of an earlier run on this folder, or none once the id is free."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._ttl_s * _TAKEN_TTLS
        waited_for = ""
        while True:
            held = await self._read(key)
            if held is None:
                return ABSENT
            other = NodeRegistration.from_json(held[0], held[1])
            if self._last_run.ran_as(other.incarnation):
                return held[1]
            if loop.time() >= deadline:
                raise node_id_taken(other.node)
            if waited_for != other.incarnation:
                waited_for, where = other.incarnation, f"{other.node.host}:{other.node.port}"
                _logger.info("another process has this node's id; waiting for its session to end", extra={"at": where})
            await asyncio.sleep(self._ttl_s / 4)

    async def _read(self, key: str) -> tuple[str, int] | None:
        entry = (await self._store.read(key)).entries.get(key)
        return None if entry is None else (entry.value, entry.revision)

    def _on_view_change(self, change: ViewChange) -> None:
        if self._me.node.node_id not in change.nodes or self._admitted.is_set() or self.is_fenced:
            return
        _logger.info("admitted", extra={"node": self._me.node.node_id})
        self._record_admission()
        for listener in self._on_admitted:
            listener()
        self._admitted.set()

    def _record_admission(self) -> None:
        try:
            self._last_run.record_admitted()
        except OSError as error:
            # A node with a full disk is still useful; the record only guards against a store that loses its data.
            _logger.warning("the admission of this node could not be recorded", extra={"error": str(error)})


def cluster_forgotten(node: NodeId) -> ClusterForgotten:
    """Return the error for a node that etcd does not know; elections without its state could truncate full logs."""
    return ClusterForgotten(
        f"node {node} was part of a cluster, and etcd does not know it: check --etcd and --cluster; if etcd lost "
        "its data, restore it, or see `millstream cluster rebuild`. To start from scratch, pass an empty --data"
    )


def node_id_taken(other: Node) -> NodeIdTaken:
    return NodeIdTaken(
        f"node {other.node_id} of this cluster is already running at {other.host}:{other.port}; "
        "stop it first, or pass another --node-id for this one"
    )


CATALOG_S_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The identity with which the node was started."""

    node_id: NodeId
    cluster: str
    etcd: str
    """The addresses of etcd, without passwords."""
    data: str
    etcd_wait_s: float
    """How long to wait for etcd; 0 means forever."""


class StartupChecks:
    """Verifies, before a starting node opens its log, that its folder, etcd and the catalog belong together.

    A wrong setting fails at once, a store that does not respond after the configured wait. A node that was admitted
    before starts without the catalog, because all declarations are in etcd too.
    """

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
        """Wait until the node may start; raise if its settings are wrong, or etcd does not respond."""
        self._check_folder()
        known = await self._await_entries()
        self._check_known(known)
        await self._check_id_free(known.get(keys.node_key(self._claim.node_id)))
        await self._check_catalog(known.get(keys.CLUSTER_ID))

    def _check_folder(self) -> None:
        """Check the folder first: it identifies the wrong setting best."""
        claim, owner = self._claim, self._owner
        if owner.node_id not in (UNKNOWN_NODE, claim.node_id):
            raise ClusterMismatch(
                f"{claim.data} is the folder of node {owner.node_id}, but this node is started as {claim.node_id}; "
                f"pass --node-id {owner.node_id}, or another --data"
            )
        if owner.cluster not in ("", claim.cluster):
            raise ClusterMismatch(
                f"{claim.data} belongs to the cluster {owner.cluster!r}, but this node is started for "
                f"{claim.cluster!r}; pass --cluster {owner.cluster}, or another --data"
            )

    def _check_known(self, known: Mapping[str, str]) -> None:
        """Check that this etcd knows the folder."""
        claim, owner = self._claim, self._owner
        cluster_id = known.get(keys.CLUSTER_ID)
        if cluster_id is not None and owner.cluster_id not in ("", cluster_id):
            raise ClusterMismatch(
                f"{claim.data} belongs to another cluster ({owner.cluster_id}) than the one that etcd at {claim.etcd} "
                f"knows as {claim.cluster!r} ({cluster_id}); check --etcd, or pass another --data"
            )
        if owner.was_admitted and keys.admitted_key(claim.node_id) not in known:
            raise cluster_forgotten(claim.node_id)

    async def _check_id_free(self, held: str | None) -> None:
        """Refuse at once if a node with this id responds; one that does not is waited for when registering."""
        if held is None:
            return
        other = NodeRegistration.from_json(held, 0)
        if other.incarnation not in self._owner.incarnations and await self._is_running(other.node):
            raise node_id_taken(other.node)

    # -- the stores -----------------------------------------------------------------------------------------

    async def _await_entries(self) -> dict[str, str]:
        """Return the state of this node and its cluster in etcd; wait for a response as long as configured."""
        claim, backoff = self._claim, self._backoff()
        began, since_ms = self._clock.monotonic(), self._clock.now_ms()
        while True:
            try:
                return await self._read_entries()
            except StoreDenied as error:
                raise StoreDenied(f"{error}; check the user and password in --etcd, at {claim.etcd}") from error
            except StoreUnavailable as error:
                waited_s = self._clock.monotonic() - began
                if claim.etcd_wait_s and waited_s >= claim.etcd_wait_s:
                    raise StoreUnavailable(
                        f"no response from etcd at {claim.etcd} within {waited_s:.0f} s ({error}); "
                        "check --etcd and that etcd runs, or wait longer with --etcd-wait-ms"
                    ) from error
                await self._pause(f"waits for etcd at {claim.etcd}", error, since_ms, backoff)

    async def _read_entries(self) -> dict[str, str]:
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
                        "starting without the catalog, with the declarations in etcd",
                        extra={"error": str(error) or f"it did not respond within {CATALOG_S_MAX:g} s"},
                    )
                    return
                await self._pause("waits for the catalog, which it has not read yet", error, since_ms, backoff)
        if known not in (None, declared):
            raise ClusterMismatch(
                f"the catalog belongs to another cluster ({declared}) than the one that etcd at {self._claim.etcd} "
                f"knows as {self._claim.cluster!r} ({known}); check --catalog and --etcd"
            )

    async def _pause(self, what: str, error: Exception, since_ms: int, backoff: Backoff) -> None:
        since = datetime.fromtimestamp(since_ms / 1000, tz=UTC).isoformat(timespec="seconds")
        _logger.warning("the node %s", what, extra={"error": str(error), "since": since})
        await self._report(f"the node {what}, since {since}: {error}")
        await backoff.pause()
