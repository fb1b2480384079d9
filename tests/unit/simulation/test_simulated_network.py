"""The links of the simulation and the store behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import TypeVar

import pytest

from millstream.broker.cluster.store import Expect, Put
from millstream.core.errors import StoreUnavailable
from millstream_testing.simulation.loop import Process, SimulatedClock, SimulatedLoop
from millstream_testing.simulation.network import (
    STORE,
    LinkDown,
    Network,
    NotListening,
    ObservedService,
    SimulatedStore,
)

T = TypeVar("T")


class Links:
    """Two processes and a store."""

    def __init__(self, seed: int = 7) -> None:
        self.loop = SimulatedLoop(Random(seed))
        self.network = Network(self.loop, Random(seed))
        self.clock = SimulatedClock(self.loop)
        for name in ("a", "b", STORE):
            self.network.endpoints[name] = self.loop.start_process(name)
        self.service = ObservedService(self.clock, on_changed=lambda: None)

    @property
    def b(self) -> Process:
        return self.network.endpoints["b"]

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a function in process a."""

        async def main() -> T:
            return await work()

        async def outer() -> T:
            return await self.loop.spawn(self.network.endpoints["a"], main())

        outcome: T = self.loop.run_until_complete(outer())
        return outcome

    def store(self) -> SimulatedStore:
        return SimulatedStore(self.service, self.clock, self.network)


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.loop.shut_down()


def test_a_cut_link_loses_the_response_after_the_work_was_done(links: Links) -> None:
    done: list[int] = []

    async def serve() -> int:
        done.append(1)
        return len(done)

    async def call() -> None:
        assert await links.network.call("b", serve, timeout_s=1) == 1
        links.network.cut("b", "a")
        with pytest.raises(LinkDown):
            await links.network.call("b", serve, timeout_s=1)
        assert len(done) == 2
        links.network.cut("a", "b")
        with pytest.raises(LinkDown):
            await links.network.call("b", serve, timeout_s=1)
        assert len(done) == 2
        links.network.heal_all()
        assert await links.network.call("b", serve, timeout_s=1) == 3

    links.run(call)


def test_a_dead_process_refuses_and_a_killed_one_disconnects(links: Links) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def call() -> None:
        waiting = asyncio.create_task(links.network.call("b", forever, timeout_s=100))
        await asyncio.sleep(1)
        begin = links.loop.time()
        links.loop.kill(links.b)
        links.network.disconnect(links.b)
        with pytest.raises(LinkDown, match="hung up"):
            await waiting
        with pytest.raises(NotListening):
            await links.network.call("b", forever, timeout_s=100)
        assert links.loop.time() - begin < 1

    links.run(call)


def test_a_change_with_a_lost_response_was_made_and_a_late_watch_reports_it(links: Links) -> None:
    async def work() -> None:
        store = links.store()
        assert await store.change([Put("x", "1")], [Expect("x", 0)]) is not None
        links.network.cut(STORE, "a")
        with pytest.raises(StoreUnavailable):
            await store.change([Put("x", "2")])
        assert not store.available
        reported = asyncio.create_task(anext(store.watch("", after=1)))
        await asyncio.sleep(5)
        assert not reported.done()
        links.network.heal_all()
        assert [event.value for event in await reported] == ["1", "2"]
        assert (await store.read("x")).entries["x"].value == "2"

    links.run(work)


def test_a_session_of_an_isolated_node_expires_in_virtual_time(links: Links) -> None:
    async def work() -> None:
        store, lost = links.store(), asyncio.Event()
        await store.open_session(3.0, lost.set)
        await store.change([Put("nodes/1", "", leased=True)])
        await asyncio.sleep(10)
        assert "nodes/1" in (await store.read("")).entries
        links.network.cut("a", STORE)
        await asyncio.sleep(4)
        assert "nodes/1" not in links.service.read("").entries
        links.network.heal_all()
        await lost.wait()

    links.run(work)
