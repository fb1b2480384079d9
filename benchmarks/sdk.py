"""`make bench-sdk`: the Python SDK and other Python clients, interleaved in the same run.

    python -m benchmarks.sdk [--quick] [--rounds N] [--seconds S] [--loads NAMES] [--clients NAMES] [--out FILE]

aiokafka and confluent-kafka's asyncio client use the same broker as the SDK; aio-pika uses RabbitMQ and nats-py uses
JetStream, both configured to sync before they acknowledge, as Millstream does. Each measurement runs in its own process
(`benchmarks/sdk_client.py`); in each round every client is measured once, and the tables show medians. CPU is the
client's own. aio-pika and nats-py are installed in a virtual environment in the user's cache folder, which is created
if it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks import machine
from benchmarks.cases import ALWAYS
from benchmarks.peers.nats import Nats
from benchmarks.peers.rabbitmq import RabbitMq
from benchmarks.subject import PeerUnavailable
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.table import Table

from millstream_testing.server import Server

OUT: Final = Path("build/bench/sdk.md")
OURS: Final = "millstream"
PEERS: Final = ("aio-pika", "nats-py")
CLIENTS: Final = (OURS, "aiokafka", "confluent", *PEERS)
MAX_S: Final = 180.0
_CLIENT: Final = Path(__file__).with_name("sdk_client.py")
_PACKAGES: Final = ("aio-pika", "nats-py", "uvloop")
_ADMIN_S_MAX: Final = 30.0


class Load(NamedTuple):
    """One line: the kind of load and the message size."""

    name: str
    size: int
    per_s: int = 0

    @property
    def title(self) -> str:
        size = "1 KiB" if self.size == 1024 else f"{self.size} B"
        return f"{self.name}, {size}" + (f", {self.per_s:,}/s" if self.per_s else "")


LOADS: Final = (
    Load("each", 100),
    Load("each", 1024),
    Load("many", 100),
    Load("many", 1024),
    Load("subscribe", 100),
    Load("subscribe", 1024),
    Load("batches", 100),
    Load("rate", 100, 1000),
)
_MESSAGES: Final = {"aio-pika": 20_000, "nats-py": 20_000}
"""The sizes of backlogs for clients that would otherwise take minutes to publish one."""

Found = dict[Load, dict[str, list[dict[str, float]]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results; 1 when something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sdk", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--loads", default="", help="each, many, subscribe, batches, rate; default: all")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    loads = [load for load in LOADS if not options.loads or load.name in options.loads.split(",")]
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine.facts()
    machine.touch_memory()
    with ExitStack() as stack:
        addresses, missing = started(options.clients.split(","), stack, console)
        results, failed = measure_all(loads, addresses, rounds, seconds, console)
    text = report(facts, results, missing | failed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    console.print(f"Written to {options.out}.")
    return 1 if failed else 0


def started(clients: Sequence[str], stack: ExitStack, console: Console) -> tuple[dict[str, str], dict[str, str]]:
    """Start the servers; return the address for each client, and why some are unavailable."""
    addresses: dict[str, str] = {}
    missing: dict[str, str] = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-bench-")))
    own = stack.enter_context(Server(folder / "data"))
    for client in clients:
        if client not in PEERS:
            addresses[client] = own.kafka
            continue
        try:
            addresses[client] = rabbitmq(stack) if client == "aio-pika" else nats(stack)
        except PeerUnavailable as reason:
            missing[client] = str(reason)
            console.print(f"{client}: not measured: {reason}")
    return addresses, missing


def rabbitmq(stack: ExitStack) -> str:
    """Start RabbitMQ; return its address."""
    return stack.enter_context(RabbitMq()).amqp


def nats(stack: ExitStack) -> str:
    """Start NATS; return the address of the server that syncs."""
    server = stack.enter_context(Nats()).server(ALWAYS)
    if server is None:
        raise PeerUnavailable("this nats-server cannot sync before it acknowledges")
    return server.kafka


def measure_all(
    loads: Sequence[Load], addresses: dict[str, str], rounds: int, seconds: float, console: Console
) -> tuple[Found, dict[str, str]]:
    """Measure every load with every client, in rounds that each start with another client."""
    results: Found = {}
    failed: dict[str, str] = {}
    names = list(addresses)
    for load in loads:
        results[load] = {}
        for turn in range(rounds):
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                if load.name == "batches" and name in PEERS:
                    continue
                measured = measure(name, addresses[name], load, seconds)
                if isinstance(measured, str):
                    failed[f"{name}, {load.title}"] = measured
                    console.print(f"{name}, {load.title}: {measured}")
                else:
                    results[load].setdefault(name, []).append(measured)
        show(console, load, results[load])
    return results, failed


def measure(name: str, address: str, load: Load, seconds: float) -> dict[str, float] | str:
    """Run one measurement; return the result, or the error as text."""
    topic = f"b{uuid.uuid4().hex[:12]}"
    if name not in PEERS:
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(_ADMIN_S_MAX)
    flags = {"address": address, "topic": topic, "size": load.size, "seconds": seconds, "per-s": load.per_s or 1000}
    if name in _MESSAGES:
        flags["messages"] = _MESSAGES[name]
    command = [str(python_of(name)), str(_CLIENT), name, load.name]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MAX_S, check=False)
    except subprocess.TimeoutExpired:
        return f"took longer than {MAX_S:g} s"
    if ran.returncode or not ran.stdout.strip():
        return (ran.stderr.strip().splitlines() or ["no result"])[-1][:300]
    measured: dict[str, float] = json.loads(ran.stdout.strip().splitlines()[-1])
    measured["messages/s"] = measured["messages"] / measured["seconds"]
    measured["CPU s/M"] = measured["cpu_s"] / measured["messages"] * 1e6
    return measured


def python_of(name: str) -> Path:
    """Return the interpreter of the environment that has a client."""
    if name not in PEERS:
        return Path(sys.executable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream-bench" / "python-peers"
    python = cache / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *_PACKAGES], check=True)
    return python


def numbers(load: Load, rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of a line."""
    shown = ["messages/s", "CPU s/M"]
    if load.per_s:
        shown = ["publish p50 ms", "publish p99 ms", "receive p50 ms", "receive p99 ms", "CPU s/M"]
    return {name: median(rates[name] for rates in rounds) for name in shown if all(name in rates for rates in rounds)}


def show(console: Console, load: Load, rounds_by_name: dict[str, list[dict[str, float]]]) -> None:
    """Print one line while the run continues."""
    table = Table(title=load.title)
    rows = {name: numbers(load, rounds) for name, rounds in rounds_by_name.items()}
    table.add_column("")
    for column in next(iter(rows.values()), {}):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(formatted(value) for value in row.values()))
    console.print(table)


def formatted(value: float) -> str:
    """Format a number with a precision that depends on its size."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def report(facts: dict[str, Any], results: Found, missing: dict[str, str]) -> str:
    """Return the tables as Markdown."""
    lines = ["| " + " | ".join(facts) + " |", "|" + "---|" * len(facts)]
    lines += ["| " + " | ".join(str(value) for value in facts.values()) + " |", ""]
    for load, by_client in results.items():
        rows = {name: numbers(load, rounds) for name, rounds in by_client.items()}
        columns = next(iter(rows.values()), {})
        lines += [f"### {load.title}", "", "| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        lines += [f"| {name} | " + " | ".join(map(formatted, row.values())) + " |" for name, row in rows.items()]
        lines += ["", *comparison(load, rows), ""]
    lines += [f"- {name}: not measured: {reason}" for name, reason in missing.items()]
    return "\n".join(lines).rstrip() + "\n"


def comparison(load: Load, rows: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield where another client is better than the SDK."""
    ours = rows.get(OURS, {})
    behind = [
        f"{name} in {column}"
        for name, row in rows.items()
        for column, value in row.items()
        if name != OURS
        and column in ours
        and (value > ours[column] if column == "messages/s" else value < ours[column])
    ]
    if ours and len(rows) > 1:
        yield f"Not reached: {', '.join(behind)}." if behind else "Ahead of all."


if __name__ == "__main__":
    sys.exit(main())
