"""Pipelines: stored in the catalog, validated when declared, announced to the node that runs them."""

from __future__ import annotations

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.errors import (
    AlreadyLanded,
    InvalidPipeline,
    InvalidSetting,
    PipelineExists,
    UnknownPipeline,
)
from millstream.core.pipeline import PipelineKind, Rule
from millstream_testing.clock import ManualClock

LAND, ROUTE = PipelineKind.LAND, PipelineKind.ROUTE
ORDERS = {"topics": "orders"}
LARGE = Rule(name="large", topic="orders", targets=("large-orders",), condition="payload.total > 1000")
SMALL = Rule(name="small", topic="orders", targets=("small-orders",), subscription="cheap")


def make(catalog: Catalog) -> Pipelines:
    return Pipelines(CatalogDeclarations(catalog), ManualClock())


async def test_declared_pipelines_survive_a_restart(catalog: Catalog) -> None:
    pipelines = make(catalog)
    reported: list[int] = []
    pipelines.on_change(lambda: reported.append(len(pipelines.all())))
    made = await pipelines.create("land-orders", LAND, ORDERS)
    assert (made.group, made.is_due, made.settings.as_strings()["every.ms"]) == (
        "pipeline-land-orders",
        True,
        "60000",
    )
    changed = await pipelines.alter("land-orders", {"every.ms": "1000", "compact": "false"})
    changed = await pipelines.alter("land-orders", {"compact": None})
    assert changed.overrides == {**ORDERS, "every.ms": "1000"}
    again = make(catalog)
    await again.load()
    assert again.all() == [changed]
    await again.delete("land-orders")
    # Listeners are not called if nothing has changed.
    assert reported == [1, 1, 1]
    await pipelines.load()
    await pipelines.load()
    assert (pipelines.all(), reported) == ([], [1, 1, 1, 0])


async def test_a_pipeline_just_declared_on_another_node_is_found(catalog: Catalog) -> None:
    here, there = make(catalog), make(catalog)
    made = await there.create("land-orders", LAND, ORDERS)
    assert here.get("land-orders") is None
    assert await here.find("land-orders") == made
    for validate_only in (True, False):
        with pytest.raises(PipelineExists):
            await here.create("land-orders", LAND, ORDERS, validate_only=validate_only)
    assert not (await here.stop("land-orders")).is_enabled
    # Recreated under the same name: the cached pipeline is stale.
    await there.delete("land-orders")
    restarted = await there.create("land-orders", LAND, {"topics": "others"})
    assert (await here.start("land-orders")).pipeline_id == restarted.pipeline_id
    await there.delete("land-orders")
    with pytest.raises(UnknownPipeline, match="pipeline list"):
        await here.delete("land-orders")


async def test_a_parked_pipeline_is_retried_when_it_is_started_or_changed(catalog: Catalog) -> None:
    pipelines = make(catalog)
    made = await pipelines.create("director", ROUTE, {}, rules=[LARGE])
    parked = await pipelines.park(made, "no such column")
    assert (parked.is_due, parked.parked) == (False, "no such column")
    assert (await pipelines.start("director")).is_due
    # The failure belongs to the previous version of the pipeline.
    await pipelines.change_rules("director", [SMALL])
    assert (await pipelines.park(made, "too late")).is_due
    for change in (pipelines.alter("director", {}), pipelines.change_rules("director", [LARGE])):
        await pipelines.park(await pipelines.find("director"), "again")
        assert (await change).is_due
    await pipelines.park(await pipelines.stop("director"), "it was stopped")
    assert not (await pipelines.start("director")).parked


async def test_rules_are_added_and_removed_in_one_step(catalog: Catalog) -> None:
    pipelines = make(catalog)
    await pipelines.create("director", ROUTE, {}, rules=[SMALL, LARGE])
    assert (await pipelines.find("director")).rules == (LARGE, SMALL)
    other = Rule(name="large", topic="orders", targets=("a", "b"))
    changed = await pipelines.change_rules("director", [other], deleted=["small"])
    assert changed.rules == (other,)
    with pytest.raises(UnknownPipeline, match="no rule 'small'"):
        await pipelines.change_rules("director", [LARGE], deleted=["small"])
    preview = await pipelines.change_rules("director", [SMALL], validate_only=True)
    assert preview.rules == (other, SMALL)
    await pipelines.load()
    assert pipelines.all() == [changed]


async def test_an_invalid_change_has_no_effect(catalog: Catalog) -> None:
    pipelines = make(catalog)
    with pytest.raises(InvalidSetting, match="set either `topics`"):
        await pipelines.create("land-orders", LAND, {})
    with pytest.raises(InvalidPipeline, match="1 to 200"):
        await pipelines.create("", LAND, ORDERS)
    with pytest.raises(InvalidPipeline, match="only route pipelines have rules"):
        await pipelines.create("land-orders", LAND, ORDERS, rules=[LARGE])
    await pipelines.create("land-orders", LAND, ORDERS, validate_only=True)
    assert pipelines.all() == []
    made = await pipelines.create("land-orders", LAND, ORDERS, is_enabled=False)
    with pytest.raises(InvalidSetting, match=r"unknown setting 'evry.ms'.*every.ms"):
        await pipelines.alter("land-orders", {"evry.ms": "1"})
    with pytest.raises(InvalidPipeline, match="only route pipelines have rules"):
        await pipelines.change_rules("land-orders", [LARGE])
    with pytest.raises(UnknownPipeline):
        await pipelines.start("none")
    assert (await pipelines.alter("land-orders", {"every.ms": "500"}, validate_only=True)) != made
    await pipelines.load()
    assert pipelines.all() == [made]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"topics": "orders, paid"}, {"topics": "paid"}),
        ({"pattern": "ord.*"}, {"topics": "orders"}),
        ({"topics": "orders"}, {"pattern": "ord.*"}),
        ({"pattern": "ord.*"}, {"pattern": "ord.*"}),
        ({"topics": "orders", "lake": "/lake"}, {"topics": "orders", "lake": "/lake/"}),
    ],
)
async def test_two_pipelines_do_not_land_into_one_table(
    catalog: Catalog, first: dict[str, str], second: dict[str, str]
) -> None:
    pipelines = make(catalog)
    await pipelines.create("one", LAND, first)
    for validate_only in (True, False):
        with pytest.raises(AlreadyLanded, match="already landed in this lake by pipeline 'one'"):
            await pipelines.create("two", LAND, second, validate_only=validate_only)
    await pipelines.create("two", LAND, {**second, "lake": "/elsewhere"})
    with pytest.raises(AlreadyLanded, match="already landed in this lake by pipeline 'one'"):
        await pipelines.alter("two", {"lake": first.get("lake")})
    # Its own table is not a conflict.
    await pipelines.alter("one", {"every.ms": "1000"})
    await pipelines.create("three", LAND, {"topics": "others"})
