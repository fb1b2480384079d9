"""One Python client, one load, in its own process; `benchmarks/sdk.py` starts it and reads its last line.

Run as a file, since some of the clients live in an environment that has nothing else. Each is used as its own
documentation shows, with acknowledgements from all it has, and configured as an expert would. All run on
uvloop.

    each        so many tasks, each awaiting the acknowledgement of one message after the other
    many        a thousand messages at a time, with one wait for all of them
    subscribe   messages that are there already, each handled by a coroutine and acknowledged as the client does it
    batches     the same messages in lists, each list acknowledged with one call, by the clients that have that
    rate        so many messages a second, published and received in the same process: how long each publish takes, and
                how long until the handler has it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from operator import attrgetter, methodcaller
from typing import Any, ClassVar

import uvloop

TASKS = 1000
AT_ONCE = 1000
STAMP = struct.Struct("<d")
Publish = Callable[[bytes], Awaitable[Any]]
PublishMany = Callable[[list[bytes]], Awaitable[Any]]
Handle = Callable[[Any], Awaitable[None]]
WARM_MESSAGES = 2000


class Client:
    """The operations of a library for each load."""

    value_of: Callable[[Any], bytes] = staticmethod(attrgetter("value"))
    """Reads the value of a message."""

    def __init__(self, address: str, topic: str) -> None:
        self.address = address
        self.topic = topic

    def publishing(self) -> AbstractAsyncContextManager[tuple[Publish, PublishMany]]:
        raise NotImplementedError

    def subscribed(self, handle: Handle) -> AbstractAsyncContextManager[None]:
        """The handler gets every message of the topic, the ones before included."""
        raise NotImplementedError

    def received(self) -> AsyncIterator[list[bytes]]:
        """Every message of the topic in lists, each list acknowledged when the next is asked for."""
        raise NotImplementedError


class Millstream(Client):
    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[tuple[Publish, PublishMany]]:
        import millstream

        async with millstream.connect(self.address) as ms:

            async def publish(value: bytes) -> None:
                await ms.publish(self.topic, value)

            async def publish_many(values: list[bytes]) -> None:
                await ms.publish_many(self.topic, values)

            yield publish, publish_many

    @asynccontextmanager
    async def subscribed(self, handle: Handle) -> AsyncIterator[None]:
        import millstream

        async with millstream.connect(self.address) as ms:
            name = f"bench-{uuid.uuid4().hex[:8]}"
            subscriber = await ms.subscribe(self.topic, handle, name=name, start="earliest", in_flight=10_000)
            yield
            await subscriber.unsubscribe(delete=True)

    async def received(self) -> AsyncIterator[list[bytes]]:
        import millstream

        async with millstream.connect(self.address) as ms:
            name = f"bench-{uuid.uuid4().hex[:8]}"
            async with ms.subscription(self.topic, name=name, start="earliest", in_flight=10_000) as stream:
                async for messages in stream.batches(AT_ONCE):
                    yield [message.value or b"" for message in messages]
                    await stream.ack(messages)


class AioKafka(Client):
    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[tuple[Publish, PublishMany]]:
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(bootstrap_servers=self.address, acks="all", enable_idempotence=True)
        async with producer:

            async def publish(value: bytes) -> None:
                await producer.send_and_wait(self.topic, value)

            async def publish_many(values: list[bytes]) -> None:
                await asyncio.gather(*[await producer.send(self.topic, value) for value in values])

            yield publish, publish_many

    @asynccontextmanager
    async def subscribed(self, handle: Handle) -> AsyncIterator[None]:
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.address,
            group_id=uuid.uuid4().hex,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

        async def run() -> None:
            # What its guide shows for processing in order, committed batch by batch.
            while True:
                for messages in (await consumer.getmany(timeout_ms=1000, max_records=1000)).values():
                    for message in messages:
                        await handle(message)
                    await consumer.commit()

        async with consumer:
            task = asyncio.create_task(run())
            yield
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def received(self) -> AsyncIterator[list[bytes]]:
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.address,
            group_id=uuid.uuid4().hex,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        async with consumer:
            while True:
                for messages in (await consumer.getmany(timeout_ms=1000, max_records=AT_ONCE)).values():
                    yield [message.value for message in messages]
                    await consumer.commit()


class Confluent(Client):
    value_of = staticmethod(methodcaller("value"))

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[tuple[Publish, PublishMany]]:
        from confluent_kafka.aio import AIOProducer

        producer = AIOProducer(
            {"bootstrap.servers": self.address, "acks": "all", "enable.idempotence": True, "linger.ms": 0},
            batch_size=AT_ONCE,
            buffer_timeout=0.001,
        )

        async def publish(value: bytes) -> None:
            await (await producer.produce(self.topic, value=value))

        async def publish_many(values: list[bytes]) -> None:
            futures = [await producer.produce(self.topic, value=value) for value in values]
            await producer.flush()
            await asyncio.gather(*futures)

        try:
            yield publish, publish_many
        finally:
            await producer.close()

    @asynccontextmanager
    async def subscribed(self, handle: Handle) -> AsyncIterator[None]:
        from confluent_kafka.aio import AIOConsumer

        settings = {
            "bootstrap.servers": self.address,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = AIOConsumer(settings, max_workers=4)
        await consumer.subscribe([self.topic])

        async def run() -> None:
            while True:
                messages = await consumer.consume(1000, 0.05)
                for message in messages:
                    await handle(message)
                if messages:
                    await consumer.commit(asynchronous=False)

        task = asyncio.create_task(run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await consumer.close()

    async def received(self) -> AsyncIterator[list[bytes]]:
        from confluent_kafka.aio import AIOConsumer

        settings = {
            "bootstrap.servers": self.address,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = AIOConsumer(settings, max_workers=4)
        await consumer.subscribe([self.topic])
        try:
            while True:
                if messages := await consumer.consume(AT_ONCE, 0.05):
                    yield [message.value() for message in messages]
                    await consumer.commit(asynchronous=False)
        finally:
            await consumer.close()


class AioPika(Client):
    """A durable quorum queue, which syncs before it confirms; publisher confirms, persistent messages."""

    value_of = staticmethod(attrgetter("body"))
    arguments: ClassVar[dict[str, Any]] = {"x-queue-type": "quorum"}

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[tuple[Publish, PublishMany]]:
        import aio_pika  # type: ignore[import-not-found, unused-ignore]

        async with await aio_pika.connect(f"amqp://guest:guest@{self.address}/") as connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.declare_queue(self.topic, durable=True, arguments=self.arguments)
            exchange = channel.default_exchange

            async def publish(value: bytes) -> None:
                message = aio_pika.Message(value, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await exchange.publish(message, routing_key=self.topic)

            async def publish_many(values: list[bytes]) -> None:
                await asyncio.gather(*map(publish, values))

            yield publish, publish_many

    @asynccontextmanager
    async def subscribed(self, handle: Handle) -> AsyncIterator[None]:
        import aio_pika

        async def handler(message: Any) -> None:
            await handle(message)
            await message.ack()

        async with await aio_pika.connect(f"amqp://guest:guest@{self.address}/") as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1000)
            queue = await channel.declare_queue(self.topic, durable=True, arguments=self.arguments)
            tag = await queue.consume(handler)
            yield
            await queue.cancel(tag)


class Nats(Client):
    """A stream in files, which the server syncs before it acknowledges; a durable pull consumer, acknowledged."""

    value_of = staticmethod(attrgetter("data"))

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[tuple[Publish, PublishMany]]:
        import nats  # type: ignore[import-not-found, unused-ignore]

        connection = await nats.connect(f"nats://{self.address}", pending_size=64 * 1024 * 1024)
        stream = connection.jetstream(publish_async_max_pending=4000)
        await self._stream(stream)

        async def publish(value: bytes) -> None:
            await stream.publish(self.topic, value, timeout=60)

        async def publish_many(values: list[bytes]) -> None:
            await asyncio.gather(*[await stream.publish_async(self.topic, value) for value in values])

        try:
            yield publish, publish_many
        finally:
            await connection.close()

    @asynccontextmanager
    async def subscribed(self, handle: Handle) -> AsyncIterator[None]:
        import nats

        connection = await nats.connect(f"nats://{self.address}", pending_size=64 * 1024 * 1024)
        stream = connection.jetstream()
        await self._stream(stream)
        pull = await stream.pull_subscribe(self.topic, durable=uuid.uuid4().hex, pending_msgs_limit=-1)

        async def run() -> None:
            while True:
                try:
                    messages = await pull.fetch(500, timeout=5)
                except nats.errors.TimeoutError:
                    continue
                for message in messages:
                    await handle(message)
                    await message.ack()

        task = asyncio.create_task(run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()

    async def _stream(self, stream: Any) -> None:
        from nats.js.errors import BadRequestError  # type: ignore[import-not-found, unused-ignore]

        try:
            await stream.add_stream(name=self.topic, subjects=[self.topic])
        except BadRequestError:
            return


LIBRARIES: dict[str, type[Client]] = {
    "millstream": Millstream,
    "aiokafka": AioKafka,
    "confluent": Confluent,
    "aio-pika": AioPika,
    "nats-py": Nats,
}


class Meter:
    """The CPU time that the process uses from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._cpu = self._used()

    def measured(self, messages: int, **more: float) -> dict[str, float]:
        seconds = time.perf_counter() - self._began
        return {"messages": messages, "seconds": seconds, "cpu_s": self._used() - self._cpu, **more}

    @staticmethod
    def _used() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


async def each(client: Client, size: int, seconds: float) -> dict[str, float]:
    """Many tasks, each waiting for its message."""
    value = b"x" * size
    async with client.publishing() as (publish, publish_many):
        await publish_many([value] * WARM_MESSAGES)
        count = 0
        end = time.perf_counter() + seconds
        meter = Meter()

        async def work() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await publish(value)
                count += 1

        await asyncio.gather(*(work() for _ in range(TASKS)))
        return meter.measured(count)


async def many(client: Client, size: int, seconds: float) -> dict[str, float]:
    """Many messages with one wait, and the next thousand prepared meanwhile."""
    values = [b"x" * size] * AT_ONCE
    async with client.publishing() as (_, publish_many):
        await publish_many([b"x" * size] * WARM_MESSAGES)
        count = 0
        end = time.perf_counter() + seconds
        meter = Meter()

        async def work() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await publish_many(values)
                count += AT_ONCE

        await asyncio.gather(work(), work(), work(), work())
        return meter.measured(count)


async def subscribe(client: Client, size: int, seconds: float, messages: int) -> dict[str, float]:
    """Handle a backlog."""
    async with client.publishing() as (_, publish_many):
        for _ in range(messages // AT_ONCE):
            await publish_many([b"x" * size] * AT_ONCE)
    done = asyncio.Event()
    warm = messages // 10
    meter = Meter()
    count = 0

    value_of = client.value_of

    async def handle(message: Any) -> None:
        nonlocal count, meter
        value_of(message)
        count += 1
        if count == warm:
            meter = Meter()
        elif count == messages:
            done.set()

    async with client.subscribed(handle):
        await done.wait()
        return meter.measured(messages - warm)


async def batches(client: Client, size: int, seconds: float, messages: int) -> dict[str, float]:
    """Read a backlog in lists."""
    async with client.publishing() as (_, publish_many):
        for _ in range(messages // AT_ONCE):
            await publish_many([b"x" * size] * AT_ONCE)
    warm = messages // 10
    count = began = 0
    meter = Meter()
    received = client.received()
    async for values in received:
        count += len(values)
        if not began and count >= warm:
            began, meter = count, Meter()
        if count >= messages:
            break
    measured = meter.measured(count - began)
    await received.aclose()  # type: ignore[attr-defined]
    return measured


async def rate(client: Client, size: int, seconds: float, per_s: int) -> dict[str, float]:
    """Latencies under a load that every server can handle."""
    published: list[float] = []
    received: list[float] = []
    filling = b"x" * max(0, size - STAMP.size)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(message: Any) -> None:
        value = client.value_of(message) or b""
        if len(value) >= STAMP.size:
            received.append(time.perf_counter() - STAMP.unpack_from(value)[0])

    async with client.publishing() as (publish, _):
        for _ in range(50):
            await publish(b"")
        async with client.subscribed(handle):

            async def one() -> None:
                now = time.perf_counter()
                await publish(STAMP.pack(now) + filling)
                published.append(time.perf_counter() - now)

            began = time.perf_counter()
            meter = Meter()
            sent = 0
            while (passed := time.perf_counter() - began) < seconds:
                while sent < passed * per_s:
                    task = asyncio.create_task(one())
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent += 1
                await asyncio.sleep(0.001)
            measured = meter.measured(sent)
            deadline = time.perf_counter() + 10
            while len(received) < sent and time.perf_counter() < deadline:
                await asyncio.sleep(0.01)
    # The first second is for all to find each other.
    steady = slice(min(per_s, len(published) // 3), None)
    return measured | _percentiles("publish", published[steady]) | _percentiles("receive", received[steady])


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"{name} p{part} ms": ordered[int(len(ordered) * part / 100)] * 1000 for part in (50, 99)}


def main() -> None:
    """Run one load and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("load", choices=["each", "many", "subscribe", "batches", "rate"])
    for name, default in {"address": "", "topic": "bench", "size": 100, "seconds": 2.0, "messages": 300_000}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--per-s", type=int, default=1000)
    options = parser.parse_args()
    client = LIBRARIES[options.library](options.address, options.topic)
    if options.load in ("subscribe", "batches"):
        backlog = subscribe if options.load == "subscribe" else batches
        work = backlog(client, options.size, options.seconds, options.messages)
    elif options.load == "rate":
        work = rate(client, options.size, options.seconds, options.per_s)
    else:
        work = (each if options.load == "each" else many)(client, options.size, options.seconds)
    print(json.dumps(uvloop.run(work)), flush=True)


if __name__ == "__main__":
    main()
