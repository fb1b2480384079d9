"""How much three nodes take in against one on the same machine, with librdkafka as fast as it can."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from benchmarks import throughput
from benchmarks.cases import ALWAYS, IDEMPOTENT, OS, Case
from benchmarks.results import Results
from benchmarks.subject import PRODUCED, Measured
from benchmarks.target import Target
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.fork_server import ForkedProcess
from millstream_testing.server import Server

ONE, THREE = "one node", "three nodes"
REPLICATION = 3
CASES = (
    Case(flush=OS),
    Case(flush=OS, acks=IDEMPOTENT),
    Case(flush=OS, size_bytes=100),
    Case(flush=OS, producers=10),
    Case(flush=ALWAYS),
)
"""What is measured; how much of one node's rate three nodes reach is asked for each."""

_ADMIN_S_MAX = 60.0


class ClusterUp(Server):
    """`millstream cluster up`: etcd, PostgreSQL and three nodes, whose costs are counted together."""

    def command(self) -> Sequence[str]:
        """The command line."""
        flags = ["--json", "--nodes", str(REPLICATION), "--data", str(self.data)]
        ports = ["--kafka-port-base", "0", "--http-port-base", "0"]
        settings = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "millstream.cli.main", "cluster", "up", *flags, *ports, *settings]

    def _first_line(self, process: subprocess.Popen[bytes] | ForkedProcess) -> bytes:
        """What a single node would say: the addresses of all nodes as one."""
        nodes = json.loads(super()._first_line(process))["nodes"]
        return json.dumps({key: ",".join(node[key] for node in nodes) for key in ("kafka", "http")}).encode()


class Measurement:
    """Both servers, side by side, each measured while the other rests."""

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
        # Ends in order, so that etcd and PostgreSQL are not cut off.
        self._stack.callback(three.stop)
        self._servers = {ONE: (one, 1), THREE: (three, REPLICATION)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def measure(self, name: str, case: Case, seconds: float) -> Measured:
        """Measure one line on one of them."""
        server, replication = self._servers[name]
        with _topic(server, case, replication) as target:
            return {PRODUCED: throughput.produce(target, case, seconds)[1]}


@contextmanager
def _topic(server: Server, case: Case, replication: int) -> Iterator[Target]:
    """Its own topic, which goes when it was measured."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    least = {"min.insync.replicas": "2"} if replication > 1 else {}
    topic = NewTopic(name, case.partitions, replication, config={"flush": case.flush, **least})
    admin.create_topics([topic], operation_timeout=_ADMIN_S_MAX)[name].result(_ADMIN_S_MAX)
    try:
        yield Target(server=server, topic=name, partitions=case.partitions)
    finally:
        admin.delete_topics([name], operation_timeout=_ADMIN_S_MAX)[name].result(_ADMIN_S_MAX)


def run(rounds: int, seconds: float, cases: Sequence[Case] = CASES) -> Results:
    """Measure every line in turn on both, several times over."""
    results = Results()
    with Measurement() as measurement:
        for name in (ONE, THREE):
            measurement.measure(name, Case(flush=OS), 1.0)
        for turn in range(rounds):
            for case in cases:
                for name in (ONE, THREE) if turn % 2 == 0 else (THREE, ONE):
                    results.add(case, name, case.durability, measurement.measure(name, case, seconds))
    return results
