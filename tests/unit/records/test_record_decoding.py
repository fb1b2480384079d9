"""Malformed records: both codecs must refuse each of them without trusting any length or count."""

from __future__ import annotations

import ast
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from millstream.core.errors import BatchRejected, CorruptBatch, InvalidBatch, UnsupportedCompression
from millstream.protocol.records import kernels
from millstream.protocol.records.batch import COMPRESSION_GZIP, COMPRESSION_LZ4, COMPRESSION_ZSTD, HEADER_BYTES
from millstream.protocol.records.compression import compress
from millstream.protocol.records.decoder import FIELDS, Batches, UnreadableBatch, decode_columns, find_batches
from millstream.protocol.records.record import HEADERS_MAX, NewRecord, decode_records, encode_batch

Read = Callable[[bytes], object]
BOTH: list[Read] = [lambda data: list(decode_records(data)), lambda data: list(decode_columns(data))]


def number(value: int) -> bytes:
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    digits = bytearray()
    while rest > 0x7F:
        digits.append(0x80 | rest & 0x7F)
        rest >>= 7
    return bytes(digits) + bytes([rest])


def record(body: bytes, length: int | None = None) -> bytes:
    return number(len(body) if length is None else length) + body


def batch_of(
    section: bytes, *, count: int = 1, last_delta: int | None = None, base_timestamp: int = 0, codec: int = 0
) -> bytes:
    batch = encode_batch([NewRecord(None, None, (), 0)], compression=codec)
    batch[HEADER_BYTES:] = compress(codec, section)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">iq", batch, 23, count - 1 if last_delta is None else last_delta, base_timestamp)
    struct.pack_into(">i", batch, 57, count)
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return bytes(batch)


GOOD = b"\x00" + number(0) + number(0) + number(1) + b"k" + number(2) + b"vv" + number(0)
START = b"\x00" + number(0) + number(0)


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("read", BOTH)
def test_the_unmodified_record_is_valid(read: Read, codec: int) -> None:
    assert read(batch_of(record(GOOD), codec=codec))


@pytest.mark.parametrize("read", BOTH)
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(record(GOOD, len(GOOD) + 1), id="record longer than the batch"),
        pytest.param(record(GOOD, len(GOOD) - 1), id="record shorter than its fields"),
        pytest.param(record(GOOD, -1), id="negative record length"),
        pytest.param(record(GOOD, 2**31 - 1), id="huge record length"),
        pytest.param(record(GOOD[:5]), id="record too short"),
        pytest.param(b"\x80\x80\x80\x80\x80\x80\x00" + GOOD, id="length in seven bytes"),
        pytest.param(b"\xff\xff\xff\xff\x7f" + GOOD, id="length beyond 32 bits"),
        pytest.param(b"\x80\x80\x80\x80\x80\x80\x80", id="batch ends within a number"),
        pytest.param(record(START + number(-2) + number(0) + number(0)), id="negative key length"),
        pytest.param(record(START + number(5) + b"k" + number(0) + number(0)), id="key longer than the record"),
        pytest.param(record(START + number(0) + number(-2) + number(0)), id="negative value length"),
        pytest.param(record(START + number(0) + number(2**31 - 1) + number(0)), id="huge value length"),
        pytest.param(record(START + number(-1) * 2 + number(-1)), id="negative header count"),
        pytest.param(record(START + number(-1) * 2 + number(2**31 - 1)), id="huge header count"),
        pytest.param(record(START + number(-1) * 2 + number(1) + number(-1) * 2), id="null header key"),
        pytest.param(
            record(START + number(-1) * 2 + number(1) + number(3) + b"k" + number(0)), id="header key too long"
        ),
        pytest.param(record(START + number(-1) * 2 + number(1) + number(0) + number(9)), id="header value too long"),
        pytest.param(record(START + number(-1) * 2 + number(2) + number(0) * 2), id="second header is missing"),
        pytest.param(record(GOOD + b"\x00"), id="bytes behind the headers"),
        pytest.param(record(GOOD) + b"\x00", id="bytes behind the last record"),
        pytest.param(record(b"\x00" + number(0) + number(1) + GOOD[3:]), id="offset delta beyond the batch"),
        pytest.param(record(b"\x00" + number(0) + number(-1) + GOOD[3:]), id="negative offset delta"),
        pytest.param(record(b"\x00" + b"\xff" * 9 + b"\x02" + GOOD[2:]), id="timestamp delta beyond 64 bits"),
        pytest.param(record(b"\x00" + b"\xff" * 10 + b"\x01" + GOOD[2:]), id="timestamp delta in eleven bytes"),
    ],
)
def test_malformed_records_are_refused(read: Read, section: bytes) -> None:
    for codec in (0, 3):
        with pytest.raises(CorruptBatch):
            read(batch_of(section, codec=codec))


@pytest.mark.parametrize("read", BOTH)
def test_overlong_varints_are_accepted(read: Read) -> None:
    assert record(GOOD) == b"\x12" + GOOD
    assert read(batch_of(b"\x92\x80\x80\x80\x00" + GOOD))


@pytest.mark.parametrize("read", BOTH)
def test_offset_deltas_must_increase(read: Read) -> None:
    with pytest.raises(CorruptBatch):
        read(batch_of(record(GOOD) * 2, count=2))


@pytest.mark.parametrize("read", BOTH)
def test_a_timestamp_must_fit_into_64_bits(read: Read) -> None:
    late = record(b"\x00" + number(1) + GOOD[2:])
    with pytest.raises(CorruptBatch, match="overflows"):
        read(batch_of(late, base_timestamp=2**63 - 1))


@pytest.mark.parametrize("read", BOTH)
def test_a_record_has_a_limited_number_of_headers(read: Read) -> None:
    def with_headers(count: int) -> bytes:
        return batch_of(record(START + number(-1) * 2 + number(count) + b"\x00\x00" * count))

    assert read(with_headers(HEADERS_MAX))
    with pytest.raises(CorruptBatch, match="headers"):
        read(with_headers(HEADERS_MAX + 1))


@pytest.mark.parametrize("codec", [0, 4])
@pytest.mark.parametrize("read", BOTH)
def test_a_count_is_not_trusted_for_allocation(read: Read, codec: int) -> None:
    batch = batch_of(record(GOOD), count=2**31 - 1, codec=codec)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch, match="records"):
            read(batch)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("read", BOTH)
def test_a_wrong_crc_is_refused(read: Read) -> None:
    batch = bytearray(batch_of(record(GOOD)))
    batch[-1] ^= 1
    with pytest.raises(CorruptBatch, match="CRC-32C"):
        read(bytes(batch))


@pytest.mark.parametrize("read", BOTH)
@pytest.mark.parametrize(
    ("at", "layout", "value", "error"),
    [
        (16, ">b", 1, CorruptBatch),
        (8, ">i", 10, CorruptBatch),
        (57, ">i", -1, CorruptBatch),
        (0, ">q", -1, CorruptBatch),
        (21, ">h", 7, UnsupportedCompression),
    ],
)
def test_malformed_headers_are_refused(
    read: Read, at: int, layout: str, value: int, error: type[BatchRejected]
) -> None:
    batch = bytearray(batch_of(record(GOOD)))
    struct.pack_into(layout, batch, at, value)
    with pytest.raises(error):
        read(bytes(batch))


@pytest.mark.parametrize("read", BOTH)
@pytest.mark.parametrize("codec", range(5))
def test_a_batch_that_compaction_left_empty_has_no_records(read: Read, codec: int) -> None:
    empty = bytearray(batch_of(b"", count=0, last_delta=4))
    del empty[HEADER_BYTES:]
    empty[22] |= codec
    struct.pack_into(">i", empty, 8, len(empty) - 12)
    struct.pack_into(">I", empty, 17, crc32c(bytes(empty[21:])))
    assert read(bytes(empty)) == []
    assert find_batches(bytes(empty)).next_offset == 5


def test_header_keys_that_are_not_utf8_are_decoded_with_replacements() -> None:
    keys = (b"caf\xe9", "ключ".encode(), b"\xe2\x82", b"\xed\xa0\x80", b"")
    section = b"".join(number(len(key)) + key + number(-1) for key in keys)
    batch = batch_of(record(START + number(-1) * 2 + number(len(keys)) + section))
    expected = [(key.decode("utf-8", "replace"), None) for key in keys]
    (plain,) = decode_records(batch)
    assert list(plain.headers) == expected
    (columns,) = decode_columns(batch)
    assert columns.headers is not None
    assert list(columns.headers.to_list()[0]) == expected


def batches(count: int, size: int, *, compression: int = 0) -> bytes:
    return b"".join(
        encode_batch(
            [NewRecord(None, b"%d" % (base + n), (), n) for n in range(size)], base_offset=base, compression=compression
        )
        for base in range(0, count * size, size)
    )


@pytest.mark.parametrize("codec", range(5))
def test_only_requested_offsets_are_decoded(codec: int) -> None:
    response = batches(10, 7, compression=codec)
    for start, end in ((0, 70), (3, 5), (13, 50), (69, 1000), (70, 80), (0, 0)):
        numbers = [
            int(value or b"")
            for part in decode_columns(response, start_offset=start, end_offset=end, rows_max=4)
            for value in (part.values.to_list() if part.values else [])
        ]
        assert numbers == list(range(start, min(end, 70)))


def test_only_requested_fields_are_decoded() -> None:
    (columns,) = decode_columns(batches(2, 3), fields=())
    assert (columns.keys, columns.values, columns.headers) == (None, None, None)
    assert columns.offsets.tolist() == list(range(6))
    (columns,) = decode_columns(batches(2, 3), fields=FIELDS)
    assert columns.keys is not None
    assert columns.keys.null_count == 6


@pytest.mark.parametrize("codec", [0, 3])
def test_rows_come_in_parts_of_a_limited_size(codec: int) -> None:
    parts = list(decode_columns(batches(5, 7, compression=codec), rows_max=10))
    assert [len(part) for part in parts] == [10, 10, 10, 5]


def test_many_headers_end_a_part_early() -> None:
    headers = (("h", b""),) * 1000
    response = encode_batch([NewRecord(None, None, headers, 0)] * 200)
    parts = list(decode_columns(response))
    assert sum(map(len, parts)) == 200
    assert all(part.headers is not None and len(part.headers.keys) <= 67_000 for part in parts)


def test_unneeded_batches_are_not_decoded() -> None:
    response = bytearray(batches(3, 2))
    response[HEADER_BYTES + 3] ^= 1
    assert sum(map(len, decode_columns(response, start_offset=2))) == 4
    with pytest.raises(CorruptBatch):
        list(decode_columns(response, start_offset=1))


def test_the_next_offset_includes_batches_without_visible_records() -> None:
    marker = encode_batch([NewRecord(b"\0\0\0\1", b"", (), 0)], base_offset=6, control=True)
    ranges = find_batches(batches(3, 2) + marker)
    assert ranges.next_offset == 7
    assert sum(map(len, decode_columns(ranges))) == 6
    assert find_batches(b"").next_offset is None
    assert isinstance(ranges, Batches)


def test_empty_input_has_no_records() -> None:
    assert list(decode_columns(b"")) == []
    assert list(decode_records(b"")) == []
    assert list(decode_columns(batches(1, 1)[:-1])) == []


def test_records_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="at least one"):
        encode_batch([])
    with pytest.raises(InvalidBatch, match="UTF-8"):
        encode_batch([NewRecord(None, None, (("\ud800", None),), 0)])
    with pytest.raises(InvalidBatch, match="apart"):
        encode_batch([NewRecord(None, None, (), -(2**63)), NewRecord(None, None, (), 2**63 - 1)])


def test_the_plain_codec_stays_light() -> None:
    code = "import sys, millstream.protocol.records.record; print({'numpy', 'numba', 'pyarrow'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_kernels_stand_alone() -> None:
    """Numba's cache notices a change only in the kernel's own file: no kernel may use code of another file."""
    # The kernel decorator is not compiled into it, and neither are types.
    types = {"Bytes", "Int16s", "Int32s", "Int64s", "Row", "Table"}
    records = "millstream.protocol.records"
    allowed = {f"{records}.layout": types, f"{records}.kernels.compiled": {"compiled"}}
    for path in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millstream"):
                assert {name.name for name in node.names} <= allowed.get(str(node.module), set()), path


def at_offset(batch: bytes | bytearray, offset: int) -> bytes:
    """Set the base offset, which the checksum does not cover."""
    return struct.pack(">q", offset) + bytes(batch[8:])


@pytest.mark.parametrize("codec", [COMPRESSION_GZIP, COMPRESSION_LZ4, COMPRESSION_ZSTD])
def test_undecodable_batches_are_reported_and_skipped(codec: int) -> None:
    good = encode_batch([NewRecord(b"k", b"v", (), 7) for _ in range(3)], compression=codec)
    bomb = encode_batch([NewRecord(None, bytes(2**21), (), 9)], compression=codec)
    broken = bytearray(good)
    broken[-1] ^= 1
    response = b"".join((at_offset(good, 0), at_offset(bomb, 3), at_offset(good, 4), at_offset(broken, 7)))
    passed_over: list[UnreadableBatch] = []
    columns = list(decode_columns(response, start_offset=1, decompressed_bytes_max=2**20, skip=passed_over.append))
    assert [offset for columns in columns for offset in columns.offsets.tolist()] == [1, 2, 4, 5, 6]
    assert [(skipped_range.start, skipped_range.end, skipped_range.timestamp_ms) for skipped_range in passed_over] == [
        (3, 4, 9),
        (7, 10, 7),
    ]
    assert "decompress to more than" in passed_over[0].reason
    assert "CRC" in passed_over[1].reason
    with pytest.raises(BatchRejected):
        list(decode_columns(response))
