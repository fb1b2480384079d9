"""The rate of a replay is bounded in any second, and its time range is checked."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from millstream.cli.replay import replay
from millstream.pipelines.jobs.replay import STEP_S, RateLimiter

RATE = 100.0
STEP = int(RATE * STEP_S)


@given(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 15.0]), min_size=20, max_size=40))
def test_no_second_has_many_more_messages_than_the_rate(stalls: list[float]) -> None:
    now = 0.0
    pace = RateLimiter(RATE, now)
    commits = []
    for stall in stalls:
        now += stall
        commits.append(now)
        now += pace.pause_s(STEP, now)
    for first in commits:
        within = sum(STEP for at in commits if first <= at < first + 1 - 1e-6)
        assert within <= RATE + 2 * STEP


def test_short_delays_do_not_lower_the_rate() -> None:
    now = 0.0
    pace = RateLimiter(RATE, now)
    for _ in range(40):
        now += 0.1
        now += pace.pause_s(STEP, now)
    assert now == pytest.approx(40 * STEP_S)


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        ("tomorrow", None, "--since must be a time such as 2026-01-31T12:00:00Z, not 'tomorrow'"),
        ("start", None, "--since must be a time such as"),
        (None, "17", "--until must be a time such as"),
        ("2026-02-01T00:00:00Z", "2026-01-01T00:00:00Z", "--since must be before --until"),
        ("2026-02-01T00:00:00Z", "2026-02-01T00:00:00Z", "--since must be before --until"),
    ],
)
def test_times_of_a_replay_that_select_nothing_are_refused(since: str | None, until: str | None, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        replay("copies", from_topic="orders", since=since, until=until)
