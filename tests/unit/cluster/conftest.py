"""What the tests of the cluster share: a coordination store of either kind."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.broker.cluster.store import CoordinationStore
from millstream.core.clock import SystemClock

OpenStore = Callable[[], CoordinationStore]


@pytest.fixture(params=["embedded", "etcd"])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """Opens doors to one and the same new store, one for each node."""
    clock = SystemClock()
    name = uuid.uuid4().hex
    service = EmbeddedService(clock)
    async with AsyncExitStack() as stack:

        def open_door() -> CoordinationStore:
            store: CoordinationStore
            if request.param == "embedded":
                store = EmbeddedStore(service, clock)
            else:
                store = EtcdStore(
                    EtcdAddress.parse(request.getfixturevalue("etcd").url), name, clock, request_s_max=60.0
                )
            stack.push_async_callback(store.close)
            return store

        yield open_door


@pytest.fixture
async def store(open_store: OpenStore) -> CoordinationStore:
    """One door to a new store."""
    return open_store()
