"""SELECT statements parsed without Spark: which topics they read, and which are refused."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core import sql
from millstream.core.errors import InvalidSetting
from millstream.core.sql import check_calls, read_select

READS = {
    "SELECT * FROM a": "a",
    "TABLE a": "a",
    "(SELECT x FROM a) UNION ALL TABLE b": "a b",
    "FROM a |> WHERE x > 1": "a",
    "select A.x, b.from from A join b using (x, y), c order by x, d": "A b c",
    "SELECT * FROM `orders-eu` AS o(x, y), (SELECT z, w FROM `a.b`) q, c WHERE x IN (1, 2)": "orders-eu a.b c",
    "SELECT * FROM (a LEFT JOIN b ON a.x = f(b.x, 1), c)": "a b c",
    "SELECT extract(year FROM t), trim(BOTH 'x' FROM s), substring(s FROM 2), overlay(s PLACING r FROM 3) FROM o": "o",
    "SELECT x FROM a WHERE x IS NOT DISTINCT FROM b AND y IS DISTINCT FROM c": "a",
    "SELECT x FROM a LATERAL VIEW explode(y) t AS p, q": "a",
    "SELECT * FROM a JOIN LATERAL (SELECT * FROM b), range(3), c": "a b c",
    "WITH Big AS (SELECT * FROM a), more(x, y) AS (SELECT 1, z FROM big) SELECT * FROM BIG, more": "a",
    "SELECT window.start, count(*) FROM a GROUP BY window(at, '1 minute'), b": "a",
    "SELECT ';', 'it''s FROM x', r'\\', \"FROM y\" FROM a -- FROM b;\n /* FROM /* c */ */ ;": "a",
    "SELECT * FROM a WHERE EXISTS (SELECT 1 FROM b WHERE b.x = a.x)": "a b",
    "SELECT * FROM VALUES (1), ('b')": "",
    "SELECT /*+ BROADCAST(c) */ x, session_window(t, '5 minutes') FROM a JOIN b AS c USING (x) GROUP BY ALL": "a b",
    "SELECT transform(xs, x -> x + 1), m['k'], s.t[0].u FROM a TABLESAMPLE (10 PERCENT) QUALIFY r = 1": "a",
}


@pytest.mark.parametrize("text", READS)
def test_the_topics_of_a_statement_are_found(text: str) -> None:
    statement = read_select(text)
    assert (" ".join(statement.reads), statement.is_complete) == (READS[text], True)


@pytest.mark.parametrize(
    "text", ["SELECT * FROM STREAM a", "SELECT * FROM IDENTIFIER('a')", "SELECT v:a.b[0]::int FROM t"]
)
def test_ambiguous_statements_are_left_to_spark(text: str) -> None:
    assert not read_select(text).is_complete


def test_a_trailing_semicolon_is_accepted() -> None:
    assert read_select("SELECT 1 FROM a ; -- done\n").text == "SELECT 1 FROM a"


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (" \n", "is empty"),
        ("-- nothing", "is empty"),
        (";", "is empty"),
        ("SELECT 1 FROM a; SELECT 2", "column 18: a second statement starts here"),
        ("INSERT INTO b SELECT * FROM a", "column 1: a transform's statement must be a single SELECT"),
        ("SELECT x,\n  (y FROM a", "line 2, column 3: this '(' is not closed"),
        ("SELECT y) FROM a", "nothing is closed by this ')'"),
        ("SELECT 'y FROM a", "this quote is not closed"),
        ("SELECT * FROM orders-eu.x o", "write `orders-eu.x` in backquotes"),
        (
            "SELECT * FROM 'orders'",
            "names are written in backquotes, not in quotes\n  SELECT * FROM 'orders'\n                ^^^^^^^^",
        ),
        ("SELECT * FROM größen", "write `größen` in backquotes"),
    ],
)
def test_invalid_statements_are_refused(text: str, output: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        read_select(text)
    assert output in str(refused.value)


WORDS = [
    "SELECT",
    "FROM",
    "a",
    ",",
    "(",
    ")",
    ".",
    ";",
    "'x'",
    "AS",
    "WITH",
    "JOIN",
    "TABLE",
    "`b`",
    "-",
    "WHERE",
    "trim",
]


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_arbitrary_statements_raise_nothing_else(words: list[str]) -> None:
    try:
        read_select(" ".join(words))
    except InvalidSetting:
        return


@pytest.mark.parametrize("text", ["SELECT a" + ", a" * sql.TOKENS_MAX, f"SELECT '{'x' * sql.LENGTH_MAX}'"])
def test_a_statement_that_takes_long_to_parse_is_refused(text: str) -> None:
    for check in (read_select, lambda text: check_calls(text, ())):
        with pytest.raises(InvalidSetting, match="at most"):
            check(f"{text} FROM orders")


def test_the_names_in_a_query_are_collected_once_however_many_windows_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect = Mock(wraps=sql._names_read)
    monkeypatch.setattr(sql, "_names_read", collect)
    assert len(read_select("SELECT " + "max(a) OVER (), " * 50 + "1 FROM orders").endless) == 1
    collect.assert_called_once()


def test_a_statement_is_parsed_once_however_often_it_names_a_forbidden_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse = Mock(wraps=sql._parse)
    monkeypatch.setattr(sql, "_parse", parse)
    queries = ", ".join(f"reflect (a{number}) AS (SELECT 1)" for number in range(3))
    check_calls(f"WITH {queries} SELECT * FROM orders", ())
    parse.assert_called_once()
