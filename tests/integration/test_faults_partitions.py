"""Thousands of partitions on one node: created in bulk, restarted after a stop and a kill, idle at no cost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.server import Server

WAIT_S = 100.0
PARTITIONS = 200
CPU_S_PER_START_MAX = 10.0
CPU_S_IDLE_MAX = 0.5
RESIDENT_BYTES_MAX = 300 * 1024 * 1024


def cpu_s(server: Server) -> float:
    """CPU time of the server so far; unlike wall time, it does not depend on other processes."""
    fields = Path(f"/proc/{server.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def known_partitions(server: Server) -> int:
    topics = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0}).list_topics(timeout=WAIT_S)
    return sum(len(topic.partitions) for name, topic in topics.topics.items() if not name.startswith("__"))


def write_to_some(server: Server, count: int) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0, "linger.ms": 50})
    for number in range(0, count, 40):
        topic, partition = f"many-{number // PARTITIONS}", number % PARTITIONS
        producer.produce(topic, b"x", partition=partition, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert not any(errors)


@pytest.mark.parametrize(
    ("topics", "settle_s"), [(5, 0), pytest.param(50, 12, marks=pytest.mark.trial)], ids=["1000", "10000"]
)
def test_thousands_of_partitions(tmp_path: Path, topics: int, settle_s: float) -> None:
    count = topics * PARTITIONS
    with Server(tmp_path / "data") as server:
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        new = [NewTopic(f"many-{number}", num_partitions=PARTITIONS) for number in range(topics)]
        for created in admin.create_topics(new, request_timeout=WAIT_S, operation_timeout=WAIT_S).values():
            created.result(WAIT_S)
        assert known_partitions(server) == count
        write_to_some(server, count)
        for clean in (True, False):
            server.restart(clean=clean)
            assert known_partitions(server) == count
            assert cpu_s(server) < CPU_S_PER_START_MAX
            write_to_some(server, count)
        assert "millstream_topics" in server.metrics()
        assert resident_bytes(server) < RESIDENT_BYTES_MAX
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 1000
        if settle_s:
            check_idle(server, settle_s)


def check_idle(server: Server, settle_s: float) -> None:
    """Check CPU time a few seconds apart: next to nothing may have been used in between."""
    time.sleep(settle_s)  # Checkpoints of the last writes.
    before = cpu_s(server)
    time.sleep(3)
    assert cpu_s(server) - before < CPU_S_IDLE_MAX
