"""Runs `millstream` commands for tests: in this process, which is fast, or in a separate one, as users do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from millstream.cli.app import call
from millstream_testing.fork_server import ForkedProcess, fork
from millstream_testing.server import Server

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
        os.environ.setdefault(TIMEOUT_VARIABLE, PATIENCE_S)
        return call_command([*map(str, arguments), "--brokers", self.brokers])

    def process(self, *arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> Outcome:
        return run_command([*map(str, arguments), "--brokers", self.brokers], stdin=stdin, cwd=cwd)


def call_command(arguments: Sequence[str]) -> Outcome:
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
    if not Server.forked:
        command = [sys.executable, "-m", "millstream.cli.main", *arguments]
        ended = subprocess.run(
            command, input=stdin, capture_output=True, env=environment, cwd=cwd, timeout=PROCESS_S_MAX, check=False
        )
        return Outcome(ended.returncode, ended.stdout.decode(errors="backslashreplace"), ended.stderr.decode())
    given, input_end = os.pipe()
    with TemporaryFile() as log, ThreadPoolExecutor(2) as pool:
        process = fork(arguments, log=log, cwd=cwd or Path.cwd(), environment=environment, stdin=given)
        os.close(given)
        pool.submit(_write, input_end, stdin)
        printed = pool.submit(_read, process)
        try:
            code = process.wait(PROCESS_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        log.seek(0)
        return Outcome(code, printed.result().decode(errors="backslashreplace"), log.read().decode())


def _write(end: int, data: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(end, "wb") as pipe:
        pipe.write(data)


def _read(process: ForkedProcess) -> bytes:
    if process.stdout is None:
        raise RuntimeError("the command was started without a pipe")
    with process.stdout as output:
        return output.read()
