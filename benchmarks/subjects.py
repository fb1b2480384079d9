"""The servers with Kafka's protocol: Millstream, the limit server, one that stores nothing, and Apache Kafka."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from benchmarks import fixed_requests, latency, reader, requests, throughput
from benchmarks.cases import ALWAYS, FIXED, INTERVAL, LATENCY, OS, PRODUCE, REQUESTS, START, Case
from benchmarks.peers import kafka
from benchmarks.processes import resident_of, resident_of_tree, tree_of
from benchmarks.subject import CONSUMED, DISCARD, KAFKA, LIMIT, MILLSTREAM, PRODUCED, Measured, Subject, Target
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import millstream
from millstream_testing.security import Certificates
from millstream_testing.server import Server, ServerFailed

STARTED = "start and rest"
_ADMIN_S_MAX = 30.0
_REST_S = 2.0
_DELETE_S_MAX = 10.0
# The brokers' own data: journals and metadata.
_LEFT_BYTES_MAX = 96 * 1024 * 1024
_KAFKA_TLS = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL
listener.name.tls.ssl.keystore.type=PEM
listener.name.tls.ssl.keystore.location={both}
"""
_WARM = (Case(flush=OS), Case(flush=OS, partitions=1, size_bytes=100))


def stored_bytes(folder: Path) -> int:
    """Return the number of bytes allocated to the files of a folder."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, file)).st_blocks * 512
    return total


class KafkaSubject(Subject):
    """Measured with librdkafka, and with requests over a bare socket."""

    def offers(self, case: Case) -> bool:
        """Return whether the line is measured: not with TLS, and not the startup of a server that is not for use."""
        return case.kind != START and not case.tls

    @abstractmethod
    def topic(self, case: Case) -> AbstractContextManager[Target]:
        """Create a topic for the line, and delete it after the measurement."""

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure one line once on its own topic."""
        with self.topic(case) as target:
            if case.kind == LATENCY:
                return latency.measure(target, case, seconds)
            if case.kind == REQUESTS:
                return requests.measure(target, case, seconds)
            if case.kind == FIXED:
                return fixed_requests.measure(target, case, seconds)
            stored, produced = throughput.produce(target, case, seconds)
            flows = {PRODUCED: produced}
            if case.consumes:
                filled = throughput.fill(target, case, stored, case.messages_to_read(seconds))
                flows[CONSUMED] = reader.consume(target, case, filled)
            return flows


class LimitServer(Server):
    """`benchmarks.limit_server` as a process."""

    def command(self) -> Sequence[str]:
        """Return the command line: this Python and the module, which is not installed."""
        flags = [part for name, value in self.settings.items() for part in (f"--{name}", str(value))]
        serve = [sys.executable, "-m", "benchmarks.limit_server", "--data", str(self.data), "--kafka", self.kafka]
        return [*serve, *flags]

    def _folder(self) -> Path:
        return Path(__file__).resolve().parent.parent


class Limit(KafkaSubject):
    """The limit server, restarted for each measurement, since it cannot delete topics."""

    name = LIMIT

    @contextmanager
    def topic(self, case: Case) -> Iterator[Target]:
        """Run a server for one measurement."""
        settings: dict[str, object] = {"flush": self.flush(case), "partitions": case.partitions}
        tls: Mapping[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
            if case.tls:
                certificates = Certificates(Path(folder) / "certs")
                settings |= {"tls-cert": certificates.node, "tls-key": certificates.node_key}
                tls = tls_settings(certificates)
            with LimitServer(Path(folder) / "data", settings=settings) as server:
                yield Target(server=server, topic="bench", partitions=case.partitions, tls=tls)

    def flush(self, case: Case) -> str:
        """Return the server's flush setting."""
        return case.flush


class Discard(Limit):
    """A server that responds and stores nothing, to measure the client and the socket."""

    name = DISCARD

    def offers(self, case: Case) -> bool:
        """Return whether the line does not depend on storage."""
        return case.kind == PRODUCE and case.flush == OS and case.acks == "all"

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure producing only: there is nothing to read back."""
        with self.topic(case) as target:
            return {PRODUCED: throughput.produce(target, case, seconds)[1]}

    def flush(self, case: Case) -> str:
        """Return the setting that discards everything."""
        return "discard"

    def durability(self, case: Case) -> str:
        """Return that there is none."""
        return "nothing is stored"


def tls_settings(certificates: Certificates) -> Mapping[str, str]:
    """Return librdkafka's settings for a server with TLS."""
    return {"security.protocol": "ssl", "ssl.ca.location": str(certificates.ca)}


class TlsListener:
    """One more listener of a broker, with TLS 1.3 or 1.2 and its own certificate, for lines with TLS."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder)
        self.address = kafka.free_address()

    @property
    def client_settings(self) -> Mapping[str, str]:
        """Return librdkafka's connection settings."""
        return {"bootstrap.servers": self.address, **tls_settings(self.certificates)}


class Broker(KafkaSubject):
    """A broker that is started once; each measurement has its own topic, which is deleted after it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: Server
        self._tls: TlsListener

    @abstractmethod
    def server(self, data: Path, tls: TlsListener | None = None) -> Server:
        """Return the broker on a folder, as a user would start it."""

    @abstractmethod
    def topic_settings(self, flush: str) -> Mapping[str, str]:
        """Return the topic settings for this durability."""

    def offers(self, case: Case) -> bool:
        """Return True: every line is measured."""
        return True

    def __enter__(self) -> Self:
        """Start the broker, and send some messages to warm up just-in-time compilers."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        try:
            self._tls = TlsListener(folder / "certs")
            self._server = self._stack.enter_context(self.server(folder / "data", self._tls))
            for case in _WARM:
                super().measure(case, 1.0)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop it, and remove what it stored."""
        with self._stack, suppress(ServerFailed):
            if self._server.is_running():
                self._server.stop()

    def measure(self, case: Case, seconds: float) -> Measured:
        return {STARTED: self.start()} if case.kind == START else super().measure(case, seconds)

    @contextmanager
    def topic(self, case: Case) -> Iterator[Target]:
        """Create a topic, and delete it at the end."""
        name = f"bench-{uuid.uuid4().hex[:12]}"
        admin = AdminClient({"bootstrap.servers": self._server.kafka, "log_level": 0})
        new_topic = NewTopic(name, case.partitions, 1, config=dict(self.topic_settings(case.flush)))
        admin.create_topics([new_topic])[name].result(_ADMIN_S_MAX)
        requests.first_response(self._server.kafka, name)
        try:
            tls = self._tls.client_settings if case.tls else {}
            yield Target(server=self._server, topic=name, partitions=case.partitions, tls=tls)
        finally:
            if self._server.is_running():
                admin.delete_topics([name])[name].result(_ADMIN_S_MAX)
                self._wait_until_deleted()

    def _wait_until_deleted(self) -> None:
        """Wait until files are deleted in the background, which would affect the next measurement."""
        deadline = time.monotonic() + _DELETE_S_MAX
        while time.monotonic() < deadline and stored_bytes(self._server.data) > _LEFT_BYTES_MAX:
            time.sleep(0.05)

    def start(self) -> dict[str, float]:
        """Start another broker on an existing folder, and measure its startup and its memory at rest."""
        with (
            tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder,
            self.server(Path(folder) / "data") as server,
        ):
            server.stop()
            server.start()
            numbers = {"start s": server.start_s, "first response s": requests.first_response(server.kafka, "first")}
            time.sleep(_REST_S)
            children = sum(map(resident_of, tree_of(server.pid)[1:]))
            return numbers | {
                "memory at rest MB": resident_of_tree(server.pid) / 1e6,
                "children's memory MB": children / 1e6,
            }


class Millstream(Broker):
    """The broker under test."""

    name = MILLSTREAM
    version = millstream.__version__

    def server(self, data: Path, tls: TlsListener | None = None) -> Server:
        """Return a server with default settings."""
        return Server(data, settings=self.listener_settings(data, tls))

    def listener_settings(self, data: Path, tls: TlsListener | None) -> Mapping[str, object]:
        """Return flags that add a listener with TLS."""
        if tls is None:
            return {}
        config = data.with_name("millstream.toml")
        certificates = tls.certificates
        config.write_text(
            f'[[listeners]]\nname = "tls"\naddress = "{tls.address}"\n'
            f'tls-cert = "{certificates.node}"\ntls-key = "{certificates.node_key}"\n',
            encoding="utf-8",
        )
        return {"config": config}

    def topic_settings(self, flush: str) -> Mapping[str, str]:
        """Return Millstream's own setting, after which the lines are named."""
        return {"flush": flush, "flush.ms": "1000"}


class ApacheKafka(Broker):
    """Apache Kafka; raises `PeerUnavailable` if it is unavailable."""

    name = KAFKA

    def __init__(self) -> None:
        super().__init__()
        self.version = kafka.version_of(kafka.fetch())

    def server(self, data: Path, tls: TlsListener | None = None) -> Server:
        """Return a server with default settings; see `peers.kafka`."""
        if tls is None:
            return kafka.kafka(data, OS)
        both = tls.certificates.folder / "both.pem"
        both.write_bytes(tls.certificates.node_key.read_bytes() + tls.certificates.node.read_bytes())
        return kafka.kafka(data, OS, listener=f"TLS://{tls.address}", properties=_KAFKA_TLS.format(both=both))

    def topic_settings(self, flush: str) -> Mapping[str, str]:
        """Return Kafka's settings for the same durability."""
        durable = {ALWAYS: {"flush.messages": "1"}, INTERVAL: {"flush.ms": "1000"}, OS: {}}
        # Deleted files are removed at once, so that writing them does not affect the next measurement.
        return {"file.delete.delay.ms": "100", **durable[flush]}
