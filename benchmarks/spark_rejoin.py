"""`make bench-rejoin`: how long pipelines pause when their driver is killed, without and with a spare driver.

    python -m benchmarks.spark_rejoin [--kills N] [--out FILE]

A node runs three transforms. Once they run, and the spare is ready where there is one, the driver is killed with its
Java. The pause is the time from the kill until a message that is sent after it has passed the last of the transforms.
Memory is the proportional set size (PSS) of the processes before the first kill.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import psutil
from benchmarks import machine
from benchmarks.processes import cpu_of, tree_of
from benchmarks.report import Table
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console

from millstream_testing.child_process import children
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

OUT: Final = Path("build/bench/spark-rejoin.md")
DRIVER: Final = "millstream.pipelines.runtime.driver"
PIPELINES: Final = 3
WAIT_S: Final = 300.0
QUIET_S: Final = 3.0
QUIET_CPU_S: Final = 0.5
"""Drivers are ready when they use at most this much CPU for a while; on a busy machine a spare takes a minute."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_rejoin", description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine.facts() | {"kills": options.kills, "pipelines": PIPELINES}
    title = "The pause of pipelines when their driver is killed"
    table = Table(title, ["", "median s", "longest s", "memory of drivers, MB"])
    for spare in ("off", "on"):
        pauses, memory = measured(spare, options.kills)
        name = "with a spare driver" if spare == "on" else "without"
        table.rows.append([name, f"{median(pauses):.1f}", f"{max(pauses):.1f}", f"{memory / 1e6:,.0f}"])
        console.print(" ".join(table.rows[-1]))
    console.print(table.rich())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bullets = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    options.out.write_text(f"{bullets}\n\n{table.markdown()}", encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 0


def measured(spare: str, kills: int) -> tuple[list[float], int]:
    """Return the pause of each kill in seconds, and the memory of the drivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
        server = stack.enter_context(Server(folder / "data", settings={"pipelines-spare": spare}))
        targets = declare(server)
        producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 0})
        consumer = reader(server, targets)
        stack.callback(consumer.close)
        passed(producer, consumer)
        settle(server, 2 if spare == "on" else 1)
        memory = sum(private_of(pid) for driver in drivers(server) for pid in tree_of(driver))
        pauses = []
        for _ in range(kills):
            settle(server, 2 if spare == "on" else 1)
            # The driver that was started first runs the pipelines.
            working = min(drivers(server), key=lambda pid: psutil.Process(pid).create_time())
            began = time.perf_counter()
            os.killpg(working, signal.SIGKILL)
            passed(producer, consumer)
            pauses.append(time.perf_counter() - began)
    return pauses, memory


def settle(server: Server, count: int) -> None:
    """Wait until there are this many drivers, and all of them are idle."""
    wait_until(lambda: len(drivers(server)) == count, timeout_s=WAIT_S)
    before, used = 0.0, QUIET_CPU_S + 1
    while used > QUIET_CPU_S:
        time.sleep(QUIET_S)
        try:
            now = sum(sum(cpu_of(driver)) for driver in drivers(server))
        except FileNotFoundError:
            # A worker has just ended.
            continue
        used, before = now - before, now


def declare(server: Server) -> list[str]:
    """Declare the transforms; return their targets."""
    millstream = CommandLine(server.kafka)
    targets = [f"out-{number}" for number in range(PIPELINES)]
    for name in ("orders", *targets):
        assert millstream("topic", "create", name).code == 0
    for target in targets:
        sql = "SELECT key, id FROM orders"
        flags = ("--sql", sql, "--schema", "orders=id string", "--into", target)
        created = millstream("pipeline", "create", "transform", f"to-{target}", *flags)
        assert created.code == 0, created.err
    return targets


def reader(server: Server, topics: Sequence[str]) -> Consumer:
    consumer = Consumer(
        {"bootstrap.servers": server.kafka, "group.id": uuid.uuid4().hex, "isolation.level": "read_committed"}
    )
    consumer.assign([TopicPartition(topic, 0, 0) for topic in topics])
    return consumer


def passed(producer: Producer, consumer: Consumer) -> None:
    """Send a message, and wait until it has passed every transform."""
    name = uuid.uuid4().hex
    producer.produce("orders", f'{{"id": "{name}"}}')
    assert producer.flush(WAIT_S) == 0
    waiting = PIPELINES
    deadline = time.monotonic() + WAIT_S
    while waiting:
        message = consumer.poll(1.0)
        if time.monotonic() > deadline:
            raise TimeoutError("a message did not pass all transforms")
        if message is not None and message.error() is None and name.encode() in (message.value() or b""):
            waiting -= 1


def drivers(server: Server) -> list[int]:
    return children(server.pid, DRIVER)


def private_of(pid: int) -> int:
    """Return the proportional set size of a process."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
