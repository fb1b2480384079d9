"""Topics on a real data folder, for API tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas, DeclaredGroups
from millstream.broker.cluster.membership import Membership, Node
from millstream.broker.cluster.topics import Topics
from millstream.core.config import Config
from millstream.core.ids import NodeId
from millstream_testing.single_node import single_node


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
