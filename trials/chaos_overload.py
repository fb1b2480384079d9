"""`make chaos-overload`: floods of requests, and batches that decompress to far more than their size.

python -m trials.chaos_overload [--quick] [--only TEXT] [--peer]

Meanwhile a bystander publishes and consumes a message 20 times a second, and twice a second a client reconnects and the
node's health is checked. On a quiet machine the bystander's p99 is below 250 ms, no message and no new connection takes
a second, health stays 200, and the memory of the broker and of its gateway stays within their budgets. A minute later
everything is back to normal. A separate process sends the floods (`overload_flood`); with `--peer`, Apache Kafka is
flooded in the same way, for comparison. Batches of every codec, just under and far over the limit, go to a plain, a
compacted, an ordered and a filtered topic, and are then read through every interface. Each criterion that is not met is
printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import aiokafka
import httpx
import pyarrow as pa
from benchmarks import overload_flood
from benchmarks.peers import kafka
from benchmarks.percentiles import percentile
from benchmarks.processes import resident_of, tree_of
from benchmarks.subject import PeerUnavailable
from confluent_kafka import ShareConsumer

import millstream
from millstream.client.admin.topics import create_topic
from millstream.core import push
from millstream.core.errors import MillstreamError, RequestTimedOut, UnreadableData
from millstream.pipelines.jobs.land.task import LandTasks, TopicWork, from_rows
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.table import open_table
from millstream.pipelines.source.link import link_to
from millstream.pipelines.source.options import BROKERS, OFFSET_LATEST, ReadOptions, read_options
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_columns
from millstream.protocol.records.batch import COMPRESSION_GZIP, COMPRESSION_LZ4, COMPRESSION_SNAPPY, COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

P99_MS_MAX: Final = 250.0
WORST_MS_MAX: Final = 1000.0
GROWTH_BYTES_MAX: Final = 768 * 1024 * 1024
"""The budget of bytes in flight (256 MiB), plus one commit, one scan of each queue and the allocator."""

CHILDREN_GROWTH_BYTES_MAX: Final = 640 * 1024 * 1024
"""The gateway's budgets (192, 192 and 64 MiB), the filter process with one batch in it, and the allocators."""
RETAINED_BYTES_MAX: Final = 256 * 1024 * 1024
"""How much more memory broker and children may hold than before, a minute after all trials."""

CONNECTS_MS_MAX: Final = 3000
"""The limit for a new connection during a flood of connections: the kernel's queue may be full, and the client's system
then retries after a second."""
RATE_PER_S: Final = 20
SETTLE_S: Final = 3.0
RELEASE_S: Final = 60.0
INTERFACE_S_MAX: Final = 120.0
SINGLE_TOPIC_INTERFACES: Final = frozenset({"share", "spark", "landing"})
CODECS: Final = {
    "gzip": COMPRESSION_GZIP,
    "snappy": COMPRESSION_SNAPPY,
    "lz4": COMPRESSION_LZ4,
    "zstd": COMPRESSION_ZSTD,
}
UNDER_BYTES, OVER_BYTES = 7 * 1024 * 1024, 120 * 1024 * 1024
FLOODED, BYSTANDER = "flooded", "bystander"
TOPICS: Final = ("plain", COMPACTED := "compacted", "ordered", "filtered")
"""The compacted topic rejects batches that cannot be read, because it needs the keys."""
PEER_KINDS: Final = frozenset(overload_flood.KINDS) - {overload_flood.HTTP, overload_flood.SHARE_FETCH}
"""The floods of Apache Kafka: it has no HTTP, and serves share fetches only to members of a share group."""


@dataclass
class Observations:
    """The observations of the bystander and of the health checks."""

    times_ms: list[float] = field(default_factory=list)
    connects_ms: list[float] = field(default_factory=list)
    """The time until a new connection got a response; infinity if it got none."""
    connect_errors: list[str] = field(default_factory=list)
    health: list[int | str] = field(default_factory=list)
    peak_bytes: int = 0
    children_peak_bytes: int = 0


class Watch:
    """The bystander and the health checks during a trial."""

    def __init__(self, server: Server, settle_s: float, *, has_health: bool = True) -> None:
        self._server = server
        self._settle_s = settle_s
        self._has_health = has_health
        self._ended = asyncio.Event()
        self.observed = Observations()

    async def during(self, load: Awaitable[object]) -> Observations:
        """Watch until the load has ended, and a moment longer."""
        watching = [self._produce_and_consume(), self._connect(), self._sample_memory()]
        if self._has_health:
            watching.append(self._check_health())
        tasks = [asyncio.create_task(watcher) for watcher in watching]
        try:
            await load
            await asyncio.sleep(self._settle_s)
        finally:
            self._ended.set()
            await asyncio.gather(*tasks)
        return self.observed

    async def _produce_and_consume(self) -> None:
        async with Client.connect(self._server.kafka) as publisher, Client.connect(self._server.kafka) as consumer:
            while not self._ended.is_set():
                began = time.monotonic()
                batch = encode_batch([NewRecord(None, b"x" * 100, (), int(time.time() * 1000))])
                produced = await publisher.produce(BYSTANDER, 0, batch)
                await consumer.fetch(BYSTANDER, 0, produced.base_offset)
                took_s = time.monotonic() - began
                self.observed.times_ms.append(took_s * 1000)
                await asyncio.sleep(max(0.0, 1 / RATE_PER_S - took_s))

    async def _connect(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                async with Client.connect(self._server.kafka) as client:
                    await client.metadata([BYSTANDER])
                self.observed.connects_ms.append((time.monotonic() - began) * 1000)
            except MillstreamError as error:
                self.observed.connects_ms.append(math.inf)
                self.observed.connect_errors.append(str(error))
            await asyncio.sleep(0.5)

    async def _check_health(self) -> None:
        async with httpx.AsyncClient(timeout=30) as http:
            while not self._ended.is_set():
                try:
                    self.observed.health.append((await http.get(f"http://{self._server.http}/healthz")).status_code)
                except httpx.HTTPError as error:
                    self.observed.health.append(type(error).__name__)
                await asyncio.sleep(0.5)

    async def _sample_memory(self) -> None:
        while not self._ended.is_set():
            broker_bytes, children_bytes = memory_of(self._server)
            self.observed.peak_bytes = max(self.observed.peak_bytes, broker_bytes)
            self.observed.children_peak_bytes = max(self.observed.children_peak_bytes, children_bytes)
            await asyncio.sleep(0.1)


def memory_of(server: Server) -> tuple[int, int]:
    """Return the memory of a broker, and that of its child processes."""
    pid, *children = tree_of(server.pid)
    return resident_of(pid), sum(map(resident_of, children))


async def flood(server: Server, kind: str, connections: int, seconds: float) -> dict[str, int]:
    """Flood the server from another process; return how much it sent and received."""
    address = server.http if kind == overload_flood.HTTP else server.kafka
    arguments = [kind, str(connections), str(seconds), address, FLOODED]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.overload_flood", *arguments, stdout=PIPE
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    counted: dict[str, int] = json.loads(out or b"{}")
    return counted


# -- decompression bombs ---------------------------------------------------------------------------------------------


def bombs() -> list[bytearray]:
    """Return batches of every codec just under and far over the limits, and one with very many records."""
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


class Interfaces:
    """The interfaces through which messages are read."""

    def __init__(self, kafka: str, gateway: str, http: httpx.AsyncClient) -> None:
        self._kafka = kafka
        self._http = http
        self._api = f"http://{gateway}/v1"
        self.refused = 0
        self.accepted = 0

    async def declare(self) -> None:
        """Create the topics, and three subscriptions on each."""
        for topic in TOPICS:
            settings = {"cleanup.policy": "compact"} if topic == COMPACTED else {}
            await self._post("/topics", {"topic": topic, "partitions": 1, "settings": settings})
            subscription: dict[str, object] = {"topics": [topic], "start": "start"}
            if topic == "ordered":
                subscription["ordered"] = True
            if topic == "filtered":
                subscription["filter"] = "key = 'last'"
            for interface in ("http", "sdk", "share"):
                await self._post("/subscriptions", {"name": f"{topic}-{interface}", **subscription})

    async def send(self, rounds: int) -> None:
        """Send the bombs to every topic, followed by a message that must arrive."""
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

    async def read(self, *, is_quick: bool) -> list[str]:
        """Read every topic through every interface; return those that did not reach the last message.

        A quick run tries the interfaces that do not depend on the kind of topic with one topic only.
        """
        interfaces: dict[str, Callable[[str], Awaitable[None]]] = {
            "http": self._pull,
            "sdk": self._work,
            "kafka": self._consume,
            "tail": self._tail,
            "share": lambda topic: asyncio.to_thread(share, self._kafka, topic),
            "spark": lambda topic: asyncio.to_thread(read_as_spark, self._kafka, topic),
            "landing": lambda topic: asyncio.to_thread(land, self._kafka, topic),
        }
        if not is_quick:
            interfaces["push"] = self._push
            interfaces["a Spark executor"] = lambda topic: asyncio.to_thread(read_by_executor, self._kafka, topic)
        stuck = []
        for topic in TOPICS:
            for name, interface in interfaces.items():
                if is_quick and topic != TOPICS[0] and name in SINGLE_TOPIC_INTERFACES:
                    continue
                try:
                    async with asyncio.timeout(INTERFACE_S_MAX):
                        await interface(topic)
                except (TimeoutError, MillstreamError, httpx.HTTPError) as error:
                    stuck.append(f"{topic} by {name}: {type(error).__name__}: {error}")
        return stuck

    async def _post(self, path: str, body: object) -> httpx.Response:
        response = await self._http.post(self._api + path, json=body)
        response.raise_for_status()
        return response

    async def _pull(self, topic: str) -> None:
        while True:
            path = f"/subscriptions/{topic}-http/messages"
            pulled = (await self._post(f"{path}:pull", {"max": 1000, "wait_ms": 20_000})).json()["messages"]
            if pulled:
                await self._post(f"{path}:settle", {"accept": [message["lease"] for message in pulled]})
            if any(message.get("key") == "last" for message in pulled):
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

    async def _push(self, topic: str) -> None:
        last = asyncio.Event()

        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                    if await reader.readexactly(length) == b"last":
                        last.set()
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        endpoint = await asyncio.start_server(receive, "127.0.0.1", 0)
        async with endpoint:
            url = f"http://127.0.0.1:{endpoint.sockets[0].getsockname()[1]}/"
            settings = {"name": f"{topic}-push", "topics": [topic], "start": "start", "settings": {push.URL: url}}
            await self._post("/subscriptions", settings)
            try:
                await last.wait()
            finally:
                await self._http.delete(f"{self._api}/subscriptions/{topic}-push?force=true")

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
        # It exits with 1 when it skipped a batch that cannot be read.
        if process.returncode not in (0, 1) or b'"last"' not in out[-1000:]:
            raise RequestTimedOut(f"tail ended with {process.returncode} and {out[-200:]!r}")


def share(brokers: str, topic: str) -> None:
    """Consume with Kafka's share consumer until the last message arrives."""
    settings = {"bootstrap.servers": brokers, "group.id": f"{topic}-share", "share.acknowledgement.mode": "implicit"}
    consumer = ShareConsumer({**settings, "log_level": 0})
    try:
        consumer.subscribe([topic])
        until = time.monotonic() + INTERFACE_S_MAX
        while time.monotonic() < until:
            if any(message.error() is None and message.key() == b"last" for message in consumer.poll(0.5)):
                return
    finally:
        consumer.close()
    raise RequestTimedOut("the last message did not arrive")


def whole_partition(brokers: str, topic: str) -> tuple[Range, ReadOptions]:
    """Return the range of all messages of a topic, and the options for reading it."""
    options = read_options({BROKERS: brokers, "subscribe": topic, "failOnUnreadable": "false"})
    link = link_to(brokers, client_id=options.client_id, timeout_s=options.timeout_s)
    end = link.call(link.client.list_offsets(topic, {0: OFFSET_LATEST}))[0].offset
    return Range(topic, 0, 0, int(end)), options


def read_as_spark(brokers: str, topic: str) -> None:
    """Read a topic as a Spark task does, which must fail on unreadable batches unless configured to skip them."""
    whole, options = whole_partition(brokers, topic)
    last: bytes | None = None
    for columns in read_columns(Range(topic, 0, whole.start, whole.end), options, frozenset({"key"})):
        last = columns.keys.to_list()[-1] if columns.keys is not None else None
    if last != b"last":
        raise RequestTimedOut(f"the last key was {last!r}")
    if topic == COMPACTED:
        return
    strict = replace(options, fail_on_unreadable=True)
    try:
        for _ in read_columns(Range(topic, 0, whole.start, whole.end), strict, frozenset({"key"})):
            pass
    except UnreadableData:
        return
    raise RequestTimedOut("nothing was skipped")


def read_by_executor(brokers: str, topic: str) -> None:
    """Read a topic with a query on a Spark executor."""
    from millstream.spark.session import session

    spark = session(master="local[1]")
    try:
        rows = spark.read.format("millstream").option("kafka.bootstrap.servers", brokers).option("subscribe", topic)
        last = rows.option("failOnUnreadable", "false").load().where("key = CAST('last' AS BINARY)").count()
    finally:
        spark.stop()
    if last != 1:
        raise RequestTimedOut(f"the last message was read {last} times")


def land(brokers: str, topic: str) -> None:
    """Land a topic as a task of the pipeline does; unreadable batches go to the quarantine."""
    whole, _ = whole_partition(brokers, topic)
    with tempfile.TemporaryDirectory(prefix="millstream-overload-lake-") as lake:
        table = open_table(f"{lake}/{topic}")
        topic_id = "00000000-0000-0000-0000-000000000001"
        work = TopicWork(writer=table.writer(RAW, topic_id), quarantine=table.quarantine_writer(topic_id))
        tasks = LandTasks(brokers, [[whole]], {topic: work})
        numbers = pa.RecordBatch.from_pydict({"number": [0]})
        reported = [tuple(row.values()) for batch in tasks([numbers]) for row in batch.to_pylist()]
        (report,) = from_rows(cast("Any", reported))
        if not report.files or bool(report.quarantined) == (topic == COMPACTED):
            raise RequestTimedOut(f"the report is {report}")


def describe(name: str, observed: Observations) -> str:
    """Return one line about the bystander's latencies."""
    times = observed.times_ms or [float("inf")]
    return (
        f"{name:34} {len(times):5} messages, p50 {percentile(times, 50):5.0f} ms, p99 {percentile(times, 99):5.0f} ms, "
        f"worst {max(times):5.0f} ms, to connect {max(observed.connects_ms, default=float('inf')):5.0f} ms"
    )


def evaluate(name: str, observed: Observations, before: tuple[int, int]) -> tuple[str, list[str]]:
    """Return one line about a kind of overload, and its findings."""
    times = observed.times_ms or [float("inf")]
    p99, worst = percentile(times, 99), max(times)
    growth = observed.peak_bytes - before[0]
    children_growth = observed.children_peak_bytes - before[1]
    line = (
        f"{describe(name, observed)}; health {dict.fromkeys(observed.health)!s}; memory +{growth // 2**20} MiB, "
        f"children +{children_growth // 2**20} MiB"
    )
    findings = []
    if p99 > P99_MS_MAX or worst > WORST_MS_MAX:
        findings.append(f"{name}: the bystander waited, p99 {p99:.0f} ms, worst {worst:.0f} ms")
    connect_ms = max(observed.connects_ms, default=math.inf)
    if connect_ms > (CONNECTS_MS_MAX if overload_flood.CONNECT in name.split() else WORST_MS_MAX):
        findings.append(f"{name}: a new connection waited {connect_ms:.0f} ms; errors: {observed.connect_errors}")
    if set(observed.health) != {200}:
        findings.append(f"{name}: health was {observed.health}")
    if growth > GROWTH_BYTES_MAX:
        findings.append(f"{name}: the broker grew by {growth // 2**20} MiB")
    if children_growth > CHILDREN_GROWTH_BYTES_MAX:
        findings.append(f"{name}: gateway and filter process grew by {children_growth // 2**20} MiB")
    return line, findings


class Chaos:
    """All trials against one server."""

    def __init__(self, server: Server, http: httpx.AsyncClient, *, settle_s: float = SETTLE_S) -> None:
        self._server = server
        self._http = http
        self._settle_s = settle_s
        self._initial_memory = (0, 0)
        self.findings: list[str] = []

    async def prepare(self) -> None:
        """Create data to fetch, and make the broker load the modules of its first use."""
        await create_topics(self._server)
        subscription = {"name": FLOODED, "topics": [FLOODED], "start": "start"}
        (await self._http.post(f"http://{self._server.http}/v1/subscriptions", json=subscription)).raise_for_status()
        await Watch(self._server, self._settle_s).during(asyncio.sleep(1))
        self._initial_memory = memory_of(self._server)

    async def watch(self, name: str, load: Awaitable[object]) -> Observations:
        """Watch one trial, and print the outcome."""
        before = memory_of(self._server)
        observed = await Watch(self._server, self._settle_s).during(load)
        line, findings = evaluate(name, observed, before)
        sys.stderr.write(line + "\n")
        self.findings += findings
        return observed

    async def flood(self, kinds: Sequence[str], connections: int, seconds: float) -> Observations:
        """Watch concurrent floods of these kinds, which must be served, not refused."""
        names = [f"{connections} connections: {kind}" for kind in kinds]
        flooding = asyncio.gather(*(flood(self._server, kind, connections, seconds) for kind in kinds))
        observed = await self.watch(" and ".join(names), flooding)
        for kind, name, counted in zip(kinds, names, flooding.result(), strict=True):
            if kind != overload_flood.SLOW_READER and not counted.get("received_bytes"):
                self.findings.append(f"{name}: nothing got a response ({counted})")
            if counted.get("refused"):
                self.findings.append(f"{name}: {counted['refused']} connections got an error")
        return observed

    async def check_memory_released(self, after_s: float) -> None:
        """Check that memory is released a while after all trials."""
        await asyncio.sleep(after_s)
        await self.watch(f"{after_s:.0f} s later", asyncio.sleep(self._settle_s))
        for name, before, now in zip(
            ("broker", "children"), self._initial_memory, memory_of(self._server), strict=True
        ):
            if now - before > RETAINED_BYTES_MAX:
                self.findings.append(f"{after_s:.0f} s later: {name} still hold {(now - before) // 2**20} MiB more")

    async def bomb(self, rounds: int) -> None:
        """Send the bombs and read them through every interface."""
        interfaces = Interfaces(self._server.kafka, self._server.http, self._http)
        await interfaces.declare()
        await self.watch("bombs are sent", interfaces.send(rounds))
        sys.stderr.write(f"{interfaces.accepted} batches were accepted, {interfaces.refused} refused\n")

        await self.watch("bombs are read", self._read(is_quick=rounds == 1))

    async def _read(self, *, is_quick: bool) -> None:
        # In its own process: decompression must not delay the bystander.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trials.chaos_overload",
            "--interfaces",
            self._server.kafka,
            self._server.http,
            *(["--quick"] if is_quick else []),
            stdout=PIPE,
        )
        out, _ = await process.communicate()
        self.findings += json.loads(out or b'["the readers failed"]')


async def create_topics(server: Server) -> None:
    """Create the topics, with messages to fetch."""
    async with Client.connect(server.kafka) as client:
        for topic in (FLOODED, BYSTANDER):
            await create_topic(client, topic, partitions=1, replication=-1, settings={})
        records = [NewRecord(None, bytes(1000), (), int(time.time() * 1000)) for _ in range(100)]
        await client.produce(FLOODED, 0, encode_batch(records))


async def run(arguments: argparse.Namespace) -> list[str]:
    """Run every trial; return the findings."""
    seconds, counts, rounds = (3.0, (50,), 1) if arguments.quick else (10.0, (50, 150, 400), 5)
    floods = [(kind, count) for kind in overload_flood.KINDS for count in counts]
    floods = [flood for flood in floods if arguments.only in f"{flood[1]} connections: {flood[0]}"]
    with tempfile.TemporaryDirectory(prefix="millstream-overload-") as path:
        with Server(Path(path) / "data", settings={"push-private-addresses": "true"}) as server:
            async with httpx.AsyncClient(timeout=60) as http:
                chaos = Chaos(server, http)
                await chaos.prepare()
                for kind, count in floods:
                    await chaos.flood([kind], count, seconds)
                if arguments.only in "bombs":
                    await chaos.bomb(rounds)
                await chaos.check_memory_released(SETTLE_S if arguments.quick else RELEASE_S)
        if arguments.peer:
            await flood_peer(Path(path) / "peer", floods, seconds)
    return chaos.findings


async def flood_peer(data: Path, floods: Sequence[tuple[str, int]], seconds: float) -> None:
    """Flood Apache Kafka, which syncs before it responds as Millstream does, and print its bystander's latencies."""
    try:
        peer = kafka.kafka(data, "always", partitions=1)
    except PeerUnavailable as reason:
        sys.stderr.write(f"Apache Kafka is skipped: {reason}\n")
        return
    with peer:
        await create_topics(peer)
        sys.stderr.write(f"Apache Kafka {kafka.version_of(kafka.fetch())} under the same floods:\n")
        await Watch(peer, SETTLE_S, has_health=False).during(asyncio.sleep(1))
        for kind, count in floods:
            if kind in PEER_KINDS:
                flooding = flood(peer, kind, count, seconds)
                observed = await Watch(peer, SETTLE_S, has_health=False).during(flooding)
                sys.stderr.write(describe(f"{count} connections: {kind}", observed) + "\n")


async def read_through_interfaces(kafka: str, gateway: str, *, is_quick: bool) -> list[str]:
    """Read the topics through every interface; return those that did not reach the end."""
    async with httpx.AsyncClient(timeout=60) as http:
        return await Interfaces(kafka, gateway, http).read(is_quick=is_quick)


def main() -> None:
    """Run the trials; exit with 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer connections, for a shorter time")
    parser.add_argument("--only", default="", help="only trials whose name contains this text, such as bombs")
    parser.add_argument("--peer", action="store_true", help="flood Apache Kafka as well, for comparison")
    parser.add_argument(
        "--interfaces", nargs=2, metavar="HOST:PORT", help="only read, from this broker and this gateway"
    )
    arguments = parser.parse_args()
    if arguments.interfaces:
        stuck = asyncio.run(read_through_interfaces(*arguments.interfaces, is_quick=arguments.quick))
        sys.stdout.write(json.dumps(stuck) + "\n")
        return
    findings = asyncio.run(run(arguments))
    for finding in findings:
        sys.stderr.write(f"FINDING: {finding}\n")
    sys.stderr.write(f"{len(findings)} criteria are not met\n" if findings else "all criteria are met\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
