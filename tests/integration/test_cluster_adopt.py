"""A standalone machine becomes the first of a cluster: an interrupted adoption is repeated, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from sqlalchemy import inspect

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.database import open_database
from millstream.broker.cluster.adoption import Adoption
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdStore
from millstream.core.clock import SystemClock
from millstream_testing.command import run_command
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.killed_adopt import STEPS
from millstream_testing.node_group import single_node
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.producer_load import read_numbers, send_numbers
from millstream_testing.server import Server

DEADLINE_S = 60.0
QUICK = {"group-initial-delay-ms": 0}
FREE = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0")


class Crash(BaseException):
    """The process dies here."""


def attempt(data: Path, etcd: str, catalog_url: str, cluster: str, on_step: Callable[[str], None]) -> None:
    async def run() -> None:
        store = EtcdStore(EtcdAddress.parse(etcd), cluster, SystemClock(), request_s_max=DEADLINE_S)
        catalog = Catalog(catalog_url, cluster=cluster)
        try:
            catalog.prepare()
            await Adoption(str(data), cluster, store, catalog, SystemClock(), flush="always", on_step=on_step).run()
        finally:
            catalog.close()
            await store.close()

    asyncio.run(run())


def test_an_adoption_that_dies_at_any_step_can_be_repeated(
    tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer
) -> None:
    catalog, cluster = postgres.new_database(), "adopted"
    server = Server(tmp_path / "data", settings=QUICK).start()
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic("t", 3)])["t"].result(DEADLINE_S)
    send_numbers(server.kafka, "t", range(60), wait_s=DEADLINE_S)
    assert read_numbers(server.kafka, "t", "g", 60, wait_s=DEADLINE_S) == list(range(60))
    send_numbers(server.kafka, "t", range(60, 90), wait_s=DEADLINE_S)
    assert server.stop() == 0

    stores = ["--etcd", etcd.url, "--catalog", catalog, "--cluster", cluster]
    refused = run_command(["serve", "--data", str(server.data), *FREE, *stores])
    assert (refused.code, "cluster adopt" in refused.err) == (5, True), refused.err

    for number, last in enumerate(STEPS):

        def die(step: str, last: str = last) -> None:
            if step == last:
                raise Crash

        with pytest.raises(Crash):
            attempt(server.data, etcd.url, catalog, cluster, die)
        if number == 0:
            alone = run_command(["serve", "--data", str(server.data), *FREE])
            assert (alone.code, "being adopted" in alone.err) == (5, True), alone.err
    # The last step is repeated, too: its end may not have been seen.
    for _ in range(2):
        attempt(server.data, etcd.url, catalog, cluster, lambda _step: None)

    server.settings |= {"etcd": etcd.url, "catalog": catalog, "cluster": cluster}
    server.start()
    assert read_numbers(server.kafka, "t", "g", 30, wait_s=DEADLINE_S) == list(range(60, 90))
    send_numbers(server.kafka, "t", range(90, 120), wait_s=DEADLINE_S)
    assert read_numbers(server.kafka, "t", "other", 120, wait_s=DEADLINE_S) == list(range(120))
    assert server.stop() == 0


@pytest.mark.trial
def test_an_adoption_can_be_undone(tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer) -> None:
    server = Server(tmp_path / "data").start()
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    admin.create_topics([NewTopic("t", 3)])["t"].result(DEADLINE_S)
    send_numbers(server.kafka, "t", range(10), wait_s=DEADLINE_S)
    assert server.stop() == 0
    command = ["cluster", "adopt", "--data", str(server.data), "--etcd", etcd.url, "--cluster", "undone"]
    command += ["--catalog", postgres.new_database()]
    assert "Would move 1 topic" in run_command([*command, "--dry-run"]).out
    adopted = run_command(command)
    assert (adopted.code, "--undo" in adopted.out) == (0, True), adopted.err
    assert run_command(["serve", "--data", str(server.data), *FREE]).code == 5
    undone = run_command([*command, "--undo", "--json"])
    assert (undone.code, undone.document) == (0, {"undone": True})
    server.start()
    assert read_numbers(server.kafka, "t", "g", 10, wait_s=DEADLINE_S) == list(range(10))
    assert server.stop() == 0
    again = run_command(command)
    assert (again.code, "Moved 2 topics" in again.out) == (0, True), again.err


def test_a_folder_that_is_no_standalone_machine_is_refused(
    tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer
) -> None:
    (tmp_path / "empty").mkdir()
    stores = ["--etcd", etcd.url, "--catalog", postgres.new_database(), "--cluster", "refused"]
    empty = run_command(["cluster", "adopt", "--data", str(tmp_path / "empty"), *stores])
    assert (empty.code != 0, "catalog.sqlite" in empty.err) == (True, True)
    assert run_command(["cluster", "adopt", "--data", str(tmp_path / "none"), *stores]).code == 3


async def test_a_dry_run_creates_nothing(tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("t")
    catalog = postgres.new_database()
    stores = ["--etcd", etcd.url, "--catalog", catalog, "--cluster", "rehearsed"]
    rehearsed = run_command(["cluster", "adopt", "--data", str(tmp_path), *stores, "--dry-run"])
    assert (rehearsed.code, "Would move" in rehearsed.out) == (0, True), rehearsed.err
    engine = open_database(catalog)
    try:
        assert inspect(engine).get_table_names() == []
    finally:
        engine.dispose()
