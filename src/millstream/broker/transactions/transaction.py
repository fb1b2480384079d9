"""The state of one transactional id, a value that is replaced and never changed; requests, and batch commits.

    Empty ─▶ Ongoing ─▶ PrepareCommit ─▶ CompleteCommit ─▶ Ongoing …
                │  └──▶ PrepareAbort  ─▶ CompleteAbort
                └─▶ Prepared            a member of a batch commit: durable and without a timeout, until all are decided

The rules are Kafka's. In the second version of the protocol (KIP-890) each end of a transaction increments the epoch,
and the marker carries the new epoch, so that late requests of the old transaction are fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from millstream.core.errors import InvalidRequest, ProducerFenced
from millstream.core.ids import NO_PRODUCER_ID, ProducerId
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


class InitResponse(NamedTuple):
    producer_id: ProducerId
    epoch: int


@dataclass(frozen=True, slots=True)
class UnmarkedTransaction:
    """A decided transaction whose markers are not written yet."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int
    commit: bool
    version: int
    partitions: frozenset[TopicPartition]


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


BATCH_PREFIX: Final = "spark/"
NO_BATCH: Final = -1
_PARTS: Final = 4
_BATCH_MAX: Final = 2**63 - 1


class Attempt(NamedTuple):
    """The parts of such a transactional id.

    A transactional id of the form `spark/{query}/{batch}/{partition}/{random}` belongs to one attempt to write one part
    of one batch of a query. The query determines the partition of all of them, so one shard sees them all, and it
    stores the last committed batch of each query. `{random}` may begin with the name of a run and a hyphen. A driver
    that gives up aborts its run: attempts of the run that begin later, in tasks that Spark has not stopped yet, are
    refused, while another run may try the batch again.
    """

    query: str
    batch: int
    run: str = ""


class LastBatch(NamedTuple):
    """The last committed batch of a query, if any; when it was written; the last run that was aborted."""

    batch: int
    updated_ms: int
    ended_run: str = ""


def attempt_of(transactional_id: str) -> Attempt | None:
    """Parse a transactional id of this form; return None for all others. The query may contain slashes."""
    if not transactional_id.startswith(BATCH_PREFIX):
        return None
    parts = transactional_id[len(BATCH_PREFIX) :].rsplit("/", _PARTS - 1)
    if len(parts) != _PARTS or not all(parts) or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    batch = int(parts[1])
    run, hyphen, _ = parts[3].partition("-")
    return Attempt(parts[0], batch, run if hyphen else "") if batch <= _BATCH_MAX else None


def placement_of(transactional_id: str) -> str:
    """Return the key of the partition of `__transaction_state`: the id, or the query that it belongs to."""
    attempt = attempt_of(transactional_id)
    return transactional_id if attempt is None else attempt.query


def check_members(query: str, batch: int, members: tuple[ProducerRef, ...]) -> None:
    """Raise unless every member is an attempt at this batch of this query."""
    if not query or not 0 <= batch <= _BATCH_MAX:
        raise InvalidRequest(f"a batch has a query and a number from 0 on, not {query!r} and {batch}")
    for member in members:
        attempt = attempt_of(member.transactional_id)
        if attempt is None or (attempt.query, attempt.batch) != (query, batch):
            raise InvalidRequest(f"{member.transactional_id!r} is not an attempt at batch {batch} of query {query!r}")


NO_EPOCH: Final = -1
EPOCH_MAX: Final = 2**15 - 1
NO_TIME_MS: Final = -1
FIRST_VERSION: Final = 0
EPOCH_PER_TRANSACTION: Final = 2
"""The version of the protocol that increments the epoch with each transaction."""


class TransactionState(Enum):
    """The state of a transaction; the values are the names that Kafka's tools show."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARED = "Prepared"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"


ENDING: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT})
"""Decided; markers are still to be written."""

IDLE: Final = frozenset({TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})


def is_exhausted(epoch: int) -> bool:
    """Return whether the producer id needs a successor: the last epoch is reserved for fencing."""
    return epoch >= EPOCH_MAX - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """The producer of one transactional id and its current or last transaction."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH
    """The previous epoch, while its owner may still retry; -1 once a new producer has fenced it."""
    previous_producer_id: ProducerId = NO_PRODUCER_ID
    next_producer_id: ProducerId = NO_PRODUCER_ID
    """The successor of the producer id, whose epochs are exhausted; it applies when this transaction completes."""
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    started_ms: int = NO_TIME_MS
    updated_ms: int
    version: int = FIRST_VERSION

    @property
    def is_committing(self) -> bool:
        return self.state is TransactionState.PREPARE_COMMIT

    @property
    def deadline_ms(self) -> int | None:
        """Return when the transaction times out, on the wall clock; None if it does not."""
        return self.started_ms + self.timeout_ms if self.state is TransactionState.ONGOING else None

    def with_epoch_bumped(self, expected: int | None, *, timeout_ms: int, now_ms: int) -> Transaction:
        """Start a new producer (`expected` is None), or continue one after an error with its last epoch."""
        epoch, last_epoch = self.epoch + 1, NO_EPOCH
        if expected is not None and self.epoch not in (NO_EPOCH, expected):
            if expected != self.last_epoch or expected == NO_EPOCH:
                raise ProducerFenced(
                    f"producer {self.producer_id} of {self.transactional_id!r} is at epoch {self.epoch}, not {expected}"
                )
            # The response to its earlier request was lost; no other producer has started since.
            epoch, last_epoch = self.epoch, self.last_epoch
        elif expected is not None:
            last_epoch = self.epoch
        return self._restarted(
            producer_id=self.producer_id, epoch=epoch, last=last_epoch, timeout_ms=timeout_ms, at=now_ms
        )

    def with_new_producer(
        self, producer_id: ProducerId, *, keeps_last_epoch: bool, timeout_ms: int, now_ms: int
    ) -> Transaction:
        """Continue with another producer id: the epochs of this one are exhausted."""
        last_epoch = self.epoch if keeps_last_epoch else NO_EPOCH
        return self._restarted(producer_id=producer_id, epoch=0, last=last_epoch, timeout_ms=timeout_ms, at=now_ms)

    def with_partitions(self, added: Iterable[TopicPartition], *, version: int, now_ms: int) -> Transaction:
        """Add partitions; the first ones start the transaction."""
        started_ms = now_ms if self.state in IDLE else self.started_ms
        return replace(
            self,
            state=TransactionState.ONGOING,
            partitions=self.partitions.union(added),
            started_ms=started_ms,
            updated_ms=now_ms,
            previous_producer_id=self.producer_id,
            version=version,
        )

    def prepared(self, *, now_ms: int) -> Transaction:
        """Return the transaction as prepared: everything is written, and its batch decides it."""
        started_ms = now_ms if self.state in IDLE else self.started_ms
        return replace(self, state=TransactionState.PREPARED, started_ms=started_ms, updated_ms=now_ms)

    def ending(
        self, *, commit: bool, version: int, now_ms: int, next_producer_id: ProducerId = NO_PRODUCER_ID
    ) -> Transaction:
        """Return the transaction as decided; markers follow."""
        epoch, last_epoch = self.epoch, self.last_epoch
        if version >= EPOCH_PER_TRANSACTION:
            epoch, last_epoch = min(self.epoch + 1, EPOCH_MAX), self.epoch
        return replace(
            self,
            state=TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
            epoch=epoch,
            last_epoch=last_epoch,
            previous_producer_id=self.producer_id,
            next_producer_id=next_producer_id,
            # A transaction without writes may be aborted too, and still needs a start time.
            started_ms=now_ms if self.state in IDLE else self.started_ms,
            updated_ms=now_ms,
            version=version,
        )

    def complete(self, *, now_ms: int) -> Transaction:
        done = TransactionState.COMPLETE_COMMIT if self.is_committing else TransactionState.COMPLETE_ABORT
        rotates = self.version >= EPOCH_PER_TRANSACTION and self.next_producer_id != NO_PRODUCER_ID
        return replace(
            self,
            state=done,
            producer_id=self.next_producer_id if rotates else self.producer_id,
            epoch=0 if rotates else self.epoch,
            previous_producer_id=self.producer_id,
            next_producer_id=NO_PRODUCER_ID,
            partitions=frozenset(),
            updated_ms=now_ms,
        )

    def _restarted(self, *, producer_id: ProducerId, epoch: int, last: int, timeout_ms: int, at: int) -> Transaction:
        return replace(
            self,
            state=TransactionState.EMPTY,
            producer_id=producer_id,
            previous_producer_id=self.producer_id,
            epoch=epoch,
            last_epoch=last,
            timeout_ms=timeout_ms,
            partitions=frozenset(),
            started_ms=NO_TIME_MS,
            updated_ms=at,
        )
