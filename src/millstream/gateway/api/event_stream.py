"""Server-sent events: one event per message, and a comment as keep-alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Final

from millstream.gateway.api.route import EVENT_STREAM

KEEP_ALIVE_S: Final = 15.0
"""Keeps proxies from closing the connection, and detects clients that have disconnected."""

_HEADERS: Final = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def event(kind: str, data: bytes, event_id: str | None = None) -> bytes:
    """Format one event; the data is a single line, as JSON is."""
    known = b"" if event_id is None else b"id: %s\n" % event_id.encode()
    return b"event: %s\n%sdata: %s\n\n" % (kind.encode(), known, data)


async def send_events(
    send: Send,
    pieces: AsyncGenerator[bytes, None],
    disconnected: asyncio.Future[None],
    stopping: asyncio.Future[None],
    lapsed: asyncio.Future[bytes] | None = None,
) -> None:
    """Send pieces as fast as the client reads them, until it disconnects or the gateway stops.

    It also ends, with a last piece, when `lapsed` returns one.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    # Sent at once, so that the client knows that it is subscribed.
    await _send_piece(send, b": listening\n\n")
    sending = asyncio.ensure_future(_send_all(send, pieces))
    ends: list[asyncio.Future[Any]] = [sending, disconnected, stopping, *(() if lapsed is None else (lapsed,))]
    try:
        while True:
            done, _ = await asyncio.wait(ends, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            await _send_piece(send, b": nothing new\n\n")
    finally:
        if not sending.done():
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
    if not sending.cancelled():
        # An error of the sender is raised here and breaks the stream off.
        sending.result()
    if lapsed is not None and lapsed.done() and not disconnected.done():
        await _send_piece(send, lapsed.result())
    if not disconnected.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_all(send: Send, pieces: AsyncGenerator[bytes, None]) -> None:
    # Closed on cancellation too: the generator then returns the leases of messages that were not sent.
    async with aclosing(pieces):
        async for piece in pieces:
            await _send_piece(send, piece)


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
