"""`make bench-replay`: the rate at which `millstream replay` republishes messages from the log and from landed tables.

    python -m benchmarks.replay [--messages N] [--out FILE]

Messages have 100 B and timestamps spread over 30 days. The table is landed by the code of Spark's tasks, in this
process: once partitioned by the hour of landing, and once by the day of the message, whose files have to be merged. The
number of published messages is checked. CPU seconds are those of the replay and of the broker.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
from benchmarks import machine
from benchmarks.processes import cpu_of
from benchmarks.report import Table
from confluent_kafka import Producer
from rich.console import Console

from millstream.core.payload_columns import EventTime
from millstream.pipelines.jobs.land.event_time import EventTimeRule
from millstream.pipelines.jobs.land.task import LandTasks, TopicWork, from_rows
from millstream.pipelines.jobs.replay import Replay, ReplayOrder
from millstream.pipelines.lake.columns import EVENT_COLUMNS, RAW
from millstream.pipelines.lake.table import open_table
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.ranges import Range
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

OUT: Final = Path("build/bench/replay.md")
MESSAGES: Final = 1_000_000
SOURCE: Final = "orders"
DAYS: Final = 30
DAY_MS: Final = 24 * 3600 * 1000
WAIT_S: Final = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine.facts() | {"messages": f"{options.messages:,} of 100 B"}
    table = Table("Replay", ["from", "thousand messages/s", "CPU s per million"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        server = stack.enter_context(Server(folder / "data"))
        fill(server, options.messages)
        # The first one is a warm-up, which compiles kernels.
        replayed(server, "warm", from_table=False, expected=options.messages)
        for name, partition_by in (("the log", None), ("a table", ""), ("a table by event day", "day(timestamp)")):
            if partition_by is not None:
                land(server, folder / f"lake-{partition_by}", options.messages, partition_by)
            rate, cpu = replayed(server, name, from_table=partition_by is not None, expected=options.messages)
            table.rows.append([name, f"{rate / 1000:,.0f}", f"{cpu:.1f}"])
            console.print(" ".join(table.rows[-1]))
    console.print(table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bullets = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    options.out.write_text(f"{bullets}\n\n{table.markdown()}", encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 0


def fill(server: Server, count: int) -> None:
    """Publish messages with timestamps of several days, none older than the retention time."""
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", SOURCE, "--set", "retention.ms=-1").code == 0
    producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 20, "log_level": 0})
    now_ms = int(time.time() * 1000)
    for number in range(count):
        value = b'{"id": %d, "note": "%0*d"}' % (number, 75, number)
        while True:
            try:
                producer.produce(SOURCE, value, b"%d" % number, timestamp=now_ms - number % DAYS * DAY_MS)
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(WAIT_S) == 0


def land(server: Server, lake: Path, count: int, partition_by: str) -> None:
    """Land the topic as one batch, and declare the pipeline that locates the table."""
    millstream = CommandLine(server.kafka)
    millstream("pipeline", "delete", "landed")
    created = millstream("pipeline", "create", "land", "landed", "--topic", SOURCE, "--lake", str(lake), "--stopped")
    assert created.code == 0, created.err
    link = Link(server.kafka, "bench-replay", WAIT_S)
    topic_id = str(link.call(link.client.metadata([SOURCE])).topics[SOURCE].topic_id)
    link.close()
    table = open_table(str(lake / SOURCE), event_time=partition_by)
    event_time = EventTime.parse(partition_by) if partition_by else None
    schema = RAW if event_time is None else pa.schema([*RAW, *EVENT_COLUMNS[event_time.unit]])
    work = TopicWork(
        writer=table.writer(schema, topic_id, landed=datetime.now(UTC)),
        quarantine=table.quarantine_writer(topic_id),
        event_time=None if event_time is None else EventTimeRule(event_time),
    )
    tasks = LandTasks(server.kafka, [[Range(SOURCE, 0, 0, count)]], {SOURCE: work})
    reported = [row for batch in tasks([pa.RecordBatch.from_pydict({"number": [0]})]) for row in batch.to_pylist()]
    files = [file for report in from_rows(tuple(row.values()) for row in reported) for file in report.files]
    assert table.commit(files, {(topic_id, 0): (0, count)}, schema=schema)


def replayed(server: Server, name: str, *, from_table: bool, expected: int) -> tuple[float, float]:
    """Return messages per second, and CPU seconds per million."""
    into = f"into-{name.replace(' ', '-')}"
    assert CommandLine(server.kafka)("topic", "create", into, "--set", "retention.ms=-1").code == 0
    order = ReplayOrder(topic=SOURCE, into=into, from_table=from_table, name=name.replace(" ", "-"))
    began, cpu = time.perf_counter(), cpu_s()
    done = Replay(order, server.kafka).run()
    taken_s = time.perf_counter() - began
    if done.written != expected:
        raise AssertionError(f"{done.written} messages of {expected} were replayed")
    return expected / taken_s, (cpu_s() - cpu) / expected * 1e6


def cpu_s() -> float:
    used = cpu_of(os.getpid())
    return used.user_s + used.system_s


if __name__ == "__main__":
    sys.exit(main())
