"""`make bench-spark`: topics landed as tables, compared with Spark copying the same rows from Parquet to Parquet.

    python -m benchmarks.spark_landing [--quick] [--share OF_THE_ROWS] [--rounds N] [--only PART] [--out FILE]

The copy has the same rows with the same columns, codec, row group size and statistics. Both start with a new folder and
end when their output is committed: a table by its log, the copy as Spark commits a folder. Then the same bytes are
landed from one topic and from a hundred, and a topic with messages of 30 days is landed in one batch into tables
partitioned by the hour of landing, by the day and by the hour of the message, which is the worst case, since every task
has rows of every day. Variants are measured in turn, and the tables show medians of the rounds; the first round is a
warm-up. `--only partitions` measures only the last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import deltalake
from benchmarks import machine
from benchmarks.report import Table
from benchmarks.spark import Numbers, WrongRows, measured, middle, open_session, ratio, shown
from benchmarks.spark_variants import PARTITIONS, Load
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.land.job import LandJob
from millstream.pipelines.lake.task_writer import GROUP_BYTES
from millstream_testing.server import Server

OUT: Final = Path("build/bench/landing.md")
LOADS: Final = (Load(5_000_000, 100), Load(1_000_000, 1024))
SPREAD: Final = Load(1_000_000, 1024)
TOPICS: Final = 100
TIMES_MAX: Final = 1.5
"""The maximum ratio of the time for a hundred topics to that for one with the same bytes."""

LANDED, COPIED = "landed from a topic", "copied from Parquet"
ONE, MANY = "one topic", f"{TOPICS} topics"
DATED: Final = Load(1_000_000, 100)
DAYS: Final = 30
BY: Final = {
    "by the hour of landing": "",
    f"by event day, {DAYS} days": "day(timestamp)",
    f"by event hour, {DAYS * 24} hours": "hour(timestamp)",
}
"""The compared partitionings."""
_WAIT_S: Final = 60.0

Found = dict[str, dict[str, list[Numbers]]]
"""The rounds by load, then by variant."""


@dataclass(frozen=True, slots=True)
class LandingBench:
    """A session, a broker and a folder."""

    spark: SparkSession
    brokers: str
    folder: Path

    def create(self, count: int, partitions: int) -> list[str]:
        names = [f"bench-{uuid.uuid4().hex[:8]}-{number}" for number in range(count)]
        admin = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0})
        for future in admin.create_topics([NewTopic(name, partitions, 1) for name in names]).values():
            future.result(_WAIT_S)
        return names

    def fill(self, topics: list[str], load: Load) -> None:
        """Publish rows with incompressible values and timestamps an hour apart, over several days."""
        digests = ", ".join(f"sha2(concat(id, '/{part}'), 256)" for part in range(-(-load.size // 64)))
        names = ", ".join(f"'{name}'" for name in topics)
        frame = self.spark.range(0, load.rows, 1, PARTITIONS).selectExpr(
            "cast(cast(id as string) as binary) as key",
            f"cast(substring(concat({digests}), 1, {load.size}) as binary) as value",
            f"element_at(array({names}), cast(id % {len(topics)} as int) + 1) as topic",
            f"timestamp_seconds(1790000000 + 3600 * (id % {DAYS * 24})) as timestamp",
        )
        writer = frame.write.format("millstream").option("kafka.bootstrap.servers", self.brokers)
        writer.mode("append").save()

    def land(self, topics: list[str], lake: Path, rows: int, partition_by: str = "") -> None:
        """Land all messages of topics; raise `WrongRows` if some are missing."""
        overrides = {"topics": ",".join(topics), "batch.max.messages": str(2 * rows), "partition.by": partition_by}
        pipeline = Pipeline(pipeline_id=uuid.uuid4(), name=lake.name, kind=PipelineKind.LAND, overrides=overrides)
        job = LandJob(pipeline, JobContext(spark=self.spark, brokers=self.brokers, lake=str(lake), folder=""))
        landed, lag = 0, 1
        while lag:
            step = job.step()
            landed, lag = landed + step.rows, step.lag
        job.close()
        if landed != rows:
            raise WrongRows(f"{landed} rows of {rows} were landed")

    def landing(self, topics: list[str], rows: int, partition_by: str = "") -> Callable[[], Callable[[], None]]:
        """Return a function that lands into a new folder and returns its cleanup."""

        def work() -> Callable[[], None]:
            lake = self.folder / f"lake-{uuid.uuid4().hex[:8]}"
            self.land(topics, lake, rows, partition_by)
            return lambda: shutil.rmtree(lake)

        return work

    def copying(self, frame: DataFrame) -> Callable[[], Callable[[], None]]:
        """Return a function that copies into a new folder and returns its cleanup."""

        def work() -> Callable[[], None]:
            folder = self.folder / f"copy-{uuid.uuid4().hex[:8]}"
            writer = frame.write.option("compression", "zstd").option("parquet.block.size", GROUP_BYTES)
            writer.parquet(str(folder))
            return lambda: shutil.rmtree(folder)

        return work


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_landing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the rows, one round")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows; what is fixed weighs more with few")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("partitions",), help="measure only a part")
    parser.add_argument("--master", default=f"local[{os.cpu_count()}]")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    share, rounds = (0.2, 1) if options.quick else (options.share, options.rounds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine.facts() | {"master": options.master, "rounds": rounds}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        server = stack.enter_context(Server(folder / "data"))
        bench = LandingBench(open_session(stack, options.master, [], folder), server.kafka, folder)
        dated_load = Load(int(DATED.rows * share), DATED.size)
        dated = {f"{dated_load.title}, partitioned": measure_partitions(bench, dated_load, rounds, console)}
        if options.only:
            tables = lines(dated)
        else:
            loads = [Load(int(load.rows * share), load.size) for load in LOADS]
            copies = {load.title: measure_copy(bench, load, rounds, console) for load in loads}
            spread_load = Load(int(SPREAD.rows * share), SPREAD.size)
            spread = measure_topics(bench, spread_load, rounds, console)
            compared = {f"{load}, raw": rounds_by_name for load, rounds_by_name in copies.items()}
            tables = [
                *lines({**compared, f"{spread_load.title}, spread": spread, **dated}),
                targets(copies, spread),
            ]
    for table in tables:
        console.print(table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(facts, tables), encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 0


def measure_copy(bench: LandingBench, load: Load, rounds: int, console: Console) -> dict[str, list[Numbers]]:
    """Measure landing a topic, and copying the landed rows with Spark."""
    topics = bench.create(1, PARTITIONS)
    bench.fill(topics, load)
    first = bench.folder / "first"
    bench.land(topics, first, load.rows)
    files = deltalake.DeltaTable(str(first / topics[0])).file_uris()
    frame = bench.spark.read.parquet(*files)
    if frame.count() != load.rows:
        raise WrongRows(f"the table has {frame.count()} rows of {load.rows}")
    variants = {LANDED: bench.landing(topics, load.rows), COPIED: bench.copying(frame)}
    rounds_by_name = measure_in_turn(variants, load, rounds, console)
    shutil.rmtree(first)
    return rounds_by_name


def measure_topics(bench: LandingBench, load: Load, rounds: int, console: Console) -> dict[str, list[Numbers]]:
    """Measure the same rows in one topic and in many."""
    one, many = bench.create(1, PARTITIONS), bench.create(TOPICS, 1)
    bench.fill(one, load)
    bench.fill(many, load)
    return measure_in_turn(
        {ONE: bench.landing(one, load.rows), MANY: bench.landing(many, load.rows)}, load, rounds, console
    )


def measure_partitions(bench: LandingBench, load: Load, rounds: int, console: Console) -> dict[str, list[Numbers]]:
    """Measure the same rows in tables with different partitionings."""
    topics = bench.create(1, PARTITIONS)
    bench.fill(topics, load)
    variants = {name: bench.landing(topics, load.rows, partition_by) for name, partition_by in BY.items()}
    return measure_in_turn(variants, load, rounds, console)


def measure_in_turn(
    variants: dict[str, Callable[[], Callable[[], None]]], load: Load, rounds: int, console: Console
) -> dict[str, list[Numbers]]:
    """Measure every variant in every round; the first round is a warm-up."""
    rounds_by_name: dict[str, list[Numbers]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, work in variants.items():
            numbers = measured(work, load.rows)
            if turn:
                rounds_by_name[name].append(numbers)
    for name, variant_rounds in rounds_by_name.items():
        console.print(f"{time.strftime('%H:%M:%S')} {load.title}, {name}: {shown(variant_rounds)}")
    return rounds_by_name


def lines(compared: Found) -> list[Table]:
    tables = []
    for title, rounds_by_name in compared.items():
        first = next(iter(rounds_by_name.values()))
        table = Table(title, ["", "million rows/s", "CPU s per million", "rate, first / this", "CPU, first / this"])
        for name, rounds in rounds_by_name.items():
            row = [name, f"{middle(rounds, 'rows/s') / 1e6:.2f}", f"{middle(rounds, 'CPU s/M'):.2f}"]
            table.rows.append([*row, *(f"{ratio(first, rounds, number):.2f}" for number in ("rows/s", "CPU s/M"))])
        tables.append(table)
    return tables


def targets(copies: Found, spread: dict[str, list[Numbers]]) -> Table:
    table = Table("Targets", ["line", "against", "target", "measured", "verdict"], words=2)
    for load, rounds_by_name in copies.items():
        share = ratio(rounds_by_name[LANDED], rounds_by_name[COPIED], "rows/s")
        verdict = "reached" if share > 1 else "not reached"
        table.rows.append([f"{load}, raw", COPIED, "more than 1", f"{share:.2f}", verdict])
    times = ratio(spread[ONE], spread[MANY], "rows/s")
    verdict = "reached" if times <= TIMES_MAX else "not reached"
    table.rows.append([MANY, f"{ONE}, equal bytes", f"at most {TIMES_MAX:g} times", f"{times:.2f}", verdict])
    return table


def report(facts: dict[str, Any], tables: Sequence[Table]) -> str:
    text = ["# Landing: the numbers", "", _METHOD, "", *(f"- {name}: {value}" for name, value in facts.items())]
    return "\n".join([*text, "", *(table.markdown() for table in tables)]).rstrip() + "\n"


_METHOD: Final = (
    "These numbers are from `make bench-spark`, which runs all variants in turn in one session and discards the first "
    "turn; the tables show medians of the rounds. CPU is that of the driver, the JVM, the Python workers and the "
    "broker together. Landing is compared with Spark copying the same rows from Parquet to Parquet: the copy has the "
    "same columns, codec (zstd), row group size and statistics, and both end with a commit."
)


if __name__ == "__main__":
    sys.exit(main())
