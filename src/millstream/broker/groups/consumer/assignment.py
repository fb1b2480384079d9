"""Sets of partitions by topic id: what a member owns, is assigned, or must revoke."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final
from uuid import UUID

Assignment = Mapping[UUID, frozenset[int]]
"""Partitions by topic. It is never changed in place and has no topic without partitions."""

NO_PARTITIONS: Final[frozenset[int]] = frozenset()
NOTHING: Final[Assignment] = MappingProxyType({})


def nothing() -> Assignment:
    """Return an assignment without partitions."""
    return NOTHING


def assignment_of(pairs: Iterable[tuple[UUID, Iterable[int]]]) -> Assignment:
    """Group partitions by topic; topics without partitions are left out."""
    found: dict[UUID, frozenset[int]] = {}
    for topic_id, partitions in pairs:
        merged = found.get(topic_id, NO_PARTITIONS).union(partitions)
        if merged:
            found[topic_id] = merged
    return found


def size_of(assignment: Assignment) -> int:
    """Count the partitions."""
    return sum(map(len, assignment.values()))


def partitions_in(assignment: Assignment) -> Iterator[tuple[UUID, int]]:
    """Yield every partition with its topic."""
    for topic_id, partitions in assignment.items():
        for partition in partitions:
            yield topic_id, partition


def is_within(part: Assignment, whole: Assignment) -> bool:
    """Return whether one assignment contains every partition of the other."""
    return all(partitions <= whole.get(topic_id, NO_PARTITIONS) for topic_id, partitions in part.items())


def overlaps(one: Assignment, other: Assignment) -> bool:
    """Return whether the assignments have a partition in common."""
    return any(not partitions.isdisjoint(other.get(topic_id, NO_PARTITIONS)) for topic_id, partitions in one.items())


def union(one: Assignment, other: Assignment) -> Assignment:
    """Return the partitions of both."""
    return assignment_of((*one.items(), *other.items()))
