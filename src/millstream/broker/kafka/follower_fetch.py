"""Fetch by a follower, versions 15 to 18: the basis of replication.

Fetch passes requests that name a replica to this module. It reads up to the end of the log, not only to the high
watermark, and its fetch offset shows the leader how far the follower has replicated. It is therefore accepted only from
the process that registered last as the node it names, and only for partitions of which that node has a replica. The
leader epoch must be the current one; a follower whose log has diverged gets the diverging epoch (KIP-595). Quotas do
not apply.

A fetch that finds nothing waits for an append. It also completes when only a high watermark has moved, a little
later, so that a busy follower learns of it with the records that follow (KIP-1166). Followers are served even when the
budget for bytes in flight is used up: producers that wait for `acks=all` may be using it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import ClientInfo, error_code
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Buffers, EventualResponse
from millstream.broker.net.response import Promise
from millstream.broker.replication.in_sync import MayJoin, any_replica
from millstream.broker.replication.partition import Partition
from millstream.broker.replication.shared_reads import SharedReads
from millstream.core.errors import MillstreamError, OffsetOutOfRange, ProtocolViolation
from millstream.core.ids import NO_OFFSET, NodeId, Offset
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.wire.replica_fetch import (
    CLOSED_SESSION_EPOCH,
    FIRST_SESSION_EPOCH,
    NO_SESSION,
    PartitionKey,
    ReplicaFetch,
    ReplicaPosition,
    ReplicaResponse,
    ReplicaResponses,
    next_session_epoch,
    read_replica_fetch,
    write_replica_responses,
)

_NEVER_SENT = Offset(-1)


@dataclass(slots=True, eq=False)
class FollowedPartition:
    position: ReplicaPosition
    partition: Partition | None = None
    """The partition whose appends notify the session."""
    sent_watermark: Offset = _NEVER_SENT
    sent_log_start: Offset = _NEVER_SENT


@dataclass(eq=False)
class FollowerSession:
    """The partitions that one node follows here."""

    node: NodeId
    session_id: int
    epoch: int = 1
    """The session epoch of the next request."""
    partitions: dict[PartitionKey, FollowedPartition] = field(default_factory=dict)
    unread: dict[PartitionKey, None] = field(default_factory=dict)
    """Partitions to read, in the order of their events."""
    moved: dict[PartitionKey, None] = field(default_factory=dict)
    """Partitions whose high watermark has moved."""
    waiting: _Wait | None = None

    def __len__(self) -> int:
        return len(self.partitions)

    # -- partition state ------------------------------------------------------------------------------------

    def appended(self, partition: Partition) -> None:
        """Wake the session: a partition has records to read."""
        self._record_partition(self.unread, partition)

    def advanced(self, partition: Partition) -> None:
        """React to an advanced high watermark or another leader."""
        self._record_partition(self.moved if partition.is_leader else self.unread, partition)

    def _record_partition(self, pending: dict[PartitionKey, None], partition: Partition) -> None:
        key = (partition.topic.topic_id, partition.index)
        if key in self.partitions:
            pending[key] = None
            self.wake()

    # -- follower state -------------------------------------------------------------------------------------

    def update(
        self, positions: Iterable[tuple[PartitionKey, ReplicaPosition]], forgotten: Iterable[PartitionKey]
    ) -> None:
        """Apply the changes of a request."""
        for key in forgotten:
            self._remove(key)
        for key, position in positions:
            followed = self.partitions.get(key)
            if followed is None:
                self.partitions[key] = FollowedPartition(position)
            else:
                followed.position = position
            self.unread[key] = None

    def listen(self, followed: FollowedPartition, partition: Partition) -> None:
        if followed.partition is not partition:
            self._stop_listening(followed)
            followed.partition = partition
            partition.listen(self)
            partition.listen_to_appends(self)

    def close(self) -> None:
        for key in tuple(self.partitions):
            self._remove(key)
        self.wake()

    def _remove(self, key: PartitionKey) -> None:
        self.unread.pop(key, None)
        self.moved.pop(key, None)
        followed = self.partitions.pop(key, None)
        if followed is not None:
            self._stop_listening(followed)

    def _stop_listening(self, followed: FollowedPartition) -> None:
        partition, followed.partition = followed.partition, None
        if partition is not None:
            partition.forget(self)
            partition.forget_appends(self)

    # -- waiting --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule another read of the waiting fetch, once for all events of this turn of the loop."""
        if self.waiting is not None:
            self.waiting.wake()


SESSIONS_MAX = 1000

WATERMARK_DELAY_S = 0.02
"""How long a fetch that only reports a new high watermark waits for records to send with it."""

BYTES_MIN = 1024 * 1024

PARTITIONS_PER_RESPONSE_MAX = 2000
"""The number of partitions read per response; the others follow in the next one."""

MAX_WAIT_S_MAX = 300.0

_UNREGISTERED = ReplicaResponse(ErrorCode.not_leader_or_follower, NO_OFFSET, NO_OFFSET, None, b"")
"""The response to a process that is not registered as the node it claims to be, as in Kafka (KIP-903)."""


class Partitions(Protocol):
    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        """Return one partition by the topic's id."""


class FollowerFetch:
    """Responds to the fetches of followers, each in its own session."""

    def __init__(
        self,
        partitions: Partitions,
        budget: Budget,
        *,
        bytes_max: int,
        new_id: Callable[[], int],
        may_follow: MayJoin = any_replica,
    ) -> None:
        self._partitions = partitions
        self._may_follow = may_follow
        self._budget = budget
        self._bytes_max = bytes_max
        self._new_id = new_id
        self._reads = SharedReads()
        self._sessions: OrderedDict[NodeId, FollowerSession] = OrderedDict()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def stop(self) -> None:
        """Respond to every waiting fetch, and let none wait from now on."""
        self._stopping = True
        for session in self._sessions.values():
            session.wake()

    def handle_frame(
        self, frame: memoryview, header: RequestHeader, client: ClientInfo | None = None
    ) -> EventualResponse:
        """Respond immediately if there is something to report, otherwise let the connection wait.

        A client that is known to be a node can follow only as that node.
        """
        fetch = read_replica_fetch(frame, header.body_at)
        if client is not None and client.rights is not None and client.rights.node_id not in (None, fetch.node):
            raise ProtocolViolation(f"node {client.rights.node_id} sent a fetch in the name of node {fetch.node}")
        if not self._may_follow(fetch.node, fetch.registration):
            return _encode(header, _unregistered_responses(fetch))
        if client is not None:
            client.count_as_follower()
        if fetch.is_repair:
            return _encode(header, ReplicaResponses(ErrorCode.none, NO_SESSION, self._read_for_repair(fetch)))
        session = self._session(fetch)
        if isinstance(session, ErrorCode):
            return _encode(header, ReplicaResponses(session, NO_SESSION))
        responses = self._read_pending(session, fetch)
        if fetch.max_wait_ms <= 0 or self.is_complete(session, responses):
            return self.respond(header, session, responses)
        if client is not None and client.presence.has_left:
            return self.respond(header, session, responses)
        wait = _Wait(self, header, fetch, session, responses)
        if client is not None:
            client.presence.on_leave(wait.finish)
        return wait

    def read_again(self, session: FollowerSession, fetch: ReplicaFetch) -> dict[PartitionKey, ReplicaResponse] | None:
        """Read again; None if the follower has opened another session on another connection."""
        return self._read_pending(session, fetch) if self._sessions.get(session.node) is session else None

    def is_complete(self, session: FollowerSession, responses: dict[PartitionKey, ReplicaResponse]) -> bool:
        """Whether to respond at once."""
        return bool(session.unread) or self._stopping or any(map(_is_urgent, responses.values()))

    # -- sessions -------------------------------------------------------------------------------------------

    def _session(self, fetch: ReplicaFetch) -> FollowerSession | ErrorCode:
        session = self._sessions.get(fetch.node)
        if fetch.session_epoch in (FIRST_SESSION_EPOCH, CLOSED_SESSION_EPOCH):
            session = self._open(fetch.node)
        elif session is None or session.session_id != fetch.session_id:
            return ErrorCode.fetch_session_id_not_found
        elif session.epoch != fetch.session_epoch:
            return ErrorCode.invalid_fetch_session_epoch
        else:
            if session.waiting is not None:
                # A follower sends no request before the previous response; if it does, both get a response.
                session.waiting.finish()
            session.epoch = next_session_epoch(session.epoch)
        session.update(fetch.positions.items(), fetch.forgotten)
        return session

    def _open(self, node: NodeId) -> FollowerSession:
        """Return a new session in the place of the one that the node had."""
        previous = self._sessions.pop(node, None)
        if previous is not None:
            previous.close()
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.popitem(last=False)[1].close()
        session = self._sessions[node] = FollowerSession(node, self._new_id())
        return session

    # -- reading --------------------------------------------------------------------------------------------

    def _read_pending(self, session: FollowerSession, fetch: ReplicaFetch) -> dict[PartitionKey, ReplicaResponse]:
        """Read the partitions with events, within the byte limits."""
        room = max(BYTES_MIN, self._budget.share_bytes)
        remaining = min(fetch.max_bytes, self._bytes_max, room)
        is_first = True
        responses: dict[PartitionKey, ReplicaResponse] = {}
        for key in tuple(islice(session.unread, PARTITIONS_PER_RESPONSE_MAX)):
            followed = session.partitions[key]
            # The position of the follower is recorded even if the byte limit is used up.
            response = self._read_partition(
                session, key, followed, fetch.registration, remaining, at_least_one=is_first
            )
            remaining -= len(response.records)
            is_first = is_first and not response.records
            if not _has_more(response, followed):
                del session.unread[key]
            if _has_changed(response, followed):
                responses[key] = response
        for key in tuple(session.moved):
            if key not in responses:
                self._read_watermark(session, key, responses)
        session.moved.clear()
        return responses

    def _read_partition(
        self,
        session: FollowerSession,
        key: PartitionKey,
        followed: FollowedPartition,
        registration: int,
        remaining: int,
        *,
        at_least_one: bool,
    ) -> ReplicaResponse:
        position = followed.position
        try:
            partition = followed.partition
            if partition is None or not partition.is_leader:
                # It may have been replaced or deleted, which the follower learns from the error.
                partition = self._partitions.partition_by_id(*key)
                session.listen(followed, partition)
            read = partition.read_for_follower(
                session.node,
                offset=position.offset,
                last_epoch=position.last_epoch,
                leader_epoch=position.leader_epoch,
                max_bytes=min(position.max_bytes, max(remaining, 0)),
                at_least_one=at_least_one,
                registration=registration,
                reads=self._reads,
            )
        except OffsetOutOfRange as error:
            return ReplicaResponse(ErrorCode.offset_out_of_range, NO_OFFSET, Offset(error.start), None, b"")
        except MillstreamError as error:
            return ReplicaResponse(error_code(error), NO_OFFSET, NO_OFFSET, None, b"")
        return ReplicaResponse(ErrorCode.none, read.high_watermark, read.log_start, read.diverging, read.records)

    def _read_for_repair(self, fetch: ReplicaFetch) -> dict[PartitionKey, ReplicaResponse]:
        """Read the range that a replica has lost, within the byte limits."""
        remaining = min(fetch.max_bytes, self._bytes_max, max(BYTES_MIN, self._budget.share_bytes))
        is_first = True
        responses: dict[PartitionKey, ReplicaResponse] = {}
        for key, position in fetch.positions.items():
            try:
                read = self._partitions.partition_by_id(*key).read_for_repair(
                    fetch.node,
                    offset=position.offset,
                    leader_epoch=position.last_epoch,
                    max_bytes=min(position.max_bytes, remaining),
                    at_least_one=is_first,
                )
            except MillstreamError as error:
                responses[key] = ReplicaResponse(error_code(error), NO_OFFSET, NO_OFFSET, None, b"")
            else:
                responses[key] = ReplicaResponse(
                    ErrorCode.none, read.high_watermark, read.log_start, None, read.records
                )
                remaining = max(0, remaining - len(read.records))
                is_first = is_first and not read.records
        return responses

    def _read_watermark(
        self, session: FollowerSession, key: PartitionKey, responses: dict[PartitionKey, ReplicaResponse]
    ) -> None:
        followed = session.partitions[key]
        partition = followed.partition
        if partition is None or not partition.is_leader:
            return
        response = ReplicaResponse(ErrorCode.none, partition.high_watermark, partition.log_start, None, b"")
        if partition.leader_epoch == followed.position.leader_epoch and _has_changed(response, followed):
            responses[key] = response

    # -- responding -----------------------------------------------------------------------------------------

    def respond(
        self, header: RequestHeader, session: FollowerSession, responses: dict[PartitionKey, ReplicaResponse]
    ) -> Buffers:
        """Encode a response, and remember what the follower learns from it."""
        for key, response in responses.items():
            followed = session.partitions.get(key)
            if followed is not None:
                followed.sent_watermark = response.high_watermark
                followed.sent_log_start = response.log_start
        return _encode(header, ReplicaResponses(ErrorCode.none, session.session_id, responses))


class _Wait(Promise):
    """A fetch that waits until there is something to report or its wait ends; what is not urgent waits a little.

    It is not a task: followers fetch so often that the cost of a task would be measurable.
    """

    __slots__ = (
        "_deadline",
        "_fetch",
        "_followers",
        "_header",
        "_is_wake_scheduled",
        "_responses",
        "_session",
        "_timer",
    )

    def __init__(
        self,
        followers: FollowerFetch,
        header: RequestHeader,
        fetch: ReplicaFetch,
        session: FollowerSession,
        responses: dict[PartitionKey, ReplicaResponse],
    ) -> None:
        super().__init__()
        self._followers = followers
        self._header = header
        self._fetch = fetch
        self._session = session
        self._responses = responses
        self._is_wake_scheduled = False
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + min(fetch.max_wait_ms / 1000, MAX_WAIT_S_MAX)
        self._timer = loop.call_at(self._deadline, self.finish)
        if responses:
            self._shorten_wait()
        session.waiting = self

    def wake(self) -> None:
        """Schedule another read after all events of this turn of the loop."""
        if not self._is_wake_scheduled:
            self._is_wake_scheduled = True
            asyncio.get_running_loop().call_soon(self._read_again)

    def _read_again(self) -> None:
        self._is_wake_scheduled = False
        if self.is_resolved:
            return
        responses = self._followers.read_again(self._session, self._fetch)
        if responses is None:
            self._respond(_encode(self._header, ReplicaResponses(ErrorCode.fetch_session_id_not_found, NO_SESSION)))
            return
        self._responses.update(responses)
        if self._followers.is_complete(self._session, self._responses):
            self._respond(self._followers.respond(self._header, self._session, self._responses))
        elif self._responses:
            self._shorten_wait()

    def _shorten_wait(self) -> None:
        """Wait only briefly for records to send along."""
        loop = asyncio.get_running_loop()
        due = loop.time() + WATERMARK_DELAY_S
        if due < self._deadline:
            self._deadline = due
            self._timer.cancel()
            self._timer = loop.call_at(due, self.finish)

    def finish(self) -> None:
        if self.is_resolved:
            return
        responses = self._followers.read_again(self._session, self._fetch)
        if responses is None:
            self._respond(_encode(self._header, ReplicaResponses(ErrorCode.fetch_session_id_not_found, NO_SESSION)))
        else:
            self._responses.update(responses)
            self._respond(self._followers.respond(self._header, self._session, self._responses))

    def _respond(self, buffers: Buffers) -> None:
        self._timer.cancel()
        if self._session.waiting is self:
            self._session.waiting = None
        self.resolve(buffers)


def _has_changed(response: ReplicaResponse, followed: FollowedPartition) -> bool:
    return (
        _is_urgent(response)
        or response.high_watermark != followed.sent_watermark
        or response.log_start != followed.sent_log_start
    )


def _has_more(response: ReplicaResponse, followed: FollowedPartition) -> bool:
    """Whether the partition has records for the follower that did not fit into the response."""
    position, partition = followed.position, followed.partition
    return (
        not _is_urgent(response)
        and partition is not None
        and position.max_bytes > 0
        and position.offset < partition.log.end_offset
    )


def _is_urgent(response: ReplicaResponse) -> bool:
    """Whether the follower has to act on the response, not only to record a high watermark."""
    return bool(response.records) or response.code != ErrorCode.none or response.diverging is not None


def _unregistered_responses(fetch: ReplicaFetch) -> ReplicaResponses:
    """Refuse a session of an earlier registration; an empty request in it would otherwise never wait."""
    if fetch.session_epoch not in (FIRST_SESSION_EPOCH, CLOSED_SESSION_EPOCH):
        return ReplicaResponses(ErrorCode.fetch_session_id_not_found, NO_SESSION)
    return ReplicaResponses(ErrorCode.none, NO_SESSION, dict.fromkeys(fetch.positions, _UNREGISTERED))


def _encode(header: RequestHeader, responses: ReplicaResponses) -> Buffers:
    return write_replica_responses(header.version, header.correlation_id, responses)
