"""One producer id, as a partition knows it."""

from __future__ import annotations

from typing import NamedTuple

PackedBatch = tuple[int, int, int, int, int]
"""A batch as it is stored."""


class ProducedBatch(NamedTuple):
    """One batch that a producer wrote."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


class Producer:
    """One producer id, its last batches, and its transaction."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_ms", "marker_offset", "open_from", "producer_id")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.last_ms = 0
        self.batches: list[ProducedBatch] = []
        self.open_from = -1
        """The first offset of its open transaction, or -1."""
        self.coordinator_epoch = -1
        """Of the coordinator that wrote its last marker, or -1."""
        self.marker_offset = -1
        """Where its last marker is, or -1."""
