"""A worker of a trial: takes messages of a subscription, does odd things with them, and notes what it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final
from zlib import crc32

from millstream.model.errors import InvalidRecordState, MillstreamError, NotLeader
from millstream.model.ids import NodeId, PartitionIndex
from millstream.subscriptions.lease import Verb
from millstream.testing.subscription_history import Delivery, History, Place, Promise, Settlement
from millstream.wire.client import Client
from millstream.wire.subscriptions import LeasedMessage, SubscriptionClient

TIMEOUT_S: Final = 8.0
PAUSE_S: Final = 0.2
POISON: Final = b"poison"

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


def now_ms() -> int:
    """The time of day."""
    return int(time.time() * 1000)


@dataclass(slots=True)
class Shift:
    """What the workers of one subscription share."""

    name: str
    promise: Promise
    brokers: Callable[[], str]
    history: History = field(default_factory=History)
    habits: dict[Habit, int] = field(default_factory=lambda: HABITS)
    lives: int = 0


class Worker:
    """One worker after another, under one seed: when one dies, the next takes its place with its own connection."""

    def __init__(self, shift: Shift, random: Random) -> None:
        self._shift = shift
        self._random = random
        self._name = ""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._shift.lives += 1
            self._name = f"worker-{self._shift.lives}"
            try:
                async with Client.connect(self._shift.brokers(), client_id=self._name, timeout_s=TIMEOUT_S) as client:
                    await self._work(client)
            except (MillstreamError, OSError, TimeoutError):
                await asyncio.sleep(PAUSE_S)

    async def _work(self, client: Client) -> None:
        subscriptions = SubscriptionClient(client)
        while True:
            wanted = self._random.choice((1, 3, 20))
            asking = asyncio.ensure_future(
                subscriptions.receive(self._shift.name, self._name, max_records=wanted, wait_ms=1000)
            )
            try:
                if self._draw("leave"):
                    # Its connection is gone while it waits, or just when it is served.
                    await asyncio.wait([asking], timeout=self._random.uniform(0.0, 0.3))
                    return
                messages = await asking
            except MillstreamError:
                await asyncio.sleep(PAUSE_S)
                continue
            finally:
                asking.cancel()
            for message in messages:
                self._note(message)
            if not await self._treat(client, messages):
                return

    def _note(self, message: LeasedMessage) -> None:
        self._shift.history.deliveries.append(
            Delivery(
                Place(message.partition, message.record.offset),
                self._name,
                message.attempt,
                message.deadline_ms - self._shift.promise.lease_ms,
                message.deadline_ms,
                crc32(message.record.value or b""),
            )
        )

    async def _treat(self, client: Client, messages: list[LeasedMessage]) -> bool:
        """Do something with each message; False when the worker dies over it."""
        for message in messages:
            (habit,) = self._random.choices(list(self._shift.habits), list(self._shift.habits.values()))
            if message.record.key == POISON:
                habit = self._random.choice(("release", "forget", "reject"))
            if habit == "die":
                return False
            await self._settle(client, message, habit)
        return True

    async def _settle(self, client: Client, message: LeasedMessage, habit: Habit) -> None:
        if habit == "extend":
            await self._say(client, message, Verb.EXTEND)
            await asyncio.sleep(self._random.uniform(0.0, 0.2))
        if habit in ("accept", "extend", "leave"):
            await self._say(client, message, Verb.ACCEPT)
        elif habit == "release":
            await self._say(client, message, Verb.RELEASE)
        elif habit == "delay":
            await self._say(client, message, Verb.RELEASE, delay_ms=self._random.randint(0, 500))
        elif habit == "reject":
            await self._say(client, message, Verb.REJECT)
        elif self._random.random() < 0.5:
            # It comes back to it when it may be another's.
            await asyncio.sleep(self._shift.promise.lease_ms / 1000 * self._random.uniform(0.5, 1.2))
            await self._say(client, message, Verb.ACCEPT)

    async def _say(self, client: Client, message: LeasedMessage, verb: Verb, *, delay_ms: int | None = None) -> None:
        """Settle a message, again at the new leader when it has moved."""
        place = Place(message.partition, message.record.offset)
        for _ in range(3):
            sent_ms = now_ms()
            answered_ms: int | None = None
            error: MillstreamError | None
            try:
                (error,) = await SubscriptionClient(client).settle(
                    self._shift.name, self._name, [message], verb, delay_ms=delay_ms, reason="chaos"
                )
            except MillstreamError as lost:
                error = lost
            if error is None or isinstance(error, InvalidRecordState):
                answered_ms = now_ms()
            self._shift.history.settlements.append(
                Settlement(place, self._name, message.attempt, verb, sent_ms, answered_ms, error is None)
            )
            if answered_ms is not None or not isinstance(error, NotLeader):
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
        habits = self._shift.habits
        return self._random.random() < habits.get(habit, 0) / sum(habits.values())
