"""Declares a subscription when it is not there, and says where one that is there differs from what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from millstream.admin.subscriptions import start_of
from millstream.model.errors import InvalidRequest, InvalidSubscription, SubscriptionExists
from millstream.model.subscription import (
    AT_TIME,
    ATTEMPTS,
    BACKOFF_MAX,
    BACKOFF_MIN,
    BY_DURATION,
    DEAD_LETTER_TOPIC,
    DELIVERY,
    EXPIRES,
    FILTER,
    LEASE,
    ORDERED,
    START,
    SubscriptionSettings,
)
from millstream.wire.subscriptions import SubscriptionClient

Start = str | datetime | timedelta
Seconds = float

_PLACES_ONLY: Final = frozenset({START})
"""Says where a new subscription begins, so it is no difference to one that has begun."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A subscription as it is."""

    name: str
    lease_s: float
    delivery: str


def wanted_settings(
    *,
    filter: str | None,
    delivery: str | None,
    ordered: bool | None,
    lease: Seconds | None,
    attempts: int | None,
    backoff: tuple[Seconds, Seconds] | None,
    dead_letter: str | None,
    start: Start | None,
    expires: Seconds | None,
) -> dict[str, str]:
    """What is asked for, under the names that settings have; what is None is left as it is."""
    asked: dict[str, Any] = {
        FILTER: filter,
        DELIVERY: delivery,
        ORDERED: ordered,
        LEASE: _ms(lease),
        ATTEMPTS: attempts,
        BACKOFF_MIN: None if backoff is None else _ms(backoff[0]),
        BACKOFF_MAX: None if backoff is None else _ms(backoff[1]),
        DEAD_LETTER_TOPIC: dead_letter,
        START: None if start is None else _start(start),
        EXPIRES: _ms(expires),
    }
    texts = {name: _text(value) for name, value in asked.items() if value is not None}
    SubscriptionSettings.from_strings(texts)
    return texts


async def declare(
    subscriptions: SubscriptionClient, name: str, topics: Sequence[str], settings: Mapping[str, str], *, update: bool
) -> Declared:
    """Make the subscription, or take the one that is there, if it is as asked for or may be changed."""
    try:
        await subscriptions.create(name, topics, settings)
    except SubscriptionExists:
        return await _agree(subscriptions, name, topics, settings, update=update)
    return _declared(name, SubscriptionSettings.from_strings(settings))


async def _agree(
    subscriptions: SubscriptionClient, name: str, topics: Sequence[str], settings: Mapping[str, str], *, update: bool
) -> Declared:
    (there,) = await subscriptions.describe([name])
    known: dict[str, str] = there["settings"]
    changed = {
        setting: value
        for setting, value in settings.items()
        if setting not in _PLACES_ONLY and known.get(setting) != value
    }
    other_topics = set(topics) != set(there["topics"])
    if (changed or other_topics) and not update:
        told = [f"{setting} is {known.get(setting)!r}, not {value!r}" for setting, value in sorted(changed.items())]
        if other_topics:
            told.append(f"its topics are {', '.join(sorted(there['topics']))}, not {', '.join(sorted(topics))}")
        raise SubscriptionExists(
            f"subscription {name!r} is declared otherwise: {'; '.join(told)}; update=True changes it"
        )
    if changed or other_topics:
        await subscriptions.alter(name, changed, topics=topics if other_topics else None)
    return _declared(name, SubscriptionSettings.from_strings({**known, **changed}))


def _declared(name: str, settings: SubscriptionSettings) -> Declared:
    return Declared(name, settings.lease_ms / 1000, settings.delivery)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _start(start: Start) -> str:
    if isinstance(start, timedelta):
        return f"{BY_DURATION}PT{int(start.total_seconds())}S"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidSubscription("start: the time at which a subscription begins needs a time zone")
        return f"{AT_TIME}{int(start.timestamp() * 1000)}"
    if not isinstance(start, str):
        raise InvalidSubscription(f"start must be a text, a time or a timedelta, not {start!r}")
    try:
        said = start if start.startswith(AT_TIME) else start_of(start)
        SubscriptionSettings.from_strings({START: said})
        return said
    except InvalidRequest as error:
        raise InvalidSubscription(f"start: {error}") from error
