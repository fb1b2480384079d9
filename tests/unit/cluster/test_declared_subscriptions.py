"""Subscriptions: stored in the catalog, validated when declared, announced to the queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.sealing import Sealing, SecretKey, write_keys
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.subscriptions import DELETION_KEPT_MS, Subscriptions
from millstream.core import push
from millstream.core.errors import (
    CatalogUnavailable,
    InvalidRequest,
    InvalidSetting,
    SubscriptionExists,
    UnknownSubscription,
)
from millstream.core.subscription import (
    ATTEMPTS,
    DEAD_LETTER_TOPIC,
    FILTER,
    LEASE,
    NO_DEAD_LETTERS,
    ORDERED,
    settings_of_new,
    start_key,
)
from millstream_testing.clock import ManualClock
from millstream_testing.waiting import until


def make(catalog: Catalog, clock: ManualClock | None = None) -> Subscriptions:
    return Subscriptions(CatalogDeclarations(catalog), clock or ManualClock())


async def test_declared_subscriptions_survive_a_restart(catalog: Catalog) -> None:
    subscriptions = make(catalog)
    await subscriptions.load()
    reported: list[int] = []
    subscriptions.on_change(lambda: reported.append(len(subscriptions.all())))
    first, restarted = UUID(int=1), UUID(int=2)
    orders, bills, others = (start_key(name, first) for name in ("orders", "bills", "others"))
    billing = await subscriptions.create("billing", ["orders"], {LEASE: "5000"}, starts={orders: (7, 8)})
    assert [billing.start_on("orders", first, 1), billing.start_on("orders", first, 2)] == [8, None]
    assert [billing.start_on("orders", restarted, 1), billing.start_on("x", first, 0)] == [None, None]
    assert subscriptions.get("billing") is subscriptions.by_id(billing.subscription_id) is billing
    assert subscriptions.settings_of(billing).lease_ms == 5000
    changed = await subscriptions.alter(
        "billing",
        {LEASE: None, ORDERED: "true"},
        topics=["orders", "bills"],
        starts={orders: (1, 1), bills: (3,), others: (4,)},
    )
    assert changed.starts == {orders: (7, 8), bills: (3,)}
    assert subscriptions.settings_of(changed).ordered
    assert reported == [1, 1]
    again = make(catalog)
    await again.load()
    assert again.all() == [changed]
    await again.delete("billing")
    assert again.is_deleted(billing.subscription_id)
    await subscriptions.load()
    assert subscriptions.all() == []
    assert subscriptions.is_deleted(billing.subscription_id)
    assert reported == [1, 1, 0]


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.2/hook", "headers is not sent elsewhere"), ("http://[::1", "url is not a URL: Invalid IPv6 URL")],
)
async def test_secret_headers_are_sent_to_no_other_url(tmp_path: Path, url: str, reason: str) -> None:
    (tmp_path / "data").mkdir()
    write_keys(tmp_path / "keys", [SecretKey.new()])
    with closing(Catalog.open_folder(tmp_path / "data", sealing=Sealing(tmp_path / "keys"))) as catalog:
        subscriptions = make(catalog)
        await subscriptions.load()
        before = {push.URL: "http://127.0.0.1/hook", push.HEADERS: '{"Authorization": "t0psecret"}'}
        await subscriptions.create("billing", ["orders"], before)
        with pytest.raises(InvalidSetting, match=reason):
            await subscriptions.alter("billing", {push.URL: url})


async def test_a_subscription_redeclared_with_its_id_keeps_its_state(catalog: Catalog) -> None:
    subscriptions = make(catalog)
    await subscriptions.load()
    for _ in range(2):
        await subscriptions.create("billing", ["orders"], {}, subscription_id=UUID(int=1))
        assert not subscriptions.is_deleted(UUID(int=1))
        await subscriptions.load()
        assert not subscriptions.is_deleted(UUID(int=1))
        await subscriptions.delete("billing")
        assert subscriptions.is_deleted(UUID(int=1))


async def test_an_invalid_declaration_has_no_effect(catalog: Catalog) -> None:
    subscriptions = make(catalog)

    def refuse(text: str) -> None:
        raise InvalidRequest(f"cannot read {text}")

    subscriptions.use_filters(refuse)
    with pytest.raises(InvalidRequest, match="cannot read nonsense"):
        await subscriptions.create("billing", ["orders"], {FILTER: "nonsense"})
    await subscriptions.create("billing", ["orders"], {})
    with pytest.raises(SubscriptionExists):
        await subscriptions.create("billing", ["other"], {})
    with pytest.raises(InvalidSetting):
        await subscriptions.alter("billing", {LEASE: "soon"})
    with pytest.raises(UnknownSubscription, match="subscription list"):
        await subscriptions.alter("shipping", {})
    with pytest.raises(UnknownSubscription):
        await subscriptions.delete("shipping")
    await subscriptions.create("shipping", [], {}, validate_only=True)
    await subscriptions.alter("billing", {LEASE: "500"}, validate_only=True)
    (only,) = catalog.subscriptions()
    assert (only.name, only.topics, only.overrides) == ("billing", ("orders",), settings_of_new({}, "billing-dlq"))


async def test_a_new_subscription_stores_its_defaults_and_a_share_group_those_of_kafka(
    catalog: Catalog,
) -> None:
    subscriptions = make(catalog)
    subscriptions.use_topics(lambda name: name == "taken-dlq")
    subscription = await subscriptions.create("taken", ["orders"], {ATTEMPTS: "3"})
    assert subscription.overrides[ATTEMPTS] == "3"
    assert subscription.overrides[DEAD_LETTER_TOPIC].startswith("taken-dlq-")
    # An unset setting returns to the default of a new subscription, which does not drop messages.
    changed = await subscriptions.alter("taken", {ATTEMPTS: None, DEAD_LETTER_TOPIC: None})
    assert changed.overrides == {**subscription.overrides, ATTEMPTS: "25"}
    dropping = await subscriptions.alter("taken", {DEAD_LETTER_TOPIC: NO_DEAD_LETTERS})
    assert not dropping.settings.has_dead_letters
    group = await subscriptions.ensure("a-share-group")
    assert (group.overrides, group.settings.attempts, group.settings.has_dead_letters) == ({}, 5, False)
    own = await subscriptions.create("__dlq/x", ["x"], {})
    assert own.overrides == {}


async def test_a_deletion_record_is_removed_when_no_node_can_need_it(catalog: Catalog) -> None:
    clock = ManualClock()
    subscriptions = make(catalog, clock)
    billing = await subscriptions.create("billing", ["orders"], {})
    await subscriptions.delete("billing")
    clock.advance_ms(DELETION_KEPT_MS + 1)
    await subscriptions.load()
    assert not subscriptions.is_deleted(billing.subscription_id)
    assert catalog.deleted_subscriptions() == {}


class Counted(CatalogDeclarations):
    """Counts catalog calls, and may be unavailable."""

    asked: list[Sequence[str]]
    is_away = False

    async def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if method is Catalog.subscriptions_named:
            self.asked.append(*arguments)
            await asyncio.sleep(0)
            if self.is_away:
                raise CatalogUnavailable("not now")
        return await super().call(method, *arguments, **named)


@pytest.fixture
def counted(catalog: Catalog) -> Counted:
    made = Counted(catalog)
    made.asked = []
    return made


async def find(subscriptions: Subscriptions, *names: str) -> list[object]:
    return [*await asyncio.gather(*map(subscriptions.find, names), return_exceptions=True)]


async def test_a_subscription_just_declared_on_another_node_is_found_with_few_calls(
    catalog: Catalog, counted: Counted
) -> None:
    here = Subscriptions(counted, ManualClock())
    await here.load()
    billing = await make(catalog).create("billing", ["orders"], {})
    *subscriptions, missing = await find(here, *["billing"] * 50, "none")
    assert subscriptions == [billing] * 50
    assert isinstance(missing, UnknownSubscription)
    assert len(counted.asked) == 2
    await here.find("billing")
    assert len(counted.asked) == 2


async def test_a_look_up_does_not_use_the_result_of_an_earlier_one(catalog: Catalog, counted: Counted) -> None:
    here = Subscriptions(counted, ManualClock())
    early = asyncio.create_task(here.find("billing"))
    await until(lambda: counted.asked)
    late = [asyncio.create_task(here.find("billing")) for _ in range(9)]
    await asyncio.sleep(0)
    late[0].cancel()
    await asyncio.wait([early, *late])
    assert counted.asked == [["billing"]] * 2


async def test_waiting_look_ups_share_a_call_to_an_unavailable_catalog(counted: Counted) -> None:
    here = Subscriptions(counted, ManualClock())
    counted.is_away = True
    results = await find(here, *"abcdefgh")
    assert {type(error) for error in results} == {CatalogUnavailable}
    assert counted.asked == [["a"], [*"bcdefgh"]]
    counted.is_away = False
    with pytest.raises(UnknownSubscription):
        await here.find("a")


async def test_a_subscription_of_another_node_is_changed_and_deleted_but_not_declared_twice(catalog: Catalog) -> None:
    here, there = make(catalog), make(catalog)
    billing = await there.create("billing", ["orders"], {})
    assert await here.ensure("billing") == billing
    group = await here.ensure("group")
    assert (group.topics, await there.ensure("group")) == ((), group)
    shipping = await there.create("shipping", ["orders"], {})
    assert (await here.alter("shipping", {ORDERED: "true"})).subscription_id == shipping.subscription_id
    await there.create("brief", ["orders"], {})
    await here.delete("brief")
    assert [subscription.name for subscription in catalog.subscriptions()] == ["billing", "group", "shipping"]
