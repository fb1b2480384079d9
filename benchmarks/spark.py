"""`make bench-spark`: `format("millstream")`, Parquet, a row-by-row source and Spark's own connector to Kafka.

    python -m benchmarks.spark [--quick] [--share OF_THE_ROWS] [--rounds N] [--codec NAME] [--variants NAMES]
        [--only TEXT] [--out FILE]

The same rows with the same columns are read from a topic or from Parquet with the same codec, and dropped or written to
Parquet; and they are written from Parquet to a topic or to Parquet. Each round measures every variant once in the same
session, and the tables show medians; the first round is a warm-up. CPU includes the driver, the JVM, its Python workers
and the brokers. First, the rows that each variant reads are verified by a sum over the hashes of all keys and values.
Spark's connector and Apache Kafka are fetched by Maven; if they are unavailable, they are skipped, and the report says
so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import machine
from benchmarks.peers import kafka, spark_connector
from benchmarks.processes import cpu_of
from benchmarks.report import Table
from benchmarks.spark_rows import Nothing, RowByRow
from benchmarks.spark_variants import (
    JVM,
    JVM_KAFKA,
    LIMIT,
    OURS,
    PARTITIONS,
    ROWS,
    Load,
    Rows,
    Stage,
    Variant,
    to_parquet,
)
from benchmarks.subject import PeerUnavailable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from millstream.spark.session import session
from millstream_testing.server import Server

OUT: Final = Path("build/bench/spark.md")
LOADS: Final = (Load(10_000_000, 100), Load(1_000_000, 1024))
NOOP, PARQUET, TOPIC = "read and dropped", "read, written to Parquet", "written from Parquet"
TASKS: Final = (NOOP, PARQUET, TOPIC)
TRIGGER: Final = "a batch of a stream"
TRIGGERS: Final = 30
TRIGGERS_WARM: Final = 8
TRIGGER_ROWS: Final = 1000
TRIGGERS_S_MAX: Final = 180.0
LEAST: Final = {LIMIT: 0.5, ROWS: 5.0, JVM: 1.0, JVM_KAFKA: 1.0}
"""The minimum ratio of Millstream's rate to that of the other variants."""

OVERHEAD_MAX: Final = 1.3

Numbers = dict[str, float]
Found = dict[tuple[str, str], dict[str, list[Numbers]]]
"""The rounds by load and task, then by variant."""


class WrongRows(Exception):
    """A variant did not read what was written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results; 1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, one round")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows; what is fixed weighs more with few")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="none", help="none, gzip, snappy, lz4 or zstd; of topics and of Parquet")
    parser.add_argument("--variants", default="", help="beginnings of the names of variants; default: all")
    parser.add_argument("--only", default="", help="measure only lines whose title has this, such as `100 B, written`")
    parser.add_argument("--master", default=f"local[{os.cpu_count()}]")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    share, rounds = (0.1, 1) if options.quick else (options.share, options.rounds)
    loads = [Load(int(load.rows * share), load.size) for load in LOADS]
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine.facts() | {"codec": options.codec, "master": options.master, "rounds": rounds}
    with ExitStack() as stack:
        stage = started(stack, options.master, options.codec, facts)
        chosen = tuple(options.variants.split(",")) if options.variants else ("",)
        results = measure_loads(stage, loads, rounds, chosen, options.only, console)
        triggers = measure_triggers(stage, rounds, console) if options.only in TRIGGER else {}
    tables = [*lines(results), *([trigger_table(triggers)] if triggers else []), targets(results, triggers)]
    for table in tables:
        console.print(table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(facts, tables, stage.missing), encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 0


# -- what is there ------------------------------------------------------------------------------------------------


def started(stack: ExitStack, master: str, codec: str, facts: dict[str, Any]) -> Stage:
    """Start the brokers and the session, with all available peers."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
    own = stack.enter_context(Server(folder / "data"))
    stage = Stage(None, folder, codec, own.kafka)  # type: ignore[arg-type]
    jars: list[Path] = []
    try:
        jars = spark_connector.fetch()
        stage.has_connector = True
        facts[JVM] = spark_connector.version_of(jars)
        stage.kafka = stack.enter_context(kafka.kafka(folder / "kafka", "os", partitions=PARTITIONS)).kafka
        facts["Apache Kafka"] = kafka.version_of(kafka.fetch())
    except PeerUnavailable as reason:
        stage.missing[JVM_KAFKA if stage.has_connector else f"{JVM}, {JVM_KAFKA}"] = str(reason)
    stage.spark = open_session(stack, master, jars, folder)
    facts["Spark"] = stage.spark.version
    return stage


def open_session(stack: ExitStack, master: str, jars: list[Path], folder: Path) -> SparkSession:
    """One session for everything; its workers find this package too."""
    here = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.jars": ",".join(map(str, jars)),
    }
    spark = session("bench", master=master, settings=settings)
    stack.callback(spark.stop)
    spark.sparkContext.setLogLevel("OFF")
    for source in (RowByRow, Nothing):
        spark.dataSource.register(source)
    return spark


# -- rows ---------------------------------------------------------------------------------------------------------


def measure_loads(
    stage: Stage, loads: Sequence[Load], rounds: int, chosen: tuple[str, ...], only: str, console: Console
) -> Found:
    """Measure every task with every variant, in turn."""
    results: Found = {}
    for load in loads:
        tasks = [task for task in TASKS if only in f"{load.title}, {task}"]
        if not tasks:
            continue
        console.print(f"{time.strftime('%H:%M:%S')} {load.title}: making the rows")
        rows = Rows(stage, load)
        variants = [variant for variant in rows.variants() if variant.name.startswith(chosen)]
        for variant in variants:
            check(rows, variant)
        for task in tasks:
            rounds_by_variant = results.setdefault((load.title, task), {variant.name: [] for variant in variants})
            for turn in range(rounds + 1):
                for variant in variants:
                    numbers = measured(partial(run, stage, task, variant), variant.rows)
                    if turn:
                        # The first round is a warm-up.
                        rounds_by_variant[variant.name].append(numbers)
            for name, variant_rounds in rounds_by_variant.items():
                console.print(f"{time.strftime('%H:%M:%S')} {task}, {name}: {shown(variant_rounds)}")
    return results


def check(rows: Rows, variant: Variant) -> None:
    """Check that a variant reads what was written."""
    expected = summed(rows.input("input" if variant.rows == rows.load.rows else "part"))
    read = summed(variant.read())
    if read != expected:
        raise WrongRows(
            f"{variant.name} reads {read[0]} rows with the sum {read[1]}, not {expected[0]} with {expected[1]}"
        )


def summed(frame: DataFrame) -> tuple[int, int]:
    """Return the number of rows, and the sum over the hashes of their keys and values."""
    row = frame.selectExpr("count(*) as n", "sum(cast(xxhash64(key, value) as decimal(38, 0))) as s").first()
    if row is None:
        raise WrongRows("no row came back")
    return int(row.n), int(row.s)


def run(stage: Stage, task: str, variant: Variant) -> Callable[[], None] | None:
    """Run one task with one variant; return a function that removes its output."""
    if task == TOPIC:
        return variant.write()
    if task == PARQUET:
        return to_parquet(stage, variant.read())
    variant.read().write.format("noop").mode("overwrite").save()
    return None


def measured(work: Callable[[], Callable[[], None] | None], rows: int) -> Numbers:
    """Return the time and the CPU of this process and its children."""
    cpu_before, began = cpu_s(), time.perf_counter()
    undo = work()
    took_s, used_s = time.perf_counter() - began, cpu_s() - cpu_before
    if undo is not None:
        undo()
    return {"rows/s": rows / took_s, "CPU s/M": used_s / rows * 1e6}


def cpu_s() -> float:
    """Return the CPU seconds of this process and its children: the JVM, the Python workers and the brokers."""
    while True:
        try:
            return sum(cpu_of(os.getpid()))
        except (FileNotFoundError, ProcessLookupError):
            # A worker has just ended; its CPU time is now counted in its parent.
            continue


# -- triggers -----------------------------------------------------------------------------------------------------


def measure_triggers(stage: Stage, rounds: int, console: Console) -> dict[str, list[Numbers]]:
    """Measure the cost of a batch of a stream with our sink and with a null sink."""
    topic = stage.create(stage.millstream)
    sinks = {
        OURS: {"kafka.bootstrap.servers": stage.millstream, "topic": topic},
        "nothing": {},
    }
    rounds_by_name: dict[str, list[Numbers]] = {name: [] for name in sinks}
    for turn in range(rounds + 1):
        for name, options in sinks.items():
            numbers = trigger_costs(stage, name, options)
            if turn:
                rounds_by_name[name].append(numbers)
    for name, variant_rounds in rounds_by_name.items():
        console.print(f"{time.strftime('%H:%M:%S')} trigger, {name}: {shown(variant_rounds)}")
    return rounds_by_name


def trigger_costs(stage: Stage, sink: str, options: dict[str, str]) -> Numbers:
    """Run a stream of small batches and return the medians."""
    source = stage.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", TRIGGER_ROWS)
    frame = source.option("numPartitions", 2).load().selectExpr("cast(value as string) as value")
    writer = frame.writeStream.format(sink).options(**options)
    query = writer.option("checkpointLocation", str(stage.folder / f"checkpoint-{uuid.uuid4().hex[:8]}")).start()
    try:
        _wait_for(query, TRIGGERS_WARM)
        before = cpu_s(), query.recentProgress[-1].batchId
        _wait_for(query, TRIGGERS_WARM + TRIGGERS)
        progress = query.recentProgress
        used_s = cpu_s() - before[0]
    finally:
        query.stop()
    batches = [batch for batch in progress if batch.batchId > before[1]]
    return {
        "ms": median(batch.durationMs["triggerExecution"] for batch in batches),
        "CPU ms": used_s * 1000 / len(batches),
    }


def _wait_for(query: StreamingQuery, batches: int) -> None:
    deadline = time.monotonic() + TRIGGERS_S_MAX
    while len(query.recentProgress) < batches:
        if not query.isActive or time.monotonic() > deadline:
            raise WrongRows(f"the stream came to no {batches} batches: {query.exception()}")
        time.sleep(0.05)


# -- the report ---------------------------------------------------------------------------------------------------


def shown(rounds: Sequence[Numbers]) -> str:
    """Return the medians as one line."""
    return ", ".join(f"{formatted(median(measured[name] for measured in rounds))} {name}" for name in rounds[0])


def formatted(value: float) -> str:
    """Format a number with a precision that depends on its size."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def middle(rounds: Sequence[Numbers], number: str) -> float:
    return median(measured[number] for measured in rounds)


def ratio(ours: Sequence[Numbers], theirs: Sequence[Numbers], number: str) -> float:
    """Return the median over the rounds of the ratio of ours to theirs."""
    return median(own[number] / other[number] for own, other in zip(ours, theirs, strict=True))


def lines(results: Found) -> Iterator[Table]:
    """Yield a table for each load and task."""
    for (load, task), by_variant in results.items():
        table = Table(
            f"{load}, {task}", ["", "million rows/s", "CPU s per million", "rate, ours / this", "CPU, ours / this"]
        )
        ours = by_variant.get(OURS, [])
        for name, rounds in by_variant.items():
            row = [name, f"{middle(rounds, 'rows/s') / 1e6:.2f}", f"{middle(rounds, 'CPU s/M'):.2f}"]
            compared = [f"{ratio(ours, rounds, number):.2f}" for number in ("rows/s", "CPU s/M")] if ours else ["", ""]
            table.rows.append([*row, *compared])
        yield table


def trigger_table(rounds_by_name: dict[str, list[Numbers]]) -> Table:
    """Return the table of the cost of a batch."""
    table = Table(f"A batch of {TRIGGER_ROWS} rows of a stream", ["sink", "ms", "CPU ms"])
    for name, rounds in rounds_by_name.items():
        table.rows.append([name, *(formatted(middle(rounds, number)) for number in ("ms", "CPU ms"))])
    return table


def targets(results: Found, triggers: dict[str, list[Numbers]]) -> Table:
    table = Table("Targets", ["line", "against", "target", "measured", "verdict"], words=2)
    for (load, task), by_variant in results.items():
        for name, least in LEAST.items():
            # Row-by-row code is usually a source; such a sink is shown, but has no target.
            if OURS in by_variant and name in by_variant and not (name == ROWS and task == TOPIC):
                share = ratio(by_variant[OURS], by_variant[name], "rows/s")
                verdict = "reached" if share >= least else "not reached"
                table.rows.append([f"{load}, {task}", name, f"at least {least:g}", f"{share:.2f}", verdict])
    if triggers:
        share = ratio(triggers[OURS], triggers["nothing"], "ms")
        verdict = "reached" if share <= OVERHEAD_MAX else "not reached"
        table.rows.append([TRIGGER, "a sink that does nothing", f"at most {OVERHEAD_MAX:g}", f"{share:.2f}", verdict])
    return table


def report(facts: dict[str, Any], tables: Sequence[Table], missing: dict[str, str]) -> str:
    text = ["# Spark: the numbers", "", _METHOD, ""]
    text += [f"- {name}: {value}" for name, value in facts.items()]
    text += [f"- {name}: not measured: {reason}" for name, reason in missing.items()]
    return "\n".join([*text, "", *(table.markdown() for table in tables)]).rstrip() + "\n"


_METHOD: Final = (
    "These numbers are from `make bench-spark`, which runs all variants in turn in one session and discards the first "
    "turn; the tables show medians of the rounds. CPU is that of the driver, the JVM, the Python workers and the "
    "broker together. Rows have all seven columns; keys and values are checked by the sum of their hashes. Millstream "
    "syncs before it acknowledges; Apache Kafka leaves syncing to the operating system."
)


if __name__ == "__main__":
    sys.exit(main())
