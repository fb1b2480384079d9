"""Moving messages to the dead letter topic: exactly once despite failures, and past letters that cannot be written."""

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
from millstream_testing.queue_bench import Workbench, demand_for, offsets, turns
from millstream_testing.waiting import until

WAIT_S = 60.0
DEAD = "dead"


class DeadLetterLog(DeadLetterAppender):
    """A dead letter topic of one partition, which checks producer sequences as a log does."""

    def __init__(self) -> None:
        self.letters: list[Record] = []
        self.trouble: list[MillstreamError] = []
        self.too_large = b"nothing is"
        self.partition_count = 1
        self.refusal = lambda _subscription_id, _topic: ""
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


class DeadLetterQueue:
    def __init__(self, bench: Workbench, box: DeadLetterLog) -> None:
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
        """Wait until this many letters are pending."""
        await until(lambda: self.delivery.queue.counts.rejecting <= count)

    async def crash(self) -> None:
        self.delivery.close(NotLeader("crash"))
        await self.letters.close()
        self.bench.store.discard_pending()


@pytest.fixture
async def dlq() -> DeadLetterQueue:
    made = DeadLetterQueue(Workbench(), DeadLetterLog())
    await made.open()
    return made


def dead_letter_all(dlq: DeadLetterQueue, *values: str, compression: int = 0) -> None:
    for value in values:
        dlq.bench.publish(value, compression=compression)
    dlq.delivery.try_receive(demand_for(100))


async def test_many_letters_are_written_once_and_in_order(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, *map(str, range(23)), compression=COMPRESSION_GZIP)
    dlq.reject(*range(23))
    await dlq.until(0)
    assert dlq.box.values() == [str(number) for number in range(23)]
    assert dlq.ids == 1
    headers = dict(dlq.box.letters[3].headers)
    assert (headers["dlq-offset"], headers["dlq-reason"], headers["dlq-attempts"]) == (b"3", b"bad", b"1")


async def test_a_letter_refused_for_its_content_does_not_block_others(
    dlq: DeadLetterQueue, caplog: pytest.LogCaptureFixture
) -> None:
    dlq.box.too_large = b"huge"
    dead_letter_all(dlq, "a", "huge", "b", "huge too", *map(str, range(10)))
    dlq.reject(*range(14))
    await dlq.until(2)
    assert sorted(dlq.box.values()) == sorted(["a", "b", *map(str, range(10))])
    await until(lambda: dlq.box.refusals >= 6)
    # The pauses between attempts grow, and each letter is reported once.
    assert dlq.letters._refused_backoff.next_s > 2 * FIRST_S
    reported = [record.getMessage() for record in caplog.records if "cannot be dead-lettered" in record.getMessage()]
    assert len(reported) == 2
    assert "millstream topic alter dead --set max.message.bytes=" in reported[0]
    assert dlq.delivery.refused_letters == {1, 3}
    assert "it does not fit" in dlq.delivery.letter_refusal
    dead_letter_all(dlq, "later")
    dlq.reject(14)
    await dlq.until(2)
    dlq.box.too_large = b"nothing is"
    await dlq.until(0)
    assert dlq.delivery.refused_letters == set()
    assert len(set(dlq.box.values())) == len(dlq.box.values()) == 15
    assert dlq.delivery.queue.counter(DeltaKind.DEAD_LETTERED) == 15


async def test_a_transient_failure_is_retried(dlq: DeadLetterQueue, caplog: pytest.LogCaptureFixture) -> None:
    dlq.box.trouble = [UnknownTopic("it is being made"), StorageFailure("the disk is full"), NotLeader("moved")]
    dead_letter_all(dlq, "a", "b", "c")
    dlq.reject(0, 1, 2)
    await dlq.until(0)
    assert dlq.box.values() == ["a", "b", "c"]
    assert "retrying" in caplog.text


async def test_a_lost_response_duplicates_nothing(dlq: DeadLetterQueue) -> None:
    dlq.box.lost_responses = 3
    dead_letter_all(dlq, "a", "b", "c", "d")
    dlq.reject(0, 1, 2, 3)
    await dlq.until(0)
    assert dlq.box.values() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_letter_redriven_before_its_queue_knows_of_it_is_delivered(dlq: DeadLetterQueue, crashes: bool) -> None:
    dead_letter_all(dlq, "a")
    dlq.box.lost_responses = 1
    dlq.reject(0)
    await until(lambda: dlq.box.letters)
    dlq.box.trouble = [NotLeader("moved")] * 100
    letter = {Offset(0): bytes(LETTER_BYTES)}
    if crashes:
        await dlq.crash()
        await dlq.open()
    with pytest.raises(TRANSIENT, match="message 0 is still being written"):
        await dlq.delivery.revive(letter, {}, epoch=dlq.delivery.leader_epoch)
    dlq.box.trouble.clear()
    await dlq.until(0)
    assert await dlq.delivery.revive(letter, {}, epoch=dlq.delivery.leader_epoch) == []
    assert offsets(dlq.delivery.try_receive(demand_for(1))) == [0]


async def test_a_letter_redelivers_only_the_message_of_its_leader_epoch(dlq: DeadLetterQueue) -> None:
    """After a failover of a mirror, the log may have another message at the offset of a letter."""
    dead_letter_all(dlq, "a")
    dlq.reject(0)
    await dlq.until(0)
    epoch = int(dict(dlq.box.letters[0].headers)["dlq-leader-epoch"] or b"")
    letter = {Offset(0): bytes(LETTER_BYTES)}
    assert await dlq.delivery.revive(letter, {}, epoch=epoch - 1) == [0]
    assert offsets(dlq.delivery.try_receive(demand_for(1))) == []
    assert await dlq.delivery.revive(letter, {}, epoch=epoch) == []
    assert offsets(dlq.delivery.try_receive(demand_for(1))) == [0]


async def test_after_a_crash_planned_letters_are_written_once(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, *map(str, range(8)))
    dlq.bench.store.holds_writes = True
    dlq.reject(*range(8))
    dlq.bench.store.release_writes()
    async with asyncio.timeout(WAIT_S):
        await until(lambda: dlq.delivery.queue.planned())
        # The plans become durable, the letters written under them do not.
        dlq.bench.store.release_writes()
        await until(lambda: len(dlq.box.letters) >= 3)
    await dlq.crash()
    dlq.bench.store.holds_writes = False
    await dlq.open()
    await dlq.until(0)
    assert dlq.box.values() == [str(number) for number in range(8)]


async def test_planned_letters_precede_others(dlq: DeadLetterQueue) -> None:
    """Sequences are consecutive, so none is given to a letter that would overtake."""
    dlq.box.trouble = [StorageFailure("the disk is full")]
    dead_letter_all(dlq, *map(str, range(10)))
    dlq.reject(*range(5, 10))
    await until(lambda: dlq.delivery.queue.planned())
    dlq.reject(0, 1)
    await dlq.until(0)
    assert dlq.box.values() == ["5", "6", "7", "8", "9", "0", "1"]


async def test_a_deleted_message_is_dropped_and_the_rest_continues(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, "a", "b", "c")
    dlq.bench.store.holds_writes = True
    dlq.reject(0, 1, 2)
    dlq.bench.partition.delete_before(Offset(2))
    dlq.bench.store.holds_writes = False
    dlq.bench.store.release_writes()
    await dlq.until(0)
    assert dlq.box.values() == ["c"]
    assert dlq.delivery.queue.counter(DeltaKind.DROPPED) == 2


async def test_transactional_messages_become_letters_and_unreadable_ones_never_do(dlq: DeadLetterQueue) -> None:
    dlq.delivery.queue.settings = SubscriptionSettings(dead_letter_topic=DEAD, isolation=READ_UNCOMMITTED)
    dlq.bench.publish_in_transaction("aborted", producer_id=5, commit=False)
    broken = encode_batch([NewRecord(b"a", b"x" * 500, (), 1)], compression=COMPRESSION_GZIP)
    broken[62:] = bytes(len(broken) - 62)
    broken[17:21] = crc32c.crc32c(bytes(broken[21:])).to_bytes(4, "big")
    dlq.bench.partition.write(broken, acks=-1)
    dead_letter_all(dlq, "plain")
    await dlq.delivery.scan_settled(patience_s=WAIT_S)
    dlq.delivery.try_receive(demand_for(10))
    dlq.reject(0, 3)
    await dlq.until(0)
    assert dlq.box.values() == ["aborted", "plain"]


async def test_a_dead_letter_topic_recreated_with_fewer_partitions_is_used(dlq: DeadLetterQueue) -> None:
    dlq.bench.partition = dlq.bench.make_partition(3)
    dlq.box.partition_count = 4
    await dlq.open()
    dlq.box.trouble = [StorageFailure("the disk is full")]
    dead_letter_all(dlq, "a")
    dlq.reject(0)
    await until(lambda: dlq.delivery.queue.planned())
    dlq.box.partition_count = 1
    await dlq.until(0)
    assert dlq.box.values() == ["a"]


async def test_without_a_dead_letter_topic_any_more_letters_are_dropped(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, "a")
    dlq.delivery.change(SubscriptionSettings(), None)
    dlq.delivery.queue.settings = SubscriptionSettings(dead_letter_topic=DEAD)
    dlq.bench.store.holds_writes = True
    dlq.reject(0)
    dlq.delivery.change(SubscriptionSettings(), None)
    dlq.bench.store.holds_writes = False
    dlq.bench.store.release_writes()
    await dlq.until(0)
    assert dlq.box.values() == []


async def test_a_seek_while_letters_are_planned_writes_none_of_them(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, "a", "b")
    dlq.reject(0)
    dlq.delivery.seek(Offset(0))
    await turns()
    assert dlq.box.values() == []
    dlq.delivery.try_receive(demand_for(5))
    dlq.reject(1)
    await dlq.until(0)
    assert dlq.box.values() == ["b"]


async def test_a_message_rejected_just_after_the_last_write_is_not_forgotten(dlq: DeadLetterQueue) -> None:
    dead_letter_all(dlq, *map(str, range(30)))
    for offset in range(30):
        dlq.reject(offset)
        await turns(offset % 7)
    await dlq.until(0)
    assert len(dlq.box.letters) == 30


async def test_a_closing_queue_stops_writing(dlq: DeadLetterQueue) -> None:
    dlq.box.trouble = [StorageFailure("the disk is full")] * 1000
    dead_letter_all(dlq, "a")
    dlq.reject(0)
    await turns()
    await dlq.crash()
    assert dlq.box.values() == []


async def test_an_unexpected_failure_is_reported_and_retried(
    dlq: DeadLetterQueue, caplog: pytest.LogCaptureFixture
) -> None:
    dlq.box.trouble = [ZeroDivisionError("a bug")]  # type: ignore[list-item]
    dead_letter_all(dlq, "a")
    dlq.reject(0)
    await dlq.until(0)
    assert dlq.box.values() == ["a"]
    assert "writing dead letters failed" in caplog.text
