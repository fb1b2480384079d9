"""Closes connections and brokers in order when the interpreter exits, if the program has not done so.

The `atexit` module runs too late: by then no thread pool accepts work, which closing a log or draining a subscription
needs. `threading` has a hook at the right time, which thread pools use themselves. On Python versions without it,
everything ends as if the process was killed, which loses nothing that was acknowledged.
"""

from __future__ import annotations

# Imported before anything is registered: hooks run in reverse order, and thread pools must close after us.
import concurrent.futures.thread  # noqa: F401
import os
import threading
import weakref
from contextlib import suppress
from typing import Protocol


class ClosesAtExit(Protocol):
    """Something that can be closed within a bounded time."""

    def close_at_exit(self) -> None:
        """Close in order, within a bounded time; called from the main thread of the process that registered it."""


_begun: list[tuple[int, weakref.ref[ClosesAtExit]]] = []
_registered: set[int] = set()


def close_before_exit(thing: ClosesAtExit) -> None:
    """Close `thing` when the interpreter exits, if it still exists; the last registered is closed first."""
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
        # A forked process has the objects, but not their threads.
        if thing is not None and pid == os.getpid():
            with suppress(Exception):
                thing.close_at_exit()
