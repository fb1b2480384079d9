"""One attempt at a task: its rows in one transaction, which is prepared durably or aborted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from millstream.core.errors import InvalidBatch, MillstreamError
from millstream.core.heap import freeze_worker_heap
from millstream.core.ids import ProducerId
from millstream.pipelines.source.batch_commit import Batch, Part
from millstream.pipelines.source.link import Link, task_link
from millstream.pipelines.source.options import SourceOffsets, WriteOptions
from millstream.pipelines.source.schema_decoder import encode_values
from millstream.pipelines.source.target_topic import count_partitions, partition_counts, supports_batch_commit
from millstream.protocol.private.transactions import TransactionalProducer, Transactions
from millstream.protocol.records.arrow import from_arrow
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.encoder import Source, encode_source, source_of
from millstream.protocol.records.layout import Int32s, Int64s
from millstream.protocol.records.partitioner import choose_partitions
from millstream.protocol.wire.produce import Produced

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""In the order of Kafka's codes."""

BATCH_BYTES: Final = 900 * 1024
"""Less than the default of the largest batch that a topic accepts."""

GATHERED_BYTES: Final = 3 * 1024 * 1024
"""Rows are sent in amounts of this size: Spark passes few rows at a time for each partition, and every batch costs the
leader a sync of its disk."""

GATHERED_BYTES_PER_PARTITION: Final = 64 * 1024

GATHERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The limit for what is gathered when rows go to many partitions."""

PENDING_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most unacknowledged bytes of a task; it waits for responses before it encodes more."""

Target = tuple[str, int]

_SMALL_MAX: Final = 2**16


class RowProducer:
    """An idempotent producer, transactional or not. Batches of one partition are sent one after the other."""

    def __init__(
        self,
        link: Link,
        options: WriteOptions,
        identity: TransactionalProducer,
        *,
        transactional: bool,
        partitions: dict[str, int] | None = None,
    ) -> None:
        """Write over a link; `partitions` caches the number of partitions of topics."""
        self._link = link
        self._options = options
        self._identity = identity
        self._transactional = transactional
        self._partitions = {} if partitions is None else partitions
        self._sequences: dict[Target, int] = {}
        self._last: dict[Target, Future[Produced]] = {}
        self._pending: dict[Future[Produced], int] = {}
        self._turn = int(identity.producer_id)
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        self._gather_bytes = GATHERED_BYTES
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Gather and send rows; return when enough of the earlier ones is acknowledged."""
        if self._options.schema is not None:
            batch = encode_values(self._link, self._options.schema, batch)
        self._gathered.append(batch)
        self._gathered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._gathered_bytes >= self._gather_bytes:
            self._send_gathered()

    def flush(self) -> None:
        """Send the rest, and wait until everything is acknowledged."""
        self._send_gathered()
        self._settle(0)

    # -- internals --------------------------------------------------------------------------------------------

    def _send_gathered(self) -> None:
        for batch in pa.Table.from_batches(self._gathered).combine_chunks().to_batches() if self._gathered else ():
            self._send_rows(batch)
        self._gathered, self._gathered_bytes = [], 0

    def _send_rows(self, batch: pa.RecordBatch) -> None:
        for topic, rows in self._by_topic(batch):
            partitions = self._count(topic)
            columns = from_arrow(rows, default_timestamp_ms=int(time.time() * 1000))
            chosen = self._choose(rows, columns, partitions, topic)
            # Sorted once, the rows of a partition are contiguous, however many partitions there are.
            order, bounds = _sorted(chosen, partitions)
            source = source_of(columns, order)
            for partition in np.flatnonzero(np.diff(bounds)).tolist():
                self._send(topic, partition, source.rows(int(bounds[partition]), int(bounds[partition + 1])))

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        fixed = self._options.topic
        if fixed is not None:
            yield fixed, batch
            return
        topics = batch.column("topic")
        if topics.null_count:
            raise InvalidBatch("a row has no topic; give every row one, or set the option topic")
        named = topics.dictionary_encode()
        names = named.dictionary.to_pylist()
        self._look_up_topics(names)
        order, bounds = _sorted(named.indices.to_numpy(), len(names))
        rows = batch.take(pa.array(order)) if len(names) > 1 else batch
        for number, name in enumerate(names):
            yield name, rows.slice(int(bounds[number]), int(bounds[number + 1] - bounds[number]))

    def _look_up_topics(self, topics: Sequence[str]) -> None:
        """Look up all new topics at once, since one after the other takes long."""
        unknown = [topic for topic in topics if topic not in self._partitions]
        if len(unknown) > 1:
            self._partitions |= partition_counts(self._link, unknown)

    def _count(self, topic: str) -> int:
        known = self._partitions.get(topic)
        if known is None:
            known = self._partitions[topic] = count_partitions(self._link, topic)
            bytes_max = min(known * GATHERED_BYTES_PER_PARTITION, GATHERED_BYTES_MAX)
            self._gather_bytes = max(self._gather_bytes, bytes_max)
        return known

    def _choose(self, rows: pa.RecordBatch, columns: Columns, partitions: int, topic: str) -> Int32s:
        """Choose a partition for every row: the given one, else by key, else one for all rows with neither."""
        chosen = np.full(len(columns), -1, np.int32)
        if columns.keys is not None:
            chosen = choose_partitions(columns.keys, partitions)
        if "partition" in rows.schema.names:
            named = rows.column("partition").cast(pa.int32())
            numbers = named.fill_null(-1).to_numpy()
            wrong = numbers[named.is_valid().to_numpy(zero_copy_only=False) & ((numbers < 0) | (numbers >= partitions))]
            if wrong.size:
                raise InvalidBatch(f"a row names partition {wrong[0]} of topic {topic!r}, which has {partitions}")
            chosen = np.where(numbers >= 0, numbers, chosen)
        self._turn += 1
        return np.where(chosen < 0, self._turn % partitions, chosen).astype(np.int32)

    def _send(self, topic: str, partition: int, source: Source) -> None:
        target = (topic, partition)
        for batch in encode_source(
            source,
            compression=CODECS.index(self._options.compression),
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.epoch,
            base_sequence=self._sequences.get(target, 0),
            transactional=self._transactional,
            batch_bytes_max=BATCH_BYTES,
        ):
            coming = self._link.start(self._produce(self._last.get(target), target, batch))
            self._last[target] = coming
            self._pending[coming] = len(batch)
            self._settle(PENDING_BYTES_MAX)
        self._sequences[target] = (self._sequences.get(target, 0) + source.records.size) & 0x7FFFFFFF

    async def _produce(self, before: Future[Produced] | None, target: Target, batch: bytearray) -> Produced:
        """Send a batch once the previous one of its partition is stored: sequence numbers have to arrive in order."""
        if before is not None:
            await asyncio.wrap_future(before)
        named = self._identity.transactional_id if self._transactional else None
        return await self._link.client.produce(*target, batch, transactional_id=named)

    def _settle(self, bytes_max: int) -> None:
        while self._pending and (not bytes_max or sum(self._pending.values()) > bytes_max):
            done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                del self._pending[future]
                future.result()
        for future in [future for future in self._pending if future.done()]:
            del self._pending[future]
            future.result()


def _sorted(chosen: Int32s, count: int) -> tuple[Int64s, Int64s]:
    """Return the rows in the order of their partitions, otherwise unchanged, and where each of `count` partitions
    starts.
    """
    # 16-bit numbers are sorted by counting.
    small = chosen.astype(np.uint16) if count <= _SMALL_MAX else chosen
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(chosen, minlength=count), out=bounds[1:])
    return np.argsort(small, kind="stable"), bounds


TASK_MS_MAX: Final = 15 * 60 * 1000
"""How long one task may write: the broker's default for the longest transaction."""


def write_part(options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    """Write the rows of one attempt at a task and prepare its transaction, which the coordinator keeps until the batch
    is decided.
    """
    link = task_link(options)
    write = _write_once if supports_batch_commit(link) else _write_at_least_once
    part = write(link, options, batch, iterator)
    freeze_worker_heap()
    return part


def _write_once(link: Link, options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    transactions = Transactions(link.client)
    context = TaskContext.get()
    transactional_id = batch.new_attempt(0 if context is None else context.partitionId())
    # Sent together: the coordinator responds to both, and they are independent.
    beginning = link.start(transactions.begin(transactional_id, timeout_ms=TASK_MS_MAX))
    if _last_batch(link, transactions, batch, beginning) >= batch.number:
        # Spark repeats a batch whose commit it has no record of; its rows are stored.
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


def write_with_offsets(
    options: WriteOptions,
    batch: Batch,
    rows: Iterable[pa.RecordBatch],
    source: SourceOffsets,
    partitions: dict[str, int],
) -> Part:
    """Write rows and the offsets that they come from in one transaction, and prepare it.

    Only for the driver of a pipeline, which knows whether the batch was committed before.
    """
    link = task_link(options)
    transactions = Transactions(link.client)
    identity = link.call(transactions.begin(batch.new_attempt(0), timeout_ms=TASK_MS_MAX))
    producer = RowProducer(link, options, identity, transactional=True, partitions=partitions)
    offsets = link.start(transactions.commit_offsets(identity, source.group, source.offsets, source.member))
    try:
        for row in rows:
            producer.write(row)
        producer.flush()
        offsets.result()
        link.call(transactions.prepare(identity))
    except BaseException:
        with suppress(MillstreamError):
            offsets.result()
        with suppress(MillstreamError):
            link.call(transactions.end(identity, commit=False))
        raise
    return Part(batch, producer.rows, identity)


def _last_batch(link: Link, transactions: Transactions, batch: Batch, beginning: Future[TransactionalProducer]) -> int:
    """Return the last committed batch; if it is this one, release the attempt that is being started."""
    last = link.call(transactions.last_batch(batch.query))
    if last >= batch.number:
        with suppress(MillstreamError):
            beginning.result()
    return last


def _write_at_least_once(link: Link, options: WriteOptions, batch: Batch, iterator: Iterator[pa.RecordBatch]) -> Part:
    no_transaction = TransactionalProducer("", ProducerId(-1), -1)
    producer = RowProducer(link, options, no_transaction, transactional=False)
    for rows in iterator:
        producer.write(rows)
    producer.flush()
    return Part(batch, producer.rows, None)
