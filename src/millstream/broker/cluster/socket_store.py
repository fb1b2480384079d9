"""The coordination store of a machine with several processes: the service in one, the nodes in others.

The supervising process gives each node one end of a socket before it starts, and serves the other with `StoreServer`.
The socket is the session too: a node that dies closes it, so that its keys are removed at once, and nodes detect at
once that their supervisor has died. No lease is renewed.

A frame: length u32, then a MessagePack array: a request is [number, method, arguments], a response [number, error,
result], and what a watch reports comes as further responses with its number.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from itertools import count
from typing import Any, Final

import msgspec

from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedSession, EmbeddedStore
from millstream.broker.cluster.store import (
    Change,
    Delete,
    Entry,
    Event,
    Expect,
    Put,
    Snapshot,
    StoreHealth,
    check_changes,
)
from millstream.core.clock import Clock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost

FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
RESPONSE_S: Final = 30.0
BATCHES_MAX: Final = 1000
"""How far a watch may lag before it has to read everything again."""

_TOO_LATE: Final = [WatchLost.__name__, "the node was too slow to follow"]
_LENGTH = struct.Struct(">I")
_ERRORS: Final[dict[str, type[Exception]]] = {
    error.__name__: error for error in (StoreRefused, StoreUnavailable, WatchLost)
}


class _Channel:
    """Frames over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> _Channel:
        connected.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connected))

    async def read(self) -> list[Any] | None:
        """Return the next frame; None at the end."""
        try:
            length = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
            if length > FRAME_BYTES_MAX:
                return None
            frame: list[Any] = msgspec.msgpack.decode(await self._reader.readexactly(length))
            return frame
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            return None

    def write(self, frame: list[Any]) -> None:
        body = msgspec.msgpack.encode(frame)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class StoreServer:
    """Serves one node over its socket until the node closes it."""

    def __init__(self, service: EmbeddedService, clock: Clock) -> None:
        self._store = EmbeddedStore(service, clock, sessions_expire=False)
        self._session: EmbeddedSession | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}

    async def run(self, connected: socket.socket) -> None:
        """Respond to requests; when the node disconnects, its session ends and its keys are removed."""
        channel = await _Channel.over(connected)
        try:
            while (frame := await channel.read()) is not None:
                number, method, arguments = frame
                if method == "watch":
                    self._watches[number] = asyncio.create_task(self._watch(channel, number, *arguments))
                elif method == "unwatch":
                    self._end_watch(*arguments)
                else:
                    channel.write(await self._respond(number, method, arguments))
                    with suppress(OSError):
                        await channel.drain()
        finally:
            for number in tuple(self._watches):
                self._end_watch(number)
            await self._store.close()
            channel.close()

    async def _respond(self, number: int, method: str, arguments: Sequence[Any]) -> list[Any]:
        try:
            return [number, None, await self._call(method, arguments)]
        except (StoreRefused, StoreUnavailable, WatchLost) as error:
            return [number, [type(error).__name__, str(error)], None]

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        if method == "read":
            return await self._store.read(*arguments)
        if method == "change":
            changes, expect = arguments
            return await self._store.change(
                [Delete(key) if value is None else Put(key, value, leased) for key, value, leased in changes],
                [Expect(*expectation) for expectation in expect],
            )
        if method == "open_session":
            self._session = await self._store.open_session(math.inf, lambda: None)
            return None
        if method == "close_session":
            if self._session is not None:
                await self._session.close()
            return None
        raise StoreRefused(f"the store has no method {method!r}")

    async def _watch(self, channel: _Channel, number: int, prefix: str, after: int) -> None:
        try:
            async with aclosing(self._store.watch(prefix, after=after)) as batches:
                async for events in batches:
                    channel.write([number, None, events])
                    await channel.drain()
        except WatchLost as error:
            channel.write([number, [type(error).__name__, str(error)], None])
        except OSError:
            return

    def _end_watch(self, number: int) -> None:
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.cancel()


class SocketSession:
    """Lasts as long as the socket, unless it is closed."""

    def __init__(self, store: SocketStore) -> None:
        self._store = store
        self._closed = False

    @property
    def live(self) -> bool:
        return not self._closed and self._store.connected

    confirmed = live

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(StoreUnavailable):
                await self._store.call("close_session")


class SocketStore(StoreHealth):
    """The coordination store of a node whose supervisor has the service."""

    def __init__(self, connected: socket.socket, clock: Clock, *, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called when the supervisor is gone."""
        super().__init__(clock, name="the coordination store")
        self._socket = connected
        self._on_lost = on_lost
        self._opening = asyncio.Lock()
        self._channel: _Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._watches: dict[int, asyncio.Queue[list[Any]]] = {}
        self.connected = True
        self._closing = False

    async def _open(self) -> None:
        async with self._opening:
            if self._channel is None and not self._closing:
                self._channel = await _Channel.over(self._socket)
                self._reading = asyncio.create_task(self._read(self._channel), name="store-socket")

    async def read(self, prefix: str) -> Snapshot:
        entries, revision = await self.call("read", prefix)
        return Snapshot({key: Entry(*entry) for key, entry in entries.items()}, revision)

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        check_changes(changes, expect)
        sent = [
            (change.key, change.value, change.leased) if isinstance(change, Put) else (change.key, None, False)
            for change in changes
        ]
        revision: int | None = await self.call("change", sent, [tuple(expectation) for expectation in expect])
        return revision

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        number = next(self._numbers)
        responses = self._watches[number] = asyncio.Queue()
        await self._open()
        self._send([number, "watch", [prefix, after]])
        try:
            while True:
                _, error, events = await responses.get()
                if error is not None:
                    raise WatchLost(error[1])
                yield [Event(*event) for event in events]
        finally:
            del self._watches[number]
            with suppress(StoreUnavailable):
                self._send([next(self._numbers), "unwatch", [number]])

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> SocketSession:
        """Begin a session, which ends with this process."""
        await self.call("open_session")
        return SocketSession(self)

    async def close(self) -> None:
        self._closing = True
        if self._reading is not None:
            self._reading.cancel()
        if self._channel is None:
            self._socket.close()
        else:
            self._channel.close()
        self.connected = False

    async def call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._open()
            self._send([number, method, arguments])
            async with asyncio.timeout(RESPONSE_S):
                error, result = await future
        except (StoreUnavailable, TimeoutError) as error:
            self.silent(str(error) or f"no response within {RESPONSE_S:g} s")
            raise StoreUnavailable("the supervising process does not respond") from error
        finally:
            del self._calls[number]
        self.responded()
        if error is not None:
            raise _ERRORS[error[0]](error[1])
        return result

    def _send(self, frame: list[Any]) -> None:
        if self._channel is None or not self.connected:
            raise StoreUnavailable("there is no connection to the supervising process")
        self._channel.write(frame)

    async def _read(self, channel: _Channel) -> None:
        while (frame := await channel.read()) is not None:
            number, error, result = frame
            if (responses := self._watches.get(number)) is not None:
                if responses.qsize() < BATCHES_MAX:
                    responses.put_nowait(frame)
                elif responses.qsize() == BATCHES_MAX:
                    # End the watch, so that it does not silently miss the dropped batches.
                    responses.put_nowait([number, _TOO_LATE, None])
            elif (future := self._calls.get(number)) is not None and not future.done():
                future.set_result((error, result))
        self.connected = False
        if not self._closing:
            self._on_lost()
