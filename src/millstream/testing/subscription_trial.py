"""Subscriptions under load while workers misbehave and nodes are killed; then every message is accounted for.

One topic, and on it a subscription for each delivery promise and each of: plain, ordered by key, filtered. Some
messages are delayed, and some are poison that no worker ever accepts. In the end all queues have to run empty, and what
each worker saw is held against what the topic and the dead letter topics have: see `subscription_history`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple
from zlib import crc32

from millstream.admin.topics import create_topic
from millstream.model.errors import MillstreamError, UnknownTopic
from millstream.model.subscription import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ATTEMPTS,
    BACKOFF_MIN,
    DEAD_LETTER_TOPIC,
    DELIVERY,
    EXACTLY_ONCE,
    FILTER,
    LEASE,
    ORDERED,
    START,
)
from millstream.records.record import Headers, NewRecord, Record, decode_records, encode_batch
from millstream.testing.server import Server
from millstream.testing.subscription_history import Finding, History, Place, Promise, Published, Truth, account, check
from millstream.testing.subscription_worker import POISON, SOBER, Shift, Worker, now_ms
from millstream.wire.client import Client
from millstream.wire.subscriptions import SubscriptionClient

TOPIC: Final = "work"
PROMISES: Final = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)
KINDS: Final = ("plain", "ordered", "filtered")
MATCHING: Final = "payload.even = TRUE"
BUSY: Final = ("backlog", "leased", "parked", "blocked", "rejecting")
_PROBE_S: Final = 0.5
_ASK_S: Final = 15.0

Tell = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Plan:
    """How large a trial is."""

    seed: int
    load_s: float = 60.0
    kills: int = 8
    stop_share: float = 0.25
    """How many of the kills are clean stops instead."""
    down_s: tuple[float, float] = (0.0, 3.0)
    messages_per_s: float = 40.0
    partitions: int = 3
    keys: int = 20
    workers: int = 3
    attempts: int = 5
    lease_ms: int = 2000
    delayed_share: float = 0.05
    poison_share: float = 0.02
    drain_s_max: float = 120.0
    replication: int = 1
    targets: tuple[str, ...] = (TOPIC, "__subscriptions")
    """Of which topics leaders are killed, one after the other."""
    promises: tuple[str, ...] = PROMISES
    kinds: tuple[str, ...] = KINDS


class Outcome(NamedTuple):
    """What a trial found."""

    findings: list[Finding]
    account: str

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings


@dataclass(slots=True)
class _Sent:
    acknowledged: set[Place] = field(default_factory=set)
    failed: int = 0


class SubscriptionTrial:
    """One run on nodes that are there already."""

    def __init__(self, nodes: dict[int, Server], plan: Plan, tell: Tell) -> None:
        self._nodes = nodes
        self._plan = plan
        self._tell = tell
        self._random = Random(plan.seed)
        self._sent = _Sent()
        self._kills_ms: list[int] = []
        self._unclean: list[Finding] = []
        self._shifts = {
            f"{promise}-{kind}": self._shift(promise, kind) for promise in plan.promises for kind in plan.kinds
        }

    async def run(self) -> Outcome:
        """Load, kill, let all queues run empty, and judge."""
        await self._declare()
        publishing = asyncio.ensure_future(self._publish())
        working = [
            asyncio.ensure_future(Worker(shift, Random(f"{self._plan.seed}/{name}/{number}")).run())
            for name, shift in self._shifts.items()
            for number in range(self._plan.workers)
        ]
        try:
            await self._kill_now_and_then()
            await publishing
            for shift in self._shifts.values():
                shift.habits = SOBER
            left = await self._drain()
        finally:
            await _cancel([publishing, *working])
        return await self._judge(left)

    @property
    def _brokers(self) -> str:
        return ",".join(node.kafka for node in self._nodes.values())

    def _client(self) -> Client:
        return Client.connect(self._brokers, client_id="trial", timeout_s=_ASK_S)

    def _shift(self, promise: str, kind: str) -> Shift:
        plan = self._plan
        promised = Promise(delivery=promise, ordered=kind == "ordered", attempts=plan.attempts, lease_ms=plan.lease_ms)
        return Shift(f"{promise}-{kind}", promised, lambda: self._brokers)

    # -- load --------------------------------------------------------------------------------------------------

    async def _declare(self) -> None:
        plan = self._plan
        async with self._client() as client:
            await create_topic(client, TOPIC, partitions=plan.partitions, replication=plan.replication, settings={})
            for name, shift in self._shifts.items():
                settings = {
                    DELIVERY: shift.promise.delivery,
                    LEASE: str(plan.lease_ms),
                    ATTEMPTS: str(plan.attempts),
                    BACKOFF_MIN: "50",
                    DEAD_LETTER_TOPIC: f"dead-{name}",
                    START: "earliest",
                }
                if shift.promise.ordered:
                    settings[ORDERED] = "true"
                if name.endswith("filtered"):
                    settings[FILTER] = MATCHING
                await SubscriptionClient(client).create(name, [TOPIC], settings)

    async def _publish(self) -> None:
        random, plan = Random(f"{self._plan.seed}/publisher"), self._plan
        deadline = time.monotonic() + plan.load_s
        number = 0
        while time.monotonic() < deadline:
            try:
                async with self._client() as client:
                    while time.monotonic() < deadline:
                        count = random.choice((1, 2, 5, 20))
                        await self._publish_some(client, random, number, count)
                        number += count
                        await asyncio.sleep(count / plan.messages_per_s)
            except (MillstreamError, OSError, TimeoutError):
                self._sent.failed += 1
                await asyncio.sleep(_PROBE_S)

    async def _publish_some(self, client: Client, random: Random, number: int, count: int) -> None:
        partition = random.randrange(self._plan.partitions)
        records = []
        for at in range(count):
            key = POISON if random.random() < self._plan.poison_share else b"key-%d" % random.randrange(self._plan.keys)
            headers: Headers = ()
            if random.random() < self._plan.delayed_share:
                headers = (("deliver-at", str(now_ms() + random.randint(0, 3000)).encode()),)
            value = json.dumps({"number": number + at, "even": (number + at) % 2 == 0}).encode()
            records.append(NewRecord(key, value, headers, now_ms()))
        compression = random.choice((0, 0, 4))
        produced = await client.produce(TOPIC, partition, encode_batch(records, compression=compression))
        self._sent.acknowledged.update(Place(partition, produced.base_offset + at) for at in range(count))

    # -- faults ------------------------------------------------------------------------------------------------

    async def _kill_now_and_then(self) -> None:
        plan = self._plan
        pause_s = plan.load_s / (plan.kills + 1)
        for number in range(plan.kills):
            await asyncio.sleep(pause_s * self._random.uniform(0.6, 1.2))
            node = await self._choose(plan.targets[number % len(plan.targets)])
            is_clean = self._random.random() < plan.stop_share
            await asyncio.to_thread(self._stop if is_clean else Server.kill, self._nodes[node])
            # What it did until it was dead was before this.
            self._kills_ms.append(now_ms())
            self._tell(f"node {node} {'stopped' if is_clean else 'killed'}")
            await asyncio.sleep(self._random.uniform(*plan.down_s))
            await asyncio.to_thread(self._nodes[node].start)

    def _stop(self, node: Server) -> None:
        code = node.stop()
        if code:
            self._unclean.append(f"a node stopped with exit code {code}; its log ends with: {node.log_tail()}")

    async def _choose(self, topic: str) -> int:
        """The leader of some partition of a topic, or any node."""
        try:
            async with self._client() as client:
                partitions = (await client.metadata([topic])).topics[topic].partitions
            leader = int(self._random.choice(list(partitions.values())).leader_id)
        except (MillstreamError, KeyError):
            leader = -1
        return leader if leader in self._nodes else self._random.choice(list(self._nodes))

    async def _drain(self) -> list[Finding]:
        """Wait until every queue is empty; what is left if that takes too long."""
        deadline = time.monotonic() + self._plan.drain_s_max
        left = ["nobody tells"]
        while left and time.monotonic() < deadline:
            await asyncio.sleep(_PROBE_S)
            try:
                async with self._client() as client:
                    left = self._left(await SubscriptionClient(client).describe(list(self._shifts)))
            except (MillstreamError, OSError, TimeoutError) as error:
                left = [f"nobody tells: {error!r}"]
        return [f"not empty after {self._plan.drain_s_max:g} s: {one}" for one in left]

    def _left(self, told: list[dict[str, list[dict[str, object]]]]) -> list[str]:
        left = []
        for one in told:
            queues = one["queues"]
            if len(queues) < self._plan.partitions:
                left.append(f"{one['name']} has only {len(queues)} queues")
            left += [f"{one['name']}: {queue}" for queue in queues if any(queue[name] for name in BUSY)]
        return left

    # -- what is found -----------------------------------------------------------------------------------------

    async def _judge(self, left: list[Finding]) -> Outcome:
        async with self._client() as client:
            records = await _read(client, TOPIC)
            letters = {name: await self._letters(client, name) for name in self._shifts}
        findings = left + self._unclean + [found for node in self._nodes.values() for found in _bugs(node)]
        missing = self._sent.acknowledged - set(records)
        if missing:
            findings.append(f"acknowledged, but not in the topic: {sorted(missing)[:5]}")
        truths: dict[str, Truth] = {}
        for name, shift in self._shifts.items():
            only_even = name.endswith("filtered")
            expected = {
                place: _published(record)
                for place, record in records.items()
                if not only_even or json.loads(record.value or b"")["even"]
            }
            truths[name] = Truth(expected, letters[name], self._kills_ms, leaders_move=len(self._nodes) > 1)
            findings += [f"{name}: {one}" for one in check(shift.promise, shift.history, truths[name])]
        return Outcome(findings, self._account(records, truths))

    def _account(self, records: dict[Place, Record], truths: dict[str, Truth]) -> str:
        histories = [shift.history for shift in self._shifts.values()]
        never = sum(
            len(truths[name].expected.keys() - {one.place for one in shift.history.deliveries})
            for name, shift in self._shifts.items()
            if shift.promise.delivery == AT_MOST_ONCE
        )
        lives = sum(shift.lives for shift in self._shifts.values())
        return (
            f"{len(records)} messages ({self._sent.failed} times a publisher failed), "
            f"{len(self._kills_ms)} kills and stops, {lives} workers; {account(histories, truths.values())}; "
            f"{never} handed out at most once did not arrive"
        )

    async def _letters(self, client: Client, name: str) -> Counter[Place]:
        try:
            letters = await _read(client, f"dead-{name}")
        except UnknownTopic:
            return Counter()
        stories = [{key: (value or b"").decode() for key, value in letter.headers} for letter in letters.values()]
        return Counter(Place(int(story["dlq-partition"]), int(story["dlq-offset"])) for story in stories)

    @property
    def histories(self) -> dict[str, History]:
        """What workers saw, by subscription."""
        return {name: shift.history for name, shift in self._shifts.items()}


def _bugs(node: Server) -> list[Finding]:
    """What a node logged that nobody has thought of."""
    lines = node.log.read_text(errors="replace").splitlines()
    places = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    return [f"{node.data.name} logged: {lines[max(0, at - 2)]}" for at in places[:3]]


async def _read(client: Client, topic: str) -> dict[Place, Record]:
    """Everything that a topic has."""
    metadata = await client.metadata([topic])
    if topic not in metadata.topics:
        raise UnknownTopic(f"there is no topic {topic!r}")
    found: dict[Place, Record] = {}
    partitions = metadata.topics[topic].partitions
    ends = await client.list_offsets(topic, dict.fromkeys(partitions, -1))
    for partition in partitions:
        offset = 0
        while offset < ends[partition].offset:
            answer = await client.fetch(topic, partition, offset)
            for record in decode_records(answer.records):
                found[Place(partition, record.offset)] = record
                offset = max(offset, record.offset + 1)
    return found


def _published(record: Record) -> Published:
    due = next((value for name, value in record.headers if name == "deliver-at"), None)
    return Published(record.key or b"", int(due or b"0"), crc32(record.value or b""))


async def _cancel(tasks: Iterable[asyncio.Future[None]]) -> None:
    listed = list(tasks)
    for task in listed:
        task.cancel()
    await asyncio.gather(*listed, return_exceptions=True)
