"""Runs `millstream` commands for tests: in this process, which is fast, or in a separate one, as users do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.cli.app import call

PROCESS_S_MAX = 150.0
TIMEOUT_VARIABLE = "MILLSTREAM_TIMEOUT"
PATIENCE_S = "50"
"""How long commands wait for a broker here: a machine that runs many tests may be slow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The output, line by line."""
        return self.out.splitlines()

    @property
    def document(self) -> Any:
        """The output with `--json`."""
        if not self.out:
            raise AssertionError(f"the command printed nothing; exit code {self.code}: {self.err}")
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        """The output with `--json`, one document per line."""
        return [json.loads(line) for line in self.lines]


class CommandLine:
    """Runs commands against one broker."""

    def __init__(self, brokers: str) -> None:
        self.brokers = brokers

    def __call__(self, *arguments: object) -> Outcome:
        """Run a command in this process."""
        os.environ.setdefault(TIMEOUT_VARIABLE, PATIENCE_S)
        return call_command([*map(str, arguments), "--brokers", self.brokers])

    def process(self, *arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> Outcome:
        """Run a command in its own process."""
        return run_command([*map(str, arguments), "--brokers", self.brokers], stdin=stdin, cwd=cwd)


def call_command(arguments: Sequence[str]) -> Outcome:
    """Run one command in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = call(list(arguments))
    out.flush()
    printed = out.buffer.getvalue() if isinstance(out.buffer, io.BytesIO) else b""
    return Outcome(int(code), printed.decode(errors="backslashreplace"), err.getvalue())


def run_command(arguments: Sequence[str], *, stdin: bytes = b"", cwd: Path | None = None) -> Outcome:
    """Run one command in its own process, without the caller's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    environment[TIMEOUT_VARIABLE] = PATIENCE_S
    ended = subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        env=environment,
        cwd=cwd,
        timeout=PROCESS_S_MAX,
        check=False,
    )
    return Outcome(ended.returncode, ended.stdout.decode(errors="backslashreplace"), ended.stderr.decode())
