"""The rows of a Delta table for Spark: a small one is handed over, of a large one tasks read the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import DeltaTable

from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.runtime.fault import Marked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HANDED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Up to so many bytes of files go through the driver, which is faster than to start tasks for them."""
_TASK_BYTES: Final = 128 * 1024 * 1024


class TableTasks:
    """The function of `mapInArrow`: it gets numbers of tasks, and gives the rows of their files."""

    def __init__(self, storage: Storage, version: int, types: pa.Schema, tasks: Sequence[frozenset[str]]) -> None:
        self._storage = storage
        self._version = version
        self._types = types
        self._tasks = tasks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the files of the tasks whose numbers come in."""
        whole = self._storage.table(self._version).to_pyarrow_dataset()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                mine = [fragment for fragment in whole.get_fragments() if fragment.path in self._tasks[number]]
                rows = pads.FileSystemDataset(mine, whole.schema, whole.format, whole.filesystem)
                yield from (found.cast(self._types) for found in rows.to_batches())


def rows_of(spark: SparkSession, storage: Storage, table: DeltaTable) -> tuple[DataFrame, int]:
    """The rows of a table of a storage at the version that its handle has, and about how many bytes they are."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    size = sum(pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist())
    if size <= HANDED_BYTES_MAX:
        rows = table.to_pyarrow_table()
        schema = from_arrow_schema(rows.schema)
        # A table without files has columns without a piece, which Spark does not take.
        frame = spark.createDataFrame(rows) if rows.num_rows else spark.createDataFrame([], schema)
        return frame, rows.nbytes
    dataset = table.to_pyarrow_dataset()
    paths = [fragment.path for fragment in dataset.get_fragments()]
    count = min(len(paths), max(spark.sparkContext.defaultParallelism, ceil(size / _TASK_BYTES)))
    schema = from_arrow_schema(dataset.schema)
    types = to_arrow_schema(schema, timezone="UTC")
    reading = TableTasks(storage, table.version(), types, [frozenset(paths[first::count]) for first in range(count)])
    return _without_lineage(spark.range(0, count, 1, count).mapInArrow(Marked(reading), schema)), size


def _without_lineage(frame: DataFrame) -> DataFrame:
    """The same rows with a plan that does not say how they are made: views of topics are known by that."""
    from pyspark.sql import DataFrame

    spark: Any = frame.sparkSession
    execution: Any = frame._jdf.queryExecution()
    rows = spark._jsparkSession.internalCreateDataFrame(execution.toRdd(), execution.analyzed().schema(), False)
    return DataFrame(rows, spark)
