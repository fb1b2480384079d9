"""Relays whose links can be cut like a network's: data waits, and no connection is closed.

A relay identifies a peer by the client id in its first Kafka request, so the link between two nodes can be cut while
other nodes and clients continue. All relays of a trial run in one thread with its own event loop, so the trial itself
may block.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Self, TypeVar

T = TypeVar("T")

ALL_CLIENTS = ""
_IN_TRANSIT_MAX = 1000
_CHUNK_BYTES = 64 * 1024
_STOP_S_MAX = 10.0
_RETRANSMISSION_S = 0.2
_CLIENT_ID_AT = 12
"""The position of the client id in a Kafka request: after size, key, version and correlation id."""


class Direction(Enum):
    """The direction in which data passes a relay."""

    REQUESTS = "from the client"
    RESPONSES = "to the client"


class RelayThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S_MAX)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_S_MAX)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_end_all())
        self._loop.close()


async def _end_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class LinkRelay:
    """Listens on an address and forwards data, unless the sender's link is cut."""

    def __init__(
        self,
        thread: RelayThread,
        target: str,
        *,
        host: str = "127.0.0.1",
        named: bool = False,
        delay_s: float = 0.0,
        stalls: float = 0.0,
    ) -> None:
        at, _, port = target.rpartition(":")
        self._target = (at, int(port))
        self._host = host
        self._named = named
        self._delay_s = delay_s
        """The delay in each direction, with unlimited bandwidth."""
        self._stalls = stalls
        """The share of the data that waits for a retransmission, as TCP does after a loss."""
        self._thread = thread
        self._open: defaultdict[tuple[str, Direction], asyncio.Event] = defaultdict(_set_event)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = thread.run(asyncio.start_server(self._serve, host, 0))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, name: str = ALL_CLIENTS, directions: Iterable[Direction] = Direction) -> None:
        """Hold everything that a client, or any client, sends or receives."""
        self._thread.run(self._set(name, directions, is_open=False))

    def heal(self, name: str = ALL_CLIENTS, directions: Iterable[Direction] = Direction) -> None:
        """Release what was held, and forward new data."""
        self._thread.run(self._set(name, directions, is_open=True))

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._thread.run(self._close())

    async def _set(self, name: str, directions: Iterable[Direction], *, is_open: bool) -> None:
        for direction in directions:
            event = self._open[name, direction]
            event.set() if is_open else event.clear()

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            with suppress(OSError):
                first = await reader.read(_CHUNK_BYTES)
                await self._relay(client_id_of(first) if self._named else ALL_CLIENTS, first, reader, writer)
        except asyncio.CancelledError:
            # Otherwise the server that created this task would log it.
            return
        finally:
            writer.transport.abort()

    async def _relay(self, name: str, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests_open, responses_open = self._open[name, Direction.REQUESTS], self._open[name, Direction.RESPONSES]
        await requests_open.wait()
        upstream_reader, upstream = await asyncio.open_connection(*self._target)
        try:
            upstream.write(first)
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, upstream, requests_open, self._delay_s, self._stalls))
                group.create_task(_forward(upstream_reader, writer, responses_open, self._delay_s, self._stalls))
        finally:
            upstream.transport.abort()


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event, delay_s: float, stalls: float
) -> None:
    loop = asyncio.get_running_loop()
    in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_TRANSIT_MAX)

    async def deliver() -> None:
        with suppress(OSError):
            while True:
                due, piece = await in_transit.get()
                if not piece:
                    break
                if delay_s:
                    await asyncio.sleep(due - loop.time())
                if stalls and random.random() < stalls:
                    await asyncio.sleep(_RETRANSMISSION_S)
                await is_open.wait()
                writer.write(piece)
                await writer.drain()
        await is_open.wait()
        writer.transport.abort()

    delivering = asyncio.ensure_future(deliver())
    try:
        with suppress(OSError):
            while piece := await reader.read(_CHUNK_BYTES):
                await in_transit.put((loop.time() + delay_s, piece))
        await in_transit.put((loop.time() + delay_s, b""))
        await delivering
    finally:
        delivering.cancel()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def client_id_of(request: bytes) -> str:
    """Return the client id in the head of a Kafka request; empty if it is missing or incomplete."""
    begin = _CLIENT_ID_AT + 2
    size = int.from_bytes(request[_CLIENT_ID_AT:begin], "big", signed=True)
    return request[begin : begin + size].decode(errors="replace") if size > 0 else ALL_CLIENTS
