"""Server-sent events: one event for each message, a comment when nothing came for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Final

from millstream.gateway.api.route import EVENT_STREAM

KEEP_ALIVE_S: Final = 15.0
"""So that nobody on the way takes the connection for dead, and a client that is gone is noticed."""

_HEADERS: Final = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def event(kind: str, data: bytes, event_id: str | None = None) -> bytes:
    """One event; the data is one line, as JSON is."""
    known = b"" if event_id is None else b"id: %s\n" % event_id.encode()
    return b"event: %s\n%sdata: %s\n\n" % (kind.encode(), known, data)


async def send_events(
    send: Send, pieces: AsyncGenerator[bytes, None], gone: asyncio.Future[None], stopping: asyncio.Future[None]
) -> None:
    """Send pieces as they come, as fast as the client takes them, until it hangs up or the gateway stops."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    # At once, so that the client knows that it listens.
    await _send_piece(send, b": listening\n\n")
    sending = asyncio.ensure_future(_send_all(send, pieces))
    try:
        while True:
            done, _ = await asyncio.wait(
                (sending, gone, stopping), timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                break
            await _send_piece(send, b": nothing new\n\n")
    finally:
        if not sending.done():
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
    if not sending.cancelled():
        # What went wrong on the way is raised here, which breaks the stream off.
        sending.result()
    if not gone.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_all(send: Send, pieces: AsyncGenerator[bytes, None]) -> None:
    # Closed when this is cancelled, too: then it gives back what it holds and was not sent.
    async with aclosing(pieces):
        async for piece in pieces:
            await _send_piece(send, piece)


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
