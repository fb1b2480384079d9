"""Sends many messages to a topic, each of them once.

One run is one idempotent producer: every batch carries the producer's number and a sequence, so a batch that is sent
again because an answer was lost is known to the broker and not stored twice. Batches of one partition are sent one
after the other, which keeps their order; those of different partitions are sent together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from millstream.admin.explanation import explain
from millstream.model.errors import BatchTooLarge, CoordinatorUnavailable, NotLeader, RequestTimedOut, UnknownTopic
from millstream.model.partitioner import partition_for_key
from millstream.records.record import NewRecord, encode_batch
from millstream.wire.client import Client
from millstream.wire.refusal import refusal

BATCH_BYTES_MAX = 512 * 1024
"""Well below the largest batch that a topic takes unless it is told otherwise."""

BATCH_RECORDS_MAX = 10_000
_RECORD_OVERHEAD_BYTES = 24


class Placed(NamedTuple):
    """Where a message was stored."""

    partition: int
    offset: int


class Publisher:
    """An idempotent producer for one topic."""

    def __init__(self, client: Client, topic: str, *, partition: int | None = None, compression: int = 0) -> None:
        self._client = client
        self._topic = topic
        self._fixed = partition
        self._compression = compression
        self._partitions = 0
        self._producer_id = -1
        self._producer_epoch = -1
        self._sequences: dict[int, int] = {}
        self._keyless = 0
        self.topic_id: Any = None

    async def start(self) -> None:
        """Find the topic, which the broker may create now, and take a producer number."""
        found = await self._client.metadata([self._topic], create=True)
        if self._topic not in found.topics:
            error = refusal(found.errors.get(self._topic, 3), None, about=f"publish to {self._topic!r}")
            if isinstance(error, UnknownTopic):
                hint = f"create it with: millstream topic create {self._topic}"
                raise UnknownTopic(f"topic {self._topic!r} does not exist and the broker does not create it; {hint}")
            if isinstance(error, NotLeader):
                raise await explain(self._client, f"topic {self._topic!r} cannot be created now")
            raise error
        topic = found.topics[self._topic]
        self.topic_id = topic.topic_id
        self._partitions = len(topic.partitions)
        self._keyless = random.randrange(self._partitions)
        if self._fixed is not None and self._fixed >= self._partitions:
            raise UnknownTopic(
                f"topic {self._topic!r} has no partition {self._fixed}; the last is {self._partitions - 1}"
            )
        await self._take_producer_id()

    async def publish(self, records: Sequence[NewRecord]) -> list[Placed]:
        """Store messages and say where each of them went, in the order given."""
        placed: list[Placed | None] = [None] * len(records)
        by_partition = self._assign(records)
        sent = await asyncio.gather(
            *(self._publish_to(partition, records, indexes, placed) for partition, indexes in by_partition.items()),
            return_exceptions=True,
        )
        for outcome in sent:
            if outcome is not None:
                raise outcome
        return [one for one in placed if one is not None]

    async def _take_producer_id(self) -> None:
        from kio.schema.init_producer_id.v5 import request

        messages: Any = request
        asked = messages.InitProducerIdRequest(transactional_id=None, transaction_timeout=timedelta(minutes=1))
        answer = await self._client.send(None, asked)
        if answer.error_code:
            error = refusal(answer.error_code, None, about="a producer id")
            if isinstance(error, RequestTimedOut | CoordinatorUnavailable):
                raise await explain(self._client, "no producer id can be had now")
            raise error
        self._producer_id, self._producer_epoch = answer.producer_id, answer.producer_epoch

    def _assign(self, records: Sequence[NewRecord]) -> dict[int, list[int]]:
        """Share messages out: by key where there is one, else all of these together to the next partition."""
        keyless = self._keyless if self._fixed is None else self._fixed
        self._keyless = (self._keyless + 1) % self._partitions
        assigned: dict[int, list[int]] = {}
        for index, record in enumerate(records):
            if self._fixed is None and record.key is not None:
                partition = partition_for_key(record.key, self._partitions)
            else:
                partition = keyless
            assigned.setdefault(partition, []).append(index)
        return assigned

    async def _publish_to(
        self, partition: int, records: Sequence[NewRecord], indexes: list[int], placed: list[Placed | None]
    ) -> None:
        waiting = list(_batches(records, indexes))
        waiting.reverse()
        while waiting:
            batch = waiting.pop()
            try:
                base_offset = await self._send(partition, [records[index] for index in batch])
            except BatchTooLarge:
                # The topic takes less than usual. Nothing was stored, so the halves may have the same sequence.
                if len(batch) == 1:
                    raise
                middle = len(batch) // 2
                waiting += [batch[middle:], batch[:middle]]
                continue
            for delta, index in enumerate(batch):
                placed[index] = Placed(partition, base_offset + delta)

    async def _send(self, partition: int, records: list[NewRecord]) -> int:
        sequence = self._sequences.get(partition, 0)
        batch = encode_batch(
            records,
            compression=self._compression,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=sequence,
        )
        produced = await self._client.produce(self._topic, partition, batch)
        self._sequences[partition] = (sequence + len(records)) & 0x7FFFFFFF
        return produced.base_offset


def _batches(records: Sequence[NewRecord], indexes: list[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in indexes:
        record_size = _size_of(records[index])
        if batch and (size + record_size > BATCH_BYTES_MAX or len(batch) == BATCH_RECORDS_MAX):
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += record_size
    yield batch


def _size_of(record: NewRecord) -> int:
    headers = sum(len(name) + len(value or b"") + 4 for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers + _RECORD_OVERHEAD_BYTES
