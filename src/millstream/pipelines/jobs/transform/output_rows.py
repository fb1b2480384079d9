"""The rows of a statement as messages.

A statement with a column `value` writes messages directly: `value`, and `key`, `headers`, `partition` and `timestamp`
if it has them. Otherwise the columns are the fields of a JSON object in the value, or of what a schema encodes, except
`key`, which is the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.core.errors import InvalidSetting
from millstream.pipelines.jobs.batch_loop import PART_SCHEMA, as_row, batch_of_job
from millstream.pipelines.runtime.fault import MarkedTask
from millstream.pipelines.source.batch_commit import Batch
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.row_producer import write_part
from millstream.pipelines.source.writer import check_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_AS_THEY_ARE = ("binary", "string", "void")


def as_messages(frame: DataFrame, options: WriteOptions) -> DataFrame:
    """Convert a frame to the columns of messages; raise `InvalidSetting` if it cannot be written."""
    twice = [name for name in frame.columns if [one.lower() for one in frame.columns].count(name.lower()) > 1]
    if twice:
        raise InvalidSetting(f"the statement has two columns {twice[0]!r}; rename one of them with AS")
    if "value" not in frame.columns:
        from pyspark.sql import functions

        kinds = dict(frame.dtypes)
        names = [name for name in frame.columns if name != "key"]
        if not names:
            raise InvalidSetting("the statement selects only a key; add a column `value`, or others")
        row = functions.struct(*(f"`{name}`" for name in names))
        columns = [(row if options.schema is not None else functions.to_json(row)).alias("value")]
        if "key" in frame.columns:
            key = functions.col("key")
            columns.insert(0, key if kinds["key"] in _AS_THEY_ARE else key.cast("string").alias("key"))
        frame = frame.select(*columns)
    check_columns(frame.schema, options)
    return frame


def written(frame: DataFrame, options: WriteOptions, batch: Batch) -> DataFrame:
    """Return the parts that the tasks of a job write, as rows."""
    return frame.mapInArrow(MarkedTask(_writing(options.for_tasks(batch.query), lambda: batch)), PART_SCHEMA)


def written_by_job(frame: DataFrame, options: WriteOptions) -> DataFrame:
    """Return the written parts for the batch that each job passes to its tasks; the options are those of tasks."""
    return frame.mapInArrow(MarkedTask(_writing(options, lambda: batch_of_job().batch)), PART_SCHEMA)


def _writing(
    options: WriteOptions, batch: Callable[[], Batch]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from as_row(write_part(options, batch(), iter(batches)))

    return write
