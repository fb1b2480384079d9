"""Late responses: no worker handles a message that another one may have, and no lease stays without a holder.

A proxy between clients and broker delays the broker's responses to requests for messages.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

import millstream
from millstream.cli.local_process import ReservedPort
from millstream.client import settling
from millstream.protocol.messages.codec import request_head
from millstream.protocol.private.subscription_messages import RECEIVE_KEY, ReceiveRequest
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import until

HANG_S = 200
SHORT_S, LONG_S = 1.0, 3600.0
GATEWAY = "millstream-gateway"
Hidden = tuple[Server, ReservedPort]


async def _frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "big"))


class Proxy:
    """Forwards everything, except responses to one client's requests for messages while they are held."""

    def __init__(self, address: str, host: str, port: int) -> None:
        self.address = address
        self._upstream = (host, port)
        self.is_held = asyncio.Event()
        """A response has come, and is kept."""
        self._asked: dict[str, asyncio.Event] = {}
        self._client_id = ""
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0

    async def hold(self, client_id: str) -> None:
        """Hold the response to the current or next request of the client."""
        self._client_id = client_id
        self._released.clear()
        await self._asked.setdefault(client_id, asyncio.Event()).wait()

    def release(self) -> None:
        self._client_id = ""
        self._released.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            there = await asyncio.open_connection(*self._upstream)
        except ConnectionError:
            writer.close()
            self._open -= 1
            return
        received: dict[bytes, str] = {}
        pumps = [
            asyncio.create_task(self._to_broker(reader, there[1], received)),
            asyncio.create_task(self._to_client(there[0], writer, received)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps)
        finally:
            for stream in (writer, there[1]):
                stream.close()
                with suppress(ConnectionError):
                    await stream.wait_closed()
            self._open -= 1

    async def _to_broker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: dict[bytes, str]
    ) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                if frame[4:6] == struct.pack(">h", RECEIVE_KEY):
                    (length,) = struct.unpack_from(">h", frame, 12)
                    client_id = received[frame[8:12]] = frame[14 : 14 + length].decode()
                    self._asked.setdefault(client_id, asyncio.Event()).set()
                writer.write(frame)
                await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def _to_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: dict[bytes, str]
    ) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                if received.pop(frame[4:8], None) == self._client_id:
                    self.is_held.set()
                    await self._released.wait()
                writer.write(frame)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await until(lambda: not self._open)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hidden]:
    """A server that advertises the port at which each test has a proxy."""
    port = ReservedPort()
    settings = {"advertise": port.address, "pipelines-enabled": "false"}
    with Server(tmp_path_factory.mktemp("hidden") / "data", settings=settings) as server:
        yield server, port


@asynccontextmanager
async def proxied(hidden: Hidden) -> AsyncIterator[tuple[Proxy, Server]]:
    server, port = hidden
    host, _, upstream = server.kafka.rpartition(":")
    proxy = Proxy(port.address, host, int(upstream))
    listening = await asyncio.start_server(proxy.serve, host, port.number)
    try:
        async with asyncio.timeout(HANG_S):
            yield proxy, server
    finally:
        listening.close()
        await proxy.close()


class Http:
    """One HTTP request, which can be disconnected at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def send(cls, server: Server, method: str, path: str, body: object = None) -> Http:
        host, _, port = server.http.rpartition(":")
        http = cls(*await asyncio.open_connection(host, int(port)))
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} /v1/{path} HTTP/1.1\r\nhost: {server.http}\r\ncontent-length: {len(content)}\r\n\r\n"
        http._writer.write(head.encode() + content)
        return http

    async def pulled(self) -> list[dict[str, object]]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        messages: list[dict[str, object]] = json.loads(await self._reader.readexactly(length))["messages"]
        return messages

    async def event(self) -> dict[str, object]:
        """The next message of a stream."""
        while not (line := await self._reader.readline()).startswith(b"data: "):
            assert line
        event: dict[str, object] = json.loads(line.removeprefix(b"data: "))
        return event

    async def hang_up(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def pull(server: Server, name: str, wait_ms: int = 60_000) -> Awaitable[Http]:
    return Http.send(server, "POST", f"subscriptions/{name}/messages:pull", {"wait_ms": wait_ms})


# -- no worker handles a message that another one may have ---------------------------------------------------------


async def settle_first_by_another(proxy: Proxy, server: Server, topic: str, client_id: str, **options: object) -> None:
    """Have another worker accept a message whose response to the client is held, then release the response."""
    handled = asyncio.Event()

    async def handle(_message: millstream.Message) -> None:
        handled.set()

    async with millstream.connect(server.kafka, client_id="other") as ms:
        await proxy.hold(client_id)
        receipt = await ms.publish(topic, "first", key="k")
        await proxy.is_held.wait()
        worker = await ms.subscribe(topic, handle, name=topic, lease=SHORT_S, **options)  # type: ignore[arg-type]
        await handled.wait()
        assert (await ms.delivery(receipt, subscription=topic, wait=HANG_S)).state == "accepted"
        await worker.drain()
        proxy.release()
        await ms.publish(topic, "last", key="k")


@pytest.mark.parametrize(
    "options",
    [{"delivery": "exactly-once"}, {"delivery": "at-least-once", "ordered": True}],
    ids=["exactly", "ordered"],
)
async def test_a_handler_gets_no_message_that_another_worker_has_accepted(
    hidden: Hidden, topic: str, options: dict[str, object]
) -> None:
    handled: list[str] = []
    last = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        handled.append(message.text)
        if message.text == "last":
            last.set()

    async with proxied(hidden) as (proxy, server), millstream.connect(proxy.address, client_id="late") as ms:
        await ms.publish(topic, "before")
        await ms.subscribe(topic, handle, name=topic, lease=SHORT_S, **options)  # type: ignore[arg-type]
        await settle_first_by_another(proxy, server, topic, "late", **options)
        await last.wait()
        assert handled == ["last"]


async def test_a_blocking_iteration_gets_none_either(hidden: Hidden, topic: str) -> None:
    def first(address: str) -> str:
        with millstream.connect_sync(address, client_id="late") as ms:
            for message in ms.subscription(topic, name=topic, lease=SHORT_S, start="earliest"):
                message.ack()
                if message.text != "before":
                    return message.text
        raise AssertionError

    async with proxied(hidden) as (proxy, server):
        async with millstream.connect(server.kafka) as ms:
            receipt = await ms.publish(topic, "before")
            taking = asyncio.create_task(asyncio.to_thread(first, proxy.address))
            async with asyncio.timeout(HANG_S):
                while (await asyncio.gather(state(ms, receipt, topic)))[0] != "accepted":
                    await asyncio.sleep(0.01)
        await settle_first_by_another(proxy, server, topic, "late")
        assert await taking == "last"


async def state(ms: millstream.Connection, receipt: millstream.Receipt, name: str) -> str | None:
    try:
        return (await ms.delivery(receipt, subscription=name, wait=0.1)).state
    except millstream.MillstreamError:
        return None


async def test_a_pull_gets_none_either(hidden: Hidden, topic: str) -> None:
    async with proxied(hidden) as (proxy, server):
        await declare(server, topic, SHORT_S)
        pulling = await pull(server, topic)
        await settle_first_by_another(proxy, server, topic, GATEWAY)
        assert [message["value"] for message in await pulling.pulled()] == ["last"]
        await pulling.hang_up()


async def test_an_event_stream_gets_none_either(hidden: Hidden, topic: str) -> None:
    async with proxied(hidden) as (proxy, server):
        await declare(server, topic, SHORT_S)
        stream = await Http.send(server, "GET", f"subscriptions/{topic}/events")
        await settle_first_by_another(proxy, server, topic, GATEWAY)
        assert (await stream.event())["value"] == "last"
        await stream.hang_up()


async def test_messages_accepted_while_their_response_was_held_are_not_handled_again(
    start_server: Callable[..., Server], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted broker leases again what the worker still holds; more is accepted than the worker remembers."""
    monkeypatch.setattr(settling, "RANGES_MAX", 1)
    port = ReservedPort()
    server = start_server(advertise=port.address)
    handled: list[str] = []
    gates = {str(number): asyncio.Event() for number in range(4)}
    last = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        handled.append(message.text)
        if message.text == "last":
            last.set()
        else:
            await gates[message.text].wait()

    async with (
        proxied((server, port)) as (proxy, _),
        millstream.connect(proxy.address, client_id="late") as ms,
        millstream.connect(server.kafka) as other,
    ):
        receipts = await other.publish_many(topic, list(gates))
        await ms.subscribe(topic, handle, name=topic, start="earliest", concurrency=8)
        await until(lambda: len(handled) >= len(gates))
        # At once, before the leases are durable.
        server.kill()
        await proxy.hold("late")
        await asyncio.to_thread(server.start)
        await proxy.is_held.wait()
        for number in (0, 2, 1, 3):
            gates[str(number)].set()
            assert (await other.delivery(receipts[number], subscription=topic, wait=HANG_S)).state == "accepted"
        proxy.release()
        await other.publish(topic, "last")
        await last.wait()
        assert sorted(handled) == [*gates, "last"]


# -- no lease stays without a holder ------------------------------------------------------------------------------


async def declare(server: Server, topic: str, lease_s: float) -> None:
    async with millstream.connect(server.kafka) as ms:
        await ms.publish(topic, "before")
        async with ms.subscription(topic, name=topic, lease=lease_s):
            pass


async def taken(server: Server, topic: str, count: int = 1) -> list[int]:
    """The attempts with which a worker gets messages, whose leases do not expire during the test."""
    attempts: list[int] = []
    async with millstream.connect(server.kafka, client_id="next") as ms, ms.subscription(topic, name=topic) as stream:
        async for message in stream:
            attempts.append(message.attempt)
            await message.ack()
            if len(attempts) == count:
                break
    return attempts


@pytest.mark.parametrize("path", ["pull", "events"])
async def test_messages_leased_for_a_disconnected_client_are_returned(hidden: Hidden, topic: str, path: str) -> None:
    async with proxied(hidden) as (proxy, server):
        await declare(server, topic, LONG_S)
        pending = await (
            pull(server, topic) if path == "pull" else Http.send(server, "GET", f"subscriptions/{topic}/events")
        )
        await proxy.hold(GATEWAY)
        async with millstream.connect(server.kafka) as ms:
            await ms.publish(topic, "first")
        await proxy.is_held.wait()
        await pending.hang_up()
        # The gateway notices that at about the time at which the response arrives.
        proxy.release()
        assert await taken(server, topic) == [1]


async def test_messages_leased_while_a_worker_leaves_are_returned(hidden: Hidden, topic: str) -> None:
    async with proxied(hidden) as (proxy, server):
        await declare(server, topic, LONG_S)
        async with millstream.connect(proxy.address, client_id="late") as ms:
            stream = ms.subscription(topic, name=topic)
            first = asyncio.create_task(anext(aiter(stream)))
            await proxy.hold("late")
            async with millstream.connect(server.kafka) as other:
                await other.publish(topic, "first")
            await proxy.is_held.wait()
            first.cancel()
            leaving = asyncio.create_task(stream.close())
            await asyncio.sleep(0)
            proxy.release()
            await leaving
        assert await taken(server, topic) == [1]


async def test_messages_leased_for_a_client_that_never_reads_are_returned(server: Server, topic: str) -> None:
    create = CommandLine(server.kafka)
    await asyncio.to_thread(create, "topic", "create", topic, "--set", "max.message.bytes=33554432")
    await declare(server, topic, LONG_S)
    async with asyncio.timeout(HANG_S), millstream.connect(server.kafka) as ms:
        # One batch, since cold reads are short, and larger than the kernel buffers for a client that reads nothing.
        await ms.publish(topic, b"x" * 24_000_000)
        host, _, port = server.kafka.rpartition(":")
        asking = socket.create_connection((host, int(port)))
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = msgspec.msgpack.encode(ReceiveRequest(topic, "gone", 10_000, 64 << 20, 0))
        head = request_head(RECEIVE_KEY, 0, 1, "gone")
        asking.sendall(struct.pack(">i", len(head) + len(body)) + bytes(head) + body)
        assert await asyncio.to_thread(asking.recv, 4)
        # Closed with most of the response unread, so that the broker sees a reset.
        asking.close()
        assert await taken(server, topic) == [1]
