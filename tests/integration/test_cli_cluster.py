"""`millstream cluster` end to end: everything starts, is listed, and stops, however the command ends."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream.cli import certs, cluster_up
from millstream.cli.cluster_up import LocalCluster, Plan
from millstream.cli.local_process import LocalServerFailed
from millstream_testing.command import CommandLine
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.waiting import wait_until

READY_S_MAX = 240
STOP_S_MAX = 60


class ClusterUp:
    """A `cluster up` in the background of a test."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.log = data.with_name("up.log")
        command = [sys.executable, "-m", "millstream.cli.main", "cluster", "up", "--json", "--data", str(data)]
        ports = ["--kafka-port-base=0", "--http-port-base=0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *ports, *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=data.parent,
            )
        self.ready: dict[str, Any] = {}
        self.everything: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        self.ready = json.loads(self._first_line())
        self.everything = psutil.Process(self.process.pid).children(recursive=True)
        self.command = CommandLine(",".join(node["kafka"] for node in self.ready["nodes"]))

    def _first_line(self) -> bytes:
        output = self.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            assert selector.select(READY_S_MAX), self.log.read_text()
        line = output.readline()
        assert line, self.log.read_text()
        return line

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.command("cluster", "status", "--json").document
        return shown

    def wait_until(self, holds: Callable[[], object]) -> None:
        wait_until(holds)

    def all_gone(self) -> bool:
        return not psutil.wait_procs(self.everything, timeout=STOP_S_MAX)[1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S_MAX)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., ClusterUp]]:
    started: list[ClusterUp] = []

    def start(*flags: str) -> ClusterUp:
        started.append(ClusterUp(tmp_path / "cluster", *flags))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for cluster in started:
        cluster.stop()


def test_a_locked_cluster_does_not_print_the_password_of_its_catalog(tmp_path: Path) -> None:
    plan = Plan(
        nodes=1, data=tmp_path, name="locked", catalog="postgresql://me:secret@127.0.0.1:1/postgres", locked=True
    )
    assert LocalCluster(plan).described()["catalog"] == "postgresql://me:***@127.0.0.1:1/postgres"


def test_a_locked_cluster_has_only_its_administrator_as_user(
    up: Callable[..., ClusterUp],
    postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The settings of another node in the working directory; its nodes would not start with them.
    (tmp_path / "millstream.toml").write_text('super-users = "eve"\nlisteners = "open"\n')
    cluster = up("--nodes", "2", "--cluster", "locks-itself", "--catalog", postgres.new_database(), "--locked")
    assert cluster.command("topic", "create", "orders").code == 4
    monkeypatch.setenv("MILLSTREAM_PROFILES", cluster.ready["profiles"])
    monkeypatch.setenv("MILLSTREAM_PROFILE", "admin")
    assert cluster.command("topic", "create", "orders", "--replication", "2").code == 0
    cluster.wait_until(lambda: not cluster.status()["under_replicated"])
    # Also without the flag, once it was locked.
    data = Path(cluster.ready["profiles"]).parent
    assert LocalCluster(Plan(nodes=2, data=data, name="locks-itself")).is_locked
    # etcd accepts only its own certificate, not one of a client of the nodes.
    certs.client("alice", data / "certs", as_json=True)
    ca = str(data / "etcd-certs/ca.pem")
    own = {"certificate": str(data / "etcd-certs/node.pem"), "key": str(data / "etcd-certs/node.key")}
    alice = {"certificate": str(data / "certs/alice.pem"), "key": str(data / "certs/alice.key")}
    cluster.wait_until(lambda: len(cluster_up.sessions(cluster.ready["etcd"], "locks-itself", ca=ca, **own)) == 2)
    for files in ({"ca": ca}, {"ca": ca, **alice}):
        assert cluster_up.sessions(cluster.ready["etcd"], "locks-itself", **files) == {}
    assert cluster_up.sessions(cluster.ready["etcd"].replace("https:", "http:"), "locks-itself") == {}


def test_a_cluster_starts_survives_a_node_and_stops_cleanly(up: Callable[..., ClusterUp]) -> None:
    cluster = up("--nodes", "3", "--set", "lease-ms=2000")
    assert [node["id"] for node in cluster.ready["nodes"]] == [1, 2, 3]
    assert cluster.ready["etcd"].startswith("http://127.0.0.1:")
    assert (cluster_up.etcd_warning(cluster_up.find_etcd()) or "") in cluster.log.read_text()
    assert cluster.ready["catalog"].startswith("postgresql://")
    assert cluster.command("topic", "create", "orders", "--partitions", "6").code == 0
    cluster.wait_until(lambda: not cluster.status()["under_replicated"])
    shown = cluster.status()
    assert [node["state"] for node in shown["nodes"]] == ["ready"] * 3
    assert shown["controller"] in (1, 2, 3)
    assert shown["without_leader"] == []
    # All nodes land in the same tables.
    folder = cluster.log.with_name("cluster")
    settings = [tomllib.loads((folder / f"node-{node}.toml").read_text()) for node in (1, 2, 3)]
    assert {setting["pipelines-lake"] for setting in settings} == {f"{folder}/lake"}
    assert {setting["pipelines-folder"] for setting in settings} == {f"{folder}/pipelines"}
    # Three nodes on one machine are one rack, and still spread replicas and leaders.
    assert sum(node["replicas"] for node in shown["nodes"]) >= 18
    assert all(node["leads"] for node in shown["nodes"])

    os.kill(cluster.ready["nodes"][2]["pid"], signal.SIGKILL)
    cluster.wait_until(lambda: len(cluster.status()["under_replicated"]) == shown["partitions"])
    after = cluster.status()
    assert after["without_leader"] == []
    assert [node["state"] for node in after["nodes"]] == ["ready", "ready", "away"]
    assert "node 3 exited with code -9" in cluster.log.read_text()
    degraded = cluster.command("cluster", "status")
    assert (degraded.code, "away" in degraded.out) == (1, True)
    assert "no response from 1 node" in degraded.err

    serve = cluster.ready["nodes"][2]["serve"]
    assert f"restart it with: {serve}" in cluster.log.read_text()
    with by_hand(serve, cluster.log.with_name("by-hand.log")) as node:
        cluster.wait_until(lambda: not cluster.status()["under_replicated"])
        assert [node["state"] for node in cluster.status()["nodes"]] == ["ready"] * 3
        assert cluster.command("cluster", "status").code == 0
        assert cluster.stop() == 0
        assert cluster.all_gone()
        reported = cluster.log.read_text()
        assert f"node 3 at {cluster.ready['nodes'][2]['kafka']} was started manually and is still running" in reported
        assert "node 1 at" not in reported
        assert "stopped with exit code" not in reported
        node.terminate()
        assert node.wait(STOP_S_MAX) == 0


@contextmanager
def by_hand(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(shlex.split(command), stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.trial
def test_a_cluster_survives_the_loss_of_all_nodes_until_they_are_restarted_by_hand(
    up: Callable[..., ClusterUp],
) -> None:
    cluster = up("--nodes", "1", "--set", "lease-ms=1000")
    assert cluster.command("topic", "create", "orders").code == 0
    os.kill(cluster.ready["nodes"][0]["pid"], signal.SIGKILL)
    cluster.wait_until(lambda: "keep running until Ctrl-C" in cluster.log.read_text())
    with by_hand(cluster.ready["nodes"][0]["serve"], cluster.log.with_name("by-hand.log")) as node:
        cluster.wait_until(lambda: "orders" in cluster.command("topic", "list").out)
        node.terminate()
        assert node.wait(STOP_S_MAX) == 0
    assert cluster.stop() == 0
    assert "was started manually" not in cluster.log.read_text()


def test_without_an_etcd_to_start_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(given: str = "") -> Path:
        raise LocalServerFailed("no etcd is on the PATH")

    monkeypatch.setattr(cluster_up, "find_etcd", missing)
    data = tmp_path / "cluster"
    with pytest.raises(LocalServerFailed), cluster_up.LocalCluster(cluster_up.Plan(nodes=1, data=data, name="c")):
        pass
    assert not data.exists()


def test_declarations_survive_and_no_process_outlives_the_command(up: Callable[..., ClusterUp]) -> None:
    cluster = up("--nodes", "1")
    assert cluster.command("topic", "create", "orders").code == 0
    cluster.process.kill()
    assert cluster.all_gone()
    again = up("--nodes", "1")
    document = again.command("topic", "list", "--json").document
    assert [topic["topic"] for topic in document["topics"]] == ["orders"]
    assert again.stop() == 0
    assert again.all_gone()
