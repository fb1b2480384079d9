"""The groups of one shard by id, and their committed offsets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol
from uuid import UUID

from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.group import Group
from millstream.broker.groups.records import NO_TIME_MS, CommittedOffset, OffsetKey
from millstream.broker.groups.requests import FetchedOffset, FetchedOffsets
from millstream.core.errors import PolicyViolation
from millstream.core.pipeline import GROUP_PREFIX

TopicIds = Callable[[str], UUID | None]


class OffsetOwner(Protocol):
    """A group, which determines how long its offsets are kept."""

    group_id: str

    def consumes(self, topic: str) -> bool:
        """Return whether the group must be assumed to consume a topic."""

    def expiry_base_ms(self, committed: CommittedOffset) -> int | None:
        """Return the time from which the retention of an offset counts; None while it does not."""


_NOTHING: Mapping[tuple[str, int], CommittedOffset] = MappingProxyType({})
_NO_OFFSET = FetchedOffset()


class Offsets:
    """Committed offsets by group, topic and partition. Offsets of a deleted topic are ignored, even if its name is
    reused.
    """

    def __init__(self, topic_id_of: TopicIds) -> None:
        self._topic_id_of = topic_id_of
        self._by_group: dict[str, dict[tuple[str, int], CommittedOffset]] = {}
        self.transactional_groups: set[str] = set()
        """The groups for which transactions have committed offsets, as long as they have any."""

    def put(self, key: OffsetKey, committed: CommittedOffset) -> None:
        self._by_group.setdefault(key.group_id, {})[(key.topic, key.partition)] = committed
        if committed.is_transactional:
            self.transactional_groups.add(key.group_id)

    def remove(self, key: OffsetKey) -> None:
        offsets = self._by_group.get(key.group_id)
        if offsets is not None:
            offsets.pop((key.topic, key.partition), None)
            if not offsets:
                del self._by_group[key.group_id]
                self.transactional_groups.discard(key.group_id)

    def of_group(self, group_id: str) -> Mapping[tuple[str, int], CommittedOffset]:
        """Return every offset of a group, by topic and partition."""
        return self._by_group.get(group_id, _NOTHING)

    def of_transactional_groups(self, topics: Mapping[str, UUID | None]) -> Iterator[tuple[OffsetKey, int]]:
        """Yield the offsets in some topics of groups for which transactions have committed some.

        Topics are given with their ids; None stands for the topic that has the name now.
        """
        for group_id in self.transactional_groups:
            for (topic, partition), committed in self.of_group(group_id).items():
                if topic in topics and self._belongs_to(topic, committed, topics[topic]):
                    yield OffsetKey(group_id, topic, partition), committed.offset

    def all_keys(self) -> list[OffsetKey]:
        return [OffsetKey(group_id, *place) for group_id, offsets in self._by_group.items() for place in offsets]

    def current(self) -> Iterator[tuple[OffsetKey, CommittedOffset]]:
        """Yield every offset whose topic still exists."""
        for group_id, offsets in self._by_group.items():
            for (topic, partition), committed in offsets.items():
                if self._is_current(topic, committed):
                    yield OffsetKey(group_id, topic, partition), committed

    def get(self, key: OffsetKey) -> CommittedOffset | None:
        return self.of_group(key.group_id).get((key.topic, key.partition))

    def fetch(self, group_id: str, partitions_by_topic: Mapping[str, Iterable[int]]) -> FetchedOffsets:
        """Return the offsets of these partitions; -1 for those without one."""
        offsets = self.of_group(group_id)
        return {
            topic: {partition: self._to_fetched(topic, offsets.get((topic, partition))) for partition in partitions}
            for topic, partitions in partitions_by_topic.items()
        }

    def fetch_all(self, group_id: str) -> FetchedOffsets:
        offsets: dict[str, dict[int, FetchedOffset]] = {}
        for (topic, partition), committed in self.of_group(group_id).items():
            if self._is_current(topic, committed):
                offsets.setdefault(topic, {})[partition] = _as_fetched(committed)
        return offsets

    def expired(self, group: OffsetOwner, now_ms: int, retention_ms: int) -> list[OffsetKey]:
        """Return the offsets of a group that have expired or whose topic was deleted."""
        return [
            OffsetKey(group.group_id, topic, partition)
            for (topic, partition), committed in self.of_group(group.group_id).items()
            if not self._is_current(topic, committed) or _is_expired(group, topic, committed, now_ms, retention_ms)
        ]

    def _to_fetched(self, topic: str, committed: CommittedOffset | None) -> FetchedOffset:
        if committed is None or not self._is_current(topic, committed):
            return _NO_OFFSET
        return _as_fetched(committed)

    def _is_current(self, topic: str, committed: CommittedOffset) -> bool:
        return self._belongs_to(topic, committed, None)

    def _belongs_to(self, topic: str, committed: CommittedOffset, topic_id: UUID | None) -> bool:
        """Whether an offset is one of the topic with an id, or of the current one if that is None."""
        current = self._topic_id_of(topic)
        return (committed.topic_id or current) == (topic_id or current)


def _as_fetched(committed: CommittedOffset) -> FetchedOffset:
    return FetchedOffset(committed.offset, committed.leader_epoch, committed.metadata)


def _is_expired(group: OffsetOwner, topic: str, committed: CommittedOffset, now_ms: int, retention_ms: int) -> bool:
    base_ms = group.expiry_base_ms(committed)
    if base_ms is None or group.consumes(topic) or group.group_id.startswith(GROUP_PREFIX):
        # A pipeline that was stopped for a long time would otherwise start over and write everything again.
        return False
    if committed.expire_ms != NO_TIME_MS:
        return now_ms >= committed.expire_ms
    return now_ms - base_ms >= retention_ms


class Registry:
    """Groups exist from their first member or offset until no members, offsets or records are left."""

    def __init__(self, offsets: Offsets, *, groups_max: int) -> None:
        self._offsets = offsets
        self._groups_max = groups_max
        self._groups: dict[str, Group] = {}
        self._consumers: dict[str, ConsumerGroup] = {}

    def __len__(self) -> int:
        return len(self._groups) + len(self._consumers)

    def __iter__(self) -> Iterator[Group]:
        """Return the classic groups."""
        return iter(self._groups.values())

    @property
    def consumers(self) -> Collection[ConsumerGroup]:
        return self._consumers.values()

    def ids(self) -> list[str]:
        return [*self._groups, *self._consumers]

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def get_consumer(self, group_id: str) -> ConsumerGroup | None:
        return self._consumers.get(group_id)

    def check_room(self, others: int = 0) -> None:
        """Raise if no further group may be created; `others` counts groups held elsewhere."""
        if len(self) + others >= self._groups_max:
            raise PolicyViolation(f"the coordinator already has {len(self) + others} groups, which is the maximum")

    def put(self, group: Group) -> Group:
        """Store a group, replacing another one with the same id."""
        self._groups[group.group_id] = group
        return group

    def drop(self, group_id: str) -> None:
        self._groups.pop(group_id, None)

    def drop_if_unused(self, group: Group) -> None:
        """Remove a group without members, offsets and records."""
        in_use = group.members or group.pending_members or group.stored_value is not None
        if not in_use and not self._offsets.of_group(group.group_id):
            self.drop(group.group_id)

    def put_consumer(self, group: ConsumerGroup) -> ConsumerGroup:
        """Store a consumer group, replacing a classic one with the same id."""
        self._groups.pop(group.group_id, None)
        self._consumers[group.group_id] = group
        return group

    def drop_consumer(self, group_id: str) -> None:
        """Remove a consumer group; remaining offsets belong to a classic group without protocol."""
        self._consumers.pop(group_id, None)
        self.keep_owner(group_id)

    def keep_owner(self, group_id: str) -> None:
        """Create an owner for offsets that belong to no group."""
        known = group_id in self._groups or group_id in self._consumers
        if not known and self._offsets.of_group(group_id):
            self.put(Group(group_id))
