from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.coordination.state_machine import StateRecord, Timers
from millstream_testing.clock import ManualClock


class Fired:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> Sequence[StateRecord]:
        self.names.append(name)
        return []


def fire(timers: Timers, limit: int = 1000) -> None:
    for timer in timers.take_due(limit):
        timer.action()


def test_timers_fire_in_order_once() -> None:
    clock, fired = ManualClock(), Fired()
    timers = Timers(clock)
    timers.schedule("b", 200, lambda: fired.note("b"))
    timers.schedule("a", 100, lambda: fired.note("a"))

    clock.advance_ms(99)
    fire(timers)
    assert fired.names == []
    clock.advance_ms(200)
    fire(timers)
    fire(timers)

    assert fired.names == ["a", "b"]
    assert len(timers) == 0
    assert timers.next_deadline is None


def test_a_postponed_timer_does_not_fire_early() -> None:
    clock, fired = ManualClock(), Fired()
    timers = Timers(clock)
    for _ in range(10):
        timers.schedule("session", 100, lambda: fired.note("session"))
        clock.advance_ms(60)
        fire(timers)
    assert fired.names == []

    clock.advance_ms(100)
    fire(timers)

    assert fired.names == ["session"]


def test_a_timer_can_be_moved_forward() -> None:
    clock, fired = ManualClock(), Fired()
    timers = Timers(clock)
    timers.schedule("x", 1000, lambda: fired.note("late"))
    timers.schedule("x", 10, lambda: fired.note("early"))

    clock.advance_ms(2000)
    fire(timers)

    assert fired.names == ["early"]


def test_at_most_the_limit_of_timers_fires_at_once() -> None:
    clock, fired = ManualClock(), Fired()
    timers = Timers(clock)
    for number in range(5):
        timers.schedule(number, 1, lambda number=number: fired.note(str(number)))  # type: ignore[misc]
    clock.advance_ms(1)

    fire(timers, limit=2)

    assert fired.names == ["0", "1"]
    assert len(timers) == 3


def test_cancelled_timers_do_not_accumulate_in_the_heap() -> None:
    timers = Timers(ManualClock())
    for number in range(10_000):
        timers.schedule(number, 1000, list)
        timers.cancel(number)

    assert len(timers) == 0
    assert len(timers._heap) < 200


# Eighths of a second add up without rounding, so that the model and the clock agree on due timers.
amounts_ms = st.integers(0, 50).map(lambda eighths: eighths * 125)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["schedule", "cancel", "pass"]), amounts_ms),
        max_size=60,
    )
)
def test_timers_behave_like_a_dictionary_of_deadlines(steps: list[tuple[str, str, int]]) -> None:
    clock, fired = ManualClock(), Fired()
    timers = Timers(clock)
    model: dict[str, int] = {}
    now = 0
    for name, step, amount in steps:
        if step == "schedule":
            timers.schedule(name, amount, lambda name=name: fired.note(name))  # type: ignore[misc]
            model[name] = now + amount
        elif step == "cancel":
            timers.cancel(name)
            model.pop(name, None)
        else:
            clock.advance_ms(amount)
            now += amount
            due = {known for known, deadline in model.items() if deadline <= now}
            fired.names.clear()
            fire(timers)
            assert set(fired.names) == due
            for known in due:
                del model[known]
        assert {known for known in "abc" if known in timers} == set(model)
