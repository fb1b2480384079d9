"""The queues that are measured: each is a server that is started once, and a client program that puts a load on it.

Every client takes the same arguments; how many messages a worker takes at once and a publisher has unconfirmed is set
for each as an expert would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

from benchmarks.cases import ALWAYS, OS
from benchmarks.peers.nats import BUILD_S_MAX, Nats
from benchmarks.peers.rabbitmq import RabbitMq
from benchmarks.peers.redis import Redis
from benchmarks.processes import cpu_of
from benchmarks.subject import Numbers, PeerUnavailable
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import millstream
from millstream_testing.server import Server

SHARE, OWN, SDK = "millstream share", "millstream own", "millstream sdk"
NATS, QUORUM, CLASSIC, REDIS = "nats", "rabbitmq quorum", "rabbitmq classic", "redis"
MAX_S: Final = 120.0
"""How long one measurement may take."""
_ADMIN_S_MAX: Final = 30.0
_SOURCES: Final = Path(__file__).parent / "queue_clients"


class QueueCase(NamedTuple):
    """One line: messages as fast as possible, or at a rate."""

    size_bytes: int
    workers: int
    rate_per_s: int = 0

    @property
    def name(self) -> str:
        size = "1 KiB" if self.size_bytes == 1024 else f"{self.size_bytes} B"
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return f"{size}, {workers}" + (f", {self.rate_per_s:,}/s" if self.rate_per_s else "")

    @property
    def publishers(self) -> int:
        """One for one worker; a few for more, so that those who sync together can."""
        return 1 if self.workers == 1 or self.rate_per_s else 4


class QueueFailed(Exception):
    """A client failed; the message has the end of its output."""


def go_clients() -> Path:
    """The program with the Go clients, built into a cache folder of the user."""
    go = shutil.which("go")
    if go is None:
        raise PeerUnavailable("Go is not installed, which the client is built with")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream-bench"
    binary = cache / "queueclients"
    cache.mkdir(parents=True, exist_ok=True)
    build = [go, "build", "-o", str(binary), "."]
    try:
        subprocess.run(build, cwd=_SOURCES, capture_output=True, check=True, timeout=BUILD_S_MAX)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable("its client could not be built with Go") from error
    return binary


class QueueSubject(ABC):
    """A queue, measured with its own client."""

    name: str
    durability: str
    """The durability of a message when a publisher gets a response, and when a worker does."""
    batch = 500
    window = 1000

    flushes: tuple[str, ...] = (ALWAYS, OS)
    """The ways of syncing in which it is comparable."""

    def __init__(self) -> None:
        self.version = ""
        self.flush = ALWAYS
        self.stack = ExitStack()

    def __exit__(self, *exception: object) -> None:
        """Stop what was started."""
        self.stack.close()

    @abstractmethod
    def __enter__(self) -> Self:
        """Start what is needed."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Whose CPU seconds count."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The client, with the address."""

    @contextmanager
    def queue(self) -> Iterator[str]:
        """The name of a queue, which the client makes and removes."""
        yield f"q{uuid.uuid4().hex[:12]}"

    def settings(self) -> str:
        """How the client is set, for the tables."""
        return f"{self.batch} messages at once to a worker, {self.window} unconfirmed of a publisher"

    def measure(self, case: QueueCase, seconds: float, backlog: int) -> Numbers:
        """Put the load on it once."""
        with self.queue() as queue:
            job = {
                "queue": queue,
                "size": case.size_bytes,
                "workers": case.workers,
                "publishers": case.publishers,
                "backlog": backlog,
                "batch": self.batch,
                "window": self.window,
                "seconds": seconds,
                "rate": case.rate_per_s,
            }
            flags = [part for name, value in job.items() for part in (f"--{name}", str(value))]
            return self._run([*self.command(), *flags])

    def _run(self, command: Sequence[str]) -> Numbers:
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as client,
        ):
            stop = threading.Timer(MAX_S, client.kill)
            stop.start()
            try:
                measured = self._talk(client)
                if measured is None or client.wait(MAX_S):
                    errors.seek(0)
                    errors_text = errors.read().decode(errors="replace")[-1000:].strip()
                    raise QueueFailed(errors_text or "the client took too long")
                return measured
            finally:
                stop.cancel()
                with suppress(ProcessLookupError):
                    client.kill()

    def _talk(self, client: subprocess.Popen[bytes]) -> Numbers | None:
        if client.stdin is None or client.stdout is None or not client.stdout.readline():
            return None
        before = cpu_of(self.pid)
        client.stdin.write(b"begin\n")
        client.stdin.flush()
        line = client.stdout.readline()
        cpu = cpu_of(self.pid).since(before)
        if not line:
            return None
        measured: dict[str, float] = json.loads(line)
        millions = measured["messages"] / 1e6
        return {
            "messages": measured["messages"],
            "messages/s": measured["messages"] / measured["seconds"],
            "server CPU s/M": (cpu.user_s + cpu.system_s) / millions,
            "client CPU s/M": measured["cpu_s"] / millions,
            "p50 ms": measured.get("p50_ms", 0.0),
            "p99 ms": measured.get("p99_ms", 0.0),
        }


class MillstreamSubject(QueueSubject):
    """A subscription on a topic with one partition; all clients share one server, which syncs before it responds."""

    durability = "published: synced; accepted: synced before the worker gets a response"

    def __init__(self, start: Callable[[], Server], name: str, module: str, batch: int, settings: str) -> None:
        super().__init__()
        self.version = millstream.__version__
        self.name = name
        self.batch = batch
        self._start = start
        self._module = module
        self._settings = settings

    def __enter__(self) -> Self:
        self._server = self._start()
        return self

    @property
    def pid(self) -> int:
        """The broker, whose gateway is its child."""
        return self._server.pid

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", self._module, "--address", self._server.kafka]

    @contextmanager
    def queue(self) -> Iterator[str]:
        """A topic that is deleted afterwards."""
        admin = AdminClient({"bootstrap.servers": self._server.kafka, "log_level": 0})
        with super().queue() as name:
            admin.create_topics([NewTopic(name, 1, 1, config={"flush": self.flush})])[name].result(_ADMIN_S_MAX)
            try:
                yield name
            finally:
                if self._server.is_running():
                    admin.delete_topics([name])[name].result(_ADMIN_S_MAX)

    def settings(self) -> str:
        return f"{self._settings}; librdkafka's producer with its defaults"


class GoSubject(QueueSubject):
    """Measured with one of the Go clients."""

    kind: str

    def __init__(self) -> None:
        super().__init__()
        self._binary = go_clients()

    @property
    @abstractmethod
    def address(self) -> str:
        """The address to which the client connects."""

    def command(self) -> Sequence[str]:
        return [str(self._binary), "--kind", self.kind, "--address", self.address]


class JetStream(GoSubject):
    """NATS JetStream, with a pull consumer."""

    name = kind = NATS
    durability = "published: synced for each message; accepted: not synced, and not confirmed"

    def __enter__(self) -> Self:
        nats = self.stack.enter_context(Nats())
        self.version = nats.version
        server = nats.server(self.flush)
        if server is None:
            raise PeerUnavailable("this nats-server cannot sync before it acknowledges")
        self._server = server
        return self

    @property
    def pid(self) -> int:
        """The server that syncs."""
        return self._server.pid

    @property
    def address(self) -> str:
        return self._server.kafka


class RabbitQueue(GoSubject):
    """RabbitMQ by AMQP 0.9.1; both kinds of queues share one node."""

    flushes = (ALWAYS,)

    def __init__(self, start: Callable[[], RabbitMq], name: str, kind: str, durability: str) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self.durability = durability
        self._start = start

    def __enter__(self) -> Self:
        self._node = self._start()
        self.version = self._node.version
        return self

    @property
    def pid(self) -> int:
        return self._node.server.pid

    @property
    def address(self) -> str:
        return self._node.amqp

    def settings(self) -> str:
        """How the client is set."""
        return f"prefetch {self.batch}, up to 50 acknowledged at once, {self.window} unconfirmed of a publisher"


class RedisStream(GoSubject):
    """Redis Streams with a group."""

    name = kind = REDIS
    durability = "published: synced; accepted: synced before the worker gets a response"
    window = 200

    def __enter__(self) -> Self:
        redis = self.stack.enter_context(Redis())
        self.version = redis.version
        self._server = redis.server(self.flush)
        return self

    @property
    def pid(self) -> int:
        """The server that syncs."""
        return self._server.pid

    @property
    def address(self) -> str:
        return self._server.kafka

    def settings(self) -> str:
        """How the client is set."""
        return (
            f"XREADGROUP COUNT {self.batch} with XACK of the last in one pipeline, XADD in pipelines of {self.window}"
        )


def started(names: Sequence[str], stack: ExitStack, flush: str = ALWAYS) -> tuple[list[QueueSubject], dict[str, str]]:
    """Start all that can be had and can sync in this way, and why the others cannot."""

    @cache
    def server() -> Server:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        server = stack.enter_context(Server(folder / "data"))
        stack.callback(lambda: server.stop() if server.is_running() else None)
        return server

    @cache
    def rabbit() -> RabbitMq:
        return stack.enter_context(RabbitMq())

    share = "max.poll.records 500, implicit acceptance"
    # A batch comes whole, also when only some of it is leased.
    own = "2000 messages at once to a worker"
    sdk = "one subscriber for all workers, in_flight 10000"
    quorum = "published: synced; accepted: synced later, and not confirmed"
    classic = "published: synced, unless it is accepted before that; accepted: not synced, and not confirmed"
    makers: dict[str, Callable[[], QueueSubject]] = {
        SHARE: lambda: MillstreamSubject(server, SHARE, "benchmarks.queue_share", 500, share),
        OWN: lambda: MillstreamSubject(server, OWN, "benchmarks.queue_own", 2000, own),
        SDK: lambda: MillstreamSubject(server, SDK, "benchmarks.queue_sdk", 10_000, sdk),
        NATS: JetStream,
        # One member of the replicated kind, and the old kind, durable.
        QUORUM: lambda: RabbitQueue(rabbit, QUORUM, "rabbitmq-quorum", quorum),
        CLASSIC: lambda: RabbitQueue(rabbit, CLASSIC, "rabbitmq-classic", classic),
        REDIS: RedisStream,
    }
    subjects: list[QueueSubject] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            subject = makers[name]()
            if flush not in subject.flushes:
                raise PeerUnavailable(f"it cannot be set to flush={flush}")
            subject.flush = flush
            subjects.append(stack.enter_context(subject))
        except PeerUnavailable as reason:
            missing[name] = str(reason)
    return subjects, missing


NAMES: Final = (SHARE, OWN, SDK, NATS, QUORUM, CLASSIC, REDIS)
