"""The hash by which Kafka's default partitioner spreads keys."""

from __future__ import annotations

from numba import int64

from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Int32s

SEED = 0x9747B28C
MULTIPLIER = 0x5BD1E995
MASK = 0xFFFFFFFF


@compiled
def _word(data: Bytes, position: int, size: int) -> int:
    """Up to four bytes, the lowest first."""
    word = 0
    for index in range(size):
        word |= int64(data[position + index]) << (8 * index)
    return word


@compiled
def _murmur2(data: Bytes, position: int, length: int) -> int:
    """The 32-bit hash of `length` bytes."""
    value = (SEED ^ length) & MASK
    end = position + length
    while end - position >= 4:
        word = _word(data, position, 4) * MULTIPLIER & MASK
        word = (word ^ (word >> 24)) * MULTIPLIER & MASK
        value = (value * MULTIPLIER & MASK) ^ word
        position += 4
    if position < end:
        value = (value ^ _word(data, position, end - position)) * MULTIPLIER & MASK
    value = (value ^ (value >> 13)) * MULTIPLIER & MASK
    return value ^ (value >> 15)


@compiled
def choose_partitions(data: Bytes, positions: Int32s, lengths: Int32s, partitions: int, chosen: Int32s) -> None:
    """Write the partition of every key; -1 where the key is null."""
    for row in range(positions.size):
        if lengths[row] < 0:
            chosen[row] = -1
        else:
            hashed = _murmur2(data, int64(positions[row]), int64(lengths[row]))
            chosen[row] = (hashed & 0x7FFFFFFF) % partitions
