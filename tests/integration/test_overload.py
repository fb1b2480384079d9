"""The short form of `make chaos-overload`: nothing is timed here, but every client is served."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from benchmarks.overload_flood import CONNECT, FETCH, HEARTBEAT, HTTP, METADATA, PRODUCE, SHARE_FETCH, VERSIONS
from benchmarks.processes import resident_of
from trials.chaos_overload import BYSTANDER, GROWTH_BYTES_MAX, Chaos, flood

from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

CONNECTIONS, SECONDS, SETTLE_S = 50, 1.0, 0.5
KINDS = (PRODUCE, FETCH, METADATA, HEARTBEAT, SHARE_FETCH, HTTP, CONNECT)
FLOOD_S_MAX, MESSAGES = 60.0, 5
BETWEEN_MAX = 400 * CONNECTIONS
"""Requests of a flood that are served for each message of a client that waits for its answers."""


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "data")


@pytest.mark.trial
async def requests_served(server: Server, http: httpx.AsyncClient) -> float:
    metrics = (await http.get(f"http://{server.http}/metrics")).text
    found = re.search(r"^millstream_requests_total (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def served_per_message(server: Server, http: httpx.AsyncClient, kind: str) -> float:
    """Count what a broker serves while a client publishes and consumes one message after the other beside a flood."""
    idle = await requests_served(server, http)
    flooding = asyncio.ensure_future(flood(server, kind, CONNECTIONS, FLOOD_S_MAX))
    try:
        async with asyncio.timeout(FLOOD_S_MAX), Client.connect(server.kafka) as client:
            while (before := await requests_served(server, http)) < idle + 10 * CONNECTIONS:
                assert not flooding.done()
            for _ in range(MESSAGES):
                produced = await client.produce(BYSTANDER, 0, encode_batch([NewRecord(None, b"x", (), 1)]))
                await client.fetch(BYSTANDER, 0, produced.base_offset)
            return (await requests_served(server, http) - before) / MESSAGES
    finally:
        flooding.cancel()
        await asyncio.wait([flooding])


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
            # However quick the machine is, few of the requests that wait are served between two of a client's own.
            assert await served_per_message(server, http, VERSIONS) < BETWEEN_MAX
            await chaos.bomb(1)
            # The times depend on the machine; doors that are stuck, refusals, health and memory do not.
            assert [each for each in chaos.wrong if "waited" not in each] == []
