"""The rows of a Delta table for Spark: a small one is handed over, of a large one tasks read the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HANDED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Up to so many bytes of files go through the driver, which is faster than to start tasks for them."""
_TASK_BYTES: Final = 128 * 1024 * 1024


class TableTasks:
    """The function of `mapInArrow`: it gets numbers of tasks, and gives the rows of their files."""

    def __init__(self, table: DeltaTable, types: pa.Schema, tasks: Sequence[frozenset[str]]) -> None:
        self._url = table.table_uri
        self._version = table.version()
        self._types = types
        self._tasks = tasks
        # Tasks on other machines reach an object store as this process does.
        self._options = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the files of the tasks whose numbers come in."""
        table = DeltaTable(self._url, version=self._version, storage_options=self._options)
        whole = table.to_pyarrow_dataset()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                mine = [fragment for fragment in whole.get_fragments() if fragment.path in self._tasks[number]]
                rows = pads.FileSystemDataset(mine, whole.schema, whole.format, whole.filesystem)
                yield from (found.cast(self._types) for found in rows.to_batches())


def rows_of(spark: SparkSession, table: DeltaTable) -> tuple[DataFrame, int]:
    """The rows of a table at the version that its handle has, and about how many bytes they are."""
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
    reading = TableTasks(table, types, [frozenset(paths[first::count]) for first in range(count)])
    return spark.range(0, count, 1, count).mapInArrow(reading, schema), size
