"""Messages that came together and are held until each of them is settled.

What they have in common is kept once. Leases are renewed for all of them that are still open when half of their time
is over, so a long handler, or a message that waits behind one, keeps its lease. Times are of the monotonic clock.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from millstream.core.ids import NodeId

if TYPE_CHECKING:
    from millstream.client.message import Message
    from millstream.client.settling import Settlement


class Settler(Protocol):
    """Whoever tells the broker what became of messages."""

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Tell it; the future ends when it is durable."""


class Lease:
    """Messages of one partition from one answer, delivered as often as each other."""

    __slots__ = (
        "_topic_id",
        "attempt",
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
        settler: Settler,
        subscription: str | None = None,
        node: NodeId | None = None,
        received: float = 0.0,
        lease_s: float | None = None,
        fresh_until: float = inf,
        deadline_ms: int | None = None,
        attempt: int | None = None,
    ) -> None:
        self.topic = topic
        self._topic_id = topic_id
        self.partition = partition
        self.settler = settler
        self.subscription = subscription
        self.node = node
        """The node that gave them; None when it has to be found out who leads the partition now."""
        self.received = received
        self.lease_s = lease_s
        """How long leases last, and are extended for; None if nothing is leased."""
        self.is_leased = lease_s is not None
        self.fresh_until = fresh_until
        """Until when the leases hold for certain, so that a message may be handed out; moved by answers alone."""
        self.valid_until = inf if lease_s is None else received + lease_s
        """Until when it is worth repeating what is said of them; moved when an extension is sent."""
        self.deadline_ms = deadline_ms
        """By the clock of the broker."""
        self.attempt = attempt
        """Which delivery of the messages this is, so that what is told late counts for no other one."""
        self.messages: list[Message] = []
        """Those that came, until the last of them is settled; none if nothing is leased, since nobody would clear it.

        Messages are not seen by the garbage collector, so this must not hold them for longer.
        """
        self.open_accept: Settlement | None = None
        """What is about to be told of those that are accepted."""
        self.left = 0
        """How many are not settled."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def topic_id(self) -> str:
        """The id of the topic as text."""
        return str(UUID(bytes=self._topic_id))

    @property
    def where(self) -> tuple[bytes, int]:
        """The id of the topic, since another one may get its name, and the partition."""
        return self._topic_id, self.partition

    @property
    def place(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition
