"""Checks that the packages which pipelines need are installed, without importing them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Final

HOW: Final = "install them with `make spark`, or with pip install '.[spark]' in a clone"
"""How to install them."""
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "deltalake")


def missing_packages() -> str:
    """Return, as a sentence, what has to be installed to run pipelines; empty if nothing is missing."""
    importlib.invalidate_caches()  # it may have been installed since this process was started
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    named = ", ".join(missing)
    return f"pipelines run on Spark, and packages are missing ({named}); {HOW}"
