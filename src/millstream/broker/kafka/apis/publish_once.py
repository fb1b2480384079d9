"""PublishOnce (key 32038), version 0: stores messages that are not stored yet, by their ids.

    [topic, partition, one record batch, timeout ms]
    response, when they are acknowledged by all:
    [error, message, for each record [offset, timestamp ms, is new], throttle ms]

Every record has a `message-id` header. A message whose id was stored in the partition within the window, by any client,
is not stored again: the response holds its position. The batch must not belong to an idempotent producer or a
transaction, since duplicates are removed from it. The window is the topic's `deduplication.window.ms`. Requests of a
client over its `producer_byte_rate` are refused with THROTTLING_QUOTA_EXCEEDED; `throttle ms` is how long to wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Final

from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.log.append import check_records, is_expensive_to_check
from millstream.broker.log.log import AppendedRange, Log
from millstream.broker.replication.partition import Partition
from millstream.broker.replication.published_ids import Published, PublishedIds, id_of
from millstream.broker.schemas.rules import SchemaRules
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidBatch, InvalidRequest, InvalidTopicName, RequestTimedOut
from millstream.core.headers import MESSAGE_ID
from millstream.core.ids import Offset
from millstream.core.metric import Metric, counter, gauge
from millstream.core.topic import Topic
from millstream.protocol.private.publish_once import PublishOnceRequest, PublishOnceResponse
from millstream.protocol.records.batch import check_crc, read_header
from millstream.protocol.records.record import NewRecord, Record, decode_batch, encode_batch

RECORDS_MAX: Final = 10_000
TIMEOUT_MS_MAX: Final = 600_000
NODE_IDS_MAX: Final = 1_000_000
"""The number of ids a node remembers; beyond it, partitions that are rarely used are read again when they are."""
COUNT_EVERY: Final = 64
"""The number of requests after which the ids of all partitions are counted."""
_ACKS_ALL: Final = -1


class PublishOnce(PrivateApi[PublishOnceRequest, PublishOnceResponse]):
    changes = None

    def __init__(self, topics: Topics, quota: QuotaMeter, rules: SchemaRules | None = None) -> None:
        self._topics = topics
        self._quota = quota
        self._rules = rules
        self._ids: OrderedDict[Partition, PublishedIds] = OrderedDict()
        self._heavy = asyncio.Semaphore(1)
        """Held for a batch of a few kilobytes that may decompress to as many megabytes."""
        self.duplicates = 0
        self._forgotten = 0
        self._requests = 0
        topics.on_deletion(self._topic_deleted)

    def metrics(self) -> Iterable[Metric]:
        held = list(self._ids.values())
        yield counter(
            "millstream_duplicate_messages_total",
            "Messages that were published again by id and not stored again.",
            self.duplicates,
        )
        yield gauge(
            "millstream_deduplication_ids", "Message ids that are remembered for deduplication.", sum(map(len, held))
        )
        yield counter(
            "millstream_deduplication_ids_forgotten_total",
            "Message ids that were evicted before their window ended, because there were too many.",
            self._forgotten + sum(identifiers.forgotten for identifiers in held),
        )

    async def needs(self, request: PublishOnceRequest) -> Sequence[Need]:
        return [(Operation.WRITE, ResourceType.TOPIC, request.topic)]

    async def handle_from(self, client: ClientInfo, request: PublishOnceRequest) -> PublishOnceResponse:
        """Store new messages, unless the client is over its quota."""
        owed_ms = self._quota.owed_ms(client)
        if owed_ms:
            message = f"client {client.client_id!r} exceeds its {self._quota.key}; wait for {owed_ms} ms"
            return PublishOnceResponse(int(ErrorCode.throttling_quota_exceeded), message, [], owed_ms)
        client.produce_requests += 1
        client.produced_bytes += len(request.batch)
        if self._quota.is_limiting:
            self._quota.take(client, len(request.batch))
        return await self.handle(request)

    async def handle(self, request: PublishOnceRequest) -> PublishOnceResponse:
        """Store new messages; respond once they and their duplicates are acknowledged."""
        partition = self._topics.partition(request.topic, request.partition)
        if partition.topic.is_internal:
            raise InvalidTopicName(f"topic {partition.topic.name!r} is internal; clients may not write to it")
        is_heavy = is_expensive_to_check(request.batch)
        try:
            async with asyncio.timeout(min(max(request.timeout_ms, 1), TIMEOUT_MS_MAX) / 1000):
                if self._rules is not None and partition.log.settings.validates_schemas:
                    await self._rules.check(request.batch, partition.log.settings)
                async with self._heavy if is_heavy else nullcontext():
                    results, end = await self._store(partition, request.batch, is_heavy=is_heavy)
                waiting = partition.acknowledged(AppendedRange(Offset(0), Offset(end), -1, Offset(0), False), _ACKS_ALL)
                if waiting is not None:
                    await waiting
        except TimeoutError:
            raise RequestTimedOut("the messages were not acknowledged in time; publish them again") from None
        self.duplicates += sum(not is_new for _, _, is_new in results)
        return PublishOnceResponse(0, None, results)

    async def _store(
        self, partition: Partition, batch: bytes, *, is_heavy: bool
    ) -> tuple[list[tuple[int, int, bool]], int]:
        now_ms = partition.log.clock.now_ms()
        if is_heavy:
            records = await asyncio.to_thread(_read_messages, batch, now_ms)
        else:
            records = _read_messages(batch, now_ms)
        return await self._publish(partition, records, batch, is_heavy=is_heavy)

    async def _publish(
        self, partition: Partition, records: Sequence[Record], batch: bytes, *, is_heavy: bool
    ) -> tuple[list[tuple[int, int, bool]], int]:
        """Append new messages; return where every message is, and the offset that has to be acknowledged."""
        ids, window_ms = self._ids_of(partition), partition.log.settings.deduplication_window_ms
        named = [id_of(record.headers) or b"" for record in records]
        built: tuple[list[int], bytearray] = [], bytearray()
        async with ids.lock:
            while True:
                await ids.catch_up()
                # No await from here to the append, so that nothing can come in between.
                known: dict[bytes, Published] = {}
                new: list[int] = []
                for at, (message_id, record) in enumerate(zip(named, records, strict=True)):
                    published = known.get(message_id) or ids.find(message_id, window_ms)
                    if published is None:
                        published = Published(-1 - len(new), record.timestamp_ms)
                        new.append(at)
                    known[message_id] = published
                if not new or new == built[0]:
                    break
                if is_heavy:
                    # Meanwhile, others may publish some of them.
                    built = new, await asyncio.to_thread(_build_checked, new, records, batch, partition.log)
                else:
                    built = new, _build_batch(new, records, batch)
                    break
            appended = None if not new else partition.write(built[1], acks=_ACKS_ALL, is_checked=is_heavy)
        results: list[tuple[int, int, bool]] = []
        reported: set[bytes] = set()
        for message_id in named:
            offset, timestamp_ms = known[message_id]
            is_new = offset < 0 and message_id not in reported
            reported.add(message_id)
            if offset < 0 and appended is not None:
                offset = appended.base_offset - 1 - offset
                timestamp_ms = timestamp_ms if appended.append_time_ms < 0 else appended.append_time_ms
            results.append((offset, timestamp_ms, is_new))
        return results, max(offset for offset, _, _ in results) + 1

    def _ids_of(self, partition: Partition) -> PublishedIds:
        window_ms = partition.log.settings.deduplication_window_ms
        published_ids = self._ids.get(partition)
        if published_ids is None or not published_ids.is_current or published_ids.window_ms < window_ms:
            self._drop_ids(partition)
            if not partition.is_leader:
                # Raises the error for clients.
                partition.check_leader_epoch(-1)
            published_ids = self._ids[partition] = PublishedIds(partition, window_ms)
        published_ids.window_ms = window_ms
        self._ids.move_to_end(partition)
        self._requests += 1
        if self._requests % COUNT_EVERY == 0:
            # A partition that another node leads now is not requested here any more.
            for known in [place for place, ids in self._ids.items() if not ids.is_current]:
                self._drop_ids(known)
            while len(self._ids) > 1 and sum(map(len, self._ids.values())) > NODE_IDS_MAX:
                self._drop_ids(next(iter(self._ids)))
        return published_ids

    def _topic_deleted(self, topic: Topic) -> None:
        for known in [key for key in self._ids if key.topic.topic_id == topic.topic_id]:
            self._drop_ids(known)

    def _drop_ids(self, partition: Partition) -> None:
        dropped = self._ids.pop(partition, None)
        self._forgotten += 0 if dropped is None else dropped.forgotten


def _read_messages(batch: bytes, now_ms: int) -> list[Record]:
    """Return the messages; those without a timestamp get the current time, by which repetitions are recognized."""
    header = read_header(batch)
    if header.end_position != len(batch):
        raise InvalidBatch("deduplicated messages are sent as one record batch")
    if header.is_control or header.is_transactional or header.producer_id >= 0:
        raise InvalidBatch("a batch of deduplicated messages has no producer id and no transaction")
    if not 0 < header.record_count <= RECORDS_MAX:
        raise InvalidBatch(f"1 to {RECORDS_MAX} deduplicated messages fit into one batch, not {header.record_count}")
    check_crc(batch, header)
    records = list(decode_batch(batch, header))
    if any(id_of(record.headers) is None for record in records):
        raise InvalidRequest(f"every deduplicated message needs a {MESSAGE_ID} header")
    return [record if record.timestamp_ms >= 0 else record._replace(timestamp_ms=now_ms) for record in records]


def _build_checked(new: Sequence[int], records: Sequence[Record], batch: bytes, log: Log) -> bytearray:
    built = _build_batch(new, records, batch)
    check_records(built, read_header(built), log.settings, log.clock.now_ms())
    return built


def _build_batch(new: Sequence[int], records: Sequence[Record], batch: bytes) -> bytearray:
    """Return a batch of those records that are new, given by their places."""
    header = read_header(batch)
    if len(new) == len(records) and header.base_timestamp_ms >= 0 and header.max_timestamp_ms >= 0:
        return bytearray(batch)
    remaining = [
        NewRecord(record.key, record.value, record.headers, record.timestamp_ms)
        for record in (records[at] for at in new)
    ]
    return encode_batch(remaining, compression=header.compression)
