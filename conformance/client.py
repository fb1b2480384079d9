"""A client's program: how it is built and run, and the tools that this needs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BUILD_S_MAX = 600.0
HERE = Path(__file__).parent
BUILT = HERE.parent / "build" / "conformance"
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Unavailable(Exception):
    """A tool or a registry that the client needs is not there; the message says which."""


class BuildFailed(Exception):
    """The program does not build although everything is there; the message has the builder's words."""


@dataclass(frozen=True, slots=True)
class Program:
    """A built program: the arguments for a broker follow its command."""

    command: Sequence[str]
    log: Path


class Client(Protocol):
    @property
    def name(self) -> str:
        """The name of the client in the report."""

    def build(self) -> Program:
        """Fetch the client and build the program, or say why that is not possible."""

    def arguments(self, address: str, served: str, only: str, registry: str) -> Sequence[str]:
        """Return the arguments for the checks whose names contain `only`; `registry` may be empty."""


def run_builder(command: Sequence[str], *, folder: Path, offline_marks: Sequence[str]) -> None:
    """Run a build tool; words of its output that speak of an unreachable registry make that the reason."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=BUILD_S_MAX, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not exit within {BUILD_S_MAX:g} s") from None
    if done.returncode == 0:
        return
    output = _COLOUR.sub("", done.stdout + done.stderr)
    for line in output.splitlines():
        if any(mark in line for mark in offline_marks):
            raise Unavailable(f"its packages could not be fetched: {line.strip()[:300]}")
    raise BuildFailed(f"{' '.join(command)} exited with code {done.returncode}:\n{output[-4000:]}")
