"""Keeps a Spark worker's garbage collector away from modules, which are loaded once and stay.

Spark's workers collect garbage after every task, and a collection visits everything that a process holds. This package
doubles that, several times in each batch of a stream.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

_FORKING: Final = ("pyspark.daemon", "millstream.spark.daemon")
"""The modules that Spark's workers are forked from and run as."""

_spared = 0


def freeze_worker_heap() -> None:
    """Exclude existing objects from later collections; call this after the work of a task.

    It has an effect only in Spark's workers, and only if modules were loaded since the last call.
    """
    global _spared
    if len(sys.modules) == _spared or not _is_worker():
        return
    gc.collect()
    gc.freeze()
    _spared = len(sys.modules)


def _is_worker() -> bool:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") in _FORKING
