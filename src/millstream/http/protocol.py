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


class Protocol(HttpToolsProtocol):
    """Bounds connections, heads of requests, and the time that the first one may take."""

    _head_bytes = 0
    _is_in_head = True
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

    def data_received(self, data: bytes) -> None:
        """Take in what has arrived."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._end(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the path and the headers of a request take at most {HEAD_BYTES_MAX} bytes",
            )

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_heard = True
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole; what follows is the head of another one."""
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._end(HTTPStatus.BAD_REQUEST, "this is no HTTP request")

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
