"""Lake tables that a statement joins with: Delta tables by version, Parquet folders as Spark reads them.

A Delta table is read again when it has a new version, which is looked for every few seconds; all rows of a batch are
joined with the same version.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from millstream.core.errors import InvalidSetting

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from millstream.pipelines.lake.storage import Storage

LOOK_S: Final = 5.0
"""How often a new version is looked for."""

_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")
"""What Spark says of a folder that is missing, or empty."""

BROUGHT_BYTES_MAX: Final = 64 * 1024 * 1024
"""A table up to this size is brought to the messages, which stay in their order; a larger one is shuffled with them."""


class LakeView:
    """One table, as a view of a session."""

    def __init__(self, spark: SparkSession, name: str, url: str) -> None:
        self._spark = spark
        self._name = name
        self._url = url
        self._storage: Storage | None = None
        self._table: DeltaTable | None = None
        self._version: int | None = None
        self._looked = 0.0
        self._size_bytes = 0
        self._frame: DataFrame | None = None

    def refresh(self) -> None:
        """Have the view show the table as it is now, or was a few seconds ago."""
        now = time.monotonic()
        if self._frame is not None and now - self._looked < LOOK_S:
            return
        self._looked = now
        frame = self._delta() if self._is_delta() else self._parquet()
        if frame is not None:
            self.close()
            self._frame = frame
            shown = frame.hint("broadcast") if self._size_bytes <= BROUGHT_BYTES_MAX else frame
            shown.createOrReplaceTempView(f"`{self._name}`")

    def has_changed(self) -> bool:
        """Whether there is something newer than what the view shows."""
        if self._is_delta():
            return self._newest().version() != self._version
        return self._frame is None or sorted(self._parquet().inputFiles()) != sorted(self._frame.inputFiles())

    def close(self) -> None:
        """Let go of what was read."""
        if self._frame is not None:
            self._frame.unpersist()
            self._frame = None

    def _is_delta(self) -> bool:
        from deltalake import DeltaTable

        if self._table is not None:
            return True
        storage = self._reached()
        return DeltaTable.is_deltatable(storage.url, dict(storage.options))

    def _reached(self) -> Storage:
        from millstream.pipelines.lake.storage import Storage

        if self._storage is None:
            self._storage = Storage.reached_from_here(self._url)
        return self._storage

    def _delta(self) -> DataFrame | None:
        from millstream.pipelines.jobs.lake_rows import rows_of

        table = self._newest()
        if table.version() == self._version and self._frame is not None:
            return None
        self._version = table.version()
        # Spark holds it, in memory or on disk, so it is read once for each version.
        frame, self._size_bytes = rows_of(self._spark, self._reached(), table)
        return frame.persist()

    def _newest(self) -> DeltaTable:
        if self._table is None:
            self._table = self._reached().table()
        else:
            self._table.update_incremental()
        return self._table

    def _parquet(self) -> DataFrame:
        from pyspark.errors import AnalysisException

        if self._reached().folder is None:
            # Spark itself has nothing that reads object stores.
            raise self._missing("no Delta table")
        try:
            # Files that were written later may have more columns.
            frame = self._spark.read.option("mergeSchema", "true").parquet(self._url)
        except AnalysisException as error:
            if error.getCondition() in _NOT_THERE:
                # It may be landed only now. Whoever waits for a topic waits for a table, too.
                raise self._missing("neither a Delta table nor Parquet files") from None
            reason = str(error).partition("\n")[0]
            raise InvalidSetting(f"the table {self._name!r} cannot be read at {self._url}: {reason}") from None
        execution: Any = frame._jdf.queryExecution()
        # A number of Python or one of Scala, as versions of py4j have it.
        self._size_bytes = int(str(execution.optimizedPlan().stats().sizeInBytes()))
        return frame

    def _missing(self, what: str) -> FileNotFoundError:
        return FileNotFoundError(f"there is no table {self._name!r} at {self._url} yet: {what}")
