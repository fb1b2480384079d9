"""Part of `make bench-spark`: transform and route, from topics to topics, exactly once.

    python -m benchmarks.spark_topics [--quick] [--rounds N] [--out FILE]

Rows/s are measured with a backlog that is processed in one batch, including its commit; the first batch is a warm-up.
Latency is that of single messages while the pipeline runs, from sending until a consumer of committed messages has it.
Half of the rules match the value of a field and compare another field; in the lines that say so, rules only compare.

The second table is the latency of one transform with other concurrent pipelines that read the same topic, so that each
of them processes every message: transforms and routes alternately, in their own threads and scheduling pools as in a
driver. `--only beside` measures only this.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from benchmarks import machine
from benchmarks.processes import cpu_of
from benchmarks.report import Table
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.pipelines.jobs.job import JOBS, Job, JobContext
from millstream.spark.session import session
from millstream_testing.server import Server

OUT: Final = Path("build/bench/spark-topics.md")
MESSAGES: Final = 1_000_000
SOURCE: Final = "orders"
PARTITIONS: Final = 2
REGIONS: Final = 1000
QUEUES: Final = 100
SINGLE: Final = 40
SINGLE_WARM: Final = 10
WAIT_S: Final = 120.0
BESIDE: Final = (0, 2, 8)
"""The numbers of other concurrent pipelines."""

Kind = tuple[str, PipelineKind, dict[str, str], tuple[Rule, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_topics", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("beside",), help="measure only a part")
    parser.add_argument("--master", default=f"local[{os.cpu_count()}]")
    parser.add_argument("--out", type=Path, default=OUT)
    options, _ = parser.parse_known_args(arguments)
    messages, rounds = (MESSAGES // 10, 1) if options.quick else (MESSAGES, options.rounds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(
        f"From topics to topics, {messages:,} messages of 100 B",
        ["pipeline", "thousand messages/s", "CPU s per million", "one message: p50 ms", "p90 ms"],
    )
    facts = machine.facts() | {"master": options.master, "rounds": rounds}
    with ExitStack() as stack:
        bench = SparkBench(stack, options.master)
        if options.only is None:
            bench.publish(messages)
            for kind in kinds():
                table.rows.append(measured(bench, kind, rounds, messages))
                console.print(" ".join(table.rows[-1]))
        neighbours = measure_concurrent(bench)
    tables = [table, neighbours] if options.only is None else [neighbours]
    for results_table in tables:
        console.print(results_table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bullets = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    options.out.write_text("\n\n".join([bullets, *(table.markdown() for table in tables)]), encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 0


def measure_concurrent(bench: SparkBench) -> Table:
    """Measure the latency of a transform with other concurrent pipelines."""
    table = Table(
        "One message through a transform, with other pipelines on its topic",
        ["others", "p50 ms", "p90 ms", "to 2 others: p50", "CPU ms per message"],
    )
    transform, *routes = kinds()
    halves: dict[int, float] = {}
    for count in BESIDE:
        with ExitStack() as stack:
            for number in range(count):
                name, of, settings, rules = (transform, routes[0])[number % 2]
                renamed = {**settings, "into": f"beside-{number}"} if of is PipelineKind.TRANSFORM else settings
                job = bench.job((name, of, renamed, rules), "latest", 1_000_000)
                job.step()
                stack.enter_context(running(bench, job))
            cpu = cpu_s()
            times = latencies(bench, transform)
            cpu_ms = (cpu_s() - cpu) / SINGLE * 1000
        half, most = (float(value_ms) for value_ms in np.percentile(times, [50, 90]) * 1000)
        halves[count] = half
        ratio = f"{half / halves[2]:.2f}" if 2 in halves else ""
        table.rows.append([f"{count}", f"{half:,.0f}", f"{most:,.0f}", ratio, f"{cpu_ms:,.0f}"])
    return table


def kinds() -> Iterator[Kind]:
    """Yield the measured pipelines."""
    sql = f"SELECT key, id, total * 1.19 AS gross FROM {SOURCE} WHERE total > 500"
    schemas = f'{{"{SOURCE}": "id long, region string, total double"}}'
    yield "transform", PipelineKind.TRANSFORM, {"sql": sql, "into": "large", "schemas": schemas}, ()
    for count in (1, 100, 1000):
        named = [f"payload.region = 'r{number}' AND payload.total > 10" for number in range(count)]
        yield f"route, {count:,} rule{'s' * (count > 1)}", PipelineKind.ROUTE, {}, _rules(f"q{count}", named)
    compared = [f"payload.total > {990 + number / 1000}" for number in range(1000)]
    yield "route, 1,000 rules that only compare", PipelineKind.ROUTE, {}, _rules("c", compared)


def _rules(prefix: str, conditions: Sequence[str]) -> tuple[Rule, ...]:
    return tuple(
        Rule(name=f"{number}", topic=SOURCE, targets=(f"{prefix}-{number % QUEUES}",), condition=condition)
        for number, condition in enumerate(conditions)
    )


class SparkBench:
    """A broker, a session, and a topic with messages."""

    def __init__(self, stack: ExitStack, master: str) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        self.server = stack.enter_context(Server(self.folder / "data"))
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.local.dir": str(self.folder),
            "spark.scheduler.mode": "FAIR",
        }
        self.spark = session("bench", master=master, settings=settings)
        stack.callback(self.spark.stop)
        self.spark.sparkContext.setLogLevel("OFF")
        admin = AdminClient({"bootstrap.servers": self.server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(SOURCE, PARTITIONS, 1)])[SOURCE].result(WAIT_S)
        self.producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 0})

    def publish(self, count: int) -> None:
        """Fill the topic."""
        for number in range(count):
            while True:
                try:
                    self.producer.produce(SOURCE, value_of(number), key=b"%d" % number, partition=number % PARTITIONS)
                    break
                except BufferError:
                    self.producer.poll(0.05)
        assert self.producer.flush(WAIT_S) == 0

    def job(self, kind: Kind, start: str, messages: int) -> Job:
        """Return a new pipeline."""
        name, of, settings, rules = kind
        overrides = {**settings, "from": start, "batch.max.messages": str(messages)}
        label = "".join(letter if letter.isalnum() else "-" for letter in name)
        pipeline = Pipeline(
            pipeline_id=uuid.uuid4(), name=f"{label}-{uuid.uuid4().hex[:8]}", kind=of, overrides=overrides
        )
        context = JobContext(
            spark=self.spark, brokers=self.server.kafka, lake="", folder=str(self.folder / "state"), rules=rules
        )
        return JOBS[of](pipeline, context)


def value_of(number: int) -> bytes:
    """Return about 100 bytes of JSON."""
    return b'{"id": %d, "region": "r%d", "total": %d, "note": "%040d"}' % (
        number,
        number % REGIONS,
        number % 997,
        number,
    )


def measured(bench: SparkBench, kind: Kind, rounds: int, messages: int) -> list[str]:
    """Measure one line of the table."""
    warm = bench.job(kind, "earliest", 20_000)
    warm.step()
    warm.close()
    rates, cpus = [], []
    for _ in range(rounds):
        job = bench.job(kind, "earliest", messages)
        began, cpu = time.perf_counter(), cpu_s()
        taken = job.step().rows
        rates.append(taken / (time.perf_counter() - began) / 1000)
        cpus.append((cpu_s() - cpu) / taken * 1e6)
        job.close()
    times = latencies(bench, kind)
    half, most = np.percentile(times, [50, 90]) * 1000
    return [kind[0], f"{median(rates):,.0f}", f"{median(cpus):.1f}", f"{half:,.0f}", f"{most:,.0f}"]


def cpu_s() -> float:
    """Return the CPU seconds of this process and its children: Spark, its workers and the broker."""
    used = cpu_of(os.getpid())
    return used.user_s + used.system_s


def latencies(bench: SparkBench, kind: Kind) -> list[float]:
    """Return the seconds from sending a message until it is read from the target, one at a time."""
    target = kind[2].get("into") or kind[3][0].targets[0]
    job = bench.job(kind, "latest", 1_000_000)
    job.step()
    times: list[float] = []
    with running(bench, job), reading(bench, target) as receive:
        for number in range(SINGLE):
            began = time.perf_counter()
            # It matches every condition.
            value = b'{"id": %d, "region": "r0", "total": 996, "note": ""}' % number
            bench.producer.produce(SOURCE, value, key=b"0", partition=0)
            bench.producer.flush(WAIT_S)
            receive()
            times.append(time.perf_counter() - began)
    return times[SINGLE_WARM:]


@contextmanager
def running(bench: SparkBench, job: Job) -> Iterator[None]:
    """Run the steps of a job in a thread, as a driver does."""
    ending = threading.Event()

    def work() -> None:
        # Its own scheduling pool, as in a driver.
        bench.spark.sparkContext.setLocalProperty("spark.scheduler.pool", uuid.uuid4().hex)
        while not ending.is_set():
            job.step()
        job.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@contextmanager
def reading(bench: SparkBench, topic: str) -> Iterator[Callable[[], Any]]:
    """Open a consumer at the end of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": bench.server.kafka,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 1000,
            "log_level": 0,
        }
    )
    metadata = consumer.list_topics(topic, timeout=WAIT_S).topics[topic]
    parts = [TopicPartition(topic, number) for number in metadata.partitions]
    consumer.assign(
        [TopicPartition(topic, part.partition, consumer.get_watermark_offsets(part, WAIT_S)[1]) for part in parts]
    )

    def receive() -> Any:
        message = consumer.poll(WAIT_S)
        if message is None:
            raise TimeoutError("a message did not arrive")
        return message

    try:
        yield receive
    finally:
        consumer.close()


if __name__ == "__main__":
    sys.exit(main())
