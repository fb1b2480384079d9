"""Imports kio without its optional dependencies.

If hypothesis is installed, kio imports it to offer test strategies for its types. Servers and commands do not need
them; they cost a second and 50 MB at the start, and create a folder in the working directory. So hypothesis is hidden
during the import.
"""

from __future__ import annotations

import sys
from typing import Any, cast

_UNWANTED = "hypothesis"


def import_lean_kio() -> None:
    """Import the root of kio's types; call it before anything else in the process imports kio."""
    if _UNWANTED in sys.modules or "kio.static.primitive" in sys.modules:
        return
    modules = cast("dict[str, Any]", sys.modules)
    # Python's marker for a module that must not be found.
    modules[_UNWANTED] = None
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del modules[_UNWANTED]
