"""Columns inferred from a sample."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millstream.pipelines.jobs.land.inference import SAMPLE_ALL_MAX, decide, sample_ranges
from millstream.pipelines.source.ranges import Range


def columns(*documents: Any, detects: bool = False) -> dict[str, str]:
    fields = decide(documents, known=pa.schema([]), detects=detects).fields
    return {field.name: str(field.type) for field in fields}


def test_the_majority_of_values_decides() -> None:
    assert columns({"a": "x"}, {"a": 1}, {"a": 2}) == {"a": "int64"}
    assert columns({"a": "x"}, {"a": 1}) == {"a": "string"}
    assert columns({"a": 1}, {"a": 2.5}, {"a": None}) == {"a": "double"}
    assert columns({"a": {"b": 1}}, {"a": {"c": True, "B": 2.5}}, {"a": 3}) == {"a": "struct<b: double, c: bool>"}
    assert columns({"a": [1]}, {"a": ["x", 2]}, {"b": []}) == {"a": "list<element: string>"}
    assert columns({"a": None}, {"b c": 1}) == {}


def test_times_are_inferred_on_request() -> None:
    documents = [{"at": "2026-11-16T10:00:00Z", "t": "2026-11-16"}, {"at": "2026-11-16T10:00:00.5+01:00"}]
    assert columns(*documents) == {"at": "string", "t": "string"}
    assert columns(*documents, detects=True) == {"at": "timestamp[us, tz=UTC]", "t": "string"}
    assert columns(*documents, {"at": "soon"}, detects=True)["at"] == "string"


def test_a_sample_does_not_depend_on_the_backlog() -> None:
    few = [Range("t", number, 5, 900) for number in range(2)]
    many = [Range("t", number, 5, 10**6) for number in range(2)]
    assert sample_ranges(few) == few
    assert sample_ranges(many) == [Range("t", number, 5, 1005) for number in range(2)]
    wide = sample_ranges([Range("t", number, 0, 10**6) for number in range(1000)])
    assert sum(map(len, wide)) == SAMPLE_ALL_MAX


@pytest.mark.parametrize(
    ("others", "kind"),
    [([1.5], "int64"), ([2**63], "decimal128(38, 0)"), ([10**40], "int64"), ([2**63, 1.5], "int64")],
    ids=["a fraction", "an unsigned number", "more than 38 digits", "both"],
)
def test_a_long_in_the_sample_is_never_rounded(others: list[float], kind: str) -> None:
    numbers = [2**60 + 1, *others]
    assert columns(*({"a": number} for number in numbers)) == {"a": kind}
    assert columns({"a": {"b": numbers}}) == {"a": f"struct<b: list<element: {kind}>>"}
    assert columns(*({"a": number} for number in (2**53, 1.5))) == {"a": "double"}


def test_a_column_that_the_sample_keeps_long_is_not_widened_later() -> None:
    decision = decide([{"a": {"b": [-(2**60)]}, "c": 5}], known=pa.schema([]), detects=False)
    assert decision.fixed == {("a", "b", "[]"): f"it has {-(2**60)}, which doubles cannot hold exactly"}


def test_whole_numbers_of_more_than_64_bits_are_decimal() -> None:
    assert columns({"n": 2**64 + 1}, {"n": 5}, {"m": 10**40}) == {"n": "decimal128(38, 0)", "m": "int64"}
    assert columns({"n": 2**64 + 1}, {"n": 1.5}) == {"n": "double"}
