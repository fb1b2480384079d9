"""The groups of one shard, by id: classic ones and consumer groups, which never share an id."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.group import Group
from millstream.broker.groups.offsets import Offsets
from millstream.core.errors import PolicyViolation


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
        """The classic groups."""
        return iter(self._groups.values())

    @property
    def consumers(self) -> Collection[ConsumerGroup]:
        return self._consumers.values()

    def ids(self) -> list[str]:
        """Return the id of every group."""
        return [*self._groups, *self._consumers]

    def get(self, group_id: str) -> Group | None:
        """Return the classic group with this id, if it exists."""
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
        """Remove a group."""
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
