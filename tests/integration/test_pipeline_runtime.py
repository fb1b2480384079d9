"""Pipelines that a real server runs on a real Spark: from the declaration to the table, through kills and takeovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from millstream_testing.child_process import child_process, children, is_alive
from millstream_testing.command import CommandLine
from millstream_testing.committed_messages import committed_messages
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup
from millstream_testing.spark_cluster import spark_cluster
from millstream_testing.waiting import wait_until

WAIT_S = 600.0
KEYS = 50
DRIVER = "millstream.pipelines.runtime.driver"
WORKER = "127.0.0.2"
EXECUTOR = "CoarseGrainedExecutorBackend"
# The first steps on Spark take long on a slow machine.
pytestmark = pytest.mark.timeout(1800)


def processes(*parts: str) -> list[int]:
    """The processes whose command lines contain all of these parts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if all(part in line for part in parts):
            found.append(int(folder.name))
    return found


class Land:
    def __init__(self, brokers: str, topic: str, lake: Path) -> None:
        self.brokers = brokers
        self.topic = topic
        self.lake = lake
        self.millstream = CommandLine(brokers)
        self.published = 0

    def publish(self, number: int) -> None:
        producer = Producer({"bootstrap.servers": self.brokers, "enable.idempotence": True})
        for at in range(self.published, self.published + number):
            producer.produce(self.topic, str(at), str(at % KEYS))
        assert producer.flush(WAIT_S) == 0
        self.published += number

    def report(self) -> dict[str, Any]:
        reported = self.millstream("pipeline", "describe", f"land-{self.topic}", "--json").document
        return {**(reported["report"] or {}), "state": reported["state"]}

    def landed(self, lake: Path | None = None) -> list[int]:
        """The payloads in the table."""
        place = str((lake or self.lake) / self.topic)
        if not DeltaTable.is_deltatable(place):
            return []
        values = DeltaTable(place).to_pyarrow_table(columns=["value"])["value"]
        return sorted(map(int, values.to_pylist()))

    def newest(self) -> list[int]:
        """The last payload of each key."""
        return list(range(self.published - KEYS, self.published))

    def is_complete(self) -> bool:
        return len(self.landed()) >= self.published

    def check(self) -> None:
        """Check that everything published is in the table once."""
        assert self.landed() == list(range(self.published))


def committed(brokers: str, topic: str) -> list[int]:
    return sorted(map(int, committed_messages(brokers, topic)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = {"group-initial-delay-ms": 100, "pipelines-master": "local[2]"}
    with Server(tmp_path / "data", settings=settings) as started:
        yield started


@pytest.mark.trial
def test_a_landed_topic_becomes_a_table_soon_and_a_second_run_is_refused(server: Server, topic: str) -> None:
    land = Land(server.kafka, topic, server.data / "lake")
    assert land.millstream("topic", "create", topic, "--land").code == 0
    land.publish(500)
    wait_until(land.is_complete)
    wait_until(lambda: land.report().get("rows") == 500)
    report = land.report()
    assert (report["state"], report["node"], report["restarts"], report["last_error"]) == ("running", 1, 0, "")
    second = land.millstream("pipeline", "run", f"land-{topic}", "--once")
    assert second.code == 5
    assert "it is being run by 'pipelines-node-1' at 127.0.0.1" in second.err
    (driver,) = children(server.pid, DRIVER)
    (java,) = children(driver, "java")
    # Its group is deleted with it, although the driver is still a member.
    assert land.millstream("pipeline", "delete", f"land-{topic}").code == 0
    wait_until(lambda: not is_alive(driver) and not is_alive(java))
    assert land.millstream("group", "describe", f"pipeline-land-{topic}").code == 3
    land.check()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.trial
def test_kills_of_the_driver_and_of_its_java_lose_and_duplicate_nothing(server: Server, topic: str) -> None:
    land = Land(server.kafka, topic, server.data / "lake")
    land.publish(2000)
    create = ("pipeline", "create", "land", f"land-{topic}", "--topic", topic, "--every", "0.1")
    assert land.millstream(*create, "--set", "batch.max.messages=300").code == 0
    wait_until(land.landed)
    (driver,) = children(server.pid, DRIVER)
    (java,) = children(driver, "java")
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: not is_alive(java))
    land.publish(1000)
    wait_until(lambda: land.report().get("state") == "running" and land.report()["restarts"] == 1)
    wait_until(lambda: len(land.landed()) > 2000)
    (driver,) = children(server.pid, DRIVER)
    (java,) = children(driver, "java")
    os.kill(java, signal.SIGKILL)
    wait_until(lambda: not is_alive(driver))
    land.publish(1000)
    wait_until(land.is_complete)
    land.check()
    # The whole server is killed as well, and resumes automatically.
    server.kill()
    server.start()
    land.publish(500)
    wait_until(land.is_complete)
    land.check()
    wait_until(lambda: land.report().get("lag") == 0)
    assert land.report()["state"] == "running"


@pytest.mark.trial
def test_pipelines_of_all_kinds_share_a_driver_and_a_broken_one_is_parked(server: Server, topic: str) -> None:
    land = Land(server.kafka, topic, server.data / "lake")
    land.publish(300)
    millstream = land.millstream
    create = ("pipeline", "create")
    sql = f"SELECT CAST(value AS string) AS value FROM `{topic}` WHERE offset % 3 = 0"
    assert millstream(*create, "land", f"land-{topic}", "--topic", topic, "--every", "0.1").code == 0
    transform = (*create, "transform", "good", "--decode", "none")
    assert millstream(*transform, "--sql", sql, "--into", f"{topic}-third").code == 0
    broken = (*create, "transform", "broken", "--decode", "none", "--into", f"{topic}-broken")
    assert millstream(*broken, "--sql", f"SELECT nothing FROM `{topic}`").code == 0
    assert millstream(*create, "route", "director", "--decode", "none").code == 0
    rule = ("pipeline", "rule", "put", "director", "all", "--topic", topic, "--to", f"{topic}-queue")
    assert millstream(*rule).code == 0

    def report(name: str) -> dict[str, Any]:
        reported = millstream("pipeline", "describe", name, "--json").document
        return {**(reported["report"] or {}), "state": reported["state"], "parked": reported["parked"]}

    parked = wait_until(lambda: report("broken")["parked"])
    assert "nothing" in parked
    land.publish(300)
    wait_until(land.is_complete)
    wait_until(lambda: report("good").get("rows") == 600 and report("director").get("rows") == 600)
    assert (report("good")["state"], report("director")["state"]) == ("running", "running")
    assert committed(server.kafka, f"{topic}-third") == list(range(0, 600, 3))
    assert committed(server.kafka, f"{topic}-queue") == list(range(600))
    land.check()


@pytest.mark.trial
def test_a_manual_run_processes_the_backlog_or_continues_until_interrupted(
    server: Server, topic: str, tmp_path: Path
) -> None:
    land = Land(server.kafka, topic, tmp_path / "lake")
    land.publish(1000)
    command = [sys.executable, "-m", "millstream.cli.main", "pipeline", "run", "land", topic]
    command += ["--brokers", server.kafka, "--lake", str(tmp_path / "lake"), "--set", "batch.max.messages=300"]
    once = subprocess.run([*command, "--once", "--json"], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert once.returncode == 0, once.stderr
    # Without a terminal, each stage is a line, and so is the progress every now and then.
    stages = once.stderr.splitlines()
    assert stages[:2] == [f"land-{topic}: starting Spark …", f"land-{topic}: running"]
    assert all(line.startswith(f"land-{topic}: ") for line in stages)
    reported = json.loads(once.stdout)
    assert (reported["pipeline"], reported["rows"], reported["batches"], reported["lag"]) == (
        f"land-{topic}",
        1000,
        4,
        0,
    )
    land.check()
    land.publish(100)
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_until(land.is_complete)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    assert f"land-{topic}: 100 messages in 1 batch" in out
    assert "Traceback" not in err
    land.check()


@pytest.mark.trial
def test_another_node_takes_over_when_the_owner_dies(
    tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer, topic: str
) -> None:
    lake = tmp_path / "lake"
    settings = {
        "group-initial-delay-ms": 100,
        "lease-ms": 3000,
        "pipelines-lake": lake,
        "pipelines-folder": tmp_path / "pipelines",
        "pipelines-master": "local[1]",
    }
    with ServerGroup(tmp_path, etcd.url, postgres.new_database(), settings=settings) as cluster:
        land = Land(cluster.kafka, topic, lake)
        assert land.millstream("topic", "create", topic, "--partitions", "3").code == 0
        land.publish(1000)
        create = ("pipeline", "create", "land", f"land-{topic}", "--topic", topic, "--every", "0.1")
        assert land.millstream(*create).code == 0
        # The same messages as a table with one row per key.
        keyed = tmp_path / "keyed"
        upsert = ("pipeline", "create", "land", f"upsert-{topic}", "--topic", topic, "--mode", "upsert")
        assert land.millstream(*upsert, "--lake", str(keyed), "--every", "0.1").code == 0
        wait_until(land.is_complete)
        wait_until(lambda: land.landed(keyed) == land.newest())
        owner = wait_until(lambda: land.report().get("node"))
        others = [number for number in cluster.nodes if number != owner]
        assert [children(cluster[number].pid, DRIVER) for number in others] == [[], []]
        (driver,) = children(cluster[owner].pid, DRIVER)
        cluster[owner].kill()
        land.brokers = ",".join(cluster[number].kafka for number in others)
        land.millstream = CommandLine(land.brokers)
        land.publish(1000)
        wait_until(land.is_complete)
        assert wait_until(lambda: land.report().get("node")) in others
        wait_until(lambda: not is_alive(driver))
        land.check()
        wait_until(lambda: land.landed(keyed) == land.newest())
        # A node that stops cleanly hands over too.
        second = land.report()["node"]
        assert cluster[second].stop() == 0
        cluster[owner].start()
        survivor = next(number for number in others if number != second)
        land.brokers = f"{cluster[survivor].kafka},{cluster[owner].kafka}"
        land.millstream = CommandLine(land.brokers)
        land.publish(1000)
        wait_until(land.is_complete)
        land.check()
        wait_until(lambda: land.landed(keyed) == land.newest())


@pytest.mark.trial
def test_pipelines_of_all_kinds_continue_when_a_worker_of_their_cluster_is_killed(tmp_path: Path, topic: str) -> None:
    with spark_cluster(tmp_path) as master:
        settings = {"group-initial-delay-ms": 100, "pipelines-master": master, "pipelines-lake": tmp_path / "lake"}
        with Server(tmp_path / "data", settings=settings) as server:
            land = Land(server.kafka, topic, tmp_path / "lake")
            millstream = land.millstream
            assert millstream("topic", "create", topic, "--partitions", "4").code == 0
            land.publish(2000)
            create = ("pipeline", "create")
            small = ("--set", "batch.max.messages=400")
            land_it = (*create, "land", f"land-{topic}", "--topic", topic, "--every", "0.1")
            assert millstream(*land_it, *small).code == 0
            sql = f"SELECT CAST(value AS string) AS value FROM `{topic}` WHERE int(string(value)) % 3 = 0"
            transform = (*create, "transform", "third", "--decode", "none", "--sql", sql)
            assert millstream(*transform, "--into", f"{topic}-third", *small).code == 0
            assert millstream(*create, "route", "director", "--decode", "none", *small).code == 0
            rule = ("pipeline", "rule", "put", "director", "all", "--topic", topic, "--to", f"{topic}-queue")
            assert millstream(*rule).code == 0

            def report(name: str) -> dict[str, Any]:
                return millstream("pipeline", "describe", name, "--json").document["report"] or {}

            names = (f"land-{topic}", "third", "director")
            wait_until(lambda: all(report(name).get("rows", 0) > 0 for name in names))
            # Midway, one of the two machines is lost with all of its processes.
            (worker,) = processes("deploy.worker.Worker", str(tmp_path), WORKER)
            os.killpg(worker, signal.SIGKILL)
            land.publish(2000)
            wait_until(lambda: not processes(EXECUTOR, str(tmp_path), WORKER))
            wait_until(lambda: all(report(name).get("rows") == 4000 for name in names))
            assert {name: millstream("pipeline", "describe", name, "--json").document["state"] for name in names} == (
                dict.fromkeys(names, "running")
            )
            land.check()
            assert committed(server.kafka, f"{topic}-third") == list(range(0, 4000, 3))
            assert committed(server.kafka, f"{topic}-queue") == list(range(4000))
            assert server.stop() == 0
        wait_until(lambda: not processes(EXECUTOR, str(tmp_path)))
