"""Publishes dead letters' messages again, each of them once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millstream.core.errors import UnknownTopic
from millstream.core.partitioner import partition_for_key
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.refusal import refusal

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client


class LetterPost:
    """One idempotent producer: what has to be sent again in a failover is stored once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._partitions: dict[str, int] = {}

    async def open(self) -> tuple[int, int]:
        """The producer's number and epoch, which are taken at first."""
        if self._producer is None:
            self._producer = await self._take_producer()
        return self._producer

    async def send(self, topic: str, partition: int | None, record: NewRecord, *, spread: int) -> None:
        """Publish to a partition, or by key as Kafka's clients do; without one, `spread` chooses."""
        partitions = await self.partitions_of(topic)
        if partition is None or partition >= partitions:
            partition = spread % partitions if record.key is None else partition_for_key(record.key, partitions)
        producer_id, producer_epoch = await self.open()
        sequence = self._sequences.get((topic, partition), 0)
        batch = encode_batch([record], producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=sequence)
        await self._client.produce(topic, partition, batch)
        self._sequences[topic, partition] = (sequence + 1) & 0x7FFFFFFF

    async def partitions_of(self, topic: str) -> int:
        """How many a topic has; one that does not exist is not made."""
        if topic not in self._partitions:
            found = await self._client.metadata([topic])
            if topic not in found.topics:
                error = refusal(found.errors.get(topic, 3), None, about=f"topic {topic!r}")
                if isinstance(error, UnknownTopic):
                    raise UnknownTopic(
                        f"topic {topic!r} does not exist; create it with: millstream topic create {topic}, "
                        "or name another one with --to-topic"
                    )
                raise error
            self._partitions[topic] = len(found.topics[topic].partitions)
        return self._partitions[topic]

    async def _take_producer(self) -> tuple[int, int]:
        from kio.schema.init_producer_id.v5 import request

        messages: Any = request
        asked = messages.InitProducerIdRequest(transactional_id=None, transaction_timeout=timedelta(minutes=1))
        answer = await self._client.send(None, asked)
        if answer.error_code:
            raise refusal(answer.error_code, None, about="a producer id")
        return answer.producer_id, answer.producer_epoch
