"""Share sessions, and acknowledgements as passed to the queue."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from millstream.broker.kafka import share_consumers
from millstream.broker.kafka.share_consumers import (
    GAP,
    OFFSETS_MAX,
    RENEW,
    ShareSession,
    ShareSessions,
    check_member_id,
    settlements_of,
)
from millstream.broker.net.presence import Presence
from millstream.broker.subscriptions.lease import Settlement
from millstream.core.errors import InvalidRequest
from millstream.core.ids import Offset
from millstream.core.subscription import Verb

ONE = ("group", "one")
TWO = ("group", "two")
PLACE = (UUID(int=1), 0)


class Sessions(ShareSessions):
    """Sessions that record which were lost."""

    def __init__(self) -> None:
        self.lost: list[ShareSession] = []
        super().__init__(self.lost.append)


def opened(sessions: ShareSessions, member: tuple[str, str], presence: Presence) -> ShareSession:
    session = sessions.open(member, presence)
    assert isinstance(session, ShareSession)
    return session


def test_a_session_checks_its_epochs() -> None:
    sessions = Sessions()
    assert sessions.resume(ONE, 1) is ErrorCode.share_session_not_found
    session = opened(sessions, ONE, Presence())
    assert sessions.resume(ONE, 2) is ErrorCode.invalid_share_session_epoch
    assert sessions.resume(ONE, 1) is session
    assert sessions.resume(ONE, 1) is ErrorCode.invalid_share_session_epoch
    assert sessions.resume(TWO, 1) is ErrorCode.share_session_not_found
    session.epoch = 2**31 - 1
    assert sessions.resume(ONE, 2**31 - 1) is session
    assert session.epoch == 1
    assert sessions.close(ONE) is session
    assert sessions.close(ONE) is None
    assert len(sessions) == 0


def test_a_session_ends_with_its_connection() -> None:
    sessions, presence, other = Sessions(), Presence(), Presence()
    one = opened(sessions, ONE, presence)
    two = opened(sessions, TWO, presence)
    elsewhere = opened(sessions, ("group", "three"), other)
    presence.end()
    assert sessions.lost == [one, two]
    assert len(sessions) == 1
    presence.end()
    assert sessions.close(elsewhere.member) is elsewhere
    other.end()
    assert sessions.lost == [one, two]


def test_a_reopened_session_outlives_the_older_connection() -> None:
    sessions, before, now = Sessions(), Presence(), Presence()
    opened(sessions, ONE, before)
    session = opened(sessions, ONE, now)
    before.end()
    assert sessions.lost == []
    assert sessions.resume(ONE, 1) is session
    now.end()
    assert sessions.lost == [session]


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_consumers, "SESSIONS_MAX", 1)
    sessions = Sessions()
    opened(sessions, ONE, Presence())
    assert sessions.open(TWO, Presence()) is ErrorCode.share_session_limit_reached
    opened(sessions, ONE, Presence())


def test_the_partitions_of_all_sessions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_consumers, "ALL_PARTITIONS_MAX", 5)
    sessions = Sessions()
    places = [(UUID(int=1), index) for index in range(4)]
    first, second = opened(sessions, ONE, Presence()), opened(sessions, TWO, Presence())
    assert not sessions.change(first, places, ())
    assert sessions.change(second, places, ())
    sessions.close(TWO)
    assert not sessions.change(first, (), places[:1]), "a session may always forget partitions"
    assert not sessions.change(opened(sessions, TWO, Presence()), places[:2], ())


def test_the_sessions_of_one_principal_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_consumers, "SESSIONS_MAX", 8)
    monkeypatch.setattr(share_consumers, "ALL_PARTITIONS_MAX", 80)
    sessions, alice, bob = Sessions(), "User:alice", "User:bob"

    def place(number: int) -> list[tuple[UUID, int]]:
        return [(UUID(int=number), index) for index in range(10)]

    members = [("group", str(number)) for number in range(9)]
    for member in members[:6]:
        assert isinstance(sessions.open(member, Presence(), alice), ShareSession)
    assert sessions.open(members[6], Presence(), alice) is ErrorCode.share_session_limit_reached
    assert isinstance(sessions.open(members[7], Presence(), bob), ShareSession)
    sessions.close(members[7])
    for number, member in enumerate(members[:5]):
        session = sessions.get(member, 1)
        assert session is not None
        assert not sessions.change(session, place(number), ())
    session = sessions.get(members[5], 1)
    assert session is not None
    assert sessions.change(session, place(5), ())
    sessions.close(members[5])
    other = sessions.open(members[8], Presence(), bob)
    assert isinstance(other, ShareSession)
    assert not sessions.change(other, place(8), ())
    for member in (*members[:5], members[8]):
        sessions.close(member)
    assert isinstance(sessions.open(members[0], Presence(), alice), ShareSession)


@dataclass(frozen=True)
class Batch:
    """Acknowledgements of a range."""

    first_offset: int
    last_offset: int
    acknowledge_types: tuple[int, ...]


def settle(first: int, last: int, verb: Verb) -> Settlement:
    return Settlement(Offset(first), Offset(last), verb)


def test_acknowledgements_become_ranges() -> None:
    batches = [Batch(0, 9, (1,)), Batch(10, 14, (1, 1, 2, 3, 3)), Batch(20, 20, (2,)), Batch(21, 24, (1, 0, 0, 1))]
    verbs, gaps = settlements_of(batches)
    assert verbs == [
        settle(0, 9, Verb.ACCEPT),
        settle(10, 11, Verb.ACCEPT),
        settle(12, 12, Verb.RELEASE),
        settle(13, 14, Verb.REJECT),
        settle(20, 20, Verb.RELEASE),
        settle(21, 21, Verb.ACCEPT),
        settle(24, 24, Verb.ACCEPT),
    ]
    assert gaps == [settle(22, 23, Verb.ACCEPT)]
    assert settlements_of([]) == ([], [])
    assert settlements_of([Batch(3, 4, (RENEW,))], renews=True) == ([settle(3, 4, Verb.EXTEND)], [])


@pytest.mark.parametrize(
    "batches",
    [
        [Batch(3, 2, (1,))],
        [Batch(-1, 2, (1,))],
        [Batch(0, 1, (1,)), Batch(1, 2, (1,))],
        [Batch(4, 5, (1,)), Batch(0, 1, (1,))],
        [Batch(0, 1, ())],
        [Batch(0, 2, (1, 1))],
        [Batch(0, 0, (1, 1))],
        [Batch(0, 0, (5,))],
        [Batch(0, 0, (-1,))],
        [Batch(0, 0, (RENEW,))],
        [Batch(0, OFFSETS_MAX, (1,))],
        [Batch(0, 2**63 - 1, (1,))],
    ],
)
def test_invalid_acknowledgements_are_refused(batches: list[Batch]) -> None:
    with pytest.raises(InvalidRequest):
        settlements_of(batches)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), min_size=1, max_size=8)), max_size=5))
def test_every_offset_is_settled_once_as_acknowledged(plan: list[tuple[int, list[int]]]) -> None:
    output: dict[int, int] = {}
    batches, at = [], 0
    for hole, types in plan:
        at += hole
        batches.append(Batch(at, at + len(types) - 1, tuple(types)))
        output.update(zip(range(at, at + len(types)), types, strict=True))
        at += len(types)
    verbs, gaps = settlements_of(batches, renews=True)
    done = {offset: int(verb.verb) for verb in verbs for offset in range(verb.first, verb.last + 1)}
    offsets = {offset for gap in gaps for offset in range(gap.first, gap.last + 1)}
    assert done == {offset: kind for offset, kind in output.items() if kind != GAP}
    assert offsets == {offset for offset, kind in output.items() if kind == GAP}
    assert [verb.first for verb in verbs] == sorted(verb.first for verb in verbs)


def test_member_ids() -> None:
    assert check_member_id("x" * 36) == "x" * 36
    for wrong in (None, "", "x" * 37):
        with pytest.raises(InvalidRequest):
            check_member_id(wrong)
