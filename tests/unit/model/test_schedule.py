"""Job schedules: intervals, cron expressions, and missed times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidSetting
from millstream.core.job import Cron, Schedule
from millstream.core.setting import parse_duration_ms

MINUTE_MS = 60_000
START = datetime(2026, 11, 16, tzinfo=UTC)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def times(cron: str, after: str, number: int, zone: str = "UTC") -> list[str]:
    found_times, parsed, at = [], Cron.parse(cron, zone), ms(after)
    for _ in range(number):
        following = parsed.next_ms(at)
        assert following is not None
        at = following
        found_times.append(datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M"))
    return found_times


@pytest.mark.parametrize(("text", "expected"), [("90", 90_000), ("1.5s", 1500), ("15m", 900_000), ("1h", 3_600_000)])
def test_durations(text: str, expected: int) -> None:
    assert parse_duration_ms(text, name="--every") == expected


@pytest.mark.parametrize("text", ["", "1y", "-1s", "1h30m", "soon"])
def test_invalid_durations_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(InvalidSetting, match="--every must be a duration"):
        parse_duration_ms(text, name="--every")


def test_times_of_cron_expressions() -> None:
    assert times("0 3 * * *", "2026-11-16T03:00Z", 2) == ["2026-11-17 03:00", "2026-11-18 03:00"]
    assert times("*/20 1-2 * * *", "2026-11-16T01:20Z", 4) == [
        "2026-11-16 01:40",
        "2026-11-16 02:00",
        "2026-11-16 02:20",
        "2026-11-16 02:40",
    ]
    assert times("0 0 29 feb *", "2026-11-16T00:00Z", 1) == ["2028-02-29 00:00"]
    # As in cron, a day matches if either restricted field does; 7 is Sunday too.
    assert times("0 0 20 * 7", "2026-11-16T00:00Z", 2) == ["2026-11-20 00:00", "2026-11-22 00:00"]
    assert times("@weekly", "2026-11-16T00:00Z", 1) == ["2026-11-22 00:00"]


def test_cron_follows_the_clock_of_its_time_zone() -> None:
    assert times("0 3 * * *", "2026-10-24T00:00Z", 2, "Europe/Berlin") == ["2026-10-24 01:00", "2026-10-25 02:00"]
    # Daylight saving time skips 02:30: the job runs when the clock has advanced.
    assert times("30 2 * * *", "2026-03-28T12:00Z", 2, "Europe/Berlin") == ["2026-03-29 01:30", "2026-03-30 00:30"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0 3 * *", "five fields"),
        ("60 * * * *", "the minute of a cron expression must be between 0 and 59, not '60'"),
        ("0 5-3 * * *", "ends before it begins"),
        ("0 0 30 2 *", "does not exist"),
        ("0 0 * foo *", "the month"),
        ("*/0 * * * *", "the minute"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_field(text: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        Cron.parse(text)


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="timezone 'Mars/Base'"):
        Cron.parse("0 3 * * *", "Mars/Base")


FIELDS = st.sampled_from(["*", "*/7", "3", "1,5", "2-4", "10-20/5"])


@given(minute=FIELDS, hour=FIELDS, offset=st.integers(0, 400 * 24 * 60))
def test_the_next_time_is_the_first_match(minute: str, hour: str, offset: int) -> None:
    cron = Cron.parse(f"{minute} {hour} * * *")
    after = START + timedelta(minutes=offset)
    at = after
    while True:
        at += timedelta(minutes=1)
        if at.minute in cron.minutes and at.hour in cron.hours:
            break
    assert cron.next_ms(round(after.timestamp() * 1000)) == round(at.timestamp() * 1000)


def test_an_interval_starts_at_once_and_counts_from_the_due_time() -> None:
    hourly = Schedule(every_ms=60 * MINUTE_MS)
    assert hourly.due_ms(None, created_ms=100, now_ms=200) == 100
    assert hourly.due_ms(100, created_ms=100, now_ms=200) == 100 + 60 * MINUTE_MS
    assert Schedule().due_ms(None, created_ms=100, now_ms=200) is None


@pytest.mark.parametrize(("missed", "expected"), [("once", 50), ("skip", 60), ("all", 10)])
@pytest.mark.parametrize("is_cron", [True, False])
def test_missed_times(missed: str, expected: int, is_cron: bool) -> None:
    every_ms = 0 if is_cron else 10 * MINUTE_MS
    schedule = Schedule(every_ms=every_ms, cron=Cron.parse("*/10 * * * *") if is_cron else None, missed=missed)
    start = ms("2026-11-16T00:00Z")
    due = schedule.due_ms(start, created_ms=0, now_ms=start + 55 * MINUTE_MS)
    assert due == start + expected * MINUTE_MS


def test_a_time_that_is_just_due_is_not_missed() -> None:
    start = ms("2026-11-16T00:00Z")
    schedule = Schedule(every_ms=10 * MINUTE_MS, missed="skip")
    assert schedule.due_ms(start, created_ms=0, now_ms=start + 10 * MINUTE_MS + 1) == start + 10 * MINUTE_MS


def test_years_of_missed_times_are_skipped_quickly() -> None:
    schedule = Schedule(cron=Cron.parse("* * * * *"))
    start = ms("2006-01-01T00:00Z")
    assert schedule.due_ms(start, created_ms=0, now_ms=ms("2026-11-16T00:00:30Z")) == ms("2026-11-16T00:00Z")
