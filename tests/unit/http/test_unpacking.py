"""Unpacking messages from batches: no more than requested, and none that is too large to send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from millstream.core.errors import CorruptBatch
from millstream.core.ids import OffsetRange
from millstream.gateway.api import record_reader as bounds
from millstream.gateway.api.record_reader import ReadRecords, RecordReader
from millstream.protocol.private.leasing import LeaseResponse
from millstream.protocol.private.subscription_messages import LeasedRange, PartitionMessages, ReceiveResponse
from millstream.protocol.records import compression
from millstream.protocol.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_SNAPPY,
    COMPRESSION_ZSTD,
    BatchHeader,
    iterate_whole_headers,
)
from millstream.protocol.records.record import NewRecord, encode_batch

CODECS = (COMPRESSION_NONE, COMPRESSION_GZIP, COMPRESSION_SNAPPY, COMPRESSION_LZ4, COMPRESSION_ZSTD)
MIB = 1024 * 1024


@pytest.fixture
def unpacking() -> Iterator[RecordReader]:
    made = RecordReader()
    yield made
    made.close()


def batch(values: Sequence[bytes], codec: int = COMPRESSION_NONE, base_offset: int = 0) -> bytes:
    return bytes(encode_batch([NewRecord(None, value) for value in values], base_offset=base_offset, compression=codec))


def header_of(batches: bytes) -> BatchHeader:
    return next(iter(iterate_whole_headers(batches)))


def response_with(batches: bytes, *leases: tuple[int, int]) -> LeaseResponse:
    ranges = [LeasedRange(first, last + 1, 1, 1000) for first, last in leases]
    return LeaseResponse(ReceiveResponse(0, None, [PartitionMessages("t", bytes(16), 0, ranges, batches, 1000)]), 0.0)


def offsets(leased: ReadRecords) -> tuple[list[int], list[int], list[int]]:
    return (
        [message.record.offset for message in leased.messages],
        [message.record.offset for message in leased.surplus],
        [message.record.offset for message, _ in leased.unreadable],
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [10, 200_000])
async def test_only_leased_messages_are_unpacked_up_to_the_requested_bytes(
    unpacking: RecordReader, codec: int, size: int
) -> None:
    # The larger batches decompress to more than is read on the loop.
    batches = batch([bytes([at]) * size for at in range(10)], codec) + batch([b"x" * size] * 3, codec, base_offset=10)
    leased = await unpacking.read_leased(None, response_with(batches, (2, 3), (5, 8), (11, 12)), 3 * size)
    assert offsets(leased) == ([2, 3, 5], [6, 7, 8, 11, 12], [])
    assert [message.record.value for message in leased.messages] == [bytes([at]) * size for at in (2, 3, 5)]


async def test_messages_that_cannot_be_returned_are_all_unpacked(unpacking: RecordReader) -> None:
    at_most_once = response_with(batch([b"x" * 1000] * 3), (0, 2))
    parts = [msgspec.structs.replace(part, lease_ms=None) for part in at_most_once.response.partitions]
    leased = at_most_once._replace(response=msgspec.structs.replace(at_most_once.response, partitions=parts))
    assert offsets(await unpacking.read_leased(None, leased, 1)) == ([0, 1, 2], [], [])


async def test_the_first_message_is_unpacked_at_any_size(unpacking: RecordReader) -> None:
    leased = await unpacking.read_leased(None, response_with(batch([b"x" * 1000] * 3), (0, 2)), 1)
    assert offsets(leased) == ([0], [1, 2], [])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("large", [b"x" * 4 * MIB, b"\0" * MIB], ids=["as it is", "as JSON"])
async def test_a_message_too_large_for_http_does_not_block_the_others(
    unpacking: RecordReader, monkeypatch: pytest.MonkeyPatch, codec: int, large: bytes
) -> None:
    monkeypatch.setattr(bounds, "MESSAGE_BYTES_MAX", 2 * MIB)
    leased = await unpacking.read_leased(None, response_with(batch([b"a", large, b"b"], codec), (0, 2)), MIB)
    assert offsets(leased) == ([0, 2], [], [1])
    assert "at most 2097152 are sent over HTTP" in leased.unreadable[0][1]


async def test_a_damaged_batch_does_not_block_the_others(unpacking: RecordReader) -> None:
    good, bad = batch([b"a"]), bytearray(batch([b"b", b"c"], base_offset=1))
    bad[-1] ^= 1
    leased = await unpacking.read_leased(None, response_with(good + bytes(bad), (0, 2)), MIB)
    assert offsets(leased) == ([0], [], [1, 2])


async def test_a_batch_that_decompresses_to_too_much_is_not_read(
    unpacking: RecordReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_limits", (4 * MIB, 1_000_000))
    batches = batch([bytes(MIB)] * 5, COMPRESSION_ZSTD)
    leased = await unpacking.read_leased(None, response_with(batches, (0, 4)), MIB)
    assert offsets(leased) == ([], [], [0, 1, 2, 3, 4])
    with pytest.raises(CorruptBatch):
        await unpacking.read(batches, header_of(batches), [OffsetRange(0, 5)], MIB)


async def test_a_large_batch_is_read_in_slices(unpacking: RecordReader) -> None:
    values = [b"%d" % at * 20 for at in range(6000)]
    batches = batch(values, COMPRESSION_ZSTD)
    header, start, found_values = header_of(batches), 0, []
    while start <= header.last_offset:
        piece = await unpacking.read(batches, header, [OffsetRange(start, header.next_offset)], 50_000)
        assert sum(len(record.value or b"") for record in piece.records) <= 50_000
        found_values += [record.value for record in piece.records]
        start = piece.next_offset
    assert found_values == values
