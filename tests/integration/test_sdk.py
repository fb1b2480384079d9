"""The Python SDK on a real server: publish, subscribe, iterate, listen, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import millstream
from millstream.client import publisher as publisher_module
from millstream.client import subscriber as subscriber_module
from millstream.client.admin.topics import create_topic, delete_topic, grow_topic
from millstream.core.errors import (
    AuthenticationFailed,
    InvalidRecordState,
    InvalidRequest,
    InvalidSubscription,
    SubscriptionExists,
    UnknownGroup,
    UnknownTopic,
)
from millstream.core.subscription import LEASE
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream_testing.server import Server
from millstream_testing.waiting import until

HANG_S = 150


@pytest.fixture
async def ms(server: Server) -> AsyncIterator[millstream.Connection]:
    async with millstream.connect(server.kafka) as connection:
        yield connection


class CollectingHandler:
    """A handler that collects messages and signals when it has enough."""

    def __init__(self, count: int) -> None:
        self.messages: list[millstream.Message] = []
        self._count = count
        self._enough = asyncio.Event()

    async def __call__(self, message: millstream.Message) -> None:
        self.messages.append(message)
        if len(self.messages) >= self._count:
            self._enough.set()

    async def enough(self) -> list[millstream.Message]:
        await self._enough.wait()
        return self.messages


async def test_five_lines(ms: millstream.Connection, topic: str) -> None:
    receipt = await ms.publish(topic, {"order_id": 1}, key="customer-7", headers={"region": "eu"})
    bill = CollectingHandler(1)
    await ms.subscribe(topic, bill, name=f"{topic}-billing", start="earliest")
    (message,) = await bill.enough()
    assert message.json() == {"order_id": 1}
    assert (message.key_text, message.header_text("region")) == ("customer-7", "eu")
    assert message.headers["content-type"] == b"application/json"
    assert (message.id, message.attempt, message.subscription) == (receipt.id, 1, f"{topic}-billing")
    assert abs(message.timestamp - datetime.now(UTC)) < timedelta(minutes=5)
    assert message.deadline is not None


async def test_messages_of_a_recreated_topic_have_its_id(ms: millstream.Connection, topic: str) -> None:
    """Also in an empty partition, where nothing shows that the topic was recreated."""
    receipts = []
    for partitions in ([0], [1, 0]):
        await create_topic(ms.client, topic, partitions=2, replication=-1, settings={})
        receipts += [await ms.publish(topic, "x", partition=partition) for partition in partitions]
        metadata = (await ms.client.metadata([topic])).topics[topic]
        assert {receipt.id for receipt in receipts[-len(partitions) :]} == {
            f"{metadata.topic_id}/{at}/0" for at in partitions
        }
        await delete_topic(ms.client, topic)


async def test_values_are_stored_by_type(ms: millstream.Connection, topic: str) -> None:
    values: list[Any] = [b"raw", "text", {"a": [1, None]}, 5, None, bytearray(b"x")]
    many = [*values, millstream.NewMessage(value="named", key="k", id="m-1", correlation_id="c-1")]
    await ms.publish(topic, "first")
    receipts = await ms.publish_many(topic, many)
    got = CollectingHandler(len(many) + 1)
    await ms.subscribe(topic, got, name=topic, start="earliest", concurrency=1)
    messages = (await got.enough())[1:]
    assert [message.value for message in messages] == [b"raw", b"text", b'{"a":[1,null]}', b"5", None, b"x", b"named"]
    assert [message.id for message in messages] == [receipt.id for receipt in receipts]
    assert (messages[-1].id, messages[-1].correlation_id) == ("m-1", "c-1")
    with pytest.raises(InvalidRequest, match="JSON"):
        await ms.publish(topic, object())


async def test_the_result_of_a_handler_settles_its_message(ms: millstream.Connection, topic: str) -> None:
    seen: dict[str, list[int]] = {}
    done = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        attempts = seen.setdefault(message.text, [])
        attempts.append(message.attempt)
        if message.text == "fails twice" and len(attempts) < 3:
            raise ValueError("not yet")
        if message.text == "never":
            raise millstream.Reject("nonsense")
        if message.text == "later" and len(attempts) < 2:
            raise millstream.RetryLater(0.01)
        if message.text == "by hand":
            await message.ack()

    await ms.publish_many(topic, ["fine", "fails twice", "never", "later", "by hand"])
    subscriber = await ms.subscribe(topic, handle, name=topic, start="earliest", dead_letter=f"{topic}-dead")

    letter = CollectingHandler(1)
    await ms.subscribe(f"{topic}-dead", letter, name=f"{topic}-dead", start="earliest")
    (dead,) = await letter.enough()
    assert (dead.text, dead.header_text("dlq-reason")) == ("never", "nonsense")
    await until(lambda: len(seen.get("fails twice", ())) >= 3 and len(seen.get("later", ())) >= 2 and "by hand" in seen)
    await subscriber.drain()
    assert seen == {"fine": [1], "fails twice": [1, 2, 3], "never": [1], "later": [1, 2], "by hand": [1]}
    done.set()


async def test_plain_functions_run_in_threads_and_publish_with_their_context(
    ms: millstream.Connection, topic: str
) -> None:
    loop = asyncio.get_running_loop()

    def handle(message: millstream.Message) -> None:
        asyncio.run_coroutine_threadsafe(ms.publish(f"{topic}-out", message.text), loop).result(HANG_S)

    async def forward(message: millstream.Message) -> None:
        await ms.publish(f"{topic}-out", message.text)

    await ms.publish(f"{topic}-out", "made")
    await ms.publish(topic, "one", correlation_id="request-1")
    out = CollectingHandler(2)
    await ms.subscribe(topic, handle, name=f"{topic}-a", start="earliest")
    await ms.subscribe(topic, forward, name=f"{topic}-b", start="earliest")
    await ms.subscribe(f"{topic}-out", out, name=f"{topic}-c", start="earliest")
    await out.enough()
    await until(lambda: len(out.messages) >= 3)
    assert "request-1" in {message.correlation_id for message in out.messages}


async def test_iterating_and_settling_by_hand(ms: millstream.Connection, topic: str) -> None:
    await ms.publish_many(topic, ["a", "b", "c"])
    async with ms.subscription(topic, name=topic, start="earliest", in_flight=1, dead_letter=f"{topic}-dead") as stream:
        first = await anext(stream)
        await first.extend(60)
        await first.ack()
        with pytest.raises(InvalidRecordState):
            await first.ack()
        second = await anext(stream)
        await second.nack(delay=0)
        again = await anext(stream)
        while again.offset != second.offset:
            await again.reject("no use")
            again = await anext(stream)
        assert (again.text, again.attempt) == ("b", 2)
        await again.ack()


async def test_a_closed_stream_returns_unseen_messages(ms: millstream.Connection, topic: str) -> None:
    await ms.publish_many(topic, [str(at) for at in range(20)])
    async with ms.subscription(topic, name=topic, start="earliest", lease=600) as stream:
        for _ in range(4):
            await (await anext(stream)).ack()
    async with ms.subscription(topic, name=topic) as stream:
        rest = [await anext(stream) for _ in range(16)]
        for message in rest:
            await message.ack()
    assert sorted(int(message.text) for message in rest) == list(range(4, 20))


async def test_leaving_a_loop_returns_unseen_messages(ms: millstream.Connection, topic: str) -> None:
    await ms.publish_many(topic, ["one", "two", "three"], partition=0)
    async for message in ms.subscription(topic, name=topic, start="start", in_flight=10):
        assert message.text == "one"
        break
    await ms.publish(topic, "four", partition=0)
    got = []
    async with asyncio.timeout(HANG_S):
        async for other in ms.subscription(topic, name=topic):
            got.append(other.text)
            await other.ack()
            if len(got) == 3:
                break
    assert sorted(got) == ["four", "three", "two"]
    # The messages of the first loop are leased until they expire.
    await message.ack()
    async with asyncio.timeout(HANG_S):
        while ms._leaving:
            await asyncio.wait(list(ms._leaving))


async def test_leaving_a_loop_over_batches_returns_them(ms: millstream.Connection, topic: str) -> None:
    await ms.publish_many(topic, range(100), partition=0)
    async for messages in ms.subscription(topic, name=topic, start="start").batches(10):
        first = {message.offset for message in messages}
        for message in messages:
            await message.ack()
        break
    async with asyncio.timeout(HANG_S):
        async for message in ms.subscription(topic, name=topic):
            first.add(message.offset)
            await message.ack()
            if len(first) == 100:
                break


def test_a_blocking_loop_may_be_left_as_well(server: Server, topic: str) -> None:
    with millstream.connect_sync(server.kafka) as ms:
        ms.publish_many(topic, ["one", "two", "three"], partition=0)
        for message in ms.subscription(topic, name=topic, start="start"):
            assert message.text == "one"
            break
        got = []
        for other in ms.subscription(topic, name=topic):
            got.append(other.text)
            other.ack()
            if len(got) == 2:
                break
        assert sorted(got) == ["three", "two"]
        message.ack()


def test_an_identity_for_a_listener_without_authentication_is_refused(server: Server) -> None:
    with pytest.raises(AuthenticationFailed, match=r"requires no authentication; connect without .*\(user="):
        millstream.connect_sync(server.kafka, user="alice", password="secret")


def test_blocking_batches_are_settled_together(server: Server, topic: str) -> None:
    with millstream.connect_sync(server.kafka) as ms:
        ms.publish_many(topic, [str(number) for number in range(100)], partition=0)
        with ms.subscription(topic, name=topic, start="start") as stream:
            got = []
            for messages in stream.batches(30):
                assert len(messages) <= 30
                got += [message.text for message in messages]
                stream.ack(messages)
                if len(got) == 100:
                    break
            assert got == [str(number) for number in range(100)]
            with pytest.raises(InvalidRequest, match="messages must be a list"):
                stream.ack(messages[0])  # type: ignore[arg-type]
        state = ms.delivery(ms.publish(topic, "next", partition=0), subscription=topic)
        assert state.state == "waiting"


async def test_closing_the_connection_ends_an_abandoned_loop(server: Server, topic: str) -> None:
    async with millstream.connect(server.kafka) as ms:
        await ms.publish(topic, "one")
        async for _ in ms.subscription(topic, name=topic, start="start"):
            break
    assert ms._leaving == {}


async def test_listening_gets_new_messages_and_keeps_none(ms: millstream.Connection, topic: str) -> None:
    await ms.publish(topic, "before")
    got = CollectingHandler(1)
    subscriber = await ms.subscribe(topic, got, live=True)
    async with ms.listen([topic]) as stream:
        await ms.publish(topic, "now", headers={"a": "1"})
        message = await anext(stream)
        assert (message.text, message.attempt, message.subscription, message.deadline) == ("now", 0, None, None)
        await message.ack()
    assert [message.text for message in await got.enough()] == ["now"]
    await subscriber.unsubscribe(delete=True)
    with pytest.raises(UnknownTopic):
        async with ms.listen(f"{topic}-nowhere"):
            pass


async def test_draining_completes_running_handlers_and_returns_the_rest(ms: millstream.Connection, topic: str) -> None:
    started, gate = asyncio.Event(), asyncio.Event()
    handled: list[str] = []

    async def handle(message: millstream.Message) -> None:
        started.set()
        await gate.wait()
        handled.append(message.text)

    await ms.publish_many(topic, ["a", "b", "c"])
    subscriber = await ms.subscribe(topic, handle, name=topic, start="earliest", concurrency=1)
    await started.wait()
    draining = asyncio.create_task(subscriber.drain())
    gate.set()
    await draining
    receipt = await ms.publish(topic, "later")
    assert handled == ["a"]
    rest = CollectingHandler(3)
    other = await ms.subscribe(topic, rest, name=topic)
    assert sorted([*handled, *(message.text for message in await rest.enough())]) == ["a", "b", "c", "later"]
    assert (await ms.delivery(receipt, subscription=topic, wait=HANG_S)).state == "accepted"
    await other.unsubscribe(delete=True)
    with pytest.raises(UnknownGroup):
        await ms.delivery(receipt, subscription=topic)


async def test_messages_not_drained_in_time_are_redelivered(ms: millstream.Connection, topic: str) -> None:
    started = asyncio.Event()

    async def stuck(message: millstream.Message) -> None:
        started.set()
        await asyncio.Event().wait()

    await ms.publish(topic, "a")
    subscriber = await ms.subscribe(topic, stuck, name=topic, start="earliest")
    await started.wait()
    await subscriber.drain(timeout=0.05)
    got = CollectingHandler(1)
    await ms.subscribe(topic, got, name=topic)
    assert (await got.enough())[0].attempt == 2


async def test_leases_are_renewed_while_a_handler_works(ms: millstream.Connection, topic: str) -> None:
    attempts: list[int] = []
    done = asyncio.Event()

    async def slow(message: millstream.Message) -> None:
        attempts.append(message.attempt)
        # Many times the lease; messages queued behind it must keep their lease, too.
        await asyncio.sleep(0.7 if message.text == "slow" else 0)
        if len(attempts) == 3:
            done.set()

    await ms.publish_many(topic, ["slow", "b", "c"])
    subscriber = await ms.subscribe(topic, slow, name=topic, start="earliest", lease=0.3, concurrency=1, in_flight=3)
    await done.wait()
    await subscriber.drain()
    # A machine too busy to renew in time is not a failure: the message is redelivered then.
    assert len(attempts) >= 3


async def test_a_shortened_lease_applies_to_later_messages(ms: millstream.Connection, topic: str) -> None:
    held: dict[str, millstream.Message] = {}
    gate = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        held[message.text] = message
        await gate.wait()

    async def until_held(text: str) -> millstream.Message:
        await until(lambda: text in held)
        return held[text]

    def left(message: millstream.Message) -> timedelta:
        assert message.deadline is not None
        return message.deadline - datetime.now(UTC)

    receipts = [await ms.publish(topic, "old")]
    subscriber = await ms.subscribe(topic, handle, name=topic, start="earliest", lease=600)
    old = await until_held("old")
    await SubscriptionClient(ms.client).alter(topic, {LEASE: "2000"})
    receipts.append(await ms.publish(topic, "new"))
    new = await until_held("new")
    assert left(new) <= timedelta(seconds=2) < timedelta(seconds=300) < left(old)
    # It is renewed as often as the new lease requires.
    first = new.deadline
    await until(lambda: held["new"].deadline != first)
    gate.set()
    for receipt in receipts:
        assert (await ms.delivery(receipt, subscription=topic, wait=HANG_S)).state == "accepted"
    await subscriber.drain()


async def test_a_differently_declared_subscription_is_reported(ms: millstream.Connection, topic: str) -> None:
    async def handle(message: millstream.Message) -> None: ...

    await ms.publish(topic, "a")
    first = await ms.subscribe(topic, handle, name=topic, attempts=3, ordered=True, backoff=(1, 60))
    await first.drain()
    await (await ms.subscribe(topic, handle, name=topic)).drain()
    with pytest.raises(SubscriptionExists, match=r"attempts is '3', not '4'.*update=True"):
        await ms.subscribe(topic, handle, name=topic, attempts=4)
    with pytest.raises(SubscriptionExists, match="its topics are"):
        await ms.subscribe(f"{topic}-other", handle, name=topic)
    await (await ms.subscribe(topic, handle, name=topic, attempts=4, update=True)).drain()
    await (await ms.subscribe(topic, handle, name=topic, attempts=4)).unsubscribe(delete=True)
    with pytest.raises(InvalidSubscription, match="name"):
        await ms.subscribe(topic, handle)
    with pytest.raises(InvalidSubscription):
        await ms.subscribe(topic, handle, name=topic, concurrency=0)


@pytest.mark.parametrize("delivery", ["at-most-once", "exactly-once"])
async def test_the_delivery_guarantee_is_one_argument(ms: millstream.Connection, topic: str, delivery: str) -> None:
    async def fail(message: millstream.Message) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 2:
            await message.ack()
        raise ValueError("no")

    attempts: list[int] = []
    await ms.publish_many(topic, ["a", "b"])
    subscriber = await ms.subscribe(topic, fail, name=topic, start="earliest", delivery=delivery, attempts=1)
    await until(lambda: len(attempts) >= 2)
    await subscriber.drain()
    assert attempts == [1, 1]


async def test_a_delayed_message_is_delivered_when_due(ms: millstream.Connection, topic: str) -> None:
    await ms.publish(topic, "later", delay=0.2)
    await ms.publish(topic, "at", delay=datetime.now(UTC) + timedelta(seconds=0.1))
    await ms.publish(topic, "now")
    came: list[tuple[str, float]] = []
    got = CollectingHandler(3)
    await ms.subscribe(topic, got, name=topic, start="earliest")
    for message in await got.enough():
        came.append((message.text, time.time()))
        due = message.header_text("deliver-at")
        assert due is None or time.time() * 1000 >= int(due)
    assert {text for text, _ in came} == {"later", "at", "now"}


async def test_a_message_is_published_once_by_its_id(ms: millstream.Connection, topic: str) -> None:
    first = await ms.publish(topic, "a", id="order-1", deduplicate=True)
    again = await ms.publish(topic, "a", id="order-1", deduplicate=True)
    assert (again.id, again.offset) == (first.id, first.offset) == ("order-1", 0)
    with pytest.raises(InvalidRequest, match="id"):
        await ms.publish(topic, "a", deduplicate=True)


async def test_a_deleted_subscription_ends_its_handlers(ms: millstream.Connection, topic: str) -> None:
    async def handle(message: millstream.Message) -> None: ...

    await ms.publish(topic, "a")
    subscriber = await ms.subscribe(topic, handle, name=topic)
    waiting = asyncio.create_task(subscriber.run_until_stopped())
    async with millstream.connect(ms.client._bootstrap[0][0] + f":{ms.client._bootstrap[0][1]}") as other:
        await (await other.subscribe(topic, handle, name=topic)).unsubscribe(delete=True)
        await ms.publish(topic, "b")
        with pytest.raises(UnknownGroup):
            await waiting


async def test_a_subscriber_may_be_stopped_twice(ms: millstream.Connection, topic: str) -> None:
    await ms.publish(topic, "x")
    subscriber = await ms.subscribe(topic, CollectingHandler(1), name=topic)
    await subscriber.drain()
    assert ms._subscribers == []
    for delete in (False, False, True, True):
        await subscriber.unsubscribe(delete=delete)


# -- a handler that fails for everything -------------------------------------------------------------------------


async def test_an_outage_of_a_handler_uses_up_no_message(
    server: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has two attempts, at most one of which is used, however long the outage lasts."""
    monkeypatch.setattr(subscriber_module, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(subscriber_module, "PAUSE_S_MAX", 0.01)
    monkeypatch.setattr(subscriber_module, "DELAY_S_MAX", 0.01)
    count, accepted, failures, failures_max = 30, CollectingHandler(30), 0, 100

    async def handle(message: millstream.Message) -> None:
        nonlocal failures
        if failures < failures_max:
            failures += 1
            raise ConnectionError("the database is down")
        await accepted(message)

    async with asyncio.timeout(HANG_S), millstream.connect(server.kafka) as ms:
        await ms.publish_many(topic, [str(number) for number in range(count)])
        settings: dict[str, Any] = {"attempts": 2, "backoff": (0, 0)}
        await ms.subscribe(topic, handle, name=topic, start="earliest", **settings)
        messages = await accepted.enough()
        assert {message.text for message in messages} == {str(number) for number in range(count)}
        # Messages tried or buffered while nothing succeeded do not count as delivered.
        assert sum(message.attempt > 1 for message in messages) <= subscriber_module.FAILED_MESSAGES_MAX


async def test_bad_messages_at_the_front_do_not_block_good_ones(
    server: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(subscriber_module, "PAUSE_S_MAX", 0.01)
    bad, accepted = 40, CollectingHandler(20)

    async def handle(message: millstream.Message) -> None:
        if int(message.text) < bad:
            raise ValueError("this cannot be read")
        await accepted(message)

    async with asyncio.timeout(HANG_S), millstream.connect(server.kafka) as ms:
        await ms.publish_many(topic, [str(number) for number in range(bad + 20)])
        await ms.subscribe(topic, handle, name=topic, start="earliest")
        assert len(await accepted.enough()) == 20


async def test_a_worker_with_a_failing_handler_leaves_messages_to_others(
    server: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "PAUSE_S_MIN", HANG_S)
    failed = 0

    async def fail(message: millstream.Message) -> None:
        nonlocal failed
        failed += 1
        raise ConnectionError("the database is down")

    count = 200
    async with (
        asyncio.timeout(HANG_S),
        millstream.connect(server.kafka) as broken,
        millstream.connect(server.kafka) as well,
    ):
        await well.publish_many(topic, [str(number) for number in range(count)])
        settings: dict[str, Any] = {"attempts": 30, "backoff": (0, 0), "start": "earliest"}
        await broken.subscribe(topic, fail, name=topic, **settings)
        handle = CollectingHandler(count)
        await well.subscribe(topic, handle, name=topic, **settings)
        assert {message.text for message in await handle.enough()} == {str(number) for number in range(count)}
        assert failed <= 30


async def test_a_handler_without_parameters_is_refused(ms: millstream.Connection, topic: str) -> None:
    handle: Any = lambda: None  # noqa: E731
    with pytest.raises(InvalidSubscription, match="handler must take a message"):
        await ms.subscribe(topic, handle, name=topic)


async def test_a_backoff_may_be_one_number(ms: millstream.Connection, topic: str) -> None:
    await ms.publish(topic, "a")
    handle = CollectingHandler(1)
    await ms.subscribe(topic, handle, name=topic, start="earliest", backoff=5)
    assert [message.text for message in await handle.enough()] == ["a"]


async def test_failures_of_one_kind_do_not_fill_the_log(
    ms: millstream.Connection, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of each minute has a traceback, and the test takes less than ten minutes."""
    handle = CollectingHandler(40)

    async def fail_at_first(message: millstream.Message) -> None:
        if message.attempt == 1 and int(message.text) % 2:
            raise ValueError(message.text)
        await handle(message)

    await ms.publish_many(topic, [str(number) for number in range(40)])
    await ms.subscribe(topic, fail_at_first, name=topic, start="earliest", backoff=(0, 0))
    await handle.enough()
    assert 1 <= sum(record.exc_info is not None for record in caplog.records) <= 10


# -- partitions that are added -----------------------------------------------------------------------------------


async def test_added_partitions_are_published_to(
    ms: millstream.Connection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_REFRESH_S", 0.05)
    await create_topic(ms.client, topic, partitions=1, replication=-1, settings={})
    assert (await ms.publish(topic, "a")).partition == 0
    await grow_topic(ms.client, topic, 2)
    # A named partition is looked up at once, others are found soon.
    assert (await ms.publish(topic, "b", partition=1)).partition == 1
    assert [receipt.partition for receipt in await ms.publish_many(topic, ["c"], partition=1)] == [1]
    with pytest.raises(UnknownTopic, match="has no partition 5; the last is 1"):
        await ms.publish(topic, "d", partition=5)
    await grow_topic(ms.client, topic, 3)
    async with asyncio.timeout(HANG_S):
        while (await ms.publish(topic, "e")).partition != 2:
            await asyncio.sleep(0.01)


def test_in_the_blocking_client_a_subscription_is_a_context_manager(server: Server, topic: str) -> None:
    with millstream.connect_sync(server.kafka) as ms:
        ms.publish(topic, "before")
        with ms.subscription(topic, name=topic) as messages:
            # It is declared when the block begins.
            ms.publish_many(topic, ["first", "second"])
            message = next(messages)
            message.ack()
            assert message.text == "first"
        with ms.subscription(topic, name=topic) as messages:
            for message in messages:
                message.ack()
                assert (message.text, message.attempt) == ("second", 1)
                break
        with ms.listen(topic) as live:
            ms.publish(topic, "news")
            assert next(live).text == "news"
