"""Processes of tests: one that exits on its own or is killed if the test fails, and whether one runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process and wait for its end; kill it if the test fails, which otherwise might wait for it forever."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int, part: str) -> list[int]:
    """Return the children of a process whose command line contains this text."""
    with suppress(OSError):
        started = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in started if part in _command_line(child)]
    return []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
