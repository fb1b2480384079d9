"""Several broker processes on one machine: they die, are handed over and change in number without losing anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.command import CommandLine
from millstream_testing.producer_load import read_numbers, send_numbers
from millstream_testing.security import ADMIN, MALLORY, Certificates, declare_security
from millstream_testing.waiting import wait_until

DEADLINE_S = 60
PARTITIONS = 6


@contextmanager
def serving(data: Path, cores: int, *flags: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    addresses = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0", "--group-initial-delay-ms", "0")
    command = [sys.executable, "-m", "millstream.cli.main", "serve", "--data", str(data), *addresses, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    with (data.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--cores", str(cores), *flags], stdout=subprocess.PIPE, stderr=log, env=environment
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (data.parent / "log").read_text()[-3000:]
        yield json.loads(line), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()


def create(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic("t", PARTITIONS)])["t"].result(DEADLINE_S)


def leaders(kafka: str) -> set[int]:
    partitions = AdminClient({"bootstrap.servers": kafka}).list_topics("t", timeout=DEADLINE_S).topics["t"]
    return {partition.leader for partition in partitions.partitions.values()}


def ready(machine: dict[str, Any]) -> bool:
    return httpx.get(f"http://{machine['http']}/readyz", timeout=DEADLINE_S).status_code == 200


def test_processes_die_and_their_number_changes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, 2) as (machine, supervisor):
        assert [node["id"] for node in machine["nodes"]] == [1, 1001]
        create(machine["kafka"])
        assert leaders(machine["kafka"]) == {1, 1001}
        send_numbers(machine["kafka"], "t", range(100), wait_s=DEADLINE_S)
        assert read_numbers(machine["kafka"], "t", "g", 100, wait_s=DEADLINE_S) == list(range(100))
        metrics = httpx.get(f"http://{machine['http']}/metrics", timeout=DEADLINE_S).text
        assert all(f'node="{node["id"]}"' in metrics for node in machine["nodes"])
        with pytest.raises(AssertionError, match="another data folder"), serving(data, 1):
            pass

        # HTTP keeps working without the first broker.
        os.kill(machine["nodes"][0]["pid"], signal.SIGKILL)
        messages = f"http://{machine['http']}/v1/topics/t/messages"
        published = httpx.post(messages, content=b"100", timeout=DEADLINE_S)
        assert published.is_success, published.text
        send_numbers(machine["kafka"], "t", range(101, 200), wait_s=DEADLINE_S)
        wait_until(lambda: leaders(machine["kafka"]) == {1, 1001})
        wait_until(lambda: CommandLine(machine["kafka"])("doctor").code == 0)
        wait_until(lambda: ready(machine))

        # A hanging process is reported through any other.
        os.kill(machine["nodes"][1]["pid"], signal.SIGSTOP)
        output = CommandLine(machine["kafka"])("doctor", "--timeout", "3").out
        os.kill(machine["nodes"][1]["pid"], signal.SIGCONT)
        assert "node 1001 does not respond" in output
        assert "WARNING  clock" not in output
        wait_until(lambda: ready(machine))

        processes = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.kill()
        supervisor.wait()
        wait_until(
            lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
        )

    with serving(data, 1) as (node, _):
        assert read_numbers(node["kafka"], "t", "g", 100, wait_s=DEADLINE_S) == list(range(100, 200))
    assert not list(data.glob("node-*"))


@pytest.mark.trial
@pytest.mark.parametrize("number", [0, 1])
def test_the_logs_of_a_process_that_cannot_start_are_handed_to_the_others(tmp_path: Path, number: int) -> None:
    data = tmp_path / "data"
    with serving(data, 3) as (machine, _), ExitStack() as stack:
        create(machine["kafka"])
        send_numbers(machine["kafka"], "t", range(100), wait_s=DEADLINE_S)
        assert read_numbers(machine["kafka"], "t", "g", 100, wait_s=DEADLINE_S) == list(range(100))
        dead = machine["nodes"][number]
        others = [node for node in machine["nodes"] if node is not dead]
        os.kill(dead["pid"], signal.SIGKILL)
        stack.enter_context(taken(dead["kafka"]))
        wait_until(lambda: leaders(others[0]["kafka"]) == {other["id"] for other in others}, timeout_s=2 * DEADLINE_S)
        wait_until(lambda: ready(machine))
        response = httpx.get(f"http://{machine['http']}/readyz", timeout=DEADLINE_S).json()
        assert f"node {dead['id']} could not be started" in str(response["warnings"])
        send_numbers(others[0]["kafka"], "t", range(100, 200), wait_s=DEADLINE_S)
        assert read_numbers(others[0]["kafka"], "t", "g", 100, wait_s=DEADLINE_S) == list(range(100, 200))
        assert not (data / f"node-{dead['id']}").exists()
    with serving(data, 3) as (machine, _):
        assert leaders(machine["kafka"]) == {1, 1001, 2001}
        assert read_numbers(machine["kafka"], "t", "other", 200, wait_s=DEADLINE_S) == list(range(200))


@pytest.mark.trial
def test_a_locked_machine_serves_all_clients_at_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path / "certs")
    declare_security(tmp_path / "data", dict((ADMIN, MALLORY)))
    flags = ["--auth", "required", "--tls-cert", str(certificates.node), "--tls-key", str(certificates.node_key)]
    with serving(tmp_path / "data", 2, *flags, "--super-users", "admin") as (machine, _):
        for name, value in zip(("USER", "PASSWORD", "TLS_CA"), (*ADMIN, str(certificates.ca)), strict=True):
            monkeypatch.setenv(f"MILLSTREAM_{name}", value)
        millstream = CommandLine(machine["kafka"])
        assert millstream("topic", "create", "t", "--partitions", PARTITIONS).code == 0
        producer = Producer(
            {
                "bootstrap.servers": machine["kafka"],
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-256",
                "sasl.username": ADMIN[0],
                "sasl.password": ADMIN[1],
                "ssl.ca.location": str(certificates.ca),
            }
        )
        for partition in range(PARTITIONS):
            producer.produce("t", b"x", partition=partition)
        assert producer.flush(DEADLINE_S) == 0
        clients = millstream("client", "list", "--all", "--json").document["clients"]
        assert {client["node"] for client in clients if client["client_id"] == "rdkafka"} == {1, 1001}

        http = httpx.Client(
            base_url=f"https://{machine['http']}",
            verify=ssl.create_default_context(cafile=str(certificates.ca)),
            timeout=DEADLINE_S,
        )
        assert http.get("/metrics").status_code == 401
        assert http.get("/metrics", auth=MALLORY).status_code == 403
        metrics = http.get("/metrics", auth=ADMIN).text
        assert all(f'node="{node["id"]}"' in metrics for node in machine["nodes"])
        # The gateway reaches the other broker, and then the one that is back at its address.
        os.kill(machine["nodes"][0]["pid"], signal.SIGKILL)
        for number in range(20):
            sent = http.post("/v1/topics/t/messages", content=b"%d" % number, auth=ADMIN)
            assert sent.is_success, sent.text
        assert http.post("/v1/topics/t/messages", content=b"x", auth=MALLORY).status_code == 403
        wait_until(lambda: millstream("doctor").code == 0)
        response = http.get("/readyz")
        assert (response.status_code, response.json()["nodes"]) == (200, [node["id"] for node in machine["nodes"]])
        http.close()


@contextmanager
def taken(address: str) -> Iterator[None]:
    """Occupy a port that a process has just released."""
    host, _, port = address.rpartition(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                taken.bind((host, int(port)))
                break
            time.sleep(0.001)
        taken.listen()
        yield
