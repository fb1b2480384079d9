"""One consumer group: its members, their target assignments and the partitions that they own. No time, no log, no
timers.

Durable state changes only by replaying records; state marked "soft" may be lost with the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TypeVar
from uuid import UUID

from millstream.broker.groups.consumer.member import (
    NOTHING,
    Assignment,
    ConsumerMember,
    MemberState,
    Position,
    partitions_in,
)
from millstream.broker.groups.consumer.records import ConsumerKey, Kind, Resolved
from millstream.broker.groups.group import CONSUMER_PROTOCOL_TYPE
from millstream.broker.groups.records import CommittedOffset
from millstream.core.errors import FencedInstance, UnknownMember

K = TypeVar("K")

Choice = tuple[frozenset[str], str]
"""A subscription: topics by name, and an expression or nothing."""


class ConsumerGroupState(StrEnum):
    """The state of a group; the texts are Kafka's."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class ConsumerGroup:
    """The members of one group, and the owners of partitions."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.target_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.static_members: dict[str, str] = {}
        self.targets: dict[str, Assignment] = {}
        self.resolved: dict[str, Resolved] = {}
        self.choices: Counter[Choice] = Counter()
        self.assignors: Counter[str] = Counter()
        self.members_bytes = 0
        self.classic_members = 0
        self._classic_support: Counter[str] = Counter()
        self._owners: dict[tuple[UUID, int], str] = {}
        # Soft: the version of the topics up to which this group, and each of its expressions, is current; for the
        # latter also when rights were checked.
        self.checked_version: int | None = None
        self.checked_expressions: dict[str, tuple[int, int]] = {}
        self.refreshed_ms = 0
        self.target_computed_ms = 0
        self.empty_since_ms = 0

    # The fold

    def put(self, member: ConsumerMember) -> None:
        """Add a member, or replace it by a newer version of itself."""
        old = self.members.get(member.member_id)
        self.members[member.member_id] = member
        if old is not None:
            self._uncount(old)
        self._count(member)
        if old is None or old.position is not member.position:
            self._remove_ownership(old)
            self._add_ownership(member)

    def remove(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        self.targets.pop(member_id, None)
        if member is not None:
            self._uncount(member)
            self._remove_ownership(member)

    def resolve(self, expression: str, resolved: Resolved | None) -> None:
        """Record the topics of an expression, or that it is unused."""
        if resolved is not None:
            self.resolved[expression] = resolved
        else:
            self.resolved.pop(expression, None)
            self.checked_expressions.pop(expression, None)

    # Queries

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def state(self) -> ConsumerGroupState:
        if not self.members:
            return ConsumerGroupState.EMPTY
        if self.epoch > self.target_epoch:
            return ConsumerGroupState.ASSIGNING
        if all(member.position.is_reconciled_to(self.target_epoch) for member in self.members.values()):
            return ConsumerGroupState.STABLE
        return ConsumerGroupState.RECONCILING

    @property
    def protocol_type(self) -> str:
        return CONSUMER_PROTOCOL_TYPE

    def find(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"group {self.group_id!r} has no member {member_id!r}")
        return member

    def find_static(self, instance_id: str) -> ConsumerMember | None:
        member_id = self.static_members.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def find_sender(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """Return the member that sent a request; raise if it is unknown or was replaced."""
        if instance_id is None:
            return self.find(member_id)
        member = self.find_static(instance_id)
        if member is None:
            raise UnknownMember(f"group {self.group_id!r} has no member with instance id {instance_id!r}")
        if member.member_id != member_id:
            raise FencedInstance(f"instance {instance_id!r} of group {self.group_id!r} is another process now")
        return member

    def target_of(self, member: ConsumerMember) -> Assignment:
        """Return the target of a member; one that replaces a static member inherits its target."""
        known = self.targets.get(member.member_id)
        if known is None and member.instance_id is not None:
            known = self.targets.get(self.static_members.get(member.instance_id, ""))
        return NOTHING if known is None else known

    def is_owned(self, topic_id: UUID, partition: int, *, by_other_than: str) -> bool:
        return self._owners.get((topic_id, partition), by_other_than) != by_other_than

    def awaits_release(self, member: ConsumerMember) -> bool:
        """Whether a member waits for partitions that others have not revoked yet."""
        if member.position.state is not MemberState.UNRELEASED:
            return False
        return any(
            self.is_owned(topic_id, partition, by_other_than=member.member_id)
            for topic_id, partition in partitions_in(self.target_of(member))
        )

    def expressions(self) -> Iterator[str]:
        return iter({expression for _, expression in self.choices if expression})

    def users_of(self, expression: str) -> int:
        return sum(count for choice, count in self.choices.items() if choice[1] == expression)

    def supports_classic(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a classic member is compatible with the classic members of the group."""
        if protocol_type != CONSUMER_PROTOCOL_TYPE:
            return False
        return any(self._classic_support[name] == self.classic_members for name in names)

    def consumes(self, topic: str) -> bool:
        return any(topic in names or self._matches(expression, topic) for names, expression in self.choices)

    def expiry_base_ms(self, committed: CommittedOffset) -> int | None:
        return committed.commit_ms

    def keys(self) -> Iterator[ConsumerKey]:
        yield ConsumerKey(Kind.GROUP, self.group_id)
        yield ConsumerKey(Kind.TARGET_EPOCH, self.group_id)
        for member_id in self.members:
            yield ConsumerKey(Kind.SUBSCRIPTION, self.group_id, member_id)
            yield ConsumerKey(Kind.POSITION, self.group_id, member_id)
        for member_id in self.targets:
            yield ConsumerKey(Kind.TARGET, self.group_id, member_id)
        for expression in self.resolved:
            yield ConsumerKey(Kind.EXPRESSION, self.group_id, expression)

    # Internals

    def _matches(self, expression: str, topic: str) -> bool:
        resolved = self.resolved.get(expression)
        return resolved is not None and topic in resolved.topics

    def _count(self, member: ConsumerMember) -> None:
        subscription = member.subscription
        self.choices[subscription.topics, subscription.expression] += 1
        self.members_bytes += subscription.size_bytes
        if subscription.assignor is not None:
            self.assignors[subscription.assignor] += 1
        if subscription.instance_id is not None:
            self.static_members[subscription.instance_id] = member.member_id
        if subscription.classic is not None:
            self.classic_members += 1
            self._classic_support.update({name for name, _ in subscription.classic.protocols})

    def _uncount(self, member: ConsumerMember) -> None:
        subscription = member.subscription
        _decrease(self.choices, (subscription.topics, subscription.expression))
        self.members_bytes -= subscription.size_bytes
        if subscription.assignor is not None:
            _decrease(self.assignors, subscription.assignor)
        if (
            subscription.instance_id is not None
            and self.static_members.get(subscription.instance_id) == member.member_id
        ):
            del self.static_members[subscription.instance_id]
        if subscription.classic is not None:
            self.classic_members -= 1
            for name in {name for name, _ in subscription.classic.protocols}:
                _decrease(self._classic_support, name)

    def _add_ownership(self, member: ConsumerMember) -> None:
        for place in _owned_partitions(member.position):
            self._owners[place] = member.member_id

    def _remove_ownership(self, member: ConsumerMember | None) -> None:
        if member is None:
            return
        for place in _owned_partitions(member.position):
            if self._owners.get(place) == member.member_id:
                del self._owners[place]


def _owned_partitions(position: Position) -> Iterator[tuple[UUID, int]]:
    yield from partitions_in(position.assigned)
    yield from partitions_in(position.pending)


def _decrease(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
