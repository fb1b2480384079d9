"""Requests of share group members, their responses, and descriptions of groups."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.share.group import Assignment

JOIN_EPOCH = 0
LEFT_EPOCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeat:
    """A member joins, stays or leaves; None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    rack_id: str | None
    topics: frozenset[str] | None
    client_id: str
    client_host: str
    session_ms: int
    heartbeat_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAnswer:
    """The response to a member."""

    member_id: str
    epoch: int
    heartbeat_ms: int
    assignment: Assignment | None
    """None if it is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMemberDescription:
    """The description of a member."""

    member_id: str
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: frozenset[str]
    assigned: tuple[tuple[UUID, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupDescription:
    """The description of a group."""

    group_id: str
    state: str
    epoch: int
    members: tuple[ShareMemberDescription, ...]
