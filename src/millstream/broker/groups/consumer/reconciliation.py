"""The next step of one member towards its target: first it gives up, then it gets.

A partition belongs to a member from the moment that it is assigned until the member says that it has given it up, or
is out of the group. So no two members ever have the same partition, whatever is lost or comes late in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.consumer.assignment import NO_PARTITIONS, NOTHING, Assignment, overlaps, union
from millstream.broker.groups.consumer.member import MemberState, Position
from millstream.core.errors import FencedMemberEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Where a member has to get to."""

    epoch: int
    target: Assignment
    topics: Set[UUID]
    """The topics that the member wants; it is not given others, whatever the target says."""
    is_taken: Callable[[UUID, int], bool]
    """Whether another member has this partition."""


def step(position: Position, goal: Goal, owned: Assignment | None, *, wants_others: bool = False) -> Position:
    """The position after a heartbeat with which the member tells what it owns, or None if that has not changed.

    `wants_others` says that the member changed its topics just now: those it does not want any more go at once, even
    if the target is not new.
    """
    reached = _step(position, goal, owned, wants_others=wants_others)
    return position if reached is position else dataclasses.replace(reached, since=_since(position, reached))


def _since(before: Position, after: Position) -> dict[UUID, dict[int, int]]:
    """From which epoch on the member has each partition: it keeps what it had, and gets the rest in the newest."""
    found: dict[UUID, dict[int, int]] = {}
    for topic_id, numbers in union(after.assigned, after.pending).items():
        known = before.since.get(topic_id, {})
        held = before.assigned.get(topic_id, NO_PARTITIONS) | before.pending.get(topic_id, NO_PARTITIONS)
        found[topic_id] = {
            number: known.get(number, before.epoch) if number in held else after.epoch for number in sorted(numbers)
        }
    return found


def _step(position: Position, goal: Goal, owned: Assignment | None, *, wants_others: bool) -> Position:
    if position.state is MemberState.UNREVOKED:
        if _has(owned, position.pending):
            return _drop_unwanted(position, goal, owned) if wants_others else position
        return _advance(position, goal, owned)
    if position.state is MemberState.UNRELEASED:
        return _advance(position, goal, owned)
    if position.state is MemberState.UNKNOWN:
        if owned is None or owned:
            raise FencedMemberEpoch("the state of the member is not known here; it has to join again")
        return _advance(position.at(goal.epoch), goal, owned)
    if position.epoch != goal.epoch:
        return _advance(position, goal, owned)
    return _drop_unwanted(position, goal, owned) if wants_others else position


def _has(owned: Assignment | None, pending: Assignment) -> bool:
    """Whether the member may still have some of these partitions; if it does not say, it may."""
    return bool(pending) and (owned is None or overlaps(pending, owned))


def _drop_unwanted(position: Position, goal: Goal, owned: Assignment | None) -> Position:
    kept = {topic_id: numbers for topic_id, numbers in position.assigned.items() if topic_id in goal.topics}
    if len(kept) == len(position.assigned):
        return position
    gone = {topic_id: numbers for topic_id, numbers in position.assigned.items() if topic_id not in goal.topics}
    pending = union(position.pending, gone)
    if _has(owned, pending):
        return dataclasses.replace(position, state=MemberState.UNREVOKED, assigned=kept, pending=pending)
    return dataclasses.replace(position, assigned=kept)


def _advance(position: Position, goal: Goal, owned: Assignment | None) -> Position:
    kept: dict[UUID, frozenset[int]] = {}
    gone: dict[UUID, frozenset[int]] = {}
    wanted: dict[UUID, frozenset[int]] = {}
    for topic_id in {*goal.target, *position.assigned}:
        target = goal.target.get(topic_id, NO_PARTITIONS) if topic_id in goal.topics else NO_PARTITIONS
        has = position.assigned.get(topic_id, NO_PARTITIONS)
        _put(kept, topic_id, has & target)
        _put(gone, topic_id, has - target)
        _put(wanted, topic_id, target - has)
    if _has(owned, gone):
        return dataclasses.replace(position, state=MemberState.UNREVOKED, assigned=kept, pending=gone)
    free = {topic_id: _free(topic_id, numbers, goal) for topic_id, numbers in wanted.items()}
    waits = any(len(free[topic_id]) < len(numbers) for topic_id, numbers in wanted.items())
    return dataclasses.replace(
        position.at(goal.epoch),
        state=MemberState.UNRELEASED if waits else MemberState.STABLE,
        assigned=union(kept, free),
        pending=NOTHING,
    )


def _free(topic_id: UUID, numbers: frozenset[int], goal: Goal) -> frozenset[int]:
    return frozenset(number for number in numbers if not goal.is_taken(topic_id, number))


def _put(into: dict[UUID, frozenset[int]], topic_id: UUID, numbers: frozenset[int]) -> None:
    if numbers:
        into[topic_id] = numbers
