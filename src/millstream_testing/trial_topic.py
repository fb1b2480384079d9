"""The topic of a trial: its publisher, which retries through all faults, and the final contents of all topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final
from zlib import crc32

from millstream.core.errors import MillstreamError, UnknownTopic
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.subscription_history import Position, Published
from millstream_testing.subscription_worker import BATCH_MAX

RETRY_S: Final = 0.5
COUNTS: Final = (1, 2, 5, BATCH_MAX)
"""The number of messages in a batch."""


class TrialPublisher:
    """Publishes messages to a random partition each time, and records which of them were acknowledged."""

    def __init__(
        self,
        connect: Callable[[], Client],
        topic: str,
        make_record: Callable[[Random, int], NewRecord],
        *,
        partitions: int,
        per_s: float,
        seed: str,
        compressions: tuple[int, ...] = (0,),
    ) -> None:
        self._connect = connect
        self._topic = topic
        self._make_record = make_record
        self._partitions = partitions
        self._per_s = per_s
        self._random = Random(seed)
        self._compressions = compressions
        self._number = 0
        self._is_stopped = False
        self.acknowledged: set[Position] = set()
        self.failed = 0
        """The number of failures."""

    async def run(self) -> None:
        """Publish until `stop`, through all faults."""
        while not self._is_stopped:
            try:
                async with self._connect() as client:
                    while not self._is_stopped:
                        count = self._random.choice(COUNTS)
                        await self._publish(client, count)
                        await asyncio.sleep(count / self._per_s)
            except (MillstreamError, OSError, TimeoutError):
                self.failed += 1
                await asyncio.sleep(RETRY_S)

    def stop(self) -> None:
        self._is_stopped = True

    async def _publish(self, client: Client, count: int) -> None:
        partition = self._random.randrange(self._partitions)
        records = [self._make_record(self._random, self._number + at) for at in range(count)]
        batch = encode_batch(records, compression=self._random.choice(self._compressions))
        produced = await client.produce(self._topic, partition, batch)
        self.acknowledged.update(Position(partition, produced.base_offset + at) for at in range(count))
        self._number += count


async def messages_of(client: Client, topic: str) -> dict[Position, Record]:
    metadata = await client.metadata([topic])
    if topic not in metadata.topics:
        raise UnknownTopic(f"there is no topic {topic!r}")
    found: dict[Position, Record] = {}
    partitions = metadata.topics[topic].partitions
    ends = await client.list_offsets(topic, dict.fromkeys(partitions, -1))
    for partition in partitions:
        offset = 0
        while offset < ends[partition].offset:
            response = await client.fetch(topic, partition, offset)
            for record in decode_records(response.records):
                found[Position(partition, record.offset)] = record
                offset = max(offset, record.offset + 1)
    return found


async def dead_letters_of(client: Client, topic: str) -> list[tuple[Position, Record]]:
    """Return every dead letter with its original position; none if the topic does not exist yet."""
    try:
        dead_letters = await messages_of(client, topic)
    except UnknownTopic:
        return []
    with_headers = [
        ({key: (value or b"").decode() for key, value in dead_letter.headers}, dead_letter)
        for dead_letter in dead_letters.values()
    ]
    return [
        (Position(int(headers["dlq-partition"]), int(headers["dlq-offset"])), letter)
        for headers, letter in with_headers
    ]


def published(record: Record) -> Published:
    """Return what the checkers need of a message."""
    due = next((value for name, value in record.headers if name == "deliver-at"), None)
    return Published(record.key or b"", int(due or b"0"), crc32(record.value or b""), record.timestamp_ms)
