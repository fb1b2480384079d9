"""Importing kio without what it would drag along.

Where hypothesis happens to be installed, kio imports it to offer test strategies for its types. Servers and commands
have no use for them; they cost a second and 50 MB at the start, and leave a folder where a command runs. So hypothesis
is kept out of sight meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any, cast

_UNWANTED = "hypothesis"


def import_lean_kio() -> None:
    """Import the root of kio's types; call it before anything else imports kio in a process of our own."""
    if _UNWANTED in sys.modules or "kio.static.primitive" in sys.modules:
        return
    modules = cast("dict[str, Any]", sys.modules)
    # Python's own sign for a module that must not be found.
    modules[_UNWANTED] = None
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del modules[_UNWANTED]
