"""The short form of `make chaos-overload`: nothing is timed here, but every client is served."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from benchmarks.overload_flood import CONNECT, FETCH, HEARTBEAT, HTTP, METADATA, PRODUCE, SHARE_FETCH
from benchmarks.processes import resident_of
from trials.chaos_overload import GROWTH_BYTES_MAX, Chaos

from millstream_testing.server import Server

CONNECTIONS, SECONDS, SETTLE_S = 50, 1.0, 0.5
KINDS = (PRODUCE, FETCH, METADATA, HEARTBEAT, SHARE_FETCH, HTTP, CONNECT)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "data")


async def test_a_bystander_and_health_are_served_beside_floods_and_bombs(server: Server) -> None:
    with server:
        async with httpx.AsyncClient(timeout=60) as http:
            chaos = Chaos(server, http, settle_s=SETTLE_S)
            await chaos.prepare()
            before = resident_of(server.pid)
            for kind in KINDS:
                seen = await chaos.flood(kind, CONNECTIONS, SECONDS)
                assert seen.times_ms, kind
                assert seen.connects_ms, kind
                assert set(seen.health) == {200}, kind
                assert seen.peak_bytes - before < GROWTH_BYTES_MAX, kind
            await chaos.bomb(1)
            # The times depend on the machine; doors that are stuck, refusals, health and memory do not.
            assert [each for each in chaos.wrong if "waited" not in each] == []
