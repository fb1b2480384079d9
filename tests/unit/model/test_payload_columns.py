"""Payload columns in Spark's notation: what is accepted, what is refused, and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidSetting
from millstream.core.payload_columns import ColumnType, PayloadColumn, check_landed, parse_columns

LONG, STRING = ColumnType("bigint"), ColumnType("string")


def columns(text: str) -> dict[str, ColumnType]:
    return {column.name: column.type for column in parse_columns(text)}


def test_columns_have_names_and_types() -> None:
    assert columns("id long, `a b` STRING not null comment 'x, y', order: int -- the last") == {
        "id": LONG,
        "a b": STRING,
        "order": ColumnType("int"),
    }
    assert columns("struct<id bigint>") == columns("id: long")
    assert columns("a decimal, b numeric(5), c dec(38, 38)") == {
        "a": ColumnType("decimal", (10, 0)),
        "b": ColumnType("decimal", (5, 0)),
        "c": ColumnType("decimal", (38, 38)),
    }


def test_types_have_parts() -> None:
    lines = ColumnType("struct", (), (PayloadColumn("sku", STRING), PayloadColumn("n", LONG)))
    assert columns("lines array<struct<sku:string, n long>>, by map<string,long>") == {
        "lines": ColumnType("array", (), (PayloadColumn("element", lines),)),
        "by": ColumnType("map", (), (PayloadColumn("key", STRING), PayloadColumn("value", LONG))),
    }


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("id lnog", "line 1, column 4: 'lnog' is not a type; did you mean 'long'?\n  id lnog\n     ^^^^"),
        ("id long,\ntotal xyz", "line 2, column 7: 'xyz' is not a type; there are boolean, "),
        ("id long name string", "column 9: a comma is missing before 'name'"),
        ("id long,", "column 9: a column name is missing"),
        ("", "column 1: a column name is missing"),
        ("id", "column 3: a type is missing"),
        ("a-b int", "column 2: a type is missing"),
        ("größe int", "write `größe` in backquotes"),
        ("a array", "say what the array contains, as in array<string>"),
        ("a array<int", "the array is not closed by >"),
        ("a map<int>", "a type for keys and one for values"),
        ("a struct<>", "say what the struct contains, as in struct<name string>"),
        ("a decimal(39,2)", "1 to 38 digits"),
        ("a decimal(3,5)", "no more than these behind the point"),
        ("a decimal(x)", "a number is missing"),
        ("a decimal(3", "a closing bracket is missing"),
        ("a interval", "payloads are not decoded into the type interval"),
        ("a int not", "NULL is missing"),
        ("a int comment x", "a comment must be quoted"),
        ("a int, a long", "names column 'a' twice"),
        ("`a int", "this quote is not closed"),
        ("a int /* b", "this comment is not closed"),
        ("a " + "array<" * 100, "more than 50 deep"),
    ],
)
def test_an_error_has_its_position(text: str, output: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        parse_columns(text)
    assert output in str(refused.value)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("a int, A long", "'a' and 'A', which differ in case alone"),
        ("x struct<b int, B int>", "differ in case"),
        ("`a b` int", "'a b', which cannot be a column"),
        ("a array<map<string, int>>", "as map within another column, a type that payloads cannot be landed as"),
        ("a binary", "declare it as string to keep its JSON"),
    ],
)
def test_columns_that_tables_cannot_have_are_refused(text: str, output: str) -> None:
    with pytest.raises(InvalidSetting, match=output):
        check_landed(parse_columns(text))


@given(st.text(alphabet="ab <>(),:`'\"/*-\\1\n", max_size=20) | st.text(max_size=10))
def test_arbitrary_text_raises_nothing_else(text: str) -> None:
    try:
        check_landed(parse_columns(text))
    except InvalidSetting:
        return
