"""A message as a program receives it, its lease, and how to settle it; the receipt of a published one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import UUID

import msgspec

from millstream.core.errors import InvalidRecordState, InvalidRequest, SchemaMismatch
from millstream.core.headers import CORRELATION_ID, TRACEPARENT
from millstream.core.ids import NodeId, message_id
from millstream.core.subscription import Verb
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import (
    Aborted,
    AbortedBatches,
    Headers,
    append_time_ms,
    decode_headers,
    records_section,
    walk_records,
)

if TYPE_CHECKING:
    from millstream.client.settling import Settlement
    from millstream.protocol.wire.client import Client


def check_integer(name: str, value: object, least: int = 0, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require an integer; neither a string of digits nor True is one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_number(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise error(f"{name} must be a number of at least 0, not {value!r}")


def check_pair(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a minimum and a maximum, in seconds."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise error(f"{name} must be a number of seconds, or a pair of minimum and maximum, not {value!r}")
    for number in value:
        check_number(name, number, error=error)


def check_text(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise error(f"{name} must be a string, not {value!r}")


def check_bool(name: str, value: object, error: type[InvalidRequest] = InvalidRequest) -> None:
    """Require True or False; a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, not {value!r}")


DELAY_SECONDS_MAX: Final = 10 * 365 * 86400
"""No delay is longer."""


def milliseconds(seconds: float) -> int:
    """Convert a delay to milliseconds; a negative one is 0."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds > DELAY_SECONDS_MAX:
        raise InvalidRequest(f"{seconds!r} is not a number of seconds up to ten years")
    return max(0, int(seconds * 1000))


class Reject(Exception):
    """The message can never be handled: dead-letter it, for the reason given."""


class RetryLater(Exception):
    """Deliver the message again after this many seconds; raises `InvalidRequest` if that is not a number."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        milliseconds(seconds)
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = seconds
        self.reason = reason


NO_HEADERS: Final = b"\x00"


class Message(msgspec.Struct, eq=False, gc=False):
    """A message. Keys, values and headers are bytes; `json()`, `decode()` and `header_text` decode
    them.

    A msgspec struct, since one is created for every message, which takes four times as long in plain Python.
    """

    _lease: Lease
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    _header_bytes: bytes
    attempt: int
    """The number of deliveries, including this one; 0 for a message of a live stream."""
    is_settled: bool = False
    _headers: Headers | None = None

    def __repr__(self) -> str:
        return f"<Message {self.topic}/{self.partition}@{self.offset} attempt {self.attempt}>"

    # -- origin ---------------------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """Return the topic it was published to."""
        return self._lease.topic

    @property
    def partition(self) -> int:
        """Return its partition."""
        return self._lease.partition

    @property
    def subscription(self) -> str | None:
        """Return the subscription that delivered it; None for a live stream."""
        return self._lease.subscription

    @property
    def id(self) -> str:
        """Return the first `message-id` header if its publisher set one, otherwise `topic-id/partition/offset`."""
        return message_id(self._lease.topic_id, self.partition, self.offset, self.all_headers)

    @property
    def timestamp(self) -> datetime:
        """Return when it was published, by the publisher's clock unless the topic uses append time."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    @property
    def deadline(self) -> datetime | None:
        """Return when its lease ends; None for a live stream."""
        deadline_ms = self._lease.deadline_ms
        return None if deadline_ms is None else datetime.fromtimestamp(deadline_ms / 1000, UTC)

    # -- contents -------------------------------------------------------------------------------------------

    @property
    def key_text(self) -> str | None:
        """Return the key as text."""
        return None if self.key is None else self.key.decode()

    @property
    def text(self) -> str:
        """Return the value as text."""
        return (self.value or b"").decode()

    def json(self, type: Any = Any) -> Any:
        """Decode the value as JSON; with a type (a dataclass, a `msgspec.Struct`, `list[int]` …), check it against
        that.
        """
        return msgspec.json.decode(self.value or b"null", type=type)

    async def decode(self) -> Any:
        """Decode the value by the schema that it names; raise `SchemaMismatch` if it names none or does not fit it."""
        if self.value is None:
            return None
        client = self._lease.client
        if client is None:
            raise SchemaMismatch("this message is not connected to a cluster whose schemas could decode it")
        from millstream.client.schemas import codecs_of

        return await codecs_of(client).decode(self.topic, self.value, self.all_headers)

    @property
    def all_headers(self) -> Headers:
        """Return all headers in order; a name may occur more than once."""
        if self._headers is None:
            self._headers = (
                ()
                if self._header_bytes == NO_HEADERS
                else decode_headers(self._header_bytes, 0, len(self._header_bytes))
            )
        return self._headers

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """Return the headers by name; the last of a name counts."""
        return dict(self.all_headers)

    def header_text(self, name: str) -> str | None:
        """Return the value of a header as text."""
        if self._header_bytes == NO_HEADERS:
            return None
        for known, value in reversed(self.all_headers):
            if known == name:
                return None if value is None else value.decode(errors="replace")
        return None

    @property
    def correlation_id(self) -> str | None:
        """Return the correlation id; messages published by its handler inherit it."""
        return self.header_text(CORRELATION_ID)

    @property
    def traceparent(self) -> str | None:
        """Return the trace it was published in."""
        return self.header_text(TRACEPARENT)

    # -- settlement -----------------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Accept the message, which is then not delivered again; return when that is durable."""
        await self._settle(Verb.ACCEPT)

    async def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Release the message: it is redelivered after `delay` seconds, by default after the declared backoff."""
        await self._settle(Verb.RELEASE, delay, reason)

    async def reject(self, reason: str = "") -> None:
        """Reject the message: it goes to the dead letter topic at once."""
        await self._settle(Verb.REJECT, None, reason)

    async def extend(self, seconds: float | None = None) -> None:
        """Extend the lease from now on, by default by its declared duration."""
        await self._lease.settler.settle(self, Verb.EXTEND, _ms(seconds), "")

    async def _settle(self, verb: int, delay: float | None = None, reason: str = "") -> None:
        if self.is_settled and self._lease.is_leased:
            raise InvalidRecordState(f"message {self.id} is already settled, or its lease has expired")
        check_text("reason", reason)
        response = self._lease.settler.settle(self, verb, _ms(delay), reason)
        await response


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else milliseconds(seconds)


class Receipt(NamedTuple):
    """The position of a stored message. Without acknowledgements (`acks=0`) the offset is unknown: -1."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    topic_id: str
    header_id: str | None = None
    """The `message-id` header, if the publisher set one."""

    @property
    def id(self) -> str:
        """Return the publisher's id of the message, otherwise `topic-id/partition/offset`."""
        if self.header_id is not None:
            return self.header_id
        return f"{self.topic_id}/{self.partition}/{self.offset}"


class MessageSettler(Protocol):
    """Settles the messages of a lease for their handlers."""

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Settle a message; the future completes when that is durable."""


class _InertSettler:
    """The settler of messages that are not leased or are settled by other means; does nothing."""

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Return a completed future."""
        response: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        response.set_result(None)
        return response


_INERT_SETTLER: Final = _InertSettler()


class Lease:
    """Messages of one partition from one response, all with the same delivery attempt.

    Their common properties are stored once. Leases of unsettled messages are renewed when half of their time has
    passed, so that a long handler, or a message waiting behind one, keeps its lease. Times are monotonic.
    """

    __slots__ = (
        "_topic_id",
        "attempt",
        "client",
        "deadline_ms",
        "fresh_until",
        "is_leased",
        "lease_s",
        "left",
        "messages",
        "node",
        "open_accept",
        "partition",
        "received",
        "settler",
        "subscription",
        "timer",
        "topic",
        "valid_until",
    )

    def __init__(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        *,
        settler: MessageSettler = _INERT_SETTLER,
        subscription: str | None = None,
        node: NodeId | None = None,
        received: float = 0.0,
        lease_s: float | None = None,
        fresh_until: float = inf,
        deadline_ms: int | None = None,
        attempt: int | None = None,
    ) -> None:
        self.topic = topic
        self.client: Client | None = None
        """Asks for the schemas of messages."""
        self._topic_id = topic_id
        self.partition = partition
        self.settler = settler
        self.subscription = subscription
        self.node = node
        """The node that leased them; None if the leader must be looked up."""
        self.received = received
        self.lease_s = lease_s
        """The duration of leases and extensions; None if nothing is leased."""
        self.is_leased = lease_s is not None
        self.fresh_until = fresh_until
        """The time until which the leases certainly hold, so that messages may be handed out; set by responses."""
        self.valid_until = inf if lease_s is None else received + lease_s
        """The time until which a settlement is retried; sending an extension moves it."""
        self.deadline_ms = deadline_ms
        """The end of the lease by the broker's clock."""
        self.attempt = attempt
        """The delivery attempt, so that a late settlement cannot affect another one."""
        self.messages: list[Message] = []
        """The messages, until the last of them is settled; empty if nothing is leased, since nothing would clear it.

        The garbage collector does not track messages, so this list must not keep them longer.
        """
        self.open_accept: Settlement | None = None
        """The settlement that collects accepted messages until it is sent."""
        self.left = 0
        """The number of unsettled messages."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def topic_id(self) -> str:
        return str(UUID(bytes=self._topic_id))

    @property
    def where(self) -> tuple[bytes, int]:
        """Return the topic's id, since another topic may take its name, and the partition."""
        return self._topic_id, self.partition

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition


def read_leased(batches: bytes, ranges: Sequence[LeasedRange], lease: Lease, *, aborted: Aborted = ()) -> list[Message]:
    """Read the messages of ascending offset ranges; headers are decoded on first use."""
    messages: list[Message] = []
    add, attempt = messages.append, lease.attempt or 0
    left_out, at = AbortedBatches(aborted), 0
    for header in iterate_whole_headers(batches):
        if left_out.holds(header.last_offset, header.attributes, header.producer_id):
            continue
        while at < len(ranges) and ranges[at].end <= header.base_offset:
            at += 1
        if at == len(ranges):
            break
        if ranges[at].start > header.last_offset or header.is_control:
            continue
        check_crc(batches, header)
        section = records_section(batches, header)
        base_ms, append_ms = header.base_timestamp_ms, append_time_ms(header)
        spans = ((ranges[index].start, ranges[index].end) for index in range(at, len(ranges)))
        for offset, delta_ms, key_at, key_end, value_at, headers_at, end in walk_records(section, header, spans):
            add(
                Message(
                    lease,
                    offset,
                    base_ms + delta_ms if append_ms is None else append_ms,
                    None if key_at < 0 else section[key_at:key_end],
                    None if value_at < 0 else section[value_at:headers_at],
                    section[headers_at:end],
                    attempt,
                )
            )
    return messages
