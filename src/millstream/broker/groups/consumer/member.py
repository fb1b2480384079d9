"""A member of a consumer group: its subscription, and its progress towards its target assignment.

A member is never changed in place. It moves from one assignment to the next like this, each step on a heartbeat:

    STABLE ──new target──▶ UNREVOKED ──has revoked its partitions──▶ UNRELEASED ──others have revoked theirs──▶ STABLE
                           old epoch                                 new epoch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

Assignment = Mapping[UUID, frozenset[int]]
"""Partitions by topic. It is never changed in place and has no topic without partitions."""
NamedPartitions = Sequence[tuple[UUID, str, tuple[int, ...]]]
"""Partitions with the id and the name of their topic."""

NO_PARTITIONS: Final[frozenset[int]] = frozenset()
NOTHING: Final[Assignment] = MappingProxyType({})


def empty_assignment() -> Assignment:
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
    return sum(map(len, assignment.values()))


def partitions_in(assignment: Assignment) -> Iterator[tuple[UUID, int]]:
    for topic_id, partitions in assignment.items():
        for partition in partitions:
            yield topic_id, partition


def is_within(part: Assignment, whole: Assignment) -> bool:
    """Return whether one assignment contains every partition of the other."""
    return all(partitions <= whole.get(topic_id, NO_PARTITIONS) for topic_id, partitions in part.items())


def overlaps(one: Assignment, other: Assignment) -> bool:
    return any(not partitions.isdisjoint(other.get(topic_id, NO_PARTITIONS)) for topic_id, partitions in one.items())


def union(one: Assignment, other: Assignment) -> Assignment:
    return assignment_of((*one.items(), *other.items()))


LEFT_EPOCH = -1

AWAY_EPOCH = -2
"""The epoch of a static member that leaves temporarily."""

MEMBER_BYTES = 256
"""The memory of a member apart from its metadata."""


class MemberState(IntEnum):
    """A member's progress towards its target; the numbers are Kafka's."""

    STABLE = 0
    UNREVOKED = 1
    """The member must revoke partitions before it can reach the next epoch."""
    UNRELEASED = 2
    """The member is in the newest epoch, and waits for partitions that others must revoke."""
    UNKNOWN = 127
    """Written by a newer version of the software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicSide:
    """The join request of a classic member."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    """Names and metadata, in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    expression: str = ""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicSide | None = None

    @property
    def size_bytes(self) -> int:
        named = (self.instance_id, self.rack_id, self.client_id, self.client_host, self.expression, self.assignor)
        protocols = () if self.classic is None else self.classic.protocols
        return (
            MEMBER_BYTES
            + sum(len(name) for name in named if name)
            + sum(map(len, self.topics))
            + sum(len(name) + len(metadata) for name, metadata in protocols)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The partitions that a member owns, and in which epoch."""

    epoch: int = 0
    previous_epoch: int = -1
    """The previous epoch; a member whose response was lost sends it again."""
    state: MemberState = MemberState.STABLE
    assigned: Assignment = field(default_factory=empty_assignment)
    pending: Assignment = field(default_factory=empty_assignment)
    """Partitions to revoke, owned until the member confirms that."""
    since: Mapping[UUID, Mapping[int, int]] = field(default_factory=dict, compare=False)
    """The epoch in which each partition was assigned; the newest for those that are not listed.

    It does not count for equality: positions with the same partitions are equal.
    """

    def has_since(self, topic_id: UUID, partition: int) -> int | None:
        """Return the epoch in which a partition was assigned to the member; None if the member does not own it."""
        held = (self.assigned, self.pending)
        if not any(partition in assignment.get(topic_id, NO_PARTITIONS) for assignment in held):
            return None
        return self.since.get(topic_id, {}).get(partition, self.epoch)

    def at(self, epoch: int) -> Position:
        if epoch == self.epoch:
            return self
        return dataclasses.replace(self, epoch=epoch, previous_epoch=self.epoch)

    def is_reconciled_to(self, target_epoch: int) -> bool:
        """Whether the member owns its whole target in this epoch."""
        return self.state is MemberState.STABLE and self.epoch == target_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMember:
    member_id: str
    subscription: Subscription = Subscription()
    position: Position = Position()

    @property
    def instance_id(self) -> str | None:
        return self.subscription.instance_id

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def speaks_classic(self) -> bool:
        return self.subscription.classic is not None

    def with_subscription(self, subscription: Subscription) -> ConsumerMember:
        return dataclasses.replace(self, subscription=subscription)

    def at(self, position: Position) -> ConsumerMember:
        return dataclasses.replace(self, position=position)
