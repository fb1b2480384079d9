"""Delays double up to a maximum, restart after a success, and are cut short by an event."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from millstream.core.backoff import Backoff, delay_after


def test_delays_double_up_to_the_maximum_and_restart() -> None:
    backoff = Backoff(first_s=1.0, max_s=5.0)
    assert [backoff.take_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert (backoff.failures, backoff.next_s) == (5, 5.0)
    backoff.reset()
    assert (backoff.failures, backoff.take_s()) == (0, 1.0)


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(0.001, 100), st.integers())
def test_jitter_shortens_a_delay_by_at_most_half(failures: int, first_s: float, max_s: float, seed: int) -> None:
    longest = delay_after(failures, first_s=first_s, max_s=max_s)
    assert longest <= max_s
    assert longest / 2 <= delay_after(failures, first_s=first_s, max_s=max_s, random=Random(seed)) <= longest


async def test_an_event_ends_a_pause() -> None:
    stop = asyncio.Event()
    pausing = asyncio.create_task(Backoff(first_s=3600.0, max_s=3600.0).pause_unless(stop))
    await asyncio.sleep(0)
    stop.set()
    await pausing
