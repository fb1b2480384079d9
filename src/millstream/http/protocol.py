"""HTTP on one connection: uvicorn's protocol with bounds on what comes before a request is whole."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from millstream.http.joined_transport import JoinedTransport
from millstream.http.problem import CONTENT_TYPE, problem_document

CONNECTIONS_MAX: Final = 2048
HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_S_MAX: Final = 30.0
"""A connection that has not brought the head of its first request by then, or of another one that it has begun, is
closed."""
REFUSED_S_MAX: Final = 5.0
REFUSED_BYTES_MAX: Final = 16 * 1024 * 1024
"""A client that is refused may go on sending for so long and so much: hung up on earlier, it would not see why."""
WRITE_S_MAX: Final = 30.0
WRITE_BYTES_MIN: Final = 64 * 1024
"""A client that takes less than this of an answer in that time, while more is there, is hung up on."""

_HEAD_TOO_LARGE: Final = f"the path and the headers of a request take at most {HEAD_BYTES_MAX} bytes"


class Protocol(HttpToolsProtocol):
    """Bounds connections, heads of requests, the time that these may take, and that clients take for their answers."""

    _head_bytes = 0
    _is_in_head = True
    _is_begun = False
    _expected: asyncio.TimerHandle | None = None
    _refused_bytes = -1
    """How much has come since the connection was refused; negative while it is not."""
    _stuck: asyncio.TimerHandle | None = None
    _joined: JoinedTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take on a connection, unless there are too many."""
        self._joined = JoinedTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._joined))
        if len(self.connections) > CONNECTIONS_MAX:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{CONNECTIONS_MAX} connections are open already")
            self.transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._head_came()
        self._is_taken()

    def data_received(self, data: bytes) -> None:
        """Take in what has arrived."""
        if self._refused_bytes >= 0:
            self._let_go_by(len(data))
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head or self._refused_bytes >= 0 or self.transport.is_closing():
            return
        if self._head_bytes > HEAD_BYTES_MAX:
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _HEAD_TOO_LARGE)
        elif self._is_begun and self._expected is None:
            # Only for a head that comes in pieces: most come whole, and then there is nothing to wait for.
            self._expect_head()

    def on_message_begin(self) -> None:
        """Another head begins."""
        self._is_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; if so much came at once that it may be too large, it is measured."""
        if self._head_bytes > HEAD_BYTES_MAX and self._head_size() > HEAD_BYTES_MAX:
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _HEAD_TOO_LARGE)
            raise ValueError(_HEAD_TOO_LARGE)  # Nothing of the request is read any further.
        self._is_begun = False
        self._is_in_head = False
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole; what follows is the head of another one."""
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is whole; what is written next is the head of another one."""
        self._joined.answered()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        super().pause_writing()
        if self._stuck is None:
            self._watch_taking()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        self._is_taken()

    def _watch_taking(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(WRITE_S_MAX, self._check_taking, waiting)

    def _check_taking(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < WRITE_BYTES_MIN:
            # To close it would keep what it does not take.
            self.transport.abort()
        else:
            self._watch_taking()

    def _is_taken(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _expect_head(self) -> None:
        self._expected = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def _head_came(self) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless it was refused while it was read."""
        if self._refused_bytes < 0:
            self._end(HTTPStatus.BAD_REQUEST, "this is no HTTP request")

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _end(self, status: HTTPStatus, detail: str) -> None:
        """Refuse all that comes on this connection: to close it while the client sends would keep this from it."""
        self._refused_bytes = 0
        self._head_came()
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way, into which this one would be mixed.
            self.transport.close()
            return
        self._answer(status, detail)
        self._joined.answered()
        self._joined.write_eof()
        self._expected = self.loop.call_later(REFUSED_S_MAX, self.transport.abort)

    def _let_go_by(self, size: int) -> None:
        self._refused_bytes += size
        if self._refused_bytes > REFUSED_BYTES_MAX:
            self.transport.abort()

    def _answer(self, status: HTTPStatus, detail: str) -> None:
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
