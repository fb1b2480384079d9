"""Shared fixtures of the cluster tests: a coordination store of either kind."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from millstream.broker.cluster.embedded_store import CoordinationFile, EmbeddedService, EmbeddedStore
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.broker.cluster.socket_store import SocketStore, StoreServer
from millstream.broker.cluster.store import CoordinationStore
from millstream.core.clock import SystemClock
from millstream_testing.files import MemoryFiles

OpenStore = Callable[[], CoordinationStore]


@pytest.fixture(params=["embedded", "file", "socket", "etcd"])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """Open several clients of one new store, one for each node."""
    clock = SystemClock()
    name = uuid.uuid4().hex
    files = MemoryFiles(1)
    files.make_directory("/data")
    file = None if request.param == "embedded" else CoordinationFile(files, "/data")
    service = EmbeddedService(clock, file=file)
    async with AsyncExitStack() as stack:

        def open_store() -> CoordinationStore:
            store: CoordinationStore
            if request.param in ("embedded", "file"):
                store = EmbeddedStore(service, clock)
            elif request.param == "socket":
                mine, other = socket.socketpair()
                store = SocketStore(mine, clock, on_lost=lambda: None)
                serving = asyncio.create_task(StoreServer(service, clock).run(other))
                stack.push_async_callback(asyncio.wait, [serving])
            else:
                store = EtcdStore(
                    EtcdAddress.parse(request.getfixturevalue("etcd").url), name, clock, request_s_max=60.0
                )
            stack.push_async_callback(store.close)
            return store

        yield open_store


@pytest.fixture
async def store(open_store: OpenStore) -> CoordinationStore:
    """One client of a new store."""
    return open_store()
