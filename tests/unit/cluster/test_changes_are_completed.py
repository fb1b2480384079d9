"""A declaration is applied on its node even if the client disconnects while the catalog is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas, DeclaredGroups
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.group import SESSION
from millstream.core.pipeline import PipelineKind
from millstream.core.quota import PRODUCER_BYTE_RATE, QuotaEntity
from millstream_testing.waiting import until

Declared = tuple[Coroutine[Any, Any, Any], Callable[[], object]]


@pytest.fixture
def declarations(tmp_path: Path) -> Iterator[CatalogDeclarations]:
    catalog = Catalog.open_folder(tmp_path)
    yield CatalogDeclarations(catalog)
    catalog.close()


def quota(declarations: CatalogDeclarations) -> Declared:
    entity = QuotaEntity((("client-id", "etl"),))
    quotas = ClientQuotas(declarations)
    return quotas.alter(entity, {PRODUCER_BYTE_RATE: 1000.0}), lambda: entity in quotas.all()


def group(declarations: CatalogDeclarations) -> Declared:
    groups = DeclaredGroups(declarations, Config())
    return groups.alter("billing", {SESSION: "50000"}), lambda: "billing" in groups.all()


def subscription(declarations: CatalogDeclarations) -> Declared:
    subscriptions = Subscriptions(declarations, SystemClock())
    return subscriptions.create("billing", ["orders"], {}), lambda: subscriptions.get("billing")


def pipeline(declarations: CatalogDeclarations) -> Declared:
    pipelines = Pipelines(declarations, SystemClock())
    return pipelines.create("land-orders", PipelineKind.LAND, {"topics": "orders"}), lambda: pipelines.get(
        "land-orders"
    )


@pytest.mark.parametrize("declare", [quota, group, subscription, pipeline])
async def test_a_change_is_completed_when_its_client_disconnects(
    declarations: CatalogDeclarations,
    declare: Callable[[CatalogDeclarations], Declared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, goes_on = asyncio.Event(), asyncio.Event()
    run = declarations.run

    async def slow(question: Any) -> Any:
        response = await run(question)
        asked.set()
        await goes_on.wait()
        return response

    monkeypatch.setattr(declarations, "run", slow)
    work, is_known = declare(declarations)
    change = asyncio.ensure_future(work)
    await asked.wait()
    change.cancel()
    await asyncio.gather(change, return_exceptions=True)
    goes_on.set()
    await until(is_known)
