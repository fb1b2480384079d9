"""`millstream cluster` as people use it: everything starts, is told of, and ends, however the command ends."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream.testing.command import CommandLine

READY_S_MAX = 90
STOP_S_MAX = 60


class Up:
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
        self.ready: dict[str, Any] = json.loads(self._first_line())
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
        deadline = time.monotonic() + READY_S_MAX
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def all_gone(self) -> bool:
        return not psutil.wait_procs(self.everything, timeout=STOP_S_MAX)[1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S_MAX)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*flags: str) -> Up:
        started.append(Up(tmp_path / "cluster", *flags))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_cluster_starts_survives_a_node_and_stops_in_order(up: Callable[..., Up]) -> None:
    cluster = up("--nodes", "3", "--set", "lease-ms=2000")
    assert [node["id"] for node in cluster.ready["nodes"]] == [1, 2, 3]
    assert cluster.ready["etcd"].startswith("http://127.0.0.1:")
    assert cluster.ready["catalog"].startswith("postgresql://")
    assert cluster.command("topic", "create", "orders", "--partitions", "6").code == 0
    cluster.wait_until(lambda: not cluster.status()["under_replicated"])
    shown = cluster.status()
    assert [node["state"] for node in shown["nodes"]] == ["ready"] * 3
    assert shown["controller"] in (1, 2, 3)
    assert shown["without_leader"] == []
    # Three nodes on one machine are one rack, and still share replicas and leaders out.
    assert sum(node["replicas"] for node in shown["nodes"]) >= 18
    assert all(node["leads"] for node in shown["nodes"])

    os.kill(cluster.ready["nodes"][2]["pid"], signal.SIGKILL)
    cluster.wait_until(lambda: len(cluster.status()["under_replicated"]) == shown["partitions"])
    after = cluster.status()
    assert after["without_leader"] == []
    assert [node["state"] for node in after["nodes"]] == ["ready", "ready", "away"]
    assert "node 3 has ended with exit code -9" in cluster.log.read_text()
    assert "away" in cluster.command("cluster", "status").out

    assert cluster.stop() == 0
    assert cluster.all_gone()
    assert "stopped with exit code" not in cluster.log.read_text()


def test_what_was_declared_is_there_again_and_nothing_outlives_the_command(up: Callable[..., Up]) -> None:
    cluster = up("--nodes", "1")
    assert cluster.command("topic", "create", "orders").code == 0
    cluster.process.kill()
    assert cluster.all_gone()
    again = up("--nodes", "1")
    listed = again.command("topic", "list", "--json").document
    assert [topic["topic"] for topic in listed["topics"]] == ["orders"]
    assert again.stop() == 0
    assert again.all_gone()
