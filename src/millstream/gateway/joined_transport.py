"""A connection that sends the head of an answer together with the beginning of its body.

uvicorn writes them one after the other, and the loop sends whatever is written at once: twice the calls, and a client
that wakes up for a head without a body.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

JOINED_BYTES_MAX: Final = 64 * 1024
"""A longer body is not copied for it."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class JoinedTransport:
    """A transport that keeps a head until something follows it, or the answer is over."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self._head: bytes | None = None
        self._is_head_next = True
        # Asked for every request.
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send, but keep what is the first of an answer."""
        if self._is_head_next:
            if data != _CONTINUE:
                self._is_head_next = False
                self._head = data
                return
        elif self._head is not None:
            head, self._head = self._head, None
            if len(data) <= JOINED_BYTES_MAX:
                data = head + data
            else:
                self._write(head)
        self._write(data)

    def answered(self) -> None:
        """An answer is over; one without a body has nothing that could follow its head."""
        self._flush()
        self._is_head_next = True

    def close(self) -> None:
        """Send what is kept, and hang up."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._write(head)
