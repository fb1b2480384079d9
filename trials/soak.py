"""The soak: an hour of mixed load with kills; memory, file handles and latency must stay flat, and no message is lost.

    python -m trials.soak --minutes 60

The load consists of the producers, the group and the checker of the kill trial, a producer at a fixed rate into a topic
with short retention (its acknowledgements are timed), topics and clients that are created and removed, administrative
requests, and idle connections. The broker is killed and restarted after each quarter. The growth of each series is the
median of the slopes between all pairs of samples (the Theil–Sen estimator), which is insensitive to outliers such as
the minutes with a kill. The exit code is 1 when something grew or was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer

from millstream.client.admin.groups import delete_group, describe_group
from millstream.client.admin.topics import create_topic, delete_topic
from millstream.core.errors import MillstreamError
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import list_groups
from millstream_testing.kill_trial import KillTrial, Outcome, Plan
from millstream_testing.server import Server

KILLS = 3
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.4
"""The share of each interval between two kills that is ignored, while caches and pools fill."""

RATE_PER_S = 50
MESSAGE_BYTES = 1000
IDLE_CONNECTIONS = 200
POINTS_MIN, POINTS_MAX = 6, 300
SLOT_S = 5.0
QUIET: dict[str, Any] = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 500}
RETAINED = {"retention.ms": "20000", "segment.bytes": "1048576"}
SERVER_SETTINGS = {"retention-check-ms": 2000, "group-initial-delay-ms": 100}


@dataclass(slots=True)
class Samples:
    """Samples, each with its time in seconds since the start."""

    began: float = field(default_factory=time.monotonic)
    interval: int = 0
    resident_mb: list[tuple[float, int, float]] = field(default_factory=list)
    handles: list[tuple[float, int, float]] = field(default_factory=list)
    latency_ms: list[tuple[float, int, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, series: list[tuple[float, int, float]], value: float) -> None:
        series.append((time.monotonic() - self.began, self.interval, value))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class Background:
    """Threads that repeat their work until the end; errors while the broker is down are not failures."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.failures: list[str] = []
        self.errors: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def every(self, seconds: float, name: str, work: Callable[[], None]) -> None:
        """Repeat some work, with a pause in between."""

        def run() -> None:
            while not self.stopping.wait(seconds):
                try:
                    work()
                except (KafkaException, MillstreamError, OSError, RuntimeError):
                    # The broker is being killed or started; the trial itself detects if it does not return.
                    self.errors[name] = self.errors.get(name, 0) + 1
                except Exception as error:
                    self.failures.append(f"{name}: {error!r}")
                    return

        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(60)


class Soak:
    """The mixed load in addition to the kill trial."""

    def __init__(self, server: Server, samples: Samples) -> None:
        self._server = server
        self._samples = samples
        self._background = Background()
        self._pid = 0
        self._number = 0
        self._idle: list[socket.socket] = []
        self._timed_producer: Producer | None = None

    def start(self) -> None:
        """Start all load on a running server."""
        self._run_request(
            lambda client: create_topic(client, "retained", partitions=2, replication=1, settings=RETAINED)
        )
        self._timed_producer = Producer({"bootstrap.servers": self._server.kafka, "enable.idempotence": True, **QUIET})
        self._background.every(SAMPLE_S, "sampler", self._sample)
        self._background.every(0.0, "pacer", self._send_at_fixed_rate)
        self._background.every(3.0, "topics", self._create_and_delete)
        self._background.every(2.0, "admin", self._administer)
        self._background.every(5.0, "idle connections", self._maintain_idle_connections)

    def stop(self) -> list[str]:
        """Stop all load; return the failures."""
        self._background.stop()
        if self._timed_producer is not None:
            self._timed_producer.flush(30)
        for connection in self._idle:
            connection.close()
        for name, count in self._background.errors.items():
            self._samples.counts[f"failed attempts of {name}"] = count
        return self._background.failures

    def _run_request(self, request: Callable[[Client], Coroutine[Any, Any, object]]) -> None:
        """Send a request with Millstream's own client: librdkafka's admin client aborts when a broker dies."""

        async def run() -> None:
            async with Client.connect(self._server.kafka, client_id="soak", timeout_s=20) as client:
                await request(client)

        asyncio.run(run())

    def _sample(self) -> None:
        pid = self._server.pid
        if pid != self._pid:
            self._samples.interval += 1
            self._pid = pid
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        self._samples.add(self._samples.resident_mb, pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
        self._samples.add(self._samples.handles, len(os.listdir(f"/proc/{pid}/fd")))

    def _send_at_fixed_rate(self) -> None:
        """Send at a fixed rate, and measure each latency from the scheduled time."""
        producer, due = self._timed_producer, time.monotonic()
        if producer is None:
            return

        def acknowledged(error: object, _message: object) -> None:
            if error is None:
                self._samples.add(self._samples.latency_ms, (time.monotonic() - due) * 1000)

        producer.produce("retained", bytes(MESSAGE_BYTES), on_delivery=acknowledged)
        # Process responses until the next message is due.
        while (pause_s := due + 1 / RATE_PER_S - time.monotonic()) > 0:
            producer.poll(pause_s)

    def _create_and_delete(self) -> None:
        """Create a topic, write to it, read it with its own consumer, and delete it."""
        self._number += 1
        name = f"temporary-{self._number}"
        self._run_request(lambda client: create_topic(client, name, partitions=3, replication=1, settings={}))
        producer = Producer({"bootstrap.servers": self._server.kafka, **QUIET})
        for number in range(30):
            producer.produce(name, f"message {number}")
        producer.flush(20)
        consumer = Consumer(
            {"bootstrap.servers": self._server.kafka, "group.id": name, "auto.offset.reset": "earliest", **QUIET}
        )
        consumer.subscribe([name])
        consumer.consume(30, 5)
        consumer.close()
        # The group first, because it is deleted with its last topic.
        self._run_request(lambda client: delete_group(client, name))
        self._run_request(lambda client: delete_topic(client, name))
        self._samples.count("topics created and deleted")

    def _administer(self) -> None:
        self._run_request(lambda client: client.metadata(None))
        self._run_request(list_groups)
        self._run_request(lambda client: describe_group(client, "group"))
        self._samples.count("rounds of administration")

    def _maintain_idle_connections(self) -> None:
        """Keep idle connections open; reopen those that a kill has closed."""
        host, _, port = self._server.kafka.rpartition(":")
        self._idle = [connection for connection in self._idle if _is_open(connection)]
        while len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(socket.create_connection((host, int(port)), timeout=5))
            self._idle[-1].setblocking(False)


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def settled(series: Sequence[tuple[float, int, float]]) -> list[list[tuple[float, float]]]:
    """Return the samples of each interval between two kills, without the warm-up."""
    intervals = []
    for interval in sorted({number for _, number, _ in series}):
        points = [(at, value) for at, number, value in series if number == interval]
        late = points[int(len(points) * WARM_UP_SHARE) :]
        step = max(1, len(late) // POINTS_MAX)
        if len(late) >= POINTS_MIN:
            intervals.append(late[::step])
    return intervals


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return how much a series grew from its first sample to its last, by the median of all slopes."""
    slopes = [(b - a) / (later - at) for (at, a), (later, b) in combinations(points, 2) if later > at]
    return statistics.median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def by_slot(latencies: Sequence[tuple[float, int, float]], share: float) -> list[tuple[float, int, float]]:
    """Return a percentile of the latencies in each slot of five seconds."""
    slots: dict[tuple[int, int], list[float]] = {}
    for at, interval, value in latencies:
        slots.setdefault((int(at // SLOT_S), interval), []).append(value)
    return [
        (slot * SLOT_S, interval, sorted(values)[int(len(values) * share)])
        for (slot, interval), values in slots.items()
    ]


def evaluate(samples: Samples) -> list[str]:
    """Evaluate each series; a line that begins with GREW is a finding."""
    lines = []
    series = {
        "memory (MB)": (samples.resident_mb, 0.10, 8.0),
        "file handles": (samples.handles, 0.10, 20.0),
        "p50 latency (ms)": (by_slot(samples.latency_ms, 0.5), 0.5, 2.0),
        "p99 latency (ms)": (by_slot(samples.latency_ms, 0.99), 1.0, 50.0),
    }
    for name, (points, share, least) in series.items():
        for number, interval in enumerate(settled(points), 1):
            middle = statistics.median(value for _, value in interval)
            grew = growth(interval)
            verdict = "GREW" if grew > max(share * middle, least) else "flat"
            minutes = (interval[-1][0] - interval[0][0]) / 60
            lines.append(
                f"{verdict}  {name:17} interval {number}: median {middle:8.1f}, {grew:+8.2f} in {minutes:.1f} min"
            )
    return lines


def table(samples: Samples) -> list[str]:
    lines = ["minute  interval  memory MB  handles  p50 ms  p99 ms"]
    for minute in range(int(samples.resident_mb[-1][0] // 60) + 1) if samples.resident_mb else ():
        memory = [point for point in samples.resident_mb if point[0] // 60 == minute]
        handles = [value for at, _, value in samples.handles if at // 60 == minute]
        waits = sorted(value for at, _, value in samples.latency_ms if at // 60 == minute)
        if memory and waits:
            middle = statistics.median(value for _, _, value in memory)
            lines.append(
                f"{minute:6}  {memory[-1][1]:7}  {middle:9.1f}  {statistics.median(handles):7.0f}"
                f"  {waits[len(waits) // 2]:6.2f}  {waits[int(len(waits) * 0.99)]:6.1f}"
            )
    return lines


def run(minutes: float, folder: Path, print_line: Callable[[str], None]) -> tuple[Outcome, Samples, list[str]]:
    """Run the kill trial together with the mixed load."""
    interval_s = minutes * 60 / (KILLS + 1)
    plan = Plan(
        kills=KILLS, partitions=4, producers=3, messages_per_s=100, steady=True, load_s=(interval_s, interval_s)
    )
    server, samples = Server(folder / "data", settings=SERVER_SETTINGS), Samples()
    with KillTrial(server, plan, print_line) as trial:
        soak = Soak(server, samples)
        soak.start()
        try:
            outcome = trial.run()
            # The last quarter has no kill at its end.
            time.sleep(interval_s)
        finally:
            failures = soak.stop()
    return outcome, samples, failures


def main() -> int:
    """Run the soak and print the results."""
    parser = argparse.ArgumentParser(prog="trials.soak", description="Mixed load with kills, for an hour.")
    parser.add_argument("--minutes", type=float, default=60.0, help="the duration (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome, samples, failures = run(options.minutes, Path(folder), lambda line: print(line, flush=True))
    lines = evaluate(samples)
    print("\n".join([*table(samples), *lines, *failures, str(outcome.report)]))
    print(", ".join(f"{count} {what}" for what, count in samples.counts.items()))
    return 1 if failures or not outcome.report.ok or any(line.startswith("GREW") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
