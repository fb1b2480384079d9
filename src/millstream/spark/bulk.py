"""Bulk jobs without SQL: the records of ranges, fetched and processed as Arrow outside the JVM.

ranges = spark.read.format("millstream").option("subscribe", "orders").option("mode", "ranges").load()

def count(batches):
    for batch in records(batches, "localhost:9092", columns=("value",)):
        yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

ranges.mapInArrow(count, "rows long")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from millstream.pipelines.source.access import Access, may_read
from millstream.pipelines.source.options import BROKERS, DEFAULT_BROKERS, read_options
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import default_schema, shape_of


def task_access(
    brokers: str = DEFAULT_BROKERS, topics: Sequence[str] = (), *, options: Mapping[str, str] | None = None
) -> Access:
    """Create credentials for the tasks of a bulk job, for the topics that they read; call it on the driver.

    `options` authenticate the driver like those of `format("millstream")`; without them, the environment does.
    """
    chosen = read_options({BROKERS: brokers, "subscribe": ",".join(topics), **(options or {})})
    return chosen.access.for_tasks(chosen.brokers, may_read(chosen.subscribe))


def records(
    batches: Iterable[pa.RecordBatch],
    brokers: str = DEFAULT_BROKERS,
    *,
    columns: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    access: Access | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of the ranges in `batches`, in order, with all columns or the named ones.

    `options` are reading options such as `isolation`, `filter`, `valueFormat` and `failOnDataLoss`. `access` is
    the result of `task_access`, needed where brokers authenticate their clients.
    """
    reader_options = {BROKERS: brokers, "columns": ",".join(columns), **(options or {})}
    for batch in batches:
        for row in batch.to_pylist():
            chosen = read_options({**reader_options, "subscribe": row["topic"]}, access)
            offset_range = Range(row["topic"], row["partition"], row["start"], row["end"])
            yield from read_range(offset_range, chosen, shape_of(default_schema(chosen), chosen))
