"""A Spark session that is ready for topics: a Java that fits, this Python, and settings that were measured to help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from millstream.spark.java import use_fitting_java

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


def session(
    name: str = "millstream", *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Make a session, or give the one that there is; `settings` win over those made here.

    Without a master it runs in this process on all cores but one, since a broker may share the machine.
    """
    use_fitting_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    local = f"local[{max(1, (os.cpu_count() or 2) - 1)}]"
    builder = SparkSession.builder.appName(name).master(master or local)
    chosen = {**_SETTINGS, **(_ON_THIS_MACHINE if master is None else {}), **(settings or {})}
    for key, value in chosen.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
