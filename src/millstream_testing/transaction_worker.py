"""Common parts of the programs of a transaction trial: their task, their output, and their journal.

A program records everything that it is about to do, and the outcome, before it continues, so its journal is correct
whenever it is killed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from millstream_testing.transaction_history import (
    EndRequested,
    Event,
    Input,
    Output,
    TransactionBegun,
    TransactionEnded,
)

RESTART = 3
STUCK = 4
BATCH_MAX = 60
BATCH_S = 0.3


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process of a program."""

    producer: str
    """Its name in the history, unique to each process."""
    client: str
    brokers: str
    group: str
    transactional_id: str
    source: str
    outputs: dict[str, int]
    """Topics to write to, with the number of their partitions."""
    file: str
    seed: str
    abort_share: float
    timeout_ms: int
    stuck_s: float
    """How long to retry: longer than any fault, plus the time that clients need to reconnect."""
    idle_s_max: float | None = None
    """Restart after this long without a message, for a client that does not find its brokers again."""
    partitions: list[int] = []
    """The partitions of the source that it owns, if its client does not use a group."""
    command: list[str] = []
    """A program in another language that does this; it gets the task as arguments NAME=VALUE."""
    settings: dict[str, dict[str, Any]] = {}
    """More settings for the "consumer" and the "producer"."""


class RestartRequired(Exception):
    """The process has to end; another one can continue."""


class Stuck(Exception):
    """An operation did not succeed in time."""


class Worker(ABC):
    """The common base of the programs: their output, and their journal."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.stopping = threading.Event()
        self._random = random.Random(task.seed)
        self._file = os.open(task.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._encoder = msgspec.json.Encoder()
        self._number = -1

    @abstractmethod
    def run(self) -> None:
        """Work until `stopping` is set."""

    def begin(self, consumed: Iterable[tuple[int, int]]) -> TransactionBegun:
        """Record the next transaction, which consumes these (partition, offset) pairs of the source, in order."""
        self._number += 1
        offsets: dict[int, list[int]] = {}
        for partition, offset in consumed:
            offsets.setdefault(partition, []).append(offset)
        inputs = [Input(partition, taken[0], taken[-1] + 1) for partition, taken in offsets.items()]
        outputs = [
            Output(topic, _target_partition(topic, partition, offset) % partitions, partition, offset)
            for partition, taken in offsets.items()
            for offset in taken
            for topic, partitions in self.task.outputs.items()
        ]
        task = self.task
        begun = TransactionBegun(
            task.producer, self._number, task.group, task.source, inputs, outputs, time.monotonic_ns()
        )
        self._record(begun)
        return begun

    def values(self, begun: TransactionBegun) -> Iterable[tuple[Output, bytes]]:
        """Return what to write: each value names its message and transaction."""
        for index, output in enumerate(begun.outputs):
            padding = b"." * self._random.randrange(200)
            yield output, f"{begun.producer} {begun.number} {index} ".encode() + padding

    def wants_abort(self) -> bool:
        return self._random.random() < self.task.abort_share

    def end_requested(self, *, commit: bool) -> None:
        """Record that the client is asked to commit or abort."""
        self._record(EndRequested(self.task.producer, self._number, commit, time.monotonic_ns()))

    def ended(self, *, committed: bool) -> None:
        """Record what the client reported."""
        self._record(TransactionEnded(self.task.producer, self._number, committed, time.monotonic_ns()))

    def _record(self, event: Event) -> None:
        os.write(self._file, self._encoder.encode(event) + b"\n")


def _target_partition(topic: str, partition: int, offset: int) -> int:
    """Return where to write: a message always goes to the same partition, and its neighbours to others."""
    return len(topic) + partition + offset
