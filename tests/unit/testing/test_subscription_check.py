"""The checker of subscription trials: a valid history passes, and each violation is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Verb
from millstream_testing.subscription_check import check
from millstream_testing.subscription_events import (
    Leased,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveSent,
    SettleCompleted,
    SettleSent,
    WorkerLeft,
)
from millstream_testing.subscription_history import (
    Call,
    Delivery,
    History,
    Place,
    Promise,
    Published,
    Settlement,
    Span,
    Spans,
    Truth,
    account,
    histories,
)

LEASE_MS = 100
A, B = Place(0, 1), Place(0, 2)


def receive_completed(place: Place, worker: str, attempt: int, at_ms: int, checksum: int = 7) -> Delivery:
    return Delivery(place, worker, attempt, at_ms, at_ms, at_ms + LEASE_MS, checksum)


def shared(place: Place, worker: str, attempt: int, from_ms: int, to_ms: int) -> Delivery:
    """A delivery as seen by Kafka's client."""
    return Delivery(place, worker, attempt, from_ms, to_ms, 0, 7)


def settle_completed(
    place: Place, worker: str, verb: Verb, sent_ms: int, *, attempt: int = 1, taken: bool = True, known: bool = True
) -> Settlement:
    return Settlement(place, worker, attempt, verb, sent_ms, sent_ms + 5 if known else None, taken)


def accepted(place: Place, worker: str, sent_ms: int, attempt: int = 1) -> Settlement:
    return settle_completed(place, worker, Verb.ACCEPT, sent_ms, attempt=attempt)


def judge(
    deliveries: list[Delivery],
    settlements: list[Settlement],
    *,
    delivery: str = EXACTLY_ONCE,
    ordered: bool = False,
    expected: dict[Place, Published] | None = None,
    letters: Counter[Place] | None = None,
    struck: tuple[Span, ...] = (),
    stepped: tuple[Span, ...] = (),
    calls: tuple[Call, ...] = (),
    last_ms: dict[str, int] | None = None,
    is_alone: bool = False,
) -> list[str]:
    promise = Promise(delivery=delivery, ordered=ordered, attempts=3, lease_ms=LEASE_MS)
    published = {A: Published(b"k", 0, 7), B: Published(b"k", 0, 7)} if expected is None else expected
    truth = Truth(published, letters or Counter(), Spans(struck), Spans(stepped), is_alone)
    history = History(deliveries, settlements, list(calls), last_ms or {})
    assert account([history], [truth])
    return [finding.split(":")[0] for finding in check(promise, history, truth)]


GOOD = (
    [receive_completed(A, "one", 1, 1000), receive_completed(A, "two", 2, 1050), receive_completed(B, "one", 1, 1070)],
    [settle_completed(A, "one", Verb.RELEASE, 1040), accepted(A, "two", 1060, 2), accepted(B, "one", 1080)],
)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_valid_history_passes(ordered: bool) -> None:
    assert judge(*GOOD, ordered=ordered) == []


def test_a_dead_letter_is_a_valid_outcome() -> None:
    assert judge([], [], letters=Counter([A, B])) == []
    assert judge([], [], letters=Counter([A, A, B])) == ["twice in the dead letter topic"]
    assert judge(*GOOD, letters=Counter([A])) == ["accepted and a dead letter"]


def test_a_message_that_was_never_accepted_is_lost() -> None:
    refused = settle_completed(A, "one", Verb.ACCEPT, 1010, taken=False)
    assert "lost" in judge([receive_completed(A, "one", 1, 1000)], [refused], expected={A: Published(b"k", 0, 7)})
    unknown = settle_completed(A, "one", Verb.ACCEPT, 1010, taken=False, known=False)
    assert judge([receive_completed(A, "one", 1, 1000)], [unknown], expected={A: Published(b"k", 0, 7)}) == []


def test_messages_lost_at_most_once_were_in_flight_at_a_fault() -> None:
    at_most = {A: Published(b"k", 0, 7, 1000), B: Published(b"k", 0, 7, 1000)}
    came = [receive_completed(B, "one", 1, 1100)]
    asked = Call("one", 1050, 1110, 1, 1, responded=True)
    receive_failed = Call("two", 1050, 1060, 20, 0, responded=False)
    last = Call("one", 9000, 9010, 1, 0, responded=True)
    gone = "gone although nothing was struck"

    def judged(*calls: Call, struck: tuple[Span, ...] = (), expected: dict[Place, Published] = at_most) -> list[str]:
        return judge(came, [], delivery=AT_MOST_ONCE, expected=expected, calls=calls, struck=struck)

    assert judged(asked, last) == [gone]
    assert judged(asked, last, struck=(Span(5000, 6000),)) == [gone]
    assert judged(asked, last, receive_failed) == []
    assert judged(asked._replace(wanted=2), last, struck=(Span(1090, 2000),)) == []
    # No more than was requested is lost.
    many = {**at_most, **{Place(1, offset): Published(b"k", 0, 7, 1000) for offset in range(25)}}
    assert judged(asked, last, receive_failed, expected=many) == [gone]
    # It was delivered before later messages, and the failed request came later.
    assert judged(asked, last, receive_failed._replace(asked_ms=1200, ended_ms=1210)) == [gone]


def test_dead_letters_are_neither_missing_nor_misplaced() -> None:
    rejected = settle_completed(A, "one", Verb.REJECT, 1010)
    name = "missing or out of place in the dead letter topic"
    assert name in judge([receive_completed(A, "one", 1, 1000)], [rejected], expected={A: Published(b"k", 0, 7)})
    assert judge(
        [],
        [],
        delivery=AT_MOST_ONCE,
        letters=Counter([A]),
        expected={A: Published(b"k", 0, 7)},
        calls=(Call("one", 0, None, 5, 0, responded=False),),
    ) == [name]


def test_delivered_filtered_or_foreign_messages_are_found() -> None:
    assert judge(*GOOD, expected={A: Published(b"k", 0, 7)}) == ["not to be delivered"]
    assert judge(*GOOD, expected={A: Published(b"k", 0, 7), B: Published(b"k", 0, 8)}) == [
        "another message than in the topic"
    ]


def test_deliveries_are_counted() -> None:
    one = {A: Published(b"k", 0, 7)}
    often = [receive_completed(A, "one", attempt, 1000 + 200 * attempt) for attempt in range(1, 5)]
    assert judge(often, [accepted(A, "one", 1810, 4)], expected=one) == ["delivered too often"]
    twice = [receive_completed(A, "one", 1, 1000), receive_completed(A, "two", 1, 1200)]
    assert judge(twice, [], expected=one, delivery=AT_MOST_ONCE) == ["delivered too often", "attempts that do not grow"]
    done = [accepted(A, "two", 1210)]
    assert judge(twice, done, expected=one) == ["attempts that do not grow"]
    assert judge(twice, done, expected=one, delivery=AT_LEAST_ONCE) == ["attempts that do not grow"]
    assert judge(twice, done, expected=one, delivery=AT_LEAST_ONCE, struck=(Span(1100, 1150),)) == []
    assert judge(twice, done, expected=one, struck=(Span(1100, 1150),)) == ["attempts that do not grow"]


def test_a_lease_before_a_durable_write_is_not_forgotten() -> None:
    twice = [
        receive_completed(A, "one", 1, 1000),
        receive_completed(B, "one", 1, 1000),
        receive_completed(A, "two", 1, 1200),
    ]
    done = [accepted(B, "one", 1010), accepted(A, "two", 1210)]
    struck = (Span(1100, 1150),)
    assert judge(twice, done, delivery=AT_LEAST_ONCE, struck=struck) == ["attempts that do not grow"]
    elsewhere = Place(1, 2)
    expected = {A: Published(b"k", 0, 7), elsewhere: Published(b"k", 0, 7)}
    other = [twice[0], receive_completed(elsewhere, "one", 1, 1000), twice[2]]
    apart = [accepted(elsewhere, "one", 1010), done[1]]
    assert judge(other, apart, delivery=AT_LEAST_ONCE, struck=struck, expected=expected) == []
    # The node that granted the lease was gone before that was durable.
    assert judge(twice, done, delivery=AT_LEAST_ONCE, struck=(Span(1000, 1008),)) == []


def test_a_leased_message_is_not_delivered_to_another_worker() -> None:
    one = {A: Published(b"k", 0, 7)}
    both = [receive_completed(A, "one", 1, 1000), receive_completed(A, "two", 2, 1099)]
    assert judge(both, [accepted(A, "two", 1100, 2)], expected=one) == ["with two workers at once"]
    released = [settle_completed(A, "one", Verb.RELEASE, 1098), accepted(A, "two", 1100, 2)]
    assert judge(both, released, expected=one) == []
    extended = [settle_completed(A, "one", Verb.EXTEND, 1050), accepted(A, "two", 1130, 2)]
    late = [receive_completed(A, "one", 1, 1000), receive_completed(A, "two", 2, 1120)]
    assert judge(late, extended, expected=one) == ["with two workers at once"]
    assert judge(late, extended, expected=one, stepped=(Span(1110, 1115),)) == []


def test_a_message_held_by_a_live_share_consumer_is_not_delivered_to_another() -> None:
    one = {A: Published(b"k", 0, 7)}
    both = [shared(A, "share", 1, 990, 1000), receive_completed(A, "two", 2, 1080)]
    done = [accepted(A, "two", 1085, 2)]
    assert judge(both, done, expected=one, last_ms={"share": 2000}) == ["with two workers at once"]
    assert judge(both, done, expected=one, last_ms={"share": 1070}) == []
    assert judge(both, done, expected=one, last_ms={"share": 2000}, struck=(Span(1050, 1060),)) == []
    # The time of the lease is not known precisely enough.
    vague = [shared(A, "share", 1, 900, 1000), receive_completed(A, "two", 2, 1080)]
    assert judge(vague, done, expected=one, last_ms={"share": 2000}) == []


def test_a_lease_lasts_as_long_as_declared() -> None:
    one = {A: Published(b"k", 0, 7)}
    short = [Delivery(A, "one", 1, 1000, 1001, 1050, 7)]
    assert judge(short, [accepted(A, "one", 1010)], expected=one) == ["a lease of another length"]
    assert judge(short, [accepted(A, "one", 1010)], expected=one, stepped=(Span(900, 1000),)) == []


def test_accepted_messages_are_not_redelivered_and_live_leases_are_honoured() -> None:
    one = {A: Published(b"k", 0, 7)}
    again = [receive_completed(A, "one", 1, 1000), receive_completed(A, "two", 2, 1200)]
    assert judge(again, [accepted(A, "one", 1010)], expected=one) == ["came back after it was accepted"]
    # The attempt number shows it where the time does not.
    late = [receive_completed(A, "one", 1, 1000), shared(A, "two", 2, 900, 1200)]
    assert judge(late, [accepted(A, "one", 1010)], expected=one) == ["came back after it was accepted"]
    assert judge(late, [accepted(A, "one", 1010)], expected=one, delivery=AT_LEAST_ONCE) == []
    # A deposed leader may deliver a message once more, but not if its delivery became durable.
    struck = (Span(1190, 1300),)
    done = [accepted(A, "one", 1010)]
    add_returned = ["came back after it was accepted"]
    assert judge(again, done, expected=one, struck=struck, delivery=AT_LEAST_ONCE) == []
    assert judge(again, done, expected=one, struck=struck, delivery=AT_LEAST_ONCE, is_alone=True) == add_returned
    assert judge(again, done, expected=one, struck=struck) == add_returned
    same = [one._replace(node=3) for one in again]
    reported = [one._replace(node=3) for one in done]
    assert judge(same, reported, expected=one, struck=struck, delivery=AT_LEAST_ONCE) == add_returned
    assert judge(same, [done[0]._replace(node=2)], expected=one, struck=struck, delivery=AT_LEAST_ONCE) == []
    # A worker that received it twice has settled it by either lease.
    twice = [receive_completed(A, "one", 1, 1000), receive_completed(A, "one", 2, 1200)]
    by_first = [accepted(A, "one", 1210, 1), settle_completed(A, "one", Verb.ACCEPT, 1220, attempt=2, taken=False)]
    assert judge(twice, by_first, expected=one) == []
    refused = [settle_completed(A, "one", Verb.ACCEPT, 1010, taken=False), accepted(A, "two", 1210, 2)]
    assert judge(again, refused, expected=one) == ["refused although the lease lasts"]


def test_the_order_of_a_key_is_kept() -> None:
    crossed = [
        receive_completed(A, "one", 1, 1000),
        receive_completed(B, "two", 1, 1150),
        receive_completed(A, "one", 2, 1200),
    ]
    done = [accepted(A, "one", 1210, 2), accepted(B, "two", 1160)]
    assert judge(crossed, done, ordered=True) == ["out of order"]
    assert judge(crossed, done) == []
    other = {A: Published(b"k", 0, 7), B: Published(b"other", 0, 7)}
    assert judge(crossed, done, ordered=True, expected=other) == []
    delayed = {A: Published(b"k", 900, 7), B: Published(b"k", 0, 7)}
    assert judge(crossed, done, ordered=True, expected=delayed) == []


def test_nothing_is_delivered_before_its_time() -> None:
    early = {A: Published(b"k", 1001, 7), B: Published(b"k", 1070, 7)}
    assert judge(*GOOD, expected=early) == ["delivered early"]
    assert judge(*GOOD, expected=early, stepped=(Span(990, 995),)) == []
    later = [*GOOD[1], settle_completed(A, "three", Verb.RELEASE, 1300)._replace(delay_ms=11)]
    assert judge(GOOD[0], later) == []
    waits = [settle_completed(A, "one", Verb.RELEASE, 1040)._replace(delay_ms=11), *GOOD[1][1:]]
    assert judge(GOOD[0], waits) == ["delivered early"]


def test_the_journals_of_workers_are_merged() -> None:
    def about(worker: str, at_ms: int) -> dict[str, Any]:
        return {"worker": worker, "subscription": "s", "at_ms": at_ms}

    reported = histories(
        [
            ReceiveSent(**about("one", 10), call=1, wanted=3),
            ReceiveCompleted(
                **about("one", 12), call=1, from_ms=10, messages=[Leased(0, 1, 1, 112, 7), Leased(0, 2, 1, 112, 7)]
            ),
            SettleSent(**about("one", 13), number=1, verb=int(Verb.ACCEPT), places=[(0, 1, 1), (0, 2, 1)]),
            SettleCompleted(**about("one", 15), number=1, places=[(0, 1)], taken=True),
            ReceiveSent(**about("one", 16), call=2, wanted=3),
            ReceiveFailed(**about("one", 17), call=2),
            ReceiveSent(**about("two", 18), call=1, wanted=1),
            WorkerLeft(**about("two", 19)),
            ReceiveSent(**about("three", 20), call=1, wanted=1),
        ]
    )["s"]
    assert reported.deliveries == [Delivery(A, "one", 1, 10, 12, 112, 7), Delivery(B, "one", 1, 10, 12, 112, 7)]
    assert [(one.place, one.is_sure, one.is_possible) for one in reported.settlements] == [
        (A, True, True),
        (B, False, True),
    ]
    assert reported.calls == [
        Call("one", 10, 12, 3, 2, responded=True),
        Call("one", 16, 17, 3, 0, responded=False),
        Call("two", 18, 19, 1, 0, responded=False),
        Call("three", 20, None, 1, 0, responded=False),
    ]
    assert reported.last_ms == {"one": 17, "two": 19, "three": 20}


def test_durations() -> None:
    spans = Spans([Span(50, 60), Span(10, 20), Span(15, 30)])
    assert list(spans) == [Span(10, 30), Span(50, 60)]
    assert [spans.touch(*span) for span in [(0, 9), (0, 10), (30, 31), (31, 49), (60, 70), (61, 70)]] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
