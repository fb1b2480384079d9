"""The processes of a server and its drivers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


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
