"""What has to be ended in order when the interpreter ends, if the program has not done so.

The `atexit` module comes too late for that: by then no thread pool takes work any more, and closing a log or draining a
subscription needs one. `threading` has the right moment, for which thread pools themselves use it. Where a version of
Python does not have it, things end as if the process was killed, which loses nothing that was acknowledged.
"""

from __future__ import annotations

# Imported before anything is registered: what was registered last is called first, and thread pools come after us.
import concurrent.futures.thread  # noqa: F401
import os
import threading
import weakref
from contextlib import suppress
from typing import Protocol


class ClosesAtExit(Protocol):
    """Something with an end that can be waited for."""

    def close_at_exit(self) -> None:
        """End in order, within a bounded time; called from the main thread, and only in the process that began."""


_begun: list[tuple[int, weakref.ref[ClosesAtExit]]] = []
_registered: set[int] = set()


def close_before_exit(thing: ClosesAtExit) -> None:
    """Have `thing` ended when the interpreter ends, if it still exists then; what began last ends first."""
    if os.getpid() not in _registered:
        _registered.add(os.getpid())
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_end_everything)
    _begun[:] = [(pid, known) for pid, known in _begun if known() is not None]
    _begun.append((os.getpid(), weakref.ref(thing)))


def _end_everything() -> None:
    for pid, known in reversed(_begun):
        thing = known()
        # A process that was forked off has the objects, but not the threads behind them.
        if thing is not None and pid == os.getpid():
            with suppress(Exception):
                thing.close_at_exit()
