"""How kernels are compiled: at their first call, once for all processes if the machine code can be cached.

The cache is next to the source or in the user's home. A service with a read-only installation and no home has neither,
so each process compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(kernel: Kernel) -> Kernel:
    """Return a function that runs as machine code and lets other threads run meanwhile."""
    try:
        return cast("Kernel", njit(cache=True, nogil=True)(kernel))
    except RuntimeError:
        return cast("Kernel", njit(nogil=True)(kernel))
