"""Unused subscriptions expire if configured; use on any node counts, also after a restart."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.subscriptions import engine as expiry_module
from millstream.broker.subscriptions.engine import Expiry
from millstream.core.errors import UnknownSubscription
from millstream.core.subscription import EXPIRES
from millstream_testing.clock import ManualClock
from millstream_testing.waiting import until

LIFE_MS = 80_000


class Node:
    """The subscriptions as known to one node, and their last use there."""

    def __init__(self, catalog: Catalog, clock: ManualClock) -> None:
        self.subscriptions = Subscriptions(CatalogDeclarations(catalog), clock)
        self.used_ms: dict[UUID, int] = {}
        self.expiry = Expiry(
            self.subscriptions, clock, lambda name: self.used_ms.get(name, 0), self.subscriptions.delete
        )

    async def look(self) -> None:
        """Run one expiry round."""
        running = asyncio.ensure_future(self.expiry.run())
        await until(lambda: running.done() or self.waits())
        running.cancel()
        await asyncio.wait([running])

    def waits(self) -> bool:
        return bool(self.expiry._changed._waiters)


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_module, "CHECK_S_MIN", 600.0)


async def test_an_unused_subscription_is_deleted(catalog: Catalog) -> None:
    clock = ManualClock()
    node = Node(catalog, clock)
    await node.subscriptions.create("stays", ["orders"], {})
    await node.subscriptions.create("goes", ["orders"], {EXPIRES: str(LIFE_MS)})
    clock.advance_ms(LIFE_MS - 1)
    await node.look()
    assert len(node.subscriptions.all()) == 2
    clock.advance_ms(2)
    await node.look()
    assert [subscription.name for subscription in node.subscriptions.all()] == ["stays"]


async def test_a_subscription_used_on_another_node_is_kept_also_after_a_restart(catalog: Catalog) -> None:
    clock = ManualClock()
    one, other = Node(catalog, clock), Node(catalog, clock)
    made = await one.subscriptions.create("billing", ["orders"], {EXPIRES: str(LIFE_MS)})
    await other.subscriptions.load()
    clock.advance_ms(LIFE_MS // 2)
    other.used_ms[made.subscription_id] = clock.now_ms()
    await other.look()
    clock.advance_ms(LIFE_MS * 3 // 4)
    await one.look()
    assert one.subscriptions.get("billing") is not None
    restarted = Node(catalog, clock)
    await restarted.subscriptions.load()
    await restarted.look()
    assert restarted.subscriptions.get("billing") is not None
    clock.advance_ms(LIFE_MS // 2)
    await restarted.look()
    with pytest.raises(UnknownSubscription):
        restarted.subscriptions.existing("billing")
