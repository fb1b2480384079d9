"""The partition of a key: the rule of Kafka's Java client, so that all tools agree.

It is the murmur2 hash of the key, sign bit cleared, modulo the number of partitions. (librdkafka's default differs; it
follows this rule with `partitioner=murmur2_random`.)
"""

from __future__ import annotations

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_ROTATION = 24
_MASK = 0xFFFFFFFF


def partition_for_key(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit murmur2 hash with Kafka's seed."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ k >> _ROTATION) * _MULTIPLIER & _MASK
        h = h * _MULTIPLIER & _MASK ^ k
    if whole < length:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    h = (h ^ h >> 13) * _MULTIPLIER & _MASK
    return h ^ h >> 15
