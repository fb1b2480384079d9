"""Common parts of the fuzzers: numbered examples, each determined by the seed and its number alone.

An example is a function of a random source. Any exception that it raises is a finding, and so are an example that takes
too long and a process that grows too large. A finding prints how to run its example again, and the exit code is 1.
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
"""Runs one example and returns how many cases it tried."""


class Finding(Exception):
    """Something that must never happen."""


class LogCollector(logging.Handler):
    """Collects log lines with a traceback, which no client or disk fault may cause."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a line about an unexpected exception."""
        if record.exc_info is not None or record.levelno >= logging.CRITICAL or record.name == "asyncio":
            self.unexpected.append(logging.Formatter().format(record))

    def check(self) -> None:
        if self.unexpected:
            collected, self.unexpected = self.unexpected, []
            raise Finding("unexpected log lines:\n" + "\n".join(collected))


def collect_logs() -> LogCollector:
    """Collect log lines instead of printing them."""
    collected = LogCollector()
    logging.basicConfig(handlers=[collected], level=logging.WARNING, force=True)
    return collected


def parse(module: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a fuzzer."""
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--seconds", type=float, default=60.0, help="the maximum duration (default: 60)")
    parser.add_argument("--examples", type=int, default=2**62, help="the maximum number of examples")
    parser.add_argument("--seed", default="millstream", help="any text; the same text produces the same examples")
    parser.add_argument("--first", type=int, default=0, help="the number of the first example")
    return parser.parse_args(arguments)


def run(module: str, example: Example) -> int:
    """Run examples until the time is up or one is a finding; return the exit code."""
    options = parse(module, sys.argv[1:])
    signal.signal(signal.SIGALRM, _too_long)
    deadline = time.monotonic() + options.seconds
    number, tried = options.first, 0
    while number < options.first + options.examples and time.monotonic() < deadline:
        signal.alarm(EXAMPLE_SECONDS_MAX)
        try:
            tried += example(random.Random(f"{options.seed}/{number}"))
            _check_memory()
        except Exception:
            traceback.print_exc()
            print(f"FINDING in example {number}. To run it again:", file=sys.stderr)
            print(f"    python -m {module} --seed {options.seed} --first {number} --examples 1", file=sys.stderr)
            return 1
        finally:
            signal.alarm(0)
        number += 1
    print(f"{module}: {number - options.first} examples, {tried} trials, no finding (seed {options.seed})")
    return 0


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Finding(f"the example takes longer than {EXAMPLE_SECONDS_MAX} s")


def _check_memory() -> None:
    # Not `ru_maxrss`, which includes the size of the parent process before exec.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    if resident > RESIDENT_BYTES_MAX:
        raise Finding(f"the process grew to {resident / 1e6:.0f} MB")
