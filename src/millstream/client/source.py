"""Where messages come from: a subscription's queue, or topics as they are published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from millstream.client.message import Message
from millstream.core.errors import MillstreamError


class Settled(Protocol):
    """Whoever tells the broker what became of messages."""

    async def flush(self) -> None:
        """Wait until everything has been told."""


class Source(Protocol):
    """Gives messages, one after the other."""

    subscription: str
    error: MillstreamError | None

    @property
    def settling(self) -> Settled:
        """What is told of the messages."""

    async def start(self) -> None:
        """Begin to receive."""

    def take(self) -> Message | None:
        """The next message, if one is here."""

    def take_many(self, count: int) -> list[Message]:
        """The next messages, at most so many; none if none are here."""

    async def wait_for_message(self) -> None:
        """Wait until there may be a message, or the end."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no message will come any more."""

    def settle_nowait(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        """Settle a message without waiting for the answer."""

    def accept(self, message: Message) -> None:
        """Settle a message as done, without waiting for the answer."""

    def accept_many(self, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Settle messages as done; the futures end when that is durable."""

    def stop_renewing(self, message: Message) -> None:
        """Do not renew the lease of a message any more."""

    def stop_renewing_all(self, messages: Sequence[Message]) -> None:
        """The same of several, of which most are settled."""

    def throttle(self, limit: int | None) -> None:
        """Have at most so many messages wait here, and return the others; None for as many as usual."""

    def return_buffered(self) -> None:
        """Return what waits here and is delivered again, now and as it comes; the rest is still to be taken."""

    async def stop(self) -> None:
        """Receive no more; what is here may still be taken."""

    async def return_untaken(self) -> None:
        """Stop, and return what nobody has taken."""

    async def leave(self) -> None:
        """Stop, return what nobody has taken, and close when what was taken is settled or its lease is over."""

    async def close(self) -> None:
        """Stop, and give up what is not settled."""
