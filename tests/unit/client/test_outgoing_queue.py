"""Batches of one partition: which are sent, which are retried, and which must not be."""

from __future__ import annotations

import asyncio
import importlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from millstream.client.message import Receipt
from millstream.client.node_sender import NodeSender
from millstream.client.partition_queue import NOT_IDEMPOTENT, OutgoingBatch, PartitionQueue, ProducerIdentity
from millstream.core.errors import (
    BatchTooLarge,
    InvalidBatch,
    MillstreamError,
    RecordError,
    RequestRefused,
    RequestTimedOut,
)
from millstream.core.ids import NodeId, Offset
from millstream.protocol.messages import codec
from millstream.protocol.records.record import decode_records
from millstream.protocol.wire.channel import Channel, Pool
from millstream.protocol.wire.produce import Produced

VERSION = 12
IDENTITY = ProducerIdentity(7, 0)


class ChannelByHand:
    """A channel whose requests the test responds to."""

    def __init__(self) -> None:
        self.is_open = True
        self.responses: list[asyncio.Future[memoryview]] = []

    def version_for(self, api_key: int, *, newest: int, oldest: int) -> int:
        return VERSION

    def request(self, api_key: int, version: int, body: object) -> asyncio.Future[memoryview]:
        self.responses.append(asyncio.get_running_loop().create_future())
        return self.responses[-1]


def produce_response(code: ErrorCode, base_offset: int = -1) -> memoryview:
    messages: Any = importlib.import_module(f"kio.schema.produce.v{VERSION}.response")
    partition = messages.PartitionProduceResponse(
        index=0, error_code=code, base_offset=base_offset, record_errors=(), error_message=None
    )
    topic = messages.TopicProduceResponse(name="orders", partition_responses=(partition,))
    response = messages.ProduceResponse(responses=(topic,), throttle_time=timedelta(0))
    return memoryview(codec.write_response(0, VERSION, 1, response))[4:]


def sender(node: int, troubled: list[PartitionQueue]) -> tuple[NodeSender, ChannelByHand]:
    made, channel = (
        NodeSender(NodeId(node), acks=-1, linger_s=0, timeout_s=100, recover=troubled.append),
        ChannelByHand(),
    )
    made.open(cast("Pool", None), cast("Channel", channel))
    return made, channel


def queue_of(identity: ProducerIdentity = IDENTITY) -> PartitionQueue:
    queue = PartitionQueue("orders", "id", 0, batch_bytes=1000, compression=0, timeout_s=100, freed=lambda size: None)
    queue.begin(identity)
    return queue


def add(queue: PartitionQueue, count: int = 1) -> asyncio.Future[Receipt]:
    """Add batches with so many records each; return the future of the last."""
    future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    queue.waiting.append(batch := OutgoingBatch(100.0, lambda size: None))
    for at in range(count):
        queue.write(batch, None, b"x", (), at)
    batch.singles.append((count - 1, future, 0, None))
    return future


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_moved_queue_resumes_after_the_last_response_of_its_old_node() -> None:
    troubled: list[PartitionQueue] = []
    (old, old_channel), (new, new_channel) = sender(1, troubled), sender(2, troubled)
    queue = queue_of()
    queue.sender = old
    first = add(queue)
    old.notify(queue)
    await turn()
    old_channel.responses[0].set_result(produce_response(ErrorCode.none, 0))
    await first
    receipts = []
    for sent in (2, 3):
        receipts.append(add(queue))
        queue.waiting_bytes += 64 * 1024  # Enough has accumulated that a second request is sent beside the first.
        old.notify(queue)
        await turn()
        assert len(old_channel.responses) == sent
    old_channel.responses[1].set_result(produce_response(ErrorCode.not_leader_or_follower))
    await turn()
    assert troubled == [queue]
    queue.sender, queue.troubled = new, False
    assert not queue.can_send
    old_channel.responses[2].set_result(produce_response(ErrorCode.out_of_order_sequence_number))
    await turn()
    new_channel.responses[0].set_result(produce_response(ErrorCode.none, 1))
    await turn()
    new_channel.responses[1].set_result(produce_response(ErrorCode.none, 2))
    assert [(await receipt).offset for receipt in receipts] == [1, 2]
    old.close()
    new.close()


async def test_an_unreadable_response_counts_as_none() -> None:
    troubled: list[PartitionQueue] = []
    way, channel = sender(1, troubled)
    queue = queue_of()
    queue.sender = way
    receipt = add(queue)
    way.notify(queue)
    await turn()
    channel.responses[0].set_result(memoryview(b"\x00\x00\x00\x01\x00\xff\xff"))
    await turn()
    assert troubled == [queue]
    queue.troubled = False
    way.notify(queue)
    await turn()
    channel.responses[1].set_result(produce_response(ErrorCode.none, 4))
    assert (await receipt).offset == 4
    way.close()


async def test_a_batch_that_may_be_stored_is_not_split() -> None:
    queue = queue_of()
    receipt = add(queue, 4)
    queue.failed_for_now(queue_take(queue), maybe_stored=True)
    queue.refused(queue_take(queue), BatchTooLarge("too large"))
    with pytest.raises(BatchTooLarge, match="may have been stored"):
        await receipt
    assert queue.needs_identity


async def test_the_halves_of_a_split_batch_precede_later_batches() -> None:
    queue = queue_of()
    receipt, later = add(queue, 5), add(queue)
    queue.refused(queue_take(queue), BatchTooLarge("too large"))
    for base, count in ((0, 2), (2, 3), (5, 1)):
        batch = queue_take(queue)
        assert batch.count == count
        queue.stored(batch, Produced(Offset(base), -1))
    assert ((await receipt).offset, (await later).offset) == (4, 5)


async def test_the_records_that_the_broker_names_fail_and_the_others_are_resent() -> None:
    queue = queue_of()
    batch = queue.room(0, 1)
    receipts: list[asyncio.Future[Receipt]] = []
    for at in range(4):
        receipts.append(asyncio.get_running_loop().create_future())
        queue.write(batch, None, b"%d" % at, (), 1000)
        batch.singles.append((at, receipts[-1], 1000, None))
    later = add(queue)
    error = InvalidBatch("2 of 4")
    error.records = [RecordError(2, "two"), RecordError(0, "none")]
    queue.refused(queue_take(queue), error)
    rest = queue_take(queue)
    assert [record.value for record in decode_records(bytes(queue.sealed(rest)))] == [b"1", b"3"]
    queue.stored(rest, Produced(Offset(7), -1))
    queue.stored(queue_take(queue), Produced(Offset(9), -1))
    outcomes = await asyncio.gather(*receipts, later, return_exceptions=True)
    assert [outcome.offset if isinstance(outcome, Receipt) else str(outcome) for outcome in outcomes] == [
        "none",
        7,
        "two",
        8,
        9,
    ]


async def test_a_batch_acknowledged_behind_an_abandoned_one_is_not_resent() -> None:
    queue = queue_of(NOT_IDEMPOTENT)
    receipts = [add(queue) for _ in range(3)]
    first, second = queue_take(queue), queue_take(queue)
    queue.stored(second, Produced(Offset(0), -1))
    queue.refused(first, InvalidBatch("never"))
    third = queue_take(queue)
    queue.stored(third, Produced(Offset(1), -1))
    with pytest.raises(InvalidBatch):
        await receipts[0]
    assert [(await receipt).offset for receipt in receipts[1:]] == [0, 1]


async def test_a_response_lost_after_the_producer_id_was_dropped_fails_its_batch() -> None:
    queue = queue_of()
    warm = add(queue)
    queue.stored(queue_take(queue), Produced(Offset(0), -1))
    await warm
    lost: list[asyncio.Future[Receipt]] = [add(queue), add(queue)]
    first, second = queue_take(queue), queue_take(queue)
    first.maybe_stored = True
    queue.refused(first, InvalidBatch("never"))
    assert (queue.identity, queue.needs_identity) == (None, False)
    queue.failed_for_now(second, maybe_stored=True)
    assert not queue.sent
    errors: list[type[MillstreamError]] = [InvalidBatch, RequestTimedOut]
    for receipt, error in zip(lost, errors, strict=True):
        with pytest.raises(error):
            await receipt


async def test_queued_and_in_flight_batches_time_out() -> None:
    queue = queue_of()
    warm = add(queue)
    queue.stored(queue_take(queue), Produced(Offset(0), -1))
    await warm
    receipts = [add(queue), add(queue), add(queue)]
    first, second = queue_take(queue), queue_take(queue)
    second.deadline, queue.waiting[0].deadline = 200.0, 300.0
    assert queue.expire(99.0) == 100.0
    assert queue.expire(100.0) == 200.0
    with pytest.raises(RequestTimedOut, match=r"does not respond.* may have been stored"):
        await receipts[0]
    # The producer id is used up, but the second batch is in flight under it.
    assert (first.is_done, queue.identity, queue.needs_identity) == (True, None, False)
    queue.stored(second, Produced(Offset(2), -1))
    assert (await receipts[1]).offset == 2
    assert queue.needs_identity
    assert queue.expire(300.0) is None
    with pytest.raises(RequestTimedOut, match="was not stored"):
        await receipts[2]


async def test_a_batch_that_waits_for_a_quota_says_so_when_it_expires() -> None:
    throttled, _ = sender(1, [])
    throttled._muted_until = float("inf")
    queue = queue_of()
    queue.sender = throttled
    receipt = add(queue)
    assert queue.expire(100.0) is None
    with pytest.raises(RequestTimedOut, match=r"exceeded its quota.* was not stored"):
        await receipt


async def test_an_abandoned_queue_reports_uncertain_batches_and_refuses_new_ones() -> None:
    queue = queue_of()
    sent, waiting = add(queue), add(queue)
    batch = queue_take(queue)
    queue.fail_all(RequestRefused("not allowed", code=29))
    with pytest.raises(RequestRefused, match=r"^not allowed; whether it was stored is unknown$") as reported:
        await sent
    assert reported.value.code == 29
    with pytest.raises(RequestRefused, match=r"^not allowed$"):
        await waiting
    assert batch.is_done
    with pytest.raises(RequestRefused):
        add(queue)
    assert not queue.waiting


def queue_take(queue: PartitionQueue) -> OutgoingBatch:
    """Do what the sender does when the queue may send."""
    queue.sender = queue.sender or cast("NodeSender", SimpleNamespace(is_throttled=False))
    queue.troubled = False
    assert queue.can_send
    return queue.take()
