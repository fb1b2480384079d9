"""Pipelines: which ones can be declared, and with which rules."""

from __future__ import annotations

import dataclasses
from uuid import UUID

import pytest

from millstream.core.errors import InvalidPipeline, InvalidRequest, InvalidSetting, InvalidTopicName
from millstream.core.pipeline import Pipeline, PipelineKind, Rule, check_pipeline, kind_of
from millstream.core.pipeline_rules import CONDITION_LENGTH_MAX, RULES_MAX, check_rules

UPSERT = {"mode": "upsert", "decode": "json", "key": "id"}
RULE = Rule(name="large", topic="orders", targets=("large-orders",))


def test_kinds_have_names() -> None:
    assert kind_of("land") is PipelineKind.LAND
    with pytest.raises(InvalidPipeline, match="the kinds are: land, transform, route"):
        kind_of("wash")
    with pytest.raises(InvalidPipeline, match="did you mean 'land'"):
        kind_of("lnad")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("land", {"topics": "orders, bills"}),
        ("land", {"pattern": "orders.*", "decode": "json", "schema": "id long"}),
        (
            "land",
            UPSERT | {"topics": "a", "key": "id, b.c", "order.by": "u", "schema": "id long, b struct<c int>, u int"},
        ),
        (
            "land",
            UPSERT | {"topics": "a", "decode": "debezium", "order.by": "ts_ms", "schema": "id long, __ts_ms long"},
        ),
        ("transform", {"sql": "SELECT * FROM orders", "into": "copies"}),
        (
            "transform",
            {"sql": "SELECT * FROM orders", "into": "copies", "watermarks": '{"orders": "at 1 hour 5 minutes"}'},
        ),
        ("route", {"on.lost": "skip"}),
    ],
)
def test_valid_pipelines(kind: str, settings: dict[str, str]) -> None:
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
def test_invalid_pipelines_are_refused(kind: str, settings: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        check_pipeline("mine", kind_of(kind), settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schema": "id lnog", "decode": "json"}, "`schema`, line 1, column 4: 'lnog' is not a type"),
        ({"schema": "tags array<map<string, string>>", "decode": "json"}, "cannot be landed as"),
        (UPSERT | {"order.by": "u", "schema": "id long, n string"}, "no column u: .*, such as `u long`"),
        (UPSERT | {"schema": "n string"}, "`key` names id, and `schema` has no column id"),
        (UPSERT | {"key": "a.id", "schema": "a struct<n long>"}, "no column a.id: .*, such as `a struct<id long>`"),
        (
            UPSERT | {"decode": "debezium", "order.by": "source.lsn", "schema": "id long, name string"},
            "`order.by` names source.lsn, and `schema` has no column __source_lsn: .*, such as `__source_lsn long`",
        ),
        ({"topics": "orders, bills,orders"}, "names 'orders' twice"),
        ({"topics": "orders,orders__quarantine", "decode": "json"}, "the quarantine of 'orders'"),
        ({"lake": "ftp://lake"}, "not at 'ftp://lake'"),
        ({"lake": "tables/here"}, "use the absolute path"),
    ],
)
def test_an_invalid_landing_is_refused_on_declaration(settings: dict[str, str], message: str) -> None:
    values = {"topics": "orders", **settings}
    with pytest.raises(InvalidSetting, match=message):
        check_pipeline("mine", PipelineKind.LAND, values)
    # A stored one can still be shown.
    stored = Pipeline(pipeline_id=UUID(int=1), name="mine", kind=PipelineKind.LAND, overrides=values)
    assert stored.settings.as_strings()["topics"] == values["topics"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sql": "SELECT 1"}, "reads no topic"),
        ({"sql": "SELECT * FROM lake", "tables": '{"lake": "/lake"}'}, "reads no topic"),
        ({"sql": "SELECT * FROM orders o JOIN copies c ON o.id = c.id"}, "reads the topic 'copies' that it writes"),
        ({"sql": "SELECT 1 FROM a; SELECT 2 FROM b"}, "a second statement"),
        ({"sql": "SELECT Reflect('java.lang.System', 'exit') FROM orders"}, "column 8: reflect is forbidden"),
        ({"sql": "SELECT system.builtin.`try_reflect` ('a', 'b') FROM orders"}, "try_reflect is forbidden"),
        ({"sql": "SELECT java_method('a', 'b') FROM orders", "functions": "m:f"}, "java_method is forbidden"),
        ({"sql": "SELECT from_xml(v, 'x INT') FROM orders"}, "from_xml is forbidden, since it can open any file"),
        ({"sql": "WITH reflect (a) AS (SELECT id FROM orders) SELECT reflect(a) AS (a) FROM reflect"}, "column 52"),
        ({"sql": "WITH q AS (SELECT 1), r AS (SELECT reflect (a) AS (b) FROM orders) SELECT * FROM r"}, "column 36"),
        ({"tables": "/lake"}, "tables must be a JSON object"),
        ({"tables": "[" * 60_000}, "tables must be a JSON object"),
        ({"tables": '{"lake": "hdfs://lake"}'}, "not at 'hdfs://lake'"),
        ({"schemas": '{"orders": 1}'}, "whose values are strings"),
        ({"schemas": '{"orders": "id lnog"}'}, "the schema of 'orders', line 1, column 4"),
        ({"schemas": '{"orders": "id long"}', "decode": "none"}, "set decode=json"),
        ({"watermarks": '{"orders": "at"}'}, "a column and a delay"),
        ({"watermarks": '{"orders": "at soon"}'}, "not 'at soon'"),
    ],
)
def test_an_invalid_transform_is_refused_on_declaration(settings: dict[str, str], message: str) -> None:
    values = {"sql": "SELECT * FROM orders", "into": "copies", **settings}
    with pytest.raises(InvalidSetting, match=message):
        check_pipeline("mine", PipelineKind.TRANSFORM, values)
    stored = Pipeline(pipeline_id=UUID(int=1), name="mine", kind=PipelineKind.TRANSFORM, overrides=values)
    assert stored.settings.as_strings()["into"] == "copies"


def test_a_column_a_query_or_a_function_of_ones_own_may_have_a_forbidden_name() -> None:
    statement = "SELECT reflect, reflect(java_method) FROM orders"
    check_pipeline("mine", PipelineKind.TRANSFORM, {"sql": statement, "into": "copies", "functions": "m:reflect"})
    named = "WITH other (b) AS (SELECT id FROM orders), `reflect` (a) AS (SELECT b FROM other) SELECT a FROM reflect"
    for statement in (named, "WITH Reflect (a, b) AS (SELECT id, key FROM orders) SELECT a FROM reflect"):
        check_pipeline("mine", PipelineKind.TRANSFORM, {"sql": statement, "into": "copies"})


def test_a_kind_is_refused_as_a_name() -> None:
    with pytest.raises(InvalidPipeline, match="takes that for a kind"):
        check_pipeline("land", PipelineKind.LAND, {"topics": "orders"})


def test_an_error_names_the_setting() -> None:
    with pytest.raises(InvalidPipeline, match=r"^pipeline name 'bad/name'"):
        check_pipeline("bad/name", PipelineKind.LAND, {"topics": "orders"})
    with pytest.raises(InvalidSetting, match="both set"):
        check_pipeline("mine", PipelineKind.LAND, {"topics": "orders", "pattern": "o.*"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "the name of a rule"),
        ({"name": "two\nlines"}, "one line"),
        ({"targets": ()}, "needs 1 to"),
        ({"targets": ("a", "a")}, "twice"),
        ({"targets": ("__consumer_offsets",)}, "the broker's own"),
        ({"targets": ("orders",)}, "in a cycle; check the rules of orders"),
        ({"condition": "true", "subscription": "mine"}, "not both"),
        ({"condition": "x" * (CONDITION_LENGTH_MAX + 1)}, "more than"),
    ],
)
def test_invalid_rules_are_refused(changes: dict[str, object], message: str) -> None:
    check_rules(PipelineKind.ROUTE, [RULE])
    with pytest.raises(InvalidPipeline, match=message):
        check_rules(PipelineKind.ROUTE, [dataclasses.replace(RULE, **changes)])  # type: ignore[arg-type]


def test_conflicting_rules_are_refused() -> None:
    check_rules(PipelineKind.LAND, [])
    with pytest.raises(InvalidTopicName):
        check_rules(PipelineKind.ROUTE, [dataclasses.replace(RULE, targets=("a b",))])
    with pytest.raises(InvalidPipeline, match="same name"):
        check_rules(PipelineKind.ROUTE, [RULE, RULE])
    many = [dataclasses.replace(RULE, name=str(number)) for number in range(RULES_MAX + 1)]
    check_rules(PipelineKind.ROUTE, many[1:])
    with pytest.raises(InvalidPipeline, match="at most"):
        check_rules(PipelineKind.ROUTE, many)


def test_routes_may_be_chained_but_not_cyclic() -> None:
    on = Rule(name="on", topic="large-orders", targets=("audit", "eu"))
    check_rules(PipelineKind.ROUTE, [RULE, on])
    back = Rule(name="back", topic="eu", targets=("orders",))
    with pytest.raises(InvalidPipeline, match="the rules of eu, large-orders, orders"):
        check_rules(PipelineKind.ROUTE, [RULE, on, back, Rule(name="side", topic="audit", targets=("end",))])


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("SELECT count(DISTINCT id) FROM orders", r"count\(DISTINCT …\)"),
        ("SELECT row_number() OVER (PARTITION BY id ORDER BY t) FROM orders", "OVER"),
        ("SELECT * FROM orders ORDER BY id", "ORDER BY"),
        ("SELECT id FROM orders EXCEPT SELECT id FROM customers", "EXCEPT"),
        ("SELECT id FROM customers INTERSECT SELECT id FROM orders", "INTERSECT"),
    ],
)
def test_an_operation_over_all_messages_is_refused_on_declaration(statement: str, what: str) -> None:
    tables = {"tables": '{"customers": "/lake/customers"}', "into": "out"}
    with pytest.raises(InvalidSetting, match=f"{what} needs all messages of 'orders' at once"):
        check_pipeline("t", PipelineKind.TRANSFORM, {**tables, "sql": statement})
    if "DISTINCT" in what:
        with pytest.raises(InvalidSetting, match=r"use approx_count_distinct\(…\)"):
            check_pipeline("t", PipelineKind.TRANSFORM, {**tables, "sql": statement})
    of_table = (
        "SELECT o.id FROM orders o JOIN (SELECT id, count(DISTINCT x) n FROM customers GROUP BY id) c ON o.id = c.id"
    )
    check_pipeline("t", PipelineKind.TRANSFORM, {**tables, "sql": of_table})
    check_pipeline("t", PipelineKind.TRANSFORM, {**tables, "sql": "SELECT DISTINCT id FROM orders"})
    approximate = "SELECT approx_count_distinct(id), size(collect_set(id)) FROM orders GROUP BY window(at, '1 hour')"
    check_pipeline("t", PipelineKind.TRANSFORM, {**tables, "sql": approximate})


@pytest.mark.parametrize("line", ["git+https://example.com/x.git", "x @ https://example.com/x.whl", "-e .", "-r more"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PipelineKind.JOB, {"code": "def run(spark, millstream): pass"}),
        (PipelineKind.TRANSFORM, {"sql": "SELECT * FROM a", "into": "b", "functions": "x:f"}),
    ],
)
def test_requirements_that_are_paths_or_urls_are_refused(
    kind: PipelineKind, settings: dict[str, str], line: str
) -> None:
    check_pipeline("mine", kind, settings | {"requirements": "numpy>=2"})
    with pytest.raises(InvalidSetting, match="requirements name"):
        check_pipeline("mine", kind, settings | {"requirements": f"numpy\n{line}"})
