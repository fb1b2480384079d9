"""A watch on etcd that outlives its connections: it goes on with the revision after the last one it has told of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import httpx

from millstream.cluster.etcd_gateway import EtcdGateway, Refusal
from millstream.cluster.etcd_messages import WatchEvent, WatchLine, WatchResult, decode, range_end, text
from millstream.cluster.store import Event
from millstream.model.errors import StoreUnavailable, WatchLost

LINE_BYTES_MAX = 64 * 1024 * 1024
"""More than the largest batch of changes that etcd can have at once."""

SILENCE_S_MAX = 900.0
"""etcd says every ten minutes that nothing happened; a connection that is silent for longer is not trusted."""

_PAUSE_S_MIN = 0.05
_PAUSE_S_MAX = 1.0


class _Interrupted(Exception):
    """The connection has to be made anew."""


class EtcdWatch:
    """The changes below a prefix, from one revision on."""

    def __init__(self, gateway: EtcdGateway, namespace: bytes, prefix: str, after: int) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._prefix = namespace + prefix.encode()
        self._after = after
        self._pause_s = 0.0

    async def batches(self) -> AsyncGenerator[Sequence[Event], None]:
        """Batches of changes, for ever."""
        while True:
            try:
                async with aclosing(self._connection()) as results:
                    async for result in results:
                        events = self._take(result)
                        if events:
                            yield events
            except (_Interrupted, Refusal, httpx.TransportError, StoreUnavailable) as error:
                if isinstance(error, WatchLost):
                    raise
                if isinstance(error, Refusal) and error.wants_login:
                    self._gateway.forget_token()
            await self._rest()

    async def _connection(self) -> AsyncGenerator[WatchResult, None]:
        """What one connection tells until it breaks."""
        create = {
            "key": self._prefix,
            "range_end": range_end(self._prefix),
            "start_revision": self._after + 1,
            "progress_notify": True,
        }
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stop = self._gateway.when_moved(lambda: None if moved.done() else moved.set_result(None))
        try:
            async with (
                self._gateway.stream("/v3/watch", {"create_request": create}) as answer,
                aclosing(_lines(answer.aiter_bytes())) as lines,
            ):
                while True:
                    yield _result(await _next_unless(moved, lines))
        finally:
            stop()

    def _take(self, result: WatchResult) -> list[Event]:
        if result.compact_revision:
            raise WatchLost(f"etcd has forgotten the changes before revision {result.compact_revision}")
        if result.canceled:
            raise _Interrupted(result.cancel_reason)
        self._gateway.health.answered()
        self._pause_s = 0.0
        events = [self._event(event) for event in result.events if event.kv.mod_revision > self._after]
        if events:
            self._after = events[-1].revision
        elif not result.created and not result.events:
            # A sign of life: everything up to the revision in its header has been told.
            self._after = max(self._after, result.header.revision)
        return events

    def _event(self, event: WatchEvent) -> Event:
        key = text(event.kv.key[len(self._namespace) :])
        return Event(key, None if event.type == "DELETE" else text(event.kv.value), event.kv.mod_revision)

    async def _rest(self) -> None:
        """Wait a little before the next connection, longer each time, and not in step with other nodes."""
        self._pause_s = min(max(self._pause_s * 2, _PAUSE_S_MIN), _PAUSE_S_MAX)
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))


async def _next_unless(moved: asyncio.Future[None], lines: AsyncIterator[bytes]) -> bytes:
    """The next line, unless the member that sends them is given up."""
    reading = asyncio.create_task(_next(lines))
    waiting: set[asyncio.Future[Any]] = {reading, moved}
    try:
        await asyncio.wait(waiting, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
    line = None if reading.cancelled() else reading.result()
    if line is None:
        raise _Interrupted
    return line


async def _next(lines: AsyncIterator[bytes]) -> bytes | None:
    return await anext(lines, None)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    held = b""
    async for chunk in chunks:
        *complete, held = (held + chunk).split(b"\n")
        if len(held) > LINE_BYTES_MAX:
            raise _Interrupted(f"a line of more than {LINE_BYTES_MAX} bytes")
        for line in complete:
            yield line


def _result(line: bytes) -> WatchResult:
    decoded = decode(line, WatchLine)
    if decoded.result is None:
        raise _Interrupted(decoded.error.message if decoded.error is not None else "an empty line")
    return decoded.result
