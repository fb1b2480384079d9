"""Faults in the target of a pipeline are found, and a correct target gives no finding."""

from __future__ import annotations

from millstream_testing.committed_messages import Committed
from millstream_testing.moved_messages import FAULTS_MAX, Place, faults_of

WANTED = [Place(partition, offset) for partition in range(2) for offset in range(4)]


def moved(place: Place, key: bytes | None = b"a", into: int = 0) -> tuple[Place, Committed]:
    return place, Committed(into, 0, key, b"", (), 0)


def test_partitions_and_keys_may_come_in_any_order() -> None:
    by_turns = [Place(partition, offset) for offset in range(4) for partition in (1, 0)]
    assert faults_of(map(moved, WANTED), WANTED) == []
    assert faults_of(map(moved, by_turns), WANTED) == []
    keys = [moved(place, b"%d" % (place.offset % 2), place.offset % 2) for place in by_turns]
    assert faults_of([*keys[4:6], *keys[:4], *keys[6:]], WANTED) != []
    assert faults_of(sorted(keys, key=lambda entry: entry[1].partition), WANTED) == []
    # Messages without a key have no order.
    assert faults_of([moved(place, None) for place in reversed(WANTED)], WANTED) == []


def test_missing_duplicate_foreign_and_reordered_messages_are_reported() -> None:
    assert faults_of(map(moved, WANTED[1:]), WANTED) == ["Place(partition=0, offset=0) is missing"]
    assert faults_of(map(moved, WANTED), WANTED[:-1]) == ["Place(partition=1, offset=3) does not belong there"]
    duplicated = faults_of(map(moved, [*WANTED, WANTED[-1]]), WANTED)
    assert duplicated[0] == "Place(partition=1, offset=3) is there 2 times"
    swapped = [WANTED[1], WANTED[0], *WANTED[2:]]
    assert faults_of(map(moved, swapped), WANTED) == [
        "Place(partition=0, offset=0) with the key b'a' stands behind Place(partition=0, offset=1)"
    ]
    torn = [moved(place, into=place.offset % 2) for place in WANTED]
    assert faults_of(torn, WANTED) == ["the key b'a' is in partitions [0, 1]"]


def test_the_report_of_an_empty_target_is_bounded() -> None:
    assert len(faults_of([], [Place(0, offset) for offset in range(1000)])) == FAULTS_MAX
