"""Common parts of the fuzzers: numbered examples, each determined by the seed and its number alone.

An example is a function of a source of chance; any exception out of it is a finding, and so are an example that takes
too long and a process that grows too large. A finding says how to run its example again; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

EXAMPLE_SECONDS_MAX = 60
RESIDENT_BYTES_MAX = 800 * 1024 * 1024

Example = Callable[[random.Random], int]
"""Runs one example and says how many things it tried."""


class Finding(Exception):
    """Something that must not happen; the message says what."""


class LogCollector(logging.Handler):
    """Collects log lines that no client or disk fault may cause: those with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line about an unexpected exception."""
        if record.exc_info is not None or record.levelno >= logging.CRITICAL or record.name == "asyncio":
            self.unexpected.append(logging.Formatter().format(record))

    def check(self) -> None:
        """Raise what was kept."""
        if self.unexpected:
            collected, self.unexpected = self.unexpected, []
            raise Finding("unexpected log lines:\n" + "\n".join(collected))


def listen() -> LogCollector:
    """Collect the log instead of printing it."""
    collected = LogCollector()
    logging.basicConfig(handlers=[collected], level=logging.WARNING, force=True)
    return collected


def parse(module: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The command line of every fuzzer."""
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, at most (default: 60)")
    parser.add_argument("--examples", type=int, default=2**62, help="how many, at most")
    parser.add_argument("--seed", default="millstream", help="any text; the same text gives the same examples")
    parser.add_argument("--first", type=int, default=0, help="the number of the first example")
    return parser.parse_args(arguments)


def run(module: str, example: Example) -> int:
    """Run examples until the time is over or one is a finding; returns the exit code."""
    given = parse(module, sys.argv[1:])
    signal.signal(signal.SIGALRM, _too_long)
    deadline = time.monotonic() + given.seconds
    number, tried = given.first, 0
    while number < given.first + given.examples and time.monotonic() < deadline:
        signal.alarm(EXAMPLE_SECONDS_MAX)
        try:
            tried += example(random.Random(f"{given.seed}/{number}"))
            _check_memory()
        except Exception:
            traceback.print_exc()
            print(f"FINDING in example {number}. To run it again:", file=sys.stderr)
            print(f"    python -m {module} --seed {given.seed} --first {number} --examples 1", file=sys.stderr)
            return 1
        finally:
            signal.alarm(0)
        number += 1
    print(f"{module}: {number - given.first} examples, {tried} trials, no finding (seed {given.seed})")
    return 0


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Finding(f"the example takes longer than {EXAMPLE_SECONDS_MAX} s")


def _check_memory() -> None:
    # Not `ru_maxrss`, which begins with the size of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    if resident > RESIDENT_BYTES_MAX:
        raise Finding(f"the process grew to {resident / 1e6:.0f} MB")
