"""Declares a subscription if it does not exist, and compares an existing one with what is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict

from millstream.client.admin.subscriptions import differences, start_of
from millstream.client.arguments import check_bool, check_integer, check_number, check_pair, check_text
from millstream.core.errors import InvalidRequest, InvalidSubscription, SubscriptionExists
from millstream.core.subscription import (
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
    LEDGER,
    ORDERED,
    START,
    SubscriptionSettings,
)
from millstream.protocol.private.subscriptions import SubscriptionClient

Start = str | datetime | timedelta
Seconds = float


@dataclass(frozen=True, slots=True)
class Declared:
    """An existing subscription."""

    name: str
    lease_s: float
    delivery: str


class Wanted(TypedDict, total=False):
    """Settings of a subscription; those left out, or None, keep their declared value."""

    filter: str | None
    """A condition; messages that do not match are skipped."""
    delivery: str | None
    """`at-most-once`, `at-least-once` or `exactly-once`."""
    ordered: bool | None
    """Whether messages with the same key are handled one at a time."""
    lease: Seconds | None
    """How long a message stays with a worker that is silent."""
    attempts: int | None
    """The maximum number of deliveries; 0 for no limit."""
    backoff: Seconds | tuple[Seconds, Seconds] | None
    """The delay before the next attempt: the first, or the first and the longest; it doubles."""
    dead_letter: str | None
    """The topic for messages that fail for good."""
    start: Start | None
    """Where a new subscription starts."""
    expires: Seconds | None
    """How long it may be unused before it is deleted."""
    ledger: bool | None
    """Whether every event of its deliveries is kept for the ledger."""


def wanted_settings(wanted: Wanted) -> dict[str, str]:
    """Convert arguments to settings by name; raise `InvalidRequest` for invalid ones."""
    texts: dict[str, str] = {}
    for name, value in wanted.items():
        if name not in _SETTINGS:
            raise InvalidSubscription(f"a subscription has no {name!r}; the settings are: {', '.join(_SETTINGS)}")
        if value is not None:
            texts |= _SETTINGS[name](name, value)
    SubscriptionSettings.from_strings(texts)
    return texts


async def declare(
    subscriptions: SubscriptionClient, name: str, topics: Sequence[str], settings: Mapping[str, str], *, update: bool
) -> Declared:
    """Create the subscription, or use the existing one if it matches or may be changed."""
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
    found = differences(there, topics, settings)
    if found and not update:
        raise SubscriptionExists(
            f"subscription {name!r} exists with other settings: {'; '.join(found)}; update=True changes it"
        )
    changed = {
        setting: value for setting, value in settings.items() if setting != START and known.get(setting) != value
    }
    other_topics = set(topics) != set(there["topics"])
    if changed or other_topics:
        await subscriptions.alter(name, changed, topics=topics if other_topics else None)
    return _declared(name, SubscriptionSettings.from_strings({**known, **changed}))


def _declared(name: str, settings: SubscriptionSettings) -> Declared:
    return Declared(name, settings.lease_ms / 1000, settings.delivery)


_Reading = Callable[[str, Any], dict[str, str]]
"""Converts an argument, given by name and value, to settings."""


def _text(setting: str) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check_text(name, value, InvalidSubscription)
        return {setting: value}

    return read


def _truth(setting: str) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check_bool(name, value, InvalidSubscription)
        return {setting: str(value).lower()}

    return read


def _whole(setting: str) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check_integer(name, value, error=InvalidSubscription)
        return {setting: str(value)}

    return read


def _seconds(setting: str) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check_number(name, value, error=InvalidSubscription)
        return {setting: str(int(value * 1000))}

    return read


def _backoff(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, int | float):
        return _seconds(BACKOFF_MIN)(name, value)
    check_pair(name, value, InvalidSubscription)
    least, most = (str(int(seconds * 1000)) for seconds in value)
    return {BACKOFF_MIN: least, BACKOFF_MAX: most}


def _beginning(name: str, value: Any) -> dict[str, str]:
    return {START: _start(value)}


_SETTINGS: Final[dict[str, _Reading]] = {
    "filter": _text(FILTER),
    "delivery": _text(DELIVERY),
    "ordered": _truth(ORDERED),
    "lease": _seconds(LEASE),
    "attempts": _whole(ATTEMPTS),
    "backoff": _backoff,
    "dead_letter": _text(DEAD_LETTER_TOPIC),
    "start": _beginning,
    "expires": _seconds(EXPIRES),
    "ledger": _truth(LEDGER),
}


def _start(start: Start) -> str:
    if isinstance(start, timedelta):
        return f"{BY_DURATION}PT{int(start.total_seconds())}S"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidSubscription("start: the start time of a subscription needs a time zone")
        return f"{AT_TIME}{int(start.timestamp() * 1000)}"
    if not isinstance(start, str):
        raise InvalidSubscription(f"start must be a string, a time or a timedelta, not {start!r}")
    try:
        text = start if start.startswith(AT_TIME) else start_of(start)
        SubscriptionSettings.from_strings({START: text})
        return text
    except InvalidRequest as error:
        raise InvalidSubscription(f"start: {error}") from error
