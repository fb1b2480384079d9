"""`make bench`: Millstream against the limit server, interleaved in the same run, with medians and CPU seconds.

    python -m benchmarks.run [--only throughput,requests,start] [--rounds N] [--messages N] [--flush always,os]
                             [--json FILE]

The limit server moves the same bytes over the same event loop with the same flush policy and does nothing else, so
the ratio says how much of what this machine can do is left after everything a broker has to do.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from benchmarks import requests, throughput
from benchmarks.processes import memory_of
from benchmarks.subjects import DISCARD, LIMIT, MILLSTREAM, SUBJECTS
from rich.console import Console
from rich.table import Table

from millstream.testing.server import Server

OF_LIMIT, CPU_OF_LIMIT = "of the limit", "by CPU"
CPU = frozenset({"user CPU s/GB", "system CPU s/GB", "CPU µs/request"})
COMPARED = {"MB/s": 1, "requests/s": 1, "median ms": -1}
"""The numbers that are compared with the limit, and whether more or less of them is better."""

SECTIONS = ("throughput", "requests", "start")
_REST_S = 2.0
_STARTS = 5
_TOUCHED_BYTES_MAX = 8 * 1024**3
_WIDTH = 145

Numbers = dict[str, float]
Results = dict[str, dict[str, Numbers]]
"""By what was measured, then by server: the median of each number."""


def main() -> int:
    """Measure what was asked for, print it, and write it down."""
    arguments = parse()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    touch_memory(console)
    results: Results = {}
    for flush in arguments.flush:
        if "throughput" in arguments.only:
            results |= measure_throughput(console, arguments, flush)
        if "requests" in arguments.only:
            results |= measure_requests(console, arguments, flush)
    if "start" in arguments.only:
        results |= measure_start(console)
    console.print("Medians. The limit server moves the same bytes and checks nothing.", *tables_of(results), sep="\n")
    console.print(headline(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_list_of(SECTIONS), default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--flush", type=_list_of(("always", "os")), default=["always", "os"], help="always,os")
    parser.add_argument("--rounds", type=int, default=5, help="how often each server is measured")
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages of 1 KiB in each round")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    return parser.parse_args()


def _list_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse_list(text: str) -> list[str]:
        parts = text.split(",")
        unknown = set(parts) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        return parts

    return parse_list


def touch_memory(console: Console) -> None:
    """Have the machine hand out memory before the clock runs.

    A virtual machine gets its memory from its host when a page is first used. Without this, the first rounds pay for
    the page cache of the files, and what is measured is the host.
    """
    size = min(psutil.virtual_memory().available // 2, _TOUCHED_BYTES_MAX)
    with console.status("touching memory"):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


@contextmanager
def running(name: str, flush: str) -> Iterator[Server]:
    """A fresh server on an empty folder, which goes with it."""
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder,
        SUBJECTS[name](Path(folder) / "data", flush) as server,
    ):
        yield server


def interleaved(console: Console, what: str, names: list[str], rounds: int) -> Iterator[str]:
    """Every server in every round, each round beginning with another one."""
    with console.status(what) as status:
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                status.update(f"{what}: round {number + 1} of {rounds}, {name}")
                yield name


def measure_throughput(console: Console, arguments: argparse.Namespace, flush: str) -> Results:
    """Messages in and out."""
    taken: dict[str, dict[str, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
    for name in interleaved(console, f"throughput, flush={flush}", [LIMIT, MILLSTREAM, DISCARD], arguments.rounds):
        with running(name, flush) as server:
            taken[f"produce, flush={flush}"][name].append(_flow(throughput.produce(server, arguments.messages)))
            if name != DISCARD:
                taken[f"consume, flush={flush}"][name].append(_flow(throughput.consume(server, arguments.messages)))
                flow = throughput.produce(server, arguments.messages, idempotent=True)
                taken[f"produce idempotent, flush={flush}"][name].append(_flow(flow))
    return medians(taken)


def _flow(flow: throughput.Flow) -> Numbers:
    return {
        "MB/s": flow.mb_per_s,
        "user CPU s/GB": flow.cpu.user_s,
        "system CPU s/GB": flow.cpu.system_s,
        "client CPU s/GB": flow.client_cpu_s,
    }


def measure_requests(console: Console, arguments: argparse.Namespace, flush: str) -> Results:
    """One message per request."""
    taken: dict[str, dict[str, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
    for name in interleaved(console, f"one-message requests, flush={flush}", [LIMIT, MILLSTREAM], arguments.rounds):
        with running(name, flush) as server:
            measured = requests.measure(server)
        taken[f"one message at a time, flush={flush}"][name].append(
            {"median ms": measured.median_ms, "p99 ms": measured.p99_ms}
        )
        taken[f"{requests.IN_FLIGHT} one-message requests in flight, flush={flush}"][name].append(
            {"requests/s": measured.per_s, "CPU µs/request": measured.cpu_us}
        )
    return medians(taken)


def measure_start(console: Console) -> Results:
    """Start on an empty folder, and memory at rest: fresh, and after it has served a client."""
    taken: dict[str, dict[str, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
    for name in interleaved(console, "start", [MILLSTREAM], _STARTS):
        with running(name, "always") as server:
            numbers = {"start s": server.start_s, "first answer after s": requests.first_answer(server)}
            time.sleep(_REST_S)
            numbers["memory at rest MB"] = memory_of(server.pid) / 1e6
            throughput.produce(server, 10_000)
            throughput.consume(server, 10_000)
            time.sleep(_REST_S)
            numbers["memory after use MB"] = memory_of(server.pid) / 1e6
            taken["start and rest"][name].append(numbers)
    return medians(taken)


def medians(taken: dict[str, dict[str, list[Numbers]]]) -> Results:
    """The median of each number over the rounds, and of what Millstream reached of the limit in the same round."""
    results: Results = {}
    for what, by_name in taken.items():
        results[what] = {
            name: {number: median(each[number] for each in rounds) for number in rounds[0]}
            for name, rounds in by_name.items()
        }
        results[what].get(MILLSTREAM, {}).update(of_limit(by_name))
    return results


def of_limit(by_name: dict[str, list[Numbers]]) -> Numbers:
    """How much of the limit is reached, round by round; nothing where nothing is compared.

    The machine may be faster in one round than in another, but the two servers of a round run next to each other.
    On a machine that others use too, the share by CPU seconds is the steadier one.
    """
    if LIMIT not in by_name or MILLSTREAM not in by_name:
        return {}
    rounds = list(zip(by_name[MILLSTREAM], by_name[LIMIT], strict=True))
    shares = {}
    for number, sign in COMPARED.items():
        if number in by_name[LIMIT][0]:
            shares[OF_LIMIT] = median(float((mine[number] / best[number]) ** sign) for mine, best in rounds)
    cpu = [(_cpu(mine), _cpu(best)) for mine, best in rounds]
    if all(mine for mine, _ in cpu):
        shares[CPU_OF_LIMIT] = median(best / mine for mine, best in cpu)
    return shares


def _cpu(numbers: Numbers) -> float:
    return sum(value for number, value in numbers.items() if number in CPU)


def tables_of(results: Results) -> Iterator[Table]:
    """Everything, for people: one table for all that has the same numbers."""
    tables: dict[tuple[str, ...], Table] = {}
    for what, by_name in results.items():
        columns = tuple(number for number in next(iter(by_name.values())) if number not in (OF_LIMIT, CPU_OF_LIMIT))
        table = tables.get(columns)
        if table is None:
            table = tables[columns] = Table("what", "server")
            for column in (*columns, OF_LIMIT, CPU_OF_LIMIT):
                table.add_column(column, justify="right")
        for name, numbers in by_name.items():
            shown = [f"{numbers[column]:,.2f}" for column in columns]
            shares = [f"{numbers[share]:.0%}" if share in numbers else "" for share in (OF_LIMIT, CPU_OF_LIMIT)]
            table.add_row(what, name, *shown, *shares)
        table.add_section()
    yield from tables.values()


def headline(results: Results) -> str:
    """What was reached of the limit, in one sentence."""
    reached = {what: by_name.get(MILLSTREAM, {}).get(OF_LIMIT) for what, by_name in results.items()}
    parts = [f"{share:.0%} {what}" for what, share in reached.items() if share is not None]
    return "Of the limit: " + "; ".join(parts) if parts else ""


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
