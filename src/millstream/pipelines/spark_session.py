"""The Spark session of a driver: shared fairly by all pipelines, and the end of the process when its Java dies."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DIED: Final = 70
"""The exit code of a driver whose Java has died."""

_CLOSE_S: Final = 4.0
_closing = threading.Event()

_SETTINGS: Final = {
    "spark.scheduler.mode": "FAIR",
    "spark.log.level": "ERROR",
    # Half dead it would fail one pipeline after the other; whoever started the driver starts another one.
    "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError",
}


def open_session(master: str, *, memory: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark; without a master it runs in this process, on all cores of the machine but one."""
    chosen = {**_SETTINGS, "spark.driver.memory": memory, **settings}
    spark = session("millstream-pipelines", master=master or None, settings=chosen)
    threading.Thread(target=_end_with, args=(_java_of(spark),), name="watch Java", daemon=True).start()
    return spark


def close_session(spark: SparkSession) -> None:
    """End Spark; Java stops by itself when its standard input ends, and has not long to do so."""
    _closing.set()
    java = _java_of(spark)
    java.stdin.close()
    try:
        java.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        java.kill()


def _java_of(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._gateway.proc


def _end_with(java: Any) -> None:
    java.wait()
    if not _closing.is_set():
        os._exit(DIED)
