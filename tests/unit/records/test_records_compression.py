"""The four codecs: data of other libraries, wrong sizes, truncated input."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
import tracemalloc

import cramjam
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import BatchTooLarge, CorruptBatch, UnsupportedCompression
from millstream.protocol.records import compression
from millstream.protocol.records.batch import COMPRESSION_GZIP, COMPRESSION_LZ4, COMPRESSION_SNAPPY, COMPRESSION_ZSTD
from millstream.protocol.records.compression import check_declared_size, compress, decompress

ARROW_NAMES = {COMPRESSION_GZIP: "gzip", COMPRESSION_SNAPPY: "snappy", COMPRESSION_LZ4: "lz4", COMPRESSION_ZSTD: "zstd"}
CODECS = sorted(ARROW_NAMES)
MIXED = random.Random(1).randbytes(100_000) + b"abc" * 100_000


@given(data=st.one_of(st.binary(max_size=500), st.binary(max_size=20).map(lambda part: part * 9000)))
def test_compression_round_trips(data: bytes) -> None:
    for codec in range(5):
        assert bytes(decompress(codec, compress(codec, data))) == data


@pytest.mark.parametrize("codec", CODECS)
def test_an_independent_library_is_compatible(codec: int) -> None:
    theirs = pa.compress(MIXED, codec=ARROW_NAMES[codec], asbytes=True)
    assert bytes(decompress(codec, theirs)) == MIXED
    if codec != COMPRESSION_SNAPPY:  # Ours adds the framing of the Java library.
        assert pa.decompress(compress(codec, MIXED), len(MIXED), codec=ARROW_NAMES[codec], asbytes=True) == MIXED


def test_snappy_blocks_are_framed_as_java_does() -> None:
    framed = compress(COMPRESSION_SNAPPY, MIXED)
    assert framed[:16] == b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    position, plain = 16, b""
    while position < len(framed):
        (length,) = struct.unpack_from(">i", framed, position)
        plain += pa.decompress(
            framed[position + 4 : position + 4 + length],
            cramjam.snappy.decompress_raw_len(framed[position + 4 : position + 4 + length]),
            codec="snappy",
            asbytes=True,
        )
        position += 4 + length
    assert plain == MIXED


def test_snappy_framing_with_swapped_byte_order_is_read() -> None:
    framed = bytearray(compress(COMPRESSION_SNAPPY, MIXED))
    framed[8:16] = struct.pack("<ii", 1, 1)
    assert bytes(decompress(COMPRESSION_SNAPPY, framed)) == MIXED


def test_lz4_blocks_are_independent() -> None:
    """Java clients read no others; the frame has neither content size nor dictionary."""
    flags = compress(COMPRESSION_LZ4, MIXED)[4]
    assert flags & 0b0010_1001 == 0b0010_0000


@pytest.mark.parametrize("codec", CODECS)
def test_several_frames_are_read_as_one(codec: int) -> None:
    assert bytes(decompress(codec, compress(codec, b"one ") + compress(codec, MIXED))) == b"one " + MIXED


def test_many_gzip_members_take_linear_time() -> None:
    assert bytes(decompress(COMPRESSION_GZIP, gzip.compress(b"a") * 20_000)) == b"a" * 20_000


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_lz4_frames_of_every_kind(linked: bool, checksum: bool) -> None:
    compressor = cramjam.lz4.Compressor(level=9, content_checksum=checksum, block_linked=linked)
    compressor.compress(MIXED)
    assert bytes(decompress(COMPRESSION_LZ4, bytes(compressor.finish()))) == MIXED


def test_zstd_frames_without_content_size() -> None:
    compressor = cramjam.zstd.Compressor(level=3)
    compressor.compress(MIXED)
    frame = bytes(compressor.finish())
    assert frame[4] & 0b1110_0000 == 0, "the frame was to have no content size"
    assert bytes(decompress(COMPRESSION_ZSTD, frame)) == MIXED


@pytest.mark.parametrize("codec", range(5))
def test_the_limit_is_exact(codec: int) -> None:
    data = compress(codec, MIXED)
    assert bytes(decompress(codec, data, bytes_max=len(MIXED))) == MIXED
    with pytest.raises(CorruptBatch):
        decompress(codec, data, bytes_max=len(MIXED) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_a_decompression_bomb_costs_no_more_than_the_limit(codec: int) -> None:
    bomb = compress(codec, bytes(64 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            decompress(codec, bomb, bytes_max=1024 * 1024)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_declared_sizes_are_not_trusted() -> None:
    with pytest.raises(CorruptBatch, match="declares"):
        decompress(COMPRESSION_SNAPPY, b"\xff\xff\xff\xff\x07" + b"\x00" * 20)
    with pytest.raises(CorruptBatch, match="declares"):
        decompress(COMPRESSION_SNAPPY, b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 2**31 - 1) + b"abc")
    with pytest.raises(CorruptBatch, match="declares"):
        decompress(COMPRESSION_SNAPPY, b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, -5) + b"abc")
    with pytest.raises(CorruptBatch):
        decompress(COMPRESSION_ZSTD, b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x05\x00\x00" + b"\x00" * 20)


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_or_changed_data_is_refused_or_read(codec: int) -> None:
    data = compress(codec, b"hello " * 50)
    # Framed snappy is complete at the end of any block.
    whole = {16} if codec == COMPRESSION_SNAPPY else set()
    for end in set(range(len(data))) - whole:
        with pytest.raises(CorruptBatch):
            decompress(codec, data[:end])
    rng = random.Random(codec)
    for _ in range(500):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(CorruptBatch):
            decompress(codec, changed, bytes_max=100_000)


@pytest.mark.parametrize("codec", CODECS)
def test_noise_is_refused(codec: int) -> None:
    for noise in (b"noise, nothing but noise", b"\x00" * 100):
        with pytest.raises(CorruptBatch):
            decompress(codec, noise)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UnsupportedCompression):
        compress(5, b"")
    with pytest.raises(UnsupportedCompression):
        decompress(7, b"")


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_size_and_ratio_limits_apply_everywhere(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "RATIO_FREE_BYTES", 100_000)
    monkeypatch.setattr(compression, "_limits", (1_000_000, 10))
    assert len(decompress(codec, compress(codec, bytes(100_000)))) == 100_000
    with pytest.raises(CorruptBatch, match="decompress to more than"):
        decompress(codec, compress(codec, bytes(900_000)))
    noise = random.Random(codec).randbytes(900_000)
    assert len(decompress(codec, compress(codec, noise))) == 900_000
    with pytest.raises(CorruptBatch, match="decompress to more than"):
        decompress(codec, compress(codec, noise + bytes(200_000)))


def test_declared_sizes_of_batches_are_checked_on_arrival() -> None:
    over = bytes(65 * 1024 * 1024)
    declaring = {
        COMPRESSION_GZIP: compress(COMPRESSION_GZIP, over),
        COMPRESSION_SNAPPY: bytes(cramjam.snappy.compress_raw(over)),
        COMPRESSION_ZSTD: compress(COMPRESSION_ZSTD, over),
    }
    for codec, data in declaring.items():
        with pytest.raises(BatchTooLarge, match="decompressed-bytes-max"):
            check_declared_size(codec, data)
    for codec in CODECS:
        check_declared_size(codec, compress(codec, MIXED))
        check_declared_size(codec, b"")
        check_declared_size(codec, b"abc")
