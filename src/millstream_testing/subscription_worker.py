"""A trial worker with Millstream's own client: receives messages, misbehaves, and records what it saw."""

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
from millstream_testing.subscription_history import JournalFile, Leased, WorkerJournal

TIMEOUT_S: Final = 8.0
PAUSE_S: Final = 0.2
POISON: Final = b"poison"
"""The key of messages that every worker rejects."""
BATCH_MAX: Final = 20
"""The maximum number of messages in a batch."""

Behaviour = str
"""An action of a worker on a message."""

BEHAVIOURS: Final[dict[Behaviour, int]] = {
    "accept": 60,
    "release": 8,
    "delay": 6,
    "reject": 4,
    "extend": 5,
    "forget": 5,
    "die": 4,
    "leave": 3,
}
WELL_BEHAVED: Final[dict[Behaviour, int]] = {"accept": 1}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process: a worker for each of the subscriptions."""

    producer: str
    """Its name, unique to each process."""
    client_kind: str
    """"own", "implicit" or "explicit"."""
    brokers: str
    nodes: int
    topic: str
    subscriptions: list[str]
    lease_ms: int
    file: str
    seed: str
    is_well_behaved: bool


class Worker:
    """One worker after another, under one seed: each replaces the one that died, with its own connection."""

    def __init__(self, task: Task, journal_file: JournalFile, subscription: str) -> None:
        self._task = task
        self._journal_file = journal_file
        self._subscription = subscription
        self._random = Random(f"{task.seed}/{subscription}")
        self._behaviours = WELL_BEHAVED if task.is_well_behaved else BEHAVIOURS
        self._incarnations = 0
        self._journal = WorkerJournal(journal_file, subscription, "")

    async def run(self) -> None:
        while True:
            self._incarnations += 1
            name = f"{self._task.producer}.{self._incarnations}"
            self._journal = WorkerJournal(self._journal_file, self._subscription, name)
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
            requested = self._random.choice((1, 3, 20))
            requested_ms = journal.receive_sent(requested)
            receiving = asyncio.ensure_future(
                subscriptions.receive(self._subscription, journal.worker, max_records=requested, wait_ms=1000)
            )
            try:
                if self._draw("leave"):
                    # Its connection is closed while it waits, or just when it is served.
                    await asyncio.wait([receiving], timeout=self._random.uniform(0.0, 0.3))
                    return
                messages = await receiving
            except MillstreamError:
                journal.receive_failed()
                await asyncio.sleep(PAUSE_S)
                continue
            finally:
                receiving.cancel()
            journal.receive_completed(requested_ms, [_leased(message) for message in messages])
            if not await self._process(client, messages):
                return

    async def _process(self, client: Client, messages: list[LeasedMessage]) -> bool:
        """Process each message with a random behaviour; return False if the worker dies."""
        for message in messages:
            (behaviour,) = self._random.choices(list(self._behaviours), list(self._behaviours.values()))
            if message.record.key == POISON:
                behaviour = self._random.choice(("release", "forget", "reject"))
            if behaviour == "die":
                return False
            await self._settle(client, message, behaviour)
        return True

    async def _settle(self, client: Client, message: LeasedMessage, behaviour: Behaviour) -> None:
        if behaviour == "extend":
            await self._settle_once(client, message, Verb.EXTEND)
            await asyncio.sleep(self._random.uniform(0.0, 0.2))
        if behaviour in ("accept", "extend", "leave"):
            await self._settle_once(client, message, Verb.ACCEPT)
        elif behaviour == "release":
            await self._settle_once(client, message, Verb.RELEASE)
        elif behaviour == "delay":
            await self._settle_once(client, message, Verb.RELEASE, delay_ms=self._random.randint(0, 500))
        elif behaviour == "reject":
            await self._settle_once(client, message, Verb.REJECT)
        elif self._random.random() < 0.5:
            # It settles the message late, when another worker may have it.
            await asyncio.sleep(self._task.lease_ms / 1000 * self._random.uniform(0.5, 1.2))
            await self._settle_once(client, message, Verb.ACCEPT)

    async def _settle_once(
        self, client: Client, message: LeasedMessage, verb: Verb, *, delay_ms: int | None = None
    ) -> None:
        """Settle a message; retry at the new leader if it has moved."""
        position = message.partition, message.record.offset
        for _ in range(3):
            node = -1 if message.node is None else int(message.node)
            number = self._journal.settle_sent(verb, [(*position, message.attempt)], delay_ms=delay_ms, node=node)
            error: MillstreamError | None
            try:
                (error,) = await SubscriptionClient(client).settle(
                    self._subscription, self._journal.worker, [message], verb, delay_ms=delay_ms, reason="chaos"
                )
            except MillstreamError as lost:
                error = lost
            if error is None or isinstance(error, InvalidRecordState):
                self._journal.settle_completed(number, [position], taken=error is None)
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

    def _draw(self, behaviour: Behaviour) -> bool:
        return self._random.random() < self._behaviours.get(behaviour, 0) / sum(self._behaviours.values())


def _leased(message: LeasedMessage) -> Leased:
    record, node = message.record, -1 if message.node is None else int(message.node)
    checksum = crc32(record.value or b"")
    return Leased(message.partition, record.offset, message.attempt, message.deadline_ms, checksum, node)
