"""Messages between the broker and its push process: JSON lines through pipes."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec

from millstream.core.subscription import Subscription, SubscriptionSettings
from millstream.protocol.private.subscription_messages import PushReport

LINE_BYTES_MAX: Final = 64 * 1024 * 1024


class PushOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's options for the process."""

    kafka: str
    worker: str
    private_addresses: bool
    log_level: str
    log_format: str


class PushSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of push; secrets are only sent through the pipe, and are excluded from `repr`."""

    name: str
    subscription_id: str
    delivery: str
    lease_ms: int
    backoff_min_ms: int
    backoff_max_ms: int
    url: str
    headers: str
    secret: str
    timeout_ms: int
    in_flight_max: int
    layout: str

    def __repr__(self) -> str:
        return f"PushSubscription(name={self.name!r}, host={self.host!r})"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


class PushCommand(msgspec.Struct, frozen=True):
    """A line from the broker: every subscription to push."""

    subscriptions: list[PushSubscription]


class PushReports(msgspec.Struct, frozen=True):
    """A line to the broker: the state of every subscription."""

    reports: list[PushReport]


def push_subscription(declared: Subscription, settings: SubscriptionSettings) -> PushSubscription | None:
    """Return a subscription's push settings; None if it has no endpoint, or secrets that cannot be opened here."""
    if not settings.push_url or declared.sealed:
        return None
    return PushSubscription(
        name=declared.name,
        subscription_id=str(declared.subscription_id),
        delivery=settings.delivery,
        lease_ms=settings.lease_ms,
        backoff_min_ms=settings.backoff_min_ms,
        backoff_max_ms=settings.backoff_max_ms,
        url=settings.push_url,
        headers=settings.push_headers,
        secret=settings.push_secret,
        timeout_ms=settings.push_timeout_ms,
        in_flight_max=settings.push_in_flight_max,
        layout=settings.push_format,
    )
