"""All rules of a topic evaluated in one pass match the same messages as each rule alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.errors import FilterError
from millstream.core.ids import Offset
from millstream.pipelines.jobs.route.rule_set import RoutingRule, RuleSet, rule_set
from millstream.protocol.filter.batch import RecordBatch
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.filter.node import Uses
from millstream.protocol.records.record import Record

VALUES: list[Any] = [
    "eu",
    "us",
    "5",
    "true",
    "",
    5,
    5.0,
    7,
    True,
    None,
    [1],
    {"a": 1},
    -0.0,
    0,
    2**53,
    2**53 + 1,
    2**70,
    3,
    1e300,
]
CONDITIONS = [
    "payload.region = 'eu'",
    "'us' = payload.region",
    "payload.region = '5'",
    "payload.region = 5",
    "payload.region = 5.0",
    "payload.region = 0",
    "payload.region IN ('eu', 'us', '5')",
    "payload.region IN (5, 7)",
    "payload.region IN ('eu', NULL)",
    "payload.region = 'eu' AND payload.total > 3",
    "payload.total > 3 AND payload.region = 5 AND headers['h'] = 'x'",
    "headers['h'] = 'x'",
    "headers['h'] = 5",
    "key = 'k1'",
    "key IN ('k1', 'k2') AND payload.region IS NOT NULL",
    "payload.region = 'eu' OR payload.total = 5",
    "NOT payload.region = 'eu'",
    "topic = 'orders'",
    "payload.region = TRUE",
    "payload.total > 3",
    "5 <= payload.total",
    "payload.total BETWEEN 0 AND 5",
    "payload.total >= 0 AND payload.total < 7",
    "payload.total > 3 AND payload.region LIKE 'e%'",
    "payload.total > 3 AND CAST(payload.region AS STRING) < 'v' AND payload.region > 2",
    "payload.total > 9007199254740993",
    "payload.total <= 9007199254740992.0",
    "payload.total < 5 AND payload.total > 6",
    "payload.total BETWEEN 3 AND NULL",
    "NOT payload.total > 3",
    "offset = 2",
]

values = st.sampled_from(VALUES)
rows = st.lists(
    st.tuples(values, values, st.sampled_from(["x", "5", None]), st.sampled_from([b"k1", b"k2", None])), max_size=12
)
routing_rules = st.lists(
    st.builds(
        RoutingRule,
        st.sampled_from(["", *CONDITIONS]),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(tuple),
    ),
    max_size=10,
)


def batch_of(made: Sequence[tuple[Any, Any, str | None, bytes | None]]) -> RecordBatch:
    records = [
        Record(
            offset=Offset(offset),
            timestamp_ms=offset,
            key=key,
            value=json.dumps({"region": region, "total": total}).encode(),
            headers=() if header is None else (("h", header.encode()),),
        )
        for offset, (region, total, header, key) in enumerate(made)
    ]
    return RecordBatch(records, topic="orders", partition=0, uses=Uses())


def without_traceback(routing_rules: list[RoutingRule], batch: RecordBatch) -> dict[str, list[int]]:
    """Evaluate every rule for every message."""
    offsets_by_target: dict[str, set[int]] = {}
    for way in routing_rules:
        matches = compile_filter(way.condition).matches(batch).tolist() if way.condition else [True] * len(batch)
        for target in way.targets:
            offsets_by_target.setdefault(target, set()).update(row for row, matched in enumerate(matches) if matched)
    return {target: sorted(rows) for target, rows in offsets_by_target.items() if rows}


@settings(max_examples=60, deadline=None)
@given(rows, routing_rules)
def test_grouped_rules_match_the_same_as_each_alone(
    made: list[tuple[Any, Any, str | None, bytes | None]], routing_rules: list[RoutingRule]
) -> None:
    batch = batch_of(made)
    rows_by_target = {
        target: rows.tolist() for target, rows in RuleSet(routing_rules).matches(batch).items() if rows.size
    }
    assert rows_by_target == without_traceback(routing_rules, batch)


def counted(rules: RuleSet) -> list[int]:
    """Count the messages for which each condition is evaluated."""
    asked: list[int] = []
    for condition in rules._conditions:
        program = condition.filter._program
        run = program.run

        def counting(*columns: Any, run: Any = run) -> Any:
            asked.append(len(columns[0]))
            return run(*columns)

        program.run = counting
    return asked


def test_a_thousand_equality_rules_evaluate_few_messages() -> None:
    rules = RuleSet(
        [RoutingRule(f"payload.region = 'r{number}' AND payload.total > 1", ("t",)) for number in range(1000)]
    )
    batch = batch_of([(f"r{number}", 5, None, None) for number in range(20)])
    asked = counted(rules)
    assert rules.matches(batch)["t"].tolist() == list(range(20))
    assert asked == [1] * 20


def test_a_thousand_range_rules_evaluate_messages_within_their_ranges() -> None:
    rules = RuleSet(
        [RoutingRule(f"payload.total > {number} AND payload.region LIKE 'e%'", ("t",)) for number in range(1000)]
    )
    batch = batch_of([("eu", 0.5, None, None)] * 20 + [("eu", 2.5, None, None)])
    asked = counted(rules)
    assert rules.matches(batch)["t"].tolist() == list(range(21))
    assert asked == [21, 1, 1]


def test_rules_are_compiled_once_per_process() -> None:
    routing_rules = (RoutingRule("payload.a = 1", ("t",)),)
    assert rule_set(routing_rules) is rule_set((RoutingRule("payload.a = 1", ("t",)),))


def test_an_error_in_a_condition_has_its_position() -> None:
    with pytest.raises(FilterError, match="column 1"):
        RuleSet([RoutingRule("kye = 'a'", ("t",))])
