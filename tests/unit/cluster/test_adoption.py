"""State that a cluster takes over from the stores of a machine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys
from millstream.broker.cluster.adoption import Adoption
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.machine_folder import open_coordination
from millstream.broker.cluster.store import Put
from millstream.broker.log.files import DiskFiles
from millstream.core.clock import SystemClock
from millstream.core.ids import NodeId, PartitionIndex
from millstream_testing.node_group import single_node


async def test_a_plan_continues_where_it_was(tmp_path: Path) -> None:
    data, clock = tmp_path / "data", SystemClock()
    data.mkdir()
    async with single_node(data) as topics:
        topic = await topics.create("orders")
    under_way = {
        keys.PLAN: "a plan",
        keys.plan_moves_key("p", 0): "its moves",
        keys.reassignment_key((topic.topic_id, PartitionIndex(0))): "one of them",
        keys.drained_key(NodeId(1001)): "",
    }
    with closing(open_coordination(DiskFiles(), str(data), clock)) as service:
        await EmbeddedStore(service, clock).change([Put(key, value) for key, value in under_way.items()])
    store = EmbeddedStore(EmbeddedService(clock), clock)
    with closing(Catalog(f"sqlite:///{tmp_path}/cluster.sqlite", cluster="c")) as catalog:
        catalog.prepare()
        await Adoption(str(data), "c", store, catalog, clock, flush="always").run()
    entries = (await store.read("")).entries
    assert {key: entries[key].value for key in under_way} == under_way
