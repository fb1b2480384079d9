"""State that survives a stop and a kill: topics, records, offsets, groups and producer state."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from millstream.protocol.wire.node_status import FRESH_S
from millstream_testing.child_process import is_alive
from millstream_testing.committed_messages import committed_records
from millstream_testing.finding import Kind
from millstream_testing.kill_trial import KillTrial, Plan
from millstream_testing.server import Server, ServerFailed
from millstream_testing.waiting import wait_until

WAIT_S = 120.0
QUIET = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
PARTITIONS = 3


class Client:
    """An idempotent producer and a group that outlive restarts of the server, as real programs do."""

    def __init__(self, server: Server, topic: str) -> None:
        self.topic = topic
        self.failures: list[KafkaError] = []
        self.offsets: list[tuple[int | None, int | None]] = []
        address: dict[str, str | int | float | bool] = {"bootstrap.servers": server.kafka, **QUIET}
        self.admin = AdminClient(address)
        self.producer = Producer(address | {"enable.idempotence": True})
        group = {"group.id": f"{topic}-group", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        self.consumer = Consumer(address | group | {"session.timeout.ms": 30_000, "heartbeat.interval.ms": 300})

    def create(self) -> None:
        topic = NewTopic(self.topic, PARTITIONS, 1, config={"retention.ms": "86400000"})
        (created,) = self.admin.create_topics([topic]).values()
        created.result(WAIT_S)

    def send(self, values: range) -> None:
        for value in values:
            self.producer.produce(self.topic, b"%d" % value, partition=value % PARTITIONS, on_delivery=self._note)
        assert self.producer.flush(WAIT_S) == 0
        assert self.failures == []

    def _note(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failures.append(error)
        else:
            self.offsets.append((message.partition(), message.offset()))

    def read(self, count: int) -> list[bytes | None]:
        got: list[bytes | None] = []
        deadline = time.monotonic() + WAIT_S
        while len(got) < count:
            assert time.monotonic() < deadline, f"{len(got)} of {count} messages came"
            got += [m.value() for m in self.consumer.consume(count - len(got), 0.2) if m.error() is None]
        return got


def all_values(server: Server, topic: str) -> list[list[int]]:
    """The content of each partition, as read by another consumer from the start."""
    offsets: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for record in committed_records(server.kafka, topic):
        offsets[record.partition].append(int(record.value or b""))
    return offsets


def expected_values(count: int) -> list[list[int]]:
    return [list(range(index, count, PARTITIONS)) for index in range(PARTITIONS)]


def test_everything_survives_a_stop_and_a_kill(start_server: Any, topic: str) -> None:
    server: Server = start_server()
    client = Client(server, topic)
    client.create()
    client.send(range(300))
    client.consumer.subscribe([topic])
    assert len(client.read(150)) == 150
    client.consumer.commit(asynchronous=False)
    read, sent = 150, 300
    for clean in (True, False):
        server.restart(clean=clean)
        described = client.admin.list_topics(topic, timeout=WAIT_S).topics[topic]
        assert len(described.partitions) == PARTITIONS
        resource = ConfigResource(ResourceType.TOPIC, topic)
        (settings,) = client.admin.describe_configs([resource]).values()
        assert settings.result(WAIT_S)["retention.ms"].value == "86400000"
        # The producer continues with its id and sequence: no gap, no duplicate, dense offsets.
        client.send(range(sent, sent + 300))
        sent += 300
        assert sorted(client.offsets) == [
            (index, offset) for index in range(PARTITIONS) for offset in range(sent // PARTITIONS)
        ]
        # The group continues at its committed offset, with its known member.
        assert len({*client.read(sent - read)}) == sent - read
        client.consumer.commit(asynchronous=False)
        read = sent
    client.consumer.close()
    assert all_values(server, topic) == expected_values(sent)
    assert server.stop() == 0


@pytest.mark.trial
def test_restarts_in_a_row_lose_nothing(start_server: Any, topic: str) -> None:
    server: Server = start_server()
    client = Client(server, topic)
    client.create()
    for number in range(4):
        client.send(range(number * 90, number * 90 + 90))
        server.restart(clean=number % 2 == 0)
    assert all_values(server, topic) == expected_values(360)


def test_a_second_server_on_the_same_folder_is_refused(server: Server, tmp_path: Path) -> None:
    other = Server(server.data, log=tmp_path / "other.log")
    with pytest.raises(ServerFailed) as refused:
        other.start()
    assert str(server.data) in str(refused.value)
    assert server.is_running()


def test_children_end_with_the_server_and_a_start_waits_for_a_port_that_one_still_holds(start_server: Any) -> None:
    server: Server = start_server(forked=False)
    children = children_of(server)
    server.kill_main()
    wait_until(lambda: not any(is_alive(child.pid) for child in children))
    server.kill()
    host, _, port = server.http.rpartition(":")
    orphan = socket.create_server((host, int(port)))
    threading.Timer(1.0, orphan.close).start()
    server.start()
    children = children_of(server)
    server.stop()
    wait_until(lambda: not any(is_alive(child.pid) for child in children))


def test_the_gateway_ends_with_a_server_that_has_not_read_its_last_request(start_server: Any) -> None:
    server: Server = start_server(forked=False)
    children = children_of(server)
    os.kill(server.pid, signal.SIGSTOP)
    # Then the last status is old and the gateway asks for another: the server is killed with an unread request.
    time.sleep(FRESH_S)
    httpx.get(f"http://{server.http}/healthz", timeout=WAIT_S)
    server.kill_main()
    wait_until(lambda: not any(is_alive(child.pid) for child in children))


def children_of(server: Server) -> list[psutil.Process]:
    """The child processes of the server; the gateway responds once its process is there."""
    httpx.get(f"http://{server.http}/healthz", timeout=WAIT_S)
    children: list[psutil.Process] = psutil.Process(server.pid).children(recursive=True)
    assert children
    return children


def test_no_acknowledged_message_is_lost_when_a_loaded_broker_is_killed(tmp_path: Path) -> None:
    """The short form of `make kill-trial`."""
    with KillTrial(Server(tmp_path / "data"), Plan(kills=1, load_s=(0.2, 0.6))) as trial:
        outcome = trial.run()
        if not outcome.report.ok:
            trial.load.save_history(tmp_path / "history.jsonl")
    assert outcome.report.ok, str(outcome.report)
    assert outcome.report.acknowledged > 0


class ForgetfulServer(Server):
    """A server whose disk loses its logs, and everything that could repair them, on restart.

    All of them: of half a log, only unacknowledged messages may be missing.
    """

    def start(self) -> Self:
        if self.data.exists():
            shutil.rmtree(self.data / "journal", ignore_errors=True)
            for log in self.data.rglob("*.log"):
                os.truncate(log, 0)
        return super().start()


def test_the_kill_trial_detects_a_broker_that_loses_its_logs(tmp_path: Path) -> None:
    server = ForgetfulServer(tmp_path / "data")
    with KillTrial(server, Plan(kills=1, producers=0, members=0, load_s=(0.1, 0.2))) as trial:
        assert trial.run().report.counts[Kind.LOST] > 0
