"""Sources of messages: a subscription's queue, or topics as they are published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from millstream.client.message import Message
from millstream.core.errors import MillstreamError


class Settled(Protocol):
    """Settles messages."""

    async def flush(self) -> None:
        """Wait until everything is settled."""


class Source(Protocol):
    """Provides messages, one after another."""

    subscription: str
    error: MillstreamError | None

    @property
    def settling(self) -> Settled:
        """Return the settler of the messages."""

    async def start(self) -> None:
        """Start receiving."""

    def take(self) -> Message | None:
        """Return the next message, if there is one."""

    def take_many(self, count: int) -> list[Message]:
        """Return at most this many of the next messages."""

    async def wait_for_message(self) -> None:
        """Wait until there may be a message, or no more will come."""

    @property
    def is_exhausted(self) -> bool:
        """Return whether no more messages will come."""

    def settle_nowait(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        """Settle a message without waiting for the response."""

    def accept(self, message: Message) -> None:
        """Accept a message without waiting for the response."""

    def accept_many(self, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Accept messages; the futures complete when that is durable."""

    def stop_renewing(self, message: Message) -> None:
        """Stop renewing the lease of a message."""

    def stop_renewing_all(self, messages: Sequence[Message]) -> None:
        """Stop renewing several leases; most of the messages are settled."""

    def throttle(self, limit: int | None) -> None:
        """Limit the number of waiting messages, and return the others; None removes the limit."""

    def return_buffered(self) -> None:
        """Return waiting messages that can be redelivered, now and as they arrive; others are still to be taken."""

    async def stop(self) -> None:
        """Stop receiving; waiting messages may still be taken."""

    async def return_untaken(self) -> None:
        """Stop, and return messages that were not taken."""

    async def leave(self) -> None:
        """Stop, return messages that were not taken, and close when the others are settled or their leases end."""

    async def close(self) -> None:
        """Stop, and give up what is not settled."""
