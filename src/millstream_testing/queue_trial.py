"""A trial of subscriptions: publishes to a topic through all faults, drains the queues and checks every message.

`SubscriptionTrial` has workers that pull, `PushTrial` an endpoint; each draws its own faults.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from millstream.client.admin.topics import create_topic
from millstream.core.errors import MillstreamError
from millstream.core.subscription import ATTEMPTS, DEAD_LETTER_TOPIC, DELIVERY, LEASE, ORDERED, START
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, Record
from millstream.protocol.wire.client import Client
from millstream_testing.subscription_check import Finding
from millstream_testing.subscription_history import Guarantees, Position, Span
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster
from millstream_testing.trial_topic import TrialPublisher, messages_of

PENDING_COUNTS: Final = ("backlog", "leased", "parked", "blocked", "rejecting")
_PROBE_S: Final = 0.2
_REQUEST_S: Final = 15.0

PrintLine = Callable[[str], None]


class Outcome(NamedTuple):
    findings: list[Finding]
    summary: str

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


class QueueTrial:
    """The load, the faults so far, and the end of a trial on running nodes."""

    def __init__(
        self,
        cluster: TrialCluster,
        topic: str,
        print_line: PrintLine,
        *,
        seed: int,
        partitions: int,
        messages_per_s: float,
        heal_s_max: float,
        drain_s_max: float,
        compressions: tuple[int, ...] = (0,),
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._print_line = print_line
        self._random = Random(seed)
        self._partitions = partitions
        self._heal_s_max = heal_s_max
        self._drain_s_max = drain_s_max
        self._publisher = TrialPublisher(
            self._client,
            topic,
            self._make_record,
            partitions=partitions,
            per_s=messages_per_s,
            seed=f"{seed}/publisher",
            compressions=compressions,
        )
        self._subscriptions: dict[str, Guarantees] = {}
        self._fault_spans: list[Span] = []
        self._faults: Counter[str] = Counter()
        self._is_well_behaved = False

    def _make_record(self, random: Random, number: int) -> NewRecord:
        raise NotImplementedError

    def _more_settings(self, name: str) -> dict[str, str]:
        """Return the settings of a subscription that do not follow from its guarantees."""
        raise NotImplementedError

    def _client(self) -> Client:
        return Client.connect(self._cluster.kafka, client_id="trial", timeout_s=_REQUEST_S)

    async def _declare(self) -> None:
        async with self._client() as client:
            nodes = len(self._cluster.nodes)
            await create_topic(client, self._topic, partitions=self._partitions, replication=nodes, settings={})
            for name, guarantees in self._subscriptions.items():
                settings = {
                    DELIVERY: guarantees.delivery,
                    LEASE: str(guarantees.lease_ms),
                    ATTEMPTS: str(guarantees.attempts),
                    DEAD_LETTER_TOPIC: f"dead-{name}",
                    START: "earliest",
                    ORDERED: str(guarantees.ordered).lower(),
                    **self._more_settings(name),
                }
                await SubscriptionClient(client).create(name, [self._topic], settings)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _wait_until_healthy(self, after: str) -> None:
        deadline = time.monotonic() + self._heal_s_max
        while reason := await asyncio.to_thread(self._cluster.unhealthy_reason):
            if time.monotonic() > deadline:
                raise TrialFailed(f"{after}: after {self._heal_s_max:g} s, {reason}\n{self._cluster.logs()}")
            await self._sleep(_PROBE_S)

    async def _drain(self) -> list[Finding]:
        """Wait until every queue is empty; return what is not after a timeout."""
        deadline = time.monotonic() + self._drain_s_max
        left = ["no node responds"]
        while left and time.monotonic() < deadline:
            await self._sleep(_PROBE_S)
            try:
                async with self._client() as client:
                    described = await SubscriptionClient(client).describe(list(self._subscriptions))
                left = [
                    found for subscription in described for found in pending_messages(subscription, self._partitions)
                ]
            except (MillstreamError, OSError, TimeoutError) as error:
                left = [f"no node responds: {error!r}"]
        return [f"not empty after {self._drain_s_max:g} s: {message}" for message in left]

    async def _published(self, client: Client) -> tuple[dict[Position, Record], list[Finding]]:
        """Return all messages of the topic, and whether acknowledged ones are missing."""
        records = await messages_of(client, self._topic)
        missing = self._publisher.acknowledged - set(records)
        return records, [f"acknowledged, but not in the topic: {sorted(missing)[:5]}"] if missing else []

    def _summary_of_load(self, records: Mapping[Position, Record]) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self._faults.items()))
        return f"{len(records)} messages ({self._publisher.failed} publisher failures), faults: {faults}"


def pending_messages(described: Mapping[str, Any], partitions: int) -> list[str]:
    """Return which queues of a subscription are missing or not empty."""
    name, queues = described["name"], described["queues"]
    left = [f"{name} has only {len(queues)} queues"] if len(queues) < partitions else []
    return left + [f"{name}: {queue}" for queue in queues if any(queue[count] for count in PENDING_COUNTS)]


async def cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
