"""Transactional producers of the simulation, as real clients behave, in both versions of the protocol.

Several of them may run under one transactional id: replaced producers continue until they are fenced. A producer of the
first version does not retry a request that may still be in flight, since that version has no epoch to identify a late
request; producers of the second version may retry at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from millstream.broker.transactions.transaction import InitRequest, InitResponse, ProducerRef
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
from millstream_testing.simulation.loop import Process
from millstream_testing.simulation.workload import make_batch
from millstream_testing.transaction_simulation.caller import Caller, ClientContext, RetriesExhausted
from millstream_testing.transaction_simulation.model import Batch, ModelTransaction
from millstream_testing.transaction_simulation.node import COORDINATOR, GROUP, LEADER, RequestTarget

FIRST, SECOND = 1, 2
PRODUCE_VERSION = {FIRST: 11, SECOND: 12}
OFFSETS_VERSION = {FIRST: 4, SECOND: 5}
END_VERSION = {FIRST: 0, SECOND: 2}
ATTEMPTS_MAX = 8
RECORDS_MAX = 2
BATCHES_MAX = 2
COMMIT_CHANCE = 0.75
OFFSET_CHANCE = 0.4
LINGER_CHANCE = 0.1

FENCED = (ProducerFenced, FencedProducer, InvalidProducerMapping)
ABORTABLE = (RetriesExhausted, InvalidTransactionState, OutOfOrderSequence, TransactionAbortable)


class ProducerEnded(Exception):
    """The producer cannot continue."""


class Writer(Caller):
    """The common part of all producers: begin, and write to partitions."""

    def __init__(
        self, name: str, context: ClientContext, transactional_id: str, *, instance: int, version: int
    ) -> None:
        super().__init__(name, context, may_be_late=version == SECOND)
        self.transactional_id = transactional_id
        self.instance = instance
        self.version = version
        self.who = ProducerRef(transactional_id, -1, -1)  # type: ignore[arg-type]
        self._sequences: dict[TopicPartition, int] = {}

    @property
    def coordinator(self) -> RequestTarget:
        return RequestTarget(COORDINATOR, self.transactional_id)

    async def initialize(self, *, expected: bool = False) -> None:
        """Get an id and an epoch, fencing the previous owner."""
        model = self.context.model
        last = (self.who.producer_id, self.who.epoch) if expected else None
        request = InitRequest(
            transactional_id=self.transactional_id, timeout_ms=self.context.plan.timeout_ms, expected=last
        )
        begun_before = model.begun_so_far()
        try:
            self.use_identity(await self.send(self.coordinator, lambda node: node.init(request)))
        except (*FENCED, InvalidTransactionState) as error:
            raise ProducerEnded(f"not initialized: {error}") from error
        model.initialized(self.transactional_id, self.instance, begun_before)

    def use_identity(self, transaction: InitResponse) -> None:
        """Use this id and epoch; if they are new, sequences start at 0 on every partition."""
        if transaction != self.who[1:]:
            self._sequences.clear()
            self.who = ProducerRef(self.transactional_id, *transaction)
            self.context.record(self.name, f"is producer {transaction.producer_id} in epoch {transaction.epoch}")

    def begin(self, batch: Batch | None = None) -> ModelTransaction:
        return self.context.model.begin(self.transactional_id, self.instance, batch)

    async def write(self, transaction: ModelTransaction, partition: TopicPartition) -> None:
        target = RequestTarget(LEADER, partition.topic, partition.partition)
        for _ in range(self.rng.randint(1, BATCHES_MAX)):
            sequence = self._sequences.get(partition, 0)
            count = self.rng.randint(1, RECORDS_MAX)
            values = [f"{transaction.number}.{partition.partition}.{sequence + at}" for at in range(count)]
            batch = make_batch(
                [value.encode() for value in values],
                now_ms=self.context.clock.now_ms(),
                producer_id=self.who.producer_id,
                producer_epoch=self.who.epoch,
                base_sequence=sequence,
                transactional=True,
            )
            await self._send(target, batch)
            self._sequences[partition] = sequence + count
            transaction.written.update(dict.fromkeys(values, partition))

    async def _send(self, target: RequestTarget, batch: bytes) -> None:
        version = PRODUCE_VERSION[self.version]
        await self.send(
            target, lambda node: node.write(version, self.transactional_id, target, batch), attempts_max=ATTEMPTS_MAX
        )

    async def write_all(self, transaction: ModelTransaction) -> None:
        """Write to some partitions at once."""
        data = self.context.plan.data
        chosen = self.rng.sample(data, self.rng.randint(1, len(data)))
        if self.version == FIRST:
            who = self.who
            await self.send(self.coordinator, lambda node: node.add_partitions(who, chosen), attempts_max=ATTEMPTS_MAX)
        await all_of([self.write(transaction, partition) for partition in chosen])


async def all_of(work: list[Awaitable[None]]) -> None:
    """Run everything concurrently, and raise the first error, with precedence for being fenced."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if isinstance(error, FENCED):
            raise error
    for error in errors:
        raise error


class TransactionalProducer(Writer):
    """Runs one transaction after the other."""

    def __init__(self, context: ClientContext, transactional_id: str, *, instance: int, version: int) -> None:
        super().__init__(
            f"{transactional_id}/{instance}", context, transactional_id, instance=instance, version=version
        )
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Run until stopped, or until another producer has taken over."""
        try:
            await self.initialize()
            while not self._stopping:
                await self._transaction()
                await asyncio.sleep(self.rng.expovariate(1 / self.context.plan.produce_pause_s))
        except ProducerEnded as over:
            self.context.record(self.name, f"is over: {over}")

    async def _transaction(self) -> None:
        transaction = self.begin()
        self.context.record(self.name, f"transaction {transaction.number}")
        try:
            await self.write_all(transaction)
            if self.rng.random() < OFFSET_CHANCE:
                await self._commit_offset(transaction)
            if self.rng.random() < LINGER_CHANCE:
                await asyncio.sleep(self.context.plan.timeout_ms / 1000 * self.rng.uniform(0.5, 1.5))
        except ABORTABLE as error:
            self.context.record(self.name, f"has to abort transaction {transaction.number}: {error}")
            await self._abort(transaction, is_clear=False)
        except FENCED as error:
            raise ProducerEnded(f"fenced in transaction {transaction.number}: {error}") from error
        else:
            if self.rng.random() < COMMIT_CHANCE:
                await self._commit(transaction)
            else:
                await self._abort(transaction, is_clear=True)

    async def _commit_offset(self, transaction: ModelTransaction) -> None:
        group, who, version = self.transactional_id, self.who, OFFSETS_VERSION[self.version]
        partition = self.context.plan.data[0]
        if self.version == FIRST:
            await self.send(self.coordinator, lambda node: node.add_offsets(who, group), attempts_max=ATTEMPTS_MAX)
        await self.send(
            RequestTarget(GROUP, group),
            lambda node: node.commit_offset(version, who, group, partition, transaction.number),
            attempts_max=ATTEMPTS_MAX,
        )
        transaction.offsets_acknowledged = True

    async def _commit(self, transaction: ModelTransaction) -> None:
        model, sends = self.context.model, self.sends
        transaction.commit_sent = True
        try:
            ended = await self._end(commit=True)
        except MillstreamError as error:
            if self.sends == sends + 1:
                # No other request of this transaction could have committed it.
                model.mark_aborted(transaction, f"its commit was refused: {error}")
            raise ProducerEnded(f"transaction {transaction.number} was not committed: {error}") from error
        model.commit_acknowledged(transaction)
        self.context.record(self.name, f"transaction {transaction.number} is committed")
        self._adopt_identity(ended)

    async def _abort(self, transaction: ModelTransaction, *, is_clear: bool) -> None:
        try:
            ended = await self._end(commit=False)
        except InvalidTransactionState:
            # In the first version there may be nothing to abort yet.
            if self.version == SECOND:
                raise ProducerEnded(f"transaction {transaction.number} cannot be aborted") from None
            is_clear = False
        except MillstreamError as error:
            raise ProducerEnded(f"transaction {transaction.number} was not aborted: {error}") from error
        else:
            self.context.model.mark_aborted(transaction, "its abort was acknowledged")
            self._adopt_identity(ended)
        self.context.record(self.name, f"transaction {transaction.number} is aborted")
        if self.version == FIRST and not is_clear:
            # Something may still be in flight, so the next transaction needs another epoch.
            await self.initialize(expected=True)

    async def _end(self, *, commit: bool) -> InitResponse:
        who, version = self.who, END_VERSION[self.version]
        return await self.send(self.coordinator, lambda node: node.end(who, commit=commit, version=version))

    def _adopt_identity(self, ended: InitResponse) -> None:
        if self.version == SECOND:
            self.use_identity(ended)


REPLACED_AFTER_S = 8.0
PAUSED_S = 4.0
KILL_CHANCE, PAUSE_CHANCE = 0.4, 0.3
POLL_S = 0.5
PRODUCERS_MAX = 12


class Supervisor:
    """The producers of one transactional id."""

    def __init__(self, context: ClientContext, transactional_id: str, version: int) -> None:
        self.transactional_id = transactional_id
        self._context = context
        self._version = version
        self._rng = context.plan.rng(f"supervisor {transactional_id}")
        self._running: list[tuple[TransactionalProducer, Process, asyncio.Task[None]]] = []
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop every producer after its current transaction."""
        self._stopping.set()
        for producer, process, _ in self._running:
            producer.stop()
            self._context.loop.resume(process)

    @property
    def is_done(self) -> bool:
        """Whether no producer is active."""
        return self._stopping.is_set() and all(task.done() or not process.alive for _, process, task in self._running)

    def failure(self) -> BaseException | None:
        done = (task for _, process, task in self._running if task.done() and process.alive)
        return next((error for task in done if (error := task.exception()) is not None), None)

    async def run(self) -> None:
        for instance in range(PRODUCERS_MAX):
            if self._stopping.is_set():
                return
            task = self._start(instance)
            wait_s = self._rng.expovariate(1 / REPLACED_AFTER_S)
            await asyncio.wait([task], timeout=wait_s)
            if self._stopping.is_set():
                return
            await self._abandon(*self._running[-1])

    def _start(self, instance: int) -> asyncio.Task[None]:
        producer = TransactionalProducer(self._context, self.transactional_id, instance=instance, version=self._version)
        process = self._context.loop.start_process(producer.name)
        task = self._context.loop.spawn(process, producer.run(), name=producer.name)
        self._running.append((producer, process, task))
        return task

    async def _abandon(self, producer: TransactionalProducer, process: Process, task: asyncio.Task[None]) -> None:
        """Kill a producer, pause it, or let it continue; the next one starts in any case."""
        drawn = self._rng.random()
        if task.done():
            await asyncio.sleep(POLL_S)
        elif drawn < KILL_CHANCE:
            self._context.record(producer.name, "is killed")
            self._context.loop.kill(process)
        elif drawn < KILL_CHANCE + PAUSE_CHANCE:
            self._context.record(producer.name, "is paused")
            self._context.loop.pause(process)
            world = self._context.loop.world.context
            self._context.loop.call_later(
                self._rng.expovariate(1 / PAUSED_S), self._context.loop.resume, process, context=world
            )
