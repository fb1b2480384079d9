"""HTTP on one connection: uvicorn's protocol with bounds on what comes before a request is whole."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from millstream.http.problem import CONTENT_TYPE, problem_document

CONNECTIONS_MAX: Final = 2048
HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_S_MAX: Final = 30.0
"""A connection that has not brought the head of a first request by then is closed."""


class HeadTooLarge(Exception):
    """The path and the headers of a request take more than is read."""


class Protocol(HttpToolsProtocol):
    """Bounds connections, heads of requests, and the time that the first one may take."""

    _head_bytes = 0
    _is_heard = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take on a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._end(HTTPStatus.SERVICE_UNAVAILABLE, f"{CONNECTIONS_MAX} connections are open already")
            return
        self._expected = self.loop.call_later(HEAD_S_MAX, self._not_heard)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._expected.cancel()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Some of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_heard = True
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too large a head."""
        if self._head_bytes > HEAD_BYTES_MAX:
            self._end(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the path and the headers of a request take at most {HEAD_BYTES_MAX} bytes",
            )
        else:
            self._end(HTTPStatus.BAD_REQUEST, "this is no HTTP request")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            raise HeadTooLarge

    def _not_heard(self) -> None:
        if not self._is_heard:
            self.transport.close()

    def _end(self, status: HTTPStatus, detail: str) -> None:
        content = msgspec.json.encode(problem_document("", status, detail, {}))
        head: list[Any] = [
            STATUS_LINE[status],
            b"content-type: %s\r\n" % CONTENT_TYPE.encode(),
            b"content-length: %d\r\n" % len(content),
            b"retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else b"",
            b"connection: close\r\n\r\n",
            content,
        ]
        self.transport.write(b"".join(head))
        self.transport.close()
