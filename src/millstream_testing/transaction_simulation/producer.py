"""Transactional producers of the simulation, as real clients behave, in both versions of the protocol.

Several of them may run under one transactional id: those that were replaced without knowing it continue until they are
fenced. A producer of the first version sends nothing again that may still be on its way, since that version has no
epoch that identifies a late request; those of the second version may send again at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from millstream.broker.transactions.transaction import Initialized, InitRequest, ProducerRef
from millstream.core.errors import (
    FencedProducer,
    InvalidProducerMapping,
    InvalidTransactionState,
    MillstreamError,
    OutOfOrderSequence,
    ProducerFenced,
    TransactionAbortable,
)
from millstream.core.topic import TopicPartition
from millstream_testing.simulation.messages import make_batch
from millstream_testing.transaction_simulation.caller import Caller, GaveUp, Stage
from millstream_testing.transaction_simulation.model import Batch, ModelTransaction
from millstream_testing.transaction_simulation.node import COORDINATOR, GROUP, LEADER, Where

FIRST, SECOND = 1, 2
PRODUCE_VERSION = {FIRST: 11, SECOND: 12}
OFFSETS_VERSION = {FIRST: 4, SECOND: 5}
END_VERSION = {FIRST: 0, SECOND: 2}
TRIES = 8
RECORDS_MAX = 2
BATCHES_MAX = 2
COMMIT_CHANCE = 0.75
OFFSET_CHANCE = 0.4
LINGER_CHANCE = 0.1

FENCED = (ProducerFenced, FencedProducer, InvalidProducerMapping)
ABORTABLE = (GaveUp, InvalidTransactionState, OutOfOrderSequence, TransactionAbortable)


class Over(Exception):
    """A producer cannot continue."""


class Writer(Caller):
    """The common part of all producers: begin, and write to partitions."""

    def __init__(self, name: str, stage: Stage, transactional_id: str, *, instance: int, version: int) -> None:
        super().__init__(name, stage, may_be_late=version == SECOND)
        self.transactional_id = transactional_id
        self.instance = instance
        self.version = version
        self.who = ProducerRef(transactional_id, -1, -1)  # type: ignore[arg-type]
        self._sequences: dict[TopicPartition, int] = {}

    @property
    def coordinator(self) -> Where:
        """Return whom to send requests about transactions to."""
        return Where(COORDINATOR, self.transactional_id)

    async def initialize(self, *, expected: bool = False) -> None:
        """Get an id and an epoch, fencing the previous owner."""
        model = self.stage.model
        last = (self.who.producer_id, self.who.epoch) if expected else None
        request = InitRequest(
            transactional_id=self.transactional_id, timeout_ms=self.stage.plan.timeout_ms, expected=last
        )
        begun_before = model.begun_so_far()
        try:
            self.begin_with(await self.ask(self.coordinator, lambda node: node.init(request)))
        except (*FENCED, InvalidTransactionState) as error:
            raise Over(f"not initialized: {error}") from error
        model.initialized(self.transactional_id, self.instance, begun_before)

    def begin_with(self, transaction: Initialized) -> None:
        """Continue with this id and epoch; sequences of a new one start at 0 on every partition."""
        if transaction != self.who[1:]:
            self._sequences.clear()
            self.who = ProducerRef(self.transactional_id, *transaction)
            self.stage.record(self.name, f"is producer {transaction.producer_id} in epoch {transaction.epoch}")

    def begin(self, batch: Batch | None = None) -> ModelTransaction:
        return self.stage.model.begin(self.transactional_id, self.instance, batch)

    async def write(self, transaction: ModelTransaction, partition: TopicPartition) -> None:
        """Write some batches to one partition."""
        where = Where(LEADER, partition.topic, partition.partition)
        for _ in range(self.chance.randint(1, BATCHES_MAX)):
            sequence = self._sequences.get(partition, 0)
            count = self.chance.randint(1, RECORDS_MAX)
            values = [f"{transaction.number}.{partition.partition}.{sequence + at}" for at in range(count)]
            batch = make_batch(
                [value.encode() for value in values],
                now_ms=self.stage.clock.now_ms(),
                producer_id=self.who.producer_id,
                producer_epoch=self.who.epoch,
                base_sequence=sequence,
                transactional=True,
            )
            await self._send(where, batch)
            self._sequences[partition] = sequence + count
            transaction.written.update(dict.fromkeys(values, partition))

    async def _send(self, where: Where, batch: bytes) -> None:
        version = PRODUCE_VERSION[self.version]
        await self.ask(where, lambda node: node.write(version, self.transactional_id, where, batch), tries=TRIES)

    async def write_all(self, transaction: ModelTransaction) -> None:
        """Write to some partitions at once."""
        data = self.stage.plan.data
        chosen = self.chance.sample(data, self.chance.randint(1, len(data)))
        if self.version == FIRST:
            who = self.who
            await self.ask(self.coordinator, lambda node: node.add_partitions(who, chosen), tries=TRIES)
        await all_of([self.write(transaction, partition) for partition in chosen])


async def all_of(work: list[Awaitable[None]]) -> None:
    """Run everything, and raise the first error; being fenced takes precedence."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if isinstance(error, FENCED):
            raise error
    for error in errors:
        raise error


class TransactionalProducer(Writer):
    """Runs one transaction after the other."""

    def __init__(self, stage: Stage, transactional_id: str, *, instance: int, version: int) -> None:
        super().__init__(f"{transactional_id}/{instance}", stage, transactional_id, instance=instance, version=version)
        self._stopping = False

    def stop(self) -> None:
        """Begin no other transaction."""
        self._stopping = True

    async def run(self) -> None:
        """Run until stopped, or until another producer has taken over."""
        try:
            await self.initialize()
            while not self._stopping:
                await self._transaction()
                await asyncio.sleep(self.chance.expovariate(1 / self.stage.plan.produce_pause_s))
        except Over as over:
            self.stage.record(self.name, f"is over: {over}")

    async def _transaction(self) -> None:
        transaction = self.begin()
        self.stage.record(self.name, f"transaction {transaction.number}")
        try:
            await self.write_all(transaction)
            if self.chance.random() < OFFSET_CHANCE:
                await self._commit_offset(transaction)
            if self.chance.random() < LINGER_CHANCE:
                await asyncio.sleep(self.stage.plan.timeout_ms / 1000 * self.chance.uniform(0.5, 1.5))
        except ABORTABLE as error:
            self.stage.record(self.name, f"has to abort transaction {transaction.number}: {error}")
            await self._abort(transaction, is_clear=False)
        except FENCED as error:
            raise Over(f"fenced in transaction {transaction.number}: {error}") from error
        else:
            if self.chance.random() < COMMIT_CHANCE:
                await self._commit(transaction)
            else:
                await self._abort(transaction, is_clear=True)

    async def _commit_offset(self, transaction: ModelTransaction) -> None:
        group, who, version = self.transactional_id, self.who, OFFSETS_VERSION[self.version]
        partition = self.stage.plan.data[0]
        if self.version == FIRST:
            await self.ask(self.coordinator, lambda node: node.add_offsets(who, group), tries=TRIES)
        await self.ask(
            Where(GROUP, group),
            lambda node: node.commit_offset(version, who, group, partition, transaction.number),
            tries=TRIES,
        )
        transaction.offsets_acknowledged = True

    async def _commit(self, transaction: ModelTransaction) -> None:
        model, sends = self.stage.model, self.sends
        transaction.commit_sent = True
        try:
            ended = await self._end(commit=True)
        except MillstreamError as error:
            if self.sends == sends + 1:
                # Nothing else of this transaction was ever sent that could commit it.
                model.doom(transaction, f"its commit was refused: {error}")
            raise Over(f"transaction {transaction.number} was not committed: {error}") from error
        model.commit_acknowledged(transaction)
        self.stage.record(self.name, f"transaction {transaction.number} is committed")
        self._go_on(ended)

    async def _abort(self, transaction: ModelTransaction, *, is_clear: bool) -> None:
        try:
            ended = await self._end(commit=False)
        except InvalidTransactionState:
            # In the first version there may be nothing to abort yet.
            if self.version == SECOND:
                raise Over(f"transaction {transaction.number} cannot be aborted") from None
            is_clear = False
        except MillstreamError as error:
            raise Over(f"transaction {transaction.number} was not aborted: {error}") from error
        else:
            self.stage.model.doom(transaction, "its abort was acknowledged")
            self._go_on(ended)
        self.stage.record(self.name, f"transaction {transaction.number} is aborted")
        if self.version == FIRST and not is_clear:
            # Something may still be in flight, so the next transaction needs another epoch.
            await self.initialize(expected=True)

    async def _end(self, *, commit: bool) -> Initialized:
        who, version = self.who, END_VERSION[self.version]
        return await self.ask(self.coordinator, lambda node: node.end(who, commit=commit, version=version))

    def _go_on(self, ended: Initialized) -> None:
        if self.version == SECOND:
            self.begin_with(ended)
