"""Writes DataFrames to topics. All rows of a batch become visible together, exactly once, despite failures.

Every attempt at a task writes in its own transaction, which it prepares durably; the driver's commit makes the
whole batch visible with one record at the coordinator, and ends every other attempt. Committed batches are identified
by query and number, so a batch that Spark repeats is not written twice.

A broker without this commit, such as Apache Kafka, gets the rows at least once, and a warning is logged.

Spark creates a writer on the driver for every batch, so what only tasks and commits need is imported there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from urllib.parse import quote
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from millstream.core.errors import InvalidSetting
from millstream.core.setting import suggestion
from millstream.pipelines.source.options import WriteOptions, sample_size
from millstream.pipelines.source.spark_errors import without_traceback

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.pipelines.source.batch_commit import Batch

_TEXT: Final = (StringType, BinaryType, NullType)
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "key": _TEXT,
    "value": _TEXT,
    "topic": (StringType,),
    "partition": (IntegerType, ShortType, LongType, NullType),
    "headers": (ArrayType, NullType),
    "timestamp": (TimestampType, NullType),
}


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raise `InvalidSetting` unless rows of this schema can be written."""
    for field in schema.fields:
        if field.name not in _COLUMNS:
            meant = suggestion(field.name, _COLUMNS) or f"; a message has: {', '.join(_COLUMNS)}"
            raise InvalidSetting(f"column {field.name!r} is not part of a message{meant}; put data into `value`")
        if field.name == "value" and options.schema is not None:
            if not isinstance(field.dataType, StructType):
                raise InvalidSetting("the option schema needs a column `value` that is a struct, such as struct(*)")
            continue
        if not isinstance(field.dataType, _COLUMNS[field.name]):
            hint = (
                "; make text of it first, for example with to_json(struct(*))" if field.name in ("key", "value") else ""
            )
            raise InvalidSetting(
                f"column {field.name!r} is {field.dataType.simpleString()}, which cannot be written{hint}"
            )
        if field.name == "headers" and not _is_headers(field.dataType):
            raise InvalidSetting(
                f"column 'headers' is {field.dataType.simpleString()}; it must be array<struct<key:string,"
                "value:binary>>, such as array(named_struct('key', 'source', 'value', cast('shop' AS BINARY)))"
            )
    if "value" not in schema.names:
        raise InvalidSetting(f"a message needs a column `value`; there are: {', '.join(schema.names)}")
    if options.topic is None and "topic" not in schema.names:
        raise InvalidSetting("rows have no target; set the option topic, or add a column `topic`")


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return isinstance(kind, NullType)
    element = kind.elementType
    return element.names == ["key", "value"] and all(isinstance(field.dataType, _TEXT) for field in element.fields)


class TopicWriter(DataSourceArrowWriter):
    """Writes one DataFrame. Created on the driver; copies of the instance write in the tasks and commit."""

    def __init__(self, options: WriteOptions, *, left_out: Collection[str] = ()) -> None:
        """`left_out` has the columns that are not written."""
        self._left_out = left_out
        # Without an application id a write cannot be recognized: nothing partial becomes visible, but a repeated job
        # writes twice.
        self._query = f"batch-{uuid4()}" if options.application is None else quote(options.application, safe="")
        self._number = 0 if options.version is None else options.version
        self._run = uuid4().hex[:12]
        self._options = options.for_tasks(self._query)

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from millstream.pipelines.source.batch_commit import Batch
        from millstream.pipelines.source.row_producer import write_part

        batch = Batch(self._query, self._number, self._run)
        if self._left_out:
            iterator = _without(iterator, self._left_out)
        if sample_size() is not None:
            return _show_rows(self._options, batch, iterator)
        return write_part(self._options, batch, iterator)

    @without_traceback
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from millstream.pipelines.source.batch_commit import Batch, commit_parts

        if sample_size() is not None:
            return
        commit_parts(self._options, messages, Batch(self._query, self._number, self._run))

    @without_traceback
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort everything, including attempts that Spark has not stopped yet."""
        from millstream.pipelines.source.batch_commit import Batch, abort_batch

        abort_batch(self._options, Batch(self._query, self._number, self._run))


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream; Spark creates one on the driver for each batch, and another to commit it."""

    def __init__(self, options: WriteOptions) -> None:
        if options.source is not None:
            raise InvalidSetting("option sourceOffsets is for batch writes: a stream tracks its own progress")
        self._options = options.for_tasks("")
        self._stream = stream_name(options.checkpoint)

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from millstream.pipelines.source.batch_commit import Batch
        from millstream.pipelines.source.row_producer import write_part

        context = TaskContext.get()
        if context is None:
            raise InvalidSetting("a stream can only be written by a task of Spark")
        query, number = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if not query or number is None:
            raise InvalidSetting("Spark does not identify the query and batch, so exactly-once writing is impossible")
        # The jobs of a stream form a group named after its run.
        run = (context.getLocalProperty("spark.jobGroup.id") or "").replace("-", "")
        batch = Batch(query, int(number), run, self._stream)
        if sample_size() is not None:
            return _show_rows(self._options, batch, iterator)
        return write_part(self._options, batch, iterator)

    @without_traceback
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        from millstream.pipelines.source.batch_commit import commit_parts

        commit_parts(self._options, messages)

    @without_traceback
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Abort every attempt at the batch, including those that this run still starts."""
        from millstream.pipelines.source.batch_commit import abort_stream

        abort_stream(self._options, self._stream, batchId, messages)


def _without(batches: Iterator[pa.RecordBatch], left_out: Collection[str]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.select([name for name in batch.schema.names if name not in left_out])


def _show_rows(options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    """Print the first rows of a task of a dry run instead of writing them."""
    from millstream.pipelines.source.batch_commit import Part

    rows = 0
    for given in iterator:
        for row in given.slice(0, max(0, _SHOWN_MAX - rows)).to_pylist():
            shown = {name: _as_text(value) for name, value in row.items() if value is not None}
            print(f"dry run: would write to {row.get('topic') or options.topic}: {shown}", file=sys.stderr)
        rows += given.num_rows
    if rows > _SHOWN_MAX:
        print(f"dry run: and {rows - _SHOWN_MAX} more rows of this task", file=sys.stderr)
    return Part(batch, rows, None)


_SHOWN_MAX: Final = 5


def _as_text(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def stream_name(checkpoint: str | None) -> str:
    """Return a name for a stream that is the same wherever its driver creates a writer; empty if nothing identifies it.

    A checkpoint belongs to one query. A relative location may mean another place on another machine or in another
    folder.
    """
    if checkpoint is None:
        return ""
    is_whole = os.path.isabs(checkpoint) or ":" in checkpoint.partition("/")[0]
    place = checkpoint if is_whole else os.path.abspath(checkpoint)
    return sha256(f"{socket.gethostname()}\n{place}".encode()).hexdigest()[:16]
