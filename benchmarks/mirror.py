"""`make bench-mirror`: the lag and cost of a mirror, compared with MirrorMaker 2, and the time of failover and reverse.

    python -m benchmarks.mirror [--full] [--peer] [--move] [--delay-ms MS]

One node on each side, on loopback, or behind a link with a delay. It measures

- the lag: from when the source acknowledges a message until a consumer of the target has it, at 10 and 100 MB/s;
- the CPU seconds for each GB that is copied, of the source and of the target; with `--peer` also those of MirrorMaker 2
  (fetched by Maven) and of the same two servers, for the same backlog;
- how long `mirror failover` takes;
- how many bytes `reverse` sends when both sides have written 1 MB since they were equal;
- with `--move`, how long it takes to move a backlog from Apache Kafka, and its cutover.

The short form takes less than a minute without `--peer`; `--full` copies 1 GB and measures for longer. If this
machine cannot reach a rate, the actual rate is reported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from benchmarks.peers.kafka import fetch, kafka
from benchmarks.percentiles import percentile
from benchmarks.processes import cpu_of
from benchmarks.subject import PeerUnavailable
from confluent_kafka import Consumer, Producer, TopicPartition

from millstream_testing.command import CommandLine, Outcome
from millstream_testing.link_relay import RelayThread
from millstream_testing.mirror_trial import Link, Site
from millstream_testing.server import Server

MB = 1_000_000
MESSAGE_BYTES = 50_000
TIMEOUT_S = 300.0
PARTITIONS = 4
MIRROR = "bench"
_POM = Path(__file__).parent / "peers" / "mirror_maker.pom.xml"


class Sizes(NamedTuple):
    """How much is measured."""

    backlog_mb: int
    lag_s: float
    rates_mb: tuple[int, ...] = (10, 100)


class Lag(NamedTuple):
    """The latency of messages through the mirror, and the actual rate."""

    p50_ms: float
    p99_ms: float
    mb_per_s: float


class Pair:
    """A source and a target that mirrors it. With a delay, they reach each other through relays, clients directly."""

    def __init__(self, folder: Path, thread: RelayThread, delay_s: float) -> None:
        self._sites = [Site(folder, name, thread, Link(delay_s=delay_s), {}) for name in ("source", "target")]
        self.source, self.target = (site.nodes[0] for site in self._sites)
        self._is_delayed = delay_s > 0

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        for site in self._sites:
            site.close()

    def address(self, server: Server) -> str:
        """Return the address of a server for the other side."""
        (site,) = (site for site in self._sites if server in site.nodes)
        return site.outside if self._is_delayed else server.kafka

    def mirror(self, topic: str) -> None:
        """Start mirroring a topic to the target."""
        name = f"{MIRROR}-{topic}"
        _checked(
            CommandLine(self.target.kafka)(
                "mirror", "create", name, "--from", self.address(self.source), "--topics", topic
            )
        )


def main() -> int:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="copy 1 GB and measure for longer")
    parser.add_argument("--peer", action="store_true", help="measure MirrorMaker 2, too")
    parser.add_argument("--move", action="store_true", help="measure the move of a backlog from Apache Kafka, too")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="the delay of the link in each direction")
    arguments = parser.parse_args()
    sizes = Sizes(1000, 20.0) if arguments.full else Sizes(200, 5.0)
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder,
        RelayThread() as thread,
        Pair(Path(folder), thread, arguments.delay_ms / 1000) as pair,
    ):
        for rate in sizes.rates_mb:
            lag = measure_lag(pair, rate, sizes.lag_s)
            print(
                f"lag at {rate} MB/s (was {lag.mb_per_s:.0f}): p50 {lag.p50_ms:.0f} ms, p99 {lag.p99_ms:.0f} ms",
                flush=True,
            )
        print(measure_copy(pair, sizes.backlog_mb), flush=True)
        print(measure_failback(pair), flush=True)
        if arguments.peer:
            try:
                print(measure_peer(pair, sizes.backlog_mb, Path(folder)), flush=True)
            except PeerUnavailable as reason:
                print(f"MirrorMaker 2 was not measured: {reason}", flush=True)
        if arguments.move:
            try:
                print(measure_move(pair, sizes.backlog_mb, Path(folder)), flush=True)
            except PeerUnavailable as reason:
                print(f"The move from Apache Kafka was not measured: {reason}", flush=True)
    return 0


# -- the lag ------------------------------------------------------------------------------------------------------


def measure_lag(pair: Pair, rate_mb: int, seconds: float) -> Lag:
    """Publish at a rate; compare the times of acknowledgement at the source and of arrival at the target."""
    topic = f"lag-{rate_mb}"
    _create(pair.source, topic)
    pair.mirror(topic)
    _wait_for_end(pair.target, topic, 0)
    stored: dict[tuple[int, int], float] = {}
    read: dict[tuple[int, int], float] = {}
    stopping = threading.Event()
    reader = threading.Thread(target=_read, args=(pair.target, topic, read, stopping), daemon=True)
    reader.start()
    began = time.monotonic()
    sent = _publish_at(pair.source, topic, rate_mb * MB, seconds, stored)
    took_s = time.monotonic() - began
    deadline = time.monotonic() + TIMEOUT_S
    while len(read) < len(stored) and time.monotonic() < deadline:
        time.sleep(0.1)
    stopping.set()
    reader.join()
    # The first second is ignored, because the consumer is still joining.
    late = [
        1000 * max(0.0, read[position] - at) for position, at in stored.items() if at > began + 1 and position in read
    ]
    return Lag(percentile(late, 50), percentile(late, 99), sent / took_s / MB)


def _publish_at(
    server: Server, topic: str, bytes_per_s: float, seconds: float, stored: dict[tuple[int, int], float] | None
) -> int:
    """Publish for some seconds at a rate, or as fast as possible; return the number of bytes."""
    producer = Producer(
        {
            "bootstrap.servers": server.kafka,
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.kbytes": 65536,
        }
    )

    def delivered(error: object, message: object) -> None:
        if error is None and stored is not None:
            position = message.partition(), message.offset()  # type: ignore[attr-defined]
            stored[position] = time.monotonic()

    body, sent, began = os.urandom(MESSAGE_BYTES), 0, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if bytes_per_s and sent > bytes_per_s * (now - began):
            producer.poll(0.002)
            continue
        _produce(producer, topic, body, delivered)
        sent += len(body)
    producer.flush(TIMEOUT_S)
    return sent


def _produce(producer: Producer, topic: str, body: bytes, delivered: Callable[..., None] | None = None) -> None:
    while True:
        try:
            producer.produce(topic, body, on_delivery=delivered)
            break
        except BufferError:
            producer.poll(0.05)
    producer.poll(0)


def _read(server: Server, topic: str, read: dict[tuple[int, int], float], stopping: threading.Event) -> None:
    consumer = Consumer(
        {"bootstrap.servers": server.kafka, "group.id": topic, "fetch.wait.max.ms": 10, "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    while not stopping.is_set():
        for message in consumer.consume(1000, 0.05):
            if message.error() is None:
                read[int(message.partition() or 0), int(message.offset() or 0)] = time.monotonic()
    consumer.close()


# -- the cost -----------------------------------------------------------------------------------------------------


def measure_copy(pair: Pair, megabytes: int) -> str:
    """Copy a backlog; return the CPU seconds for each GB."""
    topic = "backlog"
    end = _fill(pair.source, topic, megabytes)
    with _cpu(pair) as used:
        pair.mirror(topic)
        took_s = _wait_for_end(pair.target, topic, end)
    return _cost("Millstream", used, megabytes, took_s)


def measure_peer(pair: Pair, megabytes: int, folder: Path) -> str:
    """Copy with MirrorMaker 2 a backlog of the same size between the same servers."""
    topic = "peer"
    end = _fill(pair.source, topic, megabytes)
    properties = folder / "mm2.properties"
    properties.write_text(
        f"""clusters = source, target
source.bootstrap.servers = {pair.address(pair.source)}
target.bootstrap.servers = {pair.target.kafka}
source->target.enabled = true
source->target.topics = {topic}
target->source.enabled = false
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
config.storage.replication.factor = 1
tasks.max = {PARTITIONS}
emit.heartbeats.enabled = false
"""
    )
    java = ["java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{fetch(_POM)}/*"]
    with (folder / "mm2.log").open("wb") as log:
        command = [*java, "org.apache.kafka.connect.mirror.MirrorMaker", str(properties)]
        maker = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        # Its startup is not counted.
        _wait_for_end(pair.target, f"source.{topic}", 1)
        done = sum(_ends(pair.target, f"source.{topic}"))
        with _cpu(pair, maker.pid) as used:
            took_s = _wait_for_end(pair.target, f"source.{topic}", end)
        return _cost("MirrorMaker 2", used, megabytes * (1 - done / end), took_s)
    finally:
        maker.kill()
        maker.wait()


def measure_move(pair: Pair, megabytes: int, folder: Path) -> str:
    """Copy a backlog from Apache Kafka to the target, and cut over to it; return how long that took."""
    topic, name = "moved", f"{MIRROR}-moved"
    with kafka(folder / "kafka", "os", partitions=PARTITIONS) as peer:
        end = _fill(peer, topic, megabytes)
        target = CommandLine(pair.target.kafka)
        with _cpu_of({"Kafka": peer.pid, "target": pair.target.pid}) as used:
            _checked(target("mirror", "create", name, "--from", peer.kafka, "--topics", topic))
            took_s = _wait_for_end(pair.target, topic, end)
        began = time.monotonic()
        done = _checked(target("mirror", "cutover", name, "--json", "--yes")).document
        cutover_s = time.monotonic() - began
        if not done["complete"]:
            raise SystemExit("the cutover was not complete")
    return f"{_cost('move from Apache Kafka', used, megabytes, took_s)}; cutover: {cutover_s:.1f} s"


@contextmanager
def _cpu(pair: Pair, *others: int) -> Iterator[dict[str, float]]:
    """Measure the CPU seconds of both servers, and of other processes."""
    pids = {"source": pair.source.pid, "target": pair.target.pid}
    with _cpu_of(pids | {f"process {number + 1}": pid for number, pid in enumerate(others)}) as used:
        yield used


@contextmanager
def _cpu_of(pids: dict[str, int]) -> Iterator[dict[str, float]]:
    before = {name: cpu_of(pid) for name, pid in pids.items()}
    used: dict[str, float] = {}
    yield used
    for name, pid in pids.items():
        spent = cpu_of(pid).since(before[name])
        used[name] = spent.user_s + spent.system_s


def _cost(name: str, used: dict[str, float], megabytes: float, took_s: float) -> str:
    parts = ", ".join(f"{which} {seconds * 1000 / megabytes:.1f}" for which, seconds in used.items())
    total = sum(used.values()) * 1000 / megabytes
    return f"{name}: {total:.1f} CPU seconds for each GB ({parts}), {megabytes / took_s:.0f} MB/s"


# -- failover and failback -----------------------------------------------------------------------------------------


def measure_failback(pair: Pair) -> str:
    """Fail over, write 1 MB on both sides, and reverse; return the durations."""
    name = f"{MIRROR}-backlog"
    began = time.monotonic()
    report = _checked(CommandLine(pair.target.kafka)("mirror", "failover", name, "--json", "--yes")).document
    took_s = time.monotonic() - began
    for server in (pair.source, pair.target):
        producer = Producer({"bootstrap.servers": server.kafka})
        for _ in range(MB // MESSAGE_BYTES):
            _produce(producer, "backlog", os.urandom(MESSAGE_BYTES))
        producer.flush(TIMEOUT_S)
    began = time.monotonic()
    target = CommandLine(pair.target.kafka)
    _checked(target("mirror", "reverse", name, "--address", pair.address(pair.target), "--json", "--yes"))
    _wait_for_end(pair.source, "backlog", sum(_ends(pair.target, "backlog")))
    metrics = httpx.get(f"http://{pair.source.http}/metrics", timeout=30).text
    (sent,) = (
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith(f'millstream_mirror_bytes_total{{mirror="{name}"')
    )
    return (
        f"failover: {report['waited_ms'] / 1000:.2f} s, the command {took_s:.2f} s; reverse after 1 MB on each side: "
        f"{sent / MB:.2f} MB sent, equal after {time.monotonic() - began:.1f} s"
    )


# -- topics -------------------------------------------------------------------------------------------------------


def _checked(outcome: Outcome) -> Outcome:
    if outcome.code != 0:
        raise SystemExit(outcome.err)
    return outcome


def _create(server: Server, topic: str) -> None:
    _checked(CommandLine(server.kafka)("topic", "create", topic, "--partitions", str(PARTITIONS)))


def _fill(server: Server, topic: str, megabytes: int) -> int:
    """Create a topic with this many MB; return the number of messages."""
    _create(server, topic)
    producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 5, "batch.size": 1_000_000})
    body, count = os.urandom(MESSAGE_BYTES), megabytes * MB // MESSAGE_BYTES
    for _ in range(count):
        _produce(producer, topic, body)
    producer.flush(TIMEOUT_S)
    return count


def _ends(server: Server, topic: str) -> list[int]:
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "ends"})
    try:
        partitions = consumer.list_topics(topic, 10).topics[topic].partitions
        return [consumer.get_watermark_offsets(TopicPartition(topic, index), 10)[1] for index in partitions]
    finally:
        consumer.close()


def _wait_for_end(server: Server, topic: str, end: int) -> float:
    """Wait until a topic reaches an end offset; return the seconds."""
    began = time.monotonic()
    while time.monotonic() < began + TIMEOUT_S:
        result = CommandLine(server.kafka)("topic", "describe", topic, "--json")
        if result.code == 0:
            has = sum(partition["end"] or 0 for partition in result.document["partitions"])
            if has >= end:
                return time.monotonic() - began
        time.sleep(0.05)
    raise SystemExit(f"{topic} does not reach offset {end} within {TIMEOUT_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
