"""Refused filters: position and reason, and that only `FilterError` is ever raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.errors import FilterError
from millstream.core.ids import Offset
from millstream.protocol.filter.batch import RecordBatch
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.filter.node import COALESCE, COLUMNS, FUNCTIONS
from millstream.protocol.filter.translation import DEPTH_MAX, NODES_MAX, STEPS_MAX, TEXT_BYTES_MAX
from millstream.protocol.records.record import Record

DOCS = Path(__file__).parents[3] / "docs" / "filters.md"

REFUSED = {
    "": (1, 1, "empty"),
    "   ": (1, 1, "empty"),
    "ky = 'a'": (1, 1, "did you mean 'key'"),
    "total > 5": (1, 1, "written payload.total"),
    "key = 'a'\n  AND hedaers['x'] = 'y'": (2, 7, "did you mean 'headers'"),
    "lowr(key) = 'a'": (1, 1, "did you mean 'lower'"),
    "starts_with(key, 'a')": (1, 1, "did you mean 'startswith'"),
    "key = 'abc": (1, 7, "not closed"),
    "(payload.a = 1": (1, 14, "closing )"),
    "payload.a = 1)": (1, 14, "not expected"),
    "payload.a > ": (1, 11, "missing"),
    "payload.a = 1 payload.b": (1, 15, "not expected"),
    "payload.a = = 1": (1, 13, "missing"),
    "SELECT 1": (1, 1, "'SELECT' is not part"),
    "key = (SELECT 1)": (1, 8, "'SELECT' is not part"),
    "CASE WHEN TRUE THEN 1 END": (1, 1, "'CASE' is not part"),
    "key RLIKE 'a'": (1, 5, "'RLIKE' is not part"),
    "key <=> 'a'": (1, 5, "'<=>' is not part"),
    "payload:a = 1": (1, 8, "':' is not part"),
    "key = ?": (1, 7, "is not part"),
    "key = 'a'; key = 'b'": (1, 10, "is not part"),
    "!payload.b": (1, 1, "write NOT"),
    "key = 'it''s'": (1, 11, "a string follows a string"),
    "key": (1, 1, "a condition is needed here, but this is text"),
    "5": (1, 1, "this is a number"),
    "NULL": (1, 1, "NULL matches no message"),
    "timestamp > 5": (1, 1, "cannot be compared"),
    "timestamp > 'soon'": (1, 1, "'soon' cannot be read as a timestamp"),
    "offset = 'x'": (1, 1, "'x' cannot be read as a number"),
    "offset AND TRUE": (1, 1, "a condition is needed"),
    "key = 'a' = TRUE": (1, 1, "put parentheses"),
    "key IN (1, 'a')": (1, 1, "literals of one type"),
    "key IN (topic)": (1, 9, "only literals"),
    "key IN ()": (1, 1, "needs a list"),
    "key LIKE topic": (1, 10, "a text in quotes"),
    "key LIKE 'a!b' ESCAPE '!'": (1, 10, "not 'b'"),
    "key LIKE 'a!' ESCAPE '!'": (1, 10, "ends with its escape"),
    "key LIKE 'a' ESCAPE 'ab'": (1, 21, "one character"),
    "key LIKE ANY ('a')": (1, 10, "is not part"),
    "key LIKE '%" + "_" * 65 + "%'": (1, 10, "at most 64"),
    "headers = 'a'": (1, 1, "name one header"),
    "headers['a']['b'] = 'c'": (1, 1, "name one header"),
    "headers[0] = 'a'": (1, 1, "name one header"),
    "key.a = 'b'": (1, 1, "has no fields"),
    "payload.items[-1] = 1": (1, 16, "from 0 on"),
    "payload.* IS NULL": (1, 9, "name of a field"),
    "payload" + "[0]" * (STEPS_MAX + 1) + " = 1": (1, 1, "at most 16 levels"),
    "cast(key AS FLOAT) = 1": (1, 6, "a cast to FLOAT is not supported"),
    "cast(timestamp AS STRING) = 'a'": (1, 6, "cannot be cast to STRING"),
    "coalesce(key, 5) = 'a'": (1, 1, "must have the same type"),
    "lower(timestamp) = 'a'": (1, 1, "needs text"),
    "topic + 'x' = 1": (1, 9, "cannot be read as a number"),
    "topic + '1' = 1": (1, 1, "both operands are text"),
    "timestamp + 1 = 1": (1, 1, "needs numbers"),
    "payload.a > 1e999": (1, 13, "not a number"),
    "payload.a > " + "9" * 39: (1, 13, "not a number"),
    "payload.total > 'abc'": (1, 1, "'abc' is text, and a number cannot be compared with it"),
    "'abc' <= payload.total": (1, 1, "CAST(… AS STRING)"),
    "payload.a BETWEEN 1 AND 'x'": (1, 1, "'x' cannot be read as a number"),
    "payload.a BETWEEN TIMESTAMP '2026-01-01' AND 'x'": (1, 1, "the other must be one too"),
    "(" * (DEPTH_MAX + 1) + "TRUE" + ")" * (DEPTH_MAX + 1): (1, DEPTH_MAX + 1, "parentheses"),
    "NOT " * (DEPTH_MAX + 1) + "TRUE": (1, 1, "nested more than"),
    "NOT " * 2000 + "TRUE": (1, 1, "nested more than"),
    "TRUE AND " * NODES_MAX + "TRUE": (1, 1, f"at most {NODES_MAX}"),
    "key = '" + "a" * TEXT_BYTES_MAX + "'": (1, 1, f"at most {TEXT_BYTES_MAX} bytes"),
    "key = '\ud800'": (1, 8, "UTF-8"),
}


@pytest.mark.parametrize(("text", "expected"), REFUSED.items(), ids=[text[:24] for text in REFUSED])
def test_an_error_has_its_position(text: str, expected: tuple[int, int, str]) -> None:
    with pytest.raises(FilterError, match=re.escape(expected[2])) as raised:
        compile_filter(text)
    assert (raised.value.line, raised.value.column) == expected[:2]


def test_an_error_shows_the_line_with_a_caret() -> None:
    with pytest.raises(FilterError) as raised:
        compile_filter("headers['region'] = 'eu'\n  AND kye = 'a'")
    assert str(raised.value).splitlines() == [
        "filter, line 2, column 7: the column 'kye' is unknown; did you mean 'key'?",
        "    AND kye = 'a'",
        "        ^^^",
    ]


def test_the_caret_is_correct_in_a_long_line() -> None:
    text = "key = 'a' OR " * 50 + "kye = 'b'" + " OR key = 'c'" * 20
    with pytest.raises(FilterError) as raised:
        compile_filter(text)
    _, line, caret = str(raised.value).splitlines()
    assert line[caret.index("^") : caret.index("^") + 3] == "kye"
    assert len(line) < 120


VOCABULARY = """
key topic offset timestamp headers payload payload.a headers['x'] 'a' '%_' 5 -1 1.5 1e5 NULL TRUE FALSE AND OR NOT
IN ( ) [ ] , . = <> < >= + - * / % BETWEEN LIKE ESCAPE IS CAST AS BIGINT :: lower( coalesce( TIMESTAMP '2026-01-01'
SELECT CASE WHEN END INTERVAL DISTINCT FROM " ` ' \\ -- /* */ ; : @ ? { } $ # ^ & | ! ~ 0x1F X'1F' r'a' b'a' 5L 1.5D
list[ array( map( struct( x -> y DATE ARRAY<INT> EXISTS ANY ALL OVER LATERAL == >> => payload.list[0] .a `a` "a"
"""
WORDS = st.sampled_from(VOCABULARY.split())
MESSAGES = [
    Record(Offset(0), 0, b"a", b'{"a": [1, {"b": "x"}]}', (("x", b"y"),)),
    Record(Offset(1), -1, None, None, ()),
]


def survives(text: str) -> None:
    try:
        compiled = compile_filter(text)
    except FilterError:
        return
    assert compile_filter(compiled.canonical) == compiled
    assert compiled.matches(RecordBatch(MESSAGES, topic="t", partition=0, uses=compiled.uses)).size == len(MESSAGES)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=12).map(" ".join))
def test_arbitrary_tokens_are_harmless(text: str) -> None:
    survives(text)


@given(st.text(max_size=40))
def test_arbitrary_text_is_harmless(text: str) -> None:
    survives(text)


@given(st.data())
def test_arbitrary_changes_of_a_valid_filter_are_harmless(data: st.DataObject) -> None:
    text = "payload.items[0].sku LIKE 'A!_%' ESCAPE '!' AND NOT (headers['p'] IN (1, 2)) OR cast(key AS INT) > 5"
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 3)))
    survives(
        text[:at] + data.draw(st.sampled_from(["", "'", "(", "[", ".", " ", "0", "x", "\n", "\0", "é"])) + text[until:]
    )


def test_the_docs_name_every_column_and_function() -> None:
    page = DOCS.read_text(encoding="utf-8")
    missing = [name for name in (*COLUMNS, *FUNCTIONS, COALESCE) if f"`{name}" not in page]
    assert missing == []
