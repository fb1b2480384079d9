"""A query that commits batches: a driver, and for each part of a batch one writer or several at once.

Writers die, drivers restart and lose their state, batches are aborted by their driver, and sometimes a driver names a
writer that has not finished.
"""

from __future__ import annotations

import asyncio

from millstream.core.errors import InvalidTransactionState, MillstreamError
from millstream_testing.simulation.loop import Process
from millstream_testing.transaction_simulation.caller import Caller, ClientContext, RetriesExhausted
from millstream_testing.transaction_simulation.model import Batch, ModelTransaction
from millstream_testing.transaction_simulation.node import COORDINATOR, RequestTarget
from millstream_testing.transaction_simulation.producer import ABORTABLE, FENCED, SECOND, ProducerEnded, Writer

PARTS = 2
SPECULATION_CHANCE = 0.35
FORGET_CHANCE, ABORT_CHANCE, EARLY_COMMIT_CHANCE, WAIT_CHANCE = 0.08, 0.08, 0.08, 0.1
KILL_CHANCE = 0.1
POLL_S = 0.2
POLLS_MAX = 150
BETWEEN_S = 2.0


class Attempt(Writer):
    """An attempt to write one part of a batch."""

    def __init__(self, context: ClientContext, query: str, batch: int, part: int, number: int) -> None:
        transactional_id = f"spark/{query}/{batch}/{part}/{number:x}"
        super().__init__(transactional_id, context, transactional_id, instance=0, version=SECOND)
        self.query = query
        self.batch: Batch = (query, batch)
        self.part = part
        self.transaction: ModelTransaction | None = None
        self.is_prepared = False

    async def run(self) -> None:
        """Write the part and prepare it, unless the batch is committed already."""
        try:
            if (
                await self.send(RequestTarget(COORDINATOR, self.query), lambda node: node.last_batch(self.query))
                >= self.batch[1]
            ):
                self.context.model.batch_acknowledged(self.batch)
                return
            await self.initialize()
            transaction = self.begin(self.batch)
            self.context.record(self.name, f"transaction {transaction.number}")
            await self.write_all(transaction)
            self.transaction = transaction
            await self.send(self.coordinator, lambda node: node.prepare(self.who))
            self.is_prepared = True
        except (ProducerEnded, *ABORTABLE, *FENCED) as error:
            self.context.record(self.name, f"is over: {error}")


class BatchDriver(Caller):
    def __init__(self, context: ClientContext, query: str) -> None:
        super().__init__(f"driver-{query}", context)
        self.query = query
        self._target = RequestTarget(COORDINATOR, query)
        self._attempts: list[tuple[Attempt, Process, asyncio.Task[None]]] = []
        self._number = 0
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    @property
    def is_idle(self) -> bool:
        return all(task.done() or not process.alive for _, process, task in self._attempts)

    def failure(self) -> BaseException | None:
        done = (task for _, process, task in self._attempts if task.done() and process.alive)
        return next((error for task in done if (error := task.exception()) is not None), None)

    async def run(self) -> None:
        """Commit batches one after the other; abort the remaining one at the end."""
        number = 0
        while not self._stopping:
            number = await self._last_batch() + 1
            await self._run_batch((self.query, number))
            await asyncio.sleep(self.rng.expovariate(1 / BETWEEN_S))
        await asyncio.wait([task for _, process, task in self._attempts if process.alive])
        await self._abort_batch((self.query, await self._last_batch() + 1))

    async def _last_batch(self) -> int:
        last = await self.send(self._target, lambda node: node.last_batch(self.query))
        if last >= 0:
            self.context.model.batch_acknowledged((self.query, last))
        return last

    async def _run_batch(self, batch: Batch) -> None:
        """Try to commit a batch once; the next lookup of the last batch shows whether it succeeded."""
        self.context.record(self.name, f"batch {batch[1]}")
        attempts = [self._start(batch, part) for part in range(PARTS)]
        if self.rng.random() < SPECULATION_CHANCE:
            attempts.append(self._start(batch, self.rng.randrange(PARTS)))
        chosen = await self._wait_for(batch, attempts)
        if chosen is None or self.rng.random() < FORGET_CHANCE:
            self.context.record(self.name, "starts over")
            return
        if self.rng.random() < ABORT_CHANCE:
            await self._abort_batch(batch)
            return
        if self.rng.random() < WAIT_CHANCE:
            # Longer than the timeout of any transaction that is not prepared.
            await asyncio.sleep(self.context.plan.timeout_ms / 1000 * 1.5)
        await self._complete(batch, chosen)

    def _start(self, batch: Batch, part: int) -> Attempt:
        self._number += 1
        attempt = Attempt(self.context, self.query, batch[1], part, self._number)
        process = self.context.loop.start_process(attempt.name)
        task = self.context.loop.spawn(process, attempt.run(), name=attempt.name)
        self._attempts.append((attempt, process, task))
        if self.rng.random() < KILL_CHANCE:
            delay_s = self.rng.expovariate(1 / 0.1)
            self.context.loop.call_later(
                delay_s, self.context.loop.kill, process, context=self.context.loop.world.context
            )
        return attempt

    async def _wait_for(self, batch: Batch, attempts: list[Attempt]) -> list[Attempt] | None:
        """Wait until every part is prepared; start another attempt for a part whose attempts have ended."""
        is_early = self.rng.random() < EARLY_COMMIT_CHANCE
        for _ in range(POLLS_MAX):
            chosen = [_first(attempts, part, is_early=is_early) for part in range(PARTS)]
            found = [part for part in chosen if part is not None]
            if len(found) == PARTS:
                return found
            over = {attempt.name for attempt, process, task in self._attempts if task.done() or not process.alive}
            for part, attempt in enumerate(chosen):
                if attempt is None and all(attempt.name in over for attempt in attempts if attempt.part == part):
                    attempts.append(self._start(batch, part))
            await asyncio.sleep(POLL_S)
        return None

    async def _complete(self, batch: Batch, chosen: list[Attempt]) -> None:
        members = tuple(attempt.who for attempt in chosen)
        transaction = [attempt.transaction for attempt in chosen if attempt.transaction is not None]
        all_prepared = all(attempt.is_prepared for attempt in chosen)
        model = self.context.model
        model.complete_sent(batch, transaction)
        self.context.record(self.name, f"completes batch {batch[1]} with {[part.number for part in transaction]}")
        try:
            by_this = await self.send(self._target, lambda node: node.complete_batch(self.query, batch[1], members))
        except MillstreamError as error:
            self.context.record(self.name, f"batch {batch[1]} failed: {error}")
            model.complete_refused(batch, all_prepared=all_prepared, reason=str(error))
            return
        model.complete_acknowledged(batch, transaction, by_this=by_this)
        self.context.record(self.name, f"batch {batch[1]} is committed{'' if by_this else ', before'}")

    async def _abort_batch(self, batch: Batch) -> None:
        model = self.context.model
        model.abort_sent(batch)
        begun_before = model.begun_so_far()
        self.context.record(self.name, f"aborts batch {batch[1]}")
        try:
            await self.send(self._target, lambda node: node.abort_batch(self.query, batch[1]))
        except (RetriesExhausted, InvalidTransactionState) as error:
            self.context.record(self.name, f"batch {batch[1]} was not aborted: {error}")
        else:
            model.abort_acknowledged(batch, begun_before)


def _first(attempts: list[Attempt], part: int, *, is_early: bool) -> Attempt | None:
    """Return an attempt that is prepared or, if early, one that has only written everything."""
    mine = [attempt for attempt in attempts if attempt.part == part]
    ready = [attempt for attempt in mine if attempt.is_prepared or (is_early and attempt.transaction is not None)]
    return ready[0] if ready else None
