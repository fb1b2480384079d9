"""The processes of a server and its drivers, and waiting for what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

WAIT_S: Final = 900.0
LOOK_S: Final = 0.05


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is so; what it is."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(LOOK_S)
    raise AssertionError(f"not so within {WAIT_S:g} s")


def children(pid: int, part: str) -> list[int]:
    """The processes that one has started, and whose command line has this part."""
    with suppress(OSError):
        started = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in started if part in _command_line(child)]
    return []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
