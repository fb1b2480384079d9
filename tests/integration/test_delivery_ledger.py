"""The ledger end to end: events of a real broker are landed once, every message is accounted for, and faults show."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.pipelines.jobs.ledger.job import LedgerJob

WAIT_S = 60.0


@pytest.fixture(scope="module")
def millstream_command(server: Server) -> CommandLine:
    return CommandLine(server.kafka)


@pytest.fixture
def job(spark: SparkSession, server: Server, tmp_path: Path) -> Iterator[LedgerJob]:
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.ledger.job import LedgerJob

    lake = str(tmp_path / "lake")
    pipeline = Pipeline(pipeline_id=uuid4(), name=f"ledger-{uuid4().hex[:8]}", kind=PipelineKind.LEDGER)
    context = JobContext(spark=spark, brokers=server.kafka, lake=lake, folder=str(tmp_path), lake_is_shared=False)
    made = LedgerJob(pipeline, context)
    yield made
    made.close()


@pytest.fixture
def local_job(server: Server, tmp_path: Path) -> LedgerJob:
    return job_without_spark(server, tmp_path)


def job_without_spark(server: Server, tmp_path: Path) -> LedgerJob:
    """The job as used by `millstream audit` for a small ledger: without Spark."""
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.ledger.audit import LocalTasks
    from millstream.pipelines.jobs.ledger.job import LedgerJob

    pipeline = Pipeline(pipeline_id=uuid4(), name=f"ledger-{uuid4().hex[:8]}", kind=PipelineKind.LEDGER)
    without_spark: Any = None
    lake = str(tmp_path / "lake")
    context = JobContext(spark=without_spark, brokers=server.kafka, lake=lake, folder=str(tmp_path))
    return LedgerJob(pipeline, context, LocalTasks())


async def _deliver(server: Server, topic: str, name: str) -> None:
    """Publish ten messages: five are accepted at once, one at its second attempt, one is rejected, three wait."""
    async with millstream.connect(server.kafka) as client:
        for number in range(10):
            await client.publish(topic, {"number": number}, key="one")
        attempts: dict[int, int] = {}
        done = asyncio.Event()

        async def handle(message: millstream.Message) -> None:
            attempts[message.offset] = attempts.get(message.offset, 0) + 1
            if message.offset == 5 and attempts[5] == 1:
                raise millstream.RetryLater(0)
            if message.offset == 6:
                raise millstream.Reject("not an order")
            if message.offset >= 7:
                done.set()
                await asyncio.sleep(WAIT_S)

        settings: Any = {"start": "earliest", "delivery": "exactly-once", "ledger": True, "ordered": False}
        subscriber = await client.subscribe(topic, handle, name=name, concurrency=10, **settings)
        await asyncio.wait_for(done.wait(), WAIT_S)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while attempts.get(5) != 2:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        await subscriber.drain(timeout=0.1)


def _state(command: CommandLine, position: str, name: str) -> str:
    (subscription,) = [
        subscription
        for subscription in command("message", "trace", position, "--json").document["subscriptions"]
        if subscription["subscription"] == name
    ]
    return str(subscription["state"])


def _row(report: Any, name: str) -> dict[str, Any]:
    (row,) = [row for row in report.rows if row["subscription"] == name]
    return dict(row)


def test_a_ledger_is_landed_once_and_tampering_is_detected_in_spark(
    server: Server, millstream_command: CommandLine, topic: str, job: LedgerJob
) -> None:
    name = f"{topic}-ledger"
    assert millstream_command("topic", "create", topic).code == 0
    asyncio.run(_deliver(server, topic, name))
    wait_until(lambda: _state(millstream_command, f"{topic}/0/6", name) == "dead-lettered")
    report = job.audit([name])
    row = _row(report, name)
    assert report.adds_up, (report.findings, report.damage)
    assert (row["published"], row["accepted"], row["dead_lettered"], row["waiting"]) == (10, 6, 1, 3)
    assert (row["lost"], row["duplicated"], row["delivery"]) == (0, 0, "exactly-once")
    # After another run, only new events are landed.
    table = job._table
    events = sum(batch.num_rows for batch in table.events())
    again = job.audit([name])
    assert again.adds_up
    assert _row(again, name) == row
    windows = sum(batch.num_rows for batch in table.events()) - events
    assert 0 < windows < 10
    rows = [row for batch in table.events() for row in batch.to_pylist() if row["subscription"] == name]
    keys = [(row["sequence"], row["row"]) for row in rows]
    assert len(keys) == len(set(keys))
    (retried,) = [row for row in rows if row["kind"] == "acquired" and row["attempt"] == 2]
    assert (retried["offset"], retried["end_offset"]) == (5, 6)
    assert retried["endpoint"] == retried["worker"].partition("/")[0] != ""
    (rejected,) = [row for row in rows if row["kind"] == "rejecting"]
    assert rejected["reason"] == "not an order"
    (letter,) = [row for row in rows if row["kind"] == "dead_lettered"]
    assert (letter["offset"], letter["letter_topic"]) == (6, f"{name}-dlq")
    assert all(row["published"] is not None for row in rows if row["kind"] == "scanned")

    # The outcome of a message is tampered with.
    (changed,) = {file for file in _files(table) if any(kind == "dead_lettered" for kind in _kinds(file))}
    content = pq.read_table(changed).to_pylist()
    for content_row in content:
        content_row["kind"] = "accepted" if content_row["kind"] == "dead_lettered" else content_row["kind"]
    pq.write_table(pa.Table.from_pylist(content, schema=pq.read_schema(changed)), changed)
    tampered = job.audit([name])
    assert not tampered.adds_up
    assert [(damage.kind, os.path.basename(damage.path)) for damage in tampered.damage] == [("changed", changed.name)]


def _files(table: Any) -> list[Path]:
    return sorted(Path(str(table.storage.folder)).rglob("*.parquet"))


def _kinds(path: Path) -> list[str]:
    kinds: list[str] = pq.read_table(path, columns=["kind"]).column(0).to_pylist()
    return kinds


def test_the_views_agree_in_duckdb_and_in_spark(
    server: Server, millstream_command: CommandLine, topic: str, job: LedgerJob, spark: SparkSession
) -> None:
    import duckdb

    from millstream.spark.ledger import duckdb_views, spark_views

    name = f"{topic}-ledger"
    assert millstream_command("topic", "create", topic).code == 0
    assert millstream_command("subscription", "create", name, "--topic", topic, "--ledger").code == 0
    for number in range(3):
        assert millstream_command("publish", topic, f"{number}").code == 0
    assert millstream_command("subscription", "pull", name, "-n", 1, "--accept").code == 0
    assert millstream_command("subscription", "pull", name, "-n", 1, "--release").code == 0
    job.catch_up()
    lake = job._lake
    connection = duckdb.connect()
    duckdb_views(connection, lake)
    spark_views(spark, lake)
    selected = "outcome, attempts, published IS NOT NULL AS dated, first_delivery IS NOT NULL AS delivered"
    query = f'SELECT "offset", {selected} FROM ledger_messages WHERE subscription = \'{name}\' ORDER BY "offset"'
    rows = [tuple(row) for row in connection.sql(query).fetchall()]
    assert rows == [
        (0, "accepted", 1, True, True),
        (1, "unfinished", 1, True, True),
        (2, "unfinished", 0, True, False),
    ]
    assert [tuple(row) for row in spark.sql(query.replace('"', "`")).collect()] == rows
    tried = f"SELECT deliveries FROM ledger_messages WHERE subscription = '{name}' AND \"offset\" = 1"
    ((attempts,),) = connection.sql(tried).fetchall()
    assert [attempt["kind"] for attempt in attempts] == ["acquired", "released"]
    counts = "sum(arrived), sum(delivered), sum(accepted), count(latency_ms_p99) > 0"
    minutes = f"SELECT {counts} FROM ledger_minutes WHERE subscription = '{name}'"
    (minute,) = connection.sql(minutes).fetchall()
    assert tuple(minute) == (3, 2, 1, True)
    (same,) = spark.sql(minutes).collect()
    assert tuple(same) == (3, 2, 1, True)
    last = f"SELECT lag FROM ledger_minutes WHERE subscription = '{name}' ORDER BY minute DESC LIMIT 1"
    for row in (*connection.sql(last).fetchall(), *spark.sql(last).collect()):
        assert int(row[0]) == 2


def test_a_trace_continues_in_the_table_and_finds_ids(
    server: Server,
    millstream_command: CommandLine,
    topic: str,
    local_job: LedgerJob,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, declared = f"{topic}-ledger", f"{topic}-deliveries"
    command = millstream_command
    assert command("topic", "create", topic).code == 0
    assert command("subscription", "create", name, "--topic", topic, "--ledger").code == 0
    assert command("publish", topic, "--header", f"message-id={topic}-7", "seven").code == 0
    assert command("subscription", "pull", name, "--accept").code == 0
    land = local_job.catch_up

    def land_slowly() -> None:
        time.sleep(0.5)
        land()

    monkeypatch.setattr(local_job, "catch_up", land_slowly)
    report = local_job.audit([name])
    assert report.adds_up, (report.findings, report.damage)
    assert report.seconds >= 0.5, "landing is part of the audit"
    assert _row(report, name)["accepted"] == 1
    assert local_job.size_bytes() > 0
    lake = local_job._lake
    live = command("message", "trace", f"{topic}/0/0", "--json").document
    # As a restarted node responds: it knows that the message is done, but not how.
    forgotten = {"events": [], "state": "done", "attempts": 0, "ended_ms": 0, "is_complete": False, "unknown": "it"}
    document = {**live, "subscriptions": [{**subscription, **forgotten} for subscription in live["subscriptions"]]}
    history = subprocess.run(
        [sys.executable, "-m", "millstream.pipelines.jobs.ledger.history", lake],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        check=True,
    )
    (traced,) = json.loads(history.stdout)["subscriptions"]
    assert (traced["state"], traced["attempts"], traced["is_complete"], traced["unknown"]) == ("accepted", 1, True, "")
    assert [event["kind"] for event in traced["events"]] == ["acquired", "accepted"]

    create = ("pipeline", "create", "ledger", declared, "--lake", lake, "--stopped")
    assert command(*create).code == 0
    try:
        over_http = httpx.get(f"http://{server.http}/v1/topics/{topic}/partitions/0/messages/0/trace", timeout=WAIT_S)
        assert [subscription["state"] for subscription in over_http.json()["subscriptions"]] == ["accepted"]
        # The subscription is deleted, and the table still has it.
        assert command("subscription", "delete", name, "--force", "--yes").code == 0
        result = command("message", "trace", f"{topic}-7", "--topic", topic, "--since", "1h", "--lake", lake, "--json")
        (gone,) = result.document["subscriptions"]
        assert (gone["subscription"], gone["state"], gone["attempts"]) == (name, "accepted", 1)
    finally:
        assert command("pipeline", "delete", declared, "--yes").code == 0


def _expression(alert: str) -> tuple[str, re.Pattern[str], float]:
    """Return the metric of an alert, its `what` selector, and the value above which it fires."""
    text = (Path(__file__).parents[2] / "deploy" / "prometheus" / "millstream.rules.yml").read_text()
    (expression,) = re.findall(rf"- alert: {alert}\n +expr: (.+)\n", text)
    match = re.fullmatch(r'max by \(pipeline, what\) \((\w+)\{what=~"([^"]+)"\}\) > (\d+)', expression)
    assert match is not None, expression
    return match[1], re.compile(match[2]), float(match[3])


def _firing(exposed: str) -> set[tuple[str, str]]:
    """Evaluate the alert on the metrics of a node; return the pipelines and what fires."""
    metric, what, above = _expression("MillstreamAuditFindsFaults")
    lines = re.findall(rf'^{metric}\{{pipeline="([^"]+)",what="([^"]+)"\}} (\S+)$', exposed, re.MULTILINE)
    assert lines, f"{metric} is not exposed"
    return {(pipeline, name) for pipeline, name, value in lines if what.fullmatch(name) and float(value) > above}


def _tamper(lake: Path) -> None:
    """Change a time in the first landed file."""
    changed = min((lake / "__ledger").rglob("*.parquet"))
    content = pq.read_table(changed)
    at = content.schema.get_field_index("timestamp")
    earlier = pa.array([0] * len(content), pa.int64()).cast(content.schema.field(at).type)
    pq.write_table(content.set_column(at, content.schema.field(at), earlier), changed)


def test_a_finding_of_the_daily_audit_stays_a_metric_until_it_is_resolved(
    server: Server, millstream_command: CommandLine, topic: str, local_job: LedgerJob
) -> None:
    from millstream.broker.pipelines.report_board import PipelineBoard
    from millstream.gateway.metrics import render_metrics
    from millstream.pipelines.jobs.ledger.audit import LocalTasks
    from millstream.pipelines.jobs.ledger.job import LedgerJob
    from millstream.pipelines.runtime.runner import Tally
    from millstream.protocol.private.pipeline_messages import PipelineReport

    def exposed(job: LedgerJob) -> str:
        tally = Tally()
        tally.add(job.step())
        board = PipelineBoard(lambda: [job._pipeline])
        board.take([PipelineReport(name="ledger", state="running", levels=tally.levels)])
        documents = [
            {**asdict(metric), "samples": [(value, dict(labels)) for value, labels in metric.samples]}
            for metric in board.metrics()
        ]
        return render_metrics(documents, "")[0].decode()

    name = f"{topic}-ledger"
    assert millstream_command("topic", "create", topic).code == 0
    assert millstream_command("subscription", "create", name, "--topic", topic, "--ledger").code == 0
    assert millstream_command("publish", topic, "seven").code == 0
    assert millstream_command("subscription", "pull", name, "--accept").code == 0
    assert _firing(exposed(local_job)) == set()
    _tamper(Path(local_job._lake))
    # Not due again before tomorrow; a driver that starts later reports the known result.
    assert _firing(exposed(local_job)) == set()
    overrides = {**local_job._pipeline.overrides, "audit.every.ms": "1000"}
    often = LedgerJob(replace(local_job._pipeline, overrides=overrides), local_job._context, LocalTasks())
    time.sleep(1.1)
    assert ("ledger", "audit_faults") in _firing(exposed(often))
    assert ("ledger", "audit_faults") in _firing(exposed(local_job))


def test_offsets_that_the_disk_lost_are_findings(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    command = CommandLine(server.kafka)
    topic_id = command("topic", "create", "orders", "--json").document["id"]
    assert command("subscription", "create", "billing", "--topic", "orders", "--ledger").code == 0
    book = tmp_path / "receipts.jsonl"
    with millstream.connect_sync(server.kafka, receipts=book) as client:
        client.publish_many("orders", [{"number": number, "text": "." * 200} for number in range(10)])
    assert command("subscription", "pull", "billing", "--accept", "-n", "4").code == 0
    server.stop()
    (segment,) = (server.data / "partitions" / topic_id / "0").glob("*.log")
    with segment.open("r+b") as file:
        file.seek(400)
        file.write(b"\xff\xff\xff")
    server.start()
    assert command("publish", "orders", "after").code == 0
    from millstream.pipelines.jobs.ledger.audit import CLASSES

    report = job_without_spark(server, tmp_path).audit(["billing"])
    (unreadable,) = [finding for finding in report.findings if finding["kind"] == "unreadable"]
    assert (unreadable["topic"], unreadable["start"], unreadable["end"]) == ("orders", 0, 10)
    assert "disk" in unreadable["detail"]
    row = _row(report, "billing")
    assert (report.adds_up, row["published"], row["accepted"]) == (False, 11, 4), report.findings
    assert row["published"] == sum(row[name] for name in CLASSES)


def test_lost_events_are_findings_and_do_not_stop_the_ledger(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """The disk lost events of `__subscriptions` before they had landed."""
    server = start_server()
    command = CommandLine(server.kafka)
    command("topic", "create", "orders")
    command("subscription", "create", "billing", "--topic", "orders", "--ledger")
    for number in range(3):
        command("publish", "orders", str(number))
        command("subscription", "pull", "billing", "--accept")
    states = command("topic", "describe", "__subscriptions", "--json").document["id"]
    server.stop()
    segments = (server.data / "partitions" / states).glob("*/*.log")
    largest = max(segments, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff\xff")
    server.start()
    report = job_without_spark(server, tmp_path).audit(None)
    lost = [finding for finding in report.findings if finding["kind"] == "unreadable" and "subscription" not in finding]
    assert [(finding["start"], "disk" in finding["detail"]) for finding in lost] == [(0, True)], report.findings
    assert not report.adds_up


def test_a_damaged_table_is_reported_and_landing_continues(
    millstream_command: CommandLine, topic: str, local_job: LedgerJob
) -> None:
    from millstream.pipelines.jobs.ledger.audit import LocalTasks
    from millstream.pipelines.jobs.ledger.job import LedgerJob

    def often() -> LedgerJob:
        """A driver that starts now and audits at every step."""
        pipeline = replace(local_job._pipeline, overrides={**local_job._pipeline.overrides, "audit.every.ms": "1000"})
        time.sleep(1.1)
        return LedgerJob(pipeline, local_job._context, LocalTasks())

    command, name = millstream_command, f"{topic}-ledger"
    assert command("topic", "create", topic).code == 0
    assert command("subscription", "create", name, "--topic", topic, "--ledger").code == 0
    for _ in range(3):
        assert command("publish", topic, "seven").code == 0
        assert command("subscription", "pull", name, "--accept").code == 0
        local_job.catch_up()
    table = local_job._table
    *_, gone, cut = sorted(_files(table), key=lambda path: path.stat().st_mtime)
    contents = {path: path.read_bytes() for path in (gone, cut)}
    gone.unlink()
    cut.write_bytes(contents[cut][:100])
    report = local_job.audit([name])
    assert {(damage.kind, os.path.basename(damage.path)) for damage in report.damage} == {
        ("missing", gone.name),
        ("changed", cut.name),
    }
    assert report.is_counted
    assert _row(report, name)["accepted"] == 1
    step = often().step()
    assert (step.counts["audits"], step.lag) == (1, 0)
    assert step.levels["audit_faults"] >= 2
    audited = command.process("audit", "--lake", local_job._lake, "--subscription", name, "--json")
    assert audited.code == 1
    assert len(audited.document["damage"]) == 2
    traced = command("message", "trace", f"{topic}/0/0", "--lake", local_job._lake)
    assert (traced.code, "Traceback" in traced.err) == (1, False)

    # With a commit missing, nothing can be read or landed; that is reported, and the driver does not keep failing.
    for path, content in contents.items():
        path.write_bytes(content)
    commit = Path(str(table.storage.folder)) / "_delta_log" / f"{2:020}.json"
    commit.unlink()
    unread = local_job.audit([name])
    (damage,) = unread.damage
    assert not unread.is_counted
    assert (damage.kind, damage.path, damage.problem) == ("missing", f"_delta_log/{2:020}.json", "the commit is gone")
    for ledger_job in (local_job, often()):
        stuck = ledger_job.step()
        assert stuck.lag > 0
        assert stuck.levels == {"audit_faults": 1}
    refused = command.process("audit", "--lake", local_job._lake)
    assert refused.code == 1
    assert [line for line in refused.lines if line.startswith("ledger table, missing: _delta_log/")]
    assert "the counts are unknown" in refused.lines[-1]


@pytest.mark.trial
def test_a_planted_fault_raises_the_alert(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server, lake = start_server(pipelines_enabled="true", pipelines_lake=tmp_path / "lake"), tmp_path / "lake"
    command = CommandLine(server.kafka)
    assert command("topic", "create", "orders").code == 0
    assert command("subscription", "create", "billing", "--topic", "orders", "--ledger").code == 0
    assert command("publish", "orders", "seven").code == 0
    assert command("subscription", "pull", "billing", "--accept").code == 0
    assert command("pipeline", "create", "ledger", "deliveries", "--set", "audit.every.ms=2000").code == 0

    deadline = time.monotonic() + 5 * WAIT_S
    while 'what="audited_seconds"' not in server.metrics():
        assert time.monotonic() < deadline
        time.sleep(1)
    assert _firing(server.metrics()) == set()
    _tamper(lake)
    while ("deliveries", "audit_faults") not in _firing(server.metrics()):
        assert time.monotonic() < deadline
        time.sleep(1)
