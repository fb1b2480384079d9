"""Fifty clients register schemas through three nodes while one of them is killed: ids stay unique, and none is lost."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import httpx
import pytest
from confluent_kafka import Producer

from millstream_testing.command import CommandLine
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(900)]

CLIENTS, EACH, SHARED = 50, 8, 20


@pytest.fixture
def nodes(tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer) -> Iterator[list[Server]]:
    settings = {
        "cluster": f"schemas-{uuid.uuid4().hex[:8]}",
        "etcd": etcd.url,
        "catalog": postgres.new_database(),
        "pipelines-enabled": "false",
    }
    made = [
        Server(tmp_path / f"node-{number}", settings={**settings, "node-id": number, "rack": f"rack-{number}"})
        for number in (1, 2, 3)
    ]
    try:
        for node in made:
            node.start()
        yield made
    finally:
        for node in made:
            node.kill()


def schema(name: str) -> str:
    return json.dumps({"type": "record", "name": name, "fields": [{"name": "a", "type": "int"}]})


def test_registrations_survive_a_killed_node(nodes: list[Server]) -> None:
    killed = threading.Event()

    def register(number: int) -> dict[str, int]:
        """Register at any node that responds, and note what was acknowledged."""
        known: dict[str, int] = {}
        urls = [f"http://{nodes[(number + step) % 3].http}/registry" for step in range(3)]
        with httpx.Client(timeout=60) as client:
            for index in range(EACH):
                # Half of the schemas are shared by many clients, under subjects of their own.
                name = f"Shared{(number + index) % SHARED}" if index % 2 else f"Own{number}x{index}"
                subject = f"client-{number}-{index}-value"
                for url in urls * 5:
                    try:
                        path = f"{url}/subjects/{subject}/versions"
                        response = client.post(path, json={"schema": schema(name)})
                    except httpx.HTTPError:
                        killed.wait(30)
                        continue
                    if response.status_code == 200:
                        known[f"{subject} {name}"] = response.json()["id"]
                        break
                    assert response.status_code >= 500, response.text
        return known

    with ThreadPoolExecutor(CLIENTS) as pool:
        coming = [pool.submit(register, number) for number in range(CLIENTS)]
        time.sleep(1.0)
        nodes[2].kill()
        killed.set()
        acknowledged = {key: schema_id for future in coming for key, schema_id in future.result(600).items()}
    assert len(acknowledged) == CLIENTS * EACH
    ids: dict[str, set[int]] = {}
    for key, schema_id in acknowledged.items():
        ids.setdefault(key.split()[1], set()).add(schema_id)
    # One id per schema, and no id for two schemas.
    assert all(len(numbers) == 1 for numbers in ids.values())
    assert len({next(iter(numbers)) for numbers in ids.values()}) == len(ids)
    for node in nodes[:2]:
        with httpx.Client(base_url=f"http://{node.http}/registry", timeout=60) as client:
            for key, schema_id in acknowledged.items():
                subject, name = key.split()
                stored = client.get(f"/subjects/{subject}/versions/1").json()
                assert (stored["id"], json.loads(stored["schema"])["name"]) == (schema_id, name)


def test_a_rule_accepts_what_was_registered_through_another_node(nodes: list[Server]) -> None:
    command = CommandLine(nodes[0].kafka)
    assert command("topic", "create", "orders", "--partitions", "6", "--schema", "value=orders-value").code == 0
    producer = Producer({"bootstrap.servers": nodes[0].kafka})
    outcomes: list[object] = []
    with httpx.Client(timeout=60) as client:
        for number in range(6):
            node = nodes[number % 3]
            level = client.put(f"http://{node.http}/registry/config/orders-value", json={"compatibility": "NONE"})
            assert level.status_code == 200
            made = client.post(
                f"http://{node.http}/registry/subjects/orders-value/versions", json={"schema": schema(f"V{number}")}
            )
            prefix = b"\0" + made.json()["id"].to_bytes(4, "big")
            for partition in range(6):
                producer.produce(
                    "orders", prefix + b"\2", partition=partition, on_delivery=lambda error, _: outcomes.append(error)
                )
            assert producer.flush(60) == 0
    assert outcomes == [None] * 36


def test_ten_thousand_subjects(nodes: list[Server]) -> None:
    """Times are printed for the reader; a test asserts none."""
    url = f"http://{nodes[0].http}/registry"

    def register(number: int) -> None:
        with httpx.Client(timeout=120) as client:
            for index in range(number, 10_000, 16):
                made = client.post(
                    f"{url}/subjects/s{index}-value/versions", json={"schema": schema(f"R{index % 100}")}
                )
                assert made.status_code == 200, made.text

    began = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(register, range(16)))
    print(f"registering, 16 clients at once: {10_000 / (time.perf_counter() - began):.0f} a second")
    paths = (
        "/subjects",
        "/subjects/s9999-value/versions/latest",
        "/schemas/ids/1",
        "/schemas?latestOnly=true&limit=100",
        "/schemas?latestOnly=true",
    )
    with httpx.Client(timeout=120) as client:
        for path in paths:
            taken = []
            for _ in range(21):
                began = time.perf_counter()
                assert client.get(url + path).status_code == 200
                taken.append((time.perf_counter() - began) * 1000)
            print(f"{path}: {median(taken):.1f} ms (median), {max(taken):.1f} ms (slowest of {len(taken)})")
        assert len(client.get(f"{url}/subjects").json()) == 10_000
