"""The checker of subscription trials: a valid history passes, and each violation is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Verb
from millstream_testing.subscription_check import check
from millstream_testing.subscription_history import (
    Call,
    Delivery,
    GroundTruth,
    Guarantees,
    History,
    Leased,
    Position,
    Published,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveSent,
    SettleCompleted,
    Settlement,
    SettleSent,
    Span,
    Spans,
    WorkerLeft,
    histories,
    summary,
)

LEASE_MS = 100
A, B = Position(0, 1), Position(0, 2)


def delivered(position: Position, worker: str, attempt: int, at_ms: int, checksum: int = 7) -> Delivery:
    return Delivery(position, worker, attempt, at_ms, at_ms, at_ms + LEASE_MS, checksum)


def shared(position: Position, worker: str, attempt: int, from_ms: int, to_ms: int) -> Delivery:
    """A delivery as seen by Kafka's client."""
    return Delivery(position, worker, attempt, from_ms, to_ms, 0, 7)


def settled(
    position: Position,
    worker: str,
    verb: Verb,
    sent_ms: int,
    *,
    attempt: int = 1,
    taken: bool = True,
    known: bool = True,
) -> Settlement:
    return Settlement(position, worker, attempt, verb, sent_ms, sent_ms + 5 if known else None, taken)


def accepted(position: Position, worker: str, sent_ms: int, attempt: int = 1) -> Settlement:
    return settled(position, worker, Verb.ACCEPT, sent_ms, attempt=attempt)


def check_history(
    deliveries: list[Delivery],
    settlements: list[Settlement],
    *,
    delivery: str = EXACTLY_ONCE,
    ordered: bool = False,
    expected: dict[Position, Published] | None = None,
    dead_letters: Counter[Position] | None = None,
    faults: tuple[Span, ...] = (),
    stepped: tuple[Span, ...] = (),
    calls: tuple[Call, ...] = (),
    last_ms: dict[str, int] | None = None,
    is_single_node: bool = False,
) -> list[str]:
    guarantees = Guarantees(delivery=delivery, ordered=ordered, attempts=3, lease_ms=LEASE_MS)
    published = {A: Published(b"k", 0, 7), B: Published(b"k", 0, 7)} if expected is None else expected
    truth = GroundTruth(published, dead_letters or Counter(), Spans(faults), Spans(stepped), is_single_node)
    history = History(deliveries, settlements, list(calls), last_ms or {})
    assert summary([history], [truth])
    return [finding.split(":")[0] for finding in check(guarantees, history, truth)]


GOOD = (
    [delivered(A, "one", 1, 1000), delivered(A, "two", 2, 1050), delivered(B, "one", 1, 1070)],
    [settled(A, "one", Verb.RELEASE, 1040), accepted(A, "two", 1060, 2), accepted(B, "one", 1080)],
)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_valid_history_passes(ordered: bool) -> None:
    assert check_history(*GOOD, ordered=ordered) == []


def test_a_dead_letter_is_a_valid_outcome() -> None:
    assert check_history([], [], dead_letters=Counter([A, B])) == []
    assert check_history([], [], dead_letters=Counter([A, A, B])) == ["duplicated in the dead letter topic"]
    assert check_history(*GOOD, dead_letters=Counter([A])) == ["accepted and dead-lettered"]


def test_a_message_that_was_never_accepted_is_lost() -> None:
    refused = settled(A, "one", Verb.ACCEPT, 1010, taken=False)
    assert "lost" in check_history([delivered(A, "one", 1, 1000)], [refused], expected={A: Published(b"k", 0, 7)})
    unknown = settled(A, "one", Verb.ACCEPT, 1010, taken=False, known=False)
    assert check_history([delivered(A, "one", 1, 1000)], [unknown], expected={A: Published(b"k", 0, 7)}) == []


def test_messages_lost_at_most_once_were_in_flight_at_a_fault() -> None:
    at_most = {A: Published(b"k", 0, 7, 1000), B: Published(b"k", 0, 7, 1000)}
    arrived = [delivered(B, "one", 1, 1100)]
    answered = Call("one", 1050, 1110, 1, 1, responded=True)
    failed = Call("two", 1050, 1060, 20, 0, responded=False)
    last = Call("one", 9000, 9010, 1, 0, responded=True)
    lost = "lost without a fault"

    def check_calls(
        *calls: Call, faults: tuple[Span, ...] = (), expected: dict[Position, Published] = at_most
    ) -> list[str]:
        return check_history(arrived, [], delivery=AT_MOST_ONCE, expected=expected, calls=calls, faults=faults)

    assert check_calls(answered, last) == [lost]
    assert check_calls(answered, last, faults=(Span(5000, 6000),)) == [lost]
    assert check_calls(answered, last, failed) == []
    assert check_calls(answered._replace(messages_max=2), last, faults=(Span(1090, 2000),)) == []
    # No more than was requested is lost.
    many = {**at_most, **{Position(1, offset): Published(b"k", 0, 7, 1000) for offset in range(25)}}
    assert check_calls(answered, last, failed, expected=many) == [lost]
    # It was delivered before later messages, and the failed request arrived later.
    assert check_calls(answered, last, failed._replace(requested_ms=1200, ended_ms=1210)) == [lost]


def test_dead_letters_are_neither_missing_nor_misplaced() -> None:
    rejected = settled(A, "one", Verb.REJECT, 1010)
    name = "missing or misplaced in the dead letter topic"
    assert name in check_history([delivered(A, "one", 1, 1000)], [rejected], expected={A: Published(b"k", 0, 7)})
    assert check_history(
        [],
        [],
        delivery=AT_MOST_ONCE,
        dead_letters=Counter([A]),
        expected={A: Published(b"k", 0, 7)},
        calls=(Call("one", 0, None, 5, 0, responded=False),),
    ) == [name]


def test_delivered_filtered_or_foreign_messages_are_found() -> None:
    assert check_history(*GOOD, expected={A: Published(b"k", 0, 7)}) == ["delivered unexpectedly"]
    assert check_history(*GOOD, expected={A: Published(b"k", 0, 7), B: Published(b"k", 0, 8)}) == [
        "content differs from the topic"
    ]


def test_deliveries_are_counted() -> None:
    one = {A: Published(b"k", 0, 7)}
    often = [delivered(A, "one", attempt, 1000 + 200 * attempt) for attempt in range(1, 5)]
    assert check_history(often, [accepted(A, "one", 1810, 4)], expected=one) == ["delivered too often"]
    twice = [delivered(A, "one", 1, 1000), delivered(A, "two", 1, 1200)]
    assert check_history(twice, [], expected=one, delivery=AT_MOST_ONCE) == [
        "delivered too often",
        "attempts that do not increase",
    ]
    done = [accepted(A, "two", 1210)]
    assert check_history(twice, done, expected=one) == ["attempts that do not increase"]
    assert check_history(twice, done, expected=one, delivery=AT_LEAST_ONCE) == ["attempts that do not increase"]
    assert check_history(twice, done, expected=one, delivery=AT_LEAST_ONCE, faults=(Span(1100, 1150),)) == []
    assert check_history(twice, done, expected=one, faults=(Span(1100, 1150),)) == ["attempts that do not increase"]


def test_a_lease_before_a_durable_write_is_not_forgotten() -> None:
    twice = [
        delivered(A, "one", 1, 1000),
        delivered(B, "one", 1, 1000),
        delivered(A, "two", 1, 1200),
    ]
    done = [accepted(B, "one", 1010), accepted(A, "two", 1210)]
    faults = (Span(1100, 1150),)
    assert check_history(twice, done, delivery=AT_LEAST_ONCE, faults=faults) == ["attempts that do not increase"]
    elsewhere = Position(1, 2)
    expected = {A: Published(b"k", 0, 7), elsewhere: Published(b"k", 0, 7)}
    other = [twice[0], delivered(elsewhere, "one", 1, 1000), twice[2]]
    apart = [accepted(elsewhere, "one", 1010), done[1]]
    assert check_history(other, apart, delivery=AT_LEAST_ONCE, faults=faults, expected=expected) == []
    # The node that granted the lease was gone before that was durable.
    assert check_history(twice, done, delivery=AT_LEAST_ONCE, faults=(Span(1000, 1008),)) == []


def test_a_leased_message_is_not_delivered_to_another_worker() -> None:
    one = {A: Published(b"k", 0, 7)}
    both = [delivered(A, "one", 1, 1000), delivered(A, "two", 2, 1099)]
    assert check_history(both, [accepted(A, "two", 1100, 2)], expected=one) == ["leased by two workers at once"]
    released = [settled(A, "one", Verb.RELEASE, 1098), accepted(A, "two", 1100, 2)]
    assert check_history(both, released, expected=one) == []
    extended = [settled(A, "one", Verb.EXTEND, 1050), accepted(A, "two", 1130, 2)]
    late = [delivered(A, "one", 1, 1000), delivered(A, "two", 2, 1120)]
    assert check_history(late, extended, expected=one) == ["leased by two workers at once"]
    assert check_history(late, extended, expected=one, stepped=(Span(1110, 1115),)) == []


def test_a_message_held_by_a_live_share_consumer_is_not_delivered_to_another() -> None:
    one = {A: Published(b"k", 0, 7)}
    both = [shared(A, "share", 1, 990, 1000), delivered(A, "two", 2, 1080)]
    done = [accepted(A, "two", 1085, 2)]
    assert check_history(both, done, expected=one, last_ms={"share": 2000}) == ["leased by two workers at once"]
    assert check_history(both, done, expected=one, last_ms={"share": 1070}) == []
    assert check_history(both, done, expected=one, last_ms={"share": 2000}, faults=(Span(1050, 1060),)) == []
    # The time of the lease is not known precisely enough.
    vague = [shared(A, "share", 1, 900, 1000), delivered(A, "two", 2, 1080)]
    assert check_history(vague, done, expected=one, last_ms={"share": 2000}) == []


def test_a_lease_lasts_as_long_as_declared() -> None:
    one = {A: Published(b"k", 0, 7)}
    short = [Delivery(A, "one", 1, 1000, 1001, 1050, 7)]
    assert check_history(short, [accepted(A, "one", 1010)], expected=one) == ["a lease of the wrong duration"]
    assert check_history(short, [accepted(A, "one", 1010)], expected=one, stepped=(Span(900, 1000),)) == []


def test_accepted_messages_are_not_redelivered_and_live_leases_are_honoured() -> None:
    one = {A: Published(b"k", 0, 7)}
    again = [delivered(A, "one", 1, 1000), delivered(A, "two", 2, 1200)]
    assert check_history(again, [accepted(A, "one", 1010)], expected=one) == ["redelivered after acceptance"]
    # The attempt number shows it where the time does not.
    late = [delivered(A, "one", 1, 1000), shared(A, "two", 2, 900, 1200)]
    assert check_history(late, [accepted(A, "one", 1010)], expected=one) == ["redelivered after acceptance"]
    assert check_history(late, [accepted(A, "one", 1010)], expected=one, delivery=AT_LEAST_ONCE) == []
    # A deposed leader may deliver a message once more, but not if its delivery became durable.
    faults = (Span(1190, 1300),)
    done = [accepted(A, "one", 1010)]
    redelivered = ["redelivered after acceptance"]
    assert check_history(again, done, expected=one, faults=faults, delivery=AT_LEAST_ONCE) == []
    assert (
        check_history(again, done, expected=one, faults=faults, delivery=AT_LEAST_ONCE, is_single_node=True)
        == redelivered
    )
    assert check_history(again, done, expected=one, faults=faults) == redelivered
    same = [event._replace(node=3) for event in again]
    reported = [event._replace(node=3) for event in done]
    assert check_history(same, reported, expected=one, faults=faults, delivery=AT_LEAST_ONCE) == redelivered
    assert check_history(same, [done[0]._replace(node=2)], expected=one, faults=faults, delivery=AT_LEAST_ONCE) == []
    # A worker that received it twice has settled it by either lease.
    twice = [delivered(A, "one", 1, 1000), delivered(A, "one", 2, 1200)]
    by_first = [accepted(A, "one", 1210, 1), settled(A, "one", Verb.ACCEPT, 1220, attempt=2, taken=False)]
    assert check_history(twice, by_first, expected=one) == []
    refused = [settled(A, "one", Verb.ACCEPT, 1010, taken=False), accepted(A, "two", 1210, 2)]
    assert check_history(again, refused, expected=one) == ["refused during a valid lease"]


def test_the_order_of_a_key_is_kept() -> None:
    crossed = [
        delivered(A, "one", 1, 1000),
        delivered(B, "two", 1, 1150),
        delivered(A, "one", 2, 1200),
    ]
    done = [accepted(A, "one", 1210, 2), accepted(B, "two", 1160)]
    assert check_history(crossed, done, ordered=True) == ["out of order"]
    assert check_history(crossed, done) == []
    other = {A: Published(b"k", 0, 7), B: Published(b"other", 0, 7)}
    assert check_history(crossed, done, ordered=True, expected=other) == []
    delayed = {A: Published(b"k", 900, 7), B: Published(b"k", 0, 7)}
    assert check_history(crossed, done, ordered=True, expected=delayed) == []


def test_nothing_is_delivered_before_its_time() -> None:
    early = {A: Published(b"k", 1001, 7), B: Published(b"k", 1070, 7)}
    assert check_history(*GOOD, expected=early) == ["delivered early"]
    assert check_history(*GOOD, expected=early, stepped=(Span(990, 995),)) == []
    later = [*GOOD[1], settled(A, "three", Verb.RELEASE, 1300)._replace(delay_ms=11)]
    assert check_history(GOOD[0], later) == []
    waits = [settled(A, "one", Verb.RELEASE, 1040)._replace(delay_ms=11), *GOOD[1][1:]]
    assert check_history(GOOD[0], waits) == ["delivered early"]


def test_the_journals_of_workers_are_merged() -> None:
    def about(worker: str, at_ms: int) -> dict[str, Any]:
        return {"worker": worker, "subscription": "s", "at_ms": at_ms}

    reported = histories(
        [
            ReceiveSent(**about("one", 10), call=1, messages_max=3),
            ReceiveCompleted(
                **about("one", 12), call=1, from_ms=10, messages=[Leased(0, 1, 1, 112, 7), Leased(0, 2, 1, 112, 7)]
            ),
            SettleSent(**about("one", 13), number=1, verb=int(Verb.ACCEPT), positions=[(0, 1, 1), (0, 2, 1)]),
            SettleCompleted(**about("one", 15), number=1, positions=[(0, 1)], taken=True),
            ReceiveSent(**about("one", 16), call=2, messages_max=3),
            ReceiveFailed(**about("one", 17), call=2),
            ReceiveSent(**about("two", 18), call=1, messages_max=1),
            WorkerLeft(**about("two", 19)),
            ReceiveSent(**about("three", 20), call=1, messages_max=1),
        ]
    )["s"]
    assert reported.deliveries == [Delivery(A, "one", 1, 10, 12, 112, 7), Delivery(B, "one", 1, 10, 12, 112, 7)]
    assert [
        (settlement.position, settlement.is_certain, settlement.is_possible) for settlement in reported.settlements
    ] == [
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
    assert [spans.overlaps(*span) for span in [(0, 9), (0, 10), (30, 31), (31, 49), (60, 70), (61, 70)]] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
