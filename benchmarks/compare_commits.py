"""`make bench-compare`: the CPU seconds that two versions of Millstream need, interleaved in the same run.

    python -m benchmarks.compare_commits BEFORE [AFTER] [--rounds N] [--seconds S] [--only LINES]

BEFORE and AFTER are commits, or folders with a checkout; without AFTER it is this checkout. In each round of a line
both servers are measured once, and which one is first alternates. A row shows the median of both, and the ratio of
after to before with its 95% confidence interval, from the rounds as pairs. A line is worse if the whole interval is
above 1; the exit code is then 1. The client and the method are those of `benchmarks.run`; the lines with fixed requests
(`benchmarks.fixed_requests`) send both versions the same bytes.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from benchmarks import cases, machine, reader
from benchmarks.cases import ALWAYS, FAST, FIXED, REQUESTS, SAFE, Case
from benchmarks.run import turns
from benchmarks.subject import Measured
from benchmarks.subjects import Millstream, TlsListener
from rich.console import Console
from rich.table import Table

from millstream_testing.server import Server

ROUNDS, SECONDS = 12, 1.5
LINES = (
    FAST,
    SAFE,
    replace(FAST, size_bytes=100),
    replace(FAST, partitions=100, producers=10, keyed=True),
    replace(FAST, tls=True),
    Case(kind=REQUESTS, flush=ALWAYS, partitions=1),
    Case(kind=REQUESTS, flush=cases.OS, partitions=1),
    replace(SAFE, kind=FIXED),
    replace(FAST, kind=FIXED),
    replace(FAST, kind=FIXED, size_bytes=100),
)
_ROOT = Path(__file__).resolve().parent.parent
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Quantiles of Student's distribution for 1 to 15 degrees of freedom; for more, the last is on the safe side."""


class CheckoutServer(Server):
    """A server that runs the source of a checkout."""

    def __init__(self, data: Path, source: Path, settings: Mapping[str, object] | None = None) -> None:
        super().__init__(data, settings=settings)
        self._source = source

    def command(self) -> Sequence[str]:
        command = list(super().command())
        if not any("pipelines_spare" in file.read_text(encoding="utf-8") for file in self._source.rglob("*.py")):
            spare = command.index("--pipelines-spare")
            del command[spare : spare + 2]  # The checkout predates the spare driver.
        return command

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self._source)}


class Checkout(Millstream):
    """Millstream as it is in a checkout, with this interpreter and its packages."""

    def __init__(self, name: str, source: Path, *, with_tls: bool) -> None:
        super().__init__()
        self.name = name
        self._source = source
        self._with_tls = with_tls

    def server(self, data: Path, tls: TlsListener | None = None) -> Server:
        return CheckoutServer(data, self._source, self.listener_settings(data, tls if self._with_tls else None))


class Ratio(NamedTuple):
    """The cost of a version relative to another, with the bounds of the confidence interval."""

    low: float
    mean: float
    high: float

    @property
    def verdict(self) -> str:
        return "worse" if self.low > 1 else "better" if self.high < 1 else "same"


def ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Compare pairs of measurements: the geometric mean of their ratios, with Student's 95% interval."""
    logs = np.log(np.array(after) / np.array(before))
    mean = float(logs.mean())
    quantile = _T_975[min(logs.size - 1, len(_T_975)) - 1]
    margin = quantile * float(logs.std(ddof=1)) / math.sqrt(logs.size)
    return Ratio(*(math.exp(value) for value in (mean - margin, mean, mean + margin)))


def costs(measured: Measured) -> Iterator[tuple[str, float]]:
    """Yield the server's CPU time of each direction: seconds for a gigabyte, or microseconds for a request."""
    for direction, numbers in measured.items():
        if "CPU µs/request" in numbers:
            yield f"{direction}, µs/request", numbers["CPU µs/request"]
        else:
            yield f"{direction}, s/GB", numbers["user CPU s/GB"] + numbers["system CPU s/GB"]


def find_source(version: str, folder: Path) -> Path:
    """Return the source folder of a commit, unpacked into `folder`, or of a checkout."""
    if (Path(version) / "src" / "millstream").is_dir():
        return Path(version).resolve() / "src"
    archive = subprocess.run(["git", "archive", version, "src"], cwd=_ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as unpacked:
        unpacked.extractall(folder, filter="data")
    return folder / "src"


def measure(
    console: Console, lines: Sequence[Case], before: Checkout, after: Checkout, rounds: int, seconds: float
) -> Iterator[tuple[str, Sequence[float], Sequence[float]]]:
    """Measure every line; yield its name and the costs before and after, round by round."""
    for case in lines:
        found_costs: Mapping[str, dict[str, list[float]]] = {before.name: {}, after.name: {}}
        with console.status(case.name) as status:
            for turn, subject in turns(case, (before, after), rounds):
                status.update(f"{case.name}: round {turn} of {rounds}, {subject.name}")
                for name, cost in costs(subject.measure(case, seconds)):
                    found_costs[subject.name].setdefault(name, []).append(cost)
        for name, own in found_costs[before.name].items():
            yield f"{case.name}: {name}", own, found_costs[after.name][name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two versions; 1 if a line became worse."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_commits", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("before", help="a commit, or a folder with a checkout")
    parser.add_argument("after", nargs="?", default=str(_ROOT), help="the same (default: this checkout)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each measurement (default: {SECONDS:g})")
    parser.add_argument("--only", action="append", default=[], help="a part of a line's name; may be repeated")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("an interval needs at least 2 rounds")
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine.touch_memory()
    reader.touch_memory()
    table = Table("line", "before", "after", "ratio", "95% interval", "verdict")
    worse = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-compare-")))
        lines = cases.chosen(LINES, options.only)
        with_tls = any(line.tls for line in lines)  # Versions without TLS can be compared on the other lines.
        before, after = (
            stack.enter_context(Checkout(name, find_source(version, folder / name), with_tls=with_tls))
            for name, version in (("before", options.before), ("after", options.after))
        )
        for name, was, is_now in measure(console, lines, before, after, options.rounds, options.seconds):
            estimate = ratio(was, is_now)
            worse += estimate.verdict == "worse"
            interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
            row = (
                name,
                f"{median(was):.3g}",
                f"{median(is_now):.3g}",
                f"{estimate.mean:.3f}",
                interval,
                estimate.verdict,
            )
            table.add_row(*row)
            console.print("  ".join(row), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    return 1 if worse else 0


def _stop(*_: object) -> None:
    """Stop the servers and remove their data, as after Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
