"""A listener on a free port of loopback, and the framing of its connections."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import ConnectionLimits, Service
from millstream.broker.net.listener import Listener, bind
from millstream.broker.net.turns import Turns

LIMITS: Final = ConnectionLimits(frame_bytes_max=32 * 1024 * 1024)


@asynccontextmanager
async def listening(
    service: Service,
    *,
    limits: ConnectionLimits = LIMITS,
    budget: Budget | None = None,
    connections_max: int = 100,
    turns: Turns | None = None,
    drain_s: float = 0.0,
) -> AsyncIterator[tuple[Listener, int]]:
    """Serve on a port; check that the connections have returned all memory in the end."""
    budget = budget or Budget(1 << 30)
    listener = Listener(service, limits=limits, budget=budget, connections_max=connections_max, idle_s=600, turns=turns)
    sock = bind("127.0.0.1", 0, flag="kafka")
    port = sock.getsockname()[1]
    await listener.start(sock)
    try:
        yield listener, port
    finally:
        await listener.drain(drain_s)
        assert budget.used_bytes == 0
        assert budget.waiting == 0


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)
