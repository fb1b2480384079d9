"""The cost of a backlog: resident memory with a million messages of which a tenth is leased, and CPU per delivered and
accepted message after a short and after a long backlog.

The leased messages are spread: a worker leases everything and releases nine of ten, so that the queue has to track
every single message, which is the worst case.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import uvloop
from benchmarks.librdkafka import PreparedMessages, Producer
from benchmarks.processes import resident_of_tree
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.core.subscription import Verb
from millstream.protocol.private.subscription_messages import (
    RECEIVE_KEY,
    SETTLE_KEY,
    LeasedRange,
    PartitionSettles,
    ReceiveRequest,
    ReceiveResponse,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

SHORT, MIDDLE, LONG = 10_000, 60_000, 1_000_000
SIZE_BYTES: Final = 100
ROUNDS, AT_ONCE, TAKEN = 10, 100, 5_000
"""The number of rounds, of messages per request, and of messages that are leased and accepted in a round."""
_SLOW_AT_ONCE: Final = 10_000
_EACH: Final = 10
_REST_S: Final = 12.0
"""Freed memory is returned by a check every 5 s."""
_BYTES_MAX: Final = 16 * 1024 * 1024
_RESPONSE_MS_MAX: Final = 120_000
_SETTINGS: Final = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": "3600000",
    "share.partition.max.record.locks": str(LONG),
    "millstream.in.flight.max": str(LONG),
}


class Bench:
    """A server with one topic of one partition, and a client that leases ranges without decoding messages."""

    def __init__(self, server: Server, client: Client, topic: str) -> None:
        self._server = server
        self._client = client
        self._topic = topic

    def publish(self, count: int) -> None:
        """Publish messages to the topic."""
        load = PreparedMessages(1000, SIZE_BYTES)
        settings = {"bootstrap.servers": self._server.kafka, "log_level": "0", "linger.ms": "5"}
        with closing(Producer(self._topic, settings)) as producer:
            for _ in range(count // load.count):
                producer.send(load, 0, load.count)
            producer.flush(_RESPONSE_MS_MAX)

    async def lease(self, worker: str, count: int) -> list[LeasedRange]:
        """Lease at most this many messages."""
        request = ReceiveRequest(self._topic, worker, count, _BYTES_MAX, 0)
        body = await self._client.private(None, RECEIVE_KEY, msgspec.msgpack.encode(request))
        response = msgspec.msgpack.decode(body, type=ReceiveResponse)
        if response.error:
            raise RuntimeError(response.message)
        return [lease for part in response.partitions for lease in part.leases]

    async def settle(self, worker: str, ranges: Sequence[tuple[int, int]], verb: Verb) -> None:
        settled = [SettledRange(start, end, verb) for start, end in ranges]
        request = SettleRequest(self._topic, worker, [PartitionSettles(self._topic, 0, settled)])
        body = await self._client.private(None, SETTLE_KEY, msgspec.msgpack.encode(request))
        response = msgspec.msgpack.decode(body, type=SettleResponse)
        if response.error or any(code for outcomes in response.results for code, _ in outcomes):
            raise RuntimeError(f"messages could not be settled: {response}")

    async def lease_each_tenth(self, count: int) -> None:
        """Lease all messages to a slow worker, which keeps every tenth."""
        held: list[LeasedRange] = []
        while sum(held_range.end - held_range.start for held_range in held) < count:
            held += await self.lease("slow", _SLOW_AT_ONCE)
        for lease in held:
            released = [
                (start, min(start + _EACH - 1, lease.end)) for start in range(lease.start + 1, lease.end, _EACH)
            ]
            await self.settle("slow", released, Verb.RELEASE)

    async def cost_us(self) -> float:
        """Return the server's CPU per leased and accepted message, with as many published before."""
        self.publish(TAKEN)
        await asyncio.sleep(0.1)
        before_ns, taken = _cpu_ns(self._server.pid), 0
        for _ in range(TAKEN // AT_ONCE):
            leases = await self.lease("quick", AT_ONCE)
            await self.settle("quick", [(lease.start, lease.end) for lease in leases], Verb.ACCEPT)
            taken += sum(lease.end - lease.start for lease in leases)
        return (_cpu_ns(self._server.pid) - before_ns) / taken / 1e3


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process's threads, with a finer resolution than clock ticks."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def measure() -> dict[str, float]:
    """Run all measurements on a new server."""
    results: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder,
        Server(Path(folder) / "data") as server,
    ):
        for spread in (False, True):
            uvloop.run(_measure(server, spread, results))
        server.stop()
    return results


async def _measure(server: Server, spread: bool, results: dict[str, float]) -> None:
    """Record the cost of a message behind a short and behind a long backlog, in alternating rounds."""
    # With every tenth message leased, all others come from the backlog.
    short = MIDDLE if spread else SHORT
    kind = "every tenth leased, in runs of nine" if spread else "not scanned yet"
    costs: dict[int, list[float]] = {short: [], LONG: []}
    async with Client.connect(server.kafka, client_id="bench", timeout_s=120) as client:
        benches = {backlog: await _prepare(server, client, backlog, spread, results) for backlog in costs}
        for _ in range(ROUNDS):
            for backlog, bench in benches.items():
                costs[backlog].append(await bench.cost_us())
    for backlog in costs:
        results[f"server µs per message, behind a backlog of {backlog:,} ({kind})"] = median(costs[backlog])
    ratios = [long / few for few, long in zip(*costs.values(), strict=True)]
    results[f"cost ratio, behind a backlog of {LONG:,} / {short:,} ({kind})"] = median(ratios)


async def _prepare(server: Server, client: Client, backlog: int, spread: bool, results: dict[str, float]) -> Bench:
    """Publish a backlog and begin to work on it; record the growth of memory with the long one."""
    topic = f"backlog-{backlog}-{spread}".lower()
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    bench = Bench(server, client, topic)
    bench.publish(backlog)
    await SubscriptionClient(client).create(topic, [topic], _SETTINGS)
    leases = await bench.lease("quick", AT_ONCE)
    await bench.settle("quick", [(lease.start, lease.end) for lease in leases], Verb.ACCEPT)
    if spread:
        before = await _resident(server)
        await bench.lease_each_tenth(backlog - AT_ONCE)
        if backlog == LONG:
            results["memory of a million messages, every tenth leased, MB"] = (await _resident(server) - before) / 1e6
    return bench


async def _resident(server: Server) -> int:
    """Return the memory of the server at rest."""
    await asyncio.sleep(_REST_S)
    return resident_of_tree(server.pid)
