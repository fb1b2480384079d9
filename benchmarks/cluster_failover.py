"""How long producers wait when a leader is killed: from kill -9 until its partitions acknowledge a message again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.cli.cluster_up import LocalEtcd
from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import Common
from millstream.client.admin.cluster_status import cluster_status
from millstream.core.errors import MillstreamError
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import ServerGroup
from millstream_testing.trial_clients import LoadProducer, PartitionKey, TrialState

TOPIC = "failover"
PARTITIONS = 6
NODES = 3
_MESSAGES_PER_S = 300
_HEAL_S_MAX = 120.0
_PROBE_S = 0.2
_REQUEST_S_MAX = 10.0


class Failover:
    """A cluster and an idempotent producer with acks=all, both with default settings."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cluster: ServerGroup
        self._state = TrialState()
        self._kills = 0

    def __enter__(self) -> Self:
        stack = self._stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        try:
            etcd = stack.enter_context(LocalEtcd(folder / "etcd"))
            postgres = stack.enter_context(PostgresServer())
            # Leaders move back at once, so that every node leads partitions when it is killed.
            settings = {"leader-balance-ms": 500}
            group = ServerGroup(folder, etcd.url, postgres.new_database(), nodes=NODES, settings=settings)
            self._cluster = stack.enter_context(group)
            self._start_load()
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._state.stopping.set()
        self._stack.close()

    def kill(self) -> float:
        """Kill the next node; return the seconds until all its partitions have acknowledged a later message."""
        self._wait_until_healthy()
        number = 1 + self._kills % NODES
        self._kills += 1
        led = self._wait_for_leadership(number)
        killed = self._cluster[number]
        recovery = self._state.measure_recovery()
        killed.kill()
        self._state.wait(lambda: led <= recovery.first.keys(), "not every partition acknowledged a message")
        killed.start()
        return max(recovery.first[partition_key] for partition_key in led) - recovery.since

    def _start_load(self) -> None:
        address = {"bootstrap.servers": self._cluster.kafka}
        admin = AdminClient(address | {"log_level": 0})
        topic = NewTopic(TOPIC, PARTITIONS, NODES)
        admin.create_topics([topic], operation_timeout=_HEAL_S_MAX)[TOPIC].result(_HEAL_S_MAX)
        settings = address | {"enable.idempotence": True, "acks": "all", "linger.ms": 5}
        topics = {TOPIC: PARTITIONS}
        load = LoadProducer(
            "producer", self._state, settings, topics, seed=1, messages_per_s=_MESSAGES_PER_S, steady=True
        )
        self._state.loading.set()
        load.start()
        self._stack.callback(load.join, _HEAL_S_MAX)

    def _wait_for_leadership(self, node: int) -> set[PartitionKey]:
        led: set[PartitionKey] = set()

        def leads() -> bool:
            led.clear()
            led.update((TOPIC, index) for index, leader in self._leaders().items() if leader == node)
            return bool(led)

        _wait(leads, f"node {node} leads nothing")
        return led

    def _leaders(self) -> dict[int, int]:
        metadata = call_broker(
            Common(brokers=self._cluster.kafka, timeout=_REQUEST_S_MAX), lambda client: client.metadata([TOPIC])
        )
        return {int(index): int(partition.leader_id) for index, partition in metadata.topics[TOPIC].partitions.items()}

    def _wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            try:
                status = call_broker(Common(brokers=self._cluster.kafka, timeout=_REQUEST_S_MAX), cluster_status)
            except (MillstreamError, CommandFailed, OSError):
                return False
            return not status.troubled and [node.state for node in status.nodes] == ["ready"] * NODES

        _wait(is_healthy, "the cluster is not healthy")


def _wait(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _HEAL_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} after {_HEAL_S_MAX:g} s")
        time.sleep(_PROBE_S)


def run(kills: int, print_line: Callable[[str], None]) -> list[float]:
    """Kill leaders one after the other; return the seconds of each failover."""
    times: list[float] = []
    with Failover() as failover:
        for number in range(1, kills + 1):
            times.append(failover.kill())
            print_line(f"kill {number}: next acknowledged produce after {times[-1]:.2f} s")
    return times
