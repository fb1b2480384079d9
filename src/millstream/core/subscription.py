"""Subscriptions: named queues over topics, and their settings.

A Kafka share group is a subscription of the same name. Settings therefore have Kafka's names for group settings where
Kafka has them, and any Kafka tool can show and change them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple
from uuid import UUID
from zlib import crc32

from millstream.core import push
from millstream.core.credential import NO_OWNER, Owner
from millstream.core.errors import InvalidSetting, InvalidSubscription
from millstream.core.ids import PartitionIndex
from millstream.core.setting import (
    HIDDEN,
    SealedValue,
    Settings,
    hide_secrets,
    setting,
)
from millstream.core.topic import INTERNAL_TOPICS, check_topic_name

NAME_LENGTH_MAX = 249
TOPICS_MAX = 1000
FILTER_LENGTH_MAX = 8192

AT_MOST_ONCE: Final = "at-most-once"
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"

READ_COMMITTED: Final = "read_committed"
READ_UNCOMMITTED: Final = "read_uncommitted"

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
BY_DURATION: Final = "by_duration:"
AT_TIME: Final = "at:"

OWN_PREFIX: Final = "__"
"""The prefix of Millstream's own subscriptions."""
LETTERS_PREFIX: Final = "__dlq/"
"""Followed by a topic's name: the subscription that tracks the open letters of a dead letter topic."""

START = "share.auto.offset.reset"
LEASE = "share.record.lock.duration.ms"
ISOLATION = "share.isolation.level"
ATTEMPTS = "share.delivery.count.limit"
LEASES_MAX = "share.partition.max.record.locks"
SESSION = "share.session.timeout.ms"
HEARTBEAT = "share.heartbeat.interval.ms"
FILTER = "millstream.filter"
ORDERED = "millstream.ordered"
DELIVERY = "millstream.delivery"
BACKOFF_MIN = "millstream.backoff.min.ms"
BACKOFF_MAX = "millstream.backoff.max.ms"
DEAD_LETTER_TOPIC = "millstream.dead.letter.topic"
IN_FLIGHT_MAX = "millstream.in.flight.max"
EXPIRES = "millstream.expires.ms"
PAUSED = "millstream.paused"
LEDGER = "millstream.ledger"

NO_DEAD_LETTERS: Final = "none"
"""Used in place of a dead letter topic: messages that fail permanently are dropped."""

JITTER: Final = 0.2
"""The fraction by which a backoff is shortened at most, so that messages that failed together spread out."""

NEW_SUBSCRIPTION: Final[Mapping[str, str]] = {ATTEMPTS: "25", BACKOFF_MIN: "1000", BACKOFF_MAX: "300000"}
"""Written into a new subscription, together with its own dead letter topic; Kafka's share groups keep Kafka's
defaults. The delays add up to at least 67 minutes."""

_DEAD_LETTER_SUFFIX: Final = "-dlq"

_NOT_IN_TOPIC_NAMES: Final = re.compile(r"[^a-zA-Z0-9._-]")

_DURATION = re.compile(
    r"P(?:(?P<days>\d{1,9})D)?(?:T(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?(?:(?P<seconds>\d{1,9}(?:\.\d{1,9})?)S)?)?\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionSettings(Settings):
    holder: ClassVar = "a subscription"

    start: str = setting(
        START,
        LATEST,
        "Where the queue starts on a partition that it has not read: `earliest`, `latest`, `by_duration:P7D` "
        "(that long ago, in ISO 8601) or `at:` and milliseconds since 1970.",
    )
    lease_ms: int = setting(
        LEASE,
        30_000,
        "How long a worker holds a message before it goes to another, unless the worker settles it or extends the "
        "lease.",
        minimum=100,
        maximum=12 * 3600 * 1000,
    )
    attempts: int = setting(
        ATTEMPTS,
        5,
        "The maximum number of deliveries of a message. After that it goes to the dead letter topic, or is "
        "dropped and counted if there is none. 0 means no limit. A new subscription gets 25.",
        minimum=0,
        maximum=200,
    )
    isolation: str = setting(
        ISOLATION,
        READ_COMMITTED,
        "Whether messages of open and aborted transactions are skipped (`read_committed`) or delivered too.",
        choices=(READ_COMMITTED, READ_UNCOMMITTED),
    )
    leases_max: int = setting(
        LEASES_MAX,
        100_000,
        "The maximum number of messages of one partition that are leased at once.",
        minimum=1,
        maximum=1_000_000,
    )
    session_ms: int = setting(
        SESSION,
        45_000,
        "How long a Kafka share consumer may be silent before it is removed from the group.",
        minimum=1000,
        maximum=3600 * 1000,
    )
    heartbeat_ms: int = setting(
        HEARTBEAT, 5000, "How often a Kafka share consumer sends heartbeats.", minimum=100, maximum=600 * 1000
    )
    filter: str = setting(
        FILTER,
        "",
        "Which messages are delivered: a condition over key, headers, topic, timestamp and payload; empty matches all.",
    )
    ordered: bool = setting(ORDERED, False, "Whether messages with the same key are delivered one at a time, in order.")
    delivery: str = setting(
        DELIVERY,
        AT_LEAST_ONCE,
        "The delivery guarantee: `at-most-once` counts a message as done when it is delivered, `at-least-once` "
        "when it is accepted; `exactly-once` also makes leases durable, so that an accepted message is never "
        "delivered again.",
        choices=(AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE),
    )
    backoff_min_ms: int = setting(
        BACKOFF_MIN,
        0,
        "How long a message waits after its first failure; the delay doubles with each further one, and is "
        "shortened by up to a fifth at random. 0 retries at once. A new subscription gets 1000.",
        minimum=0,
        maximum=24 * 3600 * 1000,
    )
    backoff_max_ms: int = setting(
        BACKOFF_MAX,
        600_000,
        "The longest delay between two attempts. A new subscription gets 300000.",
        minimum=0,
        maximum=7 * 24 * 3600 * 1000,
    )
    dead_letter_topic: str = setting(
        DEAD_LETTER_TOPIC,
        NO_DEAD_LETTERS,
        "The topic for messages that exhausted their attempts or were rejected; it is created with the first of "
        "them. `none` drops and counts them. A new subscription gets its own topic, named after it.",
    )
    in_flight_max: int = setting(
        IN_FLIGHT_MAX,
        10_000,
        "The maximum number of messages of one partition that one worker holds at once.",
        minimum=1,
        maximum=1_000_000,
    )
    expires_ms: int = setting(
        EXPIRES, -1, "How long a subscription may be unused before it is deleted; -1 keeps it forever.", minimum=-1
    )
    paused: bool = setting(
        PAUSED, False, "Whether delivery is paused: existing leases can be settled, no new ones are granted."
    )
    ledger: bool = setting(
        LEDGER,
        False,
        "Whether every event of each message's delivery is kept until the ledger has landed it in its table.",
    )
    push_url: str = setting(
        push.URL, "", "The endpoint to which messages are sent as HTTP requests; empty means that workers pull them."
    )
    push_headers: str = setting(
        push.HEADERS,
        "",
        "HTTP headers that are sent with every message, as a JSON object. They are never shown, and have to be set "
        "again when the URL names another server.",
        is_secret=True,
        sent_to=(push.URL,),
    )
    push_secret: str = setting(
        push.SECRET,
        "",
        "The secret that signs messages: 16 bytes or more, as text or as `whsec_` and Base64; several, separated "
        "by spaces, while secrets are rotated. It is never shown.",
        is_secret=True,
    )
    push_timeout_ms: int = setting(
        push.TIMEOUT, 30_000, "How long the endpoint may take to respond.", minimum=10, maximum=600_000
    )
    push_in_flight_max: int = setting(
        push.IN_FLIGHT_MAX,
        100,
        "The maximum number of concurrent requests of a node to the endpoint; it starts with one and adapts to "
        "the responses.",
        minimum=1,
        maximum=1000,
    )
    push_format: str = setting(
        push.FORMAT,
        push.BINARY,
        "The format of a message: a CloudEvent in headers and body, a CloudEvent as one JSON document, or the raw "
        "value.",
        choices=(push.BINARY, push.STRUCTURED, push.RAW),
    )

    def as_strings(self) -> dict[str, str]:
        """Return every setting as text, by name, without secrets."""
        return dict(_texts_of(self))

    def start_time_ms(self, now_ms: int) -> int | None:
        """Return the time that `start` names; None for `earliest` and `latest`."""
        if self.start.startswith(AT_TIME):
            return int(self.start.removeprefix(AT_TIME))
        if self.start.startswith(BY_DURATION):
            return max(0, now_ms - _duration_ms(self.start.removeprefix(BY_DURATION)))
        return None

    @property
    def has_dead_letters(self) -> bool:
        """Return whether messages that fail permanently are kept in a dead letter topic."""
        return self.dead_letter_topic != NO_DEAD_LETTERS

    def backoff_ms(self, attempt: int, now_ms: int) -> int:
        """Return the backoff after the n-th failed attempt; the time of the failure determines the jitter."""
        if self.backoff_min_ms == 0:
            return 0
        # No shift exceeds the number of bits of the largest setting.
        longest = min(self.backoff_min_ms << min(max(attempt - 1, 0), 32), self.backoff_max_ms)
        return longest - int(longest * JITTER * _fraction(now_ms, attempt))

    def _check(self) -> None:
        _check_start(self.start)
        if not self.dead_letter_topic:
            raise InvalidSetting(
                f"{DEAD_LETTER_TOPIC} cannot be empty; name a topic, or {NO_DEAD_LETTERS!r} to drop failed messages"
            )
        if self.has_dead_letters:
            check_topic_name(self.dead_letter_topic)
        if self.dead_letter_topic in INTERNAL_TOPICS:
            # Nodes write letters themselves, as no client may write to these topics.
            raise InvalidSetting(f"{DEAD_LETTER_TOPIC}: {self.dead_letter_topic!r} is internal; name another topic")
        if self.backoff_min_ms > self.backoff_max_ms:
            raise InvalidSetting(
                f"{BACKOFF_MIN} ({self.backoff_min_ms} ms) is larger than {BACKOFF_MAX} ({self.backoff_max_ms} ms)"
            )
        if len(self.filter) > FILTER_LENGTH_MAX:
            raise InvalidSetting(f"{FILTER} has at most {FILTER_LENGTH_MAX} characters, not {len(self.filter)}")
        if self.heartbeat_ms >= self.session_ms:
            raise InvalidSetting(f"{HEARTBEAT} ({self.heartbeat_ms}) must be below {SESSION} ({self.session_ms})")
        push.check_push(self.push_url, self.push_headers, self.push_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A subscription as declared in the catalog; `overrides` holds only what its owner set."""

    noun: ClassVar = "subscription"
    settings_class: ClassVar = SubscriptionSettings
    name: str
    subscription_id: UUID
    topics: tuple[str, ...]
    """The topics that it delivers; empty for a share group, whose members name them."""
    overrides: Mapping[str, str] = field(repr=False)
    created_ms: int
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The start offsets of its queues, by `start_key` and partition, at the time the topic was subscribed to."""
    used_ms: int = 0
    """When its use was last recorded; maintained only if the subscription can expire."""
    sealed: Mapping[str, SealedValue] = field(default_factory=dict, repr=False)
    """Secrets that this node cannot open, by setting; they are not among `overrides`."""
    owner: Owner = NO_OWNER
    """The principal who changed it last, with whose rights it is pushed."""

    def start_on(self, topic: str, topic_id: UUID, partition: int) -> int | None:
        """Return the start of a queue; None for a partition added later, which is read from its first offset."""
        known = self.starts.get(start_key(topic, topic_id), ())
        return known[partition] if partition < len(known) else None

    @property
    def settings(self) -> SubscriptionSettings:
        return SubscriptionSettings.from_strings(self.overrides)

    def shown_overrides(self) -> dict[str, str]:
        """Return the settings that its owner made, without secrets."""
        return {**without_secrets(self.overrides), **dict.fromkeys(self.sealed, HIDDEN)}


@lru_cache(maxsize=1024)
def _texts_of(settings: SubscriptionSettings) -> Mapping[str, str]:
    """Return settings as text, cached: most subscriptions have the same ones, and lists show all of them."""
    return Settings.as_strings(settings)


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by name, with secrets hidden."""
    return hide_secrets(SubscriptionSettings, settings)


def start_key(topic: str, topic_id: UUID) -> str:
    """Return the key of a topic: a later topic of the same name has other offsets, and another key."""
    return f"{topic}/{topic_id}"


def topic_of_start(key: str) -> str:
    """Return the topic's name in a `start_key`."""
    return key.partition("/")[0]


class QueueKey(NamedTuple):
    """A subscription on one partition."""

    subscription_id: UUID
    topic_id: UUID
    partition: PartitionIndex

    def __hash__(self) -> int:
        """Hash without a call for each id: every request looks up this key in several tables."""
        return hash((self[0].int, self[1].int, self[2]))


def check_subscription(name: str, topics: Iterable[str], overrides: Mapping[str, str]) -> SubscriptionSettings:
    """Raise if the subscription cannot be declared; the filter is checked by the caller."""
    check_subscription_name(name)
    named = tuple(topics)
    if len(named) > TOPICS_MAX:
        raise InvalidSubscription(f"a subscription has at most {TOPICS_MAX} topics, this one has {len(named)}")
    if len(set(named)) != len(named):
        raise InvalidSubscription(f"subscription {name!r} names a topic twice")
    for topic in named:
        check_topic_name(topic)
    settings = SubscriptionSettings.from_strings(overrides)
    if settings.has_dead_letters and settings.dead_letter_topic in named:
        raise InvalidSubscription(
            f"subscription {name!r} would deliver its own dead letters: {settings.dead_letter_topic!r} is both its "
            "dead letter topic and one of its topics"
        )
    return settings


def check_subscription_name(name: str) -> None:
    """Raise `InvalidSubscription` for a name that a group cannot have."""
    if not name or name != name.strip():
        raise InvalidSubscription("the name of a subscription must not be empty, or start or end with a space")
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidSubscription(
            f"the name of a subscription has at most {NAME_LENGTH_MAX} characters, this one has {len(name)}"
        )
    if not name.isprintable():
        raise InvalidSubscription("the name of a subscription must be one line of printable text")


def settings_of_new(overrides: Mapping[str, str], dead_letter_topic: str) -> dict[str, str]:
    """Return the stored settings of a new subscription: the owner's, and defaults that lose no message."""
    settings = {**NEW_SUBSCRIPTION, DEAD_LETTER_TOPIC: dead_letter_topic, **overrides}
    # If only one bound of the backoff is given, the other one adapts.
    declared = SubscriptionSettings.declared()
    if BACKOFF_MAX not in overrides:
        settings[BACKOFF_MAX] = str(max(int(settings[BACKOFF_MAX]), declared[BACKOFF_MIN].parse(settings[BACKOFF_MIN])))
    elif BACKOFF_MIN not in overrides:
        settings[BACKOFF_MIN] = str(min(int(settings[BACKOFF_MIN]), declared[BACKOFF_MAX].parse(settings[BACKOFF_MAX])))
    return settings


def dead_letter_topic_for(name: str, subscription_id: UUID, is_taken: Callable[[str], bool]) -> str:
    """Return a valid, unused topic name for the dead letters of a subscription, whose own name may contain anything."""
    legal = _NOT_IN_TOPIC_NAMES.sub("-", name)[: NAME_LENGTH_MAX - len(_DEAD_LETTER_SUFFIX) - 9]
    plain = f"{legal}{_DEAD_LETTER_SUFFIX}"
    return plain if legal == name and not is_taken(plain) else f"{plain}-{subscription_id.hex[:8]}"


def _fraction(now_ms: int, attempt: int) -> float:
    """Return a pseudo-random number from 0 to 1 that is the same for all failures of one moment."""
    return crc32(b"%d/%d" % (now_ms, attempt)) / 0xFFFFFFFF


def _check_start(start: str) -> None:
    if start in (EARLIEST, LATEST):
        return
    if start.startswith(BY_DURATION):
        _duration_ms(start.removeprefix(BY_DURATION))
        return
    time = start.removeprefix(AT_TIME)
    if not start.startswith(AT_TIME) or not (time.isascii() and time.isdigit() and len(time) <= 15):
        raise InvalidSetting(
            f"{START} must be {EARLIEST}, {LATEST}, {BY_DURATION}P7D or {AT_TIME}<milliseconds since 1970>, "
            f"not {start!r}"
        )


def _duration_ms(text: str) -> int:
    match = _DURATION.match(text)
    parts = {} if match is None else {name: float(value) for name, value in match.groupdict().items() if value}
    if not parts:
        raise InvalidSetting(f"{START}: {text!r} is not a duration; write it like P7D or PT1H30M")
    try:
        return int(timedelta(**parts) / timedelta(milliseconds=1))
    except OverflowError:
        raise InvalidSetting(f"{START}: {text!r} is too long") from None


class Verb(IntEnum):
    """An acknowledgement; the first four numbers are those of Kafka's acknowledge types."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    EXTEND = 4
    RETURN = 5
    """The worker has not processed the message: another worker gets it, and this delivery does not count."""
