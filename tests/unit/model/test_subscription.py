"""Subscriptions: what can be declared, and the errors for everything else."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.core.errors import InvalidRequest, InvalidSetting, InvalidSubscription, InvalidTopicName
from millstream.core.subscription import (
    ATTEMPTS,
    BACKOFF_MAX,
    BACKOFF_MIN,
    DEAD_LETTER_TOPIC,
    EXPIRES,
    FILTER,
    HEARTBEAT,
    LEASE,
    ORDERED,
    SESSION,
    START,
    SubscriptionSettings,
    check_subscription,
    dead_letter_topic_for,
    settings_of_new,
)
from millstream.core.topic import check_topic_name

HOUR_MS = 3600 * 1000


def test_settings_round_trip_as_text() -> None:
    values = {LEASE: "60000", ATTEMPTS: "3", ORDERED: "true", START: "earliest", FILTER: "payload.total > 1000"}
    settings = check_subscription("billing", ["orders"], values)
    assert (settings.lease_ms, settings.attempts, settings.ordered) == (60_000, 3, True)
    assert values.items() <= settings.as_strings().items()
    assert SubscriptionSettings.from_strings(settings.as_strings()) == settings
    assert set(settings.as_strings()) == set(SubscriptionSettings.declared())


def test_a_backoff_doubles_up_to_its_maximum_with_at_most_a_fifth_of_jitter() -> None:
    settings = SubscriptionSettings.from_strings({BACKOFF_MIN: "100", BACKOFF_MAX: "1000"})
    for attempt, longest in ((1, 100), (2, 200), (3, 400), (4, 800), (5, 1000), (200, 1000)):
        waits = {settings.backoff_ms(attempt, now_ms) for now_ms in range(1000)}
        assert 0.8 * longest <= min(waits) < max(waits) <= longest
        assert len(waits) > longest / 10
    assert SubscriptionSettings().backoff_ms(7, 1) == 0


def test_default_retries_span_more_than_an_hour_and_end_as_dead_letters() -> None:
    settings = SubscriptionSettings.from_strings(settings_of_new({}, "x-dlq"))
    shortest_ms = sum(
        min(settings.backoff_ms(attempt, now_ms) for now_ms in range(1000)) for attempt in range(1, settings.attempts)
    )
    assert shortest_ms > HOUR_MS
    assert (settings.dead_letter_topic, settings.has_dead_letters) == ("x-dlq", True)


def test_a_given_backoff_bound_is_kept_and_the_other_is_adjusted() -> None:
    values = {ATTEMPTS: "3", DEAD_LETTER_TOPIC: "none"}
    settings = SubscriptionSettings.from_strings(settings_of_new(values, "x-dlq"))
    assert (settings.attempts, settings.has_dead_letters) == (3, False)

    def bounds(given: dict[str, str]) -> tuple[int, int]:
        settings = SubscriptionSettings.from_strings(settings_of_new(given, "x-dlq"))
        return settings.backoff_min_ms, settings.backoff_max_ms

    assert bounds({}) == (1000, 300_000)
    assert bounds({BACKOFF_MIN: "900000"}) == (900_000, 900_000)
    assert bounds({BACKOFF_MAX: "10"}) == (10, 10)
    assert bounds({BACKOFF_MIN: "0"}) == (0, 300_000)


@pytest.mark.parametrize("name", ["billing", "two words", "größe/1", "x" * 249, "a.b_c-d"])
def test_a_dead_letter_topic_has_a_valid_unique_name(name: str) -> None:
    one, other = (dead_letter_topic_for(name, UUID(int=number << 96), lambda _: False) for number in (1, 2))
    check_topic_name(one)
    assert one == other if name in ("billing", "a.b_c-d") else one != other
    taken = dead_letter_topic_for(name, UUID(int=3 << 96), lambda topic: topic in (one, other))
    check_topic_name(taken)
    assert taken not in (one, other)


def test_a_start_is_a_position_or_a_time() -> None:
    def time_of(start: str) -> int | None:
        return SubscriptionSettings.from_strings({START: start}).start_time_ms(10 * HOUR_MS)

    assert time_of("earliest") is None
    assert time_of("latest") is None
    assert time_of("at:1234") == 1234
    assert time_of("by_duration:PT1H30M") == 8.5 * HOUR_MS
    assert time_of("by_duration:P7D") == 0


@pytest.mark.parametrize(
    ("name", "topics", "overrides", "error", "output"),
    [
        ("", ["a"], {}, InvalidSubscription, "must not be empty"),
        (" x", ["a"], {}, InvalidSubscription, "space"),
        ("a\nb", ["a"], {}, InvalidSubscription, "one line"),
        ("x" * 250, ["a"], {}, InvalidSubscription, "249"),
        ("x", ["a", "a"], {}, InvalidSubscription, "twice"),
        ("x", ["a b"], {}, InvalidTopicName, "a b"),
        ("x", ["a"], {DEAD_LETTER_TOPIC: "a"}, InvalidSubscription, "its own dead letters"),
        ("x", ["a"], {DEAD_LETTER_TOPIC: "a b"}, InvalidTopicName, "a b"),
        ("x", ["a"], {DEAD_LETTER_TOPIC: "__audit"}, InvalidSetting, "internal"),
        ("x", ["a"], {LEASE: "0"}, InvalidSetting, "at least"),
        ("x", ["a"], {"millstream.filtre": "a"}, InvalidSetting, "millstream.filter"),
        ("x", ["a"], {START: "yesterday"}, InvalidSetting, "earliest"),
        ("x", ["a"], {START: "by_duration:P"}, InvalidSetting, "not a duration"),
        ("x", ["a"], {START: "by_duration:P999999999DT999999999H"}, InvalidSetting, "too long"),
        ("x", ["a"], {START: "at:-1"}, InvalidSetting, "milliseconds"),
        ("x", ["a"], {BACKOFF_MIN: "5", BACKOFF_MAX: "4"}, InvalidSetting, "larger"),
        ("x", ["a"], {HEARTBEAT: "5000", SESSION: "5000"}, InvalidSetting, "below"),
        ("x", ["a"], {EXPIRES: "5" * 1000}, InvalidSetting, "64 bits"),
        ("x", ["a"], {FILTER: "x" * 8193}, InvalidSetting, "8192"),
    ],
)
def test_invalid_declarations_are_reported(
    name: str, topics: list[str], overrides: dict[str, str], error: type[InvalidRequest], output: str
) -> None:
    with pytest.raises(error, match=output):
        check_subscription(name, topics, overrides)
