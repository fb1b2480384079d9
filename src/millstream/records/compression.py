"""The four compressions of Kafka, with the decompressed size bounded before memory is asked for.

- gzip: one or several members.
- snappy: written in the block framing of the Java library ("xerial"); read with or without it, since librdkafka
  writes one raw block.
- lz4: the standard frame. Written with independent blocks, the only kind that Java clients read.
- zstd: one or several frames, with or without their content size.

The frames of lz4 and zstd are made of blocks of limited size, so that walking over the block headers gives an upper
bound of the output. A batch that would decompress to more than the caller allows is `CorruptBatch`, never a huge
allocation.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import cramjam

from millstream.model.errors import CorruptBatch, UnsupportedCompression
from millstream.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_SNAPPY,
    COMPRESSION_ZSTD,
    Buffer,
)

DECOMPRESSED_BYTES_MAX = 128 * 1024 * 1024
"""What one batch may decompress to unless the caller says otherwise."""

_GZIP_WINDOW = 31
_GZIP_LEVEL = 6
_GZIP_STEP_BYTES = 16 * 1024

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 * 1024
_XERIAL_BLOCK_LENGTH = struct.Struct(">i")
_SNAPPY_RATIO_MAX = 64

_LZ4_MAGIC = 0x184D2204
_LZ4_RATIO_MAX = 255
_LZ4_BLOCK_BYTES = {4: 64 * 1024, 5: 256 * 1024, 6: 1024 * 1024, 7: 4 * 1024 * 1024}
_LZ4_STORED_FLAG = 0x80000000

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_LEVEL = 3
_ZSTD_BLOCK_BYTES = 128 * 1024
_ZSTD_RAW, _ZSTD_REPEATED, _ZSTD_COMPRESSED, _ZSTD_RESERVED = range(4)

_UINT32 = struct.Struct("<I")


def compress(codec: int, data: Buffer) -> bytes:
    """Compress the records of a batch with the codec of that number."""
    if codec == COMPRESSION_NONE:
        return bytes(data)
    if codec == COMPRESSION_GZIP:
        return zlib.compress(data, _GZIP_LEVEL, _GZIP_WINDOW)
    if codec == COMPRESSION_SNAPPY:
        return _compress_snappy(memoryview(data))
    if codec == COMPRESSION_LZ4:
        return _compress_lz4(data)
    if codec == COMPRESSION_ZSTD:
        return bytes(cramjam.zstd.compress(data, _ZSTD_LEVEL))
    raise UnsupportedCompression(f"compression codec {codec} is unknown")


def decompress(codec: int, data: Buffer, *, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> Buffer:
    """Decompress the records of a batch; raise `CorruptBatch` for what is no such data or exceeds `bytes_max`."""
    view = memoryview(data)
    try:
        if codec == COMPRESSION_NONE:
            return _check_size(view, bytes_max)
        if codec == COMPRESSION_GZIP:
            return _decompress_gzip(view, bytes_max)
        if codec == COMPRESSION_SNAPPY:
            return _decompress_snappy(view, bytes_max)
        if codec == COMPRESSION_LZ4:
            output = bytearray(_bound(_walk_lz4(view), bytes_max))
            return memoryview(output)[: cramjam.lz4.decompress_into(view, output)]
        if codec == COMPRESSION_ZSTD:
            output = bytearray(_bound(_walk_zstd(view), bytes_max))
            return memoryview(output)[: cramjam.zstd.decompress_into(view, output)]
    except (cramjam.DecompressionError, zlib.error) as error:
        raise CorruptBatch(f"records do not decompress within {bytes_max} bytes: {error}") from error
    except (struct.error, IndexError) as error:
        raise CorruptBatch("compressed records are cut off") from error
    raise UnsupportedCompression(f"compression codec {codec} is unknown")


def _check_size(view: memoryview, bytes_max: int) -> memoryview:
    if len(view) > bytes_max:
        raise CorruptBatch(f"records take {len(view)} bytes, more than the {bytes_max} allowed")
    return view


def _bound(sizes: Iterator[int], bytes_max: int) -> int:
    """Add up the blocks until the limit is reached: no more than that is ever allocated."""
    total = 0
    for size in sizes:
        total += size
        if total >= bytes_max:
            return bytes_max
    return total


def _decompress_gzip(view: memoryview, bytes_max: int) -> bytes:
    pieces: list[bytes] = []
    room = bytes_max
    position = 0
    member = zlib.decompressobj(_GZIP_WINDOW)
    while position < len(view) or not pieces:
        if member.eof:
            member = zlib.decompressobj(_GZIP_WINDOW)
        # Small steps, since each member copies what it leaves over: many tiny members would cost a square.
        step = view[position : position + _GZIP_STEP_BYTES]
        pieces.append(member.decompress(step, room + 1))
        room -= len(pieces[-1])
        if room < 0:
            raise CorruptBatch(f"records decompress to more than the {bytes_max} bytes allowed")
        position += len(step) - len(member.unused_data)
    if not member.eof:
        raise CorruptBatch("compressed records are cut off")
    return b"".join(pieces) if len(pieces) > 1 else pieces[0]


def _compress_snappy(view: memoryview) -> bytes:
    pieces: list[bytes] = [_XERIAL_HEADER]
    for position in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[position : position + _XERIAL_BLOCK_BYTES]))
        pieces += (_XERIAL_BLOCK_LENGTH.pack(len(block)), block)
    return b"".join(pieces)


def _decompress_snappy(view: memoryview, bytes_max: int) -> memoryview:
    blocks = list(_xerial_blocks(view)) if view[:8] == _XERIAL_MAGIC else [view]
    sizes = [_snappy_size(block) for block in blocks]
    if sum(sizes) > bytes_max:
        raise CorruptBatch(f"records decompress to more than the {bytes_max} bytes allowed")
    output = memoryview(bytearray(sum(sizes)))
    position = 0
    for block, size in zip(blocks, sizes, strict=True):
        if size:
            cramjam.snappy.decompress_raw_into(block, output[position : position + size])
        elif len(block) != 1:
            raise CorruptBatch("a snappy block declares to be empty and is not")
        position += size
    return output


def _xerial_blocks(view: memoryview) -> Iterator[memoryview]:
    position = len(_XERIAL_HEADER)
    if len(view) < position:
        raise CorruptBatch("compressed records are cut off")
    while position < len(view):
        if view[position : position + len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
            # Streams that were put one behind the other: each begins with its own header.
            position += len(_XERIAL_HEADER)
            continue
        (length,) = _XERIAL_BLOCK_LENGTH.unpack_from(view, position)
        position += _XERIAL_BLOCK_LENGTH.size
        if length <= 0 or length > len(view) - position:
            raise CorruptBatch(f"a snappy block declares {length} bytes, {len(view) - position} are there")
        yield view[position : position + length]
        position += length


def _snappy_size(block: memoryview) -> int:
    """The declared size, believed only if a block of this length can hold as much."""
    size = int(cramjam.snappy.decompress_raw_len(block))
    if size > len(block) * _SNAPPY_RATIO_MAX:
        raise CorruptBatch(f"a snappy block of {len(block)} bytes declares {size} bytes")
    return size


def _compress_lz4(data: Buffer) -> bytes:
    compressor = cramjam.lz4.Compressor(level=0, content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _walk_lz4(view: memoryview) -> Iterator[int]:
    """Yield what each block can decompress to at most."""
    position = 0
    while position < len(view):
        (magic,) = _UINT32.unpack_from(view, position)
        flags, descriptor = view[position + 4], view[position + 5]
        block_bytes_max = _LZ4_BLOCK_BYTES.get(descriptor >> 4 & 7)
        if magic != _LZ4_MAGIC or block_bytes_max is None:
            raise CorruptBatch("records are no lz4 frame")
        checksum_bytes = 4 if flags & 0x10 else 0
        position += 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
        while True:
            (length,) = _UINT32.unpack_from(view, position)
            position += 4
            if length == 0:
                break
            stored = length & ~_LZ4_STORED_FLAG
            yield min(block_bytes_max, stored if length & _LZ4_STORED_FLAG else stored * _LZ4_RATIO_MAX)
            position += stored + checksum_bytes
        position += 4 if flags & 0x04 else 0


def _walk_zstd(view: memoryview) -> Iterator[int]:
    """Yield what each block can decompress to at most."""
    position = 0
    while position < len(view):
        (magic,) = _UINT32.unpack_from(view, position)
        if magic != _ZSTD_MAGIC:
            raise CorruptBatch("records are no zstd frame")
        flags = view[position + 4]
        descriptor_bytes, block_bytes_max = _zstd_descriptor(view, position + 5, flags)
        position += 5 + descriptor_bytes
        last = False
        while not last:
            header = view[position] | view[position + 1] << 8 | view[position + 2] << 16
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if kind == _ZSTD_RESERVED or size > _ZSTD_BLOCK_BYTES:
                raise CorruptBatch(f"a zstd block of kind {kind} declares {size} bytes")
            yield block_bytes_max if kind == _ZSTD_COMPRESSED else size
            position += 3 + (1 if kind == _ZSTD_REPEATED else size)
        position += 4 if flags & 0x04 else 0


def _zstd_descriptor(view: memoryview, position: int, flags: int) -> tuple[int, int]:
    """The length of the frame descriptor behind its flags, and what a block of the frame decompresses to at most."""
    dictionary_bytes = (0, 1, 2, 4)[flags & 3]
    if not flags & 0x20:
        return 1 + dictionary_bytes + (0, 2, 4, 8)[flags >> 6], _ZSTD_BLOCK_BYTES
    # A single segment: the window is the content itself, whose size stands behind the dictionary id.
    position += dictionary_bytes
    size_bytes = (1, 2, 4, 8)[flags >> 6]
    size = int.from_bytes(view[position : position + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    return dictionary_bytes + size_bytes, min(size, _ZSTD_BLOCK_BYTES)
