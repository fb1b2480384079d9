"""The system's small numbers, each with its own type so that mypy keeps them apart."""

from typing import NamedTuple, NewType

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

NO_OFFSET = Offset(-1)
NO_EPOCH = Epoch(-1)
NO_PRODUCER_ID = ProducerId(-1)
NO_TIMESTAMP_MS = -1


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
