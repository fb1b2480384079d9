"""A Spark session that is ready for topics: a Java that fits, this Python, and settings that were measured to help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.pipelines.source.java import use_fitting_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS: Final = {
    # What passes between the JVM and Python goes over a socket of the file system, not over loopback.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_ON_THIS_MACHINE: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_SUBMITTED: Final = {"PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"}
"""Variables that are set where spark-submit was called with arguments of the user."""
_FILLED_IN: Final = {("spark.master", "local[*]"), ("spark.ui.showConsoleProgress", "true")}
"""What Spark's launcher puts into the configuration of a program that was not submitted."""


def session(
    name: str | None = None, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Create a session, or return the one of this process.

    Arguments override the configuration of Spark (spark-submit, spark-defaults.conf), which overrides the defaults of
    this function. Without any master, Spark runs in this process on all cores but one: a broker may share the machine.
    """
    use_fitting_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    named = {"spark.app.name": name, "spark.master": master}
    asked = {key: value for key, value in named.items() if value is not None} | dict(settings or {})
    chosen = dict(asked)
    if SparkContext._active_spark_context is None:
        # Memory and options of Java take effect only when it starts, so it starts with what was asked for.
        SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(asked.items())))
        given = dict(SparkConf().getAll())
        if not _SUBMITTED & os.environ.keys():
            given = dict(given.items() - _FILLED_IN)
            chosen.setdefault("spark.app.name", "millstream")
        is_local = "spark.master" not in given | asked
        defaults = {**_SETTINGS, **(_local() if is_local else {})}
        chosen |= {key: value for key, value in defaults.items() if key not in given | asked}
    return SparkSession.builder.config(map=dict[str, Any](chosen)).getOrCreate()


def _local() -> dict[str, str]:
    """Settings for a Spark inside this process that leaves a core to others."""
    return {"spark.master": f"local[{max(1, (os.cpu_count() or 2) - 1)}]", **_ON_THIS_MACHINE}
