"""Delete subscriptions that declare an expiry and are unused.

Any node may serve workers of a subscription. A node on which it was used records that in the catalog from time to time,
so that neither another node nor a restart mistakes it for unused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from uuid import UUID

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError, UnknownSubscription
from millstream.core.subscription import Subscription

_logger = logging.getLogger(__name__)

NOTES_PER_LIFETIME: Final = 8
"""How often the use of a subscription is recorded within its expiry time."""
CHECK_S_MIN: Final = 0.05
CHECK_S_MAX: Final = 600.0

LastUsed = Callable[[UUID], int]
"""Returns when a subscription was last used on this node, in milliseconds since 1970; 0 if never."""


class Expiry:
    """Check and delete expired subscriptions."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        clock: Clock,
        last_used: LastUsed,
        delete: Callable[[str], Awaitable[object]],
    ) -> None:
        self._subscriptions = subscriptions
        self._clock = clock
        self._last_used = last_used
        self._delete = delete
        self._changed = asyncio.Event()
        subscriptions.on_change(self._changed.set)

    async def run(self) -> None:
        """Check as often as the shortest expiry requires, forever; idle while nothing expires."""
        while True:
            self._changed.clear()
            expiring = [
                (one, lifetime_ms) for one in self._subscriptions.all() if (lifetime_ms := self._lifetime_ms(one)) >= 0
            ]
            for subscription, lifetime_ms in expiring:
                await self._check(subscription, lifetime_ms)
            shortest_ms = min((lifetime_ms for _, lifetime_ms in expiring), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if shortest_ms is None else _pause_s(shortest_ms)):
                    await self._changed.wait()

    def _lifetime_ms(self, subscription: Subscription) -> int:
        return self._subscriptions.settings_of(subscription).expires_ms

    async def _check(self, subscription: Subscription, lifetime_ms: int) -> None:
        now_ms = self._clock.now_ms()
        used_here_ms = self._last_used(subscription.subscription_id)
        used_ms = max(used_here_ms, subscription.used_ms, subscription.created_ms)
        try:
            if now_ms - used_ms > lifetime_ms:
                await self._subscriptions.load()
                now = self._subscriptions.existing(subscription.name)
                # Another node may have recorded a use.
                if max(now.used_ms, now.created_ms) < now_ms - lifetime_ms:
                    await self._delete(subscription.name)
                    _logger.info("an unused subscription expired", extra={"subscription": subscription.name})
            elif used_here_ms - max(subscription.used_ms, subscription.created_ms) > lifetime_ms / NOTES_PER_LIFETIME:
                await self._subscriptions.note_use(subscription.name, used_here_ms)
        except UnknownSubscription:
            # Another node was faster.
            return
        except MillstreamError as error:
            _logger.warning(
                "a subscription could not be checked for expiry; retrying",
                extra={"subscription": subscription.name, "error": str(error)},
            )


def _pause_s(lifetime_ms: int) -> float:
    return min(max(lifetime_ms / NOTES_PER_LIFETIME / 1000, CHECK_S_MIN), CHECK_S_MAX)
