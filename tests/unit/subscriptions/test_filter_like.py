"""LIKE against its definition, and in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.protocol.filter.value import FLOATING_MAX, InvalidPattern, compile_like
from millstream_testing import filter_model as model


@settings(max_examples=500, deadline=None)
@given(st.text("ab%_", max_size=8), st.text("ab\n", max_size=10))
@example("a%a", "a")
@example("%a_%b", "aaab")
@example("ab%ba", "aba")
def test_like_agrees_with_the_model(pattern: str, text: str) -> None:
    assert compile_like(pattern)(text) is model.like(text, pattern)


@given(st.text("ab%_\\.*+[", max_size=8))
def test_an_escaped_pattern_matches_only_itself(text: str) -> None:
    pattern = re.sub(r"([%_!])", r"!\1", text)
    matches = compile_like(pattern, "!")
    assert matches(text)
    assert not matches(text + "a")


def test_invalid_patterns_are_refused() -> None:
    for pattern in ("a\\", "a\\b", "%" + "_" * (FLOATING_MAX + 1) + "%"):
        with pytest.raises(InvalidPattern):
            compile_like(pattern)


def test_catastrophic_patterns_take_bounded_time() -> None:
    text = "a" * 20_000
    assert not compile_like("%a" * 60 + "%b")(text)
    assert not compile_like("%a_a_a_a%" * 20 + "b")(text)
    assert compile_like("%a_a%" * 30)(text)
