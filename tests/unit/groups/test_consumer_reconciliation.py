"""A member on its way to its target: it revokes before others are assigned, and waits for partitions of others."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.groups.consumer.member import (
    NOTHING,
    Assignment,
    MemberState,
    Position,
    assignment_of,
    is_within,
    overlaps,
    union,
)
from millstream.broker.groups.consumer.reconciliation import MemberTarget, next_position
from millstream.core.errors import FencedMemberEpoch

ONE, TWO = UUID(int=1), UUID(int=2)
BOTH = frozenset({ONE, TWO})


def goal(
    target: Assignment, *, epoch: int = 5, taken: Assignment = NOTHING, topics: frozenset[UUID] = BOTH
) -> MemberTarget:
    return MemberTarget(
        epoch=epoch,
        target=target,
        topics=topics,
        is_taken=lambda topic_id, number: number in taken.get(topic_id, frozenset()),
    )


def of(*numbers: int, topic: UUID = ONE) -> Assignment:
    return assignment_of([(topic, numbers)])


def test_a_new_member_gets_unowned_partitions() -> None:
    reached = next_position(Position(), goal(of(1, 2, 3), taken=of(3)), NOTHING)
    assert reached == Position(epoch=5, previous_epoch=0, state=MemberState.UNRELEASED, assigned=of(1, 2))
    reached = next_position(reached, goal(of(1, 2, 3)), None)
    assert reached == Position(epoch=5, previous_epoch=0, state=MemberState.STABLE, assigned=of(1, 2, 3))


def test_a_member_revokes_before_it_is_assigned_more() -> None:
    before = Position(epoch=4, previous_epoch=3, assigned=of(1, 2))
    position = next_position(before, goal(of(2, 7)), of(1, 2))
    assert position == Position(epoch=4, previous_epoch=3, state=MemberState.UNREVOKED, assigned=of(2), pending=of(1))
    for still in (of(1, 2), None):
        assert next_position(position, goal(of(2, 7)), still) == position
    done = next_position(position, goal(of(2, 7)), of(2))
    assert done == Position(epoch=5, previous_epoch=4, state=MemberState.STABLE, assigned=of(2, 7))


def test_a_changed_target_applies_once_the_old_partitions_are_revoked() -> None:
    position = Position(epoch=4, previous_epoch=3, state=MemberState.UNREVOKED, assigned=of(2), pending=of(1))
    back = next_position(position, goal(of(1, 2), epoch=6, taken=NOTHING), of(2))
    assert back == Position(epoch=6, previous_epoch=4, state=MemberState.STABLE, assigned=of(1, 2))
    more = next_position(position, goal(of(1), epoch=6), of(2))
    assert more.state is MemberState.UNREVOKED
    assert (more.epoch, more.assigned, more.pending) == (4, NOTHING, of(2))


def test_partitions_that_the_member_no_longer_owns_need_no_revocation() -> None:
    before = Position(epoch=4, assigned=of(1, 2))
    assert next_position(before, goal(of(2)), of(2)).state is MemberState.STABLE


def test_a_member_at_its_target_is_stable() -> None:
    there = Position(epoch=5, assigned=of(1))
    assert next_position(there, goal(of(1)), None) is there
    waiting = Position(epoch=5, state=MemberState.UNRELEASED, assigned=of(1))
    assert next_position(waiting, goal(of(1, 2), taken=of(2)), None) == waiting


def test_unsubscribed_topics_are_revoked_at_once() -> None:
    there = Position(epoch=5, assigned=union(of(1), of(3, topic=TWO)))
    only_one = goal(of(1), topics=frozenset({ONE}))
    assert next_position(there, only_one, None) is there
    position = next_position(there, only_one, None, topics_changed=True)
    assert (position.state, position.epoch, position.assigned) == (MemberState.UNREVOKED, 5, of(1))
    assert position.pending == of(3, topic=TWO)
    given_up_already = next_position(there, only_one, of(1), topics_changed=True)
    assert given_up_already == Position(epoch=5, assigned=of(1))
    assert next_position(there, goal(there.assigned), None, topics_changed=True) is there


def test_a_revoking_member_may_unsubscribe_further() -> None:
    position = Position(epoch=5, state=MemberState.UNREVOKED, assigned=union(of(1), of(3, topic=TWO)), pending=of(2))
    less = next_position(position, goal(of(1), epoch=6, topics=frozenset({ONE})), None, topics_changed=True)
    assert (less.state, less.assigned, less.pending) == (
        MemberState.UNREVOKED,
        of(1),
        union(of(2), of(3, topic=TWO)),
    )


def test_targets_of_deleted_topics_are_not_assigned() -> None:
    reached = next_position(Position(), goal(union(of(1), of(3, topic=TWO)), topics=frozenset({ONE})), NOTHING)
    assert reached.assigned == of(1)


def test_an_unknown_state_starts_empty() -> None:
    strange = Position(epoch=4, state=MemberState.UNKNOWN, assigned=of(1))
    for owned in (None, of(1)):
        with pytest.raises(FencedMemberEpoch):
            next_position(strange, goal(of(1)), owned)
    assert next_position(strange, goal(of(1)), NOTHING).state is MemberState.STABLE


numbers = st.sets(st.integers(0, 5))
assignments = st.builds(lambda one, two: assignment_of([(ONE, one), (TWO, two)]), numbers, numbers)


@st.composite
def positions(draw: st.DrawFn) -> Position:
    state = draw(st.sampled_from([MemberState.STABLE, MemberState.UNREVOKED, MemberState.UNRELEASED]))
    assigned, pending = draw(assignments), NOTHING
    if state is MemberState.UNREVOKED:
        target_assignment = draw(assignments)
        pending = assignment_of(
            (topic, has - assigned.get(topic, frozenset())) for topic, has in target_assignment.items()
        )
    return Position(epoch=draw(st.integers(0, 5)), state=state, assigned=assigned, pending=pending)


@given(
    positions(),
    assignments,
    assignments,
    st.none() | assignments,
    st.booleans(),
    st.sampled_from([BOTH, frozenset({ONE}), frozenset()]),
)
def test_no_step_assigns_a_partition_of_another_member(
    before: Position,
    target: Assignment,
    taken: Assignment,
    owned: Assignment | None,
    topics_changed: bool,
    topics: frozenset[UUID],
) -> None:
    held = union(before.assigned, before.pending)
    others = assignment_of((topic, has - held.get(topic, frozenset())) for topic, has in taken.items())
    after = next_position(before, goal(target, taken=others, topics=topics), owned, topics_changed=topics_changed)
    assert not overlaps(after.assigned, others)
    assert not overlaps(after.assigned, after.pending)
    assert after.epoch in (before.epoch, 5)
    assert is_within(after.pending, held)
    assert (after.state is MemberState.UNREVOKED) >= bool(after.pending)
    # A partition that is removed without a confirmed revocation must be waited for.
    if owned is None:
        released = assignment_of(
            (topic, has - union(after.assigned, after.pending).get(topic, frozenset())) for topic, has in held.items()
        )
        assert released == NOTHING
