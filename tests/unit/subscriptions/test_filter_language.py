"""The rules of the filter language, one by one; docs/filters.md states them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.ids import NO_TIMESTAMP_MS, Offset
from millstream.protocol.filter.batch import PAYLOAD_DEPTH_MAX, RecordBatch
from millstream.protocol.filter.filter import compile_filter
from millstream.protocol.records.record import Record

ORDER = (
    b'{"total": 1500, "f": 1.5, "s": "15", "b": true, "n": null, "big": 123456789012345678901234567890,'
    b' "items": [{"sku": "A-1"}], "o": {"Xy": 1}, "we ird": 1, "at": "2026-01-02T00:00:00Z", "seconds": 1767312000,'
    b' "list": [5], "tiny": 0.0001, "huge": 1e300}'
)
NOON_MS = 1767312000000  # 2026-01-02 00:00 UTC


def holds(
    text: str,
    value: bytes | None = ORDER,
    *,
    key: bytes | None = b"k",
    headers: tuple[tuple[str, bytes | None], ...] = (("region", b"eu"), ("p", b"5"), ("q", b"5.5")),
    timestamp_ms: int = NOON_MS,
) -> bool:
    compiled = compile_filter(text)
    record = Record(Offset(7), timestamp_ms, key, value, headers)
    batch = RecordBatch([record], topic="t", partition=3, uses=compiled.uses)
    (match,) = compiled.matches(batch).tolist()
    return bool(match)


def evaluate(text: str, value: bytes | None = ORDER, **message: object) -> bool | None:
    """Return TRUE, FALSE or NULL."""
    if holds(text, value, **message):  # type: ignore[arg-type]
        return True
    return False if holds(f"NOT ({text})", value, **message) else None  # type: ignore[arg-type]


TRUE = """
payload.total > 1000
payload.total > 1000 AND headers['region'] = 'eu'
PAYLOAD.total > 1000 and Headers['region'] = 'eu'
payload['total'] > 1000
payload.items[0].sku = 'A-1'
payload['items'][0]['sku'] = 'A-1'
payload.`we ird` = 1
payload.list[0] = 5
payload.o.Xy = 1
headers.region = 'eu'
key = 'k' AND topic = 't' AND partition = 3 AND offset = 7
'k' = key
"k" = key
key == 'k' AND key != 'x' AND key <> 'x'
payload.total BETWEEN 1500 AND 1500
payload.total NOT BETWEEN 1 AND 2
payload.total IN (1, 1500)
payload.total NOT IN (1, 2)
payload.total IN (1500.0, 2)
key IN ('k', NULL)
payload.b
NOT payload.b IS NULL
payload.b IS TRUE
payload.b IS NOT FALSE
payload.none IS NOT TRUE
payload.b = TRUE AND payload.b > FALSE
(payload.total > 5) = payload.b
payload.n IS NULL AND payload.none IS NULL AND payload.items[5].sku IS NULL
payload IS NOT NULL AND payload.o IS NOT NULL
payload.big = 123456789012345678901234567890
payload.big > 123456789012345678901234567889
payload.total + 1 = 1501
payload.total - 1.5 = 1498.5
payload.total * 2 = 3000
payload.total / 1000 = 1.5
7 / 2 = 3.5
payload.total % 7 = 2
-7 % 3 = -1
-5.5 % 2 = -1.5
- payload.total = -1500
-(-5) = 5
payload.s + 1 = 16
payload.s * 1.5 = 22.5
lower('ABC') = 'abc' AND upper('ß') = 'SS' AND length('😀') = 1
length(payload.total) = 4
startswith(key, 'k') AND endswith(payload.items[0].sku, '-1') AND contains(topic, 't')
coalesce(payload.none, 5) = 5
coalesce(payload.none, headers['region']) = 'eu'
coalesce(payload.b, FALSE)
cast(payload.s AS BIGINT) = 15
cast(' 5 ' AS INT) = 5
payload.s::double = 15
cast('1e3' AS DOUBLE) = 1000
cast(1.9 AS BIGINT) = 1
cast(-1.9D AS INT) = -1
cast(TRUE AS INT) = 1
cast(payload.total AS STRING) = '1500'
cast(payload.f AS STRING) = '1.5'
cast(payload.tiny AS STRING) = '1.0E-4'
cast(payload.huge AS STRING) = '1.0E300'
cast(123456789.123 AS STRING) = '1.23456789123E8'
cast(payload.b AS STRING) = 'true'
cast('yes' AS BOOLEAN)
cast(5 AS BOOLEAN)
cast(timestamp AS BIGINT) = 1767312000
cast(timestamp AS DOUBLE) = 1767312000.0
cast(payload.seconds AS TIMESTAMP) = timestamp
try_cast('x' AS INT) IS NULL
5L = 5 AND 1.5D = 1.5
5 IN (5L, 6L)
timestamp = TIMESTAMP '2026-01-02 00:00:00'
timestamp = TIMESTAMP '2026-01-02T01:00:00+01:00'
timestamp > '2026-01-01'
timestamp BETWEEN '2026-01-01' AND TIMESTAMP '2026-01-03'
timestamp IN ('2026-01-02', '2026-01-03')
payload.at = timestamp
payload.at BETWEEN TIMESTAMP '2026-01-01' AND TIMESTAMP '2026-01-03'
cast(payload.at AS TIMESTAMP) IN (TIMESTAMP '2026-01-02')
timestamp < '2026-01-02 00:00:00.000001Z'
payload.items[0].sku LIKE 'A-%'
payload.items[0].sku NOT LIKE 'B%'
payload.total LIKE '15%'
payload.b LIKE 't%'
'a%' LIKE 'a\\%'
'a%' LIKE 'a!%' ESCAPE '!'
'a_b' LIKE '%!_%' ESCAPE '!'
'a\\nb' LIKE 'a_b'
headers['p'] > 4
headers['q'] > 4.5
headers['p'] IN (5, 6)
headers['p'] BETWEEN 4 AND 6
5 IN ('5', '6')
payload.s = 15 AND payload.s = 15.0
payload.total = '1500'
payload.b = 'yes'
9007199254740993 <> 9007199254740992.0
TRUE
NULL OR TRUE
key = 'k' -- a comment
key /* another */ = 'k'
""".strip().splitlines()

FALSE = """
payload.total < 1000
headers['region'] <> 'eu'
key IS NULL
payload IS NULL
NULL AND FALSE
payload.b = FALSE
key = 'k' AND FALSE
""".strip().splitlines()

NULLS = """
payload.none = 1
payload.n = 1
payload.n <> 1
key = NULL
key IN ('x', NULL)
payload.total IN ('x')
payload.items = 5
payload.o = payload.o
payload.b = 1
payload.total AND TRUE
payload.s AND TRUE
headers['none'] = 'x'
headers['q'] > 4
headers['region'] > 4
payload.total = 'abc'
payload.total / 0 = 1
payload.total % 0 = 1
9223372036854775807 + 1 > 0
payload.huge * payload.huge > 0
payload.big + 1.5 * payload.none > 0
payload.big * payload.big > 0
cast('5.0' AS BIGINT) = 5
cast(3000000000 AS INT) > 0
cast(payload.big AS BIGINT) > 0
cast(payload.huge AS BIGINT) > 0
cast('inf' AS DOUBLE) > 0
cast('maybe' AS BOOLEAN)
cast(payload.o AS STRING) = ''
timestamp = payload.s
timestamp = payload.total
payload.o LIKE '%'
lower(payload.items) = 'x'
coalesce(payload.none, NULL) = 1
payload.items.sku = 'A-1'
payload.O.xy = 1
""".strip().splitlines()


@pytest.mark.parametrize("text", TRUE)
def test_true_conditions(text: str) -> None:
    assert evaluate(text) is True


@pytest.mark.parametrize("text", FALSE)
def test_false_conditions(text: str) -> None:
    assert evaluate(text) is False


@pytest.mark.parametrize("text", NULLS)
def test_null_conditions(text: str) -> None:
    assert evaluate(text) is None


NOT_JSON = {
    "text": b"hello",
    "nothing": b"",
    "no value": None,
    "the JSON null": b"null",
    "cut off": b'{"total": 15',
    "trailing": b'{"total": 1500} x',
    "not UTF-8": b'{"total": 1500, "s": "\xff"}',
    "a number beyond a double": b'{"total": 1500, "x": 1e400}',
    "NaN": b'{"total": NaN}',
    "half a character": b'{"total": 1500, "s": "\\ud800"}',
    "too deep": b'{"total": 1500, "x": ' + b"[" * PAYLOAD_DEPTH_MAX + b"]" * PAYLOAD_DEPTH_MAX + b"}",
    "far too deep": b'{"total": 1500, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5000 digits": b'{"total": 1500, "x": ' + b"1" * 5000 + b"}",
    "a mark before it": b'\xef\xbb\xbf{"total": 1500}',
}


@pytest.mark.parametrize("value", NOT_JSON.values(), ids=NOT_JSON)
def test_a_payload_that_is_not_json_has_only_nulls(value: bytes | None) -> None:
    assert evaluate("payload.total = 1500", value) is None
    assert evaluate("payload.total <> 1500", value) is None
    assert evaluate("payload IS NULL", value) is True
    assert evaluate("payload.total = 1500 OR key = 'k'", value) is True


def test_payloads_that_are_not_objects() -> None:
    assert evaluate("payload = 5", b"5") is True
    assert evaluate("payload[1] = 'x'", b'[1, "x"]') is True
    assert evaluate("payload.a = 5", b"5") is None


def test_the_last_of_duplicate_fields_counts() -> None:
    assert evaluate("payload.a = 2", b'{"a": 1, "a": 2}') is True


def test_nesting_is_read_up_to_the_documented_depth() -> None:
    deep = b'{"total": 1500, "x": ' + b"[" * (PAYLOAD_DEPTH_MAX - 1) + b"]" * (PAYLOAD_DEPTH_MAX - 1) + b"}"
    assert evaluate("payload.total = 1500", deep) is True
    wide = b'{"total": 1500, "x": [' + b",".join([b"[]"] * 1000) + b"]}"
    assert evaluate("payload.total = 1500", wide) is True


def test_the_last_of_duplicate_headers_counts() -> None:
    assert evaluate("headers['a'] = '2'", headers=(("a", b"1"), ("a", b"2"))) is True
    assert evaluate("headers['a'] IS NULL", headers=(("a", b"1"), ("a", None))) is True


def test_bytes_that_are_not_utf_8_become_replacement_characters() -> None:
    assert evaluate("key = 'a\ufffd'", key=b"a\xff") is True
    assert evaluate("key IS NULL", key=b"\xff") is False
    assert evaluate("headers['a'] LIKE '%\ufffd'", headers=(("a", b"x\xfe"),)) is True


def test_a_missing_key_is_null() -> None:
    assert evaluate("key = 'k'", key=None) is None
    assert evaluate("key IS NULL", key=None) is True


def test_a_missing_timestamp_is_null() -> None:
    assert evaluate("timestamp > '2026-01-01'", timestamp_ms=NO_TIMESTAMP_MS) is None
    assert evaluate("timestamp IS NULL", timestamp_ms=NO_TIMESTAMP_MS) is True


def test_equivalent_filters_have_the_same_version() -> None:
    first = compile_filter("payload.total > 1000 AND headers['region'] = 'eu'")
    second = compile_filter("  (PAYLOAD['total'] > 1000)\n and ((headers.region == \"eu\")) -- big ones")
    assert first == second
    assert first.version == second.version
    assert first.text != second.text
    assert first.canonical == "(payload['total'] > 1000) AND (headers['region'] = 'eu')"
    assert first.version != compile_filter("payload.total > 1001").version


def test_a_filter_reports_the_fields_it_uses() -> None:
    uses = compile_filter("payload.a.b > 1 AND payload.a.c > 1 AND headers['x'] = 'y'").uses
    assert uses.paths == {("a", "b"), ("a", "c")}
    assert uses.headers == {"x"}
    assert not uses.key
    assert uses.fields == {"value", "headers"}
    assert compile_filter("key = 'a'").uses.fields == {"key"}
    assert compile_filter("topic = 'a' AND offset > 5").uses.fields == frozenset()


EVERYTHING = compile_filter(
    "payload.a > 5 OR payload.a LIKE '%x_' OR payload.a[0].b IN (1, 2) OR payload BETWEEN 'a' AND 'b'"
    " OR lower(payload.a) = upper(payload.b) OR payload.a * payload.b / payload.c % 7 > 1 OR -payload.a = 1"
    " OR cast(payload.a AS TIMESTAMP) > timestamp OR cast(payload.a AS INT) = cast(payload.b AS STRING)"
    " OR cast(payload.a AS DOUBLE) = length(payload.c) OR payload.a = timestamp OR payload.a = payload.b"
    " OR cast(payload.b AS BOOLEAN) OR (payload.a = payload.c) IS NULL OR key < headers['x'] OR offset = payload.a"
)
SIGNS = [b'{"a":', b'{"b":', b'"a":', b"[", b"]", b"{", b"}", b",", b'"', b"\\u", b"\\ud83d", b"\xff", b"\xf0\x9f"]
WORDS = [b"1e308", b"-", b"0", b"9" * 400, b"null", b"true", b'"x"', b"NaN", b'{"a": [1, {"b": 2}], "b": "y"}', b" "]
PIECES = st.sampled_from(SIGNS + WORDS)


@given(st.lists(PIECES, max_size=8).map(b"".join) | st.binary(max_size=30), st.binary(max_size=9))
def test_arbitrary_messages_are_harmless(value: bytes, other: bytes) -> None:
    record = Record(Offset(7), int.from_bytes(other[:7], "big"), other, value, (("x", other), ("x", other[:1])))
    batch = RecordBatch([record], topic="t", partition=3, uses=EVERYTHING.uses)
    assert EVERYTHING.matches(batch).size == 1
