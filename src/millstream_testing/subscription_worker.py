"""A worker of a trial with Millstream's own client: takes messages, misbehaves, and records what it saw."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final
from zlib import crc32

import msgspec

from millstream.core.errors import InvalidRecordState, MillstreamError, NotLeader
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.subscription import Verb
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.subscription_events import Leased, Notebook, WorkerJournal

TIMEOUT_S: Final = 8.0
PAUSE_S: Final = 0.2
POISON: Final = b"poison"
"""The key of messages that every worker rejects."""
BATCH_MAX: Final = 20
"""The maximum number of messages in a batch."""

Habit = str
"""What a worker does with a message."""

HABITS: Final[dict[Habit, int]] = {
    "accept": 60,
    "release": 8,
    "delay": 6,
    "reject": 4,
    "extend": 5,
    "forget": 5,
    "die": 4,
    "leave": 3,
}
SOBER: Final[dict[Habit, int]] = {"accept": 1}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process: a worker for each of the subscriptions."""

    producer: str
    """Its name: one for each life."""
    door: str
    """"own", "implicit" or "explicit"."""
    brokers: str
    nodes: int
    topic: str
    subscriptions: list[str]
    lease_ms: int
    file: str
    seed: str
    is_sober: bool


class Worker:
    """One worker after another, under one seed: when one dies, the next takes its place with its own connection."""

    def __init__(self, task: Task, notebook: Notebook, subscription: str) -> None:
        self._task = task
        self._notebook = notebook
        self._subscription = subscription
        self._random = Random(f"{task.seed}/{subscription}")
        self._habits = SOBER if task.is_sober else HABITS
        self._lives = 0
        self._journal = WorkerJournal(notebook, subscription, "")

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._lives += 1
            name = f"{self._task.producer}.{self._lives}"
            self._journal = WorkerJournal(self._notebook, self._subscription, name)
            try:
                async with Client.connect(self._task.brokers, client_id=name, timeout_s=TIMEOUT_S) as client:
                    await self._work(client)
            except (MillstreamError, OSError, TimeoutError):
                await asyncio.sleep(PAUSE_S)
            finally:
                self._journal.worker_left()

    async def _work(self, client: Client) -> None:
        subscriptions = SubscriptionClient(client)
        journal = self._journal
        while True:
            wanted = self._random.choice((1, 3, 20))
            asked_ms = journal.receive_sent(wanted)
            receive_sent = asyncio.ensure_future(
                subscriptions.receive(self._subscription, journal.worker, max_records=wanted, wait_ms=1000)
            )
            try:
                if self._draw("leave"):
                    # Its connection is closed while it waits, or just when it is served.
                    await asyncio.wait([receive_sent], timeout=self._random.uniform(0.0, 0.3))
                    return
                messages = await receive_sent
            except MillstreamError:
                journal.receive_failed()
                await asyncio.sleep(PAUSE_S)
                continue
            finally:
                receive_sent.cancel()
            journal.receive_completed(asked_ms, [_leased(message) for message in messages])
            if not await self._treat(client, messages):
                return

    async def _treat(self, client: Client, messages: list[LeasedMessage]) -> bool:
        """Process each message in some way; return False if the worker dies."""
        for message in messages:
            (habit,) = self._random.choices(list(self._habits), list(self._habits.values()))
            if message.record.key == POISON:
                habit = self._random.choice(("release", "forget", "reject"))
            if habit == "die":
                return False
            await self._settle(client, message, habit)
        return True

    async def _settle(self, client: Client, message: LeasedMessage, habit: Habit) -> None:
        if habit == "extend":
            await self._settle_once(client, message, Verb.EXTEND)
            await asyncio.sleep(self._random.uniform(0.0, 0.2))
        if habit in ("accept", "extend", "leave"):
            await self._settle_once(client, message, Verb.ACCEPT)
        elif habit == "release":
            await self._settle_once(client, message, Verb.RELEASE)
        elif habit == "delay":
            await self._settle_once(client, message, Verb.RELEASE, delay_ms=self._random.randint(0, 500))
        elif habit == "reject":
            await self._settle_once(client, message, Verb.REJECT)
        elif self._random.random() < 0.5:
            # It returns to the message when another worker may have it.
            await asyncio.sleep(self._task.lease_ms / 1000 * self._random.uniform(0.5, 1.2))
            await self._settle_once(client, message, Verb.ACCEPT)

    async def _settle_once(
        self, client: Client, message: LeasedMessage, verb: Verb, *, delay_ms: int | None = None
    ) -> None:
        """Settle a message; retry at the new leader if it has moved."""
        place = message.partition, message.record.offset
        for _ in range(3):
            node = -1 if message.node is None else int(message.node)
            number = self._journal.settle_sent(verb, [(*place, message.attempt)], delay_ms=delay_ms, node=node)
            error: MillstreamError | None
            try:
                (error,) = await SubscriptionClient(client).settle(
                    self._subscription, self._journal.worker, [message], verb, delay_ms=delay_ms, reason="chaos"
                )
            except MillstreamError as lost:
                error = lost
            if error is None or isinstance(error, InvalidRecordState):
                self._journal.settle_completed(number, [place], taken=error is None)
                return
            if not isinstance(error, NotLeader):
                return
            message = message._replace(node=await self._leader(client, message))

    async def _leader(self, client: Client, message: LeasedMessage) -> NodeId | None:
        await asyncio.sleep(PAUSE_S)
        try:
            metadata = await client.metadata([message.topic])
            return metadata.topics[message.topic].partitions[PartitionIndex(message.partition)].leader_id
        except (MillstreamError, KeyError):
            return message.node

    def _draw(self, habit: Habit) -> bool:
        return self._random.random() < self._habits.get(habit, 0) / sum(self._habits.values())


def _leased(message: LeasedMessage) -> Leased:
    record, node = message.record, -1 if message.node is None else int(message.node)
    checksum = crc32(record.value or b"")
    return Leased(message.partition, record.offset, message.attempt, message.deadline_ms, checksum, node)
