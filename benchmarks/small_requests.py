"""The latency of single acknowledgements at ordinary rates, Millstream and Apache Kafka, and of HTTP requests.

    python -m benchmarks.small_requests [--rates 100,1000] [--seconds S] [--rounds N] [--only commit,share,http]

`commit`: OffsetCommit over a bare socket, from when it is due until it gets a response. `share`: `commit_sync` of a
share consumer behind each poll, while messages are published at the rate. Both servers sync before they respond.
`http`: messages published and pulled over ten connections each, from when a message is due until it is acknowledged,
and until a pull has it. Rounds alternate between the servers; the tables show medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.one_message import Peer
from benchmarks.peers.kafka import kafka
from benchmarks.percentiles import NS_PER_S, Schedule, percentile
from benchmarks.report import Table
from benchmarks.subject import PeerUnavailable
from confluent_kafka import Consumer, KafkaException, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from millstream_testing.server import Server

PARTS: Final = ("commit", "share", "http")
TOPIC: Final = "small"
CONNECTIONS: Final = 10
WARM_S: Final = 0.5
_S_MAX: Final = 30.0
_OFFSET_COMMIT, _VERSION = 8, 7
Measure = Callable[[Server, int, float], list[float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_requests")
    parser.add_argument("--rates", type=lambda text: [int(number) for number in text.split(",")], default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    options = parser.parse_args()
    console = Console() if Console().is_terminal else Console(width=140)
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder, ExitStack() as stack:
        servers: dict[str, Server] = {"millstream": stack.enter_context(Server(Path(folder) / "millstream"))}
        try:
            servers["kafka"] = stack.enter_context(kafka(Path(folder) / "kafka", "always", partitions=1))
        except PeerUnavailable as reason:
            console.print(f"kafka: not measured: {reason}")
        for server in servers.values():
            _create_topic(server)
        if "commit" in options.only:
            for server in servers.values():
                _commit_once(server)
            _print(console, options, "OffsetCommit", ["p50 ms", "p99"], servers, commit_at_rate)
        if "share" in options.only:
            _print(console, options, "Acknowledged by a share consumer", ["p50 ms", "p99"], servers, share_at_rate)
        if "http" in options.only:
            columns = ["published p50 ms", "p99", "pulled p50 ms", "p99"]
            _print(console, options, "HTTP", columns, {"millstream": servers["millstream"]}, http_at_rate)


def _print(
    console: Console,
    options: argparse.Namespace,
    title: str,
    columns: Sequence[str],
    servers: dict[str, Server],
    measure: Measure,
) -> None:
    for rate in options.rates:
        rounds: dict[str, list[list[float]]] = {name: [] for name in servers}
        for turn in range(options.rounds):
            for name in list(servers)[:: -1 if turn % 2 else 1]:
                measure(servers[name], rate, WARM_S)
                rounds[name].append(measure(servers[name], rate, options.seconds))
        table = Table(f"{title} at {rate:,}/s, flush=always", ["", *columns])
        for name, measured in rounds.items():
            table.rows.append([name, *(f"{statistics.median(column):.2f}" for column in zip(*measured, strict=True))])
        console.print(table.rich())


def _create_topic(server: Server) -> None:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(_S_MAX)


# -- OffsetCommit -------------------------------------------------------------------------------------------


def _commit_once(server: Server) -> None:
    """Commit once, so that the group's coordinator is ready."""
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "committer", "log_level": 0})
    until = time.monotonic() + _S_MAX
    while True:
        try:
            consumer.commit(offsets=[TopicPartition(TOPIC, 0, 1)], asynchronous=False)
            break
        except KafkaException:
            # The coordinator may still be loading.
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    consumer.close()


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def commit_at_rate(server: Server, rate_per_s: int, seconds: float) -> list[float]:
    """Commit an offset whenever one is due; return p50 and p99 of the latency."""
    head = struct.pack(">hhi", _OFFSET_COMMIT, _VERSION, 1) + _text("bench")
    body = _text("committer") + struct.pack(">i", -1) + _text("") + struct.pack(">h", -1)
    body += struct.pack(">i", 1) + _text(TOPIC) + struct.pack(">iiqih", 1, 0, 7, -1, -1)
    frame = struct.pack(">i", len(head) + len(body)) + head + body
    done = np.zeros(int(rate_per_s * seconds), np.int64)
    responded = 0

    def on_response(response: bytes) -> None:
        nonlocal responded
        (code,) = struct.unpack_from(">h", response, len(response) - 2)
        if code:
            raise RuntimeError(f"OffsetCommit was refused with error {code}")
        done[responded] = time.monotonic_ns()
        responded += 1

    with selectors.DefaultSelector() as selector:
        peer = Peer(server.kafka, selector)
        peer.on_response = on_response
        schedule = Schedule(time.monotonic_ns(), rate_per_s, len(done))
        sent = 0
        while responded < schedule.count:
            due = schedule.due_by(time.monotonic_ns())
            if due > sent:
                peer.send(frame * (due - sent))
                sent = due
            left_ns = schedule.due_at(sent) - time.monotonic_ns() if sent < schedule.count else NS_PER_S
            for key, _ in selector.select(max(0.0, left_ns / NS_PER_S)):
                key.data()
        peer.close()
    late = schedule.latencies_ms(done)
    return [percentile(late, 50), percentile(late, 99)]


# -- share consumers ----------------------------------------------------------------------------------------


@contextmanager
def _publishing(server: Server, rate_per_s: int) -> Iterator[None]:
    stopping = threading.Event()

    def publish() -> None:
        producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 0, "log_level": 0})
        while not stopping.wait(1 / rate_per_s):
            producer.produce(TOPIC, bytes(1024))
            producer.poll(0)
        producer.flush(_S_MAX)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def share_at_rate(server: Server, rate_per_s: int, seconds: float) -> list[float]:
    """Accept what each poll returns; return p50 and p99 of the synchronous commits."""
    consumer = ShareConsumer({"bootstrap.servers": server.kafka, "group.id": "sharers", "log_level": 0})
    consumer.subscribe([TOPIC])
    took_ms: list[float] = []
    with _publishing(server, rate_per_s):
        until = time.monotonic() + _S_MAX
        while time.monotonic() < until:
            if not consumer.poll(0.1):
                continue
            if not took_ms:
                until = time.monotonic() + seconds
            began = time.monotonic()
            consumer.commit_sync(_S_MAX)
            took_ms.append((time.monotonic() - began) * 1000)
    consumer.close()
    return [percentile(took_ms, 50), percentile(took_ms, 99)]


# -- HTTP ---------------------------------------------------------------------------------------------------


class _Http:
    """One connection with one request in flight."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def post(self, path: str, body: bytes) -> bytes:
        self.writer.write(
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        if head[9:10] != b"2":
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        return await self._reader.readexactly(length)


def http_at_rate(server: Server, rate_per_s: int, seconds: float) -> list[float]:
    """Publish when a message is due, over connections in turn, while others pull and accept."""
    return asyncio.run(_http_at_rate(server, rate_per_s, seconds))


async def _http_at_rate(server: Server, rate_per_s: int, seconds: float) -> list[float]:
    host, port = server.http.rsplit(":", 1)

    async def connect() -> _Http:
        return _Http(*await asyncio.open_connection(host, int(port)))

    count = int(rate_per_s * seconds)
    published, pulled = np.zeros(count, np.int64), np.zeros(count, np.int64)
    name = f"pull{time.monotonic_ns()}"
    control = await connect()
    declared = json.dumps({"name": name, "topics": [TOPIC]}).encode()
    await control.post("/v1/subscriptions", declared)
    everything = asyncio.Event()
    filler = "x" * 1000

    async def pull(http: _Http) -> None:
        while not everything.is_set():
            pull_request = json.dumps({"max": 100, "wait_ms": 1000}).encode()
            response = json.loads(await http.post(f"/v1/subscriptions/{name}/messages:pull", pull_request))
            now = time.monotonic_ns()
            for message in response["messages"]:
                pulled[message["json"]["number"]] = now
            if response["messages"]:
                leases = json.dumps({"accept": [message["lease"] for message in response["messages"]]}).encode()
                await http.post(f"/v1/subscriptions/{name}/messages:settle", leases)
            if pulled.all():
                everything.set()

    pulling = [asyncio.ensure_future(pull(await connect())) for _ in range(CONNECTIONS)]
    free: asyncio.Queue[_Http] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await connect())

    async def publish(number: int, http: _Http) -> None:
        body = json.dumps({"number": number, "filler": filler}).encode()
        await http.post(f"/v1/topics/{TOPIC}/messages", body)
        published[number] = time.monotonic_ns()
        free.put_nowait(http)

    schedule = Schedule(time.monotonic_ns(), rate_per_s, count)
    publishing = []
    for number in range(count):
        await asyncio.sleep(max(0.0, (schedule.due_at(number) - time.monotonic_ns()) / NS_PER_S))
        publishing.append(asyncio.ensure_future(publish(number, await free.get())))
    await asyncio.gather(*publishing)
    await asyncio.wait(pulling, timeout=_S_MAX)
    for task in pulling:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    first, second = schedule.latencies_ms(published), schedule.latencies_ms(pulled)
    return [percentile(first, 50), percentile(first, 99), percentile(second, 50), percentile(second, 99)]


if __name__ == "__main__":
    main()
