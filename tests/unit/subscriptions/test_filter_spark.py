"""The same condition in Spark: an equal result, or an error in Spark and NULL here. Requires PySpark and Java."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from millstream.core.ids import Offset
from millstream.protocol.filter.batch import RecordBatch
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.records.record import Record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark.sql", reason="PySpark is not installed")
# Each condition is a Spark query, which takes a second.
pytestmark = pytest.mark.trial

SCHEMA = (
    "total BIGINT, f DOUBLE, s STRING, b BOOLEAN, n BIGINT, at STRING, seconds BIGINT, items ARRAY<STRUCT<sku: STRING>>"
)
PAYLOADS: list[dict[str, Any]] = [
    {"total": 1500, "f": 1.5, "s": "15", "b": True, "at": "2026-01-02T00:00:00Z", "items": [{"sku": "A-1"}]},
    {"total": -7, "f": -0.0001, "s": "it's 5%", "b": False, "at": "2026-1-2 1:02:03.5", "seconds": 1767312000},
    {"total": 0, "f": 1e7, "s": " yes ", "items": []},
    {"total": 2**63 - 1, "f": 123456789.123, "s": "5.5", "at": "tomorrow", "items": [{"sku": "a\nb_%\\"}]},
    {},
]
HEADERS = [{"p": "5", "q": "é"}, {"p": "5.5"}, {"p": "x"}, {}, {"p": " 7 ", "q": ""}]
KEYS = ["k", "", "K-1", None, "ß😀"]

CONDITIONS = r"""
payload.total > 1000 AND headers['q'] = 'é'
NOT (payload.total > 1000 OR payload.n = 5)
payload.total = '1500'
payload.b = 'yes'
payload.b
NOT payload.b
payload.b IS NOT TRUE
(payload.total > 0) = payload.b
(payload.n > 0) IS NULL
headers['none'] IS NULL
key IN ('k', NULL)
key NOT IN ('x', NULL)
payload.total IN ('1500', '0')
payload.total NOT IN (0, -7)
payload.total NOT BETWEEN -10 AND 10
key < 'a'
key LIKE 'K-_'
key LIKE '%'
payload.s LIKE '%5\%'
payload.s LIKE '%!%%' ESCAPE '!'
payload.s LIKE 'it\'s%'
payload.total LIKE '15%'
payload.f LIKE '1.%'
payload.b LIKE 't%'
payload.total - 1.5D < 0
payload.total / 2 = 750
payload.total % 4 = -3
payload.f % 1 = 0.5D
-payload.total = 7
lower(key) = 'k' OR upper(key) = 'SS😀'
length(key) = 2
length(payload.total) = 4
startswith(key, 'k') OR endswith(key, '-1') OR contains(key, '😀')
startswith(payload.total, '15')
coalesce(payload.total, 0) = 0
coalesce(payload.b, FALSE)
coalesce(key, headers['p']) = '5'
cast(payload.f AS BIGINT) = 0
cast(payload.f AS INT) = 10000000
cast(payload.f AS STRING) IN ('1.5', '-1.0E-4', '1.0E7', '1.23456789123E8')
cast(payload.total AS STRING) = '-7'
cast(payload.b AS STRING) = 'false'
cast(payload.b AS INT) = 1
cast(payload.total AS BOOLEAN)
cast(payload.total AS DOUBLE) > 1e3
cast(payload.seconds AS TIMESTAMP) = timestamp
cast(timestamp AS BIGINT) = 1767312000
cast(timestamp AS DOUBLE) = 1767312000D
timestamp = TIMESTAMP '2026-01-02T01:00:00+01:00'
timestamp > '2026-01-01'
timestamp BETWEEN '2026-01-01' AND '2026-01-03 00:00:00.000001'
topic = 't' AND partition = 3 AND offset < 2
payload IS NOT NULL
payload.total = NULL
NULL OR key = 'k'
TRUE
'a' < 'b' AND 'é' > 'z' AND '😀' > 'ￜ'
'\u0041\101\%\_\x' = 'AA\\%\\_x'
5L = 5 AND 1.5D = 1.5 AND 1e3 = 1000
""".strip().splitlines()

FAILING = r"""
payload.s = 15
payload.s = 5.5
payload.s = 15.0
payload.s = TRUE
headers['p'] > 4
headers['p'] > 4.5
headers.p BETWEEN 4 AND 6
headers['p'] IN (5, 7)
headers['p'] IN (5, 7.0)
payload.items[0].sku LIKE 'a_b%'
payload.items[0].sku LIKE '%\\\\'
payload.items[0].sku = 'A-1'
payload.items[0].sku = 'a\nb_%\\'
payload.total + 1 > 0
payload.total * 2 = 3000
payload.total / 0 = 1
payload.s + 1 = 16
payload.s * 2 = 11
cast(payload.s AS BIGINT) = 15
cast(payload.s AS INT) = 15
cast(payload.s AS DOUBLE) = 5.5D
cast(payload.s AS BOOLEAN)
cast(payload.total AS INT) > 0
cast(payload.at AS TIMESTAMP) >= TIMESTAMP '2026-01-02 01:00:00Z'
payload.s::double > 5
payload.at = timestamp
""".strip().splitlines()
"""Spark fails with an error for some of the messages, where filters have NULL."""


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[Any]:
    row_values = [
        (at, key, headers, json.dumps(payload))
        for at, (key, headers, payload) in enumerate(zip(KEYS, HEADERS, PAYLOADS, strict=True))
    ]
    schema = "offset BIGINT, key STRING, headers MAP<STRING, STRING>, value STRING"
    frame = spark.createDataFrame(row_values, schema).selectExpr(
        "offset", "key", "headers", "'t' AS topic", "3 AS partition", "TIMESTAMP '2026-01-02 00:00:00Z' AS timestamp",
        f"from_json(value, '{SCHEMA}') AS payload",
    ).cache()  # fmt: skip
    yield frame
    frame.unpersist()


def here(text: str) -> list[bool]:
    compiled = compile_filter(text)
    records = [
        Record(
            Offset(at),
            1767312000000,
            None if key is None else key.encode(),
            json.dumps(payload).encode(),
            tuple((name, value.encode()) for name, value in headers.items()),
        )
        for at, (key, headers, payload) in enumerate(zip(KEYS, HEADERS, PAYLOADS, strict=True))
    ]
    return [bool(m) for m in compiled.matches(RecordBatch(records, topic="t", partition=3, uses=compiled.uses))]


def forms(text: str) -> list[str]:
    """A filter, its negation, and its canonical text."""
    return [text, f"NOT ({text})", compile_filter(text).canonical]


def there(rows: Any, texts: list[str]) -> list[list[bool]]:
    """Spark's result for every message."""
    rows_read = rows.orderBy("offset").selectExpr(*texts).collect()
    return [[bool(row[at]) for row in rows_read] for at in range(len(texts))]


def there_one_by_one(rows: Any, texts: list[str]) -> list[list[bool]]:
    """The same, message by message; a runtime error is NULL, an analysis error is not."""
    results = []
    for at in range(len(KEYS)):
        query = rows.where(f"offset = {at}").selectExpr(*texts)
        try:
            results.append(list(query.collect()[0]))
        except Exception:
            results.append([None] * len(texts))
    return [[bool(row[at]) for row in results] for at in range(len(texts))]


@pytest.mark.filterwarnings("ignore")
def test_spark_agrees(rows: Any) -> None:
    texts = [form for text in CONDITIONS for form in forms(text)]
    responses = dict(zip(texts, there(rows, texts), strict=True))
    assert {text: here(text) for text in texts} == responses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", FAILING)
def test_a_runtime_error_in_spark_is_null_here(rows: Any, text: str) -> None:
    assert [here(form) for form in forms(text)] == there_one_by_one(rows, forms(text))
