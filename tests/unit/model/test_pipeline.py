"""Pipelines: which ones can be declared, and with which rules."""

from __future__ import annotations

import dataclasses

import pytest

from millstream.model.errors import InvalidPipeline, InvalidRequest, InvalidTopicName
from millstream.model.pipeline import (
    CONDITION_LENGTH_MAX,
    RULES_MAX,
    PipelineKind,
    Rule,
    check_pipeline,
    check_rules,
    kind_of,
)

RULE = Rule(name="large", topic="orders", targets=("large-orders",))


def test_kinds_have_names() -> None:
    assert kind_of("land") is PipelineKind.LAND
    with pytest.raises(InvalidPipeline, match="known are: land, transform, route"):
        kind_of("wash")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("land", {"topics": "orders, bills"}),
        ("land", {"pattern": "orders.*", "decode": "json", "schema": "id long"}),
        ("transform", {"sql": "SELECT * FROM orders", "into": "copies"}),
        ("route", {}),
    ],
)
def test_what_can_be_declared(kind: str, settings: dict[str, str]) -> None:
    shown = check_pipeline("mine", kind_of(kind), settings).as_strings()
    assert settings.items() <= shown.items()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("land", {"topics": "orders", "pattern": "x"}),
        ("land", {"topics": "no topic"}),
        ("land", {"topics": "orders", "schema": "id long"}),
        ("land", {"topics": "orders", "into": "x"}),
        ("transform", {"sql": "SELECT 1"}),
        ("transform", {"sql": "SELECT 1" + " " * 2**16, "into": "x"}),
        ("route", {"decode": "xml"}),
    ],
)
def test_what_cannot_be_declared(kind: str, settings: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        check_pipeline("mine", kind_of(kind), settings)


def test_a_kind_is_no_name() -> None:
    with pytest.raises(InvalidPipeline, match="takes that for a kind"):
        check_pipeline("land", PipelineKind.LAND, {"topics": "orders"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": ""}, "the name of a rule"),
        ({"name": "two\nlines"}, "one line"),
        ({"targets": ()}, "needs 1 to"),
        ({"targets": ("a", "a")}, "twice"),
        ({"targets": ("orders",)}, "in a circle; look at the rules of orders"),
        ({"condition": "true", "subscription": "mine"}, "not both"),
        ({"condition": "x" * (CONDITION_LENGTH_MAX + 1)}, "more than"),
    ],
)
def test_rules_that_cannot_be(changes: dict[str, object], said: str) -> None:
    check_rules(PipelineKind.ROUTE, [RULE])
    with pytest.raises(InvalidPipeline, match=said):
        check_rules(PipelineKind.ROUTE, [dataclasses.replace(RULE, **changes)])  # type: ignore[arg-type]


def test_rules_that_cannot_be_together() -> None:
    check_rules(PipelineKind.LAND, [])
    with pytest.raises(InvalidTopicName):
        check_rules(PipelineKind.ROUTE, [dataclasses.replace(RULE, targets=("a b",))])
    with pytest.raises(InvalidPipeline, match="same name"):
        check_rules(PipelineKind.ROUTE, [RULE, RULE])
    many = [dataclasses.replace(RULE, name=str(number)) for number in range(RULES_MAX + 1)]
    check_rules(PipelineKind.ROUTE, many[1:])
    with pytest.raises(InvalidPipeline, match="at most"):
        check_rules(PipelineKind.ROUTE, many)


def test_what_is_routed_may_be_routed_on_but_not_back() -> None:
    on = Rule(name="on", topic="large-orders", targets=("audit", "eu"))
    check_rules(PipelineKind.ROUTE, [RULE, on])
    back = Rule(name="back", topic="eu", targets=("orders",))
    with pytest.raises(InvalidPipeline, match="the rules of eu, large-orders, orders"):
        check_rules(PipelineKind.ROUTE, [RULE, on, back, Rule(name="side", topic="audit", targets=("end",))])
