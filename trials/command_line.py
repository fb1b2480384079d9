"""What the command lines of most trials share: the seed, the folder, and lines with the time."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def trial_parser(name: str, documentation: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of every trial, described by the first line of the documentation."""
    parser = argparse.ArgumentParser(prog=f"python -m trials.{name}", description=documentation.splitlines()[0])
    parser.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    parser.add_argument("--keep", type=Path, help="keep the data, the logs and the histories in this folder")
    return parser


def seed_of(arguments: argparse.Namespace) -> int:
    seed: int | None = arguments.seed
    return random.randrange(2**32) if seed is None else seed


@contextmanager
def trial_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder to keep, or one that is removed; SIGTERM ends the trial, with all that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="millstream-trial-") as scratch:
        folder: Path = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def print_line(line: str) -> None:
    print(time.strftime("%H:%M:%S ") + line, flush=True)
