"""The system's small numbers, each with its own type so that mypy keeps them apart, and message ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple, NewType

from millstream.core.headers import MESSAGE_ID


def message_id(topic_id: object, partition: int, offset: int, headers: Iterable[tuple[str, bytes | None]]) -> str:
    """Return the `message-id` header if the publisher set one, otherwise `topic-id/partition/offset`."""
    for name, value in headers:
        if name == MESSAGE_ID and value:
            return value.decode(errors="replace")
    return f"{topic_id}/{partition}/{offset}"


Offset = NewType("Offset", int)
"""The position of a record in its partition."""

Epoch = NewType("Epoch", int)
"""How many times the leadership of a partition has changed hands."""

PartitionIndex = NewType("PartitionIndex", int)
"""The number of a partition within its topic, from 0."""

NodeId = NewType("NodeId", int)
"""The number of a node within its cluster."""

ProducerId = NewType("ProducerId", int)
"""The id of an idempotent producer; -1 means none."""

ProducerEpoch = NewType("ProducerEpoch", int)
"""The instance of a producer id; older instances are fenced."""

SUBJECT_CHARACTERS_MAX: Final = 1024
CONTEXT_CHARACTERS_MAX: Final = 255
"""Bounds of the names of a schema registry."""

NO_OFFSET = Offset(-1)
NO_EPOCH = Epoch(-1)
NO_PRODUCER_ID = ProducerId(-1)
NO_TIMESTAMP_MS = -1


_RANGE_BITS: Final = 32
_RANGES: Final = 2**31 - 1


def first_producer_id(cluster_id: str) -> int:
    """Return the first producer id of a cluster.

    Each cluster has its own range, since mirrored batches keep the ids of their producers: one of 2^31 ranges, chosen
    by the cluster's id, above the ids of Apache Kafka, which count from 0.
    """
    number = int.from_bytes(hashlib.sha256(cluster_id.encode()).digest()[:8], "big")
    return (1 + number % _RANGES) << _RANGE_BITS


class OffsetRange(NamedTuple):
    """Consecutive offsets of a partition; `end` is exclusive."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of offsets, 0 if the end is not after the start."""
        return max(0, self.end - self.start)


class EpochEnd(NamedTuple):
    """An epoch and the offset after its last record."""

    epoch: Epoch
    end_offset: Offset
