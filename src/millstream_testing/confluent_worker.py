"""A worker with confluent-kafka: its group assigns partitions and fences former members (KIP-447)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from millstream_testing.transaction_history import TransactionBegun
from millstream_testing.transaction_worker import BATCH_MAX, BATCH_S, RESTART, RestartRequired, Stuck, Task, Worker

_CALL_S = 5.0
HANG_S = 20.0
"""A call that takes this long has ignored its timeout: the client waits for a broker that it no longer knows."""

_CLIENT: dict[str, Any] = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200, "log_level": 3}


class ConfluentWorker(Worker):
    """Consumes in a group and produces in transactions that carry its offsets."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        address = {"bootstrap.servers": task.brokers, **_CLIENT}
        self._producer = Producer(
            {
                **address,
                "transactional.id": task.transactional_id,
                "transaction.timeout.ms": task.timeout_ms,
                "linger.ms": 2,
                **task.settings.get("producer", {}),
            }
        )
        self._consumer = Consumer(
            {
                **address,
                "group.id": task.group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                **task.settings.get("consumer", {}),
            }
        )
        self._batch: list[Message] = []

    def run(self) -> None:
        self._retry("init_transactions", lambda: self._producer.init_transactions(_CALL_S))
        self._consumer.subscribe([self.task.source], on_revoke=self._discard_revoked, on_lost=self._discard_revoked)
        while not self.stopping.is_set():
            self._poll_batch()
            if self._batch:
                self._transact()
        self._consumer.close()

    def _discard_revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Discard polled messages of partitions that may be assigned to others by now."""
        gone = {partition.partition for partition in partitions}
        self._batch = [message for message in self._batch if message.partition() not in gone]

    def _poll_batch(self) -> None:
        self._batch = []
        deadline = time.monotonic() + BATCH_S
        while len(self._batch) < BATCH_MAX and (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is None:
                continue
            error = message.error()
            if error is None:
                self._batch.append(message)
            elif error.fatal() or error.code() == KafkaError._FATAL:
                raise RestartRequired(f"the consumer failed: {error}")

    def _transact(self) -> None:
        begun = self.begin((message.partition() or 0, message.offset() or 0) for message in self._batch)
        try:
            self._producer.begin_transaction()
            for output, value in self.values(begun):
                self._producer.produce(output.topic, value, partition=output.partition)
            positions = [TopicPartition(begun.source, input_.partition, input_.next) for input_ in begun.inputs]
            self._retry(
                "send_offsets_to_transaction",
                lambda: self._producer.send_offsets_to_transaction(
                    positions, self._consumer.consumer_group_metadata(), _CALL_S
                ),
            )
            if self.wants_abort():
                self._abort(begun)
                return
            self.end_requested(commit=True)
            self._retry("commit_transaction", lambda: self._producer.commit_transaction(_CALL_S))
            self.ended(committed=True)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise RestartRequired(str(error)) from error
            self._abort(begun)

    def _abort(self, begun: TransactionBegun) -> None:
        """Abort, and read again what was consumed."""
        self.end_requested(commit=False)
        try:
            self._retry("abort_transaction", lambda: self._producer.abort_transaction(_CALL_S))
        except KafkaException as error:
            raise RestartRequired(str(error)) from error
        self.ended(committed=False)
        mine = {partition.partition for partition in self._consumer.assignment()}
        try:
            for input_ in begun.inputs:
                if input_.partition in mine:
                    self._consumer.seek(TopicPartition(begun.source, input_.partition, input_.first))
        except KafkaException as error:
            raise RestartRequired(f"cannot read again: {error}") from error

    def _retry(self, name: str, call: Callable[[], object]) -> None:
        """Call until it succeeds; retriable errors are retried, as the client requires."""
        deadline = time.monotonic() + self.task.stuck_s
        while True:
            try:
                with self._exit_on_hang(name):
                    call()
            except KafkaException as error:
                if error.args[0].fatal() or not error.args[0].retriable():
                    raise
                if time.monotonic() > deadline:
                    raise Stuck(f"{name}: {error}") from error
            else:
                return

    @contextmanager
    def _exit_on_hang(self, name: str) -> Iterator[None]:
        """End the process if a call hangs. The next process shows whether the broker is at fault."""

        def give_up() -> None:
            print(f"{self.task.producer} has to be restarted: {name} does not return", file=sys.stderr, flush=True)
            os._exit(RESTART)

        timer = threading.Timer(HANG_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
