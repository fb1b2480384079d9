"""DataFrames to topics. All rows of a batch become visible together, once, whatever fails on the way.

Every attempt at a task writes in a transaction of its own and ends with a durable promise; the driver's commit makes
all of a batch visible with one record at the coordinator, which also ends every other attempt. What was committed
before is known by the query and the number of its batch, so a batch that Spark repeats is not written twice.

A broker that does not know this commit, such as Apache Kafka, gets the rows at least once, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
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

from millstream.model.errors import InvalidSetting, MillstreamError
from millstream.model.ids import ProducerId
from millstream.model.nearest import suggestion
from millstream.spark.link import Link, link_to
from millstream.spark.options import WriteOptions
from millstream.spark.producer import RowProducer
from millstream.wire.transactions import PREPARE_KEY, TransactionalProducer, Transactions

_logger = logging.getLogger(__name__)

TASK_MS_MAX: Final = 15 * 60 * 1000
"""How long one task may write: the longest transaction that a broker takes unless it is told otherwise."""

_TEXT: Final = (StringType, BinaryType, NullType)
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "key": _TEXT,
    "value": _TEXT,
    "topic": (StringType,),
    "partition": (IntegerType, ShortType, LongType, NullType),
    "headers": (ArrayType, NullType),
    "timestamp": (TimestampType, NullType),
}


@dataclass(frozen=True)
class Part(WriterCommitMessage):
    """What one task wrote, for the driver: the member of the batch that is to be committed, if there is one."""

    query: str
    batch: int
    rows: int
    member: TransactionalProducer | None


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raise `InvalidSetting` unless rows of this schema can be written."""
    for field in schema.fields:
        if field.name not in _COLUMNS:
            meant = suggestion(field.name, _COLUMNS) or f"; a message has: {', '.join(_COLUMNS)}"
            raise InvalidSetting(f"column {field.name!r} is not part of a message{meant}; put data into `value`")
        if not isinstance(field.dataType, _COLUMNS[field.name]):
            hint = (
                "; make text of it first, for example with to_json(struct(*))" if field.name in ("key", "value") else ""
            )
            raise InvalidSetting(
                f"column {field.name!r} is {field.dataType.simpleString()}, which cannot be written{hint}"
            )
    if "value" not in schema.names:
        raise InvalidSetting(f"a message needs a column `value`; there are: {', '.join(schema.names)}")
    if options.topic is None and "topic" not in schema.names:
        raise InvalidSetting("say where rows go: with the option topic, or with a column `topic`")


class TopicWriter(DataSourceArrowWriter):
    """Writes one DataFrame. Made on the driver; the same instance, copied, writes in the tasks and commits."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        # Without a name there is nothing to know the write by again: nothing partial shows, but a repeated job doubles.
        self._query = f"batch-{uuid4()}" if options.application is None else quote(options.application, safe="")
        self._batch = 0 if options.version is None else options.version
        self._run = uuid4().hex[:12]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_part(self._options, self._query, self._batch, iterator, run=self._run)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make all parts visible."""
        commit_parts(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave nothing behind, not even what tasks do that Spark has not stopped yet."""
        abort_parts(self._options, self._query, self._batch, run=self._run)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream; Spark makes a new one for each commit."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task of one batch."""
        context = TaskContext.get()
        if context is None:
            raise InvalidSetting("a stream can only be written by a task of Spark")
        query, batch = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if not query or batch is None:
            raise InvalidSetting("Spark does not say which batch of which query this is, so it cannot be written once")
        return write_part(self._options, query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the batch visible."""
        commit_parts(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """End every attempt at the batch, as far as they can be known from what came back."""
        for part in messages:
            if isinstance(part, Part):
                abort_parts(self._options, part.query, batchId)
                return


def write_part(
    options: WriteOptions, query: str, batch: int, iterator: Iterator[pa.RecordBatch], *, run: str = ""
) -> Part:
    """Write the rows of one attempt at a task, and have the coordinator keep them until the batch is decided."""
    link = _link(options)
    if not _knows_batches(link):
        return _write_at_least_once(link, options, query, batch, iterator)
    transactions = Transactions(link.client)
    if link.call(transactions.last_batch(query)) >= batch:
        # Spark repeats a batch whose commit it does not remember. Its rows are there.
        return Part(query, batch, sum(rows.num_rows for rows in iterator), None)
    context = TaskContext.get()
    task = 0 if context is None else context.partitionId()
    attempt = uuid4().hex[:12]
    transactional_id = f"spark/{query}/{batch}/{task}/{f'{run}-{attempt}' if run else attempt}"
    identity = link.call(transactions.begin(transactional_id, timeout_ms=TASK_MS_MAX))
    producer = RowProducer(link, options, identity, transactional=True)
    try:
        for rows in iterator:
            producer.write(rows)
        producer.flush()
        if not producer.rows:
            return Part(query, batch, 0, None)
        link.call(transactions.prepare(identity))
    except BaseException:
        with suppress(MillstreamError):
            link.call(transactions.end(identity, commit=False))
        raise
    return Part(query, batch, producer.rows, identity)


def commit_parts(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit the batch that the parts belong to, all of it at once."""
    parts = [part for part in messages if isinstance(part, Part)]
    members = [part.member for part in parts if part.member is not None]
    if not parts or not members:
        return
    link = _link(options)
    if not _knows_batches(link):
        return
    link.call(Transactions(link.client).complete_batch(parts[0].query, parts[0].batch, members))


def abort_parts(options: WriteOptions, query: str, batch: int, *, run: str = "") -> None:
    """Abort every attempt at a batch, and those that a run still begins."""
    link = _link(options)
    if _knows_batches(link):
        link.call(Transactions(link.client).abort_batch(query, batch, run=run))


def _write_at_least_once(
    link: Link, options: WriteOptions, query: str, batch: int, iterator: Iterator[pa.RecordBatch]
) -> Part:
    _logger.warning(
        "the broker at %s does not know Millstream's batch commit: rows are written at least once, "
        "and rows of a batch that fails stay visible",
        options.brokers,
    )
    nobody = TransactionalProducer("", ProducerId(-1), -1)
    producer = RowProducer(link, options, nobody, transactional=False)
    for rows in iterator:
        producer.write(rows)
    producer.flush()
    return Part(query, batch, producer.rows, None)


def _knows_batches(link: Link) -> bool:
    return link.call(link.client.serves(PREPARE_KEY))


def _link(options: WriteOptions) -> Link:
    return link_to(options.brokers, client_id=options.client_id, timeout_s=options.timeout_s, patient=True)
