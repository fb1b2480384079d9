from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log.segment import Index

Entries = list[tuple[int, int, int]]
"""Relative offset, position, and the largest timestamp before it."""


@st.composite
def entries(draw: st.DrawFn) -> Entries:
    offset, position, time, found_entries = 0, 0, -1, []
    for offset_step, size, later in draw(
        st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 5)), max_size=20)
    ):
        offset, position, time = offset + offset_step, position + size, time + later
        found_entries.append((offset, position, time))
    return found_entries


def build(given_entries: Entries) -> Index:
    index = Index()
    for entry in given_entries:
        index.add(*entry)
    return index


@given(entries(), st.integers(0, 1100))
def test_a_look_up_equals_a_linear_scan(known: Entries, target: int) -> None:
    index = build(known)

    before = [(offset, position) for offset, position, _ in known if offset <= target]
    assert index.position_of(target) == (before[-1][1] if before else 0)
    upto = [(offset, position) for offset, position, _ in known if position <= target]
    assert index.start_before(target) == (upto[-1] if upto else (0, 0))
    times = [(position, time) for _, position, time in known if position <= target]
    assert index.max_timestamp_before(target) == (times[-1] if times else (0, -1))
    earlier = [position for _, position, time in known if time < target]
    assert index.position_for_time(target) == (earlier[-1] if earlier else 0)


@given(entries(), st.integers(0, 1100))
def test_truncation_keeps_earlier_entries(known: Entries, position: int) -> None:
    index = build(known)
    index.cut(position)

    kept_entries = [entry for entry in known if entry[1] < position]
    assert list(index.places) == list(build(kept_entries).places)
    assert list(index.times) == list(build(kept_entries).times)
    assert index.last_position == (kept_entries[-1][1] if kept_entries else 0)


@given(entries(), st.integers(0, 20))
def test_it_survives_storing_and_its_checksum_is_incremental(known: Entries, pause: int) -> None:
    index = Index()
    for number, entry in enumerate(known):
        if number == pause:
            index.checksum()
        index.add(*entry)
    again = Index.from_bytes(*index.to_bytes())

    assert again.places == index.places
    assert again.times == index.times
    assert again.last_position == index.last_position
    assert again.checksum() == index.checksum()
