"""How kernels are compiled: at their first call, once for all processes where the machine code can be kept.

It is kept next to the source or in the user's home. A service whose installation is read-only and whose user has no
home has neither, and each process compiles.
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
