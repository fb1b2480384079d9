"""The composition root: builds and wires every part, and starts and stops them in a visible order."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import SystemRandom
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Protocol

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import Sealing
from millstream.broker.cluster.broker_settings import BrokerSettings
from millstream.broker.cluster.cluster_node import ClusterDependencies, ClusterNode
from millstream.broker.cluster.declarations import CatalogDeclarations, ProducerIds
from millstream.broker.cluster.embedded_store import EmbeddedStore
from millstream.broker.cluster.last_run import FolderOwner, read_boot_id
from millstream.broker.cluster.machine_folder import Layout, adopt_known_topics, open_coordination, settle
from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.replica_fetcher import WireLinks
from millstream.broker.cluster.store import CoordinationStore
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.kafka.dispatch import Dispatch
from millstream.broker.log.files import DiskFiles, Files
from millstream.broker.log.folder import (
    CLEAN_STOP_NAME,
    LOCK_NAME,
    PARTITIONS_NAME,
    check_own_or_empty,
    make_private,
)
from millstream.broker.log.store import LogStore
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import ConnectionLimits
from millstream.broker.net.listener import ORPHAN_S, Listener, bind_with_retries, listen
from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.security.listeners import Listeners, address_of
from millstream.broker.security.secrets import StoredSecrets
from millstream.broker.security.state import NO_SNAPSHOT, SecurityState
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock, SystemClock
from millstream.core.config import Config
from millstream.core.errors import InvalidSetting, MillstreamError
from millstream.core.heap import enable_trimming, freeze_heap, keep_freed_memory
from millstream.core.ids import NodeId
from millstream.core.setting import parse_address
from millstream.core.tasks import TaskSupervisor, keep_running, within
from millstream.protocol.records.compression import set_limits
from millstream.protocol.wire.credentials import NODE_CREDENTIALS

if TYPE_CHECKING:
    from millstream.broker.kafka.served_apis import ServedApis
    from millstream.broker.kafka.subscription_service import SubscriptionService
    from millstream.broker.pipelines.report_board import PipelineBoard
    from millstream.broker.security.gate import RevokedSessions

_logger = logging.getLogger(__name__)

_REASONS_MAX = 10
"""How many failed partitions a report lists."""

_RECOVERED_AT_ONCE = 100
"""Recovery of up to this many logs is over before a gateway could start to report progress."""

_SPAWN_S_MAX = 5.0
_PROBE_S_MAX = 1.0
_WAIT_S_FIRST, _WAIT_S_MAX = 0.5, 10.0
"""Pauses between two attempts to reach what a starting node needs."""


class ChildProcess(Protocol):
    """The broker's side of a child process."""

    async def run(self) -> None:
        """Start the process whenever it is needed, and again when it ends, until `stop`."""

    async def stop(self) -> None:
        """Stop the child process after it has finished its work."""


class GatewayProcess(ChildProcess, Protocol):
    """The process that serves HTTP, also while the node is still starting."""

    def report_starting(self, starting: str) -> None:
        """Make it report why the node does not serve yet."""

    def serve_status(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Make it report the node's status from now on."""

    async def spawned(self) -> None:
        """Wait until the process has been started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySockets:
    """The sockets that the broker binds for the gateway."""

    http: socket.socket
    registry: socket.socket | None = None
    """The address at which the schema registry is served without a prefix."""

    def listen(self) -> None:
        """Start accepting connections."""
        listen(self.http, flag="http")
        if self.registry is not None:
            listen(self.registry, flag="registry")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """The parts of a node that its child processes may use."""

    config: Config
    kafka_address: str
    """The address for the node's own processes."""
    declared_subscriptions: Subscriptions
    subscription_service: SubscriptionService
    pipelines: Pipelines
    pipeline_board: PipelineBoard
    pipeline_owner: Callable[[bool], PipelineOwner]
    """The election of the node that runs pipelines; the argument says whether this node can."""
    security: SecurityState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcesses:
    """The table of child processes that the composition root takes."""

    gateway: Callable[[GatewaySockets, str, Config], GatewayProcess] | None = None
    beside: Mapping[str, Callable[[RunningNode], ChildProcess]] = field(default_factory=dict)
    """The other child processes by name; each starts once the APIs are loaded, and they stop in reverse order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShare:
    """The parameters that the supervisor of a machine passes to each of its broker processes."""

    data: str
    """The folder of the machine, with the stores that its nodes share."""
    nodes: tuple[NodeId, ...]
    """Every node of the machine; the first one runs pipelines."""
    http: str
    """The HTTP address of the machine; empty if it has none."""
    internal: str
    """The internal address of this node's previous process, to listen on again; empty at the first start."""
    secret: str
    """The password of the machine's nodes and their child processes, where clients must authenticate."""
    assertion_seed: str
    """The seed of the key that signs assertions, the same for all nodes; the gateway does not get it."""
    store: CoordinationStore | None
    """The coordination store of the machine; None in a cluster, which has one for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """The dependencies of the APIs."""

    node: ClusterNode
    membership: Membership
    secrets: StoredSecrets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """The stores that the nodes of a cluster share, or that a single node has for itself."""

    coordination: CoordinationStore
    catalog: Catalog
    declarations: CatalogDeclarations


class Broker:
    """A node: everything between its sockets and its data folder.

    Embedded in another program, it does not touch process-wide state: memory trimming and garbage collection.
    """

    def __init__(
        self,
        config: Config,
        *,
        children: ChildProcesses | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        is_embedded: bool = False,
        machine: MachineShare | None = None,
    ) -> None:
        self._config = config
        self._machine = machine
        self._is_single = not config.in_cluster and machine is None
        self._children = children or ChildProcesses()
        self._is_embedded = is_embedded
        self._clock = clock or SystemClock()
        self._files = files or DiskFiles()
        self._data = os.path.abspath(config.data)
        self._listeners = (
            Listeners(config)
            if machine is None
            else Listeners(
                config,
                secret=machine.secret,
                internal_address=machine.internal,
                assertion_seed=machine.assertion_seed,
                machine=machine.nodes,
            )
        )
        self._sealing = Sealing(None)
        self._gateway_sockets: GatewaySockets | None = None
        # Kept, because the addresses are still needed after the sockets are closed.
        self._kafka_at = self._registry_at = ""
        self._http_at = "" if machine is None else machine.http
        self._revoked: RevokedSessions | None = None
        self._served: ServedApis | None = None
        self._store: LogStore | None = None
        self._gateway: GatewayProcess | None = None
        self._gateway_runs = False
        self._serving: asyncio.Task[None] | None = None
        self._background = TaskSupervisor()
        self._supervise = self._background.start
        self._undo = AsyncExitStack()
        self.failed = self._background.failed
        """Fails with the reason when an essential part has died."""

    # -- start and stop -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every part, the lowest first; if one fails, stop those that were started.

        Each line that starts something also says how it is undone, and `stop` goes through these from the last to the
        first: no new work, then finish pending work, then the data.
        """
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise

    async def stop(self) -> None:
        """Stop every part in order; everything acknowledged is on disk when this returns."""
        await self._undo.aclose()
        _logger.info("stopped")

    @property
    def stop_failure(self) -> str | None:
        """The reason why the data folder was not left clean, once the node has stopped."""
        return None if self._store is None else self._store.stop_failure

    async def _start(self) -> None:
        if not self._is_embedded:
            keep_freed_memory()
            enable_trimming()
        config, undo = self._config, self._undo
        undo.callback(set_limits(config.decompressed_bytes_max, config.compression_ratio_max))
        self._listeners.check()
        undo.callback(self._listeners.close)
        self._listeners.bind()
        # Every task started from here on signs in at nodes with these credentials.
        NODE_CREDENTIALS.set(self._listeners.node_credentials)
        self._kafka_at = self._listeners.kafka_address
        if config.http and self._children.gateway is not None:
            await self._prepare_gateway(self._children.gateway)
        undo.push_async_callback(self._background.close)

        # Settings are checked before the log is opened: a start that fails after that leaves the mark of a clean stop,
        # which would hide that the machine went down before.
        self._check_data_folder()
        self._sealing = Sealing.of_node(config.secrets_key_file, self._shared_data, in_cluster=config.in_cluster)
        stores = await self._reach_cluster() if config.in_cluster else None
        if self._has_much_to_recover():
            await self._serve_start_report("the logs are checked, because the last stop was not clean")
        if self._is_single:
            layout = Layout.of(self._data, config.node_id, 1)
            await settle(layout, self._files, self._clock, sealing=self._sealing)
        store = self._open_store()
        self._store = store
        make_private(Path(self._data))
        store.on_recovery_progress(lambda done, left: self._report_start(f"{done} of {done + left} logs are recovered"))
        undo.push_async_callback(store.close)
        self._supervise("log store", store.run())
        core = await self._open_node(store, stores or await self._open_embedded())
        self._supervise("sealed secrets", core.secrets.run())
        store.finish_recovery()
        if self._is_single:
            # No other node needs the APIs of this one first; clients then find it admitted.
            await core.node.join(core.membership.me, self.http_address)
            undo.push_async_callback(core.node.leave)
        self._report_start("the logs are open, the APIs are loading")
        # Not earlier: clients that connect while logs are recovered would wait without knowing why.
        self._listeners.listen()
        if self._gateway_sockets is not None:
            self._gateway_sockets.listen()

        budget = Budget(config.inflight_bytes_max)
        dispatch = Dispatch()
        limits = ConnectionLimits(frame_bytes_max=config.request_bytes_max)
        listener = self._listener(dispatch, limits, budget, core.node.topics.broker_settings)
        self._listeners.warn(core.node.declared.security)
        self._revoked = await self._listeners.start(
            listener, dispatch, limits, core.node.declared.security, core.membership, self._supervise
        )
        undo.push_async_callback(listener.drain, config.shutdown_ms / 1000)
        self._serving = self._supervise("APIs", self._serve(dispatch, core, listener, budget, store))
        undo.push_async_callback(self._close_served)

        if self._gateway is not None:
            self._supervise("start of the HTTP gateway", self._gateway_serves(self._gateway, dispatch))
            undo.push_async_callback(self._gateway.stop)
        undo.callback(listener.stop_accepting)
        if not self._is_single:
            # Others send requests as soon as they know of this node.
            await self._served_or_failed()
            await core.node.join(core.membership.me, self.http_address)
            undo.push_async_callback(core.node.leave)
        for name, make in self._children.beside.items():
            self._run_child(name, make, core)
        _logger.info("ready", extra={"kafka": self.kafka_address, "http": self.http_address, "data": config.data})

    def _listener(
        self, dispatch: Dispatch, limits: ConnectionLimits, budget: Budget, settings: BrokerSettings
    ) -> Listener:
        listener = Listener(
            dispatch,
            limits=limits,
            budget=budget,
            connections_max=settings.connections_max,
            idle_s=self._config.connection_idle_ms / 1000,
        )

        def follow_settings() -> None:
            listener.connections_max = settings.connections_max
            listener.per_address_max = settings.connections_per_address_max

        follow_settings()
        settings.on_change(follow_settings)
        return listener

    async def _prepare_gateway(self, make: Callable[[GatewaySockets, str, Config], GatewayProcess]) -> None:
        """Bind the gateway's addresses; the process is started when there is something to report."""
        http = await self._bind_http(self._config.http, "http")
        self._http_at = address_of(http)
        registry = None
        if self._config.registry:
            registry = await self._bind_http(self._config.registry, "registry")
            self._registry_at = address_of(registry)
        self._gateway_sockets = GatewaySockets(http=http, registry=registry)
        self._gateway = make(self._gateway_sockets, self._listeners.internal_address, self._config)

    def _report_start(self, starting: str) -> None:
        """Make the gateway, if any, report why the node is not up yet."""
        if self._gateway is not None:
            self._gateway.report_starting(starting)

    async def _bind_http(self, setting: str, flag: str) -> socket.socket:
        was_killed = self._files.exists(f"{self._data}/{LOCK_NAME}") and not self._files.exists(
            f"{self._data}/{CLEAN_STOP_NAME}"
        )
        address = parse_address(setting, name=flag)
        bound = await bind_with_retries(*address, flag=flag, wait_s=ORPHAN_S if was_killed else 0.0)
        self._undo.callback(bound.close)
        return bound

    def _check_data_folder(self) -> None:
        config = self._config
        if config.catalog and not config.in_cluster:
            raise InvalidSetting(
                "--catalog is for nodes of a cluster, which need --etcd too; a single node has its own catalog"
            )
        if self._machine is None:
            check_own_or_empty(self._data, self._files)
            Layout.of(self._data, config.node_id, 1).check_owner(self._files, in_cluster=config.in_cluster)

    def _open_store(self) -> LogStore:
        return LogStore.open(
            Path(self._data),
            files=self._files,
            clock=self._clock,
            journal_bytes=self._config.journal_bytes,
            producer_expiry_ms=self._config.producer_expiry_ms,
            retention_check_ms=self._config.retention_check_ms,
            scrub_bytes_per_s=self._config.scrub_bytes_per_s,
            scrub_interval_ms=self._config.scrub_interval_ms,
        )

    async def _reach_cluster(self) -> _Stores:
        """Connect to the stores of the cluster, after checking that they belong to this node's folder."""
        # Without this, gRPC's own handlers crash the gateway's process when it is forked off.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
        # Not needed on a single node, where they may not even be installed.
        from millstream.broker.cluster.etcd_address import EtcdAddress
        from millstream.broker.cluster.etcd_store import EtcdStore

        config = self._config
        if not config.catalog:
            raise InvalidSetting("with --etcd, all nodes share one catalog: pass --catalog postgresql://…")
        address = EtcdAddress.of(config)
        coordination = EtcdStore(address, config.cluster, self._clock)
        self._undo.push_async_callback(coordination.close)
        catalog = Catalog.of_cluster(config, sealing=self._sealing)
        self._undo.callback(catalog.close)
        declarations = CatalogDeclarations(catalog, is_prepared=False, clock=self._clock)
        stores = _Stores(coordination=coordination, catalog=catalog, declarations=declarations)
        await self._check_startup(stores, ", ".join(address.endpoints))
        return stores

    async def _check_startup(self, stores: _Stores, etcd: str) -> None:
        from millstream.broker.cluster.registration import NodeIdentity, StartupChecks

        config, random = self._config, SystemRandom()
        claim = NodeIdentity(
            node_id=NodeId(config.node_id),
            cluster=config.cluster,
            etcd=etcd,
            data=config.data,
            etcd_wait_s=config.etcd_wait_ms / 1000,
        )
        entry = StartupChecks(
            claim,
            FolderOwner.read(self._files, self._data),
            stores.coordination,
            stores.declarations,
            clock=self._clock,
            backoff=lambda: Backoff(random, first_s=_WAIT_S_FIRST, max_s=_WAIT_S_MAX),
            is_running=self._is_running,
            report=self._serve_start_report,
        )
        await entry.check()

    async def _is_running(self, other: Node) -> bool:
        """Return whether the node with the same id is running; it cannot be this one, which does not listen yet."""
        from millstream.protocol.wire.node_status import BrokerStatus

        host = f"[{other.host}]" if ":" in other.host else other.host
        status = BrokerStatus(f"{host}:{other.port}", response_s=_PROBE_S_MAX)
        try:
            return bool((await status.fetch())["node_id"] == other.node_id)
        except MillstreamError:
            return False
        finally:
            await status.close()

    @property
    def _shared_data(self) -> str:
        """The folder with the stores that the nodes of this machine share."""
        return self._data if self._machine is None else self._machine.data

    async def _open_embedded(self) -> _Stores:
        """Open the stores of a machine that belongs to no cluster; they are in its data folder."""
        catalog = Catalog.open_folder(Path(self._shared_data), sealing=self._sealing)
        self._undo.callback(catalog.close)
        declarations = CatalogDeclarations(catalog)
        if self._machine is not None and self._machine.store is not None:
            self._undo.push_async_callback(self._machine.store.close)
            return _Stores(coordination=self._machine.store, catalog=catalog, declarations=declarations)
        service = open_coordination(self._files, self._data, self._clock)
        self._undo.callback(service.close)
        coordination = EmbeddedStore(service, self._clock, sessions_expire=False)
        await adopt_known_topics(coordination, catalog)
        return _Stores(coordination=coordination, catalog=catalog, declarations=declarations)

    async def _open_node(self, store: LogStore, stores: _Stores) -> _Core:
        """Open this node as a member of its cluster, which may have no other."""
        config, declarations = self._config, stores.declarations
        node = ClusterNode(
            ClusterDependencies(
                config=config,
                clock=self._clock,
                random=SystemRandom(),
                files=self._files,
                data=self._data,
                log_store=store,
                coordination=stores.coordination,
                declarations=declarations,
                links=lambda find: WireLinks(find, me=NodeId(config.node_id)),
                boot_id=read_boot_id(),
                supervise=self._supervise,
                catalog_unavailable_since_ms=lambda: declarations.unavailable_since_ms,
                is_single=self._is_single,
                node_listener=self._listeners.own_listener,
            )
        )
        self._undo.callback(node.topics.close)
        self._undo.push_async_callback(node.close)
        await node.open()
        secrets = StoredSecrets(stores.catalog, self._sealing, node.declared.with_secrets)
        return _Core(node=node, membership=await node.membership(self._advertised_node()), secrets=secrets)

    async def _serve(
        self, dispatch: Dispatch, core: _Core, listener: Listener, budget: Budget, store: LogStore
    ) -> None:
        """Import the APIs in a thread, because their message classes take a while, then serve with them."""
        config, clock = self._config, self._clock
        module = await asyncio.to_thread(_import_served)
        node = module.NodeState(
            node_id=config.node_id,
            cluster_id=core.membership.cluster_id,
            started_ms=clock.now_ms(),
            kafka=self.kafka_address,
            http=self.http_url,
            data=self._data,
            machine=() if self._machine is None else self._machine.nodes,
        )
        producer_ids = ProducerIds(core.node.declarations)
        self._supervise("producer ids", keep_running("producer ids", producer_ids.run))
        parts = module.ApiDependencies(
            config=config,
            clock=clock,
            topics=core.node.topics,
            membership=core.membership,
            producer_ids=producer_ids,
            declared=core.node.declared,
            plans=None if self._is_single else core.node.plans,
            authentication=self._listeners.authentication,
            secrets=core.secrets,
            budget=budget,
            connections=listener.connections,
            sources=[
                listener,
                dispatch,
                core.node.topics,
                store,
                core.node,
                *([] if self._revoked is None else [self._revoked]),
            ],
            unready_reasons=lambda: self._unready_reasons(store, core.node),
            damage=store.damage,
            warnings=lambda: [*core.node.warnings(), *core.secrets.warnings()],
            node=node,
            supervise=self._supervise,
        )
        self._served = module.ServedApis(parts)
        await self._served.start()
        dispatch.serve(self._served.apis)
        if not self._is_embedded:
            freeze_heap()

    def _unready_reasons(self, store: LogStore, node: ClusterNode) -> Iterable[str]:
        """Yield why the node should get no traffic: its own reasons, and other nodes of its machine that are down."""
        yield from node.unready_reasons()
        authentication = self._listeners.authentication
        if authentication is not None and not authentication.state.is_loaded:
            yield NO_SNAPSHOT
        for other in () if self._machine is None else self._machine.nodes:
            if other != self._config.node_id and other not in node.view.live:
                yield not_running(other)
        for partition, reason in islice(store.failures.items(), _REASONS_MAX):
            yield f"{partition}: {reason}"

    async def _served_or_failed(self) -> None:
        if self._serving is not None:
            await asyncio.wait([self._serving, self.failed], return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            await self.failed

    async def _gateway_serves(self, gateway: GatewayProcess, dispatch: Dispatch) -> None:
        # The gateway's own imports would slow down those of the APIs, which clients wait for.
        await dispatch.loaded()
        if self._served is not None:
            gateway.serve_status(self._served.node_status.health)
        self._begin_gateway(gateway)

    def _run_child(self, name: str, make: Callable[[RunningNode], ChildProcess], core: _Core) -> None:
        """Run a child process once the APIs are loaded, and end it on `stop`."""
        children: list[ChildProcess] = []

        async def run() -> None:
            if self._serving is not None:
                await asyncio.wait([self._serving])
            if self._served is not None and not self.failed.done():
                children.append(make(self._running_node(core, self._served)))
                await children[0].run()

        async def stop() -> None:
            if children:
                await children[0].stop()
            else:
                running.cancel()
            await asyncio.wait([running])

        running = self._supervise(name, run())
        self._undo.push_async_callback(stop)

    def _running_node(self, core: _Core, served: ServedApis) -> RunningNode:
        node = core.node
        return RunningNode(
            config=self._config,
            kafka_address=self._listeners.internal_address,
            declared_subscriptions=node.declared.subscriptions,
            subscription_service=served.subscriptions,
            pipelines=node.declared.pipelines,
            pipeline_board=served.pipeline_board,
            security=node.declared.security,
            pipeline_owner=lambda is_candidate: node.pipeline_owner(is_candidate=is_candidate),
        )

    def _begin_gateway(self, gateway: GatewayProcess) -> None:
        """Start the gateway, unless it runs already."""
        if not self._gateway_runs:
            self._gateway_runs = True
            self._supervise("HTTP gateway", gateway.run())

    async def _serve_start_report(self, reason: str) -> None:
        """Make the gateway report why the node is not up yet, before the loop is busy."""
        if self._gateway is None or self._gateway_sockets is None:
            return
        self._gateway.report_starting(reason)
        self._gateway_sockets.listen()
        self._begin_gateway(self._gateway)
        with suppress(TimeoutError):
            await within(_SPAWN_S_MAX, self._gateway.spawned())

    def _has_much_to_recover(self) -> bool:
        """Whether opening the logs may take long enough to report progress."""
        folder = f"{self._data}/{PARTITIONS_NAME}"
        if self._files.exists(f"{self._data}/{CLEAN_STOP_NAME}") or not self._files.exists(folder):
            return False
        logs = (log for topic in self._files.names(folder) for log in self._files.names(f"{folder}/{topic}"))
        return next(islice(logs, _RECOVERED_AT_ONCE, None), None) is not None

    async def _close_served(self) -> None:
        if self._serving is not None:
            # Clients that connected while the APIs were loading are served too, instead of waiting until they are
            # disconnected.
            await asyncio.wait([self._serving])
        if self._served is not None:
            await self._served.close()

    def _advertised_node(self) -> Node:
        host, port = self._listeners.node_address
        # Nodes on one machine fail together, unless the configuration says otherwise.
        rack = self._config.rack or (socket.gethostname() if self._config.in_cluster else None)
        return Node(
            node_id=NodeId(self._config.node_id),
            host=host,
            port=port,
            rack=rack,
            machine=None if self._machine is None else self._machine.nodes[0],
            endpoints=self._listeners.endpoints(),
            assertion_key=self._listeners.assertion_key,
            secret=token_urlsafe(),
        )

    def health(self) -> Mapping[str, Any] | None:
        """Return the state for health checks, once the APIs are loaded."""
        return None if self._served is None else self._served.node_status.health()

    # -- addresses ------------------------------------------------------------------------------------------

    @property
    def internal_address(self) -> str:
        """The address for this node's own processes and the gateway of its machine."""
        return self._listeners.internal_address

    @property
    def kafka_address(self) -> str:
        """The address for Kafka clients, with the actual port."""
        if not self._kafka_at:
            raise RuntimeError("the broker has not been started")
        return self._kafka_at

    @property
    def listener_addresses(self) -> list[str]:
        """The addresses for the clients of each listener, in the order of the settings, with the actual ports."""
        return self._listeners.addresses

    @property
    def http_address(self) -> str:
        """The HTTP address, with the actual port; empty without a gateway."""
        return self._http_at

    @property
    def registry_address(self) -> str:
        """The schema registry's own address, with the actual port; empty if it has none."""
        return self._registry_at

    @property
    def http_url(self) -> str:
        """The address of HTTP with its scheme."""
        return self._http_at and f"{'http' if self._config.http_tls is None else 'https'}://{self._http_at}"


def not_running(node: NodeId) -> str:
    """Return why a machine is not ready: one of its nodes is down."""
    return f"node {node} of this machine is not running"


def _import_served() -> Any:
    from millstream.broker.kafka import served_apis

    return served_apis
