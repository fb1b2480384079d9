"""Leases of the messages that arrived together, and how to read those messages.

What the messages have in common is stored once. Leases of unsettled messages are renewed when half of their time has
passed, so that a long handler, or a message waiting behind one, keeps its lease. Times are monotonic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from millstream.core.ids import NodeId
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import Aborted, AbortedBatches, append_time_ms, records_section, walk_records

if TYPE_CHECKING:
    from millstream.client.message import Message
    from millstream.client.settling import Settlement
    from millstream.protocol.wire.client import Client


class MessageSettler(Protocol):
    """Settles the messages of a lease for their handlers."""

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Settle a message; the future completes when that is durable."""


class NoSettler:
    """Settles nothing: of messages that are not leased, or settled by other means."""

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Return a completed future."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        return answer

    async def flush(self) -> None:
        """Return at once: nothing is pending."""


_NO_SETTLER: Final = NoSettler()


class Lease:
    """Messages of one partition from one response, all with the same delivery attempt."""

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
        settler: MessageSettler = _NO_SETTLER,
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
        """Until when the leases are certain to hold, so that messages may be handed out; only responses move it."""
        self.valid_until = inf if lease_s is None else received + lease_s
        """Until when retrying a settlement makes sense; sending an extension moves it."""
        self.deadline_ms = deadline_ms
        """By the broker's clock."""
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
        """Return the topic's id as text."""
        return str(UUID(bytes=self._topic_id))

    @property
    def where(self) -> tuple[bytes, int]:
        """Return the topic's id, since another topic may take its name, and the partition."""
        return self._topic_id, self.partition

    @property
    def place(self) -> tuple[str, int]:
        """Return topic and partition."""
        return self.topic, self.partition


def read_leased(batches: bytes, ranges: Sequence[LeasedRange], lease: Lease, *, aborted: Aborted = ()) -> list[Message]:
    """Read the messages of ascending offset ranges; headers are decoded on first use."""
    from millstream.client.message import Message

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
        wanted = ((ranges[index].start, ranges[index].end) for index in range(at, len(ranges)))
        for offset, delta_ms, key_at, key_end, value_at, headers_at, end in walk_records(section, header, wanted):
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
