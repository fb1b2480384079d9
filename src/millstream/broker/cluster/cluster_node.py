"""The parts that make a node a member of a cluster: its view, its registration, its replicas, its controller.

They start and stop in the order of the methods here: `open` (follow the coordination store, host this node's replicas),
`join` (when the APIs are loaded), `leave` (move this node's leaderships to others), `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any
from uuid import UUID

from millstream import __version__
from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys
from millstream.broker.cluster.controller import Controller
from millstream.broker.cluster.declarations import AnnouncedDeclarations, Announcer, Declarations
from millstream.broker.cluster.declared_state import DeclaredState
from millstream.broker.cluster.last_run import FolderOwner, LastRun
from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.plans import MoveThrottle, Plans
from millstream.broker.cluster.reconciliation import Declared
from millstream.broker.cluster.registration import NodeDescription, Registration
from millstream.broker.cluster.replica_fetcher import ReplicaLinks
from millstream.broker.cluster.replicas import Replicas, ReplicaSettings
from millstream.broker.cluster.store import ABSENT, CoordinationStore, Expect, Put
from millstream.broker.cluster.topics import Topics
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.broker.log.files import Files
from millstream.broker.log.store import LogStore
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.replication.in_sync import NOT_REGISTERED
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.config import DEFAULT_LISTENER, Config
from millstream.core.errors import CatalogUnavailable, MillstreamError
from millstream.core.ids import NodeId
from millstream.core.metric import Metric, counter, gauge
from millstream.core.tasks import Supervise, cancel_and_wait

_logger = logging.getLogger(__name__)

Links = Callable[[Callable[[NodeId], Node | None]], ReplicaLinks]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDependencies:
    """The dependencies of a cluster node; a simulation passes its own."""

    config: Config
    clock: Clock
    random: Random
    files: Files
    data: str
    log_store: LogStore
    coordination: CoordinationStore
    declarations: Declarations
    links: Links
    """Creates the links to other nodes, given how to find them."""
    boot_id: str
    supervise: Supervise
    catalog_unavailable_since_ms: Callable[[], int | None] = lambda: None
    """The time since which the catalog has not responded; None while it responds."""
    is_single: bool = False
    """Whether the cluster never has another node, so that no other node needs notifications."""
    node_listener: str = DEFAULT_LISTENER


class ClusterNode:
    """A node of a cluster, below its APIs."""

    def __init__(self, dependencies: ClusterDependencies) -> None:
        self._dependencies = dependencies
        self._config = dependencies.config
        self._store = dependencies.coordination
        self._id = NodeId(dependencies.config.node_id)
        self._last_run = LastRun(
            dependencies.files,
            dependencies.data,
            boot_id=dependencies.boot_id,
            stopped_clean=dependencies.log_store.clean_start,
        )
        self.view = ClusterView(
            dependencies.coordination, self._new_backoff(), node_listener=dependencies.node_listener
        )
        announcer = Announcer(dependencies.coordination, self._new_backoff(), new_text=self._new_text)
        self._announcer = announcer
        self.declarations: Declarations = dependencies.declarations
        if not dependencies.is_single:
            self.declarations = AnnouncedDeclarations(dependencies.declarations, announcer)
        self.topics = Topics(
            self.declarations,
            dependencies.log_store,
            dependencies.config,
            dependencies.clock,
            view=self.view,
            coordination=dependencies.coordination,
            backoff=self._new_backoff(),
            new_id=self._new_id,
        )
        self.replicas = Replicas(
            self._id,
            dependencies.links(self._find_node),
            dependencies.coordination,
            random=dependencies.random,
            settings=ReplicaSettings.of(dependencies.config),
            registration=self._registration_revision,
            may_join=self._may_join,
            throttle=MoveThrottle(self._id, self.view, dependencies.clock),
        )
        self.plans = Plans(dependencies.coordination, self.view, dependencies.clock, new_text=self._new_text)
        self._controller: Controller | None = None
        self._registration: Registration | None = None
        self._follows_as = NOT_REGISTERED
        self._tasks: list[asyncio.Task[None]] = []
        self._catalog_changed = asyncio.Event()
        self.declared = DeclaredState.of(
            self.declarations, dependencies.config, dependencies.clock, new_id=self._new_id
        )

    async def open(self) -> None:
        """Follow the coordination store, and open the hosted partitions. None is led or followed yet."""
        if not self._config.in_cluster:
            # A catalog on this machine responds at once, so the declarations are known before clients connect.
            await self.declared.load()
        self._start("view of the cluster", self.view.run())
        self._start("changes of the catalog", self._announcer.run())
        self._start("logs to open", self.topics.open_logs())
        self._start("removed files", self.topics.report_removed())
        self._start("quotas, subscriptions and pipelines", self._follow_catalog())
        await self.view.ready()
        self.topics.on_declared(self._apply_declared)
        self.topics.on_roles_change(self.replicas.apply)
        self.topics.on_dropped(self.replicas.forget)
        await self.topics.load()
        self.view.listen(self._on_view_change)
        await self.replicas.start()

    async def membership(self, me: Node) -> Membership:
        """Return the members of the cluster, whose id comes from the catalog."""
        cluster_id = self.view.cluster_id
        if cluster_id is None:
            declared = await self._dependencies.declarations.call(Catalog.read_cluster_id)
            await self._store.change([Put(keys.CLUSTER_ID, declared)], [Expect(keys.CLUSTER_ID, ABSENT)])
            entries = (await self._store.read(keys.CLUSTER_ID)).entries
            cluster_id = entries[keys.CLUSTER_ID].value
        self._last_run.set_owner(
            FolderOwner(
                node_id=self._id,
                cluster=self._config.cluster if self._config.in_cluster else "",
                cluster_id=cluster_id,
                location=me.location,
            )
        )
        return Membership(cluster_id, me, self.view)

    async def join(self, me: Node, http: str) -> None:
        """Register, and wait until the cluster has admitted this node.

        A single node also waits until it has applied the declarations, which a crash may have left undone.
        """
        dependencies = self._dependencies
        self._registration = registration = Registration(
            self._store,
            self.view,
            NodeDescription(node=me, http=http, version=__version__),
            self._last_run,
            ttl_s=self._config.lease_ms / 1000,
            new_incarnation=self._new_text,
            backoff=self._new_backoff(),
        )
        registration.on_admitted(self.topics.activate)
        self._controller = Controller(
            self._id,
            self._store,
            self.view,
            dependencies.declarations,
            registered=lambda: registration.mine,
            settings_of=self.topics.settings_of,
            balance_s=self._config.leader_balance_ms / 1000,
            random=dependencies.random,
            clock=dependencies.clock,
            author=self._announcer.author,
            is_single=dependencies.is_single,
        )
        registering = self._start("registration", registration.run())
        self._start("controller", self._controller.run())
        admitted = asyncio.ensure_future(self._await_joined(registration, self._controller))
        try:
            await asyncio.wait([registering, admitted], return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                await registering
        finally:
            admitted.cancel()

    async def _await_joined(self, registration: Registration, controller: Controller) -> None:
        await registration.admitted()
        if self._dependencies.is_single:
            await controller.carried_out()

    def pipeline_owner(self, *, is_candidate: bool) -> PipelineOwner:
        """Return the election of the node that runs the pipelines; a single node is always a candidate.

        A single node reports on its pipelines even while it cannot run them, and runs them once it can.
        """
        owner = PipelineOwner(
            self._id,
            self._store,
            self.view,
            registered=lambda: None if self._registration is None else self._registration.mine,
            random=self._dependencies.random,
        )
        if is_candidate or self._dependencies.is_single:
            owner.become_candidate()
        self._start("owner of pipelines", owner.run())
        return owner

    async def leave(self) -> None:
        """Move this node's leaderships to others where possible, within a bounded time."""
        registration = self._registration
        if registration is not None and not registration.is_fenced and len(self.view.live) > 1:
            await registration.leave(
                lambda: not self.topics.leads_movable_partition(), timeout_s=self._config.leave_ms / 1000
            )

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)
        if self._registration is not None:
            await self._registration.withdraw()
        await self.replicas.close()

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._dependencies.supervise(name, work)
        self._tasks.append(task)
        return task

    async def _follow_catalog(self) -> None:
        """Read the declarations now and after each change of the catalog."""
        backoff = self._new_backoff()
        if not self._config.in_cluster:
            await self._catalog_changed.wait()
        while True:
            self._catalog_changed.clear()
            try:
                await self.declared.load()
                backoff.reset()
            except MillstreamError as error:
                level = logging.DEBUG if isinstance(error, CatalogUnavailable) else logging.WARNING
                _logger.log(
                    level,
                    "quotas, subscriptions and pipelines could not be read; retrying",
                    extra={"error": str(error)},
                )
                await backoff.pause()
                continue
            await self._catalog_changed.wait()

    def unready_reasons(self) -> Iterable[str]:
        """Yield why this node should get no traffic."""
        if self._registration is None or self._registration.is_fenced:
            yield "this node is not currently admitted to the cluster"

    def warnings(self) -> Iterable[str]:
        """Yield problems of the cluster that do not prevent this node from working."""
        away = self._store.unavailable_since_ms
        if away is not None:
            store = "etcd" if self._config.in_cluster else "the coordination store in the data folder"
            waiting = "clients are served, but elections and new topics wait"
            yield f"{store} has been unavailable since {_iso_time(away)}; {waiting}"
        away = self._dependencies.catalog_unavailable_since_ms()
        if away is not None:
            waiting = "clients are served, but changes of topics and quotas wait"
            yield f"the catalog has been unavailable since {_iso_time(away)}; {waiting}"
        if self.view.controller is None:
            yield "no node is the controller"
        without_leader = self.topics.without_leader()
        if without_leader:
            yield f"{without_leader} partitions have no leader"
        under_min = self.topics.under_min_in_sync()
        if under_min:
            yield f"{under_min} partitions that this node leads have too few replicas in sync for acks=all"
        for node in sorted(self.view.drained & self.view.live.keys()):
            yield (
                f"node {node} is drained: unless there are too few others, it gets no leaders or replicas until "
                f"`millstream cluster undrain {node}`"
            )

    def metrics(self) -> Iterable[Metric]:
        registration = self._registration
        fenced = registration is None or registration.is_fenced or not registration.is_certain
        losses = 0 if registration is None else registration.losses
        yield gauge("millstream_nodes", "Live nodes, as seen by this node.", len(self.view.live))
        yield gauge("millstream_node_fenced", "1 while this node is fenced.", int(fenced))
        yield counter("millstream_node_losses_total", "Times that this node was fenced while it ran.", losses)
        yield gauge("millstream_coordination_available", "1 while etcd responds.", int(self._store.available))
        yield from self.replicas.metrics()
        if self._controller is not None:
            yield from self._controller.metrics()

    def _find_node(self, node: NodeId) -> Node | None:
        registered = self.view.nodes.get(node)
        return None if registered is None else registered.node

    def _on_view_change(self, change: ViewChange) -> None:
        if change.nodes:
            self.replicas.nodes_changed()
        if change.catalog - {self._announcer.author}:
            self._catalog_changed.set()

    def _apply_declared(self, declared: Declared) -> None:
        if self._controller is not None:
            self._controller.apply_declaration(declared)

    def _may_join(self, node: NodeId, registration: int) -> bool:
        """Whether a replica may join the in-sync set: positions from before its last registration do not count."""
        registered = self.view.nodes.get(node)
        return registered is not None and registered.revision == registration and self.view.is_live(node)

    def _registration_revision(self) -> int:
        """Return the registration under which this process follows, also while its lease is lost.

        It is never the registration of another process with the same id: leaders would mistake this log for the other
        one's.
        """
        mine = None if self._registration is None else self._registration.mine
        if mine is not None:
            self._follows_as = mine.revision
        return self._follows_as

    def _new_backoff(self) -> Backoff:
        return Backoff(self._dependencies.random)

    def _new_id(self) -> UUID:
        return UUID(int=self._dependencies.random.getrandbits(128), version=4)

    def _new_text(self) -> str:
        return str(self._new_id())


def _iso_time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC).isoformat(timespec="seconds")
