"""The way of a message to the dead letter topic, in three durable steps: rejecting, planned, dead-lettered.

The plan names the producer id and sequence number under which the letter is written. It is durable before the letter
is, so whoever takes the queue over after a crash writes the same letter under the same number, and the topic takes it
once. Not more letters are under way than a log remembers of a producer, and no further ones are planned before these
are written; so a letter whose number the log does not take is not in it, and gets another number.

A letter that the topic refuses for what it is (it is too large, or cannot be opened) is tried again and again, with
growing pauses, and the others go past it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final, NamedTuple

from millstream.broker.cluster.topics import Topics
from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.look import LIGHT_RECORDS_MAX
from millstream.broker.subscriptions.rejected import Rejected
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import (
    BatchRejected,
    DamagedRange,
    MillstreamError,
    NotLeader,
    OffsetOutOfRange,
    ProducerRejected,
    TopicExists,
    UnknownTopic,
)
from millstream.core.ids import Offset, ProducerId
from millstream.protocol.records.batch import COMPRESSION_NONE, check_crc, iterate_whole_headers
from millstream.protocol.records.record import Headers, NewRecord, Record, decode_batch, encode_batch
from millstream.protocol.wire.client import Client

_KEPT_MS_MAX: Final = 365 * 24 * 3600 * 1000

_TOPIC_SETTINGS: Final = {
    # A dead letter is larger than its message: it carries why it died.
    "max.message.bytes": str(32 * 1024 * 1024),
    # Open letters are kept, however old they are.
    "retention.until.delivered": "true",
    "retention.until.max.ms": str(_KEPT_MS_MAX),
}

_CLIENT_ID: Final = "dead-letters"

_TIMEOUT_S: Final = 30.0


class LetterBox:
    """Appends to topics of the cluster."""

    def __init__(self, topics: Topics, addresses: Callable[[], str]) -> None:
        self._topics = topics
        self._addresses = addresses
        self._client: Client | None = None

    async def close(self) -> None:
        """Let go of connections to other nodes."""
        if self._client is not None:
            await self._client.close()

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has; it is made if it does not exist."""
        found = self._topics.get(topic)
        if found is None:
            with suppress(TopicExists):
                await self._topics.create(topic, overrides=_TOPIC_SETTINGS)
            found = self._topics.get(topic)
        if found is None:
            raise UnknownTopic(f"the dead letter topic {topic!r} is being made")
        return found.partitions

    async def append(self, topic: str, index: int, batch: bytearray) -> Offset:
        """Append a batch of an idempotent producer; the offset that it has, also if it was there already."""
        try:
            partition = self._topics.partition(topic, index)
            if partition.is_leader:
                return (await partition.append(batch)).base_offset
        except (NotLeader, UnknownTopic):
            # Another node leads it, or will soon; the client finds out.
            pass
        if self._client is None:
            self._client = Client.connect(self._addresses(), client_id=_CLIENT_ID, timeout_s=_TIMEOUT_S)
        return Offset((await self._client.produce(topic, index, batch)).base_offset)


_logger = logging.getLogger(__name__)


UNDER_WAY_MAX: Final = 5

"""So many of the last batches of a producer are remembered by a log."""

MESSAGE_ID: Final = "message-id"

PREFIX: Final = "dlq-"

REDRIVEN: Final = "dlq-redriven"

FIRST_PUBLISHED: Final = "dlq-timestamp"

READ_BYTES: Final = 1

GONE: Final = "the log has the message no more"

_PLAN: Final = struct.Struct(">qii")

_WHERE: Final = struct.Struct(">iq")


class Plan(NamedTuple):
    """Under which number a letter is written, and where."""

    producer_id: ProducerId
    sequence: int
    partition: int

    def write(self) -> bytes:
        """As the queue keeps it."""
        return _PLAN.pack(*self)

    @classmethod
    def read(cls, content: bytes) -> Plan:
        """Read it back."""
        producer_id, sequence, partition = _PLAN.unpack(content)
        return cls(ProducerId(producer_id), sequence, partition)


class DeadLetters:
    """Writes the dead letters of one queue, when there are some."""

    def __init__(
        self,
        delivery: Delivery,
        box: LetterBox,
        clock: Clock,
        *,
        subscription: str,
        next_producer_id: Callable[[], Awaitable[ProducerId]],
        random: Random,
    ) -> None:
        self._delivery = delivery
        self._box = box
        self._clock = clock
        self._subscription = subscription
        self._next_producer_id = next_producer_id
        self._backoff = Backoff(random, max_s=30.0)
        self._producer_id: ProducerId | None = None
        self._sequences: dict[int, int] = {}
        # Letters that were refused for what they are, until the next pause is over.
        self._refused: set[Offset] = set()
        self._pausing: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        delivery.when_rejecting = self.wake

    def wake(self) -> None:
        """There are messages to be written away."""
        self._news.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"dead letters {self._subscription}")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop; what is not written away will be by whoever leads the queue next."""
        tasks = [task for task in (self._task, self._pausing) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # Some may have come after the last look at them.
        if not task.cancelled() and not self._delivery.is_closed and self._delivery.queue.counts.rejecting:
            self.wake()

    async def _run(self) -> None:
        while not self._delivery.is_closed and self._delivery.queue.counts.rejecting:
            try:
                letters = self._next()
                if letters:
                    await self._write_away(letters)
                    self._backoff.succeeded()
                else:
                    # Only such are left as were refused.
                    await self._pause_or_news()
            except MillstreamError as error:
                self._tell("dead letters could not be written; trying again", error)
                await self._backoff.pause()
            except Exception as error:
                _logger.exception("dead letters failed", extra={"subscription": self._subscription}, exc_info=error)
                await self._backoff.pause()

    async def _pause_or_news(self) -> None:
        """Wait until those that were refused are to be tried again, or until others have come."""
        loop = asyncio.get_running_loop()
        if self._pausing is None:
            self._pausing = loop.create_task(self._backoff.pause())
        self._news.clear()
        news = loop.create_task(self._news.wait())
        try:
            await asyncio.wait([self._pausing, news], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self._pausing.done():
            self._pausing = None
            self._refused.clear()

    def _next(self) -> list[Rejected]:
        """Those that are planned, and when there are none, those that come next."""
        queue = self._delivery.queue
        planned = queue.planned()
        if planned:
            return planned
        found = queue.rejecting(UNDER_WAY_MAX + len(self._refused))
        return [one for one in found if one.offset not in self._refused][:UNDER_WAY_MAX]

    async def _write_away(self, letters: list[Rejected]) -> None:
        queue, settings = self._delivery.queue, self._delivery.settings
        topic = settings.dead_letter_topic
        if not settings.has_dead_letters:
            # The declaration lost its topic meanwhile: nothing can take them any more.
            for one in letters:
                queue.drop(one.offset, one.reason, now_ms=self._clock.now_ms())
            self._delivery.news()
            return
        partitions = await self._box.partitions(topic)
        planned = [(one, plan) for one in letters if (plan := await self._planned(one, partitions)) is not None]
        await self._delivery.durable()
        # In the order of their numbers, which is the only one that the log takes.
        for one, plan in sorted(planned, key=lambda pair: pair[1]):
            if plan.partition >= partitions:
                # The topic was made anew, with fewer partitions.
                self._unplan(one)
            else:
                await self._write_one(topic, one, plan)
        self._delivery.news()

    async def _write_one(self, topic: str, one: Rejected, plan: Plan) -> None:
        queue = self._delivery.queue
        try:
            record = await self._find(one.offset)
            if record is None:
                _logger.warning(
                    "a message is lost: the log no longer has it, so it cannot be dead-lettered",
                    extra={"subscription": self._subscription, "topic": self._delivery.topic, "offset": one.offset},
                )
                queue.drop(one.offset, GONE, now_ms=self._clock.now_ms())
                # Its number is not used, so no later one of the same producer will be taken.
                self._producer_id = None
                return
            offset = await self._box.append(topic, plan.partition, self._letter(one, plan, record))
        except BatchRejected as error:
            self._tell("a dead letter is refused; trying again later", error, offset=one.offset)
            self._refused.add(one.offset)
            self._unplan(one)
        except ProducerRejected as error:
            self._tell("a dead letter gets another number", error, offset=one.offset)
            self._unplan(one)
        else:
            queue.dead_lettered(one.offset, _WHERE.pack(plan.partition, offset), now_ms=self._clock.now_ms())

    def _unplan(self, one: Rejected) -> None:
        """The letter is surely not in the topic, and will be written under another number."""
        self._delivery.queue.plan(one.offset, b"", now_ms=self._clock.now_ms())
        self._producer_id = None

    def _tell(self, what: str, error: MillstreamError, **more: object) -> None:
        _logger.warning(what, extra={"subscription": self._subscription, "error": str(error), **more})

    async def _planned(self, one: Rejected, partitions: int) -> Plan | None:
        """The plan of a letter, made now if there is none; None if the message is not rejected any more."""
        if one.plan:
            return Plan.read(one.plan)
        if self._producer_id is None:
            self._producer_id = await self._next_producer_id()
            self._sequences.clear()
        index = self._delivery.key.partition % partitions
        sequence = self._sequences.get(index, 0)
        plan = Plan(self._producer_id, sequence, index)
        if not self._delivery.queue.plan(one.offset, plan.write(), now_ms=self._clock.now_ms()):
            return None
        self._sequences[index] = sequence + 1
        return plan

    async def _find(self, offset: Offset) -> Record | None:
        """The message itself; None when the log has it no more."""
        try:
            records = self._delivery.partition.read(offset, max_bytes=READ_BYTES)
        except (OffsetOutOfRange, DamagedRange):
            return None
        header = next(iterate_whole_headers(records), None)
        if header is None:
            return None
        check_crc(records, header)
        if header.compression == COMPRESSION_NONE and header.record_count <= LIGHT_RECORDS_MAX:
            return next(decode_batch(records, header, first=offset, last=offset), None)
        # Beside the loop: it may have to decompress a lot for one message, or to step over many.
        return await asyncio.to_thread(lambda: next(decode_batch(records, header, first=offset, last=offset), None))

    def _letter(self, one: Rejected, plan: Plan, record: Record) -> bytearray:
        key = self._delivery.key
        source = self._delivery.partition.topic.name
        now_ms = self._clock.now_ms()
        told = {
            "subscription": self._subscription,
            "topic": source,
            "topic-id": str(key.topic_id),
            "partition": str(key.partition),
            "offset": str(one.offset),
            "attempts": str(one.attempts),
            "reason": one.reason,
            "first-time": str(one.first_ms),
            "last-time": str(one.time_ms),
        }
        headers: Headers = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
        if not any(name == MESSAGE_ID for name, _ in headers):
            headers += ((MESSAGE_ID, f"{key.topic_id}/{key.partition}/{one.offset}".encode()),)
        headers += (*_earlier_lives(record), *((PREFIX + name, text.encode()) for name, text in told.items()))
        return encode_batch(
            [NewRecord(record.key, record.value, headers, now_ms)],
            producer_id=plan.producer_id,
            producer_epoch=0,
            base_sequence=plan.sequence,
        )


def _earlier_lives(record: Record) -> Headers:
    """When the message was published first, and how often it was redriven since, if it was."""
    told = dict(record.headers)
    published = str(record.timestamp_ms).encode()
    if REDRIVEN not in told:
        return ((FIRST_PUBLISHED, published),)
    return ((FIRST_PUBLISHED, told.get(FIRST_PUBLISHED) or published), (REDRIVEN, told[REDRIVEN]))
