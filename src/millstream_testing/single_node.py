"""A single node without its sockets: the topics of a real data folder, for tests of what uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.cluster_node import ClusterDependencies, ClusterNode
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.embedded_store import EmbeddedStore
from millstream.broker.cluster.machine_folder import Layout, adopt_known_topics, open_coordination, settle
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.topics import Topics
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.ids import NodeId
from millstream_testing.node_group import DeadLinks


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
