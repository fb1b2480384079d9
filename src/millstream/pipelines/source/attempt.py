"""One attempt at a task: its rows in a transaction of their own, which ends with a durable promise or with nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from millstream.core.errors import MillstreamError
from millstream.core.ids import ProducerId
from millstream.pipelines.source.garbage import spare_what_is_loaded
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.parts import Batch, Part, writing_link
from millstream.pipelines.source.producer import RowProducer
from millstream.pipelines.source.target import knows_batches
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

TASK_MS_MAX: Final = 15 * 60 * 1000
"""How long one task may write: the longest transaction that a broker takes unless it is told otherwise."""


def write_part(options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    """Write the rows of one attempt at a task, and have the coordinator keep them until the batch is decided."""
    link = writing_link(options)
    write = _write_once if knows_batches(link) else _write_at_least_once
    part = write(link, options, batch, iterator)
    spare_what_is_loaded()
    return part


def _write_once(link: Link, options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    transactions = Transactions(link.client)
    context = TaskContext.get()
    transactional_id = batch.new_attempt(0 if context is None else context.partitionId())
    # Asked for together: both are answered by the coordinator, and neither needs the other.
    beginning = link.start(transactions.begin(transactional_id, timeout_ms=TASK_MS_MAX))
    if _last_batch(link, transactions, batch, beginning) >= batch.number:
        # Spark repeats a batch whose commit it does not remember. Its rows are there.
        return Part(batch, sum(rows.num_rows for rows in iterator), None)
    identity = beginning.result()
    producer = RowProducer(link, options, identity, transactional=True)
    try:
        for rows in iterator:
            producer.write(rows)
        producer.flush()
        if not producer.rows:
            return Part(batch, 0, None)
        link.call(transactions.prepare(identity))
    except BaseException:
        with suppress(MillstreamError):
            link.call(transactions.end(identity, commit=False))
        raise
    return Part(batch, producer.rows, identity)


def _last_batch(link: Link, transactions: Transactions, batch: Batch, beginning: Future[TransactionalProducer]) -> int:
    """The last batch that was committed; if it is this one, the attempt that is being begun is let go."""
    last = link.call(transactions.last_batch(batch.query))
    if last >= batch.number:
        with suppress(MillstreamError):
            beginning.result()
    return last


def _write_at_least_once(link: Link, options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    nobody = TransactionalProducer("", ProducerId(-1), -1)
    producer = RowProducer(link, options, nobody, transactional=False)
    for rows in iterator:
        producer.write(rows)
    producer.flush()
    return Part(batch, producer.rows, None)
