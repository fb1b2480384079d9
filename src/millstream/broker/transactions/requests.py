"""Requests to the coordinator and its responses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from millstream.core.ids import ProducerId
from millstream.core.topic import TopicPartition


class ProducerRef(NamedTuple):
    """A producer, as it identifies itself."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """A producer starts, or continues after an error with its id and epoch."""

    transactional_id: str
    timeout_ms: int
    expected: tuple[ProducerId, int] | None = None


class Initialized(NamedTuple):
    """The id and epoch of a producer."""

    producer_id: ProducerId
    epoch: int


@dataclass(frozen=True, slots=True)
class Ending:
    """A decided transaction whose markers are not written yet."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int
    commit: bool
    version: int
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionDescription:
    """The description of one transactional id."""

    transactional_id: str
    state: str
    producer_id: ProducerId
    epoch: int
    timeout_ms: int
    started_ms: int
    updated_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionFilter:
    """Selects the transactions to list; an empty filter selects all."""

    states: Collection[str] = ()
    producer_ids: Collection[int] = ()
    longer_than_ms: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    """The bounds of one shard."""

    timeout_max_ms: int = 900_000
    id_expiration_ms: int = 604_800_000
    sweep_ms: int = 3_600_000
    ids_max: int = 1_000_000
    queries_max: int = 100_000
    tombstones_max: int = 1000
