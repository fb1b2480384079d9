"""The lower bound for the gateway's HTTP server: read a body, respond with a document of the size of a receipt.

python -m benchmarks.http_echo DESCRIPTOR

It uses the same uvicorn, protocol and loop as the gateway, with a minimal application.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvloop

from millstream.gateway.process import Server

RESPONSE = (
    b'{"id":"907cde2f-d0af-4597-806a-f7fc4ae106be/0/1234567","topic":"orders","partition":0,"offset":1234567,'
    b'"timestamp":"2026-11-15T17:58:11.243Z"}'
)
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(RESPONSE))]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    """Respond to one request when its body is there."""
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 201, "headers": HEADERS})
    await send({"type": "http.response.body", "body": RESPONSE})


async def serve(listening: socket.socket) -> None:
    """Serve until killed."""
    await Server(echo).serve(sockets=[listening])


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1]))))
