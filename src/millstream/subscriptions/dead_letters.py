"""The way of a message to the dead letter topic, in three durable steps: rejecting, planned, dead-lettered.

The plan names the producer id and sequence number under which the letter is written. It is durable before the letter
is, so whoever takes the queue over after a crash writes the same letter under the same number, and the topic takes it
once. Not more letters are under way than a log remembers of a producer.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NamedTuple

from millstream.cluster.backoff import Backoff
from millstream.model.clock import Clock
from millstream.model.errors import MillstreamError, OffsetOutOfRange
from millstream.model.ids import Offset, ProducerId
from millstream.records.record import Headers, NewRecord, Record, decode_records, encode_batch
from millstream.subscriptions.delivery import Delivery
from millstream.subscriptions.letter_box import LetterBox
from millstream.subscriptions.queue import Rejected

_logger = logging.getLogger(__name__)

UNDER_WAY_MAX: Final = 5
"""So many of the last batches of a producer are remembered by a log."""
MESSAGE_ID: Final = "message-id"
PREFIX: Final = "dlq-"
READ_BYTES: Final = 1
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
        self._task: asyncio.Task[None] | None = None
        delivery.when_rejecting = self.wake

    def wake(self) -> None:
        """There are messages to be written away."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"dead letters {self._subscription}")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop; what is not written away will be by whoever leads the queue next."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("dead letters are not written any more", exc_info=error)

    async def _run(self) -> None:
        while not self._delivery.is_closed and (rejected := self._delivery.queue.rejecting(UNDER_WAY_MAX)):
            try:
                await self._write_away(rejected)
                self._backoff.succeeded()
            except MillstreamError as error:
                _logger.warning(
                    "dead letters could not be written; trying again",
                    extra={"subscription": self._subscription, "error": str(error)},
                )
                await self._backoff.pause()

    async def _write_away(self, rejected: list[Rejected]) -> None:
        topic = self._delivery.settings.dead_letter_topic
        partitions = await self._box.partitions(topic) if topic else 0
        planned = [(one, await self._planned(one, partitions)) for one in rejected] if topic else []
        await self._delivery.durable()
        # In the order of their numbers, which is the only one that the log takes.
        for one, plan in sorted(planned, key=lambda pair: pair[1]):
            record = self._find(one.offset)
            where = b""
            if record is not None:
                offset = await self._box.append(topic, plan.partition, self._letter(one, plan, record))
                where = _WHERE.pack(plan.partition, offset)
            self._delivery.queue.dead_lettered(one.offset, where, now_ms=self._clock.now_ms())
        if not topic:
            # The declaration lost its topic meanwhile: nothing can take them any more.
            for one in rejected:
                self._delivery.queue.drop(one.offset, one.reason, now_ms=self._clock.now_ms())
        self._delivery.news()

    async def _planned(self, one: Rejected, partitions: int) -> Plan:
        if one.plan:
            return Plan.read(one.plan)
        if self._producer_id is None:
            self._producer_id = await self._next_producer_id()
        index = self._delivery.key.partition % partitions
        sequence = self._sequences.get(index, 0)
        self._sequences[index] = sequence + 1
        plan = Plan(self._producer_id, sequence, index)
        self._delivery.queue.plan(one.offset, plan.write(), now_ms=self._clock.now_ms())
        return plan

    def _find(self, offset: Offset) -> Record | None:
        """The message itself; None when the log has it no more."""
        try:
            records = self._delivery.partition.read(offset, max_bytes=READ_BYTES)
        except OffsetOutOfRange:
            return None
        return next((record for record in decode_records(records) if record.offset == offset), None)

    def _letter(self, one: Rejected, plan: Plan, record: Record) -> bytearray:
        key = self._delivery.key
        source = self._delivery.partition.topic.name
        now_ms = self._clock.now_ms()
        told = {
            "subscription": self._subscription,
            "topic": source,
            "partition": str(key.partition),
            "offset": str(one.offset),
            "timestamp": str(record.timestamp_ms),
            "attempts": str(one.attempts),
            "reason": one.reason,
            "first-time": str(one.first_ms),
            "last-time": str(one.time_ms),
        }
        headers: Headers = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
        if not any(name == MESSAGE_ID for name, _ in headers):
            headers += ((MESSAGE_ID, f"{key.topic_id}/{key.partition}/{one.offset}".encode()),)
        headers += tuple((PREFIX + name, text.encode()) for name, text in told.items())
        return encode_batch(
            [NewRecord(record.key, record.value, headers, now_ms)],
            producer_id=plan.producer_id,
            producer_epoch=0,
            base_sequence=plan.sequence,
        )
