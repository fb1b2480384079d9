"""One classic consumer group: its members, its leader and its protocol. No time, no log, no timers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.records import NO_TIME_MS, CommittedOffset, StoredGroup, StoredMember
from millstream.broker.groups.requests import (
    GroupDescription,
    GroupListing,
    JoinedMember,
    JoinRequest,
    JoinResponse,
    MemberDescription,
    SyncResponse,
)
from millstream.core.errors import (
    FencedInstance,
    MillstreamError,
    ProtocolViolation,
    RebalanceInProgress,
    UnknownMember,
)
from millstream.protocol.messages.primitives import Reader

MEMBER_BYTES = 128
"""The memory of a member apart from its metadata."""


def estimated_bytes(client_id: str, instance_id: str | None, protocols: tuple[tuple[str, bytes], ...]) -> int:
    """Estimate the memory and log space that a member takes; its id repeats the client id."""
    named = 2 * (len(client_id) + len(instance_id or ""))
    return MEMBER_BYTES + named + sum(len(name) + len(metadata) for name, metadata in protocols)


@dataclass(slots=True, eq=False)
class Member:
    member_id: str
    _: KW_ONLY
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    is_new: bool = False
    """Whether the member has no session yet, so that its parked join request does not keep it alive forever."""
    join_response: Deferred[JoinResponse] | None = None
    sync_response: Deferred[SyncResponse] | None = None

    @classmethod
    def joining(cls, member_id: str, request: JoinRequest) -> Member:
        return cls(
            member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            session_timeout_ms=request.session_timeout_ms,
            protocol_type=request.protocol_type,
            protocols=request.protocols,
            is_new=True,
        )

    @classmethod
    def restored(cls, stored: StoredMember, protocol_type: str, protocol_name: str) -> Member:
        return cls(
            stored.member_id,
            instance_id=stored.instance_id,
            client_id=stored.client_id,
            client_host=stored.client_host,
            rebalance_timeout_ms=stored.rebalance_timeout_ms,
            session_timeout_ms=stored.session_timeout_ms,
            protocol_type=protocol_type,
            protocols=((protocol_name, stored.subscription),),
            assignment=stored.assignment,
        )

    def stored(self, protocol_name: str, assignment: bytes) -> StoredMember:
        return StoredMember(
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self.client_id,
            client_host=self.client_host,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            session_timeout_ms=self.session_timeout_ms,
            subscription=self.metadata(protocol_name),
            assignment=assignment,
        )

    @property
    def is_static(self) -> bool:
        """Return whether the member keeps its place when its process restarts."""
        return self.instance_id is not None

    @property
    def awaits_join(self) -> bool:
        """Whether a join request of the member is parked."""
        return self.join_response is not None

    @property
    def size_bytes(self) -> int:
        return estimated_bytes(self.client_id, self.instance_id, self.protocols)

    def metadata(self, protocol_name: str) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol_name), b"")

    def vote(self, candidates: Collection[str]) -> str:
        """Return the member's preferred protocol among those that all support."""
        return next(name for name, _ in self.protocols if name in candidates)

    def is_alive_without_heartbeat(self) -> bool:
        """Return whether a parked request replaces heartbeats, which the client does not send while it waits."""
        return not self.is_new and (self.join_response is not None or self.sync_response is not None)

    def park_sync(self, deferred: Deferred[SyncResponse]) -> None:
        """Park a sync request until the leader sends the assignment; it replaces an older one of the member."""
        self.refuse_sync(RebalanceInProgress("a later request of the same member replaced this one"))
        self.sync_response = deferred

    def respond_to_sync(self, response: SyncResponse) -> bool:
        """Respond to the parked sync request; return whether there was one."""
        deferred, self.sync_response = self.sync_response, None
        if deferred is not None:
            deferred.resolve(response)
        return deferred is not None

    def refuse_sync(self, error: MillstreamError) -> bool:
        """Refuse the parked sync request; return whether there was one."""
        deferred, self.sync_response = self.sync_response, None
        if deferred is not None:
            deferred.refuse(error)
        return deferred is not None


CONSUMER_PROTOCOL_TYPE = "consumer"


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics in a consumer's subscription; None if the bytes are not one."""
    reader = Reader(metadata, flexible=False)
    try:
        # Every later version starts with the fields of version 0, so the version number does not matter.
        reader.int16()
        count = reader.array_length(item_bytes_min=2)
        return frozenset(reader.string() for _ in range(max(0, count)))
    except ProtocolViolation:
        return None


class GroupState(StrEnum):
    """The state of a group; the texts are Kafka's."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Group:
    """The members of one group, their leader and their protocol."""

    def __init__(self, group_id: str, *, now_ms: int = NO_TIME_MS) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.previous_state = GroupState.DEAD
        self.state_since_ms = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}
        # Ids that were assigned and have not joined yet, and members that have not sent SyncGroup yet.
        self.pending_members: set[str] = set()
        self.pending_sync: set[str] = set()
        self.member_added = False
        self.subscribed: frozenset[str] | None = None
        self.members_bytes = 0
        self.awaiting_join = 0
        self.stored_value: bytes | None = None
        self._support: Counter[str] = Counter()

    @classmethod
    def restored(cls, group_id: str, stored: StoredGroup) -> Group:
        group = cls(group_id, now_ms=stored.state_since_ms)
        group.generation = stored.generation
        group.protocol_type = stored.protocol_type or None
        group.protocol_name = stored.protocol_name
        for member in stored.members:
            group.add(Member.restored(member, stored.protocol_type, stored.protocol_name or ""))
        group.state = GroupState.STABLE if stored.members else GroupState.EMPTY
        group.leader_id = stored.leader_id if stored.leader_id in group.members else next(iter(group.members), None)
        group.subscribed = group.compute_subscribed()
        return group

    def stored(self, assignments: dict[str, bytes]) -> StoredGroup:
        protocol_name = self.protocol_name or ""
        return StoredGroup(
            protocol_type=self.protocol_type or "",
            generation=self.generation,
            protocol_name=self.protocol_name,
            leader_id=self.leader_id,
            state_since_ms=self.state_since_ms,
            members=tuple(
                member.stored(protocol_name, assignments.get(member.member_id, b"")) for member in self.members.values()
            ),
        )

    def is_in(self, *states: GroupState) -> bool:
        return self.state in states

    @property
    def is_empty(self) -> bool:
        return self.state is GroupState.EMPTY

    @property
    def can_rebalance(self) -> bool:
        """Return whether a rebalance can start; one in progress must end first."""
        return self.state in (GroupState.EMPTY, GroupState.STABLE, GroupState.COMPLETING)

    @property
    def uses_consumer_protocol(self) -> bool:
        """Whether the members' metadata can be read."""
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    @property
    def has_all_joined(self) -> bool:
        """Whether all members have joined the next generation."""
        return self.awaiting_join == len(self.members) and not self.pending_members

    @property
    def rebalance_timeout_ms(self) -> int:
        """Return how long a rebalance waits: the longest timeout of a member."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def move_to(self, state: GroupState, now_ms: int) -> None:
        self.previous_state = self.state
        self.state = state
        self.state_since_ms = now_ms

    def add(self, member: Member, deferred: Deferred[JoinResponse] | None = None) -> None:
        if not self.members:
            self.protocol_type = member.protocol_type or None
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        if self.leader_id is None:
            self.leader_id = member.member_id
        self.members[member.member_id] = member
        self._count_protocols(member)
        self.pending_members.discard(member.member_id)
        if deferred is not None:
            self.park_join(member, deferred)

    def update(self, member: Member, protocols: tuple[tuple[str, bytes], ...]) -> None:
        self._uncount_protocols(member)
        member.protocols = protocols
        self._count_protocols(member)

    def remove(self, member_id: str, error: MillstreamError) -> None:
        """Remove a member or a pending id, and refuse its parked requests."""
        self.pending_members.discard(member_id)
        self.pending_sync.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return
        self.refuse_join(member, error)
        member.refuse_sync(error)
        self._uncount_protocols(member)
        if member.instance_id is not None:
            del self.static_members[member.instance_id]
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)

    def replace_static(self, old_id: str, new_id: str) -> Member:
        """Give a static member a new id after a restart of its process, and fence the old one."""
        old = self.members.pop(old_id)
        fenced = FencedInstance(f"another process joined group {self.group_id!r} as instance {old.instance_id!r}")
        self.refuse_join(old, fenced)
        old.refuse_sync(fenced)
        self.pending_sync.discard(old_id)
        new = replace(old, member_id=new_id, is_new=False)
        self.members[new_id] = new
        if old.instance_id is not None:
            self.static_members[old.instance_id] = new_id
        if self.leader_id == old_id:
            self.leader_id = new_id
        return new

    def park_join(self, member: Member, deferred: Deferred[JoinResponse]) -> None:
        """Park a join request until the generation is complete; it replaces an older one of the member."""
        self.refuse_join(member, RebalanceInProgress("a later request of the same member replaced this one"))
        member.join_response = deferred
        self.awaiting_join += 1

    def respond_to_join(self, member: Member, response: JoinResponse) -> bool:
        """Respond to a parked join request; return whether there was one."""
        deferred, member.join_response = member.join_response, None
        if deferred is None:
            return False
        self.awaiting_join -= 1
        deferred.resolve(response)
        return True

    def refuse_join(self, member: Member, error: MillstreamError) -> None:
        deferred, member.join_response = member.join_response, None
        if deferred is not None:
            self.awaiting_join -= 1
            deferred.refuse(error)

    def refuse_all(self, error: MillstreamError) -> None:
        for member in self.members.values():
            self.refuse_join(member, error)
            member.refuse_sync(error)

    def elect_joined_leader(self) -> bool:
        """Keep the leader if it has joined, otherwise elect the first member that has; return False if none has."""
        leader = self.members.get(self.leader_id or "")
        if leader is not None and leader.awaits_join:
            return True
        joined = next((member for member in self.members.values() if member.awaits_join), None)
        if joined is None:
            return False
        self.leader_id = joined.member_id
        return True

    def begin_generation(self, now_ms: int) -> None:
        """Increment the generation and choose its protocol."""
        self.generation += 1
        self.pending_sync.clear()
        self.protocol_name = self.select_protocol() if self.members else None
        self.subscribed = self.compute_subscribed()
        self.move_to(GroupState.COMPLETING if self.members else GroupState.EMPTY, now_ms)

    def select_protocol(self) -> str:
        """Return the protocol with the most votes among those that every member supports; the first voted for wins a
        tie.
        """
        everyone = len(self.members)
        candidates = {name for name, count in self._support.items() if count == everyone}
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def supports(self, protocol_type: str, names: set[str]) -> bool:
        """Return whether a member with these protocols is compatible with the current members."""
        if self.state is GroupState.EMPTY:
            return bool(protocol_type) and bool(names)
        everyone = len(self.members)
        return protocol_type == self.protocol_type and any(self._support[name] == everyone for name in names)

    def check_member(self, member_id: str, instance_id: str | None) -> Member:
        """Return the member that sent a request; raise if it is unknown or fenced."""
        if instance_id is not None:
            known = self.static_members.get(instance_id)
            if known is None:
                raise UnknownMember(f"group {self.group_id!r} has no member with instance id {instance_id!r}")
            if known != member_id:
                raise FencedInstance(f"instance {instance_id!r} of group {self.group_id!r} is another process now")
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMember(f"group {self.group_id!r} has no member {member_id!r}")
        return member

    def compute_subscribed(self) -> frozenset[str] | None:
        """Return the topics that the members consume; None if that cannot be known."""
        if not self.uses_consumer_protocol:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            if self.protocol_name is None:
                return None
            subscribed = subscribed_topics(member.metadata(self.protocol_name))
            if subscribed is None:
                return None
            topics |= subscribed
        return frozenset(topics)

    def consumes(self, topic: str) -> bool:
        return self.uses_consumer_protocol if self.subscribed is None else topic in self.subscribed

    def expiry_base_ms(self, committed: CommittedOffset) -> int | None:
        if self.protocol_type is None:
            return committed.commit_ms
        if self.state is GroupState.EMPTY:
            return committed.commit_ms if self.state_since_ms == NO_TIME_MS else self.state_since_ms
        if self.state is GroupState.STABLE and self.uses_consumer_protocol and self.subscribed is not None:
            return committed.commit_ms
        return None

    def joined(
        self,
        member_id: str,
        *,
        with_members: bool = False,
        skip_assignment: bool = False,
        leader_id: str | None = None,
    ) -> JoinResponse:
        """Build a member's response for the current generation."""
        members: tuple[JoinedMember, ...] = ()
        if with_members:
            name = self.protocol_name or ""
            members = tuple(
                JoinedMember(member.member_id, member.instance_id, member.metadata(name))
                for member in self.members.values()
            )
        return JoinResponse(
            member_id=member_id,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol_name,
            leader_id=leader_id or self.leader_id or "",
            skip_assignment=skip_assignment,
            members=members,
        )

    def listing(self) -> GroupListing:
        return GroupListing(group_id=self.group_id, protocol_type=self.protocol_type or "", state=self.state.value)

    def description(self) -> GroupDescription:
        """Describe the group; metadata and assignments are meaningful only in a stable group."""
        stable = self.state is GroupState.STABLE
        name = (self.protocol_name or "") if stable else ""
        return GroupDescription(
            group_id=self.group_id,
            state=self.state.value,
            protocol_type=self.protocol_type or "",
            protocol_name=name,
            generation=self.generation,
            members=tuple(
                MemberDescription(
                    member_id=member.member_id,
                    instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    metadata=member.metadata(name) if stable else b"",
                    assignment=member.assignment if stable else b"",
                )
                for member in self.members.values()
            ),
        )

    def _count_protocols(self, member: Member) -> None:
        self._support.update({name for name, _ in member.protocols})
        self.members_bytes += member.size_bytes

    def _uncount_protocols(self, member: Member) -> None:
        self._support.subtract({name for name, _ in member.protocols})
        self._support = +self._support
        self.members_bytes -= member.size_bytes
