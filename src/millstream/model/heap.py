"""Memory that the allocator of C keeps although nothing is in it any more.

Columns that grow to many megabytes are moved as they do, and leave holes that other things do not fill. They stay
resident until the system is told that nobody needs them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Tell the system, which takes some milliseconds; does nothing where the C library cannot."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
