"""Whether everything is installed that pipelines need; nothing of it is imported for that."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Final

HOW: Final = "install it by `make spark`, or by pip install '.[spark]' in a clone"
"""What brings it."""
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "deltalake")


def missing_packages() -> str:
    """What has to be installed before pipelines can be run, as a sentence; empty when all is there."""
    importlib.invalidate_caches()  # it may have been installed since this process was started
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    named = ", ".join(missing)
    return f"pipelines run on Spark, and what they need is not there ({named}); {HOW}"
