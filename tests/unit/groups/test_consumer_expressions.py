"""Regular expressions: RE2 syntax, matching the whole name, bounded, with each topic name evaluated once."""

from __future__ import annotations

import pytest

from millstream.broker.groups.consumer import reconciliation as module
from millstream.broker.groups.consumer.reconciliation import Expressions
from millstream.core.errors import InvalidRegex
from millstream_testing.state_log import MemoryTopics


@pytest.fixture
def topics() -> MemoryTopics:
    found_topics = MemoryTopics()
    for name in ("orders", "orders.eu", "bills", "__consumer_offsets"):
        found_topics.add(name)
    return found_topics


@pytest.mark.parametrize(
    ("expression", "matched"),
    [
        ("orders", {"orders"}),
        ("orders.*", {"orders", "orders.eu"}),
        ("order", set()),
        ("^orders$", {"orders"}),
        ("[^_].*s", {"orders", "bills"}),
        ("(?i)BILLS|ORDERS", {"orders", "bills"}),
        (r"\w+\.\w{2}", {"orders.eu"}),
        (r"\Qorders.eu\E", {"orders.eu"}),
        ("[[:alpha:]]+", {"orders", "bills"}),
        # Kafka matches internal topics, too.
        (".*", {"orders", "orders.eu", "bills", "__consumer_offsets"}),
        ("__consumer_offsets", {"__consumer_offsets"}),
    ],
)
def test_the_whole_name_must_match(topics: MemoryTopics, expression: str, matched: set[str]) -> None:
    assert Expressions(topics).matches(expression) == matched


@pytest.mark.parametrize(
    "expression",
    ["(", "*", "[a", r"(a)\1", "(?=a)", "(?<!b)a", "a{1001}", "(a{1000}){1000}", "((a{100}){100}){100}", "a" * 5000],
)
def test_invalid_or_unbounded_expressions_are_refused(topics: MemoryTopics, expression: str) -> None:
    expressions = Expressions(topics)
    with pytest.raises(InvalidRegex):
        expressions.check(expression)
    with pytest.raises(InvalidRegex):
        expressions.matches(expression)


def test_catastrophic_expressions_are_harmless(topics: MemoryTopics) -> None:
    """A backtracking matcher would never finish, nor would this test."""
    topics.add("a" * 240)
    for expression in ("(a+)+b", "(a|aa)+b", "(.*)(.*)(.*)(.*)(.*)(.*)b", "(a?){200}a{200}b"):
        assert Expressions(topics).matches(expression) == frozenset()


def test_created_and_deleted_topics_are_noticed(topics: MemoryTopics) -> None:
    expressions = Expressions(topics)
    assert expressions.matches("o.*") == {"orders", "orders.eu"}
    topics.add("others")
    assert expressions.matches("o.*") == {"orders", "orders.eu", "others"}
    topics.remove("orders")
    assert expressions.matches("o.*") == {"orders.eu", "others"}
    topics.add("orders")
    assert expressions.matches("o.*") == {"orders", "orders.eu", "others"}


def test_a_name_is_evaluated_once(topics: MemoryTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    class Counting:
        def fullmatch(self, name: str) -> None:
            looked_at.append(name)

    monkeypatch.setattr(module, "compile_regex", lambda _: Counting())
    expressions = Expressions(topics)
    for _ in range(3):
        expressions.matches("x")
    topics.add("new")
    expressions.matches("x")
    assert sorted(looked_at) == ["__consumer_offsets", "bills", "new", "orders", "orders.eu"]


def test_names_of_deleted_topics_are_forgotten(topics: MemoryTopics) -> None:
    expressions = Expressions(topics)
    assert expressions.matches("short-.*") == frozenset()
    for number in range(3 * module.EXPRESSIONS_KEPT_MAX):
        topics.add(f"short-{number}")
        assert expressions.matches("short-.*") == {f"short-{number}"}
        topics.remove(f"short-{number}")
    assert len(expressions._names) < 2 * module.EXPRESSIONS_KEPT_MAX


def test_the_number_of_cached_names_is_bounded(topics: MemoryTopics) -> None:
    expressions = Expressions(topics)
    for number in range(module.EXPRESSIONS_KEPT_MAX + 10):
        expressions.check(f"x{number}")
    assert len(expressions._cached) == module.EXPRESSIONS_KEPT_MAX
    assert expressions.matches("x0|orders") == {"orders"}
