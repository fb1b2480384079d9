"""Move rejected messages to the dead letter topic, in three durable steps: rejecting, planned, dead-lettered.

The plan fixes the producer id and sequence number of the letter and is durable before the letter is written. After a
crash, the next leader of the queue writes the same letter under the same number, and the topic stores it once. No more
letters are in flight than a log remembers of a producer, and none is planned before these are written. A letter whose
number the log rejects is therefore certainly not stored, and gets a new number; the node that rejects it makes sure
first that no other leads the topic's partition.

A letter that the topic refuses for its content (too large, or unreadable) is retried with growing pauses, up to
`REFUSED_S_MAX`, and does not delay the others; the queue keeps how many there are, and why.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final, NamedTuple
from uuid import UUID

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import LeaderAppender
from millstream.broker.subscriptions.batch_scan import LIGHT_RECORDS_MAX
from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import LOST_REASON, POSITION, RejectedMessage
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import (
    BatchRejected,
    BatchTooLarge,
    DamagedRange,
    MillstreamError,
    OffsetOutOfRange,
    ProducerRejected,
    TopicExists,
    TopicNotAuthorized,
    UnknownTopic,
)
from millstream.core.headers import LETTER_PREFIX, LETTER_PUBLISHED, LETTER_REDRIVEN, MESSAGE_ID
from millstream.core.ids import NodeId, Offset, OffsetRange, ProducerId
from millstream.core.tasks import cancel_and_wait
from millstream.protocol.private.message import request_private
from millstream.protocol.private.subscription_messages import AppendLetterRequest
from millstream.protocol.records.batch import COMPRESSION_NONE, check_crc, iterate_whole_headers
from millstream.protocol.records.record import Headers, NewRecord, Record, decode_batch, encode_batch
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

_KEPT_MS_MAX: Final = 365 * 24 * 3600 * 1000

_TOPIC_SETTINGS: Final = {
    # A dead letter is larger than its message, since it carries the reason.
    "max.message.bytes": str(32 * 1024 * 1024),
    # Open letters are kept regardless of their age.
    "retention.until.delivered": "true",
    "retention.until.max.ms": str(_KEPT_MS_MAX),
}


class DeadLetterAppender(LeaderAppender):
    """Appends letters to dead letter topics, which it creates.

    Letters are exempt from schema rules, so leaders on other nodes take them by a request of nodes, not by a Produce.
    """

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        *,
        refusal: Callable[[UUID, str], str] = lambda _subscription_id, _topic: "",
    ) -> None:
        super().__init__(topics, membership.addresses, client_id="dead-letters")
        self._me = membership.me
        self.refusal = refusal
        """Returns why a subscription may not write letters with messages of a topic; empty if it may."""

    async def _send(self, client: Client, topic: str, index: int, batch: bytearray) -> Offset:
        request = AppendLetterRequest(topic, index, bytes(batch), self._me.node_id, self._me.secret)

        async def attempt(leader: NodeId) -> Offset:
            response = await request_private(client, leader, request, about=f"dead letter to {topic}-{index}")
            return Offset(response.offset)

        return await client.call_leader(topic, index, attempt, create=True)

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic, which is created if it does not exist."""
        described = self._topics.get(topic)
        if described is None:
            with suppress(TopicExists):
                await self._topics.create(topic, overrides=_TOPIC_SETTINGS)
            described = self._topics.get(topic)
        if described is None:
            raise UnknownTopic(f"the dead letter topic {topic!r} is being created; try again")
        return described.partitions


IN_FLIGHT_MAX: Final = 5
"""The number of batches per producer that a log remembers."""

REFUSED_S_MAX: Final = 300.0
"""The longest wait before a letter that its topic refused is retried."""

READ_BYTES: Final = 1


_PLAN: Final = struct.Struct(">qii")


class Plan(NamedTuple):
    """The number under which a letter is written, and its partition."""

    producer_id: ProducerId
    sequence: int
    partition: int

    def write(self) -> bytes:
        """Encode the plan as the queue stores it."""
        return _PLAN.pack(*self)

    @classmethod
    def read(cls, content: bytes) -> Plan:
        producer_id, sequence, partition = _PLAN.unpack(content)
        return cls(ProducerId(producer_id), sequence, partition)


class DeadLetters:
    """Write the dead letters of one queue."""

    def __init__(
        self,
        delivery: Delivery,
        appender: DeadLetterAppender,
        clock: Clock,
        *,
        subscription: str,
        next_producer_id: Callable[[], Awaitable[ProducerId]],
        random: Random,
    ) -> None:
        self._delivery = delivery
        self._appender = appender
        self._clock = clock
        self._subscription = subscription
        self._next_producer_id = next_producer_id
        self._backoff = Backoff(random, max_s=30.0)
        self._refused_backoff = Backoff(random, max_s=REFUSED_S_MAX)
        self._producer_id: ProducerId | None = None
        self._sequences: dict[int, int] = {}
        # Letters that were refused for their content, until the next pause ends.
        self._refused: set[Offset] = set()
        self._pause_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        delivery.on_rejecting = self.wake

    def wake(self) -> None:
        """Start writing letters, or notice new ones."""
        self._wakeup.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"dead letters {self._subscription}")
            self._task.add_done_callback(self._on_finished)

    async def close(self) -> None:
        """Stop; the next leader of the queue writes the remaining letters."""
        await cancel_and_wait(*(task for task in (self._task, self._pause_task) if task is not None))

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # More may have been rejected after the last check.
        if not task.cancelled() and not self._delivery.is_closed and self._delivery.queue.counts.rejecting:
            self.wake()

    async def _run(self) -> None:
        while not self._delivery.is_closed and self._delivery.queue.counts.rejecting:
            try:
                letters = self._next_rejected()
                if letters:
                    await self._write_letters(letters)
                    self._backoff.reset()
                else:
                    # Only refused letters are left.
                    await self._pause_or_wakeup()
            except MillstreamError as error:
                self._log_retry("dead letters could not be written; retrying", error)
                await self._backoff.pause()
            except Exception as error:
                _logger.exception(
                    "writing dead letters failed", extra={"subscription": self._subscription}, exc_info=error
                )
                await self._backoff.pause()
        self._delivery.refused_letters.clear()

    async def _pause_or_wakeup(self) -> None:
        """Wait until refused letters are due again, or new ones arrive."""
        loop = asyncio.get_running_loop()
        if self._pause_task is None:
            self._pause_task = loop.create_task(self._refused_backoff.pause())
        self._wakeup.clear()
        wakeup = loop.create_task(self._wakeup.wait())
        try:
            await asyncio.wait([self._pause_task, wakeup], return_when=asyncio.FIRST_COMPLETED)
        finally:
            wakeup.cancel()
        if self._pause_task.done():
            self._pause_task = None
            self._refused.clear()

    def _next_rejected(self) -> list[RejectedMessage]:
        """Return the planned letters, or the next ones to plan if there are none."""
        queue = self._delivery.queue
        planned = queue.planned()
        if planned:
            return planned
        messages = queue.rejecting(IN_FLIGHT_MAX + len(self._refused))
        return [rejected for rejected in messages if rejected.offset not in self._refused][:IN_FLIGHT_MAX]

    async def _write_letters(self, letters: list[RejectedMessage]) -> None:
        queue, settings = self._delivery.queue, self._delivery.settings
        topic = settings.dead_letter_topic
        if not settings.has_dead_letters:
            # The subscription has lost its dead letter topic: nothing can take the letters any more.
            for rejected in letters:
                queue.drop(rejected.offset, rejected.reason, now_ms=self._clock.now_ms())
            self._delivery.queue_changed()
            return
        refusal = self._appender.refusal(self._delivery.key.subscription_id, self._delivery.topic)
        if refusal and not letters[0].plan:
            # Planned letters may be written already.
            self._delivery.refused_letters.update(rejected.offset for rejected in letters)
            self._delivery.letter_refusal = refusal
            raise TopicNotAuthorized(refusal)
        partitions = await self._appender.partitions(topic)
        planned = [
            (rejected, plan) for rejected in letters if (plan := await self._plan_for(rejected, partitions)) is not None
        ]
        await self._delivery.durable()
        # The log only accepts them in the order of their numbers.
        for rejected, plan in sorted(planned, key=lambda pair: pair[1]):
            if plan.partition >= partitions:
                # The topic was recreated with fewer partitions.
                self._discard_plan(rejected)
            else:
                await self._write_letter(topic, rejected, plan)
        self._delivery.queue_changed()

    async def _write_letter(self, topic: str, rejected: RejectedMessage, plan: Plan) -> None:
        queue, size = self._delivery.queue, 0
        try:
            record = await self._read_message(rejected.offset)
            if record is None:
                _logger.warning(
                    "a message is lost: the log no longer has it, so it cannot be dead-lettered",
                    extra={
                        "subscription": self._subscription,
                        "topic": self._delivery.topic,
                        "offset": rejected.offset,
                    },
                )
                queue.drop(rejected.offset, LOST_REASON, now_ms=self._clock.now_ms())
                # The number stays unused, so the log would reject every later one of this producer.
                self._producer_id = None
                return
            letter = self._build_letter(rejected, plan, record)
            size = len(letter)
            offset = await self._appender.append(topic, plan.partition, letter)
        except BatchRejected as error:
            self._record_refusal(topic, rejected, error, size)
            self._discard_plan(rejected)
        except ProducerRejected as error:
            self._log_retry("a dead letter gets a new sequence number", error, offset=rejected.offset)
            self._discard_plan(rejected)
        else:
            if rejected.offset in self._delivery.refused_letters:
                self._delivery.refused_letters.discard(rejected.offset)
                self._refused_backoff.reset()
            where = POSITION.pack(plan.partition, offset) + topic.encode()
            queue.dead_lettered(rejected.offset, where, now_ms=self._clock.now_ms())

    def _record_refusal(self, topic: str, rejected: RejectedMessage, error: BatchRejected, size: int) -> None:
        """Retry a refused letter later, and log once what to do about it."""
        self._refused.add(rejected.offset)
        delivery = self._delivery
        reason = f"dead letter topic {topic!r} refuses the letter: {error}"
        if isinstance(error, BatchTooLarge) and size:
            reason += f"; raise it with: millstream topic alter {topic} --set max.message.bytes={size}"
        if rejected.offset not in delivery.refused_letters:
            _logger.error(
                "a message cannot be dead-lettered, and is retried every few minutes: %s",
                reason,
                extra={"subscription": self._subscription, "topic": delivery.topic, "offset": rejected.offset},
            )
        delivery.refused_letters.add(rejected.offset)
        delivery.letter_refusal = reason

    def _discard_plan(self, rejected: RejectedMessage) -> None:
        """Discard the plan of a letter that is certainly not stored, so that it gets a new number."""
        self._delivery.queue.plan(rejected.offset, b"", now_ms=self._clock.now_ms())
        self._producer_id = None

    def _log_retry(self, message: str, error: MillstreamError, **context: object) -> None:
        _logger.warning(message, extra={"subscription": self._subscription, "error": str(error), **context})

    async def _plan_for(self, rejected: RejectedMessage, partitions: int) -> Plan | None:
        """Return the plan of a letter, made now if there is none; None if the message is no longer rejected."""
        if rejected.plan:
            return Plan.read(rejected.plan)
        if self._producer_id is None:
            self._producer_id = await self._next_producer_id()
            self._sequences.clear()
        index = self._delivery.key.partition % partitions
        sequence = self._sequences.get(index, 0)
        plan = Plan(self._producer_id, sequence, index)
        if not self._delivery.queue.plan(rejected.offset, plan.write(), now_ms=self._clock.now_ms()):
            return None
        self._sequences[index] = sequence + 1
        return plan

    async def _read_message(self, offset: Offset) -> Record | None:
        """Read the message; None if the log no longer has it."""
        try:
            records = self._delivery.partition.read(offset, max_bytes=READ_BYTES)
        except (OffsetOutOfRange, DamagedRange):
            return None
        header = next(iterate_whole_headers(records), None)
        if header is None:
            return None
        check_crc(records, header)
        if header.compression == COMPRESSION_NONE and header.record_count <= LIGHT_RECORDS_MAX:
            return next(decode_batch(records, header, ranges=(OffsetRange(offset, offset + 1),)), None)
        # In a thread: a large batch may need to be decompressed or skipped through for one message.
        return await asyncio.to_thread(
            lambda: next(decode_batch(records, header, ranges=(OffsetRange(offset, offset + 1),)), None)
        )

    def _build_letter(self, rejected: RejectedMessage, plan: Plan, record: Record) -> bytearray:
        key = self._delivery.key
        source = self._delivery.partition.topic.name
        now_ms = self._clock.now_ms()
        details = {
            "subscription": self._subscription,
            "topic": source,
            "topic-id": str(key.topic_id),
            "partition": str(key.partition),
            "offset": str(rejected.offset),
            "leader-epoch": str(self._delivery.partition.log.epochs.epoch_at(rejected.offset)),
            "attempts": str(rejected.attempts),
            "reason": rejected.reason,
            "first-time": str(rejected.first_ms),
            "last-time": str(rejected.time_ms),
        }
        headers: Headers = tuple(header for header in record.headers if not header[0].startswith(LETTER_PREFIX))
        if not any(name == MESSAGE_ID for name, _ in headers):
            headers += ((MESSAGE_ID, f"{key.topic_id}/{key.partition}/{rejected.offset}".encode()),)
        headers += (
            *_redrive_headers(record),
            *((LETTER_PREFIX + name, text.encode()) for name, text in details.items()),
        )
        return encode_batch(
            [NewRecord(record.key, record.value, headers, now_ms)],
            producer_id=plan.producer_id,
            producer_epoch=0,
            base_sequence=plan.sequence,
        )


def _redrive_headers(record: Record) -> Headers:
    """Build the headers that record when the message was first published and how often it was redriven."""
    details = dict(record.headers)
    published = str(record.timestamp_ms).encode()
    if LETTER_REDRIVEN not in details:
        return ((LETTER_PUBLISHED, published),)
    return ((LETTER_PUBLISHED, details.get(LETTER_PUBLISHED) or published), (LETTER_REDRIVEN, details[LETTER_REDRIVEN]))
