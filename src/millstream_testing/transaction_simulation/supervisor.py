"""Starts producers under one transactional id, one after the other, while earlier ones may still be active."""

from __future__ import annotations

import asyncio

from millstream_testing.simulation.process import Process
from millstream_testing.transaction_simulation.caller import ClientContext
from millstream_testing.transaction_simulation.producer import TransactionalProducer

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
