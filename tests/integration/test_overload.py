"""The short form of `make chaos-overload`: concurrent floods, without timing assertions, but every client is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from benchmarks.overload_flood import CONNECT, FETCH, HEARTBEAT, HTTP, METADATA, PRODUCE, SHARE_FETCH
from benchmarks.processes import resident_of
from trials.chaos_overload import GROWTH_BYTES_MAX, Chaos

from millstream_testing.server import Server

CONNECTIONS, SECONDS, SETTLE_S = 10, 1.0, 0.5
AT_ONCE = (PRODUCE, FETCH, METADATA, HEARTBEAT, SHARE_FETCH, CONNECT)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    started = Server(tmp_path / "data")
    # The memory of its children is checked.
    started.forked = False
    return started


@pytest.fixture
async def chaos(server: Server) -> AsyncIterator[Chaos]:
    with server:
        async with httpx.AsyncClient(timeout=60) as http:
            made = Chaos(server, http, settle_s=SETTLE_S)
            await made.prepare()
            yield made


def findings(chaos: Chaos) -> list[str]:
    """The findings without durations, which depend on the machine."""
    return [finding for finding in chaos.findings if "waited" not in finding]


async def test_a_bystander_and_health_are_served_beside_floods(chaos: Chaos, server: Server) -> None:
    before = resident_of(server.pid)
    observed = await chaos.flood(AT_ONCE, CONNECTIONS, SECONDS)
    # Beside all others, too few of its requests get a response to be sure of one in this time.
    await chaos.flood([HTTP], CONNECTIONS, SECONDS)
    assert observed.times_ms
    assert observed.connects_ms
    assert set(observed.health) == {200}
    assert observed.peak_bytes - before < GROWTH_BYTES_MAX
    assert findings(chaos) == []


@pytest.mark.trial
async def test_a_bystander_and_health_are_served_beside_bombs(chaos: Chaos) -> None:
    await chaos.bomb(1)
    assert findings(chaos) == []
