"""The four compressions of Kafka, with the decompressed size bounded before memory is allocated.

- gzip: one or several members.
- snappy: written in the block framing of the Java library ("xerial"); read with or without it, since librdkafka
  writes one raw block.
- lz4: the standard frame. Written with independent blocks, the only kind that Java clients read.
- zstd: one or several frames, with or without their content size.

The frames of lz4 and zstd are made of blocks of limited size, so that walking over the block headers gives an upper
bound of the output. A batch that would decompress to more than the limits allow is `CorruptBatch`, never a huge
allocation. All readers have the same limits: a node sets them from its configuration, and passes them to its child
processes through the environment, where clients may set them too.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator

import cramjam

from millstream.core.config import (
    COMPRESSION_RATIO_MAX,
    DECOMPRESSED_BYTES_MAX,
    DECOMPRESSED_BYTES_VARIABLE,
    LIMIT_VARIABLES,
    RATIO_VARIABLE,
)
from millstream.core.errors import BatchTooLarge, CorruptBatch, UnsupportedCompression
from millstream.protocol.records.batch import (
    COMPRESSION_GZIP,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_SNAPPY,
    COMPRESSION_ZSTD,
    Buffer,
)

RATIO_FREE_BYTES = 8 * 1024 * 1024
"""Every batch may decompress to this size, regardless of its ratio."""

_GZIP_WINDOW = 31
_GZIP_LEVEL = 6
_GZIP_STEP_BYTES = 16 * 1024
_GZIP_RATIO_MAX = 1032

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


def set_limits(decompressed_bytes_max: int, ratio_max: int) -> Callable[[], None]:
    """Set the limits for this process and its child processes; return a function that restores the previous ones."""
    global _limits
    previous = _limits, {name: os.environ.get(name) for name in LIMIT_VARIABLES}
    _limits = (decompressed_bytes_max, ratio_max)
    os.environ[DECOMPRESSED_BYTES_VARIABLE] = str(decompressed_bytes_max)
    os.environ[RATIO_VARIABLE] = str(ratio_max)

    def restore() -> None:
        global _limits
        _limits, variables = previous
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


def _limits_of_environment() -> tuple[int, int]:
    texts = (os.environ.get(DECOMPRESSED_BYTES_VARIABLE, ""), os.environ.get(RATIO_VARIABLE, ""))
    bytes_max = int(texts[0]) if texts[0].isdigit() else DECOMPRESSED_BYTES_MAX
    return bytes_max, int(texts[1]) if texts[1].isdigit() else COMPRESSION_RATIO_MAX


_limits = _limits_of_environment()


def decompressed_bytes_allowed(compressed_bytes: int) -> int:
    """Return the limit for a batch whose compressed records have this size."""
    bytes_max, ratio_max = _limits
    return min(bytes_max, max(RATIO_FREE_BYTES, compressed_bytes * ratio_max))


def check_declared_size(codec: int, data: Buffer) -> None:
    """Raise `BatchTooLarge` for records that declare a decompressed size beyond the limit.

    Records without a declared size, or with a false one, are caught when they are read.
    """
    view = memoryview(data)
    try:
        declared = _declared_bytes(codec, view)
    except (cramjam.DecompressionError, struct.error, IndexError):
        return
    allowed = decompressed_bytes_allowed(len(view))
    if declared > allowed:
        raise BatchTooLarge(
            f"the records of the batch decompress to {declared} bytes, {allowed} are allowed (decompressed-bytes-max "
            "and compression-ratio-max of the node); send smaller batches"
        )


def size_bound(codec: int, data: Buffer) -> int:
    """Return an upper bound of the decompressed size; 0 for invalid data."""
    view = memoryview(data)
    allowed = decompressed_bytes_allowed(len(view))
    try:
        if codec == COMPRESSION_NONE:
            return len(view)
        if codec == COMPRESSION_GZIP:
            return min(allowed, len(view) * _GZIP_RATIO_MAX)
        if codec == COMPRESSION_SNAPPY:
            return min(allowed, len(view) * _SNAPPY_RATIO_MAX)
        return _bound(_walk_lz4(view) if codec == COMPRESSION_LZ4 else _walk_zstd(view), allowed)
    except (CorruptBatch, struct.error, IndexError):
        return 0


def _declared_bytes(codec: int, view: memoryview) -> int:
    if codec == COMPRESSION_SNAPPY:
        # Blocks of the Java library hold 32 KiB each, too little to check each of them.
        return 0 if view[:8] == _XERIAL_MAGIC else int(cramjam.snappy.decompress_raw_len(view))
    if codec == COMPRESSION_GZIP:
        return int(_UINT32.unpack_from(view, len(view) - 4)[0])
    if codec == COMPRESSION_LZ4:
        return int.from_bytes(view[6:14], "little") if view[4] & 0x08 else 0
    if codec == COMPRESSION_ZSTD:
        return _zstd_content_bytes(view)
    return 0


def _zstd_content_bytes(view: memoryview) -> int:
    flags = view[4]
    size_bytes = (1 if flags & 0x20 else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (0 if flags & 0x20 else 1) + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(view[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)


def _too_large(bytes_max: int) -> CorruptBatch:
    return CorruptBatch(f"records decompress to more than the {bytes_max} bytes allowed")


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


def decompress(codec: int, data: Buffer, *, bytes_max: int | None = None) -> Buffer:
    """Decompress the records of a batch.

    Raises `CorruptBatch` for invalid data, or data that exceeds the limits or `bytes_max`.
    """
    view = memoryview(data)
    allowed = decompressed_bytes_allowed(len(view))
    bytes_max = allowed if bytes_max is None else min(allowed, bytes_max)
    try:
        if codec == COMPRESSION_NONE:
            return _check_size(view, bytes_max)
        if codec == COMPRESSION_GZIP:
            return _decompress_gzip(view, bytes_max)
        if codec == COMPRESSION_SNAPPY:
            return _decompress_snappy(view, bytes_max)
        if codec == COMPRESSION_LZ4:
            return _decompress_into(cramjam.lz4.decompress_into, view, _bound(_walk_lz4(view), bytes_max), bytes_max)
        if codec == COMPRESSION_ZSTD:
            return _decompress_into(cramjam.zstd.decompress_into, view, _bound(_walk_zstd(view), bytes_max), bytes_max)
    except (cramjam.DecompressionError, zlib.error) as error:
        raise CorruptBatch(f"records do not decompress: {error}") from error
    except (struct.error, IndexError) as error:
        raise CorruptBatch("compressed records are cut off") from error
    raise UnsupportedCompression(f"compression codec {codec} is unknown")


def _check_size(view: memoryview, bytes_max: int) -> memoryview:
    if len(view) > bytes_max:
        raise CorruptBatch(f"records take {len(view)} bytes, more than the {bytes_max} allowed")
    return view


def _decompress_into(
    into: Callable[[memoryview, bytearray], int], view: memoryview, bound: int, bytes_max: int
) -> memoryview:
    """Decompress into at most the bound; one byte more than allowed distinguishes too large from corrupt."""
    output = bytearray(bound + 1 if bound >= bytes_max else bound)
    try:
        size = into(view, output)
    except cramjam.DecompressionError:
        if bound < bytes_max:
            raise
        raise _too_large(bytes_max) from None
    if size > bytes_max:
        raise _too_large(bytes_max)
    return memoryview(output)[:size]


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
        # Small steps, since each member copies its remainder: many tiny members would take quadratic time.
        step = view[position : position + _GZIP_STEP_BYTES]
        pieces.append(member.decompress(step, room + 1))
        room -= len(pieces[-1])
        if room < 0:
            raise _too_large(bytes_max)
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
        raise _too_large(bytes_max)
    output = memoryview(bytearray(sum(sizes)))
    position = 0
    for block, size in zip(blocks, sizes, strict=True):
        if size:
            cramjam.snappy.decompress_raw_into(block, output[position : position + size])
        elif len(block) != 1:
            raise CorruptBatch("a snappy block declares that it is empty, but is not")
        position += size
    return output


def _xerial_blocks(view: memoryview) -> Iterator[memoryview]:
    position = len(_XERIAL_HEADER)
    if len(view) < position:
        raise CorruptBatch("compressed records are cut off")
    while position < len(view):
        if view[position : position + len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
            # Concatenated streams: each starts with its own header.
            position += len(_XERIAL_HEADER)
            continue
        (length,) = _XERIAL_BLOCK_LENGTH.unpack_from(view, position)
        position += _XERIAL_BLOCK_LENGTH.size
        if length <= 0 or length > len(view) - position:
            raise CorruptBatch(f"a snappy block declares {length} bytes, but only {len(view) - position} are left")
        yield view[position : position + length]
        position += length


def _snappy_size(block: memoryview) -> int:
    """Return the declared size, if a block of this length can hold it."""
    size = int(cramjam.snappy.decompress_raw_len(block))
    if size > len(block) * _SNAPPY_RATIO_MAX:
        raise CorruptBatch(f"a snappy block of {len(block)} bytes declares {size} bytes")
    return size


def _compress_lz4(data: Buffer) -> bytes:
    compressor = cramjam.lz4.Compressor(level=0, content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _walk_lz4(view: memoryview) -> Iterator[int]:
    """Yield the maximum decompressed size of each block."""
    position = 0
    while position < len(view):
        (magic,) = _UINT32.unpack_from(view, position)
        flags, descriptor = view[position + 4], view[position + 5]
        block_bytes_max = _LZ4_BLOCK_BYTES.get(descriptor >> 4 & 7)
        if magic != _LZ4_MAGIC or block_bytes_max is None:
            raise CorruptBatch("the records are not an lz4 frame")
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
    """Yield the maximum decompressed size of each block."""
    position = 0
    while position < len(view):
        (magic,) = _UINT32.unpack_from(view, position)
        if magic != _ZSTD_MAGIC:
            raise CorruptBatch("the records are not a zstd frame")
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
    """Return the length of the frame descriptor after its flags, and the maximum size of a decompressed block."""
    dictionary_bytes = (0, 1, 2, 4)[flags & 3]
    if not flags & 0x20:
        return 1 + dictionary_bytes + (0, 2, 4, 8)[flags >> 6], _ZSTD_BLOCK_BYTES
    # A single segment: the window is the content itself, whose size follows the dictionary id.
    position += dictionary_bytes
    size_bytes = (1, 2, 4, 8)[flags >> 6]
    size = int.from_bytes(view[position : position + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    return dictionary_bytes + size_bytes, min(size, _ZSTD_BLOCK_BYTES)
