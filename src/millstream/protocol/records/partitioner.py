"""The partitions of keys, for whole columns of keys."""

from __future__ import annotations

import numpy as np
from numba import int64

from millstream.protocol.records.columns import BinaryColumn
from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Int32s, read_only

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


@compiled
def _word(data: Bytes, position: int, size: int) -> int:
    """Up to four bytes, the lowest first."""
    word = 0
    for index in range(size):
        word |= int64(data[position + index]) << (8 * index)
    return word


@compiled
def _murmur2(data: Bytes, position: int, length: int) -> int:
    """Return the 32-bit hash of `length` bytes."""
    value = (_SEED ^ length) & _MASK
    end = position + length
    while end - position >= 4:
        word = _word(data, position, 4) * _MULTIPLIER & _MASK
        word = (word ^ (word >> 24)) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ word
        position += 4
    if position < end:
        value = (value ^ _word(data, position, end - position)) * _MULTIPLIER & _MASK
    value = (value ^ (value >> 13)) * _MULTIPLIER & _MASK
    return value ^ (value >> 15)


@compiled
def _write_partitions(data: Bytes, positions: Int32s, lengths: Int32s, partitions: int, chosen: Int32s) -> None:
    """Write the partition of every key; -1 where the key is null."""
    for row in range(positions.size):
        if lengths[row] < 0:
            chosen[row] = -1
        else:
            hashed = _murmur2(data, int64(positions[row]), int64(lengths[row]))
            chosen[row] = (hashed & 0x7FFFFFFF) % partitions


def choose_partitions(keys: BinaryColumn, partitions: int) -> Int32s:
    """The partition of every key by Kafka's rule, `positive(murmur2(key)) % partitions`; -1 where the key is null."""
    if partitions < 1:
        raise ValueError(f"a topic has at least one partition, not {partitions}")
    keys.check()
    chosen = np.empty(len(keys), np.int32)
    _write_partitions(read_only(keys.data), read_only(keys.offsets[:-1]), keys.lengths(), partitions, chosen)
    return chosen
