"""`millstream transaction`, and the batch commit through Millstream's own client, against a real server."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from millstream.core.errors import InvalidTransactionState, ProducerFenced
from millstream.core.ids import PartitionIndex
from millstream.protocol.private.transactions import TransactionalProducer, Transactions
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.fetch import READ_COMMITTED
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture
def writer(server: Server, millstream: CommandLine, topic: str) -> Producer:
    """A producer with an open transaction."""
    assert millstream("topic", "create", topic).code == 0
    settings = {"bootstrap.servers": server.kafka, "transactional.id": f"of {topic}", "log_level": 0}
    producer = Producer(settings)
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"x", partition=0)
    assert producer.flush(WAIT_S) == 0
    return producer


def test_a_transaction_is_found_and_aborted(millstream: CommandLine, writer: Producer, topic: str) -> None:
    name = f"of {topic}"
    transactions = millstream("transaction", "list", "--state", "Ongoing", "--json").document["transactions"]
    (mine,) = [transaction for transaction in transactions if transaction["transactional_id"] == name]
    assert mine["state"] == "Ongoing"
    assert name in millstream("transaction", "list").out
    longer = millstream("transaction", "list", "--longer-than", "1000", "--json").document["transactions"]
    assert name not in [transaction["transactional_id"] for transaction in longer]
    hanging = millstream("transaction", "list", "--hanging", "--json").document["hanging"]
    assert topic not in [transaction["topic"] for transaction in hanging]

    described = millstream("transaction", "describe", name, "--json").document
    assert (described["state"], described["partitions"]) == ("Ongoing", [[topic, 0]])
    assert described["producer_id"] == mine["producer_id"]
    assert f"{topic}-0" in millstream("transaction", "describe", name).out

    assert millstream("transaction", "abort", name, "--json").document["previous_state"] == "Ongoing"
    with pytest.raises(KafkaException):
        writer.commit_transaction(WAIT_S)
    described = ("transaction", "describe", name, "--json")
    wait_until(lambda: millstream(*described).document["state"] == "CompleteAbort" or None)
    assert millstream("transaction", "abort", name).code == 5


def test_a_transaction_known_to_its_coordinator_is_aborted_on_a_partition_only_with_force(
    millstream: CommandLine, writer: Producer, topic: str
) -> None:
    described = millstream("transaction", "describe", f"of {topic}", "--json").document
    producer_id = described["producer_id"]
    where = ("--topic", topic, "--partition", "0", "--producer-id", producer_id)
    refused = millstream("transaction", "abort", *where)
    assert refused.code == 5
    assert f"transaction abort 'of {topic}'" in refused.err
    forced = millstream("transaction", "abort", *where, "--force", "--json")
    assert forced.document["producer_id"] == producer_id
    assert millstream("transaction", "abort", *where).code == 5
    assert millstream("transaction", "abort").code == 2
    assert millstream("transaction", "abort", f"of {topic}", *where).code == 2
    missing = ("--topic", topic, "--partition", "99", "--producer-id", producer_id)
    assert millstream("transaction", "abort", *missing).code == 3


async def write_marker(client: Client, where: tuple[str, int], producer_id: int, epoch: int, coordinator: int) -> int:
    """Write an abort marker as no coordinator would; return Kafka's error code."""
    from kio.schema.write_txn_markers.v1 import request

    messages: Any = request
    marker = messages.WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=False,
        topics=(messages.WritableTxnMarkerTopic(name=where[0], partition_indexes=(where[1],)),),
        coordinator_epoch=coordinator,
    )
    leader = (await client.metadata([where[0]])).topics[where[0]].partitions[PartitionIndex(where[1])].leader_id
    response = await client.send(leader, messages.WriteTxnMarkersRequest(markers=(marker,)))
    return int(response.markers[0].topics[0].partitions[0].error_code)


async def test_an_invented_epoch_does_not_block_an_id(
    server: Server, millstream: CommandLine, writer: Producer, topic: str
) -> None:
    described = await asyncio.to_thread(millstream, "transaction", "describe", f"of {topic}", "--json")
    producer_id, epoch = described.document["producer_id"], described.document["epoch"]
    async with Client.connect(server.kafka) as client:
        code = await write_marker(client, (topic, 0), producer_id, epoch, 2**31 - 1)
    assert ErrorCode(code) is ErrorCode.unknown_leader_epoch
    await asyncio.to_thread(writer.commit_transaction, WAIT_S)
    for _ in range(2):
        writer.begin_transaction()
        writer.produce(topic, b"y", partition=0)
        await asyncio.to_thread(writer.commit_transaction, WAIT_S)


def test_an_unknown_id_is_refused(millstream: CommandLine) -> None:
    described = millstream("transaction", "describe", "nobody")
    assert (described.code, described.out) == (3, "")
    assert "transactional id 'nobody' does not exist; `millstream transaction list`" in described.err
    assert millstream("transaction", "abort", "nobody").code == 3


def test_an_unknown_state_is_refused(millstream: CommandLine) -> None:
    result = millstream("transaction", "list", "--state", "Bogus")
    assert (result.code, result.out) == (2, "")
    assert "no state 'Bogus'" in result.err
    assert "PrepareCommit" in result.err


def test_the_timeout_is_shown_only_for_an_open_transaction(
    millstream: CommandLine, writer: Producer, topic: str
) -> None:
    described = millstream("transaction", "describe", f"of {topic}").out
    assert re.search(r"begun \d+ s ago, aborted after 60 s", described)
    writer.commit_transaction(WAIT_S)
    writer.begin_transaction()
    writer.produce(topic, b"y", partition=0)
    writer.abort_transaction(WAIT_S)

    def when_ended() -> str | None:
        described = millstream("transaction", "describe", f"of {topic}").out
        return described if "the last transaction was begun" in described else None

    assert "aborted after" not in wait_until(when_ended)


async def write_part(client: Client, topic: str, query: str, batch: int, value: bytes) -> TransactionalProducer:
    transactions = Transactions(client)
    producer = await transactions.begin(f"spark/{query}/{batch}/0/{uuid4().hex}")
    records = encode_batch(
        [NewRecord(None, value, (), 1)],
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=0,
        transactional=True,
    )
    await client.produce(topic, 0, records, transactional_id=producer.transactional_id)
    return producer


async def test_a_batch_of_many_writers_is_committed_at_once(server: Server, topic: str) -> None:
    query = uuid4().hex
    async with Client.connect(server.kafka) as client:
        transactions = Transactions(client)
        assert await transactions.last_batch(query) == -1
        members = [await write_part(client, topic, query, 0, str(number).encode()) for number in range(3)]
        loser = await write_part(client, topic, query, 0, b"never")
        for member in members[:2]:
            await transactions.prepare(member)
        with pytest.raises(InvalidTransactionState):
            await transactions.complete_batch(query, 0, members)
        await transactions.prepare(members[2])
        assert (await client.fetch(topic, 0, 0, max_wait_ms=0, isolation=READ_COMMITTED)).last_stable == 0

        assert await transactions.complete_batch(query, 0, members)
        assert not await transactions.complete_batch(query, 0, members)
        assert await transactions.last_batch(query) == 0
        with pytest.raises(ProducerFenced):
            await transactions.begin(f"spark/{query}/0/0/late")

        response = await client.fetch(topic, 0, 0, max_wait_ms=0, isolation=READ_COMMITTED)
        while response.last_stable < 8:
            response = await client.fetch(topic, 0, response.last_stable, max_wait_ms=500, isolation=READ_COMMITTED)
        response = await client.fetch(topic, 0, 0, max_wait_ms=0, isolation=READ_COMMITTED)
        assert [producer for producer, _ in response.aborted] == [loser.producer_id]

        given_up = await write_part(client, topic, query, 1, b"given up")
        await transactions.prepare(given_up)
        assert await transactions.abort_batch(query, 1) == 1
        again = await write_part(client, topic, query, 1, b"again")
        await transactions.prepare(again)
        assert await transactions.complete_batch(query, 1, [again])


async def test_a_transaction_of_millstreams_own_client(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        transactions = Transactions(client)
        producer = await transactions.begin(uuid4().hex)
        for sequence in range(2):
            records = encode_batch(
                [NewRecord(None, b"x", (), 1)],
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=0,
                transactional=True,
            )
            await client.produce(topic, 0, records, transactional_id=producer.transactional_id)
            following = await transactions.end(producer, commit=sequence == 0)
            assert following.epoch == producer.epoch + 1
            assert await transactions.end(producer, commit=sequence == 0) == following
            producer = following


def test_a_transaction_forgotten_by_its_coordinator_is_found_and_ended(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        millstream = CommandLine(server.kafka)
        assert millstream("topic", "create", "orders").code == 0
        settings = {"bootstrap.servers": server.kafka, "log_level": 0}
        producer = Producer(settings | {"transactional.id": "tx"})
        producer.init_transactions(WAIT_S)
        producer.begin_transaction()
        producer.produce("orders", b"x", partition=0)
        assert producer.flush(WAIT_S) == 0
        consumed = [TopicPartition("in", 0, 7)]
        assert millstream("topic", "create", "in").code == 0
        group = Consumer(settings | {"group.id": "g"})
        producer.send_offsets_to_transaction(consumed, group.consumer_group_metadata(), WAIT_S)
        group.close()
        coordinators = millstream("topic", "describe", "__transaction_state", "--json").document["id"]
        server.stop()
        shutil.rmtree(server.data / "partitions" / coordinators)
        server.start()

        hanging = millstream("transaction", "list", "--hanging", "--json").document["hanging"]
        assert sorted(transaction["topic"] for transaction in hanging) == ["__consumer_offsets", "orders"]
        assert "__consumer_offsets" in millstream("transaction", "list", "--hanging").out
        for transaction in hanging:
            where = (
                "--topic",
                transaction["topic"],
                "--partition",
                transaction["partition"],
                "--producer-id",
                transaction["producer_id"],
            )
            assert millstream("transaction", "abort", *where).code == 0
        assert millstream("transaction", "list", "--hanging", "--json").document["hanging"] == []
