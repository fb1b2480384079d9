"""Startup checks of a node: every mismatch has its error, and unavailable stores are waited for where possible."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from millstream.broker.cluster import registration
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.keys import NodeRegistration
from millstream.broker.cluster.last_run import FolderOwner, LastRun
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.registration import NodeIdentity, StartupChecks
from millstream.broker.cluster.store import Put
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    CatalogDenied,
    CatalogUnavailable,
    ClusterForgotten,
    ClusterMismatch,
    NodeIdTaken,
    StoreDenied,
    StoreRefused,
    StoreUnavailable,
)
from millstream.core.ids import NodeId
from millstream.core.partition_state import encode_value
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles

ME = NodeId(2)
NOBODYS = FolderOwner()
MINE = FolderOwner(node_id=2, cluster="c", cluster_id="id", was_admitted=True, incarnations=("mine",))


class Store(EmbeddedStore):
    """A store that fails a given number of times; the clock advances each time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(EmbeddedService(clock), clock)
        self.clock = clock
        self.failures: list[Exception] = []

    async def _send(self, request: Any) -> Any:
        if self.failures:
            self.clock.advance_ms(1000)
            raise self.failures.pop(0)
        return await super()._send(request)


class Catalog:
    """A catalog that fails a given number of times."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.moves = asyncio.Event()
        self.moves.set()

    async def call(self, _method: object) -> str:
        await self.moves.wait()
        if self.failures:
            raise self.failures.pop(0)
        return "id"


class Scene:
    """A node that is about to start."""

    def __init__(self, owner: FolderOwner = NOBODYS, wait_s: float = 5.0) -> None:
        self.clock = ManualClock()
        self.store = Store(self.clock)
        self.catalog = Catalog()
        self.reported: list[str] = []
        self.alive = False
        claim = NodeIdentity(node_id=ME, cluster="c", etcd="etcd:2379", data="folder", etcd_wait_s=wait_s)
        self.checks = StartupChecks(
            claim,
            owner,
            self.store,
            cast("Declarations", self.catalog),
            clock=self.clock,
            backoff=lambda: Backoff(Random(1), first_s=0, max_s=0),
            is_running=self._responds,
            report=self._report,
        )

    async def knows(self, **values: str) -> None:
        await self.store.change([Put(key.replace("__", "/").replace("_", "-"), value) for key, value in values.items()])

    async def _responds(self, _node: Node) -> bool:
        return self.alive

    async def _report(self, reason: str) -> None:
        self.reported.append(reason)


def registered(incarnation: str) -> str:
    node = Node(node_id=ME, host="other", port=9092)
    return encode_value(NodeRegistration(node=node, http="", incarnation=incarnation, version="", unclean=False))


async def test_a_new_node_of_a_new_cluster_and_a_known_node_may_start() -> None:
    await Scene().checks.check()
    scene = Scene(MINE)
    await scene.knows(cluster_id="id", admitted__2="mine")
    await scene.checks.check()
    assert scene.reported == []


@pytest.mark.parametrize(
    ("owner", "advice"),
    [
        (FolderOwner(node_id=1, cluster="c", was_admitted=True), "pass --node-id 1"),
        (FolderOwner(node_id=2, cluster="first", was_admitted=True), "pass --cluster first"),
    ],
)
async def test_a_folder_of_another_node_or_cluster_is_refused_before_any_request(
    owner: FolderOwner, advice: str
) -> None:
    scene = Scene(owner)
    scene.store.failures = [StoreUnavailable("nobody")] * 100
    with pytest.raises(ClusterMismatch, match=advice):
        await scene.checks.check()
    assert len(scene.store.failures) == 100


async def test_a_folder_of_another_cluster_of_the_same_name_is_refused() -> None:
    scene = Scene(MINE)
    await scene.knows(cluster_id="another", admitted__2="somebody")
    with pytest.raises(ClusterMismatch, match="belongs to another cluster"):
        await scene.checks.check()


async def test_a_node_that_etcd_does_not_know_is_refused() -> None:
    with pytest.raises(ClusterForgotten, match="node 2"):
        await Scene(MINE).checks.check()


async def test_a_catalog_of_another_cluster_is_refused() -> None:
    scene = Scene()
    await scene.knows(cluster_id="another")
    with pytest.raises(ClusterMismatch, match="check --catalog"):
        await scene.checks.check()


async def test_a_node_id_whose_holder_responds_is_refused() -> None:
    scene = Scene()
    await scene.knows(nodes__2=registered("other"))
    await scene.checks.check()
    scene.alive = True
    with pytest.raises(NodeIdTaken, match="at other:9092; stop it first"):
        await scene.checks.check()
    # An ended run of this folder; the process that responds there is being replaced.
    again = Scene(MINE)
    again.alive = True
    await again.knows(nodes__2=registered("mine"), admitted__2="mine", cluster_id="id")
    await again.checks.check()


async def test_an_unavailable_etcd_is_waited_for_and_reported() -> None:
    scene = Scene()
    scene.store.failures = [StoreUnavailable("no route"), StoreRefused("no connection")]
    await scene.checks.check()
    assert len(scene.reported) == 2
    assert "waits for etcd at etcd:2379, since 2023-11-14T22:13:20+00:00: no route" in scene.reported[0]


async def test_an_unavailable_etcd_is_a_startup_error_after_a_while() -> None:
    scene = Scene(wait_s=5)
    scene.store.failures = [StoreUnavailable("no route")] * 10
    with pytest.raises(StoreUnavailable, match=r"etcd at etcd:2379 within 5 s \(no route\)"):
        await scene.checks.check()
    assert len(scene.reported) == 4


async def test_a_login_denied_by_etcd_is_reported_at_once() -> None:
    scene = Scene()
    scene.store.failures = [StoreDenied("authentication failed")]
    with pytest.raises(StoreDenied, match="password in --etcd"):
        await scene.checks.check()
    assert scene.reported == []


async def test_the_catalog_is_waited_for_only_at_the_first_start() -> None:
    scene = Scene()
    scene.catalog.failures = [CatalogUnavailable("down"), CatalogUnavailable("down")]
    await scene.checks.check()
    assert len(scene.reported) == 2
    later = Scene(MINE)
    later.catalog.failures = [CatalogUnavailable("down")]
    await later.knows(cluster_id="id", admitted__2="mine")
    await later.checks.check()
    assert later.reported == []


async def test_a_frozen_catalog_does_not_delay_a_later_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "CATALOG_S_MAX", 0.01)
    scene = Scene(MINE)
    scene.catalog.moves.clear()
    await scene.knows(cluster_id="id", admitted__2="mine")
    await scene.checks.check()


async def test_a_login_denied_by_the_catalog_is_reported_at_once() -> None:
    for scene in (Scene(), Scene(MINE)):
        await scene.knows(cluster_id="id", admitted__2="mine")
        scene.catalog.failures = [CatalogDenied("wrong password")]
        with pytest.raises(CatalogDenied):
            await scene.checks.check()


def test_a_folder_remembers_its_node_and_cluster() -> None:
    files = MemoryFiles(1)
    files.make_directory("/data")
    assert FolderOwner.read(files, "/data") == FolderOwner()
    run = LastRun(files, "/data", boot_id="a", stopped_clean=True)
    run.set_owner(FolderOwner(node_id=2, cluster="c", cluster_id="id"))
    run.begin("mine")
    run.record_admitted()
    assert FolderOwner.read(files, "/data") == MINE
    LastRun(files, "/data", boot_id="a", stopped_clean=True).begin("again")
    assert FolderOwner.read(files, "/data").cluster_id == "id"
