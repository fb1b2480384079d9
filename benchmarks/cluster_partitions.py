"""A cluster with very many partitions: the time to start and to move leaders, and the cost at rest."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.processes import cpu_of, resident_of_tree
from benchmarks.subject import Numbers
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.cli.cluster_up import LocalEtcd
from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import Common
from millstream.core.errors import MillstreamError
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import ServerGroup

NODES = 3
TOPICS = 10
_READY_S_MAX = 600.0
_PROBE_S = 0.1
_REQUEST_S_MAX = 60.0
_SETTLE_S = 10.0

PrintLine = Callable[[str], None]


def run(partitions: int, idle_s: float, print_line: PrintLine) -> Numbers:
    """Run all measurements in sequence, on one cluster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        etcd = stack.enter_context(LocalEtcd(folder / "etcd"))
        postgres = stack.enter_context(PostgresServer())
        settings = {"leader-balance-ms": 1000}
        group = ServerGroup(folder, etcd.url, postgres.new_database(), nodes=NODES, settings=settings)
        cluster = stack.enter_context(group)
        numbers: Numbers = {}
        for step in (_create, _restart, _rest, _kill_node, _restart_node):
            for name, value in step(cluster, partitions, idle_s):
                numbers[name] = value
                print_line(f"{partitions:,} partitions: {name} {value:.2f}")
        return numbers


Found = Iterable[tuple[str, float]]


def _create(cluster: ServerGroup, partitions: int, _idle_s: float) -> Found:
    began = time.monotonic()
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    topics = [NewTopic(f"many-{number}", partitions // TOPICS, NODES) for number in range(TOPICS)]
    for created in admin.create_topics(topics, operation_timeout=_READY_S_MAX, request_timeout=_READY_S_MAX).values():
        created.result(_READY_S_MAX)
    _wait(cluster, lambda metadata: _all(metadata, partitions, _is_in_sync))
    yield "created s", time.monotonic() - began


def _restart(cluster: ServerGroup, partitions: int, _idle_s: float) -> Found:
    """Stop all nodes cleanly and start them; measure the time until all partitions have leaders and are in sync."""
    _settle(cluster, partitions)
    began = time.monotonic()
    for node in cluster:
        node.stop()
    yield "stopped s", time.monotonic() - began
    began = time.monotonic()
    cluster.start()
    yield "start: nodes ready s", time.monotonic() - began
    _wait(cluster, lambda metadata: _all(metadata, partitions, lambda partition: partition.leader_id >= 0))
    yield "start: all led s", time.monotonic() - began
    _wait(cluster, lambda metadata: _all(metadata, partitions, _is_in_sync))
    yield "start: all in sync s", time.monotonic() - began


def _rest(cluster: ServerGroup, partitions: int, idle_s: float) -> Found:
    """Return what each node costs while idle."""
    _settle(cluster, partitions)
    before = {number: cpu_of(node.pid) for number, node in cluster.nodes.items()}
    time.sleep(idle_s)
    for number, node in cluster.nodes.items():
        used = cpu_of(node.pid).since(before[number])
        yield f"rest: node {number} CPU %", 100 * (used.user_s + used.system_s) / idle_s
        yield f"rest: node {number} MB", resident_of_tree(node.pid) / 1e6


def _kill_node(cluster: ServerGroup, partitions: int, _idle_s: float) -> Found:
    """Kill the node that leads the most partitions; measure the time until all have another leader."""
    metadata = _metadata(cluster)
    leaders = [int(partition.leader_id) for partition in _partitions(metadata)]
    lost = max(cluster.nodes, key=leaders.count)
    yield "lost: partitions led", leaders.count(lost)
    cluster[lost].kill()
    began = time.monotonic()
    _wait(cluster, lambda metadata: _all(metadata, partitions, lambda partition: partition.leader_id not in (lost, -1)))
    yield "lost: all led again s", time.monotonic() - began


def _restart_node(cluster: ServerGroup, partitions: int, _idle_s: float) -> Found:
    """Restart the killed node; measure the time until it is ready and all partitions are in sync."""
    began = time.monotonic()
    cluster.start()
    yield "back: node ready s", time.monotonic() - began
    _wait(cluster, lambda metadata: _all(metadata, partitions, _is_in_sync))
    yield "back: all in sync s", time.monotonic() - began


def _settle(cluster: ServerGroup, partitions: int) -> None:
    """Wait until preferred leaders have taken over, so that the next measurement starts at rest."""
    _wait(
        cluster,
        lambda metadata: _all(metadata, partitions, lambda partition: partition.leader_id == partition.replicas[0]),
    )
    time.sleep(_SETTLE_S)


def _is_in_sync(partition: PartitionMetadata) -> bool:
    return partition.leader_id >= 0 and len(partition.in_sync) == len(partition.replicas)


def _all(metadata: ClusterMetadata, partitions: int, holds: Callable[[PartitionMetadata], bool]) -> bool:
    every = _partitions(metadata)
    return len(every) >= partitions // TOPICS * TOPICS and all(map(holds, every))


def _partitions(metadata: ClusterMetadata) -> list[PartitionMetadata]:
    topics = [topic for name, topic in metadata.topics.items() if name.startswith("many-")]
    return [partition for topic in topics for partition in topic.partitions.values()]


def _metadata(cluster: ServerGroup) -> ClusterMetadata:
    return call_broker(Common(brokers=cluster.kafka, timeout=_REQUEST_S_MAX), lambda client: client.metadata())


def _wait(cluster: ServerGroup, holds: Callable[[ClusterMetadata], bool]) -> None:
    deadline = time.monotonic() + _READY_S_MAX
    while True:
        try:
            if holds(_metadata(cluster)):
                return
        except (MillstreamError, CommandFailed, OSError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster did not reach the state within {_READY_S_MAX:g} s")
        time.sleep(_PROBE_S)
