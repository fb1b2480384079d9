"""Sets of partitions by topic id: what a member owns, is assigned, or has to revoke."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final
from uuid import UUID

Assignment = Mapping[UUID, frozenset[int]]
"""Partitions by topic. It is never changed in place, and no topic in it is without partitions."""

NO_PARTITIONS: Final[frozenset[int]] = frozenset()
NOTHING: Final[Assignment] = MappingProxyType({})


def nothing() -> Assignment:
    """No partitions."""
    return NOTHING


def assignment_of(pairs: Iterable[tuple[UUID, Iterable[int]]]) -> Assignment:
    """Put partitions together by topic; topics without any are left out."""
    found: dict[UUID, frozenset[int]] = {}
    for topic_id, partitions in pairs:
        merged = found.get(topic_id, NO_PARTITIONS).union(partitions)
        if merged:
            found[topic_id] = merged
    return found


def size_of(assignment: Assignment) -> int:
    """How many partitions there are."""
    return sum(map(len, assignment.values()))


def partitions_in(assignment: Assignment) -> Iterator[tuple[UUID, int]]:
    """Every partition with its topic."""
    for topic_id, partitions in assignment.items():
        for partition in partitions:
            yield topic_id, partition


def is_within(part: Assignment, whole: Assignment) -> bool:
    """Whether every partition of one is in the other."""
    return all(partitions <= whole.get(topic_id, NO_PARTITIONS) for topic_id, partitions in part.items())


def overlaps(one: Assignment, other: Assignment) -> bool:
    """Whether some partition is in both."""
    return any(not partitions.isdisjoint(other.get(topic_id, NO_PARTITIONS)) for topic_id, partitions in one.items())


def union(one: Assignment, other: Assignment) -> Assignment:
    """The partitions of both."""
    return assignment_of((*one.items(), *other.items()))
