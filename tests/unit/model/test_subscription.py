"""Subscriptions: what can be declared, and what is said about the rest."""

from __future__ import annotations

import pytest

from millstream.model.errors import InvalidRequest, InvalidSetting, InvalidSubscription, InvalidTopicName
from millstream.model.subscription import (
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
)

HOUR_MS = 3600 * 1000


def test_settings_come_from_texts_and_go_back_to_them() -> None:
    given = {LEASE: "60000", ATTEMPTS: "3", ORDERED: "true", START: "earliest", FILTER: "payload.total > 1000"}
    settings = check_subscription("billing", ["orders"], given)
    assert (settings.lease_ms, settings.attempts, settings.ordered) == (60_000, 3, True)
    assert given.items() <= settings.as_strings().items()
    assert SubscriptionSettings.from_strings(settings.as_strings()) == settings
    assert set(settings.as_strings()) == set(SubscriptionSettings.declared())


def test_a_backoff_doubles_up_to_its_end() -> None:
    settings = SubscriptionSettings.from_strings({BACKOFF_MIN: "100", BACKOFF_MAX: "1000"})
    assert [settings.backoff_ms(attempt) for attempt in (1, 2, 3, 4, 5, 200)] == [100, 200, 400, 800, 1000, 1000]
    assert SubscriptionSettings().backoff_ms(7) == 0


def test_a_start_names_a_place_or_a_time() -> None:
    def time_of(start: str) -> int | None:
        return SubscriptionSettings.from_strings({START: start}).start_time_ms(10 * HOUR_MS)

    assert time_of("earliest") is None
    assert time_of("latest") is None
    assert time_of("at:1234") == 1234
    assert time_of("by_duration:PT1H30M") == 8.5 * HOUR_MS
    assert time_of("by_duration:P7D") == 0


@pytest.mark.parametrize(
    ("name", "topics", "overrides", "error", "said"),
    [
        ("", ["a"], {}, InvalidSubscription, "needs a name"),
        (" x", ["a"], {}, InvalidSubscription, "space"),
        ("a\nb", ["a"], {}, InvalidSubscription, "one line"),
        ("x" * 250, ["a"], {}, InvalidSubscription, "249"),
        ("x", ["a", "a"], {}, InvalidSubscription, "twice"),
        ("x", ["a b"], {}, InvalidTopicName, "a b"),
        ("x", ["a"], {DEAD_LETTER_TOPIC: "a"}, InvalidSubscription, "its own dead letters"),
        ("x", ["a"], {DEAD_LETTER_TOPIC: "a b"}, InvalidTopicName, "a b"),
        ("x", ["a"], {LEASE: "0"}, InvalidSetting, "at least"),
        ("x", ["a"], {"millstream.filtre": "a"}, InvalidSetting, "millstream.filter"),
        ("x", ["a"], {START: "yesterday"}, InvalidSetting, "earliest"),
        ("x", ["a"], {START: "by_duration:P"}, InvalidSetting, "no duration"),
        ("x", ["a"], {START: "by_duration:P999999999DT999999999H"}, InvalidSetting, "too long"),
        ("x", ["a"], {START: "at:-1"}, InvalidSetting, "milliseconds"),
        ("x", ["a"], {BACKOFF_MIN: "5", BACKOFF_MAX: "4"}, InvalidSetting, "larger"),
        ("x", ["a"], {HEARTBEAT: "5000", SESSION: "5000"}, InvalidSetting, "below"),
        ("x", ["a"], {EXPIRES: "5" * 1000}, InvalidSetting, "64 bits"),
        ("x", ["a"], {FILTER: "x" * 8193}, InvalidSetting, "8192"),
    ],
)
def test_what_cannot_be_declared_is_told(
    name: str, topics: list[str], overrides: dict[str, str], error: type[InvalidRequest], said: str
) -> None:
    with pytest.raises(error, match=said):
        check_subscription(name, topics, overrides)
