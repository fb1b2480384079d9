"""Arrow record batches in the schema of Spark's Kafka source, both ways; splitting columns into batches."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidBatch
from millstream.core.topic import murmur2
from millstream.protocol.records.arrow import NAMES, SCHEMA, from_arrow, to_arrow
from millstream.protocol.records.batch import BatchHeader, iterate_headers
from millstream.protocol.records.columns import BinaryColumn, Columns
from millstream.protocol.records.decoder import FIELDS, decode_columns
from millstream.protocol.records.encoder import encode_source, source_of
from millstream.protocol.records.layout import Int64s
from millstream.protocol.records.partitioner import choose_partitions
from millstream.protocol.records.record import LOG_APPEND_TIME, NewRecord, decode_records, encode_batch

NOW_MS = 1_700_000_000_123
RECORDS = [
    NewRecord(b"k", b"v", (("region", b"eu"), ("ключ", None)), NOW_MS),
    NewRecord(None, b"", (), NOW_MS + 1),
    NewRecord(b"", None, (("", b""),), NOW_MS - 1),
]


def as_arrow(response: bytes | bytearray, names: Sequence[str] = NAMES) -> pa.Table:
    parts = decode_columns(response, fields=FIELDS.intersection(names))
    return pa.Table.from_batches([to_arrow(part, topic="orders", partition=3, names=names) for part in parts])


def encode_columns(columns: Columns, rows: Int64s | None = None, **options: Any) -> Iterator[bytearray]:
    return encode_source(source_of(columns, rows), **options)


def headers_of(batches: Iterator[bytearray]) -> list[BatchHeader]:
    return list(iterate_headers(b"".join(batches)))


def test_rows_have_the_schema_of_the_kafka_source() -> None:
    assert str(SCHEMA.field("key").type) == str(SCHEMA.field("value").type) == "binary"
    assert str(SCHEMA.field("timestamp").type) == "timestamp[us, tz=UTC]"
    table = as_arrow(encode_batch(RECORDS, base_offset=7))
    table.validate(full=True)
    time = datetime.datetime.fromtimestamp(NOW_MS // 1000, datetime.UTC).replace(microsecond=123_000)
    assert table.to_pylist()[0] == {
        "key": b"k",
        "value": b"v",
        "topic": "orders",
        "partition": 3,
        "offset": 7,
        "timestamp": time,
        "timestampType": 0,
        "headers": [{"key": "region", "value": b"eu"}, {"key": "ключ", "value": None}],
    }
    assert table["key"].to_pylist() == [b"k", None, b""]
    assert table["value"].to_pylist() == [b"v", b"", None]
    assert table["headers"].to_pylist()[1:] == [None, [{"key": "", "value": b""}]]


@pytest.mark.parametrize("name", NAMES)
def test_only_requested_columns_are_built(name: str) -> None:
    response = encode_batch(RECORDS, base_offset=7)
    table = as_arrow(response, (name,))
    table.validate(full=True)
    assert table.schema.names == [name]
    assert table.column(0).to_pylist() == as_arrow(response)[name].to_pylist()


def test_columns_that_were_not_decoded_cannot_be_requested() -> None:
    (columns,) = decode_columns(encode_batch(RECORDS), fields=())
    for name in ("key", "value", "headers"):
        with pytest.raises(ValueError, match="not decoded"):
            to_arrow(columns, topic="t", partition=0, names=(name,))


def test_timestamps_that_do_not_fit_into_microseconds_are_null() -> None:
    times = (-1, 0, 9_223_372_036_854_775, 9_223_372_036_854_776, 2**63 - 1, -(2**62))
    for time in times:
        (timestamp,) = (
            as_arrow(encode_batch([NewRecord(None, None, (), time)]))["timestamp"].cast(pa.int64()).to_pylist()
        )
        assert timestamp == (time * 1000 if abs(time) <= 9_223_372_036_854_775 else None)


def test_append_time_has_its_own_type() -> None:
    table = as_arrow(encode_batch(RECORDS, timestamp_type=LOG_APPEND_TIME))
    assert table["timestampType"].to_pylist() == [1, 1, 1]
    assert set(table["timestamp"].cast(pa.int64()).to_pylist()) == {(NOW_MS + 1) * 1000}


byte_strings = st.one_of(st.none(), st.binary(max_size=30))
headers = st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=5), byte_strings), max_size=3))
rows = st.lists(st.tuples(byte_strings, byte_strings, headers, st.integers(0, 2**42)), min_size=1, max_size=40)


@given(rows=rows, first=st.integers(0, 10), codec=st.integers(0, 4))
def test_arrow_batches_round_trip(
    rows: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None, int]], first: int, codec: int
) -> None:
    batch = pa.record_batch(
        {
            "key": pa.array([row[0] for row in rows], pa.binary()),
            "value": pa.array([row[1] for row in rows], pa.binary()),
            "headers": pa.array(
                [None if row[2] is None else [{"key": key, "value": value} for key, value in row[2]] for row in rows],
                SCHEMA.field("headers").type,
            ),
            "timestamp": pa.array([row[3] * 1000 for row in rows], SCHEMA.field("timestamp").type),
        }
    ).slice(first)
    response = b"".join(encode_columns(from_arrow(batch), compression=codec, batch_bytes_max=300))
    if not batch.num_rows:
        assert response == b""
        return
    found_rows = as_arrow(response)
    found_rows.validate(full=True)
    for name in ("key", "value", "timestamp"):
        assert found_rows[name].to_pylist() == batch[name].to_pylist()
    assert found_rows["headers"].to_pylist() == [value or None for value in batch["headers"].to_pylist()]


def test_strings_and_large_types_are_encoded_too() -> None:
    for kind in (pa.string(), pa.large_string(), pa.large_binary(), pa.binary_view(), pa.binary(2)):
        batch = pa.record_batch({"value": pa.array(["ab", None, "cd"], pa.string()).cast(pa.binary()).cast(kind)})
        response = b"".join(encode_columns(from_arrow(batch, default_timestamp_ms=5)))
        assert [record.value for record in decode_records(response)] == [b"ab", None, b"cd"]
        assert {(record.timestamp_ms, record.key, record.headers) for record in decode_records(response)} == {
            (5, None, ())
        }


def test_missing_timestamps_get_the_default() -> None:
    batch = pa.record_batch(
        {
            "value": pa.array([b"a", b"b"], pa.binary()),
            "timestamp": pa.array([None, 3_999], pa.timestamp("us", "UTC")),
        }
    )
    records = list(decode_records(b"".join(encode_columns(from_arrow(batch, default_timestamp_ms=8)))))
    assert [(record.offset, record.timestamp_ms) for record in records] == [(0, 8), (1, 3)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": pa.array([b"k"], pa.binary())}, "need a column `value`"),
        ({"value": pa.array([1.5])}, "cannot be written"),
        ({"value": pa.array([b""], pa.binary()), "headers": pa.array([{"a": 1}])}, "cannot be written"),
        (
            {"value": pa.array([b""], pa.binary()), "headers": pa.array([[None]], SCHEMA.field("headers").type)},
            "header is null",
        ),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(columns: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(InvalidBatch, match=message):
        from_arrow(pa.record_batch(columns))


def test_a_header_without_a_key_is_refused() -> None:
    rows = pa.array([[{"key": None, "value": b""}]], SCHEMA.field("headers").type)
    batch = pa.record_batch({"value": pa.array([b""], pa.binary()), "headers": rows})
    with pytest.raises(InvalidBatch, match="key of a header"):
        list(encode_columns(from_arrow(batch)))


def some_columns(count: int, size: int = 100, step_ms: int = 1) -> Columns:
    return Columns(
        offsets=np.arange(count, dtype=np.int64) * 3,
        timestamps_ms=np.arange(count, dtype=np.int64) * step_ms,
        attributes=np.zeros(count, np.int16),
        values=BinaryColumn(offsets=np.arange(count + 1, dtype=np.int32) * size, data=np.zeros(count * size, np.uint8)),
    )


@pytest.mark.parametrize("codec", range(5))
def test_batches_are_split_by_size_and_are_consecutive(codec: int) -> None:
    decoded_headers = headers_of(
        encode_columns(
            some_columns(100),
            compression=codec,
            producer_id=9,
            producer_epoch=3,
            base_sequence=2**31 - 50,
            transactional=True,
            batch_bytes_max=1100,
        )
    )
    assert [header.record_count for header in decoded_headers] == [10] * 10
    assert [header.base_sequence for header in decoded_headers] == [(2**31 - 50 + 10 * n) % 2**31 for n in range(10)]
    assert {(header.producer_id, header.producer_epoch, header.base_offset) for header in decoded_headers} == {
        (9, 3, 0)
    }
    assert all(header.is_transactional and header.compression == codec for header in decoded_headers)
    assert [(header.base_timestamp_ms, header.max_timestamp_ms) for header in decoded_headers[:2]] == [(0, 9), (10, 19)]


def test_a_record_beyond_the_limit_gets_its_own_batch() -> None:
    assert [header.record_count for header in headers_of(encode_columns(some_columns(3), batch_bytes_max=50))] == [
        1,
        1,
        1,
    ]


def test_timestamps_too_far_apart_are_split_into_batches() -> None:
    columns = some_columns(2)
    columns.timestamps_ms[:] = (-(2**63), 2**63 - 1)
    response = b"".join(encode_columns(columns))
    assert [record.timestamp_ms for record in decode_records(response)] == [-(2**63), 2**63 - 1]


def test_selected_rows_are_encoded_in_the_given_order() -> None:
    columns = some_columns(10)
    response = b"".join(encode_columns(columns, rows=np.array([7, 2, 2], np.int64)))
    assert [record.timestamp_ms for record in decode_records(response)] == [7, 2, 2]
    assert list(encode_columns(columns, rows=np.array([], np.int64))) == []
    for wrong in (10, -1):
        with pytest.raises(InvalidBatch, match="only 10 rows"):
            list(encode_columns(columns, rows=np.array([wrong], np.int64)))


@pytest.mark.parametrize("offsets", [[0, 5, 3], [0, 5, 11], [-1, 5, 6]])
def test_inconsistent_columns_are_refused(offsets: list[int]) -> None:
    column = BinaryColumn(offsets=np.array(offsets, np.int32), data=np.zeros(10, np.uint8))
    with pytest.raises(InvalidBatch, match="do not match"):
        choose_partitions(column, 2)
    with pytest.raises(InvalidBatch, match="do not match"):
        column.check()


def test_columns_of_different_lengths_are_refused() -> None:
    columns = some_columns(3)
    short = BinaryColumn(offsets=np.zeros(2, np.int32), data=np.empty(0, np.uint8))
    with pytest.raises(InvalidBatch, match="does not match"):
        list(
            encode_columns(
                Columns(
                    offsets=columns.offsets,
                    timestamps_ms=columns.timestamps_ms,
                    attributes=columns.attributes,
                    keys=short,
                )
            )
        )


@given(keys=st.lists(byte_strings, max_size=30), partitions=st.integers(1, 1000), first=st.integers(0, 9))
def test_keys_are_spread_as_kafka_does(keys: list[bytes | None], partitions: int, first: int) -> None:
    array = pa.array(keys, pa.binary())
    column = from_arrow(pa.record_batch({"key": array, "value": array}).slice(first)).keys
    assert column is not None
    expected = [-1 if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions for key in keys[first:]]
    assert choose_partitions(column, partitions).tolist() == expected


def test_known_hashes_of_the_java_client() -> None:
    """The values that Kafka's own tests expect of `Utils.murmur2`."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    array = pa.array(list(known), pa.binary())
    column = from_arrow(pa.record_batch({"key": array, "value": array})).keys
    assert column is not None
    assert choose_partitions(column, 2**31 - 1).tolist() == [
        (value & 0x7FFFFFFF) % (2**31 - 1) for value in known.values()
    ]


def test_a_topic_has_partitions() -> None:
    with pytest.raises(ValueError, match="at least one"):
        choose_partitions(BinaryColumn(offsets=np.zeros(1, np.int32), data=np.empty(0, np.uint8)), 0)
