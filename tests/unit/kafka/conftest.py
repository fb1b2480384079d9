"""Topics on a real data folder, for API tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import Sealing
from millstream.broker.cluster.declarations import CatalogDeclarations, ProducerIds
from millstream.broker.cluster.declared_state import ClientQuotas, DeclaredGroups, DeclaredState
from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.node_status import NodeState
from millstream.broker.kafka.served_apis import ApiDependencies
from millstream.broker.net.budget import Budget
from millstream.broker.security.secrets import StoredSecrets
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.ids import NodeId
from millstream_testing.node_group import single_node


@pytest.fixture
def config() -> Config:
    """A node whose defaults differ from the built-in ones in one place."""
    return Config(default_retention_ms=3_600_000, default_partitions=2, node_id=5)


@pytest.fixture
def membership() -> Membership:
    """A cluster of one."""
    me = Node(node_id=NodeId(5), host="broker.example", port=9092, rack="cellar")
    return Membership("test-cluster", me)


@pytest.fixture
async def quotas(catalog: Catalog) -> ClientQuotas:
    """No quotas yet."""
    return ClientQuotas(CatalogDeclarations(catalog))


@pytest.fixture
async def groups(catalog: Catalog, config: Config) -> DeclaredGroups:
    """No group has settings yet."""
    return DeclaredGroups(CatalogDeclarations(catalog), config)


@pytest.fixture
async def topics(tmp_path: Path, config: Config) -> AsyncIterator[Topics]:
    """No topics yet."""
    async with single_node(tmp_path, config) as loaded:
        yield loaded


@pytest.fixture
async def api_dependencies(
    catalog: Catalog, topics: Topics, membership: Membership, config: Config, quotas: ClientQuotas
) -> ApiDependencies:
    """What the APIs of a node need."""
    declared = replace(DeclaredState.of(CatalogDeclarations(catalog), config, SystemClock()), quotas=quotas)
    return ApiDependencies(
        config=config,
        clock=SystemClock(),
        topics=topics,
        membership=membership,
        producer_ids=ProducerIds(CatalogDeclarations(catalog)),
        declared=declared,
        secrets=StoredSecrets(catalog, Sealing(None), declared.with_secrets),
        budget=Budget(1 << 20),
        connections=(),
        sources=(),
        unready_reasons=tuple,
        node=NodeState(node_id=5, cluster_id="c", started_ms=0, kafka="h:1", http="h:2", data="d"),
        supervise=lambda name, work: asyncio.get_running_loop().create_task(work, name=name),
    )
