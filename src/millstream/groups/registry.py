"""The groups that one shard knows, by id."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.groups.group import Group
from millstream.groups.offsets import Offsets
from millstream.model.errors import PolicyViolation


class Registry:
    """Groups come with their first member or offset, and go when neither members, offsets nor log speak of them."""

    def __init__(self, offsets: Offsets, *, groups_max: int) -> None:
        self._offsets = offsets
        self._groups_max = groups_max
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def get(self, group_id: str) -> Group | None:
        """The group of this id, if there is one."""
        return self._groups.get(group_id)

    def check_room(self) -> None:
        """Raise when no further group may be made."""
        if len(self._groups) >= self._groups_max:
            raise PolicyViolation(f"there are {len(self._groups)} groups already; no more are made")

    def put(self, group: Group) -> Group:
        """Keep a group, in place of another one of the same id."""
        self._groups[group.group_id] = group
        return group

    def drop(self, group_id: str) -> None:
        """Forget a group."""
        self._groups.pop(group_id, None)

    def drop_if_unused(self, group: Group) -> None:
        """Forget a group of which nothing is left."""
        in_use = group.members or group.pending_members or group.stored_value is not None
        if not in_use and not self._offsets.of_group(group.group_id):
            self.drop(group.group_id)
