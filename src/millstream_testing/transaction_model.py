"""A transaction coordinator whose log is a list, and partitions that can recognize a torn transaction."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord, Timers
from millstream.broker.transactions.shard import TransactionShard
from millstream.broker.transactions.transaction import (
    EPOCH_PER_TRANSACTION,
    Transaction,
    TransactionLimits,
    UnmarkedTransaction,
)
from millstream.core.errors import FencedProducer
from millstream.core.ids import ProducerId
from millstream_testing.clock import ManualClock

T = TypeVar("T")

TIMERS_MAX = 1000


class ReloadingCoordinator:
    """A shard that is reloaded from its compacted log after each step, and must be equal then."""

    def __init__(self, limits: TransactionLimits | None = None) -> None:
        self.clock = ManualClock()
        self.log: dict[bytes, StateRecord] = {}
        self._ids = count(1000)
        self._limits = limits or TransactionLimits()
        self._timers = Timers(self.clock)
        self.shard = self._load()

    def run(self, operation: Callable[[TransactionShard], Outcome[T]]) -> T:
        """Carry out an operation; its error is raised after its records are in the log, as a client would see it."""
        records, response = operation(self.shard)
        self._append(records)
        return response.result() if isinstance(response, Deferred) else response

    def advance_ms(self, milliseconds: int) -> None:
        """Advance the time and run timers."""
        self.clock.advance_ms(milliseconds)
        for timer in self._timers.take_due(TIMERS_MAX):
            self._append(timer.action())

    @property
    def transactions(self) -> dict[str, Transaction]:
        """Return everything that the coordinator knows."""
        return {transaction.transactional_id: transaction for transaction in self.shard}

    def _append(self, records: object) -> None:
        assert isinstance(records, list)
        for record in records:
            self.log.pop(record.key, None)
            if record.value is not None:
                self.log[record.key] = record
            self.shard.replay(record)
        before, queries = self.transactions, dict(self.shard.batches.queries)
        self._timers = Timers(self.clock)
        self.shard = self._load()
        assert self.transactions == before, "reading the log back gives another state"
        assert self.shard.batches.queries == queries, "reading the log back gives other batches"

    def _load(self) -> TransactionShard:
        shard = TransactionShard(
            self._timers,
            limits=self._limits,
            clock=self.clock,
            take_producer_id=lambda: ProducerId(next(self._ids)),
        )
        for record in self.log.values():
            shard.replay(record)
        shard.loaded()
        return shard


class _Open(NamedTuple):
    epoch: int
    transaction: int


class ModelPartition:
    """A partition that knows which transaction of a producer is open, and how each one ended."""

    def __init__(self) -> None:
        self.outcomes: dict[int, bool] = {}
        """By transaction: whether it was committed here."""
        self._open: dict[ProducerId, _Open] = {}
        self._epochs: dict[ProducerId, int] = {}

    @property
    def undecided(self) -> set[int]:
        return {entry.transaction for entry in self._open.values()}

    def append(self, producer_id: ProducerId, epoch: int, transaction: int) -> None:
        """Append a record of a transaction; raise `FencedProducer` if a later epoch has written."""
        if epoch < self._epochs.get(producer_id, -1):
            raise FencedProducer(f"epoch {epoch} of producer {producer_id}")
        before = self._open.get(producer_id)
        assert before is None or before.transaction == transaction, "two transactions are mixed"
        assert transaction not in self.outcomes, "a record comes after the end of its transaction"
        self._epochs[producer_id] = epoch
        self._open[producer_id] = _Open(epoch, transaction)

    def end(self, ending: UnmarkedTransaction) -> None:
        """Append a marker."""
        producer_id = ending.producer_id
        if ending.epoch < self._epochs.get(producer_id, -1):
            return
        opened = self._open.get(producer_id)
        if opened is not None and ending.version >= EPOCH_PER_TRANSACTION and opened.epoch == ending.epoch:
            return
        self._epochs[producer_id] = ending.epoch
        if opened is not None:
            del self._open[producer_id]
            self.outcomes[opened.transaction] = ending.commit
