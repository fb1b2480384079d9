"""`make chaos-overload`: clients that take all they can, and batches that decompress to far more than they are.

python -m trials.chaos_overload [--quick] [--only TEXT]

While each of them is at work, a bystander publishes a message and consumes it 20 times a second, and another client
asks for the node's health. On a quiet machine 99 of 100 of the bystander's messages take less than 250 ms and none a
second; health stays 200, and the broker's memory inside its budget. The floods are sent by a process of their own
(`overload_flood`). Batches of every codec, just under and far over the limit, go to a plain, a compacted, an ordered
and a filtered topic, and are then read through every door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiokafka
import httpx
from benchmarks import overload_flood
from benchmarks.percentiles import percentile
from benchmarks.processes import resident_of

import millstream
from millstream.core.errors import MillstreamError, RequestTimedOut
from millstream.protocol.records.batch import COMPRESSION_GZIP, COMPRESSION_LZ4, COMPRESSION_SNAPPY, COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

P99_MS_MAX: Final = 250.0
WORST_MS_MAX: Final = 1000.0
GROWTH_BYTES_MAX: Final = 768 * 1024 * 1024
"""The budget of bytes in flight (256 MiB), and what one commit, one look at each queue and the allocator take."""

RATE_PER_S: Final = 20
SETTLE_S: Final = 3.0
CODECS: Final = {
    "gzip": COMPRESSION_GZIP,
    "snappy": COMPRESSION_SNAPPY,
    "lz4": COMPRESSION_LZ4,
    "zstd": COMPRESSION_ZSTD,
}
UNDER_BYTES, OVER_BYTES = 7 * 1024 * 1024, 120 * 1024 * 1024
TOPICS: Final = ("plain", "compacted", "ordered", "filtered")
FLOOD_KINDS: Final = tuple(overload_flood.REQUESTS)


@dataclass
class Seen:
    """What the bystander and the health checks experienced."""

    times_ms: list[float] = field(default_factory=list)
    health: list[int | str] = field(default_factory=list)
    peak_bytes: int = 0


class Watch:
    """The bystander, and the questions for health, while something goes on."""

    def __init__(self, server: Server, settle_s: float) -> None:
        self._server = server
        self._settle_s = settle_s
        self._ended = asyncio.Event()
        self.seen = Seen()

    async def during(self, trouble: Awaitable[object]) -> Seen:
        """Watch until the trouble is over, and a moment longer."""
        tasks = [asyncio.create_task(each) for each in (self._stand_by(), self._ask_health(), self._look_at_memory())]
        try:
            await trouble
            await asyncio.sleep(self._settle_s)
        finally:
            self._ended.set()
            await asyncio.gather(*tasks)
        return self.seen

    async def _stand_by(self) -> None:
        async with Client.connect(self._server.kafka) as publisher, Client.connect(self._server.kafka) as consumer:
            await publisher.leader_of("bystander", 0, create=True)
            while not self._ended.is_set():
                began = time.monotonic()
                batch = encode_batch([NewRecord(None, b"x" * 100, (), int(time.time() * 1000))])
                produced = await publisher.produce("bystander", 0, batch)
                await consumer.fetch("bystander", 0, produced.base_offset)
                took_s = time.monotonic() - began
                self.seen.times_ms.append(took_s * 1000)
                await asyncio.sleep(max(0.0, 1 / RATE_PER_S - took_s))

    async def _ask_health(self) -> None:
        async with httpx.AsyncClient(timeout=30) as http:
            while not self._ended.is_set():
                try:
                    self.seen.health.append((await http.get(f"http://{self._server.http}/healthz")).status_code)
                except httpx.HTTPError as error:
                    self.seen.health.append(type(error).__name__)
                await asyncio.sleep(0.5)

    async def _look_at_memory(self) -> None:
        while not self._ended.is_set():
            self.seen.peak_bytes = max(self.seen.peak_bytes, resident_of(self._server.pid))
            await asyncio.sleep(0.1)


async def flood(server: Server, kind: str, connections: int, seconds: float) -> dict[str, int]:
    """Flood the server from another process; what came of it."""
    address = server.http if kind == overload_flood.HTTP else server.kafka
    arguments = [kind, str(connections), str(seconds), address, "flooded"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.overload_flood", *arguments, stdout=PIPE
    )
    out, _ = await process.communicate()
    report: dict[str, int] = json.loads(out)
    return report


# -- batches that hold more than they are ----------------------------------------------------------------------------


def bombs() -> list[bytearray]:
    """Batches of every codec just under and far over the limits, one that hides it, and one with very many records."""
    now_ms = int(time.time() * 1000)
    made = []
    for codec in CODECS.values():
        for size in (UNDER_BYTES, OVER_BYTES):
            batch = encode_batch([NewRecord(b"k", bytes(size), (), now_ms)], compression=codec)
            if len(batch) < 1024 * 1024:
                made.append(batch)
    records = [NewRecord(b"%d" % (number % 100), b"", (), now_ms) for number in range(2_500)]
    made.append(encode_batch(records, compression=COMPRESSION_ZSTD))
    return made


class Doors:
    """The ways to the messages of the topics."""

    def __init__(self, kafka: str, gateway: str, http: httpx.AsyncClient) -> None:
        self._kafka = kafka
        self._http = http
        self._api = f"http://{gateway}/v1"
        self.refused = 0
        self.accepted = 0

    async def declare(self) -> None:
        """Make the topics, and two subscriptions on each."""
        for topic in TOPICS:
            settings = {"cleanup.policy": "compact"} if topic == "compacted" else {}
            await self._post("/topics", {"topic": topic, "partitions": 1, "settings": settings})
            asked: dict[str, object] = {"topics": [topic], "start": "start"}
            if topic == "ordered":
                asked["ordered"] = True
            if topic == "filtered":
                asked["filter"] = "key = 'last'"
            for door in ("http", "sdk"):
                await self._post("/subscriptions", {"name": f"{topic}-{door}", **asked})

    async def send(self, rounds: int) -> None:
        """Send the bombs to every topic, each followed by a message that has to arrive."""
        batches = bombs()
        async with Client.connect(self._kafka) as client:
            for topic in TOPICS:
                for _ in range(rounds):
                    for batch in batches:
                        try:
                            await client.produce(topic, 0, bytearray(batch))
                        except MillstreamError:
                            self.refused += 1
                        else:
                            self.accepted += 1
                last = NewRecord(b"last", b"last", (), int(time.time() * 1000))
                await client.produce(topic, 0, encode_batch([last]))

    async def read(self) -> list[str]:
        """Read every topic through every door; which of them did not come to the last message."""
        doors: dict[str, Callable[[str], Awaitable[None]]] = {
            "http": self._pull,
            "sdk": self._work,
            "kafka": self._consume,
            "tail": self._tail,
        }
        stuck = []
        for topic in TOPICS:
            for name, door in doors.items():
                try:
                    async with asyncio.timeout(120):
                        await door(topic)
                except (TimeoutError, MillstreamError, httpx.HTTPError) as error:
                    stuck.append(f"{topic} by {name}: {type(error).__name__}: {error}")
        return stuck

    async def _post(self, path: str, body: object) -> httpx.Response:
        answer = await self._http.post(self._api + path, json=body)
        answer.raise_for_status()
        return answer

    async def _pull(self, topic: str) -> None:
        while True:
            path = f"/subscriptions/{topic}-http/messages"
            pulled = (await self._post(f"{path}:pull", {"max": 1000, "wait_ms": 20_000})).json()["messages"]
            if pulled:
                await self._post(f"{path}:settle", {"accept": [one["lease"] for one in pulled]})
            if any(one.get("key") == "last" for one in pulled):
                return

    async def _work(self, topic: str) -> None:
        async with (
            millstream.connect(self._kafka) as connection,
            connection.subscription(topic, name=f"{topic}-sdk") as stream,
        ):
            async for message in stream:
                await message.ack()
                if message.key == b"last":
                    return

    async def _consume(self, topic: str) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            topic, bootstrap_servers=self._kafka, auto_offset_reset="earliest", group_id=None
        )
        await consumer.start()
        try:
            async for message in consumer:
                if message.key == b"last":
                    return
        finally:
            await consumer.stop()

    async def _tail(self, topic: str) -> None:
        command = [sys.executable, "-m", "millstream.cli.main", "tail", topic, "--from", "start", "--json"]
        process = await asyncio.create_subprocess_exec(*command, "--brokers", self._kafka, stdout=PIPE)
        out, _ = await process.communicate()
        # It ends with 1 where it passed over a batch that cannot be read.
        if process.returncode not in (0, 1) or b'"last"' not in out[-1000:]:
            raise RequestTimedOut(f"tail ended with {process.returncode} and {out[-200:]!r}")


def verdict(name: str, seen: Seen, before_bytes: int) -> tuple[str, list[str]]:
    """One line of what happened, and what was wrong with it."""
    times = seen.times_ms or [float("inf")]
    p99, worst = percentile(times, 99), max(times)
    growth = seen.peak_bytes - before_bytes
    line = (
        f"{name:32} bystander {len(times):4} messages, p50 {percentile(times, 50):5.0f} ms, p99 {p99:5.0f} ms, worst "
        f"{worst:5.0f} ms; health {dict.fromkeys(seen.health)!s}; memory +{growth // 2**20} MiB"
    )
    wrong = []
    if p99 > P99_MS_MAX or worst > WORST_MS_MAX:
        wrong.append(f"{name}: the bystander waited, p99 {p99:.0f} ms, worst {worst:.0f} ms")
    if set(seen.health) != {200}:
        wrong.append(f"{name}: health was {seen.health}")
    if growth > GROWTH_BYTES_MAX:
        wrong.append(f"{name}: the broker grew by {growth // 2**20} MiB")
    return line, wrong


class Chaos:
    """All trials against one server."""

    def __init__(self, server: Server, http: httpx.AsyncClient, *, settle_s: float = SETTLE_S) -> None:
        self._server = server
        self._http = http
        self._settle_s = settle_s
        self.wrong: list[str] = []

    async def prepare(self) -> None:
        """Have something to fetch, and let the broker load what it loads when it is first used."""
        async with Client.connect(self._server.kafka) as client:
            await client.leader_of("flooded", 0, create=True)
            records = [NewRecord(None, bytes(1000), (), int(time.time() * 1000)) for _ in range(100)]
            await client.produce("flooded", 0, encode_batch(records))
        await Watch(self._server, self._settle_s).during(asyncio.sleep(1))

    async def watch(self, name: str, trouble: Awaitable[object]) -> Seen:
        """Watch one trial, and say what came of it."""
        before = resident_of(self._server.pid)
        seen = await Watch(self._server, self._settle_s).during(trouble)
        line, wrong = verdict(name, seen, before)
        sys.stderr.write(line + "\n")
        self.wrong += wrong
        return seen

    async def bomb(self, rounds: int) -> None:
        """Send the bombs and read them through every door."""
        doors = Doors(self._server.kafka, self._server.http, self._http)
        await doors.declare()
        await self.watch("bombs are sent", doors.send(rounds))
        sys.stderr.write(f"{doors.accepted} batches were accepted, {doors.refused} refused\n")

        await self.watch("bombs are read", self._read())

    async def _read(self) -> None:
        # In a process of its own: it is busy with decompressing, and the bystander is not to wait for that.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trials.chaos_overload",
            "--doors",
            self._server.kafka,
            self._server.http,
            stdout=PIPE,
        )
        out, _ = await process.communicate()
        self.wrong += json.loads(out or b'["the readers failed"]')


async def run(arguments: argparse.Namespace) -> list[str]:
    """Every trial; what went wrong."""
    seconds, counts, rounds = (3.0, (50,), 1) if arguments.quick else (10.0, (50, 150, 400), 5)
    folder = tempfile.TemporaryDirectory(prefix="millstream-overload-")
    with folder as path, Server(Path(path) / "data") as server:
        async with httpx.AsyncClient(timeout=60) as http:
            chaos = Chaos(server, http)
            await chaos.prepare()
            for kind in FLOOD_KINDS:
                for count in counts:
                    name = f"{count} connections: {kind}"
                    if arguments.only in name:
                        await chaos.watch(name, flood(server, kind, count, seconds))
            if arguments.only in "bombs":
                await chaos.bomb(rounds)
    return chaos.wrong


async def read_through_doors(kafka: str, gateway: str) -> list[str]:
    """Read what is there through every door; those that did not come to the end."""
    async with httpx.AsyncClient(timeout=60) as http:
        return await Doors(kafka, gateway, http).read()


def main() -> None:
    """Run the trials; the exit code says whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer connections, and shorter")
    parser.add_argument("--only", default="", help="only trials whose name has this text in it; bombs is one")
    parser.add_argument("--doors", nargs=2, metavar="HOST:PORT", help="only read, from this broker and this gateway")
    arguments = parser.parse_args()
    if arguments.doors:
        sys.stdout.write(json.dumps(asyncio.run(read_through_doors(*arguments.doors))) + "\n")
        return
    wrong = asyncio.run(run(arguments))
    for each in wrong:
        sys.stderr.write(f"WRONG: {each}\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
