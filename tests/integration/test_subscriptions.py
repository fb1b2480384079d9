"""Subscriptions on a real server: leases, retries, dead letters, filters, delays, order by key, and after a kill."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka import Producer

from millstream.client.admin.topics import delete_topic, grow_topic
from millstream.core.errors import (
    InvalidRecordState,
    InvalidRequest,
    SubscriptionExists,
    UnknownGroup,
)
from millstream.core.subscription import (
    ATTEMPTS,
    BACKOFF_MIN,
    DEAD_LETTER_TOPIC,
    DELIVERY,
    EXACTLY_ONCE,
    FILTER,
    LEASE,
    ORDERED,
    PAUSED,
    START,
    Verb,
)
from millstream.core.topic import SUBSCRIPTIONS
from millstream.embedded import EmbeddedBroker
from millstream.protocol.filter.batch import DecodedBatch
from millstream.protocol.filter.node import Payload
from millstream.protocol.messages.codec import read_correlation_id, request_head, response_body_at
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.subscription_messages import (
    SETTLE_KEY,
    PartitionSettles,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.records.record import Headers, NewRecord, Record, decode_records, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "millstream.rules.yml"
WAIT_MS = 60_000


class SubscribedTopic:
    """A client that publishes to one topic and works on one subscription of it."""

    def __init__(self, client: Client, topic: str, name: str) -> None:
        self.client = client
        self.subscriptions = SubscriptionClient(client)
        self.topic = topic
        self.name = name

    async def publish(self, *values: str, key: bytes | None = None, headers: Headers = ()) -> None:
        now_ms = int(time.time() * 1000)
        records = [NewRecord(key, value.encode(), headers, now_ms) for value in values]
        await self.client.produce(self.topic, 0, encode_batch(records))

    async def receive(self, count: int, worker: str = "one", *, wait_ms: int = WAIT_MS) -> list[LeasedMessage]:
        """Receive exactly so many messages; the server may send them in several responses."""
        messages: list[LeasedMessage] = []
        while len(messages) < count:
            more = await self.subscriptions.receive(
                self.name, worker, max_records=count - len(messages), wait_ms=wait_ms
            )
            assert more, f"only {[message.record.value for message in messages]} came"
            messages += more
        return messages

    async def nothing(self, worker: str = "one", *, wait_ms: int = 0) -> None:
        messages = await self.subscriptions.receive(self.name, worker, max_records=10, wait_ms=wait_ms)
        assert [message.record.value for message in messages] == []

    async def settle(
        self, messages: list[LeasedMessage], verb: int, worker: str = "one", *, delay_ms: int | None = None
    ) -> None:
        results = await self.subscriptions.settle(
            self.name, worker, messages, verb, delay_ms=delay_ms, reason="does not fit"
        )
        assert results == [None] * len(messages)

    async def letters(self, count: int) -> list[Record]:
        records: list[Record] = []
        async with asyncio.timeout(60):
            # The topic is created for the first letter.
            while f"{self.topic}-dead" not in (await self.client.metadata()).topics:
                await asyncio.sleep(0.05)
        while len(records) < count:
            response = await self.client.fetch(f"{self.topic}-dead", 0, len(records), max_wait_ms=WAIT_MS)
            more = list(decode_records(response.records))
            assert more
            records += [record for record in more if record.offset >= len(records)]
        return records


def values(messages: list[LeasedMessage]) -> list[str]:
    return [(message.record.value or b"").decode() for message in messages]


@asynccontextmanager
async def subscribed_topic(
    server: Server, name: str, settings: Mapping[str, str], *before: str
) -> AsyncIterator[SubscribedTopic]:
    async with Client.connect(server.kafka) as client:
        topic = f"topic-{name}"
        await client.metadata([topic], create=True)
        made = SubscribedTopic(client, topic, name)
        if before:
            await made.publish(*before)
        await made.subscriptions.create(name, [topic], settings)
        yield made


async def test_each_message_goes_to_one_worker_until_accepted(server: Server) -> None:
    async with subscribed_topic(server, "plain", {LEASE: "600000"}, "published before") as work:
        await work.publish("a", "b", "c", "d")
        first = await work.receive(2, "one")
        second = await work.receive(2, "two")
        assert sorted(values(first) + values(second)) == ["a", "b", "c", "d"]
        await work.nothing("three")
        await work.settle(first, Verb.ACCEPT, "one")
        refused = await work.subscriptions.settle(work.name, "one", second, Verb.ACCEPT)
        assert all(isinstance(error, InvalidRecordState) for error in refused)
        await work.settle(second, Verb.RELEASE, "two")
        again = await work.receive(2, "three")
        assert [message.attempt for message in again] == [2, 2]
        await work.settle(again, Verb.EXTEND, "three", delay_ms=60_000)
        await work.settle(again, Verb.ACCEPT, "three")
        (reported,) = await work.subscriptions.describe([work.name])
        (queue,) = reported["queues"]
        assert (queue["backlog"], queue["leased"], queue["accepted"], queue["released"]) == (0, 0, 4, 2)


async def test_pipelined_accepts_are_stored_together(server: Server) -> None:
    count = 60
    async with subscribed_topic(server, "pipelined", {LEASE: "600000"}) as work:
        await work.publish(*map(str, range(count)))
        held = await work.receive(count)
        requests = b""
        for message in held:
            accepted = SettledRange(message.record.offset, message.record.offset + 1, Verb.ACCEPT)
            body = encode(SettleRequest(work.name, "one", [PartitionSettles(work.topic, 0, [accepted])]))
            head = request_head(SETTLE_KEY, 0, message.record.offset, "test")
            requests += struct.pack(">i", len(head) + len(body)) + head + body
        before = await stored_records(work.client)
        reader, writer = await asyncio.open_connection(*server.kafka.rsplit(":", 1))
        writer.write(requests)
        for message in held:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            frame = await reader.readexactly(size)
            assert read_correlation_id(frame) == message.record.offset
            response = decode(frame[response_body_at(SETTLE_KEY, 0, frame) :], SettleResponse)
            assert (response.error, response.results) == (0, [[(0, None)]])
        writer.close()
        # One by one it would be a record for each.
        assert await stored_records(work.client) - before < count // 2
        (reported,) = await work.subscriptions.describe([work.name])
        assert [(queue["backlog"], queue["accepted"]) for queue in reported["queues"]] == [(0, count)]


async def stored_records(client: Client) -> int:
    """The number of records appended to the log of queue states."""
    partitions = (await client.metadata([SUBSCRIPTIONS])).topics[SUBSCRIPTIONS].partitions
    ends = await client.list_offsets(SUBSCRIPTIONS, dict.fromkeys(partitions, -1))
    return sum(end.offset for end in ends.values())


async def test_a_message_with_an_expired_lease_goes_to_another_worker(server: Server) -> None:
    async with subscribed_topic(server, "expiry", {LEASE: "200"}) as work:
        await work.publish("a")
        held = await work.receive(1, "dies")
        assert values(await work.receive(1, "lives")) == ["a"]
        (late,) = await work.subscriptions.settle(work.name, "dies", held, Verb.ACCEPT)
        assert late is not None


async def test_a_message_that_keeps_failing_is_dead_lettered_with_its_history(server: Server) -> None:
    settings = {ATTEMPTS: "2", DEAD_LETTER_TOPIC: "topic-poison-dead", BACKOFF_MIN: "1"}
    async with subscribed_topic(server, "poison", settings) as work:
        await work.publish("bad", key=b"k", headers=(("colour", b"red"),))
        await work.publish("good")
        for _ in range(2):
            bad, *rest = sorted(await work.receive(2), key=lambda message: message.record.offset)
            await work.settle([bad], Verb.RELEASE)
            await work.settle(rest, Verb.RELEASE, delay_ms=0)
            if bad.attempt == 1:
                continue
        letters = await work.letters(2)
        bad_letter = next(letter for letter in letters if letter.value == b"bad")
        headers = {name: (value or b"").decode() for name, value in bad_letter.headers}
        assert (bad_letter.key, headers["colour"]) == (b"k", "red")
        assert headers["dlq-subscription"] == "poison"
        assert (headers["dlq-topic"], headers["dlq-partition"], headers["dlq-offset"]) == ("topic-poison", "0", "0")
        assert (headers["dlq-attempts"], headers["dlq-reason"]) == ("2", "does not fit")
        assert headers["message-id"].endswith("/0/0")
        await work.nothing()


async def test_a_rejected_message_is_dead_lettered_at_once_and_blocks_nothing(server: Server) -> None:
    async with subscribed_topic(server, "reject", {DEAD_LETTER_TOPIC: "topic-reject-dead"}) as work:
        await work.publish("bad", "good")
        bad, good = await work.receive(2)
        await work.settle([bad], Verb.REJECT)
        await work.settle([good], Verb.ACCEPT)
        (letter,) = await work.letters(1)
        assert letter.value == b"bad"


async def test_a_filter_selects_matching_messages(server: Server) -> None:
    async with subscribed_topic(
        server, "filtered", {FILTER: "payload.total > 1000 AND headers['region'] = 'eu'"}
    ) as work:
        await work.publish('{"total": 1}', '{"total": 1500}', "no json", headers=(("region", b"eu"),))
        await work.publish('{"total": 2000}', headers=(("region", b"us"),))
        await work.publish('{"total": 3000}', headers=(("region", b"eu"),))
        messages = await work.receive(2)
        assert values(messages) == ['{"total": 1500}', '{"total": 3000}']
        await work.settle(messages, Verb.ACCEPT)
        await work.nothing()


async def test_a_payload_is_parsed_once_for_the_filters_of_all_subscriptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = DecodedBatch._parse

    def counted(batch: DecodedBatch, source: Payload) -> None:
        parsed.append(len(batch))
        parse(batch, source)

    monkeypatch.setattr(DecodedBatch, "_parse", counted)
    broker = EmbeddedBroker(tmp_path)
    await broker.start()
    try:
        async with Client.connect(broker.kafka_address) as client:
            await client.metadata(["orders"], create=True)
            works = [SubscribedTopic(client, "orders", f"above-{least}") for least in range(30)]
            for least, work in enumerate(works):
                await work.subscriptions.create(work.name, ["orders"], {FILTER: f"payload.total >= {least}"})
            # Every queue is open once it has delivered.
            await works[0].publish('{"total": 99}')
            for work in works:
                await work.receive(1)
            parsed.clear()
            orders = [f'{{"total": {total}}}' for total in range(30)]
            await works[0].publish(*orders)
            for least, work in enumerate(works):
                assert values(await work.receive(30 - least)) == orders[least:]
    finally:
        await broker.stop()
    assert sum(parsed) == 30


def test_thirty_filters_cost_less_than_fifteen_times_one(start_server: Callable[..., Server]) -> None:
    """CPU time of the processes that filter: if each filter decoded the messages again, it would be thirty times."""
    server = start_server()
    filling = {f"field-{number}": "x" * 20 for number in range(40)}
    producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 50})
    for total in (*range(15_000), 1_000_000):
        producer.produce("orders", json.dumps({**filling, "total": total}))
    assert producer.flush(WAIT_MS / 1000) == 0

    def spent_ms(filters: list[str]) -> int:
        with httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_MS / 1000) as http:
            for text in filters:
                body = {"name": f"on-{hash(text)}", "topics": ["orders"], "start": "start", "filter": text}
                assert http.post("/subscriptions", json=body).status_code == 201

            def pull(text: str) -> list[Any]:
                body = {"max": 1, "wait_ms": 30_000}
                pulled = http.post(f"/subscriptions/on-{hash(text)}/messages:pull", json=body).json()
                messages: list[Any] = pulled["messages"]
                return messages

            before = _cpu_ms(server.pid)
            with ThreadPoolExecutor(len(filters)) as pulls:
                # Only the last message matches, so every other has been looked at before.
                list(pulls.map(lambda text: wait_until(lambda: pull(text)), filters))
            return _cpu_ms(server.pid) - before

    spent_ms(["offset = 15000"])  # Starts the child process.
    one_filter_ms = spent_ms(["payload.total > 50000"])
    assert spent_ms([f"payload.total > {50_001 + number}" for number in range(30)]) < 15 * one_filter_ms


def _cpu_ms(pid: int) -> int:
    """The CPU time of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(round(1000 * sum(process.cpu_times()[:2])) for process in processes)


async def test_an_invalid_filter_is_refused_with_its_position(server: Server) -> None:
    async with Client.connect(server.kafka) as client:
        with pytest.raises(InvalidRequest, match=r"\^"):
            await SubscriptionClient(client).create("broken", ["x"], {FILTER: "payload.total >> 3 AND"})


async def test_messages_of_a_key_are_delivered_one_at_a_time(server: Server) -> None:
    async with subscribed_topic(server, "ordered", {ORDERED: "true", LEASE: "600000"}) as work:
        await work.publish("a1", "a2", key=b"a")
        await work.publish("b1", key=b"b")
        await work.publish("a3", key=b"a")
        first = await work.receive(2)
        assert values(first) == ["a1", "b1"]
        await work.nothing("two")
        await work.settle(first[:1], Verb.RELEASE, delay_ms=0)
        again = await work.receive(1, "two")
        assert values(again) == ["a1"]
        await work.settle(again, Verb.ACCEPT, "two")
        for expected in ("a2", "a3"):
            after = await work.receive(1, "two")
            assert values(after) == [expected]
            await work.settle(after, Verb.ACCEPT, "two")


async def test_a_handler_that_always_fails_loses_nothing_by_default(server: Server) -> None:
    async with subscribed_topic(server, "default", {}) as work:
        await work.publish(*map(str, range(50)))
        for attempt in (1, 2):
            held = await work.receive(50)
            assert {message.attempt for message in held} == {attempt}
            await work.settle(held, Verb.RELEASE)
        (reported,) = await work.subscriptions.describe([work.name])
        (queue,) = reported["queues"]
        assert (queue["dropped"], queue["dead_lettered"], queue["rejecting"], queue["backlog"]) == (0, 0, 0, 50)
        assert queue["parked"] == 50, "they wait before they are tried again"
        dead = reported["settings"][DEAD_LETTER_TOPIC]
        assert (reported["settings"][ATTEMPTS], dead) == ("25", "default-dlq")
        assert dead not in (await work.client.metadata()).topics, "it is created with the first letter"
        (first,) = await work.receive(1)
        await work.settle([first], Verb.REJECT)
        async with asyncio.timeout(60):
            while dead not in (await work.client.metadata()).topics:
                await asyncio.sleep(0.05)


async def test_dropping_is_explicit_counted_listed_logged_and_alerted_on(server: Server) -> None:
    settings = {ATTEMPTS: "1", DEAD_LETTER_TOPIC: "none"}
    async with subscribed_topic(server, "dropping", settings) as work:
        await work.publish("a", "b", "c")
        await work.settle(await work.receive(3), Verb.RELEASE)
        command = CommandLine(server.kafka)
        subscriptions = (await asyncio.to_thread(command, "subscription", "list", "--json")).document["subscriptions"]
        assert (
            next(subscription["dropped"] for subscription in subscriptions if subscription["subscription"] == work.name)
            == 3
        )
        assert " DROPPED " in (await asyncio.to_thread(command, "subscription", "list")).out
        assert "messages were dropped: they exhausted their attempts or were rejected" in server.log.read_text()
        metrics = await asyncio.to_thread(server.metrics)
        assert f'millstream_subscription_dropped_total{{subscription="{work.name}"}} 3.0' in metrics
        assert "(increase(millstream_subscription_dropped_total[15m])) > 0" in ALERTS.read_text(encoding="utf-8")
        await work.publish("d")
        deleted = await asyncio.to_thread(command, "topic", "delete", work.topic, "--yes")
        assert (deleted.code, "every message is delivered" in deleted.err) == (0, False)
        assert "of which 1 message is not delivered yet and 3 messages are dropped." in deleted.err


async def test_a_delayed_message_does_not_block_others(server: Server) -> None:
    async with subscribed_topic(server, "delayed", {}) as work:
        at_ms = int(time.time() * 1000) + 5000
        await work.publish("later", headers=(("deliver-at", str(at_ms).encode()),))
        await work.publish("now")
        assert values(await work.receive(1)) == ["now"]
        assert values(await work.receive(1)) == ["later"]
        assert time.time() * 1000 >= at_ms


async def test_a_worker_waits_and_is_woken_by_a_message(server: Server) -> None:
    async with subscribed_topic(server, "woken", {}) as work, Client.connect(server.kafka) as other:
        waiting = asyncio.ensure_future(SubscriptionClient(other).receive("woken", "w", max_records=1, wait_ms=60_000))
        await asyncio.sleep(0.2)
        await work.publish("a")
        assert values(await waiting) == ["a"]


async def test_a_waiting_worker_gets_messages_of_topics_and_partitions_created_later(
    server: Server,
) -> None:
    async with Client.connect(server.kafka) as client, Client.connect(server.kafka) as other:
        await SubscriptionClient(client).create("ahead", ["topic-ahead"], {})

        def waiting() -> asyncio.Future[list[LeasedMessage]]:
            work = SubscriptionClient(other).receive("ahead", "w", max_records=1, wait_ms=60_000)
            return asyncio.ensure_future(work)

        first = waiting()
        await asyncio.sleep(0.2)
        await client.metadata(["topic-ahead"], create=True)
        await SubscribedTopic(client, "topic-ahead", "ahead").publish("a")
        assert values(await first) == ["a"]
        second = waiting()
        await asyncio.sleep(0.2)
        await grow_topic(client, "topic-ahead", 3)
        await client.produce("topic-ahead", 2, encode_batch([NewRecord(None, b"b", (), 1)]))
        assert values(await second) == ["b"]


async def test_a_recreated_topic_is_delivered_from_its_start(server: Server) -> None:
    async with subscribed_topic(server, "again", {}, "old 1", "old 2") as work:
        await work.publish("old 3")
        assert values(await work.receive(1)) == ["old 3"]
        await delete_topic(work.client, work.topic)
        await work.client.metadata([work.topic], create=True)
        await work.publish("new 1", "new 2")
        assert values(await work.receive(2)) == ["new 1", "new 2"]


async def test_the_documentation_lists_every_metric(server: Server) -> None:
    page = Path(__file__).parents[2] / "docs" / "subscriptions.md"
    documented = set(re.findall(r"`(millstream_subscription_\w+)`", page.read_text(encoding="utf-8")))
    async with subscribed_topic(server, "metered", {}) as work:
        await work.publish("a")
        await work.settle(await work.receive(1), Verb.ACCEPT)
    text = await asyncio.to_thread(server.metrics)
    served = {
        name
        for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
        if name.startswith("millstream_subscription_")
    }
    assert documented == served
    assert 'millstream_subscription_accepted_total{subscription="metered"} 1.0' in text


async def test_a_subscription_is_paused_sought_changed_and_deleted(server: Server) -> None:
    async with subscribed_topic(server, "moved", {START: "earliest"}, "old") as work:
        admin = work.subscriptions
        with pytest.raises(SubscriptionExists):
            await admin.create("moved", [work.topic], {})
        await admin.alter("moved", {PAUSED: "true"})
        await work.nothing()
        await admin.alter("moved", {PAUSED: None})
        held = await work.receive(1)
        assert values(held) == ["old"]
        (place,) = await admin.seek("moved", "latest")
        assert place == {"topic": work.topic, "partition": 0, "offset": 1}
        (voided,) = await admin.settle("moved", "one", held, Verb.ACCEPT)
        assert voided is not None
        await work.publish("new")
        assert values(await work.receive(1)) == ["new"]
        await admin.seek("moved", "offset:0")
        assert values(await work.receive(2)) == ["old", "new"]
        await admin.delete("moved")
        with pytest.raises(UnknownGroup):
            await work.receive(1)


async def test_nothing_is_lost_or_duplicated_by_a_kill(tmp_path: Path) -> None:
    settings = {DELIVERY: EXACTLY_ONCE, LEASE: "600000", DEAD_LETTER_TOPIC: "topic-killed-dead", ATTEMPTS: "5"}
    with Server(tmp_path / "data") as server:
        async with subscribed_topic(server, "killed", settings) as work:
            await work.publish(*(f"v{number}" for number in range(20)))
            messages = sorted(await work.receive(20), key=lambda message: message.record.offset)
            await work.settle(messages[:8], Verb.ACCEPT)
            await work.settle(messages[8:10], Verb.RELEASE, delay_ms=0)
            await work.settle(messages[10:13], Verb.REJECT)
        server.kill()
        server.start()
        async with Client.connect(server.kafka) as client:
            work = SubscribedTopic(client, "topic-killed", "killed")
            back = await work.receive(2, "other")
            assert sorted(values(back)) == ["v8", "v9"]
            assert [message.attempt for message in back] == [2, 2]
            # The leases of the others are still valid.
            await work.nothing("other")
            await work.settle(messages[13:], Verb.ACCEPT, "one")
            await work.settle(back, Verb.ACCEPT, "other")
            assert sorted(letter.value or b"" for letter in await work.letters(3)) == [b"v10", b"v11", b"v12"]
            await work.nothing("other")
            (reported,) = await work.subscriptions.describe(["killed"])
            (queue,) = reported["queues"]
            assert (queue["accepted"], queue["dead_lettered"], queue["backlog"]) == (17, 3, 0)
