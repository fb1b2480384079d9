"""Requests of group members and their responses, independent of the protocol version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millstream.broker.groups.consumer.member import Assignment, NamedPartitions
from millstream.core.errors import MillstreamError
from millstream.core.group import HEARTBEAT, SESSION


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
    may_describe: Callable[[str], bool] | None = None
    """Whether the client may describe a topic, and so match it by an expression; None without authorization."""

    @property
    def is_full(self) -> bool:
        """Return whether the member sends all fields, as it does when it does not know the coordinator's state."""
        subscribed = self.topics is not None or self.expression is not None
        return self.rebalance_timeout_ms is not None and subscribed and self.owned is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatResult:
    """The response to a member; the assignment only if the member may not know it."""

    member_id: str
    epoch: int
    heartbeat_ms: int = 0
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMemberDescription:
    """A member of a consumer group or a share group, for people and tools."""

    member_id: str
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: frozenset[str]
    assigned: NamedPartitions
    instance_id: str | None = None
    expression: str = ""
    target: NamedPartitions = ()
    speaks_classic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupDescription:
    """A consumer group or a share group, for people and tools."""

    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[ConsumerMemberDescription, ...]


SettingsOf = Callable[[str], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A consumer joins, or takes part in the next generation."""

    group_id: str
    member_id: str
    instance_id: str | None = None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    """Names and metadata, in order of preference."""
    reason: str | None = None
    supports_member_id_required: bool = True
    supports_skip_assignment: bool = True
    """Whether the client, as leader, understands that the assignment is unchanged."""
    may_describe: Callable[[str], bool] | None = None
    """Whether the client may describe a topic, and so get its partitions; None without authorization."""


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """A member, as the leader sees it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinResponse:
    """A member of a generation; only the leader gets the list of members."""

    member_id: str
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    leader_id: str
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRef:
    """The sender of a request: a member of a generation."""

    group_id: str
    member_id: str
    instance_id: str | None = None
    generation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """A member requests its assignment; the leader sends those of all members."""

    member: MemberRef
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class SyncResponse:
    protocol_type: str | None
    protocol_name: str | None
    assignment: bytes


@dataclass(frozen=True, slots=True)
class LeavingMember:
    """A member that leaves, or that an operator removes (by instance id alone)."""

    member_id: str
    instance_id: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LeaveResult:
    leaver: LeavingMember
    error: MillstreamError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCommit:
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Offsets of some partitions, by topic name. Without generation and member, the sender is outside any group."""

    member: MemberRef
    topics: Mapping[str, tuple[PartitionCommit, ...]]
    retention_ms: int | None = None
    supports_unknown_group: bool = True
    """Whether the client understands GROUP_ID_NOT_FOUND; older ones get ILLEGAL_GENERATION."""


CommitResult = Mapping[str, Mapping[int, MillstreamError | None]]
"""The error of each topic and partition; None if its offset is stored."""


@dataclass(frozen=True, slots=True)
class FetchedOffset:
    """A committed offset as a consumer sees it; -1 if there is none."""

    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    is_stable: bool = True
    """False while a transaction that is not decided yet has committed another offset."""


FetchedOffsets = Mapping[str, Mapping[int, FetchedOffset]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupListing:
    group_id: str
    protocol_type: str
    state: str
    group_type: str = "classic"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDescription:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescription:
    group_id: str
    state: str
    protocol_type: str
    protocol_name: str
    generation: int
    members: tuple[MemberDescription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    session_min_ms: int
    session_max_ms: int
    initial_delay_ms: int
    members_max: int
    offsets_retention_ms: int
    groups_max: int = 100_000
    members_bytes_max: int = 4 * 1024 * 1024
    """The maximum size of the metadata of all members of a group together."""
    generation_bytes_max: int = 16 * 1024 * 1024
    """The maximum size of a generation's record: its members and their assignments."""
    offset_metadata_max: int = 4096
    tombstones_max: int = 1000
    """The number of offsets that one operation deletes; more are deleted in several."""
    consumer_session_ms: int = 45_000
    """The session timeout of consumer group members; classic members choose their own."""
    consumer_heartbeat_ms: int = 5_000
    new_member_ms: int = 300_000
    """How long to wait for a joining member without a session."""
    sweep_ms: int = 600_000
    settings_of: SettingsOf = lambda _group_id: {}
    """Returns the settings of single groups that override these."""

    def session_of(self, group_id: str) -> int:
        return self.settings_of(group_id).get(SESSION, self.consumer_session_ms)

    def heartbeat_of(self, group_id: str) -> int:
        return self.settings_of(group_id).get(HEARTBEAT, self.consumer_heartbeat_ms)
