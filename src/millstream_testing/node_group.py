"""Nodes of one cluster in one process, without their sockets: the real view, controller, topics and logs.

They agree through an embedded store and share a catalog. They do not replicate, since there are no links between nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Self

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.cluster_node import ClusterDependencies, ClusterNode
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.machine_folder import Layout, adopt_known_topics, open_coordination, settle
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.topics import Topics
from millstream.broker.cluster.view import ClusterView
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import NodeId
from millstream.protocol.wire.replica_fetch import ReplicaFetch, ReplicaResponses
from millstream_testing.files import MemoryFiles

PATIENCE_S = 60.0
FOLDER = Path("/data")


class _DeadLink:
    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        raise BrokerUnreachable("there is no network here")

    async def close(self) -> None:
        pass


class DeadLinks:
    """Reaches no other node."""

    def open(self, node: NodeId) -> _DeadLink:
        return _DeadLink()


class GroupNode:
    """A node: its machine with the files, and its process while it runs."""

    def __init__(self, group: NodeGroup, node_id: int, **settings: Any) -> None:
        self.node_id = NodeId(node_id)
        self.files = MemoryFiles(node_id)
        self.boot_id = "first boot"
        self.machine: NodeId | None = None
        self.failed: BaseException | None = None
        self.config = Config(node_id=node_id, etcd="embedded", leader_balance_ms=0, lease_ms=1000).replace(**settings)
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self._log_store: LogStore | None = None
        self._store: EmbeddedStore | None = None
        self._cluster: ClusterNode | None = None

    @property
    def cluster(self) -> ClusterNode:
        """The node's parts while it runs."""
        if self._cluster is None:
            raise RuntimeError(f"node {self.node_id} does not run")
        return self._cluster

    @property
    def topics(self) -> Topics:
        return self.cluster.topics

    @property
    def view(self) -> ClusterView:
        return self.cluster.view

    async def start(self) -> Self:
        """Start the node and wait until the cluster has admitted it."""
        group = self._group
        group.starts += 1
        self._log_store = LogStore.open(
            FOLDER, files=self.files, clock=group.clock, journal_bytes=1 << 20, producer_expiry_ms=1 << 40
        )
        self._supervise("log store", self._log_store.run())
        self._store = EmbeddedStore(group.service, group.clock)
        self._cluster = ClusterNode(
            ClusterDependencies(
                config=self.config,
                clock=group.clock,
                random=Random(group.starts),
                files=self.files,
                data=str(FOLDER),
                log_store=self._log_store,
                coordination=self._store,
                declarations=group.declarations,
                links=lambda _find: DeadLinks(),
                boot_id=self.boot_id,
                supervise=self._supervise,
            )
        )
        await self._cluster.open()
        me = Node(node_id=self.node_id, host=f"node-{self.node_id}", port=9092, rack=self.config.rack or None)
        await self._cluster.join(replace(me, machine=self.machine), "")
        return self

    async def stop(self) -> None:
        await self.cluster.leave()
        await self.cluster.close()
        self.cluster.topics.close()
        if self._store is not None and self._log_store is not None:
            await self._store.close()
            await self._log_store.close()
        await self._end()

    async def kill(self) -> None:
        """End the process at once; the store notices soon."""
        await self._end()
        if self._store is not None:
            await self._store.close()
        self.files.kill()

    async def crash(self) -> None:
        """Cut the power of the machine."""
        await self.kill()
        self.files.crash()
        self.boot_id += " again"

    async def _end(self) -> None:
        if self._cluster is not None:
            await self._cluster.replicas.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cluster = None

    def _supervise(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"node {self.node_id}: {name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failed = task.exception()


class NodeGroup:
    """The nodes, and what they share. Use it as a context manager."""

    def __init__(self, folder: Path, nodes: int = 3, **settings: Any) -> None:
        self.starts = 0
        """How often a node was started; each start gets different random numbers."""
        self.clock = SystemClock()
        self.service = EmbeddedService(self.clock)
        self._catalog = Catalog(f"sqlite:///{folder / 'catalog.sqlite'}")
        self._catalog.prepare()
        self.declarations = CatalogDeclarations(self._catalog)
        self.nodes = {number: GroupNode(self, number, **settings) for number in range(1, nodes + 1)}

    def __getitem__(self, node_id: int) -> GroupNode:
        return self.nodes[node_id]

    async def __aenter__(self) -> Self:
        for node in self.nodes.values():
            await node.start()
        await self.until(lambda: all(len(node.view.live) == len(self.nodes) for node in self.nodes.values()))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for node in self.nodes.values():
            await node.kill()
        self._catalog.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after each change of the store, since every change is there."""
        changed = asyncio.Event()
        forget = self.service.watch(changed.set)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    # Nodes see a change of the store a few turns of the loop later.
                    for _ in range(20):
                        await asyncio.sleep(0)
                        if condition():
                            return
                    changed.clear()
                    if not condition():
                        await _either(changed)
        finally:
            forget()


async def _either(changed: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(0.05):
            await changed.wait()
    except TimeoutError:
        return


@asynccontextmanager
async def single_node(data: Path, config: Config | None = None, *, rack: str | None = None) -> AsyncIterator[Topics]:
    """Open a data folder as the broker does, and close it cleanly."""
    config, files, clock = config or Config(), DiskFiles(), SystemClock()
    tasks: list[asyncio.Task[None]] = []

    def supervise(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work, name=name))
        return tasks[-1]

    await settle(Layout.of(str(data), config.node_id, 1), files, clock)
    catalog = Catalog.open_folder(data)
    service = open_coordination(files, str(data), clock)
    coordination = EmbeddedStore(service, clock, sessions_expire=False)
    await adopt_known_topics(coordination, catalog)
    store = LogStore.open(data, files=files, clock=clock, journal_bytes=1 << 20, producer_expiry_ms=1 << 40)
    running = asyncio.create_task(store.run())
    node = ClusterNode(
        ClusterDependencies(
            config=config,
            clock=clock,
            random=SystemRandom(),
            files=files,
            data=str(data),
            log_store=store,
            coordination=coordination,
            declarations=CatalogDeclarations(catalog),
            links=lambda _find: DeadLinks(),
            boot_id="boot",
            supervise=supervise,
            is_single=True,
        )
    )
    try:
        await node.open()
        me = Node(node_id=NodeId(config.node_id), host="127.0.0.1", port=9092, rack=rack)
        await node.membership(me)
        await node.join(me, "")
        yield node.topics
    finally:
        await node.close()
        node.topics.close()
        await store.close()
        await running
        await coordination.close()
        service.close()
        catalog.close()
