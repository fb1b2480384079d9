"""When a node declares the queue that tracks the open letters of a dead letter topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import subscriptions as declared_module
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.config import Config
from millstream.core.errors import InvalidSetting, InvalidSubscription
from millstream.core.subscription import ATTEMPTS, DEAD_LETTER_TOPIC, LETTERS_PREFIX, NO_DEAD_LETTERS, start_key
from millstream.core.topic import Topic
from millstream_testing.clock import ManualClock

DEAD = Topic(name="dead", topic_id=UUID(int=1), partitions=2, replication=1, overrides={}, created_ms=0)
LETTERS = LETTERS_PREFIX + DEAD.name


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SubscriptionService]:
    """A node that does not know yet of the dead letter topic that another node created."""

    async def topics() -> list[Topic]:
        return [DEAD]

    catalog, clock = Catalog.open_folder(tmp_path), ManualClock()
    known: Any = SimpleNamespace(get=lambda _name: None, declared=topics)
    unused: Any = SimpleNamespace(me=SimpleNamespace(node_id=1), node=None)
    subscriptions = Subscriptions(CatalogDeclarations(catalog), clock)
    yield SubscriptionService(
        known, unused, subscriptions, unused, unused, config=Config(), clock=clock, supervise=unused
    )
    catalog.close()


async def test_letters_are_tracked_when_no_subscription_refers_to_their_topic_any_more(
    service: SubscriptionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = service.declared
    for name in ("billing", "shipping"):
        await declared.create(name, ["orders"], {DEAD_LETTER_TOPIC: DEAD.name})
    # Also at the limit of subscriptions: otherwise nothing could be deleted.
    monkeypatch.setattr(declared_module, "SUBSCRIPTIONS_MAX", 2)
    await service.delete("shipping", force=True)
    tracked = declared.get(LETTERS)
    assert tracked is not None
    assert tracked.starts == {start_key(DEAD.name, DEAD.topic_id): (0, 0)}
    with pytest.raises(InvalidSubscription, match="delete some first"):
        await declared.create(LETTERS_PREFIX + "other", ["other"], {})
    await service.alter("billing", {DEAD_LETTER_TOPIC: NO_DEAD_LETTERS})
    assert declared.get(LETTERS) is tracked


async def test_letters_are_not_tracked_without_need(service: SubscriptionService) -> None:
    declared = service.declared
    await declared.create("billing", ["orders"], {DEAD_LETTER_TOPIC: DEAD.name})
    await service.alter("billing", {DEAD_LETTER_TOPIC: DEAD.name, ATTEMPTS: "7"})
    await service.alter("billing", {DEAD_LETTER_TOPIC: "other"}, validate_only=True)
    with pytest.raises(InvalidSetting):
        await service.alter("billing", {DEAD_LETTER_TOPIC: "other", ATTEMPTS: "many"})
    (only,) = declared.all()
    assert (only.settings.dead_letter_topic, only.settings.attempts) == (DEAD.name, 7)
    await service.alter("billing", {DEAD_LETTER_TOPIC: "other"})
    assert declared.get(LETTERS) is not None
