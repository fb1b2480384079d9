"""The in-memory coordination store: a clock owned by the test, compacted history, injected faults."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

import pytest

from millstream.broker.cluster.embedded_store import CoordinationFile, EmbeddedService, EmbeddedStore
from millstream.broker.cluster.socket_store import BATCHES_MAX, SocketStore, StoreServer
from millstream.broker.cluster.store import Delete, Event, Put
from millstream.core.clock import SystemClock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.waiting import until

T = TypeVar("T")

SOON_S = 0.03


class FaultyStore(EmbeddedStore):
    """A store whose connection can be cut before or after a request is applied."""

    cut = ""

    async def _send(self, request: Callable[[], T]) -> T:
        if self.cut == "before":
            raise StoreRefused("not sent")
        response = await super()._send(request)
        if self.cut == "after":
            raise StoreUnavailable("the response was lost")
        return response


async def test_a_session_without_renewals_expires() -> None:
    clock = ManualClock()
    service = EmbeddedService(clock)
    lost = asyncio.Event()
    node, other = FaultyStore(service, clock), EmbeddedStore(service, clock)
    session = await node.open_session(SOON_S, lost.set)
    await node.change([Put("nodes/1", "x", leased=True)])
    clock.advance_ms(29)
    assert "nodes/1" in (await other.read("")).entries
    revision = service.revision
    async with aclosing(other.watch("", after=revision)) as batches:
        clock.advance_ms(1)
        assert list(await anext(batches)) == [Event("nodes/1", None, revision + 1)]
    await lost.wait()
    assert not session.live


async def test_a_session_that_cannot_reach_the_store_is_lost_once_that_is_known() -> None:
    clock = ManualClock()
    service = EmbeddedService(clock)
    lost = asyncio.Event()
    node = FaultyStore(service, clock)
    session = await node.open_session(SOON_S, lost.set)
    node.cut = "before"
    clock.advance_ms(1000)
    service.expire()
    assert bool(session.confirmed)
    await until(lambda: not session.confirmed)
    assert session.live
    node.cut = ""
    await lost.wait()


async def test_a_watch_behind_the_history_is_lost() -> None:
    clock = ManualClock()
    service = EmbeddedService(clock, history_max=3)
    store = EmbeddedStore(service, clock)
    start = service.revision
    for number in range(4):
        await store.change([Put("a", str(number))])
    async with aclosing(store.watch("", after=start + 1)) as batches:
        assert [event.value for event in await anext(batches)] == ["1", "2", "3"]
    with pytest.raises(WatchLost):
        async with aclosing(store.watch("", after=start)) as batches:
            await anext(batches)
    # As etcd does when it compacts.
    service._history.clear()
    with pytest.raises(WatchLost):
        async with aclosing(store.watch("", after=service.revision - 1)) as batches:
            await anext(batches)


async def test_a_watch_over_a_socket_ends_rather_than_skips_a_change() -> None:
    clock = SystemClock()
    service = EmbeddedService(clock)
    mine, other = socket.socketpair()
    store = SocketStore(mine, clock, on_lost=lambda: None)
    serving = asyncio.create_task(StoreServer(service, clock).run(other))
    async with aclosing(store.watch("", after=service.revision)) as batches:
        await store.change([Put("a", "0")])
        seen = [event.value for event in await anext(batches)]
        for number in range(1, 2 * BATCHES_MAX):
            await store.change([Put("a", str(number))])

        async def follow() -> None:
            async for events in batches:
                seen.extend(event.value for event in events)

        with pytest.raises(WatchLost, match="too slow"):
            await follow()
    assert seen == [str(number) for number in range(len(seen))]
    await store.close()
    await serving


async def test_health_follows_the_responses() -> None:
    clock = ManualClock()
    store = FaultyStore(EmbeddedService(clock), clock)
    heard: list[tuple[bool, int | None]] = []
    store.on_change(lambda: heard.append((store.available, store.unavailable_since_ms)))
    store.cut = "after"
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.change([Put("a", "1")])
        clock.advance_ms(5)
    store.cut = ""
    assert (await store.read("a")).entries["a"].value == "1"
    assert heard == [(False, clock.now_ms() - 10), (True, None)]


# -- the file ----------------------------------------------------------------------------------------------------


async def test_repeated_starts_on_a_full_disk_leave_room_for_deletions() -> None:
    files = MemoryFiles(1)
    files.make_directory("/data")
    revisions: list[int] = []

    def start() -> EmbeddedService:
        return EmbeddedService(ManualClock(), file=CoordinationFile(files, "/data"))

    service = start()
    service.change([Put("topics/t", "x" * 1000)], (), None)
    files.capacity_bytes = 0
    for _ in range(1000):
        lease = service.grant(60)
        for number in range(3):
            service.change([Put(f"nodes/{number}", "y" * 1000, leased=True)], (), lease)
            revisions.append(service.revision)
        service.close()
        service = start()
        assert list(service.read("").entries) == ["topics/t"]
    assert revisions == sorted(set(revisions)), "no revision is given out twice"
    service.change([Delete("topics/t")], (), None)
    service.close()
    assert not start().read("").entries


async def test_a_key_may_move_between_a_session_and_the_file() -> None:
    files = MemoryFiles(1)
    files.make_directory("/data")

    def start() -> EmbeddedService:
        return EmbeddedService(ManualClock(), file=CoordinationFile(files, "/data"))

    service = start()
    lease = service.grant(60)
    service.change([Put("a", "1", leased=True), Put("b", "1")], (), lease)
    service.change([Put("a", "2"), Put("b", "2", leased=True)], (), lease)
    service.close()
    service = start()
    assert {key: entry.value for key, entry in service.read("").entries.items()} == {"a": "2"}
    lease = service.grant(60)
    service.change([Put("c", "1", leased=True), Put("a", "3", leased=True)], (), lease)
    service.revoke(lease)
    assert not service.read("").entries
    service.close()
    assert not start().read("").entries
