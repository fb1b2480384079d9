"""Deleted and recreated topics, and permanent errors: every publish completes, none is lost or duplicated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from kio.schema.errors import ErrorCode

from millstream.client.message import Receipt
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidBatch,
    InvalidRequest,
    NotLeader,
    OutOfOrderSequence,
    PublishFailed,
    RequestTimedOut,
    StorageFailure,
    TopicNotAuthorized,
    UnknownTopic,
)
from millstream.core.ids import NodeId
from millstream.protocol.messages import codec
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.records.record import NewRecord
from millstream.protocol.wire.channel import Pool
from millstream_testing.producer_ledger import ProducerLedger
from millstream_testing.scripted_broker import METADATA
from millstream_testing.waiting import until

HANG_S = 60.0
"""Only ends a test that hangs."""


@pytest.fixture
async def ledger() -> AsyncIterator[ProducerLedger]:
    async with ProducerLedger.started() as started:
        started.create("orders")
        started.create("other")
        yield started


def records(count: int) -> list[NewRecord]:
    return [NewRecord(None, f"{at:05}".encode() * 20) for at in range(count)]


async def requests(ledger: ProducerLedger, count: int) -> None:
    await until(lambda: ledger.requests >= count)


async def test_deleting_a_topic_during_publish_many_ends_the_call_and_frees_its_buffer(
    ledger: ProducerLedger,
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing(batch_bytes=2000, buffer_bytes=20_000) as publisher:
        await publisher.publish("other", NewRecord(None, b"before"))
        ledger.faults = ["", "", "deleted"]
        with pytest.raises(PublishFailed) as failed:
            await publisher.publish_many("orders", records(3000), partition=0)
        outcomes = failed.value.outcomes
        assert isinstance(outcomes[0], Receipt)
        assert isinstance(outcomes[-1], UnknownTopic)
        assert all(isinstance(outcome, Receipt | UnknownTopic) for outcome in outcomes)
        await publisher.publish("other", NewRecord(None, b"after"))


async def test_a_topic_recreated_during_a_publish_gets_no_more_of_its_messages(ledger: ProducerLedger) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing(batch_bytes=2000, buffer_bytes=20_000) as publisher:
        await publisher.publish("orders", NewRecord(None, b"before"), partition=0)
        ledger.faults = ["", "recreated", *["not leader"] * 5]
        with pytest.raises(PublishFailed, match="another topic has its name now") as failed:
            await publisher.publish_many("orders", records(1000), partition=0)
        outcomes = failed.value.outcomes
        stored = [type(outcome) for outcome in outcomes].index(UnknownTopic)
        assert all(isinstance(outcome, Receipt) for outcome in outcomes[:stored])
        assert all(isinstance(outcome, UnknownTopic) for outcome in outcomes[stored:])
        # Requests name topics, so a batch in flight is stored in the new topic.
        now = len(ledger.stored["orders", 0])
        assert len(ledger.past[0]["orders", 0]) + now == 1 + stored
        assert (await publisher.publish("orders", NewRecord(None, b"after"), partition=0)).offset == now


def creates_topics(ledger: ProducerLedger) -> None:
    """Have the broker create a topic when a metadata request allows it."""

    async def metadata(header: RequestHeader, frame: memoryview) -> object:
        request = codec.read_request(METADATA, header.version, frame, header.body_at)
        if request.allow_auto_topic_creation:
            for topic in request.topics or ():
                if topic.name not in ledger.broker.topics:
                    ledger.create(topic.name)
        return await ledger.metadata(header, frame)

    ledger.broker.handlers[METADATA] = metadata


async def test_a_deleted_topic_is_not_recreated_by_the_rest_of_a_list(ledger: ProducerLedger) -> None:
    creates_topics(ledger)
    async with asyncio.timeout(HANG_S), ledger.publishing(batch_bytes=2000, buffer_bytes=20_000) as publisher:
        await publisher.publish("orders", NewRecord(None, b"before"), partition=0)
        ledger.faults = ["", "deleted"]
        with pytest.raises(PublishFailed, match="topic 'orders' was deleted while this was published"):
            await publisher.publish_many("orders", records(5000), partition=0)
        assert "orders" not in ledger.broker.topics


@pytest.mark.parametrize("creates", [True, False])
async def test_a_publish_after_the_topic_was_deleted_fails_as_for_an_unknown_topic(
    ledger: ProducerLedger, creates: bool
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        for send in (
            lambda: publisher.publish("orders", NewRecord(None, b"a"), partition=0),
            lambda: publisher.publish_many("orders", [NewRecord(None, b"a"), NewRecord(None, b"b")], partition=0),
        ):
            ledger.create("orders")
            await publisher.publish("orders", NewRecord(None, b"before"), partition=0)
            ledger.delete("orders")
            if creates:
                creates_topics(ledger)
                await send()
                assert ledger.stored["orders", 0][0] == b"a"
                ledger.delete("orders")
            else:
                with pytest.raises(UnknownTopic, match="does not exist and the broker does not create it"):
                    await send()


async def test_responses_to_abandoned_batches_are_ignored(ledger: ProducerLedger) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing(batch_bytes=2000) as publisher:
        await publisher.publish("orders", NewRecord(None, b"before"), partition=0)
        await publisher.publish("other", NewRecord(None, b"before"), partition=0)
        ledger.held = asyncio.Event()
        many = asyncio.create_task(publisher.publish_many("orders", records(100), partition=0))
        other = asyncio.create_task(publisher.publish("other", NewRecord(None, b"with them"), partition=0))
        await requests(ledger, 3)
        publisher._forget("orders", UnknownTopic("gone"))
        with pytest.raises(PublishFailed, match="100 of 100"):
            await many
        ledger.held.set()
        assert (await other).offset == 1
        assert publisher._buffered == 0
        assert (await publisher.publish("orders", NewRecord(None, b"after"), partition=1)).offset == 0


async def test_a_record_that_cannot_be_encoded_leaves_nothing_behind(ledger: ProducerLedger) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        bad = NewRecord(None, b"x", (("\ud800", b""),))
        with pytest.raises(InvalidBatch):
            await publisher.publish("orders", bad)
        with pytest.raises(PublishFailed) as failed:
            await publisher.publish_many("orders", [NewRecord(None, b"good"), bad, NewRecord(None, b"late")])
        assert [type(outcome) for outcome in failed.value.outcomes] == [Receipt, InvalidBatch, InvalidBatch]
        await publisher.flush()


@pytest.mark.parametrize("times", [1, 8])
async def test_a_topic_that_one_node_briefly_does_not_know_keeps_its_records(
    ledger: ProducerLedger, times: int
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        await publisher.publish("orders", NewRecord(None, b"a"), partition=0)
        await publisher.publish("other", NewRecord(None, b"1"), partition=0)
        ledger.faults = ["not leader"]
        faults = ledger.metadata_faults["orders"] = [ErrorCode.unknown_topic_or_partition] * times
        if times > 1:
            with pytest.raises(UnknownTopic):
                await publisher.publish("orders", NewRecord(None, b"b"), partition=0)
            faults.clear()
        assert (await publisher.publish("orders", NewRecord(None, b"c"), partition=0)).offset == 1
        assert (await publisher.publish("other", NewRecord(None, b"2"), partition=0)).offset == 1
    assert ledger.stored == {("orders", 0): [b"a", b"c"], ("other", 0): [b"1", b"2"]}
    assert ledger.producers == (2 if times > 1 else 1)


async def test_a_permanent_error_fails_its_topic_and_no_other(ledger: ProducerLedger) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        await publisher.publish_many("orders", records(1), partition=0)
        await publisher.publish_many("other", records(1), partition=0)
        ledger.faults = ["not leader"]
        ledger.metadata_faults["orders"] = [ErrorCode.topic_authorization_failed]
        refused = asyncio.create_task(publisher.publish("orders", NewRecord(None, b"a"), partition=0))
        other = asyncio.create_task(publisher.publish("other", NewRecord(None, b"b"), partition=0))
        with pytest.raises(TopicNotAuthorized, match="needs WRITE on topic 'orders'"):
            await refused
        assert (await other).offset == 1
        assert (await publisher.publish("orders", NewRecord(None, b"c"), partition=0)).offset == 1


async def test_a_failed_producer_id_request_is_reported(ledger: ProducerLedger) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        await publisher.publish("orders", NewRecord(None, b"a"), partition=0)
        ledger.faults = ["broken sequence"]
        ledger.init_faults = [ErrorCode.kafka_storage_error]
        with pytest.raises(OutOfOrderSequence):
            await publisher.publish("orders", NewRecord(None, b"b"), partition=0)
        with pytest.raises(StorageFailure):
            await publisher.publish("orders", NewRecord(None, b"c"), partition=0)
        assert (await publisher.publish("orders", NewRecord(None, b"d"), partition=0)).offset == 1


async def test_an_internal_error_of_the_publisher_is_reported(
    ledger: ProducerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        await publisher.publish("orders", NewRecord(None, b"a"), partition=0)
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "_renew", lambda topic, found: {}[topic])
            ledger.faults = ["not leader"]
            with pytest.raises(InvalidRequest, match="the publisher failed: KeyError"):
                await publisher.publish("orders", NewRecord(None, b"b"), partition=0)
        assert (await publisher.publish("orders", NewRecord(None, b"c"), partition=0)).offset == 1


async def test_a_node_that_is_unreachable_while_a_topic_opens_gets_no_second_route(
    ledger: ProducerLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        reach, refusals = publisher._client.pool_for, [NotLeader("moving"), BrokerUnreachable("not yet")]

        async def pool_for(node: NodeId | None) -> Pool:
            if refusals:
                raise refusals.pop(0)
            return await reach(node)

        monkeypatch.setattr(publisher._client, "pool_for", pool_for)
        receipts = await asyncio.gather(
            *(publisher.publish("orders", record, partition=0) for record in records(5)),
            publisher.publish_many("orders", records(5), partition=0),
        )
        assert len(receipts) == 6
        assert not refusals
    assert len(ledger.stored["orders", 0]) == 10


async def test_a_silent_broker_is_waited_for_until_the_given_timeout(ledger: ProducerLedger) -> None:
    await ledger.warm_up()
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        await publisher.publish("orders", NewRecord(None, b"a"), partition=0)
        ledger.give_time(publisher, 1)
        ledger.held = asyncio.Event()
        started = [asyncio.create_task(publisher.publish("orders", NewRecord(None, b"b"), partition=0))]
        await requests(ledger, 2)
        started.append(asyncio.create_task(publisher.publish("orders", NewRecord(None, b"c"), partition=0)))
        started.append(asyncio.create_task(publisher.publish("new", NewRecord(None, b"c"))))
        # The broker stays silent until all three callers have their error.
        reported = await asyncio.gather(*started, return_exceptions=True)
        assert all(isinstance(error, RequestTimedOut) for error in reported)
        assert ["may have been stored" in str(error) for error in reported] == [True, False, False]
        assert publisher._buffered == 0
        ledger.held.set()
        ledger.held = None


async def test_closing_wakes_callers_that_wait_for_a_topic(ledger: ProducerLedger) -> None:
    asked, held = asyncio.Event(), asyncio.Event()

    async def silent(header: RequestHeader, frame: memoryview) -> None:
        asked.set()
        await held.wait()

    ledger.broker.handlers[METADATA] = silent
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        waiting = [asyncio.create_task(publisher.publish("orders", NewRecord(None, b"a"))) for _ in range(2)]
        await asked.wait()
        waiting[0].cancel()
        await publisher.close()
        reported = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in reported] == [asyncio.CancelledError, InvalidRequest]
        held.set()


async def test_receipts_are_correct_while_other_clients_write_and_many_wait_for_buffer_space(
    ledger: ProducerLedger,
) -> None:
    async with asyncio.timeout(HANG_S), ledger.publishing(batch_bytes=500, buffer_bytes=1000) as publisher:
        await publisher.publish("orders", NewRecord(None, b"before"), partition=0)

        async def one_by_one() -> list[Receipt]:
            return [await publisher.publish("orders", record, partition=0) for record in singly]

        singly, at_once = [NewRecord(None, f"single {at}".encode()) for at in range(10)], records(100)
        single = asyncio.create_task(one_by_one())
        many = asyncio.create_task(publisher.publish_many("orders", at_once, partition=0))
        placed = [*await single, *await many]
    stored = ledger.stored["orders", 0]
    assert [stored[receipt.offset] for receipt in placed] == [record.value for record in (*singly, *at_once)]


async def test_a_topic_without_partitions_is_waited_for(ledger: ProducerLedger) -> None:
    ledger.create("orders", 0)
    async with asyncio.timeout(HANG_S), ledger.publishing() as publisher:
        waiting = asyncio.create_task(publisher.publish("orders", NewRecord(None, b"a")))
        await until(lambda: ledger.broker.request_count(METADATA))
        ledger.create("orders", 1)
        assert (await waiting).offset == 0
