"""What a coordinator knows of one transactional id: a value that is replaced as a whole, never changed.

    Empty ─▶ Ongoing ─▶ PrepareCommit ─▶ CompleteCommit ─▶ Ongoing …
                │  └──▶ PrepareAbort  ─▶ CompleteAbort
                └─▶ Prepared            a member of a batch commit: durable and without a timeout, until all are decided

The rules are Kafka's. Under the second version of the protocol (KIP-890) the epoch rises with each end of a
transaction, and the marker carries the new epoch, so that whatever comes late of the old transaction is fenced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from millstream.core.errors import ProducerFenced
from millstream.core.ids import NO_PRODUCER_ID, ProducerId
from millstream.core.topic import TopicPartition

NO_EPOCH: Final = -1
EPOCH_MAX: Final = 2**15 - 1
NO_TIME_MS: Final = -1
FIRST_VERSION: Final = 0
EPOCH_PER_TRANSACTION: Final = 2
"""The version of the protocol in which the epoch rises with each transaction."""


class TransactionState(Enum):
    """Where a transaction stands; the values are the names that Kafka's tools show."""

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
"""Decided, with markers still to be written."""

IDLE: Final = frozenset({TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})
"""Nothing is under way."""


def is_exhausted(epoch: int) -> bool:
    """Whether the producer id needs a successor: the last epoch is kept for fencing."""
    return epoch >= EPOCH_MAX - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """The producer of one transactional id and its current or last transaction."""

    transactional_id: str
    producer_id: ProducerId
    epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH
    """The epoch before, as long as its owner may still ask again; -1 when a new producer has fenced it."""
    previous_producer_id: ProducerId = NO_PRODUCER_ID
    next_producer_id: ProducerId = NO_PRODUCER_ID
    """The producer id that follows when this transaction completes, since the epochs of this one are exhausted."""
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    started_ms: int = NO_TIME_MS
    updated_ms: int
    version: int = FIRST_VERSION
    """The client's version of the transaction protocol."""

    @property
    def is_committing(self) -> bool:
        """Whether it has been decided to commit."""
        return self.state is TransactionState.PREPARE_COMMIT

    @property
    def deadline_ms(self) -> int | None:
        """When the transaction is aborted, on the wall clock; None when it has no timeout."""
        return self.started_ms + self.timeout_ms if self.state is TransactionState.ONGOING else None

    def with_epoch_bumped(self, expected: int | None, *, timeout_ms: int, now_ms: int) -> Transaction:
        """Start a new producer (`expected` is None), or continue one after an error with its last epoch."""
        epoch, last_epoch = self.epoch + 1, NO_EPOCH
        if expected is not None and self.epoch not in (NO_EPOCH, expected):
            if expected != self.last_epoch or expected == NO_EPOCH:
                raise ProducerFenced(
                    f"producer {self.producer_id} of {self.transactional_id!r} is at epoch {self.epoch}, not {expected}"
                )
            # It asked before and did not get the answer; no other producer came in between.
            epoch, last_epoch = self.epoch, self.last_epoch
        elif expected is not None:
            last_epoch = self.epoch
        return self._begun(producer_id=self.producer_id, epoch=epoch, last=last_epoch, timeout_ms=timeout_ms, at=now_ms)

    def with_new_producer(
        self, producer_id: ProducerId, *, keeps_last_epoch: bool, timeout_ms: int, now_ms: int
    ) -> Transaction:
        """The epochs of the producer id are used up: go on with another one."""
        last_epoch = self.epoch if keeps_last_epoch else NO_EPOCH
        return self._begun(producer_id=producer_id, epoch=0, last=last_epoch, timeout_ms=timeout_ms, at=now_ms)

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
        """Everything is written, and the batch that this is a member of decides."""
        started_ms = now_ms if self.state in IDLE else self.started_ms
        return replace(self, state=TransactionState.PREPARED, started_ms=started_ms, updated_ms=now_ms)

    def ending(
        self, *, commit: bool, version: int, now_ms: int, next_producer_id: ProducerId = NO_PRODUCER_ID
    ) -> Transaction:
        """It is decided; markers follow."""
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
            # One that never wrote may be aborted too, and still has to have begun at some time.
            started_ms=now_ms if self.state in IDLE else self.started_ms,
            updated_ms=now_ms,
            version=version,
        )

    def complete(self, *, now_ms: int) -> Transaction:
        """Every marker is written."""
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

    def _begun(self, *, producer_id: ProducerId, epoch: int, last: int, timeout_ms: int, at: int) -> Transaction:
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
