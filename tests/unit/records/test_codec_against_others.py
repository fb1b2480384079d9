"""Our plain and compiled codecs against three independent ones, in both directions."""

from __future__ import annotations

import datetime
import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import numpy as np
import pytest
from aiokafka.record.control_record import COMMIT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords as AiokafkaRecords
from hypothesis import given
from hypothesis import strategies as st
from kio.records.readers import read_batch
from kio.records.schema import NewRecordBatch, RecordHeader
from kio.records.schema import Record as KioRecord
from kio.records.writers import write_batch
from kio.static.primitive import i8, i16, i32, i64

from millstream.protocol.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_NONE,
    COMPRESSION_ZSTD,
    place_batch,
    read_header,
    stamp_append_time,
)
from millstream.protocol.records.columns import BinaryColumn, Columns, HeaderColumn
from millstream.protocol.records.decoder import decode_columns
from millstream.protocol.records.encoder import encode_source, source_of
from millstream.protocol.records.record import LOG_APPEND_TIME, NewRecord, Record, decode_records, encode_batch

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that is deprecated in Python 3.11.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.record.memory_records as kafka_python_records

ALL_CODECS = range(COMPRESSION_NONE, COMPRESSION_ZSTD + 1)
# kafka-python includes no library for the other three.
KAFKA_PYTHON_CODECS = (COMPRESSION_NONE, COMPRESSION_GZIP)

byte_strings = st.one_of(st.none(), st.just(b""), st.binary(max_size=40), st.integers(0, 700).map(lambda n: b"ab" * n))
headers = st.lists(st.tuples(st.text(max_size=8), byte_strings), max_size=4).map(tuple)
timestamps = st.one_of(st.integers(1_600_000_000_000, 1_800_000_000_000), st.integers(0, 2**45))
new_records = st.lists(st.builds(NewRecord, byte_strings, byte_strings, headers, timestamps), min_size=1, max_size=30)

Batch = bytes | bytearray
Build = Callable[[list[NewRecord], int], Batch]


def by_plain_encoder(records: list[NewRecord], codec: int) -> Batch:
    return encode_batch(records, compression=codec, producer_id=7, producer_epoch=1, base_sequence=5)


def by_compiled_encoder(records: list[NewRecord], codec: int) -> Batch:
    source = source_of(as_columns(records))
    (batch,) = encode_source(
        source, compression=codec, producer_id=7, producer_epoch=1, base_sequence=5, batch_bytes_max=2**30
    )
    return batch


def by_aiokafka(records: list[NewRecord], codec: int) -> Batch:
    return _by_builder(aiokafka_records.DefaultRecordBatchBuilder, records, codec)


def by_plain_aiokafka(records: list[NewRecord], codec: int) -> Batch:
    return _by_builder(aiokafka_records._DefaultRecordBatchBuilderPy, records, codec)


def by_kafka_python(records: list[NewRecord], codec: int) -> Batch:
    return _by_builder(kafka_python_records.DefaultRecordBatchBuilder, records, codec)


def _by_builder(make: Any, records: list[NewRecord], codec: int) -> Batch:
    builder = make(
        magic=2,
        compression_type=codec,
        is_transactional=False,
        producer_id=7,
        producer_epoch=1,
        base_sequence=5,
        batch_size=2**30,
    )
    for offset, record in enumerate(records):
        builder.append(offset, record.timestamp_ms, record.key, record.value, list(record.headers))
    return bytes(builder.build())


def by_kio(records: list[NewRecord], codec: int) -> Batch:
    assert codec == COMPRESSION_NONE
    batch = NewRecordBatch(
        producer_id=i64(7),
        producer_epoch=i16(1),
        base_sequence=i32(5),
        attributes=i16(0),
        records=tuple(
            KioRecord(
                attributes=i8(0),
                timestamp=_exact_time(record.timestamp_ms),
                offset=i64(offset),
                key=record.key,
                value=record.value,
                headers=tuple(RecordHeader(key=key.encode(), value=value) for key, value in record.headers),
            )
            for offset, record in enumerate(records)
        ),
    )
    target = io.BytesIO()
    write_batch(target, batch)
    return target.getvalue()


def _exact_time(timestamp_ms: int) -> Any:
    """Whether kio, which counts in floats, keeps the time exactly: only for whole seconds of a sane year."""
    return datetime.datetime.fromtimestamp(timestamp_ms // 1000, datetime.UTC)


def as_columns(records: list[NewRecord]) -> Columns:
    counts = np.cumsum([0] + [len(record.headers) for record in records]).astype(np.int32)
    flat = [header for record in records for header in record.headers]
    return Columns(
        offsets=np.arange(len(records), dtype=np.int64),
        timestamps_ms=np.array([record.timestamp_ms for record in records], np.int64),
        attributes=np.zeros(len(records), np.int16),
        keys=as_column([record.key for record in records]),
        values=as_column([record.value for record in records]),
        headers=HeaderColumn(
            offsets=counts,
            keys=as_column([key.encode() for key, _ in flat]),
            values=as_column([value for _, value in flat]),
        ),
    )


def as_column(values: list[bytes | None]) -> BinaryColumn:
    return BinaryColumn(
        offsets=np.cumsum([0] + [len(value or b"") for value in values]).astype(np.int32),
        data=np.frombuffer(b"".join(value or b"" for value in values), np.uint8),
        validity=np.packbits(np.array([value is not None for value in values], np.bool_), bitorder="little"),
        null_count=values.count(None),
    )


def as_records(parts: Iterator[Columns]) -> list[Record]:
    records: list[Record] = []
    for part in parts:
        assert part.keys is not None
        assert part.values is not None
        assert part.headers is not None
        rows = zip(
            part.offsets.tolist(),
            part.timestamps_ms.tolist(),
            part.keys.to_list(),
            part.values.to_list(),
            part.headers.to_list(),
            strict=True,
        )
        records += [Record(*row) for row in rows]
    return records


def without_offsets(records: list[Record]) -> list[NewRecord]:
    return [NewRecord(record.key, record.value, record.headers, record.timestamp_ms) for record in records]


def read_by_both(batches: Batch) -> list[Record]:
    plain = list(decode_records(batches))
    assert as_records(decode_columns(batches)) == plain
    return plain


def read_by_aiokafka(batch: Batch) -> list[NewRecord]:
    batch_read = AiokafkaRecords(bytes(batch)).next_batch()
    assert batch_read is not None
    assert batch_read.validate_crc()
    assert (batch_read.producer_id, batch_read.producer_epoch, batch_read.base_sequence) == (7, 1, 5)
    return [NewRecord(record.key, record.value, tuple(record.headers), record.timestamp) for record in batch_read]


def read_by_kafka_python(batch: Batch) -> list[NewRecord]:
    batch_read = kafka_python_records.MemoryRecords(bytes(batch)).next_batch()
    assert batch_read.validate_crc()
    assert (batch_read.producer_id, batch_read.producer_epoch, batch_read.base_sequence) == (7, 1, 5)
    return [NewRecord(record.key, record.value, tuple(record.headers), record.timestamp) for record in batch_read]


def at_whole_seconds(records: list[NewRecord]) -> list[NewRecord]:
    return [record._replace(timestamp_ms=record.timestamp_ms % 10**13 // 1000 * 1000) for record in records]


@pytest.mark.parametrize("build", [by_plain_encoder, by_compiled_encoder, by_aiokafka, by_plain_aiokafka])
@given(records=new_records, codec=st.sampled_from(ALL_CODECS))
def test_both_codecs_decode_what_any_codec_encodes(build: Build, records: list[NewRecord], codec: int) -> None:
    found_records = read_by_both(build(records, codec))
    assert without_offsets(found_records) == records
    assert [record.offset for record in found_records] == list(range(len(records)))


@given(records=new_records, codec=st.sampled_from(KAFKA_PYTHON_CODECS))
def test_both_codecs_decode_what_kafka_python_encodes(records: list[NewRecord], codec: int) -> None:
    assert without_offsets(read_by_both(by_kafka_python(records, codec))) == records


@given(records=new_records.map(at_whole_seconds))
def test_both_codecs_decode_what_kio_encodes(records: list[NewRecord]) -> None:
    assert without_offsets(read_by_both(by_kio(records, COMPRESSION_NONE))) == records


@pytest.mark.parametrize("build", [by_plain_encoder, by_compiled_encoder])
@given(records=new_records, codec=st.sampled_from(ALL_CODECS))
def test_aiokafka_decodes_what_both_codecs_encode(build: Build, records: list[NewRecord], codec: int) -> None:
    assert read_by_aiokafka(build(records, codec)) == records


@pytest.mark.parametrize("build", [by_plain_encoder, by_compiled_encoder])
@given(records=new_records, codec=st.sampled_from(KAFKA_PYTHON_CODECS))
def test_kafka_python_decodes_what_both_codecs_encode(build: Build, records: list[NewRecord], codec: int) -> None:
    assert read_by_kafka_python(build(records, codec)) == records


@pytest.mark.parametrize("build", [by_plain_encoder, by_compiled_encoder])
@given(records=new_records.map(at_whole_seconds))
def test_kio_decodes_what_both_codecs_encode(build: Build, records: list[NewRecord]) -> None:
    batch = bytes(build(records, COMPRESSION_NONE))
    record, size = read_batch(batch, 0)
    assert size == len(batch)
    assert (record.producer_id, record.producer_epoch, record.base_sequence) == (7, 1, 5)
    assert [
        NewRecord(
            record.key,
            record.value,
            tuple(((header.key or b"").decode(), header.value) for header in record.headers),
            int(record.timestamp.timestamp()) * 1000,
        )
        for record in record.records
    ] == records


@given(records=new_records, codec=st.sampled_from(ALL_CODECS))
def test_without_compression_all_codecs_encode_the_same_bytes(records: list[NewRecord], codec: int) -> None:
    assert by_compiled_encoder(records, codec) == by_plain_encoder(records, codec)
    theirs = bytearray(by_aiokafka(records, COMPRESSION_NONE))
    place_batch(theirs, read_header(theirs), 0, -1)
    assert theirs == by_plain_encoder(records, COMPRESSION_NONE)


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_big_batches(codec: int) -> None:
    small = [NewRecord(str(n).encode(), b"v" * (n % 50), (("n", None),), 1_700_000_000_000 + n) for n in range(20_000)]
    large = [NewRecord(None, os.urandom(3_000_000), (), 1), NewRecord(os.urandom(400_000), b"x" * 9_000_000, (), 0)]
    for records in (small, large):
        assert without_offsets(read_by_both(by_aiokafka(records, codec))) == records
        assert read_by_aiokafka(by_compiled_encoder(records, codec)) == records


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_append_time_is_seen_by_every_reader(codec: int) -> None:
    records = [NewRecord(b"k", b"v", (), 1000 + n) for n in range(3)]
    batch = bytearray(by_plain_encoder(records, codec))
    stamp_append_time(batch, read_header(batch), 5_000)
    assert [record.timestamp_ms for record in read_by_both(batch)] == [5_000] * 3
    assert [record.timestamp_ms for record in read_by_aiokafka(batch)] == [5_000] * 3
    if codec in KAFKA_PYTHON_CODECS:
        assert [record.timestamp_ms for record in read_by_kafka_python(batch)] == [5_000] * 3
    assert next(decode_columns(batch)).timestamp_types.tolist() == [LOG_APPEND_TIME] * 3


def test_control_batches_are_skipped_unless_asked_for() -> None:
    marker = NewRecord(b"\x00\x00\x00\x01", b"\x00\x00\x00\x00\x00\x00", (), 1)
    control = encode_batch([marker], base_offset=1, transactional=True, control=True, producer_id=7, producer_epoch=1)
    batches = encode_batch([NewRecord(None, b"before", (), 1)]) + control
    batches += encode_batch([NewRecord(None, b"after", (), 1)], base_offset=2)
    assert [record.value for record in read_by_both(batches)] == [b"before", b"after"]

    (columns,) = decode_columns(batches, control=True)
    assert columns.is_control.tolist() == [False, True, False]
    assert columns.is_transactional.tolist() == [False, True, False]
    assert as_records(decode_columns(batches, control=True)) == list(decode_records(batches, control=True))

    batch_read: Any = AiokafkaRecords(bytes(control)).next_batch()
    assert batch_read.is_control_batch
    assert batch_read.is_transactional
    assert ControlRecord.parse(next(batch_read).key) == COMMIT_MARKER
