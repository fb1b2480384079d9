"""Three nodes against one on the same machine, and against three of Apache Kafka, with librdkafka.

Measures the highest rate at which librdkafka can produce, and the latency at a fixed rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from benchmarks import latency, throughput
from benchmarks.cases import ALWAYS, IDEMPOTENT, LATENCY, OS, Case
from benchmarks.peers.kafka import KafkaServer, kafka
from benchmarks.results import Results
from benchmarks.subject import PRODUCED, Measured, PeerUnavailable, Target
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.fork_server import ForkedProcess
from millstream_testing.server import Server

ONE, THREE, KAFKA = "one node", "three nodes", "Apache Kafka, three nodes"
REPLICATION = 3
CASES = (
    Case(flush=OS),
    Case(flush=OS, acks=IDEMPOTENT),
    Case(flush=OS, size_bytes=100),
    Case(flush=OS, producers=10),
    Case(flush=ALWAYS),
    Case(kind=LATENCY, flush=OS, rate_per_s=1000, partitions=1),
    Case(kind=LATENCY, flush=ALWAYS, rate_per_s=1000, partitions=1),
)
"""The measured cases; at the highest rate, three nodes should reach a share of one node's rate."""
_KAFKA_FLUSH: Final = {OS: {}, ALWAYS: {"flush.messages": "1"}}

_ADMIN_S_MAX = 60.0


class ClusterUp(Server):
    """`millstream cluster up`: etcd, PostgreSQL and three nodes, whose costs are summed."""

    def command(self) -> Sequence[str]:
        flags = ["--json", "--nodes", str(REPLICATION), "--data", str(self.data)]
        ports = ["--kafka-port-base", "0", "--http-port-base", "0"]
        settings = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "millstream.cli.main", "cluster", "up", *flags, *ports, *settings]

    def _first_line(self, process: subprocess.Popen[bytes] | ForkedProcess) -> bytes:
        """Return the line that a single node would print, with the addresses of all nodes."""
        nodes = json.loads(super()._first_line(process))["nodes"]
        return json.dumps({key: ",".join(node[key] for node in nodes) for key in ("kafka", "http")}).encode()


class Measurement:
    """All servers; each is measured while the others are idle."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._servers: dict[str, tuple[Server, int]] = {}

    def __enter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        try:
            one = self._stack.enter_context(Server(folder / "one"))
            three = self._stack.enter_context(ClusterUp(folder / "three"))
        except BaseException:
            self._stack.close()
            raise
        # Stop in order, so that etcd and PostgreSQL remain available to the nodes.
        self._stack.callback(three.stop)
        self._servers = {ONE: (one, 1), THREE: (three, REPLICATION)}
        try:
            peer = self._stack.enter_context(kafka(folder / "kafka", OS, nodes=REPLICATION))
        except PeerUnavailable as reason:
            print(f"Apache Kafka is not measured: {reason}", file=sys.stderr)
        else:
            self._servers[KAFKA] = (peer, REPLICATION)
        return self

    @property
    def names(self) -> Sequence[str]:
        """The names of the measured servers."""
        return list(self._servers)

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def measure(self, name: str, case: Case, seconds: float) -> Measured:
        """Measure one line on one server."""
        server, replication = self._servers[name]
        with _topic(server, case, replication) as target:
            if case.kind == LATENCY:
                return latency.measure(target, case, seconds)
            return {PRODUCED: throughput.produce(target, case, seconds)[1]}


@contextmanager
def _topic(server: Server, case: Case, replication: int) -> Iterator[Target]:
    """Create a topic for one measurement, and delete it afterwards."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    least = {"min.insync.replicas": "2"} if replication > 1 else {}
    flush = _KAFKA_FLUSH[case.flush] if isinstance(server, KafkaServer) else {"flush": case.flush}
    topic = NewTopic(name, case.partitions, replication, config={**flush, **least})
    admin.create_topics([topic], operation_timeout=_ADMIN_S_MAX)[name].result(_ADMIN_S_MAX)
    try:
        yield Target(server=server, topic=name, partitions=case.partitions)
    finally:
        admin.delete_topics([name], operation_timeout=_ADMIN_S_MAX)[name].result(_ADMIN_S_MAX)


def run(rounds: int, seconds: float, cases: Sequence[Case] = CASES) -> Results:
    """Measure every line on all servers in turn, in several rounds."""
    results = Results()
    with Measurement() as measurement:
        for name in measurement.names:
            measurement.measure(name, Case(flush=OS), 1.0)
        for turn in range(rounds):
            for case in cases:
                for name in measurement.names[:: 1 if turn % 2 == 0 else -1]:
                    results.add(case, name, case.durability, measurement.measure(name, case, seconds))
    return results
