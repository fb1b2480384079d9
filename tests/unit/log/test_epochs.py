from __future__ import annotations

from millstream.broker.log.epochs import EpochHistory


def test_the_end_offset_of_an_epoch() -> None:
    history = EpochHistory([(2, 10), (5, 30), (6, 70)])

    assert history.latest == 6
    assert history.end_of(6, 100) == (6, 100)
    assert history.end_of(2, 100) == (2, 30)
    assert history.end_of(3, 100) == (2, 30)
    assert history.end_of(5, 100) == (5, 70)
    assert history.end_of(0, 100) == (0, 10)
    assert history.end_of(7, 100) == (-1, -1)
    assert history.end_of(-1, 100) == (-1, -1)
    assert EpochHistory().end_of(0, 0) == (-1, -1)


def test_the_epoch_of_an_offset() -> None:
    history = EpochHistory([(2, 10), (5, 30)])

    assert [history.epoch_at(offset) for offset in (9, 10, 29, 30, 99)] == [-1, 2, 2, 5, 5]


def test_a_known_or_older_epoch_changes_nothing() -> None:
    history = EpochHistory([(2, 10)])
    history.begin(2, 20)
    history.begin(1, 30)

    assert history.entries() == [(2, 10)]


def test_an_epoch_without_records_is_replaced() -> None:
    history = EpochHistory([(2, 10)])
    history.begin(3, 10)

    assert history.entries() == [(3, 10)]


def test_both_ends_can_be_truncated() -> None:
    history = EpochHistory([(1, 0), (2, 10), (3, 20), (4, 30)])
    history.cut_after(30)
    assert history.entries() == [(1, 0), (2, 10), (3, 20)]
    assert history.latest == 3
    history.cut_before(15)
    assert history.entries() == [(2, 10), (3, 20)]
    history.cut_after(0)
    assert history.entries() == []
    assert history.latest == -1


def test_large_epoch_jumps_are_found() -> None:
    history = EpochHistory([(1000, 0), (1001, 4), (2001, 9), (2005, 12), (3004, 20), (4010, 30)])
    assert history.jumps(1000) == [0, 9, 30]
    assert EpochHistory().jumps(1000) == []
