"""Which partition of an internal topic a name belongs to: Kafka's rule, since its tools compute it too."""

from __future__ import annotations

from millstream.core.ids import PartitionIndex

_MINIMUM = -(2**31)


def java_hash(text: str) -> int:
    """`String.hashCode` of Java: over UTF-16 code units, in signed 32-bit arithmetic."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + ((high << 8) | low)) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def partition_for(name: str, partitions: int) -> PartitionIndex:
    """The partition that holds the state of this name."""
    hashed = java_hash(name)
    # Kafka takes the absolute value, and zero for the one number that has none.
    return PartitionIndex((0 if hashed == _MINIMUM else abs(hashed)) % partitions)
