"""A relay in front of a server, in the test's event loop: links that are cut, or that lose responses."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

_CHUNK_BYTES = 64 * 1024


class Relay:
    """Listens on a free port and forwards data.

    With `drops_responses` the server's responses are lost, while requests still arrive.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.drops_responses = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Break every connection; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._relay(reader, writer)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upstream_reader, upstream = await asyncio.open_connection(*self._target)
            self._writers.add(upstream)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, upstream, is_response=False))
                    group.create_task(self._forward(upstream_reader, writer, is_response=True))
            finally:
                upstream.transport.abort()
                self._writers.discard(upstream)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_response: bool) -> None:
        with suppress(OSError):
            while piece := await reader.read(_CHUNK_BYTES):
                if not (is_response and self.drops_responses):
                    writer.write(piece)
                    await writer.drain()
        writer.transport.abort()
