"""The Spark session of a driver: shared fairly by all pipelines, and the end of the process when its Java dies."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from millstream.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DIED: Final = 70
"""The exit code of a driver whose Java has died."""

_PACKAGES: Final = ("pyspark", "pyarrow", "deltalake")
_SETTINGS: Final = {
    "spark.scheduler.mode": "FAIR",
    "spark.log.level": "ERROR",
    # Half dead it would fail one pipeline after the other; whoever started the driver starts another one.
    "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError",
}


def what_is_missing() -> str:
    """What has to be installed before pipelines can be run, as a sentence; empty when all is there."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    return f'pipelines are run on Spark, and {", ".join(missing)} is not installed: pip install "millstream[spark]"'


def open_session(master: str, *, memory: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark; without a master it runs in this process, on all cores of the machine but one."""
    chosen = {**_SETTINGS, "spark.driver.memory": memory, **settings}
    spark = session("millstream-pipelines", master=master or None, settings=chosen)
    context: Any = spark.sparkContext
    process = context._gateway.proc
    threading.Thread(target=_end_with, args=(process,), name="watch Java", daemon=True).start()
    return spark


def _end_with(process: Any) -> None:
    process.wait()
    os._exit(DIED)
