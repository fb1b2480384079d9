"""The way of a message to the dead letter topic: once, whatever fails on the way, and past those that cannot go."""

from __future__ import annotations

import asyncio
from random import Random

import crc32c
import pytest

from millstream.broker.subscriptions.dead_letters import DeadLetterAppender, DeadLetters
from millstream.broker.subscriptions.delivery import Delivery
from millstream.broker.subscriptions.lease import LETTER_BYTES, DeltaKind, Settlement
from millstream.core.backoff import FIRST_S
from millstream.core.errors import (
    BatchTooLarge,
    MillstreamError,
    NotLeader,
    OutOfOrderSequence,
    StorageFailure,
    UnknownTopic,
)
from millstream.core.ids import Offset, ProducerId
from millstream.core.subscription import READ_UNCOMMITTED, SubscriptionSettings, Verb
from millstream.protocol.records.batch import COMPRESSION_GZIP, read_header
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch
from millstream.protocol.wire.error_codes import TRANSIENT
from millstream_testing.queue_bench import Workbench, offsets, turns, wanted

WAIT_S = 60.0
DEAD = "dead"


class Box(DeadLetterAppender):
    """A dead letter topic of one partition, which takes the numbers of producers as a log does."""

    def __init__(self) -> None:
        self.letters: list[Record] = []
        self.trouble: list[MillstreamError] = []
        self.too_large = b"nothing is"
        self.partition_count = 1
        self.lost_responses = self.refusals = 0
        self._numbers: dict[int, list[int]] = {}

    async def close(self) -> None:
        pass

    async def partitions(self, topic: str) -> int:
        await asyncio.sleep(0)
        return self.partition_count

    async def append(self, topic: str, index: int, batch: bytearray) -> Offset:
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop(0)
        if self.too_large in bytes(batch):
            self.refusals += 1
            raise BatchTooLarge("it does not fit")
        header = read_header(batch)
        numbers = self._numbers.setdefault(header.producer_id, [])
        if header.base_sequence in numbers[-5:]:
            return Offset(0)
        if numbers and header.base_sequence != numbers[-1] + 1:
            raise OutOfOrderSequence(f"{header.base_sequence} does not follow {numbers[-1]}")
        numbers.append(header.base_sequence)
        self.letters += decode_records(batch)
        if self.lost_responses:
            self.lost_responses -= 1
            raise NotLeader("the response was lost")
        return Offset(len(self.letters) - 1)

    def values(self) -> list[str]:
        return [(letter.value or b"").decode() for letter in self.letters]


class Desk:
    """A queue with a dead letter topic."""

    def __init__(self, bench: Workbench, box: Box) -> None:
        self.bench = bench
        self.box = box
        self.ids = 0
        self.delivery: Delivery
        self.letters: DeadLetters

    async def open(self) -> None:
        self.delivery = await self.bench.open(dead_letter_topic=DEAD)
        self.letters = DeadLetters(
            self.delivery,
            self.box,
            self.bench.clock,
            subscription="billing",
            next_producer_id=self._next_id,
            random=Random(1),
        )
        self.delivery.queue_changed()

    async def _next_id(self) -> ProducerId:
        self.ids += 1
        return ProducerId(1000 + self.ids)

    def reject(self, *offsets: int) -> None:
        verbs = [Settlement(Offset(offset), Offset(offset), Verb.REJECT, None, "bad") for offset in offsets]
        assert self.delivery.settle_now("one", verbs) == [None] * len(offsets)

    async def until(self, count: int) -> None:
        """Until only so many are on their way."""
        async with asyncio.timeout(WAIT_S):
            while self.delivery.queue.counts.rejecting > count:
                await asyncio.sleep(0.005)

    async def crash(self) -> None:
        self.delivery.close(NotLeader("crash"))
        await self.letters.close()
        self.bench.store.forget_unwritten()


@pytest.fixture
async def desk() -> Desk:
    made = Desk(Workbench(), Box())
    await made.open()
    return made


def give(desk: Desk, *values: str, compression: int = 0) -> None:
    for value in values:
        desk.bench.publish(value, compression=compression)
    desk.delivery.try_receive(wanted(100))


async def test_many_letters_are_written_once_and_in_order(desk: Desk) -> None:
    give(desk, *map(str, range(23)), compression=COMPRESSION_GZIP)
    desk.reject(*range(23))
    await desk.until(0)
    assert desk.box.values() == [str(number) for number in range(23)]
    assert desk.ids == 1
    headers = dict(desk.box.letters[3].headers)
    assert (headers["dlq-offset"], headers["dlq-reason"], headers["dlq-attempts"]) == (b"3", b"bad", b"1")


async def test_a_letter_that_is_refused_for_what_it_is_does_not_hold_up_others(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.box.too_large = b"huge"
    give(desk, "a", "huge", "b", "huge too", *map(str, range(10)))
    desk.reject(*range(14))
    await desk.until(2)
    assert sorted(desk.box.values()) == sorted(["a", "b", *map(str, range(10))])
    async with asyncio.timeout(WAIT_S):
        while desk.box.refusals < 6:
            await asyncio.sleep(0.005)
    # The pauses between them grow, and each letter is reported once.
    assert desk.letters._refused_backoff.next_s > 2 * FIRST_S
    reported = [record.getMessage() for record in caplog.records if "cannot be dead-lettered" in record.getMessage()]
    assert len(reported) == 2
    assert "millstream topic alter dead --set max.message.bytes=" in reported[0]
    assert desk.delivery.refused_letters == {1, 3}
    assert "it does not fit" in desk.delivery.letter_refusal
    give(desk, "later")
    desk.reject(14)
    await desk.until(2)
    desk.box.too_large = b"nothing is"
    await desk.until(0)
    assert desk.delivery.refused_letters == set()
    assert len(set(desk.box.values())) == len(desk.box.values()) == 15
    assert desk.delivery.queue.counter(DeltaKind.DEAD_LETTERED) == 15


async def test_what_passes_is_tried_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.box.trouble = [UnknownTopic("it is being made"), StorageFailure("the disk is full"), NotLeader("moved")]
    give(desk, "a", "b", "c")
    desk.reject(0, 1, 2)
    await desk.until(0)
    assert desk.box.values() == ["a", "b", "c"]
    assert "retrying" in caplog.text


async def test_a_response_that_is_lost_doubles_nothing(desk: Desk) -> None:
    desk.box.lost_responses = 3
    give(desk, "a", "b", "c", "d")
    desk.reject(0, 1, 2, 3)
    await desk.until(0)
    assert desk.box.values() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_letter_that_is_redriven_before_its_queue_knows_of_it_is_delivered(desk: Desk, crashes: bool) -> None:
    give(desk, "a")
    desk.box.lost_responses = 1
    desk.reject(0)
    async with asyncio.timeout(WAIT_S):
        while not desk.box.letters:
            await asyncio.sleep(0)
    desk.box.trouble = [NotLeader("moved")] * 100
    letter = {Offset(0): bytes(LETTER_BYTES)}
    if crashes:
        await desk.crash()
        await desk.open()
    with pytest.raises(TRANSIENT, match="message 0 is still being written"):
        await desk.delivery.revive(letter, {})
    desk.box.trouble.clear()
    await desk.until(0)
    assert await desk.delivery.revive(letter, {}) == []
    assert offsets(desk.delivery.try_receive(wanted(1))) == [0]


async def test_after_a_crash_the_plans_are_carried_out_and_nothing_is_doubled(desk: Desk) -> None:
    give(desk, *map(str, range(8)))
    desk.bench.store.holds = True
    desk.reject(*range(8))
    desk.bench.store.let_go()
    async with asyncio.timeout(WAIT_S):
        while not desk.delivery.queue.planned():
            await asyncio.sleep(0)
        # The plans become durable, what is written under them does not.
        desk.bench.store.let_go()
        while len(desk.box.letters) < 3:
            await asyncio.sleep(0)
    await desk.crash()
    desk.bench.store.holds = False
    await desk.open()
    await desk.until(0)
    assert desk.box.values() == [str(number) for number in range(8)]


async def test_planned_letters_go_before_others(desk: Desk) -> None:
    """A number is only taken behind the one before it, so none is given to a letter that would overtake."""
    desk.box.trouble = [StorageFailure("the disk is full")]
    give(desk, *map(str, range(10)))
    desk.reject(*range(5, 10))
    async with asyncio.timeout(WAIT_S):
        while not desk.delivery.queue.planned():
            await asyncio.sleep(0)
    desk.reject(0, 1)
    await desk.until(0)
    assert desk.box.values() == ["5", "6", "7", "8", "9", "0", "1"]


async def test_a_message_that_is_gone_is_dropped_and_the_rest_goes_on(desk: Desk) -> None:
    give(desk, "a", "b", "c")
    desk.bench.store.holds = True
    desk.reject(0, 1, 2)
    desk.bench.partition.delete_before(Offset(2))
    desk.bench.store.holds = False
    desk.bench.store.let_go()
    await desk.until(0)
    assert desk.box.values() == ["c"]
    assert desk.delivery.queue.counter(DeltaKind.DROPPED) == 2


async def test_messages_of_transactions_are_letters_and_those_that_cannot_be_opened_never_come(desk: Desk) -> None:
    desk.delivery.queue.settings = SubscriptionSettings(dead_letter_topic=DEAD, isolation=READ_UNCOMMITTED)
    desk.bench.publish_in_transaction("aborted", producer_id=5, commit=False)
    broken = encode_batch([NewRecord(b"a", b"x" * 500, (), 1)], compression=COMPRESSION_GZIP)
    broken[62:] = bytes(len(broken) - 62)
    broken[17:21] = crc32c.crc32c(bytes(broken[21:])).to_bytes(4, "big")
    desk.bench.partition.write(broken, acks=-1)
    give(desk, "plain")
    await desk.delivery.scan_settled(patience_s=WAIT_S)
    desk.delivery.try_receive(wanted(10))
    desk.reject(0, 3)
    await desk.until(0)
    assert desk.box.values() == ["aborted", "plain"]


async def test_a_topic_that_is_recreated_with_fewer_partitions_takes_the_letters(desk: Desk) -> None:
    desk.bench.partition = desk.bench.make_partition(3)
    desk.box.partition_count = 4
    await desk.open()
    desk.box.trouble = [StorageFailure("the disk is full")]
    give(desk, "a")
    desk.reject(0)
    async with asyncio.timeout(WAIT_S):
        while not desk.delivery.queue.planned():
            await asyncio.sleep(0)
    desk.box.partition_count = 1
    await desk.until(0)
    assert desk.box.values() == ["a"]


async def test_without_a_topic_any_more_they_are_dropped(desk: Desk) -> None:
    give(desk, "a")
    desk.delivery.change(SubscriptionSettings(), None)
    desk.delivery.queue.settings = SubscriptionSettings(dead_letter_topic=DEAD)
    desk.bench.store.holds = True
    desk.reject(0)
    desk.delivery.change(SubscriptionSettings(), None)
    desk.bench.store.holds = False
    desk.bench.store.let_go()
    await desk.until(0)
    assert desk.box.values() == []


async def test_a_seek_while_letters_are_planned_writes_none_of_them(desk: Desk) -> None:
    give(desk, "a", "b")
    desk.reject(0)
    desk.delivery.seek(Offset(0))
    await turns()
    assert desk.box.values() == []
    desk.delivery.try_receive(wanted(5))
    desk.reject(1)
    await desk.until(0)
    assert desk.box.values() == ["b"]


async def test_one_that_is_rejected_when_the_last_was_just_written_is_not_forgotten(desk: Desk) -> None:
    give(desk, *map(str, range(30)))
    for offset in range(30):
        desk.reject(offset)
        await turns(offset % 7)
    await desk.until(0)
    assert len(desk.box.letters) == 30


async def test_a_queue_that_closes_ends_the_writing(desk: Desk) -> None:
    desk.box.trouble = [StorageFailure("the disk is full")] * 1000
    give(desk, "a")
    desk.reject(0)
    await turns()
    await desk.crash()
    assert desk.box.values() == []


async def test_an_unforeseen_failure_is_reported_and_retried(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.box.trouble = [ZeroDivisionError("a bug")]  # type: ignore[list-item]
    give(desk, "a")
    desk.reject(0)
    await desk.until(0)
    assert desk.box.values() == ["a"]
    assert "dead letters failed" in caplog.text
