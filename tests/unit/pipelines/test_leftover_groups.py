"""Groups of deleted pipelines whose driver is dead are deleted, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream.client.admin.groups import describe_group
from millstream.core.errors import UnknownGroup
from millstream.core.pipeline import GROUP_PREFIX
from millstream.pipelines.runtime.child import LeftoverGroups
from millstream.pipelines.runtime.claim import Claim
from millstream.pipelines.runtime.driver_messages import DRIVER_CLIENT
from millstream.pipelines.source.link import Link
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

HANG_S = 60.0


@asynccontextmanager
async def tidying(server: Server, declared: set[str]) -> AsyncIterator[LeftoverGroups]:
    groups = LeftoverGroups(server.kafka, declared.__contains__, pause_s=0.05)
    running = asyncio.create_task(groups.run())
    try:
        yield groups
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def exists(server: Server, name: str) -> bool:
    async with Client.connect(server.kafka) as client:
        try:
            await describe_group(client, f"{GROUP_PREFIX}{name}")
        except UnknownGroup:
            return False
        return True


def take(server: Server, name: str, client_id: str) -> Claim:
    """Join the group of a pipeline."""
    claim = Claim(Link(server.kafka, client_id, 30.0), f"{GROUP_PREFIX}{name}")
    claim.take()
    return claim


def close(claim: Claim) -> None:
    """Leave without further clean-up, as when a session expires."""
    claim.leave()
    claim._link.close()


async def test_the_group_of_a_dead_driver_is_deleted_when_its_session_has_expired(server: Server, topic: str) -> None:
    gone, kept = f"{topic[-40:]}-gone", f"{topic[-40:]}-kept"
    claims = [await asyncio.to_thread(take, server, group, f"{DRIVER_CLIENT}1") for group in (gone, kept)]
    declared = {gone, kept}
    async with tidying(server, declared) as groups:
        groups.take(declared)
        declared.clear()
        groups.take(declared)
        # Redeclared at once.
        declared.add(kept)
        groups.take(declared)
        async with Client.connect(server.kafka) as client:
            assert not await groups._is_settled(client, gone)
        assert await exists(server, gone)
        for claim in claims:
            await asyncio.to_thread(close, claim)
        async with asyncio.timeout(HANG_S):
            while await exists(server, gone):
                await asyncio.sleep(0.02)
    assert await exists(server, kept)


async def test_the_group_of_a_manual_run_is_kept(server: Server, topic: str) -> None:
    name = topic[-40:]
    claim = await asyncio.to_thread(take, server, name, "pipeline-run-1")
    groups = LeftoverGroups(server.kafka, lambda _name: False)
    async with Client.connect(server.kafka) as client:
        assert await groups._is_settled(client, name)
    assert await exists(server, name)
    await asyncio.to_thread(close, claim)
