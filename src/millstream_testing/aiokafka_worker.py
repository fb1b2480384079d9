"""A worker with aiokafka, which joins no group for its transactions: its transactional id owns partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from millstream_testing.transaction_history import TransactionBegun
from millstream_testing.transaction_worker import BATCH_MAX, BATCH_S, RestartRequired, Stuck, Worker

T = TypeVar("T")


class AiokafkaWorker(Worker):
    """Reads its own partitions and produces in transactions; another one with the same id fences it."""

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except (KafkaError, AssertionError) as error:
            # The client asserts that no error occurs between some of its steps, but one may.
            raise RestartRequired(repr(error)) from error

    async def _work(self) -> None:
        task = self.task
        self._producer = AIOKafkaProducer(
            bootstrap_servers=task.brokers,
            transactional_id=task.transactional_id,
            transaction_timeout_ms=task.timeout_ms,
            **task.settings.get("producer", {}),
        )
        await self._with_timeout("start of the producer", self._producer.start())
        # The first transaction waits until the open transaction of the previous process has ended; only then are its
        # offsets final.
        await self._with_timeout("begin_transaction", self._producer.begin_transaction())
        await self._with_timeout("abort_transaction", self._producer.abort_transaction())
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=task.brokers,
            group_id=task.group,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            **task.settings.get("consumer", {}),
        )
        self._consumer.assign([TopicPartition(task.source, partition) for partition in task.partitions])
        await self._with_timeout("start of the consumer", self._consumer.start())
        busy_at = time.monotonic()
        while not self.stopping.is_set():
            polled = await self._consumer.getmany(timeout_ms=int(BATCH_S * 1000), max_records=BATCH_MAX)
            if polled:
                await self._transact(polled)
                busy_at = time.monotonic()
            elif task.idle_s_max is not None and time.monotonic() - busy_at > task.idle_s_max:
                raise RestartRequired(f"no message for {task.idle_s_max:g} s")
        await self._with_timeout("stop of the producer", self._producer.stop())
        await self._with_timeout("stop of the consumer", self._consumer.stop())

    async def _transact(self, polled: dict[TopicPartition, list[Any]]) -> None:
        begun = self.begin((record.partition, record.offset) for records in polled.values() for record in records)
        await self._with_timeout("begin_transaction", self._producer.begin_transaction())
        sent = [
            await self._with_timeout("send", self._producer.send(output.topic, value, partition=output.partition))
            for output, value in self.values(begun)
        ]
        positions = {TopicPartition(begun.source, input_.partition): input_.next for input_ in begun.inputs}
        await self._with_timeout(
            "send_offsets_to_transaction", self._producer.send_offsets_to_transaction(positions, self.task.group)
        )
        await self._with_timeout("acknowledgements", asyncio.gather(*sent))
        if self.wants_abort():
            await self._abort(begun)
            return
        self.end_requested(commit=True)
        await self._with_timeout("commit_transaction", self._producer.commit_transaction())
        self.ended(committed=True)

    async def _abort(self, begun: TransactionBegun) -> None:
        """Abort, and read again what was consumed."""
        self.end_requested(commit=False)
        await self._with_timeout("abort_transaction", self._producer.abort_transaction())
        self.ended(committed=False)
        for input_ in begun.inputs:
            self._consumer.seek(TopicPartition(begun.source, input_.partition), input_.first)

    async def _with_timeout(self, name: str, done: Awaitable[T]) -> T:
        idle_s_max = self.task.idle_s_max
        limit_s = self.task.stuck_s if idle_s_max is None else idle_s_max
        try:
            async with asyncio.timeout(limit_s):
                return await done
        except TimeoutError as error:
            kind = Stuck if idle_s_max is None else RestartRequired
            raise kind(f"{name} was not done within {limit_s:g} s") from error
