"""Assign partitions to the members of a group, by the assignor that most members prefer.

An assignor is a plain function. It gets the subscribed topics and the previous assignment of each member, and returns
the new assignments; every partition of a subscribed topic is assigned to exactly one of its subscribers.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Protocol
from uuid import UUID

from millstream.broker.groups.consumer.group import Choice
from millstream.broker.groups.consumer.member import (
    NOTHING,
    Assignment,
    ConsumerMember,
    NamedPartitions,
    empty_assignment,
    size_of,
)
from millstream.broker.groups.consumer.records import Resolved
from millstream.core.topic import Topic

Partitions = Mapping[UUID, int]


class TopicView(Protocol):
    @property
    def version(self) -> int:
        """A number that changes whenever a topic is created, grows or is deleted."""

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name, if it exists."""

    def by_id(self, topic_id: UUID) -> Topic | None:
        """Return the topic with this id, if it exists."""

    def all(self) -> Sequence[Topic]:
        """Return every topic."""

    def existing(self, names: Iterable[str]) -> list[Topic]:
        """Return the existing topics among these."""


def with_names(view: TopicView, assignment: Assignment) -> NamedPartitions:
    topics = [(view.by_id(topic_id), partitions) for topic_id, partitions in assignment.items()]
    return sorted(
        (topic.topic_id, topic.name, tuple(sorted(partitions))) for topic, partitions in topics if topic is not None
    )


def partitions_of(topics: Iterable[Topic]) -> Partitions:
    return {topic.topic_id: topic.partitions for topic in topics}


def metadata_hash(view: TopicView, names: Iterable[str]) -> int:
    """Hash everything about these topics that an assignment depends on, to 64 bits; 0 if none of them exists.

    Kafka stores such a hash in the same field, and only the coordinator reads it.
    """
    topics = sorted(view.existing(set(names)), key=lambda topic: topic.name)
    if not topics:
        return 0
    digest = blake2b(digest_size=8)
    for topic in topics:
        digest.update(topic.topic_id.bytes)
        digest.update(topic.partitions.to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSubscription:
    """The topics that a member subscribes to, and its previous assignment."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[UUID]
    previous: Assignment = field(default_factory=empty_assignment)


Assignor = Callable[[Sequence[MemberSubscription], Partitions], dict[str, Assignment]]
"""Assigns partitions; the result has an entry for every member."""


def members_by_topic(members: Sequence[MemberSubscription]) -> dict[UUID, list[MemberSubscription]]:
    """Group members by the topics they subscribe to, in the order of the members."""
    by_topic: dict[UUID, list[MemberSubscription]] = {}
    for member in members:
        for topic_id in member.topics:
            by_topic.setdefault(topic_id, []).append(member)
    return by_topic


def assign_ranges(members: Sequence[MemberSubscription], partitions: Partitions) -> dict[str, Assignment]:
    """Assign each topic separately, in contiguous ranges."""
    assigned: dict[str, dict[UUID, frozenset[int]]] = {member.member_id: {} for member in members}
    for topic_id, subscribers in members_by_topic(sorted(members, key=_sort_key)).items():
        share, extra = divmod(partitions[topic_id], len(subscribers))
        begin = 0
        for partition, member in enumerate(subscribers):
            end = begin + share + (partition < extra)
            if end > begin:
                assigned[member.member_id][topic_id] = frozenset(range(begin, end))
            begin = end
    return dict(assigned)


def _sort_key(member: MemberSubscription) -> tuple[bool, str, str]:
    return member.instance_id is None, member.instance_id or "", member.member_id


PASSES_MAX = 16
"""The maximum number of passes that balance members with different topics; two are nearly always enough."""

Allocation = dict[UUID, set[int]]
"""The partitions of a member while they are being assigned."""

Free = dict[UUID, list[int]]


class _Allocations:
    """The partitions of every member while they are being assigned."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._kept: dict[str, Assignment] = {}
        self._opened: dict[str, Allocation] = {}

    def keep(self, member_id: str, assignment: Assignment) -> None:
        """Start with the partitions that a member keeps."""
        self._kept[member_id] = assignment
        self.sizes[member_id] = size_of(assignment)

    def open(self, member_id: str) -> Allocation:
        """Return the partitions of a member for modification."""
        allocation = self._opened.get(member_id)
        if allocation is None:
            kept = self._kept[member_id].items()
            allocation = self._opened[member_id] = {
                topic_id: set(partition_numbers) for topic_id, partition_numbers in kept
            }
        return allocation

    def take(self, member_id: str, topic_id: UUID, partition: int) -> None:
        self.open(member_id).setdefault(topic_id, set()).add(partition)
        self.sizes[member_id] += 1

    def result(self, member_id: str) -> Assignment:
        """Return the new assignment of a member; the same object if nothing has changed."""
        allocation = self._opened.get(member_id)
        if allocation is None:
            return self._kept[member_id]
        return {
            topic_id: frozenset(partition_numbers)
            for topic_id, partition_numbers in allocation.items()
            if partition_numbers
        }


def assign_uniformly(members: Sequence[MemberSubscription], partitions: Partitions) -> dict[str, Assignment]:
    if not members:
        return {}
    allocations, free = _keep_previous(members, partitions)
    if all(member.topics == members[0].topics for member in members):
        _balance_all(allocations, free, sum(partitions[topic_id] for topic_id in members[0].topics))
    else:
        _balance_by_topic(allocations, free, members, partitions)
    return {member.member_id: allocations.result(member.member_id) for member in members}


def _keep_previous(members: Sequence[MemberSubscription], partitions: Partitions) -> tuple[_Allocations, Free]:
    """Return the partitions that members keep, and the unassigned ones."""
    assigned: dict[UUID, set[int]] = {}
    for topics in {member.topics for member in members}:
        assigned.update((topic_id, set()) for topic_id in topics)
    allocations = _Allocations()
    for member in members:
        kept: dict[UUID, frozenset[int]] = {}
        for topic_id, previous in member.previous.items():
            others = assigned.get(topic_id)
            if others is None or topic_id not in member.topics:
                continue
            kept_partitions = previous if others.isdisjoint(previous) else previous - others
            if kept_partitions and max(kept_partitions) >= partitions[topic_id]:
                kept_partitions = frozenset(
                    partition for partition in kept_partitions if partition < partitions[topic_id]
                )
            if kept_partitions:
                kept[topic_id] = kept_partitions
                others |= kept_partitions
        allocations.keep(member.member_id, member.previous if kept == member.previous else kept)
    free = {
        topic_id: sorted(set(range(partitions[topic_id])) - partition_numbers)
        for topic_id, partition_numbers in sorted(assigned.items())
        if len(partition_numbers) < partitions[topic_id]
    }
    return allocations, free


# All members subscribe to the same topics


def _balance_all(allocations: _Allocations, free: Free, total: int) -> None:
    sizes = allocations.sizes
    share, extra = divmod(total, len(sizes))
    # Members with the most partitions get the extra ones, so that the fewest move.
    by_size = sorted(sizes, key=lambda member_id: -sizes[member_id])
    quotas = {member_id: share + (partition < extra) for partition, member_id in enumerate(by_size)}
    for member_id in by_size:
        if sizes[member_id] > quotas[member_id]:
            for topic_id, partition in _revoke(allocations.open(member_id), sizes[member_id] - quotas[member_id]):
                free.setdefault(topic_id, []).append(partition)
            sizes[member_id] = quotas[member_id]
    _deal(allocations, free, {member_id: quotas[member_id] - size for member_id, size in sizes.items()})


def _revoke(allocation: Allocation, count: int) -> Iterator[tuple[UUID, int]]:
    """Revoke some partitions of a member, always from the topic with most of them."""
    topics = [(-len(partition_numbers), topic_id) for topic_id, partition_numbers in allocation.items()]
    heapq.heapify(topics)
    for _ in range(count):
        negative_size, topic_id = topics[0]
        partition = max(allocation[topic_id])
        allocation[topic_id].remove(partition)
        heapq.heapreplace(topics, (negative_size + 1, topic_id))
        yield topic_id, partition


def _deal(allocations: _Allocations, free: Free, missing: dict[str, int]) -> None:
    waiting = deque(member_id for member_id, count in missing.items() if count > 0)
    for topic_id, partition_numbers in free.items():
        for partition in sorted(partition_numbers):
            member_id = waiting.popleft()
            allocations.take(member_id, topic_id, partition)
            missing[member_id] -= 1
            if missing[member_id]:
                waiting.append(member_id)


# Members subscribe to different topics


def _balance_by_topic(
    allocations: _Allocations, free: Free, members: Sequence[MemberSubscription], partitions: Partitions
) -> None:
    subscribers = {
        topic_id: [member.member_id for member in of_topic] for topic_id, of_topic in members_by_topic(members).items()
    }
    # Topics with few members for their partitions come first: the others can still balance the result.
    order = sorted(subscribers, key=lambda topic_id: (-partitions[topic_id] / len(subscribers[topic_id]), topic_id))
    for topic_id in order:
        if topic_id in free:
            _distribute(topic_id, free[topic_id], subscribers[topic_id], allocations)
    for _ in range(PASSES_MAX):
        moved = [
            _balance_topic(topic_id, subscribers[topic_id], allocations)
            for topic_id in order
            if len(subscribers[topic_id]) > 1
        ]
        if not any(moved):
            return


def _distribute(
    topic_id: UUID, partition_numbers: Iterable[int], subscribers: list[str], allocations: _Allocations
) -> None:
    """Assign partitions of one topic to the members with the fewest."""
    least = [(allocations.sizes[member_id], member_id) for member_id in subscribers]
    heapq.heapify(least)
    for partition in partition_numbers:
        size, member_id = least[0]
        allocations.take(member_id, topic_id, partition)
        heapq.heapreplace(least, (size + 1, member_id))


def _balance_topic(topic_id: UUID, subscribers: list[str], allocations: _Allocations) -> int:
    """Move partitions of one topic from the largest to the smallest member while they differ by more than one."""
    sizes = allocations.sizes
    counts = [sizes[member_id] for member_id in subscribers]
    if max(counts) - min(counts) < 2:
        return 0
    least = [(size, member_id) for size, member_id in zip(counts, subscribers, strict=True)]
    most = [(-sizes[member_id], member_id) for member_id in subscribers if allocations.open(member_id).get(topic_id)]
    heapq.heapify(least)
    heapq.heapify(most)
    moved = 0
    while most:
        low_size, low = _current(least, sizes, sign=1)
        high_size, high = _current(most, sizes, sign=-1)
        if -high_size - low_size < 2:
            break
        partition_numbers = allocations.open(high)[topic_id]
        partition = max(partition_numbers)
        partition_numbers.remove(partition)
        sizes[high] -= 1
        allocations.take(low, topic_id, partition)
        moved += 1
        if not partition_numbers:
            heapq.heappop(most)
    return moved


def _current(heap: list[tuple[int, str]], sizes: dict[str, int], *, sign: int) -> tuple[int, str]:
    """Return the first entry of a heap whose sizes may have changed since they were added."""
    while (now := sign * sizes[heap[0][1]]) != heap[0][0]:
        heapq.heapreplace(heap, (now, heap[0][1]))
    return heap[0]


DEFAULT_ASSIGNOR: Final = "uniform"
ASSIGNORS: Final[Mapping[str, Assignor]] = {DEFAULT_ASSIGNOR: assign_uniformly, "range": assign_ranges}


def preferred_assignor(votes: Counter[str]) -> str:
    """Return the assignor with the most votes; the first by name wins a tie, and without votes it is the default."""
    return min(votes, key=lambda name: (-votes[name], name), default=DEFAULT_ASSIGNOR)


def names_of(choice: Choice, resolved: Mapping[str, Resolved]) -> frozenset[str]:
    """Return the topics of a subscription; an unresolved expression matches none."""
    names, expression = choice
    matching = resolved.get(expression) if expression else None
    return names if matching is None else names | matching.topics


def topic_ids_of(choice: Choice, resolved: Mapping[str, Resolved], topics: TopicView) -> frozenset[UUID]:
    return frozenset(topic.topic_id for topic in topics.existing(names_of(choice, resolved)))


def compute_target(
    members: Collection[ConsumerMember],
    previous: Mapping[str, Assignment],
    resolved: Mapping[str, Resolved],
    topics: TopicView,
    assignor: str,
) -> dict[str, Assignment]:
    chosen = {(member.subscription.topics, member.subscription.expression) for member in members}
    ids = {choice: topic_ids_of(choice, resolved, topics) for choice in chosen}
    names = {name for choice in chosen for name in names_of(choice, resolved)}
    subscriptions = [
        MemberSubscription(
            member_id=member.member_id,
            instance_id=member.instance_id,
            topics=ids[member.subscription.topics, member.subscription.expression],
            previous=previous.get(member.member_id, NOTHING),
        )
        for member in members
    ]
    assign = ASSIGNORS.get(assignor, assign_uniformly)
    return assign(subscriptions, partitions_of(topics.existing(names)))
