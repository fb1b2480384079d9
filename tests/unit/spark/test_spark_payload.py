from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.pipelines.source.rows import parse_payloads
from millstream.pipelines.source.shape import Column

COLUMNS = [
    Column("id", pa.int64(), is_payload=True),
    Column("total", pa.float64(), is_payload=True),
    Column("name", pa.string(), is_payload=True),
    Column("paid", pa.bool_(), is_payload=True),
]


def parsed(*payloads: bytes | None) -> list[tuple[Any, ...]]:
    columns = parse_payloads(pa.array(payloads, pa.binary()), COLUMNS)
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def test_fields_are_typed_and_missing_ones_are_null() -> None:
    assert parsed(b'{"id": 1, "total": 2.5, "name": "a", "paid": true, "more": [1]}', b'{"total": 3}', None) == [
        (1, 2.5, "a", True),
        (None, 3.0, None, None),
        (None, None, None, None),
    ]


def test_one_bad_payload_does_not_affect_the_others() -> None:
    good = b'{"id": 1, "total": 2.5, "name": "a", "paid": true}'
    bad = [
        b"",
        b"no json",
        b"[1]",
        b'{"id": 1',
        b"\xff",
        b'"text"',
        b"{}{}",
        b'{"a":' + b"[" * 100_000,
        b'{"name":"\\ud800"}',
    ]
    rows = parsed(good, *bad, good)
    assert rows[0] == rows[-1] == (1, 2.5, "a", True)
    assert rows[1:-1] == [(None, None, None, None)] * len(bad)


def test_a_value_of_another_type_is_null_and_text_accepts_anything() -> None:
    assert parsed(b'{"id": "x", "total": "y", "name": {"a": [1]}, "paid": 1}') == [(None, None, '{"a":[1]}', None)]
    assert parsed(b'{"id": 1.5, "total": 1, "name": 7, "paid": "true"}') == [(None, 1.0, "7", None)]
    assert parsed(b'{"id": 99999999999999999999}') == [(None, None, None, None)]


def test_payloads_over_several_lines() -> None:
    assert parsed(b'{\n"id": 1\n}', b'{"id": 2}') == [(1, None, None, None), (2, None, None, None)]


values = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | st.integers(-(2**63), 2**63 - 1),
        "total": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "name": st.none() | st.text(max_size=20),
        "paid": st.none() | st.booleans(),
    },
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(values, st.booleans()), max_size=20))
def test_both_parsers_agree(rows: list[tuple[dict[str, Any], bool]]) -> None:
    payloads = [json.dumps(row, ensure_ascii=not odd).encode() for row, odd in rows]
    apart = [parsed(payload)[0] for payload in payloads]
    together = parsed(*payloads)
    # A payload over two lines makes the whole batch take the slow path.
    assert together == apart
    assert parsed(*payloads, b"{\n}")[:-1] == together
