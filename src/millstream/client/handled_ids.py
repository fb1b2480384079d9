"""The asynchronous side of the table of handled messages: one thread, and one transaction for all who ask meanwhile."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import SQLAlchemyError

from millstream.client.handled_table import Answer, HandledTable, Operation, Verb, key_of
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError

_logger = logging.getLogger(__name__)

BATCH_MAX = 500
"""Operations in one transaction."""

CLEAN_MS = 60_000
"""So often at most, rows that do not count any more are removed."""


class HandledIds:
    """Claims, extends, finishes and gives back messages; the event loop never waits for the database."""

    def __init__(self, table: HandledTable, clock: Clock, *, lease_ms: int, time_to_live_ms: int) -> None:
        self._table = table
        self._clock = clock
        self._lease_ms = lease_ms
        self._time_to_live_ms = time_to_live_ms
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millstream handled")
        self._waiting: list[tuple[Operation, asyncio.Future[Answer]]] = []
        self._running: asyncio.Task[None] | None = None
        self._cleaned_ms = 0

    async def do(self, verb: Verb, message_id: str, owner: str) -> Answer:
        """Carry out one verb; those who ask while a transaction is under way share the next one."""
        counts_ms = self._time_to_live_ms if verb is Verb.FINISH else self._lease_ms
        wanted = Operation(verb, key_of(message_id), owner, self._clock.now_ms() + counts_ms)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="millstream handled")
        return await answer

    async def close(self) -> None:
        """Wait for what is under way, and let the thread go."""
        while self._running is not None:
            await asyncio.wait([self._running])
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        try:
            # What was asked in the same turn of the loop goes together.
            await asyncio.sleep(0)
            while self._waiting:
                taken, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                await self._transact(taken)
                await self._clean()
        finally:
            self._running = None

    async def _transact(self, taken: list[tuple[Operation, asyncio.Future[Answer]]]) -> None:
        operations = [operation for operation, _ in taken]
        now_ms, loop = self._clock.now_ms(), asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._table.run, operations, now_ms)
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(taken, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _clean(self) -> None:
        now_ms = self._clock.now_ms()
        if now_ms - self._cleaned_ms < CLEAN_MS:
            return
        self._cleaned_ms = now_ms
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._table.clean, now_ms)
        except (SQLAlchemyError, MillstreamError) as error:
            _logger.warning("old ids of handled messages could not be removed", extra={"reason": str(error)})
