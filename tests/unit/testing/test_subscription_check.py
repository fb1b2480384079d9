"""The judge of a trial of subscriptions: a good history passes, and each broken promise is named."""

from __future__ import annotations

from collections import Counter

import pytest

from millstream.model.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE
from millstream.subscriptions.lease import Verb
from millstream.testing.subscription_history import (
    Delivery,
    History,
    Place,
    Promise,
    Published,
    Settlement,
    Truth,
    account,
    check,
)

LEASE_MS = 100
A, B = Place(0, 1), Place(0, 2)


def given(place: Place, worker: str, attempt: int, at_ms: int, checksum: int = 7) -> Delivery:
    return Delivery(place, worker, attempt, at_ms, at_ms + LEASE_MS, checksum)


def said(
    place: Place, worker: str, verb: Verb, sent_ms: int, *, attempt: int = 1, taken: bool = True, known: bool = True
) -> Settlement:
    return Settlement(place, worker, attempt, verb, sent_ms, sent_ms + 5 if known else None, taken)


def accepted(place: Place, worker: str, sent_ms: int, attempt: int = 1) -> Settlement:
    return said(place, worker, Verb.ACCEPT, sent_ms, attempt=attempt)


def judge(
    deliveries: list[Delivery],
    settlements: list[Settlement],
    *,
    delivery: str = EXACTLY_ONCE,
    ordered: bool = False,
    expected: dict[Place, Published] | None = None,
    letters: Counter[Place] | None = None,
    kills_ms: tuple[int, ...] = (),
) -> list[str]:
    promise = Promise(delivery=delivery, ordered=ordered, attempts=3, lease_ms=LEASE_MS)
    published = {A: Published(b"k", 0, 7), B: Published(b"k", 0, 7)} if expected is None else expected
    truth = Truth(published, letters or Counter(), kills_ms)
    history = History(deliveries, settlements)
    assert account([history], [truth])
    return [finding.split(":")[0] for finding in check(promise, history, truth)]


GOOD = (
    [given(A, "one", 1, 1000), given(A, "two", 2, 1050), given(B, "one", 1, 1070)],
    [said(A, "one", Verb.RELEASE, 1040), accepted(A, "two", 1060, 2), accepted(B, "one", 1080)],
)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_good_history_passes(ordered: bool) -> None:
    assert judge(*GOOD, ordered=ordered) == []


def test_dead_letters_are_an_end_too() -> None:
    assert judge([], [], letters=Counter([A, B])) == []
    assert judge([], [], letters=Counter([A, A, B])) == ["twice in the dead letter topic"]
    assert judge(*GOOD, letters=Counter([A])) == ["accepted and a dead letter"]


def test_what_nobody_accepted_is_lost() -> None:
    refused = said(A, "one", Verb.ACCEPT, 1010, taken=False)
    assert "lost" in judge([given(A, "one", 1, 1000)], [refused], expected={A: Published(b"k", 0, 7)})
    unknown = said(A, "one", Verb.ACCEPT, 1010, taken=False, known=False)
    assert judge([given(A, "one", 1, 1000)], [unknown], expected={A: Published(b"k", 0, 7)}) == []
    assert judge([], [], delivery=AT_MOST_ONCE) == []


def test_a_message_that_is_filtered_out_or_another_one_is_seen() -> None:
    assert judge(*GOOD, expected={A: Published(b"k", 0, 7)}) == ["not to be delivered"]
    assert judge(*GOOD, expected={A: Published(b"k", 0, 7), B: Published(b"k", 0, 8)}) == [
        "another message than in the topic"
    ]


def test_deliveries_are_counted() -> None:
    one = {A: Published(b"k", 0, 7)}
    often = [given(A, "one", attempt, 1000 + 200 * attempt) for attempt in range(1, 5)]
    assert judge(often, [accepted(A, "one", 1810, 4)], expected=one) == ["delivered too often"]
    twice = [given(A, "one", 1, 1000), given(A, "two", 1, 1200)]
    assert judge(twice, [], expected=one, delivery=AT_MOST_ONCE) == ["delivered too often", "attempts that do not grow"]
    done = [accepted(A, "two", 1210)]
    assert judge(twice, done, expected=one) == ["attempts that do not grow"]
    assert judge(twice, done, expected=one, delivery=AT_LEAST_ONCE) == ["attempts that do not grow"]
    assert judge(twice, done, expected=one, delivery=AT_LEAST_ONCE, kills_ms=(1100,)) == []


def test_a_live_lease_is_nobody_elses() -> None:
    one = {A: Published(b"k", 0, 7)}
    both = [given(A, "one", 1, 1000), given(A, "two", 2, 1099)]
    assert judge(both, [accepted(A, "two", 1100, 2)], expected=one) == ["with two workers at once"]
    released = [said(A, "one", Verb.RELEASE, 1098), accepted(A, "two", 1100, 2)]
    assert judge(both, released, expected=one) == []
    extended = [said(A, "one", Verb.EXTEND, 1050), accepted(A, "two", 1130, 2)]
    late = [given(A, "one", 1, 1000), given(A, "two", 2, 1120)]
    assert judge(late, extended, expected=one) == ["with two workers at once"]


def test_what_was_accepted_does_not_come_back_and_a_live_lease_is_honoured() -> None:
    one = {A: Published(b"k", 0, 7)}
    again = [given(A, "one", 1, 1000), given(A, "two", 2, 1200)]
    assert judge(again, [accepted(A, "one", 1010)], expected=one) == ["came back after it was accepted"]
    refused = [said(A, "one", Verb.ACCEPT, 1010, taken=False), accepted(A, "two", 1210, 2)]
    assert judge(again, refused, expected=one) == ["refused although the lease lasts"]


def test_the_order_of_a_key_is_kept() -> None:
    crossed = [given(A, "one", 1, 1000), given(B, "two", 1, 1150), given(A, "one", 2, 1200)]
    done = [accepted(A, "one", 1210, 2), accepted(B, "two", 1160)]
    assert judge(crossed, done, ordered=True) == ["out of order"]
    assert judge(crossed, done) == []
    other = {A: Published(b"k", 0, 7), B: Published(b"other", 0, 7)}
    assert judge(crossed, done, ordered=True, expected=other) == []
    delayed = {A: Published(b"k", 900, 7), B: Published(b"k", 0, 7)}
    assert judge(crossed, done, ordered=True, expected=delayed) == []


def test_nothing_comes_before_its_time() -> None:
    early = {A: Published(b"k", 1001, 7), B: Published(b"k", 1070, 7)}
    assert judge(*GOOD, expected=early) == ["delivered early"]
