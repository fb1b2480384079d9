"""Memory that the allocator of C keeps although nothing is in it any more.

Columns that grow to many megabytes are moved as they do, and leave holes that other things do not fill. They stay
resident until the system is told that nobody needs them.
"""

from __future__ import annotations

import asyncio
import ctypes
from functools import cache
from threading import Event
from typing import Any, Final

_is_ours: Final = Event()


def take_charge() -> None:
    """Say that this process is the broker's own. In that of somebody else memory is left as its program wants it."""
    _is_ours.set()


def give_back_in(seconds: float) -> None:
    """Tell the system later, beside the loop, if the process is the broker's."""
    if _is_ours.is_set():
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, loop.run_in_executor, None, give_back)


def give_back() -> None:
    """Tell the system, which takes some milliseconds; does nothing where the C library cannot."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
