"""Keeps the garbage collector of a Spark worker away from what is loaded once and stays.

Spark's workers collect garbage after every task, and a collection looks at everything that a process holds. What this
package brings with it doubles that, which a stream of small batches pays for several times in each batch.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

_FORKING: Final = "pyspark.daemon"
"""What Spark's workers are forked from, and the name under which they run."""

_spared = 0


def freeze_worker_heap() -> None:
    """Have later collections pass over what is there now; to be called when the work of a task is done.

    It does something in Spark's workers only, and only when modules were loaded since the last time.
    """
    global _spared
    if len(sys.modules) == _spared or not _is_worker():
        return
    gc.collect()
    gc.freeze()
    _spared = len(sys.modules)


def _is_worker() -> bool:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") == _FORKING
