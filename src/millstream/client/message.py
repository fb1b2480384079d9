"""A message as a program receives it, and how it says what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.client.arguments import check_text
from millstream.client.outcome import milliseconds
from millstream.client.tracing import CORRELATION_ID, TRACEPARENT
from millstream.core.errors import InvalidRecordState
from millstream.core.message_id import message_id
from millstream.core.verb import Verb
from millstream.protocol.records.record import Headers, decode_headers

if TYPE_CHECKING:
    from millstream.client.lease import Lease

NO_HEADERS: Final = b"\x00"


class Message(msgspec.Struct, eq=False, gc=False):
    """One message. Keys, values and headers are bytes; `json()` and `header_text` read them.

    A struct of msgspec, since one is made for every message, and in Python alone that takes four times as long.
    """

    _lease: Lease
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    _header_bytes: bytes
    attempt: int
    """How often it was delivered, this time included; 0 for a message of a live stream."""
    is_settled: bool = False
    _headers: Headers | None = None

    def __repr__(self) -> str:
        return f"<Message {self.topic}/{self.partition}@{self.offset} attempt {self.attempt}>"

    # -- where it is from -----------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self._lease.topic

    @property
    def partition(self) -> int:
        """The partition it lies in."""
        return self._lease.partition

    @property
    def subscription(self) -> str | None:
        """The subscription that delivered it; None for a live stream."""
        return self._lease.subscription

    @property
    def id(self) -> str:
        """The first `message-id` header if its publisher set one, else `topic-id/partition/offset`."""
        return message_id(self._lease.topic_id, self.partition, self.offset, self.all_headers)

    @property
    def timestamp(self) -> datetime:
        """When it was published, by its publisher's clock unless the topic stamps messages itself."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    @property
    def deadline(self) -> datetime | None:
        """Until when nobody else gets it; None for a live stream."""
        deadline_ms = self._lease.deadline_ms
        return None if deadline_ms is None else datetime.fromtimestamp(deadline_ms / 1000, UTC)

    # -- what is in it --------------------------------------------------------------------------------------

    @property
    def key_text(self) -> str | None:
        """The key as text."""
        return None if self.key is None else self.key.decode()

    @property
    def text(self) -> str:
        """The value as text."""
        return (self.value or b"").decode()

    def json(self, type: Any = Any) -> Any:
        """The value read as JSON; with a type (a dataclass, a `msgspec.Struct`, `list[int]` …) checked against it."""
        return msgspec.json.decode(self.value or b"null", type=type)

    @property
    def all_headers(self) -> Headers:
        """Every header in its order; a name may come more than once."""
        if self._headers is None:
            self._headers = (
                ()
                if self._header_bytes == NO_HEADERS
                else decode_headers(self._header_bytes, 0, len(self._header_bytes))
            )
        return self._headers

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """The headers by name; the last counts where a name comes more than once."""
        return dict(self.all_headers)

    def header_text(self, name: str) -> str | None:
        """The value of a header as text."""
        if self._header_bytes == NO_HEADERS:
            return None
        for known, value in reversed(self.all_headers):
            if known == name:
                return None if value is None else value.decode(errors="replace")
        return None

    @property
    def correlation_id(self) -> str | None:
        """What this message belongs to; what a handler publishes carries it on."""
        return self.header_text(CORRELATION_ID)

    @property
    def traceparent(self) -> str | None:
        """The trace it was published in."""
        return self.header_text(TRACEPARENT)

    # -- what became of it ----------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Done: it is not delivered again. Returns when that is durable."""
        await self._settle(Verb.ACCEPT)

    async def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Not now: it is delivered again after `delay` seconds, else after the declared backoff."""
        await self._settle(Verb.RELEASE, delay, reason)

    async def reject(self, reason: str = "") -> None:
        """Never: it goes to the dead letter topic now."""
        await self._settle(Verb.REJECT, None, reason)

    async def extend(self, seconds: float | None = None) -> None:
        """Keep it for so much longer from now on, else for the declared lease."""
        await self._lease.settler.settle(self, Verb.EXTEND, _ms(seconds), "")

    async def _settle(self, verb: int, delay: float | None = None, reason: str = "") -> None:
        if self.is_settled and self._lease.is_leased:
            raise InvalidRecordState(f"message {self.id} is settled already, or its lease is over")
        check_text("reason", reason)
        answer = self._lease.settler.settle(self, verb, _ms(delay), reason)
        await answer


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else milliseconds(seconds)
