"""The latency of single messages by step, and their cost, at ordinary rates.

    python -m benchmarks.one_message [--rates 100,1000] [--workers N] [--seconds S] [--rounds N] [--flush always|os]
                                     [--against FOLDER] [--trace] [--strace] [--floor]

A message is published, leased to a worker and accepted, over bare sockets. At each rate: the time from when a message
is due until its publisher gets a response and until a worker has it, and the time until the worker's acceptance gets
a response; the server's CPU time, context switches and wake-ups of its loop for each message. `--against` measures
another working tree alternately with this one, in the same run, since a shared machine is never idle for long.

`--floor` measures a publish without workers, and its lower bounds at that rate: a sync of a file, and a round trip to
the limit server that stores nothing. It also measures what the rate itself costs: the CPU time of a fixed piece of
Python work, which needs neither the network nor the disk, back to back and at that rate.

`--trace` sends messages one by one through a server with timed steps, and prints the median of each step. `--strace`
counts the system calls for each message, where strace may attach.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import json
import os
import re
import selectors
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from benchmarks.percentiles import NS_PER_S, Schedule, percentile
from benchmarks.processes import cpu_of
from benchmarks.report import Table
from benchmarks.requests import connect, produce_frame
from benchmarks.subjects import LimitServer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from millstream.core.subscription import Verb
from millstream.protocol.messages.codec import request_head, response_body_at
from millstream.protocol.private.message import Response, decode, encode
from millstream.protocol.private.subscription_messages import (
    CREATE_KEY,
    RECEIVE_KEY,
    SETTLE_KEY,
    CreateSubscriptionRequest,
    PartitionSettles,
    ReceiveRequest,
    ReceiveResponse,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream_testing.server import Server

SIZE_BYTES: Final = 1024
WAIT_MS: Final = 5_000
WARM_S: Final = 0.5
TRACED: Final = 300
TRACE_PAUSE_S: Final = 0.003
END_S_MAX: Final = 10.0
IDLE_S_MAX: Final = 30.0
IDLE_POLL_S: Final = 0.5
WORK: Final = (
    "def f(a, b=1, *c, **d):\n    x = [i * 2 for i in range(3) if i]\n    return {'a': (b, c)} if x else f'{a}'\n" * 2
)
ROOT: Final = Path(__file__).parent.parent
_SIZE: Final = struct.Struct(">i")
_ADMIN_S_MAX: Final = 30.0


# -- the client ---------------------------------------------------------------------------------------------


class Peer:
    """One connection; `on_response` gets the frame of each response without its size."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self._socket = connect(address)
        self._buffer = b""
        self.on_response: Callable[[bytes], None] = lambda _frame: None
        selector.register(self._socket, selectors.EVENT_READ, self.read)

    def send(self, frame: bytes) -> None:
        """Send a whole request."""
        self._socket.sendall(frame)

    def send_private(self, key: int, body: bytes) -> None:
        """Send one of Millstream's private requests."""
        head = request_head(key, 0, 1, "bench")
        self._socket.sendall(_SIZE.pack(len(head) + len(body)) + head + body)

    def read(self) -> None:
        """Receive available bytes, and process complete responses."""
        received = self._socket.recv(1 << 20)
        if not received:
            raise ConnectionError("the server closed the connection")
        self._buffer += received
        while len(self._buffer) >= 4 and len(self._buffer) >= (end := 4 + _SIZE.unpack_from(self._buffer)[0]):
            frame, self._buffer = self._buffer[4:end], self._buffer[end:]
            self.on_response(frame)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Times(NamedTuple):
    """The acknowledgement and receive times of each message, and the durations of acceptances, in nanoseconds."""

    published: np.ndarray[Any, np.dtype[np.int64]]
    received: np.ndarray[Any, np.dtype[np.int64]]
    settled: list[int]


class MessageLoad:
    """A publisher and some workers in one thread; messages are numbered by their offsets."""

    def __init__(self, address: str, topic: str, workers: int) -> None:
        self._topic = topic
        self._selector = selectors.DefaultSelector()
        self._publisher = Peer(address, self._selector)
        self._publisher.on_response = self._published
        self._frame = produce_frame(topic, SIZE_BYTES)
        self._peers = [self._publisher]
        self._workers = workers
        self._base = 0
        self._sent = self._responded = self.received = self.accepted = 0
        self._times = Times(np.zeros(0, np.int64), np.zeros(0, np.int64), [])
        self.on_event: Callable[[str], None] = lambda _name: None
        self.receives_at_once = True
        for number in range(workers):
            self._add_worker(address, f"worker-{number}")

    def _add_worker(self, address: str, worker: str) -> None:
        receiving, settling = Peer(address, self._selector), Peer(address, self._selector)
        self._peers += (receiving, settling)
        request = encode(ReceiveRequest(self._topic, worker, 100, 1 << 20, WAIT_MS))
        sent: deque[tuple[int, int]] = deque()

        def settled(frame: bytes) -> None:
            at, count = sent.popleft()
            response = decode(frame[response_body_at(SETTLE_KEY, 0, frame) :], SettleResponse)
            if response.error or any(code for results in response.results for code, _ in results):
                raise RuntimeError(f"messages could not be accepted: {response}")
            self._times.settled.append(time.monotonic_ns() - at)
            self.accepted += count
            self.on_event("client: acceptance response")
            if not self.receives_at_once:
                receiving.send_private(RECEIVE_KEY, request)

        def received(frame: bytes) -> None:
            now = time.monotonic_ns()
            response = decode(frame[response_body_at(RECEIVE_KEY, 0, frame) :], ReceiveResponse)
            if response.error:
                raise RuntimeError(response.message)
            if not response.partitions or self.receives_at_once:
                receiving.send_private(RECEIVE_KEY, request)
            if not response.partitions:
                return
            self.on_event("client: message received")
            count = 0
            for part in response.partitions:
                for lease in part.leases:
                    self._times.received[lease.start - self._base : lease.end - self._base] = now
                    count += lease.end - lease.start
            self.received += count
            sent.append((time.monotonic_ns(), count))
            settling.send_private(SETTLE_KEY, encode(SettleRequest(self._topic, worker, _acceptances(response))))

        receiving.on_response, settling.on_response = received, settled
        receiving.send_private(RECEIVE_KEY, request)

    def _published(self, frame: bytes) -> None:
        self._times.published[self._responded - self._base] = time.monotonic_ns()
        self._responded += 1
        self.on_event("client: publish response")

    def run(self, rate_per_s: int, seconds: float) -> tuple[Schedule, Times]:
        """Publish at a rate, and wait until everything is accepted."""
        count = int(rate_per_s * seconds)
        times = self._begin(count)
        schedule = Schedule(time.monotonic_ns(), rate_per_s, count)
        while self._sent - self._base < count:
            now = time.monotonic_ns()
            due = schedule.due_by(now) - (self._sent - self._base)
            if due > 0:
                self._publisher.send(self._frame * due)
                self._sent += due
            self._step(max(0.0, (schedule.due_at(self._sent - self._base) - time.monotonic_ns()) / NS_PER_S))
        self._finish()
        return schedule, times

    def run_one_by_one(self, count: int) -> None:
        """Publish each message when the one before it is accepted."""
        self.receives_at_once = False
        self._begin(count)
        for _ in range(count):
            self.on_event("client: publish sent")
            self._publisher.send(self._frame)
            self._sent += 1
            self._finish()
            # By then the worker's next request has arrived.
            time.sleep(TRACE_PAUSE_S)

    def _begin(self, count: int) -> Times:
        self._base = self._sent
        self._times = Times(np.zeros(count, np.int64), np.zeros(count, np.int64), [])
        return self._times

    def _step(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _finish(self) -> None:
        deadline = time.monotonic() + END_S_MAX
        while (min(self._responded, self.accepted) if self._workers else self._responded) < self._sent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._sent - self.accepted} messages were not accepted within {END_S_MAX:g} s")
            self._step(END_S_MAX)

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers:
            peer.close()
        self._selector.close()


def _acceptances(response: ReceiveResponse) -> list[PartitionSettles]:
    return [
        PartitionSettles(
            part.topic, part.partition, [SettledRange(lease.start, lease.end, Verb.ACCEPT) for lease in part.leases]
        )
        for part in response.partitions
    ]


@contextmanager
def opened(server: Server, topic: str, flush: str, workers: int) -> Iterator[MessageLoad]:
    """Create a topic with a subscription, and its clients."""
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1, config={"flush": flush})])[topic].result(_ADMIN_S_MAX)
    with selectors.DefaultSelector() as selector:
        responses: list[bytes] = []
        peer = Peer(server.kafka, selector)
        peer.on_response = responses.append
        peer.send_private(CREATE_KEY, encode(CreateSubscriptionRequest(topic, [topic], {})))
        while not responses:
            peer.read()
        peer.close()
        created = decode(responses[0][response_body_at(CREATE_KEY, 0, responses[0]) :], Response)
        if created.error:
            raise RuntimeError(created.message)
    load = MessageLoad(server.kafka, topic, workers)
    try:
        yield load
    finally:
        load.close()


# -- the server ---------------------------------------------------------------------------------------------


class TreeServer(Server):
    """A server that runs the code of a working tree, with timed steps if there is a file for the times."""

    def __init__(self, data: Path, tree: Path, trace: Path | None = None) -> None:
        super().__init__(data)
        self._tree = tree
        self._trace = trace

    def command(self) -> Sequence[str]:
        """Run with the tree's modules in place of those installed."""
        serve = list(super().command())
        if self._trace is not None:
            serve[1:3] = ["-m", "benchmarks.one_message", "--serve-traced", str(self._trace)]
        return ["env", f"PYTHONPATH={self._tree / 'src'}:{ROOT}", *serve]


class Usage(NamedTuple):
    """The resources that a server has used so far."""

    user_s: float
    system_s: float
    switches: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read it."""
        cpu = cpu_of(pid)
        switches = 0
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            switches += sum(map(int, re.findall(r"ctxt_switches:\t(\d+)", status.read_text())))
        return cls(cpu.user_s, cpu.system_s, switches)


def wait_until_idle(pid: int) -> None:
    """Wait until a server and its children are idle after the start."""
    deadline = time.monotonic() + IDLE_S_MAX
    before = sum(cpu_of(pid))
    while time.monotonic() < deadline:
        time.sleep(IDLE_POLL_S)
        used, before = sum(cpu_of(pid)) - before, sum(cpu_of(pid))
        if used < IDLE_POLL_S / 20:
            return


def count_system_calls(pid: int, run: Callable[[], None]) -> Counter[str] | None:
    """Return the system calls of a process during a run; None if strace cannot attach."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.NamedTemporaryFile("r") as output:
        tracer = subprocess.Popen([strace, "-f", "-c", "-o", output.name, "-p", str(pid)], stderr=subprocess.PIPE)
        assert tracer.stderr is not None
        if b"attached" not in tracer.stderr.readline():
            tracer.kill()
            return None
        run()
        tracer.send_signal(signal.SIGINT)
        tracer.communicate()
        calls: Counter[str] = Counter()
        for line in output:
            fields = line.split()
            if len(fields) >= 5 and fields[3].isdigit() and fields[-1] != "total":
                calls[fields[-1]] += int(fields[3])
    return calls


# -- the trace ----------------------------------------------------------------------------------------------

POINTS: Final = (
    ("broker.net.connection", "Connection.buffer_updated", "before", "bytes arrived"),
    ("broker.kafka.apis.produce", "Produce._respond", "before", "Produce parsed"),
    ("broker.kafka.apis.subscription_receive", "SubscriptionReceive.handle_frame", "before", "Receive dispatched"),
    ("broker.kafka.apis.subscription_settle", "SubscriptionSettle.handle_frame", "before", "Settle dispatched"),
    ("broker.log.log", "Log.append", "after", "appended"),
    ("broker.log.store", "LogStore.sync_soon", "before", "sync requested"),
    ("broker.log.store", "LogStore._begin_commit", "after", "commit captured"),
    ("broker.log.commit", "Commit.execute", "before", "commit begun in its thread"),
    ("broker.log.commit", "Commit.execute", "after", "synced"),
    ("broker.log.commit", "Commit.finish", "before", "commit back on the loop"),
    ("broker.subscriptions.delivery", "Delivery._serve_waiting", "before", "queue woken"),
    ("broker.subscriptions.delivery", "Delivery.settle_now", "after", "settled in memory"),
    ("broker.subscriptions.receiving", "Wait.deliver", "before", "leased"),
    ("broker.net.connection", "Connection._send", "before", "response handed to the socket"),
)
"""The timed steps: module, function, whether its start or its end is recorded, and the name of the event."""


def serve_traced(file: Path, arguments: Sequence[str]) -> None:
    """Run a server, and record the time of each step and the created tasks."""
    events: list[tuple[int, str]] = []

    def timed(function: Callable[..., Any], when: str, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **named: Any) -> Any:
            if when == "before":
                events.append((time.monotonic_ns(), name))
                return function(*args, **named)
            result = function(*args, **named)
            if result is not None or name != "commit captured":
                events.append((time.monotonic_ns(), name))
            return result

        return wrapper

    for module, place, when, name in POINTS:
        owner, _, attribute = place.rpartition(".")
        class_ = getattr(importlib.import_module(f"millstream.{module}"), owner)
        if hasattr(class_, attribute):
            setattr(class_, attribute, timed(getattr(class_, attribute), when, name))

    def make_task(loop: Any, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        events.append((time.monotonic_ns(), "task"))
        return asyncio.Task(coroutine, loop=loop, **named)

    run = asyncio.Runner.run

    def run_counted(self: asyncio.Runner, *args: Any, **named: Any) -> Any:
        self.get_loop().set_task_factory(make_task)
        return run(self, *args, **named)

    asyncio.Runner.run = run_counted  # type: ignore[method-assign]
    sys.argv = ["millstream", *arguments]
    from millstream.cli.main import run as serve

    try:
        serve()
    finally:
        file.write_text(json.dumps(events), encoding="utf-8")


def trace(folder: Path, tree: Path, flush: str) -> Table:
    """Return the median time of each step of a message, and print the number of tasks that it creates."""
    file = folder / "trace.json"
    events: list[tuple[int, str]] = []
    with TreeServer(folder / "traced", tree, file) as server:
        with opened(server, "traced", flush, 1) as load:
            load.run(100, WARM_S)
            load.receives_at_once = False
            load.on_event = lambda name: events.append((time.monotonic_ns(), name))
            load.run_one_by_one(TRACED)
        server.stop()
    table = Table(f"One message at a time, flush={flush}: µs, median of {TRACED}", ["", "step", "since the start"], 1)
    served = [(int(at), str(name)) for at, name in json.loads(file.read_text(encoding="utf-8"))]
    tasks = 0
    messages: list[list[tuple[int, str]]] = []
    for at, name in sorted([*events, *served]):
        if name == "client: publish sent":
            messages.append([])
        if messages and name == "task":
            tasks += 1
        elif messages:
            messages[-1].append((at, name))
    usual, count = Counter(tuple(name for _, name in message) for message in messages).most_common(1)[0]
    same = [message for message in messages if tuple(name for _, name in message) == usual]
    for place, name in enumerate(usual):
        step = statistics.median(times[place][0] - times[max(0, place - 1)][0] for times in same) / 1000
        total = statistics.median(times[place][0] - times[0][0] for times in same) / 1000
        table.rows.append([name, f"{step:.0f}", f"{total:.0f}"])
    table.rows.append(
        [f"tasks created for each message: {tasks / len(messages):.1f}", "", f"{count} of {len(messages)}"]
    )
    return table


# -- the measurement ----------------------------------------------------------------------------------------

COLUMNS: Final = (
    "published p50 ms",
    "p99",
    "delivered p50 ms",
    "p99",
    "accepted p50 ms",
    "user CPU µs",
    "system CPU µs",
    "context switches",
)


def measure(server: Server, load: MessageLoad, rate_per_s: int, seconds: float) -> list[float]:
    """Measure one round at one rate; return the columns."""
    load.run(rate_per_s, WARM_S)
    before = Usage.of(server.pid)
    schedule, times = load.run(rate_per_s, seconds)
    after = Usage.of(server.pid)
    published, delivered = schedule.latencies_ms(times.published), schedule.latencies_ms(times.received)
    return [
        percentile(published, 50),
        percentile(published, 99),
        percentile(delivered, 50),
        percentile(delivered, 99),
        statistics.median(times.settled) / 1e6,
        (after.user_s - before.user_s) * 1e6 / schedule.count,
        (after.system_s - before.system_s) * 1e6 / schedule.count,
        (after.switches - before.switches) / schedule.count,
    ]


def compare(console: Console, options: argparse.Namespace, trees: dict[str, Path], folder: Path) -> None:
    """Measure every tree at every rate, in turn."""
    with ExitStack() as stack:
        loads: dict[str, tuple[Server, MessageLoad]] = {}
        for name, tree in trees.items():
            started = stack.enter_context(TreeServer(folder / name, tree))
            loads[name] = started, stack.enter_context(opened(started, "messages", options.flush, options.workers))
        for server, load in loads.values():
            load.run(options.rates[-1], WARM_S)
            wait_until_idle(server.pid)
        for rate in options.rates:
            title = (
                f"{rate:,} messages/s, {options.workers} workers, flush={options.flush}; CPU and switches per message"
            )
            table = Table(title, ["", *COLUMNS])
            rounds: dict[str, list[list[float]]] = {name: [] for name in trees}
            for turn in range(options.rounds):
                for name in list(trees)[:: -1 if turn % 2 else 1]:
                    rounds[name].append(measure(*loads[name], rate, options.seconds))
            medians = {
                name: [statistics.median(column) for column in zip(*rounds[name], strict=True)] for name in trees
            }
            for name, row in medians.items():
                table.rows.append([name, *(f"{value:.3g}" for value in row)])
            if len(medians) == 2:
                new, old = medians.values()
                table.rows.append(["ratio", *(f"{a / b:.2f}" if b else "" for a, b in zip(new, old, strict=True))])
            console.print(table.rich())
        if options.strace:
            for name in trees:
                console.print(system_calls(name, *loads[name], options).rich())


def system_calls(name: str, server: Server, load: MessageLoad, options: argparse.Namespace) -> Table:
    """Return the system calls per message at the first rate, most frequent first."""
    rate = options.rates[0]
    count = int(rate * options.seconds)
    table = Table(f"{name}: system calls for each message at {rate:,}/s", ["call", "times"])
    calls = count_system_calls(server.pid, lambda: (load.run(rate, options.seconds), None)[1])
    for call, times in (calls or Counter()).most_common(12):
        table.rows.append([call, f"{times / count:.2f}"])
    table.rows.append(["all", f"{sum((calls or Counter()).values()) / count:.2f}"])
    return table


def sync_at_rate(folder: Path, rate_per_s: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the milliseconds of a bare sync after a small write, at a rate."""
    schedule = Schedule(time.monotonic_ns(), rate_per_s, int(rate_per_s * seconds))
    took_ms = np.zeros(schedule.count)
    descriptor = os.open(folder / "synced", os.O_CREAT | os.O_WRONLY)
    try:
        for number in range(schedule.count):
            time.sleep(max(0.0, (schedule.due_at(number) - time.monotonic_ns()) / NS_PER_S))
            os.pwrite(descriptor, bytes(SIZE_BYTES), number * SIZE_BYTES)
            began = time.monotonic_ns()
            os.fdatasync(descriptor)
            took_ms[number] = (time.monotonic_ns() - began) / 1e6
    finally:
        os.close(descriptor)
    return took_ms


def work_at_rate(rate_per_s: int, seconds: float) -> float:
    """Return the CPU time in µs of compiling the same text, at a rate, or back to back if the rate is 0."""
    count = int((rate_per_s or 1_000) * seconds)
    schedule = Schedule(time.monotonic_ns(), rate_per_s or 1, count)
    took_s = 0.0
    for number in range(count):
        if rate_per_s:
            time.sleep(max(0.0, (schedule.due_at(number) - time.monotonic_ns()) / NS_PER_S))
        began = time.thread_time()
        compile(WORK, "work", "exec")
        took_s += time.thread_time() - began
    return took_s * 1e6 / count


def floor(console: Console, options: argparse.Namespace, folder: Path) -> None:
    """Measure a publish, a sync and a round trip in turn."""
    with ExitStack() as stack:
        limits = {}
        for name, flush in (("the limit server, storing nothing", "discard"), ("the limit server", options.flush)):
            settings = {"flush": flush, "partitions": 1}
            server = stack.enter_context(LimitServer(folder / flush, settings=settings))
            limits[name] = MessageLoad(server.kafka, "floor", 0)
        own = stack.enter_context(TreeServer(folder / "own", ROOT))
        limits["this tree"] = stack.enter_context(opened(own, "floor", options.flush, 0))
        for rate in options.rates:
            rounds: dict[str, list[list[float]]] = {}
            work: list[tuple[float, float]] = []
            for _ in range(options.rounds):
                work.append((work_at_rate(0, options.seconds), work_at_rate(rate, options.seconds)))
                synced = sync_at_rate(folder, rate, options.seconds)
                rounds.setdefault("a bare fdatasync", []).append([percentile(synced, 50), percentile(synced, 99)])
                for name, load in limits.items():
                    load.run(rate, WARM_S)
                    schedule, times = load.run(rate, options.seconds)
                    late = schedule.latencies_ms(times.published)
                    rounds.setdefault(name, []).append([percentile(late, 50), percentile(late, 99)])
            table = Table(f"Published at {rate:,}/s, no workers, flush={options.flush}", ["", "p50 ms", "p99"])
            for name, measured in rounds.items():
                medians = [statistics.median(column) for column in zip(*measured, strict=True)]
                table.rows.append([name, *(f"{value:.2f}" for value in medians)])
            console.print(table.rich())
            hot, cold = (statistics.median(column) for column in zip(*work, strict=True))
            console.print(f"CPU of the same Python work: {hot:.0f} µs back to back, {cold:.0f} µs at {rate:,}/s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_message", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rates", type=lambda text: [int(number) for number in text.split(",")], default=[100, 1000])
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="the duration of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flush", choices=("always", "os"), default="always")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another working tree, measured in turn")
    parser.add_argument("--floor", action="store_true", help="measure a publish beside a bare sync instead")
    parser.add_argument("--trace", action="store_true", help="print the steps of one message instead")
    parser.add_argument("--strace", action="store_true", help="also count system calls")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == ["--serve-traced"]:
        serve_traced(Path(sys.argv[2]), sys.argv[3:])
        return
    options = parse(None)
    console = Console() if Console().is_terminal else Console(width=160)
    trees = {"this tree": ROOT} | ({"the other": options.against.resolve()} if options.against else {})
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        if options.floor:
            floor(console, options, Path(folder))
            return
        if not options.trace:
            compare(console, options, trees, Path(folder))
            return
        for name, tree in trees.items():
            console.print(name)
            console.print(trace(Path(folder) / name, tree, options.flush).rich())


if __name__ == "__main__":
    main()
