"""Quotas: stored in the catalog, resolved for a client, announced to listeners."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import declared_state as quotas_module
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.core.errors import InvalidRequest
from millstream.core.quota import (
    ANONYMOUS,
    CLIENT_ID,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    USER,
    QuotaEntity,
)

ONE = QuotaEntity(((CLIENT_ID, "one"),))
REST = QuotaEntity(((CLIENT_ID, DEFAULT),))
EVERYBODY = QuotaEntity(((USER, ANONYMOUS),))


async def test_quotas_are_set_changed_and_removed(catalog: Catalog) -> None:
    quotas = ClientQuotas(CatalogDeclarations(catalog))
    reported: list[bool] = []
    quotas.on_change(lambda: reported.append(quotas.has(PRODUCER_BYTE_RATE)))
    await quotas.load()
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 10.0, CONSUMER_BYTE_RATE: 20.0})
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: None, CONSUMER_BYTE_RATE: 30.0})
    assert reported == [False, True, False]
    assert quotas.all() == {ONE: {CONSUMER_BYTE_RATE: 30.0}} == catalog.client_quotas()
    again = ClientQuotas(CatalogDeclarations(catalog))
    await again.load()
    assert again.find(CONSUMER_BYTE_RATE, ANONYMOUS, "one") == (30.0, (None, "one"))
    await again.alter(ONE, {CONSUMER_BYTE_RATE: None, "no_such": None})
    assert again.all() == {} == catalog.client_quotas()


async def test_the_most_specific_quota_applies(catalog: Catalog) -> None:
    quotas = ClientQuotas(CatalogDeclarations(catalog))
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "one") is None
    await quotas.alter(REST, {PRODUCER_BYTE_RATE: 1.0})
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "one") == (1.0, (None, "one"))
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "") == (1.0, (None, ""))
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 2.0, CONSUMER_BYTE_RATE: 9.0})
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "one") == (2.0, (None, "one"))
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "two") == (1.0, (None, "two"))
    await quotas.alter(EVERYBODY, {PRODUCER_BYTE_RATE: 3.0})
    assert quotas.find(PRODUCER_BYTE_RATE, ANONYMOUS, "one") == (3.0, (ANONYMOUS, None))
    # Each kind of quota is resolved separately.
    assert quotas.find(CONSUMER_BYTE_RATE, ANONYMOUS, "one") == (9.0, (None, "one"))


async def test_validated_or_refused_changes_are_not_stored(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = ClientQuotas(CatalogDeclarations(catalog))
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 5.0}, validate_only=True)
    with pytest.raises(InvalidRequest):
        await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 5.0, CONSUMER_BYTE_RATE: 0.0})
    assert quotas.all() == {} == catalog.client_quotas()
    monkeypatch.setattr(quotas_module, "ENTITIES_MAX", 1)
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 5.0})
    with pytest.raises(InvalidRequest, match="quotas already"):
        await quotas.alter(REST, {PRODUCER_BYTE_RATE: 5.0})
    await quotas.alter(ONE, {PRODUCER_BYTE_RATE: 6.0})
    assert catalog.client_quotas() == {ONE: {PRODUCER_BYTE_RATE: 6.0}}


async def test_concurrent_changes_are_all_stored(catalog: Catalog) -> None:
    quotas = ClientQuotas(CatalogDeclarations(catalog))
    await asyncio.gather(
        quotas.alter(ONE, {PRODUCER_BYTE_RATE: 5.0}),
        quotas.alter(ONE, {CONSUMER_BYTE_RATE: 6.0}),
        quotas.alter(REST, {CONSUMER_BYTE_RATE: 7.0}),
    )
    expected = {ONE: {PRODUCER_BYTE_RATE: 5.0, CONSUMER_BYTE_RATE: 6.0}, REST: {CONSUMER_BYTE_RATE: 7.0}}
    assert quotas.all() == expected == catalog.client_quotas()
