"""`make chaos-overload`: clients that take all they can, and batches that decompress to far more than their size.

python -m trials.chaos_overload [--quick] [--only TEXT] [--peer]

During each of them, a bystander publishes a message and consumes it 20 times a second, and twice a second a client
reconnects and the node's health is asked for. On a quiet machine 99 of 100 of the bystander's messages take less than
250 ms, and none a second, nor does a client that connects; health stays 200, and the memory of the broker and of its
gateway inside their budgets. A minute later everything is back to normal. The floods are sent by a process of their own
(`overload_flood`); with `--peer`, Apache Kafka is flooded alike, for comparison. Batches of every codec, just under and
far over the limit, go to a plain, a compacted, an ordered and a filtered topic, and are then read through every
interface. Each criterion that does not hold is printed, and the exit code is 1.
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
from benchmarks.peers.unavailable import PeerUnavailable
from benchmarks.percentiles import percentile
from benchmarks.processes import resident_of, tree_of
from confluent_kafka import ShareConsumer

import millstream
from millstream.client.admin.topics import create_topic
from millstream.core import push
from millstream.core.errors import MillstreamError, RequestTimedOut, UnreadableData
from millstream.pipelines.jobs.land.task import LandTasks, Work, from_rows
from millstream.pipelines.lake.columns import RAW
from millstream.pipelines.lake.delta_table import open_table
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
"""The budget of bytes in flight (256 MiB), and what one commit, one look at each queue and the allocator take."""

CHILDREN_GROWTH_BYTES_MAX: Final = 640 * 1024 * 1024
"""The gateway's budgets (192, 192 and 64 MiB), the filter process with one batch in it, and the allocators."""
LEFT_BYTES_MAX: Final = 256 * 1024 * 1024
"""How much more memory broker and children may hold than before, a minute after all trials."""

CONNECTS_MS_MAX: Final = 3000
"""The same for a new connection beside clients that connect all the time: the kernel's queue may be full, and the
client's system then tries again after a second."""
RATE_PER_S: Final = 20
SETTLE_S: Final = 3.0
AFTER_S: Final = 60.0
DOOR_S_MAX: Final = 120.0
ONCE: Final = frozenset({"share", "spark", "landing"})
CODECS: Final = {
    "gzip": COMPRESSION_GZIP,
    "snappy": COMPRESSION_SNAPPY,
    "lz4": COMPRESSION_LZ4,
    "zstd": COMPRESSION_ZSTD,
}
UNDER_BYTES, OVER_BYTES = 7 * 1024 * 1024, 120 * 1024 * 1024
FLOODED, BYSTANDER = "flooded", "bystander"
TOPICS: Final = ("plain", COMPACTED := "compacted", "ordered", "filtered")
"""The second accepts no batch that it cannot read, as it needs the keys."""
PEER_KINDS: Final = frozenset(overload_flood.KINDS) - {overload_flood.HTTP, overload_flood.SHARE_FETCH}
"""What Apache Kafka is flooded with: it has no HTTP, and shares nothing with those who are in no share group."""


@dataclass
class Seen:
    """The observations of the bystander and of the health checks."""

    times_ms: list[float] = field(default_factory=list)
    connects_ms: list[float] = field(default_factory=list)
    """How long a new connection took to get a response; infinity if there was none."""
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
        self.seen = Seen()

    async def during(self, trouble: Awaitable[object]) -> Seen:
        """Watch until the trial is over, and a moment longer."""
        watching = [self._stand_by(), self._connect(), self._look_at_memory()]
        if self._has_health:
            watching.append(self._ask_health())
        tasks = [asyncio.create_task(each) for each in watching]
        try:
            await trouble
            await asyncio.sleep(self._settle_s)
        finally:
            self._ended.set()
            await asyncio.gather(*tasks)
        return self.seen

    async def _stand_by(self) -> None:
        async with Client.connect(self._server.kafka) as publisher, Client.connect(self._server.kafka) as consumer:
            while not self._ended.is_set():
                began = time.monotonic()
                batch = encode_batch([NewRecord(None, b"x" * 100, (), int(time.time() * 1000))])
                produced = await publisher.produce(BYSTANDER, 0, batch)
                await consumer.fetch(BYSTANDER, 0, produced.base_offset)
                took_s = time.monotonic() - began
                self.seen.times_ms.append(took_s * 1000)
                await asyncio.sleep(max(0.0, 1 / RATE_PER_S - took_s))

    async def _connect(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                async with Client.connect(self._server.kafka) as client:
                    await client.metadata([BYSTANDER])
                self.seen.connects_ms.append((time.monotonic() - began) * 1000)
            except MillstreamError as error:
                self.seen.connects_ms.append(math.inf)
                self.seen.connect_errors.append(str(error))
            await asyncio.sleep(0.5)

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
            broker_bytes, children_bytes = memory_of(self._server)
            self.seen.peak_bytes = max(self.seen.peak_bytes, broker_bytes)
            self.seen.children_peak_bytes = max(self.seen.children_peak_bytes, children_bytes)
            await asyncio.sleep(0.1)


def memory_of(server: Server) -> tuple[int, int]:
    """The memory of a broker, and that of the processes that it has started."""
    pid, *children = tree_of(server.pid)
    return resident_of(pid), sum(map(resident_of, children))


async def flood(server: Server, kind: str, connections: int, seconds: float) -> dict[str, int]:
    """Flood the server from another process; what it sent, and what got a response."""
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
            settings = {"cleanup.policy": "compact"} if topic == COMPACTED else {}
            await self._post("/topics", {"topic": topic, "partitions": 1, "settings": settings})
            asked: dict[str, object] = {"topics": [topic], "start": "start"}
            if topic == "ordered":
                asked["ordered"] = True
            if topic == "filtered":
                asked["filter"] = "key = 'last'"
            for door in ("http", "sdk", "share"):
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

    async def read(self, *, is_quick: bool) -> list[str]:
        """Read every topic through every interface; return those that did not reach the last message.

        To be quick, the doors that do not depend on the kind of topic are tried with one.
        """
        doors: dict[str, Callable[[str], Awaitable[None]]] = {
            "http": self._pull,
            "sdk": self._work,
            "kafka": self._consume,
            "tail": self._tail,
            "share": lambda topic: asyncio.to_thread(share, self._kafka, topic),
            "spark": lambda topic: asyncio.to_thread(read_as_spark, self._kafka, topic),
            "landing": lambda topic: asyncio.to_thread(land, self._kafka, topic),
        }
        if not is_quick:
            doors["push"] = self._push
            doors["a Spark executor"] = lambda topic: asyncio.to_thread(read_by_executor, self._kafka, topic)
        stuck = []
        for topic in TOPICS:
            for name, door in doors.items():
                if is_quick and topic != TOPICS[0] and name in ONCE:
                    continue
                try:
                    async with asyncio.timeout(DOOR_S_MAX):
                        await door(topic)
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
            asked = {"name": f"{topic}-push", "topics": [topic], "start": "start", "settings": {push.URL: url}}
            await self._post("/subscriptions", asked)
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
        # It ends with 1 where it passed over a batch that cannot be read.
        if process.returncode not in (0, 1) or b'"last"' not in out[-1000:]:
            raise RequestTimedOut(f"tail ended with {process.returncode} and {out[-200:]!r}")


def share(brokers: str, topic: str) -> None:
    """Consume with Kafka's share consumer until the last message comes."""
    settings = {"bootstrap.servers": brokers, "group.id": f"{topic}-share", "share.acknowledgement.mode": "implicit"}
    consumer = ShareConsumer({**settings, "log_level": 0})
    try:
        consumer.subscribe([topic])
        until = time.monotonic() + DOOR_S_MAX
        while time.monotonic() < until:
            if any(message.error() is None and message.key() == b"last" for message in consumer.poll(0.5)):
                return
    finally:
        consumer.close()
    raise RequestTimedOut("the last message did not come")


def whole(brokers: str, topic: str) -> tuple[Range, ReadOptions]:
    """All of the partition of a topic, and how it is read."""
    options = read_options({BROKERS: brokers, "subscribe": topic, "failOnUnreadable": "false"})
    link = link_to(brokers, client_id=options.client_id, timeout_s=options.timeout_s)
    end = link.call(link.client.list_offsets(topic, {0: OFFSET_LATEST}))[0].offset
    return Range(topic, 0, 0, int(end)), options


def read_as_spark(brokers: str, topic: str) -> None:
    """Read a topic as a task of Spark does, which has to name what it skips unless configured to."""
    one, options = whole(brokers, topic)
    last: bytes | None = None
    for columns in read_columns(Range(topic, 0, one.start, one.end), options, frozenset({"key"})):
        last = columns.keys.to_list()[-1] if columns.keys is not None else None
    if last != b"last":
        raise RequestTimedOut(f"the last key was {last!r}")
    if topic == COMPACTED:
        return
    strict = replace(options, fail_on_unreadable=True)
    try:
        for _ in read_columns(Range(topic, 0, one.start, one.end), strict, frozenset({"key"})):
            pass
    except UnreadableData:
        return
    raise RequestTimedOut("nothing was passed over")


def read_by_executor(brokers: str, topic: str) -> None:
    """Read a topic in a query, by an executor of Spark."""
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
    """Land a topic as a task of the pipeline does; what cannot be read is in the quarantine."""
    one, _ = whole(brokers, topic)
    with tempfile.TemporaryDirectory(prefix="millstream-overload-lake-") as lake:
        table = open_table(f"{lake}/{topic}")
        topic_id = "00000000-0000-0000-0000-000000000001"
        work = Work(writer=table.writer(RAW, topic_id), quarantine=table.quarantine_writer(topic_id))
        tasks = LandTasks(brokers, [[one]], {topic: work})
        numbers = pa.RecordBatch.from_pydict({"number": [0]})
        reported = [tuple(row.values()) for batch in tasks([numbers]) for row in batch.to_pylist()]
        (report,) = from_rows(cast("Any", reported))
        if not report.files or bool(report.quarantined) == (topic == COMPACTED):
            raise RequestTimedOut(f"the report is {report}")


def describe(name: str, seen: Seen) -> str:
    """Return one line about the bystander's latencies."""
    times = seen.times_ms or [float("inf")]
    return (
        f"{name:34} {len(times):5} messages, p50 {percentile(times, 50):5.0f} ms, p99 {percentile(times, 99):5.0f} ms, "
        f"worst {max(times):5.0f} ms, to connect {max(seen.connects_ms, default=float('inf')):5.0f} ms"
    )


def verdict(name: str, seen: Seen, before: tuple[int, int]) -> tuple[str, list[str]]:
    """One line about a kind of overload, and its findings."""
    times = seen.times_ms or [float("inf")]
    p99, worst = percentile(times, 99), max(times)
    growth = seen.peak_bytes - before[0]
    children_growth = seen.children_peak_bytes - before[1]
    line = (
        f"{describe(name, seen)}; health {dict.fromkeys(seen.health)!s}; memory +{growth // 2**20} MiB, children "
        f"+{children_growth // 2**20} MiB"
    )
    wrong = []
    if p99 > P99_MS_MAX or worst > WORST_MS_MAX:
        wrong.append(f"{name}: the bystander waited, p99 {p99:.0f} ms, worst {worst:.0f} ms")
    connect_ms = max(seen.connects_ms, default=math.inf)
    if connect_ms > (CONNECTS_MS_MAX if overload_flood.CONNECT in name.split() else WORST_MS_MAX):
        wrong.append(f"{name}: a new connection waited {connect_ms:.0f} ms; errors: {seen.connect_errors}")
    if set(seen.health) != {200}:
        wrong.append(f"{name}: health was {seen.health}")
    if growth > GROWTH_BYTES_MAX:
        wrong.append(f"{name}: the broker grew by {growth // 2**20} MiB")
    if children_growth > CHILDREN_GROWTH_BYTES_MAX:
        wrong.append(f"{name}: gateway and filter process grew by {children_growth // 2**20} MiB")
    return line, wrong


class Chaos:
    """All trials against one server."""

    def __init__(self, server: Server, http: httpx.AsyncClient, *, settle_s: float = SETTLE_S) -> None:
        self._server = server
        self._http = http
        self._settle_s = settle_s
        self._at_first = (0, 0)
        self.wrong: list[str] = []

    async def prepare(self) -> None:
        """Have something to fetch, and let the broker load what it loads when it is first used."""
        await fill(self._server)
        subscription = {"name": FLOODED, "topics": [FLOODED], "start": "start"}
        (await self._http.post(f"http://{self._server.http}/v1/subscriptions", json=subscription)).raise_for_status()
        await Watch(self._server, self._settle_s).during(asyncio.sleep(1))
        self._at_first = memory_of(self._server)

    async def watch(self, name: str, trouble: Awaitable[object]) -> Seen:
        """Watch one trial, and print the outcome."""
        before = memory_of(self._server)
        seen = await Watch(self._server, self._settle_s).during(trouble)
        line, wrong = verdict(name, seen, before)
        sys.stderr.write(line + "\n")
        self.wrong += wrong
        return seen

    async def flood(self, kinds: Sequence[str], connections: int, seconds: float) -> Seen:
        """Watch floods of these kinds at once; they have to be served, not refused."""
        names = [f"{connections} connections: {kind}" for kind in kinds]
        flooding = asyncio.gather(*(flood(self._server, kind, connections, seconds) for kind in kinds))
        seen = await self.watch(" and ".join(names), flooding)
        for kind, name, counted in zip(kinds, names, flooding.result(), strict=True):
            if kind != overload_flood.SLOW_READER and not counted.get("received_bytes"):
                self.wrong.append(f"{name}: nothing got a response ({counted})")
            if counted.get("refused"):
                self.wrong.append(f"{name}: {counted['refused']} connections got an error")
        return seen

    async def look_back(self, after_s: float) -> None:
        """Check that memory is back to normal, a while after all trials."""
        await asyncio.sleep(after_s)
        await self.watch(f"{after_s:.0f} s later", asyncio.sleep(self._settle_s))
        for name, before, now in zip(("broker", "children"), self._at_first, memory_of(self._server), strict=True):
            if now - before > LEFT_BYTES_MAX:
                self.wrong.append(f"{after_s:.0f} s later: {name} still hold {(now - before) // 2**20} MiB more")

    async def bomb(self, rounds: int) -> None:
        """Send the bombs and read them through every door."""
        doors = Doors(self._server.kafka, self._server.http, self._http)
        await doors.declare()
        await self.watch("bombs are sent", doors.send(rounds))
        sys.stderr.write(f"{doors.accepted} batches were accepted, {doors.refused} refused\n")

        await self.watch("bombs are read", self._read(is_quick=rounds == 1))

    async def _read(self, *, is_quick: bool) -> None:
        # In its own process: it is busy with decompressing, and the bystander is not to wait for that.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trials.chaos_overload",
            "--doors",
            self._server.kafka,
            self._server.http,
            *(["--quick"] if is_quick else []),
            stdout=PIPE,
        )
        out, _ = await process.communicate()
        self.wrong += json.loads(out or b'["the readers failed"]')


async def fill(server: Server) -> None:
    """Make the topics, and have something to fetch."""
    async with Client.connect(server.kafka) as client:
        for topic in (FLOODED, BYSTANDER):
            await create_topic(client, topic, partitions=1, replication=-1, settings={})
        records = [NewRecord(None, bytes(1000), (), int(time.time() * 1000)) for _ in range(100)]
        await client.produce(FLOODED, 0, encode_batch(records))


async def run(arguments: argparse.Namespace) -> list[str]:
    """Run every trial; return what went wrong."""
    seconds, counts, rounds = (3.0, (50,), 1) if arguments.quick else (10.0, (50, 150, 400), 5)
    floods = [(kind, count) for kind in overload_flood.KINDS for count in counts]
    floods = [one for one in floods if arguments.only in f"{one[1]} connections: {one[0]}"]
    with tempfile.TemporaryDirectory(prefix="millstream-overload-") as path:
        with Server(Path(path) / "data", settings={"push-private-addresses": "true"}) as server:
            async with httpx.AsyncClient(timeout=60) as http:
                chaos = Chaos(server, http)
                await chaos.prepare()
                for kind, count in floods:
                    await chaos.flood([kind], count, seconds)
                if arguments.only in "bombs":
                    await chaos.bomb(rounds)
                await chaos.look_back(SETTLE_S if arguments.quick else AFTER_S)
        if arguments.peer:
            await flood_peer(Path(path) / "peer", floods, seconds)
    return chaos.wrong


async def flood_peer(data: Path, floods: Sequence[tuple[str, int]], seconds: float) -> None:
    """Flood Apache Kafka, which syncs before it responds as Millstream does, and print what its bystander sees."""
    try:
        peer = kafka.kafka(data, "always", partitions=1)
    except PeerUnavailable as reason:
        sys.stderr.write(f"Apache Kafka is left out: {reason}\n")
        return
    with peer:
        await fill(peer)
        sys.stderr.write(f"Apache Kafka {kafka.version_of(kafka.fetch())} under the same floods:\n")
        await Watch(peer, SETTLE_S, has_health=False).during(asyncio.sleep(1))
        for kind, count in floods:
            if kind in PEER_KINDS:
                flooding = flood(peer, kind, count, seconds)
                seen = await Watch(peer, SETTLE_S, has_health=False).during(flooding)
                sys.stderr.write(describe(f"{count} connections: {kind}", seen) + "\n")


async def read_through_doors(kafka: str, gateway: str, *, is_quick: bool) -> list[str]:
    """Read the topics through every interface; return those that did not reach the end."""
    async with httpx.AsyncClient(timeout=60) as http:
        return await Doors(kafka, gateway, http).read(is_quick=is_quick)


def main() -> None:
    """Run the trials; the exit code says whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer connections, and shorter")
    parser.add_argument("--only", default="", help="only trials whose name has this text in it; bombs is one")
    parser.add_argument("--peer", action="store_true", help="flood Apache Kafka as well, for comparison")
    parser.add_argument("--doors", nargs=2, metavar="HOST:PORT", help="only read, from this broker and this gateway")
    arguments = parser.parse_args()
    if arguments.doors:
        stuck = asyncio.run(read_through_doors(*arguments.doors, is_quick=arguments.quick))
        sys.stdout.write(json.dumps(stuck) + "\n")
        return
    wrong = asyncio.run(run(arguments))
    for each in wrong:
        sys.stderr.write(f"WRONG: {each}\n")
    sys.stderr.write(f"{len(wrong)} criteria do not hold\n" if wrong else "all criteria hold\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
