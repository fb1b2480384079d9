"""Drives the group state machine without a loop or a broker: the log is a list, and the test controls the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, TypeVar
from uuid import UUID, uuid4

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord, Timers
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.group import Group, GroupState
from millstream.broker.groups.requests import (
    CommitRequest,
    CommitResult,
    FetchedOffsets,
    GroupLimits,
    JoinRequest,
    JoinResponse,
    LeaveResult,
    LeavingMember,
    MemberRef,
    PartitionCommit,
    SyncRequest,
    SyncResponse,
)
from millstream.broker.groups.shard import GroupShard
from millstream.core.errors import MemberIdRequired, MillstreamError
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryTopics

T = TypeVar("T")

GROUP = "group"
SESSION_MS = 10_000
REBALANCE_MS = 60_000
INITIAL_DELAY_MS = 3_000


class GroupHarness:
    """A shard of groups, its log and its clock."""

    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        self.limits = GroupLimits(
            **{
                "session_min_ms": 1,
                "session_max_ms": 1_800_000,
                "initial_delay_ms": INITIAL_DELAY_MS,
                "members_max": 100,
                "offsets_retention_ms": 7 * 24 * 3600 * 1000,
                **limits,
            }
        )
        self.topics: dict[str, UUID] = {"orders": uuid4(), "bills": uuid4()}
        self.log: list[StateRecord] = []
        self._suffixes = count(1)
        self.timers = Timers(self.clock)
        self.shard = self._new_shard()
        self.shard.loaded()

    def run(self, operation: Callable[[GroupShard], Outcome[T]]) -> Deferred[T]:
        """Carry out an operation as the runtime does; its records are in the log at once."""
        later: Deferred[T] = Deferred()
        try:
            records, response = operation(self.shard)
        except MillstreamError as error:
            later.refuse(error)
            return later
        self.append(records)
        if isinstance(response, Deferred):
            return response
        later.resolve(response)
        return later

    def append(self, records: Iterable[StateRecord]) -> None:
        for record in records:
            self.log.append(record)
            self.shard.replay(record)

    def advance_ms(self, milliseconds: int) -> None:
        """Advance the time, and run each timer when it is due."""
        end = self.clock.monotonic() + milliseconds / 1000
        while (deadline := self.timers.next_deadline) is not None and deadline <= end:
            self.clock.advance_ms(max(0, math.ceil((deadline - self.clock.monotonic()) * 1000)))
            for timer in self.timers.take_due(1):
                self.append(timer.action())
        self.clock.advance_ms(max(0, round((end - self.clock.monotonic()) * 1000)))

    def finish_joining(self, group_id: str = GROUP) -> None:
        """Wait for the initial delay of a new group, and no longer."""
        while self.group(group_id).state is GroupState.PREPARING:
            self.advance_ms(INITIAL_DELAY_MS // 10)

    def reload(self, *, lost: int = 0) -> None:
        """Reload the state from the log without the last `lost` records; waiting requests fail."""
        self.shard.unload()
        if lost:
            del self.log[-lost:]
        self.timers = Timers(self.clock)
        self.shard = self._new_shard()
        for record in self.log:
            self.shard.replay(record)
        self.shard.loaded()

    def group(self, group_id: str = GROUP) -> Group:
        """Return a group, which must exist."""
        group = self.shard.groups.get(group_id)
        if group is None:
            raise LookupError(group_id)
        return group

    def join(
        self,
        member_id: str = "",
        *,
        instance_id: str | None = None,
        protocols: tuple[tuple[str, bytes], ...] = (("range", b"r"),),
        protocol_type: str = "consumer",
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        version: int = 9,
        group_id: str = GROUP,
        may_describe: Callable[[str], bool] | None = None,
    ) -> Deferred[JoinResponse]:
        """Send a join request as a client of a version does."""
        request = JoinRequest(
            group_id=group_id,
            member_id=member_id,
            instance_id=instance_id,
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            protocol_type=protocol_type,
            protocols=protocols,
            supports_member_id_required=version >= 4,
            supports_skip_assignment=version >= 9,
            may_describe=may_describe,
        )
        return self.run(lambda shard: shard.join(request))

    def new_member(self, **options: Any) -> tuple[str, Deferred[JoinResponse]]:
        """Join without an id, then with the assigned id, as clients do."""
        first = self.join(**options)
        error = first.error
        if not isinstance(error, MemberIdRequired):
            raise AssertionError(f"expected to be given a member id, not {error!r}")
        return error.member_id, self.join(error.member_id, **options)

    def stable_group(self, members: int = 2, **options: Any) -> list[str]:
        """Create a stable group; return the ids of its members, the leader first."""
        joins = dict(self.new_member(**options) for _ in range(members))
        self.finish_joining()
        leader = next(iter(joins.values())).result().leader_id
        syncs = [self.sync(member_id, assignments={m: m.encode() for m in joins}) for member_id in joins]
        for sync in syncs:
            sync.result()
        return sorted(joins, key=lambda member_id: member_id != leader)

    def sync(
        self,
        member_id: str,
        *,
        generation: int | None = None,
        assignments: Mapping[str, bytes] | None = None,
        instance_id: str | None = None,
        protocol_name: str | None = None,
        group_id: str = GROUP,
    ) -> Deferred[SyncResponse]:
        """Request an assignment, or provide all of them; of the current generation by default."""
        request = SyncRequest(
            member=self._ref(member_id, generation, instance_id, group_id),
            protocol_name=protocol_name,
            assignments=assignments or {},
        )
        return self.run(lambda shard: shard.sync(request))

    def heartbeat(
        self, member_id: str, *, generation: int | None = None, instance_id: str | None = None, group_id: str = GROUP
    ) -> Deferred[None]:
        who = self._ref(member_id, generation, instance_id, group_id)
        return self.run(lambda shard: shard.heartbeat(who))

    def leave(self, *leavers: LeavingMember, group_id: str = GROUP) -> list[LeaveResult]:
        return self.run(lambda shard: shard.leave(group_id, leavers)).result()

    def commit(
        self,
        offset: int = 1,
        *,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        topic: str = "orders",
        partition: int = 0,
        metadata: str | None = None,
        retention_ms: int | None = None,
        group_id: str = GROUP,
        version: int = 9,
    ) -> Deferred[CommitResult]:
        """Commit one offset; from outside the group by default."""
        request = CommitRequest(
            member=MemberRef(group_id=group_id, member_id=member_id, instance_id=instance_id, generation=generation),
            topics={topic: (PartitionCommit(partition=partition, offset=offset, metadata=metadata),)},
            retention_ms=retention_ms,
            supports_unknown_group=version >= 9,
        )
        return self.run(lambda shard: shard.commit(request))

    def committed(self, topic: str = "orders", partition: int = 0, *, group_id: str = GROUP) -> int:
        """Return the offset that a group has committed, or -1."""
        fetched = self.run(lambda shard: shard.fetch(group_id, {topic: [partition]})).result()
        return fetched[topic][partition].offset

    def all_committed(self, group_id: str = GROUP) -> FetchedOffsets:
        return self.run(lambda shard: shard.fetch(group_id, None)).result()

    def _ref(self, member_id: str, generation: int | None, instance_id: str | None, group_id: str) -> MemberRef:
        group = self.shard.groups.get(group_id)
        current = -1 if group is None else group.generation
        return MemberRef(
            group_id=group_id,
            member_id=member_id,
            instance_id=instance_id,
            generation=current if generation is None else generation,
        )

    def _new_shard(self) -> GroupShard:
        return GroupShard(
            self.timers,
            limits=self.limits,
            clock=self.clock,
            topic_id_of=self.topics.get,
            topics=ConsumerTopics.of(MemoryTopics()),
            new_suffix=lambda: str(next(self._suffixes)),
        )
