"""Requests of consumer group members, their responses, and descriptions of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.consumer.member import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeat:
    """A member joins (epoch 0), stays (its epoch), leaves (-1) or leaves temporarily (-2); None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int | None = None
    topics: frozenset[str] | None = None
    expression: str | None = None
    assignor: str | None = None
    owned: Assignment | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def is_full(self) -> bool:
        """Return whether the member sends all fields, as it does when it does not know the coordinator's state."""
        subscribed = self.topics is not None or self.expression is not None
        return self.rebalance_timeout_ms is not None and subscribed and self.owned is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """The response to a member; the assignment only if the member may not know it."""

    member_id: str
    epoch: int
    heartbeat_ms: int = 0
    assignment: Assignment | None = None


NamedPartitions = Sequence[tuple[UUID, str, tuple[int, ...]]]
"""Partitions with the id and the name of their topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMemberDescription:
    """A member, for people and tools."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: frozenset[str]
    expression: str
    assigned: NamedPartitions
    target: NamedPartitions
    speaks_classic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupDescription:
    """A group, for people and tools."""

    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[ConsumerMemberDescription, ...]
