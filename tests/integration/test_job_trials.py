"""Jobs that real nodes run on a real Spark: a node that dies during a run, and the permissions of owners."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from millstream.client.admin.pipelines import PipelineClient
from millstream.client.admin.security import add_acls, put_user
from millstream.core.errors import NotAuthorized
from millstream.core.pipeline import PipelineKind
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.command import CommandLine
from millstream_testing.committed_messages import committed_messages
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.security import declare_security, owner_rules
from millstream_testing.server import Server, ServerGroup
from millstream_testing.waiting import until_result, wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]

WAIT_S = 60.0
MINUTE_MS = 60_000
PASSWORD = "a-long-password"
COPY = """
import time

def run(spark, millstream):
    new = millstream.new_messages("{topic}")
    millstream.write(new.select("key", "value"), "{topic}-{name}")
    time.sleep({pause_s})
"""


class Jobs:
    """A cluster whose jobs copy a topic."""

    def __init__(self, brokers: str, topic: str) -> None:
        self.brokers = brokers
        self.topic = topic
        self.published = 0

    def run(self, *arguments: str) -> Any:
        done = CommandLine(self.brokers)(*arguments)
        assert done.code == 0, done.err
        return done

    def publish(self, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.brokers, "enable.idempotence": True})
        for number in range(self.published, self.published + count):
            producer.produce(self.topic, str(number))
        assert producer.flush(WAIT_S) == 0
        self.published += count

    def create(self, folder: Path, name: str, pause_s: float, *when: str) -> None:
        file = folder / f"{name}.py"
        file.write_text(COPY.format(topic=self.topic, name=name, pause_s=pause_s), encoding="utf-8")
        self.run("pipeline", "create", "job", f"{self.topic}-{name}", "--file", str(file), *when)

    def runs(self, name: str) -> list[dict[str, Any]]:
        """The runs of a job, the oldest first."""
        job_runs = self.run("pipeline", "runs", f"{self.topic}-{name}", "--json").document["runs"]
        return sorted(job_runs, key=lambda run: run["run"])

    def copied(self, name: str) -> Counter[int]:
        return Counter(map(int, committed_messages(self.brokers, f"{self.topic}-{name}")))

    def has_all(self, name: str) -> bool:
        return len(self.copied(name)) >= self.published


def test_a_node_dies_during_a_run_and_at_a_scheduled_time(
    tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer, topic: str
) -> None:
    settings = {
        "group-initial-delay-ms": 100,
        "lease-ms": 3000,
        "pipelines-lake": tmp_path / "lake",
        "pipelines-folder": tmp_path / "pipelines",
        "pipelines-master": "local[1]",
    }
    with ServerGroup(tmp_path, etcd.url, postgres.new_database(), settings=settings) as cluster:
        jobs = Jobs(cluster.kafka, topic)
        for name in (topic, f"{topic}-slow", f"{topic}-tick"):
            jobs.run("topic", "create", name, "--partitions", "2")
        jobs.publish(500)
        # One that keeps running for a minute after its write, and one that is due every minute.
        jobs.create(tmp_path, "slow", 60, "--every", "1h")
        jobs.create(tmp_path, "tick", 0, "--cron", "* * * * *")
        wait_until(lambda: jobs.has_all("slow"))
        (slow,) = jobs.runs("slow")
        assert slow["state"] == "running"
        owner, attempts = slow["node"], slow["attempt"]
        others = [number for number in cluster.nodes if number != owner]
        # The takeover takes longer than the rest of the minute.
        tick_ms = (int(time.time() * 1000) // MINUTE_MS + 1) * MINUTE_MS
        time.sleep(max(0.0, tick_ms / 1000 - 2 - time.time()))
        assert jobs.runs("slow")[0]["state"] == "running", "the machine is too slow for this trial"
        cluster[owner].kill()
        jobs.brokers = ",".join(cluster[number].kafka for number in others)
        jobs.publish(500)
        wait_until(
            lambda: any(run["scheduled_ms"] >= tick_ms and run["state"] == "succeeded" for run in jobs.runs("tick"))
        )
        wait_until(lambda: jobs.has_all("tick"))
        wait_until(lambda: jobs.runs("slow")[0]["state"] != "running")
        slow = jobs.runs("slow")[0]
        assert slow["state"] == "succeeded", slow
        assert slow["attempt"] > attempts
        assert slow["node"] in others
        assert jobs.copied("slow") == Counter(range(500)), "a later attempt wrote what an earlier one had committed"
        jobs.run("pipeline", "stop", f"{topic}-tick")
        ticks = [run["scheduled_ms"] for run in jobs.runs("tick")]
        assert len(ticks) == len(set(ticks)), "a time was run twice"
        assert all(time_ms % MINUTE_MS == 0 for time_ms in ticks)
        assert jobs.copied("tick") == Counter(range(1000))


async def test_a_job_has_the_permissions_of_its_owner(tmp_path: Path) -> None:
    declare_security(tmp_path / "data", {"admin": PASSWORD})
    settings = {
        "auth": "required",
        "super-users": "admin",
        "pipelines-master": "local[1]",
        "pipelines-jobs": "on",
        "group-initial-delay-ms": 100,
    }
    with Server(tmp_path / "data", settings=settings) as server:

        def connected(user: str) -> Any:
            return Client.connect(server.kafka, credentials=Credentials(user=user, password=PASSWORD))

        async with connected("admin") as admin:
            for user in ("jo", "mallory"):
                await put_user(admin, user, PASSWORD)
            for topic in ("jo-in", "jo-out", "secret"):
                await admin.metadata([topic], create=True)
                await admin.produce(topic, 0, encode_batch([NewRecord(None, b"1")]))
            await add_acls(admin, owner_rules("jo", "jo-", transactions="job-"))

            async def run_of(name: str) -> dict[str, Any] | None:
                runs = await PipelineClient(admin).runs(name, limit=1)
                return runs[0] if runs and runs[0]["state"] != "running" else None

            async with connected("mallory") as mallory:
                with pytest.raises(NotAuthorized):
                    await PipelineClient(mallory).create("jo-copy", PipelineKind.JOB, {"code": code("jo-in", "jo-out")})
            async with connected("jo") as jo:
                await PipelineClient(jo).create("jo-copy", PipelineKind.JOB, {"code": code("jo-in", "jo-out")})
                done = await until_result(lambda: run_of("jo-copy"))
                assert done["state"] == "succeeded", done
                stolen = {"code": code("secret", "jo-out"), "retries": "0"}
                await PipelineClient(jo).create("jo-steals", PipelineKind.JOB, stolen)
                refused = await until_result(lambda: run_of("jo-steals"))
                assert refused["state"] == "failed", refused
                assert "secret" in refused["error"]
                leaked = {"code": code("jo-in", "secret"), "retries": "0"}
                await PipelineClient(jo).create("jo-leaks", PipelineKind.JOB, leaked)
                refused = await until_result(lambda: run_of("jo-leaks"))
                assert refused["state"] == "failed", refused
            # The same code with the permissions of another owner.
            await PipelineClient(admin).request_run("jo-steals")

            async def second_run() -> dict[str, Any] | None:
                last = await run_of("jo-steals")
                return last if last is not None and last["run"] == 2 else None

            again = await until_result(second_run)
            assert again["state"] == "succeeded", again


def code(source: str, target: str) -> str:
    return COPY.format(topic=source, name="", pause_s=0).replace(f"{source}-", target)
