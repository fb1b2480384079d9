"""Starts the Python workers of a Spark session, as `spark.python.daemon.module`.

It is PySpark's own daemon, but all of its workers end silently when Spark disconnects from them.
"""

from __future__ import annotations

from pyspark import daemon

from millstream.pipelines.source.spark_errors import hide_disconnects

if __name__ == "__main__":
    hide_disconnects(daemon)
    daemon.manager()
