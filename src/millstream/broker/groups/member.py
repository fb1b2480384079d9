"""A member of a classic group, and its parked requests."""

from __future__ import annotations

from collections.abc import Collection

from millstream.broker.coordination.state_machine import Deferred
from millstream.broker.groups.records import StoredMember
from millstream.broker.groups.requests import Joined, JoinRequest, Synced
from millstream.core.errors import MillstreamError, RebalanceInProgress

MEMBER_BYTES = 128
"""The memory of a member apart from its metadata."""


def estimated_bytes(client_id: str, instance_id: str | None, protocols: tuple[tuple[str, bytes], ...]) -> int:
    """Estimate the memory and log space that a member takes; its id repeats the client id."""
    named = 2 * (len(client_id) + len(instance_id or ""))
    return MEMBER_BYTES + named + sum(len(name) + len(metadata) for name, metadata in protocols)


class Member:
    """One consumer in a group."""

    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_new",
        "join_reply",
        "member_id",
        "protocol_type",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
        "sync_reply",
    )

    def __init__(
        self,
        member_id: str,
        *,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocol_type: str,
        protocols: tuple[tuple[str, bytes], ...],
        assignment: bytes = b"",
        is_new: bool = False,
    ) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.session_timeout_ms = session_timeout_ms
        self.protocol_type = protocol_type
        self.protocols = protocols
        self.assignment = assignment
        # A new member has no session yet, so its parked join request does not keep it alive forever.
        self.is_new = is_new
        self.join_reply: Deferred[Joined] | None = None
        self.sync_reply: Deferred[Synced] | None = None

    @classmethod
    def joining(cls, member_id: str, request: JoinRequest) -> Member:
        """Create the member that a join request announces."""
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
        """Restore a member from the log, which has only the chosen protocol."""
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
        """Return the stored form of the member."""
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
        return self.join_reply is not None

    @property
    def size_bytes(self) -> int:
        """Estimate the memory and log space that the member takes."""
        return estimated_bytes(self.client_id, self.instance_id, self.protocols)

    def metadata(self, protocol_name: str) -> bytes:
        """Return the member's metadata for one protocol."""
        return next((metadata for name, metadata in self.protocols if name == protocol_name), b"")

    def vote(self, candidates: Collection[str]) -> str:
        """Return the member's preferred protocol among those that all support."""
        return next(name for name, _ in self.protocols if name in candidates)

    def is_alive_without_heartbeat(self) -> bool:
        """Return whether a parked request replaces heartbeats, which the client does not send while it waits."""
        return not self.is_new and (self.join_reply is not None or self.sync_reply is not None)

    def park_sync(self, reply: Deferred[Synced]) -> None:
        """Park a sync request until the leader sends the assignment; it replaces an older one of the member."""
        self.refuse_sync(RebalanceInProgress("a later request of the same member replaced this one"))
        self.sync_reply = reply

    def answer_sync(self, answer: Synced) -> bool:
        """Answer the parked sync request; return whether there was one."""
        reply, self.sync_reply = self.sync_reply, None
        if reply is not None:
            reply.resolve(answer)
        return reply is not None

    def refuse_sync(self, error: MillstreamError) -> bool:
        """Refuse the parked sync request; return whether there was one."""
        reply, self.sync_reply = self.sync_reply, None
        if reply is not None:
            reply.refuse(error)
        return reply is not None
