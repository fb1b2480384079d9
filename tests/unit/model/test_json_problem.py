"""Problems of a document are described in JSON's terms, not in msgspec's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from millstream.core.json_problem import plain_problem


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    max: Annotated[int, msgspec.Meta(ge=1, le=10)]
    name: Annotated[str, msgspec.Meta(min_length=2, max_length=3, pattern="^a")] = "aa"
    items: Annotated[list[_Item], msgspec.Meta(max_length=1)] = []
    mode: Literal["fast", "slow"] = "fast"
    delay: float | None = None
    counts: dict[str, int] = {}
    key: str | int | None = None


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{}", "the field `max` is missing"),
        ("[]", "it must be an object, not an array"),
        ("null", "it must be an object, not null"),
        ('{"max": 0}', "`max` must be an integer of at least 1"),
        ('{"max": 11}', "`max` must be an integer of at most 10"),
        ('{"max": "1"}', "`max` must be an integer, not a string"),
        ('{"max": 1.5}', "`max` must be an integer, not a number"),
        ('{"max": true}', "`max` must be an integer, not a boolean"),
        ('{"max": 1, "delay": []}', "`delay` must be a number or null, not an array"),
        ('{"max": 1, "key": {}}', "`key` must be an integer or a string or null, not an object"),
        ('{"max": 1, "more": 1}', "there is no field `more`"),
        ('{"max": 1, "items": [{}]}', "the field `items[0].number` is missing"),
        ('{"max": 1, "items": [{"number": 1, "x": 1}]}', "there is no field `items[0].x`"),
        ('{"max": 1, "items": [{"number": 1}, {"number": 2}]}', "`items` must be an array with at most 1 item"),
        ('{"max": 1, "name": "a"}', "`name` must be a string with at least 2 characters"),
        ('{"max": 1, "name": "bb"}', "`name` must be a string matching regex '^a'"),
        ('{"max": 1, "mode": "quick"}', "`mode` cannot be 'quick'"),
        ('{"max": 1, "counts": {"a": "b"}}', "`counts[...]` must be an integer, not a string"),
    ],
)
def test_a_problem_names_the_place_and_the_error(document: str, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.json.decode(document, type=_Document)
    assert plain_problem(raised.value) == problem


def test_an_unknown_field_is_answered_with_those_that_exist() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.json.decode('{"maximum": 1}', type=_Document)
    assert (
        plain_problem(raised.value, fields=("max", "key")) == "there is no field `maximum`; the fields are `max`, `key`"
    )


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({}, "the parameter `max` is missing"),
        ({"max": "many"}, "`max` must be an integer"),
        ({"max": "0"}, "`max` must be an integer of at least 1"),
        ({"max": "1", "delay": "long"}, "`delay` must be a number"),
        ({"max": "1", "more": "1"}, "there is no parameter `more`"),
    ],
)
def test_a_query_has_only_text(query: dict[str, Any], problem: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(query, _Document, strict=False)
    assert plain_problem(raised.value, is_text=True) == problem


def test_other_errors_keep_their_text() -> None:
    assert plain_problem(ValueError("JSON is malformed")) == "JSON is malformed"
