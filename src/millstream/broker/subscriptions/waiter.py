"""Who waits for messages of a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery, Received, Wanted


class Waiter(Protocol):
    """A worker that waits for messages of one or several queues."""

    wanted: Wanted

    @property
    def is_done(self) -> bool:
        """Whether it has got something, or given up."""

    def wanted_now(self) -> Wanted | None:
        """What it has room for; None while it has none, and then the queue hears of it when that changes."""

    def give(self, delivery: Delivery, received: Received) -> None:
        """Here is something."""

    def refuse(self, reason: MillstreamError) -> None:
        """The queue has gone."""
