"""The state machine of one partition of `__consumer_offsets`: its classic groups, and the offsets of all groups.

Groups of the newer protocol are in `broker/groups/consumer/shard.py`, which handles their requests. Every public
operation is a plain function of the state that returns the records to append and the response, now or later. Nothing
here reads a clock that was not given to it, waits, or does I/O.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice
from typing import Final
from uuid import UUID

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord, Timers
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.records import ConsumerKey, read_consumer_key
from millstream.broker.groups.consumer.shard import ConsumerShard, ConsumerTopics
from millstream.broker.groups.group import Group, GroupState, Member, estimated_bytes
from millstream.broker.groups.offsets import Offsets, Registry, TopicIds
from millstream.broker.groups.rebalance import Rebalance, Records
from millstream.broker.groups.records import (
    NO_TIME_MS,
    CommittedOffset,
    GroupKey,
    OffsetKey,
    StoredGroup,
    group_record,
    group_tombstone,
    offset_record,
    offset_tombstone,
    read_group,
    read_key,
    read_offset,
    stored_group_record,
)
from millstream.broker.groups.requests import (
    CommitRequest,
    CommitResult,
    ConsumerHeartbeat,
    FetchedOffsets,
    GroupDescription,
    GroupLimits,
    GroupListing,
    HeartbeatResult,
    JoinRequest,
    JoinResponse,
    LeaveResult,
    LeavingMember,
    MemberRef,
    PartitionCommit,
    SyncRequest,
    SyncResponse,
)
from millstream.broker.groups.share.group import ShareKey, read_share_key
from millstream.broker.groups.share.shard import ShareShard
from millstream.broker.groups.transactional_offsets import (
    AsRecord,
    MarkerKey,
    PendingKey,
    Producer,
    TransactionalOffsets,
    pending_tombstone,
    read_pending_key,
)
from millstream.core.clock import Clock
from millstream.core.errors import (
    BatchTooLarge,
    GroupFull,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    MetadataTooLarge,
    MillstreamError,
    NotCoordinator,
    RebalanceInProgress,
    StaleMemberEpoch,
    SubscribedToTopic,
    UnknownGroup,
    UnknownMember,
)

JoinOutcome = Outcome[JoinResponse]


def random_suffix() -> str:
    return str(uuid.uuid4())


class Join:
    def __init__(
        self, rebalance: Rebalance, limits: GroupLimits, *, new_suffix: Callable[[], str] = random_suffix
    ) -> None:
        self._rebalance = rebalance
        self._limits = limits
        self._new_suffix = new_suffix

    def run(self, group: Group, request: JoinRequest) -> JoinOutcome:
        """Handle a join request; the response is usually sent later, with the next generation."""
        if not self._has_room(group, request):
            return self._refuse_full(group, request)
        if not group.supports(request.protocol_type, {name for name, _ in request.protocols}):
            raise InconsistentProtocol(
                f"the members of group {group.group_id!r} know none of the protocols that {request.client_id!r} offers"
            )
        if not request.member_id:
            return self._new_member(group, request)
        if request.member_id in group.pending_members and request.instance_id is None:
            return self._add_member(group, request.member_id, request)
        member = group.check_member(request.member_id, request.instance_id)
        return self._rejoin(group, member, request)

    def _has_room(self, group: Group, request: JoinRequest) -> bool:
        member = group.members.get(request.member_id)
        added_bytes = estimated_bytes(request.client_id, request.instance_id, request.protocols)
        known_bytes = 0 if member is None else member.size_bytes
        if group.members_bytes - known_bytes + added_bytes > self._limits.members_bytes_max:
            return False
        if not request.member_id and len(group.pending_members) >= self._limits.members_max:
            return False
        if member is None and len(group.members) >= 2 * self._limits.members_max:
            # Static members that do not return keep their places for a while, but not forever.
            return False
        if group.is_in(GroupState.PREPARING):
            # Parked requests are counted, not members: if the limit was lowered, the last to rejoin are refused.
            waits = member is not None and member.awaits_join
            return waits or group.awaiting_join < self._limits.members_max
        if group.is_in(GroupState.STABLE, GroupState.COMPLETING):
            known = member is not None or self._replaces_static(group, request)
            return known or len(group.members) < self._limits.members_max
        return True

    def _refuse_full(self, group: Group, request: JoinRequest) -> JoinOutcome:
        """Refuse a member because the group is full; remove it if it was a member, so that the others do not wait."""
        later: Deferred[JoinResponse] = Deferred.refused(
            GroupFull(f"group {group.group_id!r} has reached its maximum size of {self._limits.members_max} members")
        )
        if request.member_id not in group.members:
            return [], later
        self._rebalance.remove(group, request.member_id, UnknownMember("the group has reached its maximum size"))
        return self._rebalance.rebalance_after_leaving(group, f"no room for member {request.member_id}"), later

    def _replaces_static(self, group: Group, request: JoinRequest) -> bool:
        return not request.member_id and request.instance_id in group.static_members

    def _new_member(self, group: Group, request: JoinRequest) -> JoinOutcome:
        if request.instance_id is not None:
            new_id = f"{request.instance_id}-{self._new_suffix()}"
            old_id = group.static_members.get(request.instance_id)
            if old_id is not None:
                return self._replace_static(group, old_id, new_id, request)
            return self._add_member(group, new_id, request)
        new_id = f"{request.client_id}-{self._new_suffix()}"
        if request.supports_member_id_required:
            # The id is assigned before the member joins, so that a client that gives up leaves no member behind.
            self._rebalance.keep_pending(group, new_id, request.session_timeout_ms)
            return [], Deferred.refused(MemberIdRequired("join again with the assigned member id", member_id=new_id))
        return self._add_member(group, new_id, request)

    def _add_member(self, group: Group, member_id: str, request: JoinRequest) -> JoinOutcome:
        if group.is_in(GroupState.PREPARING) and group.previous_state is GroupState.EMPTY:
            group.member_added = True
        member = Member.joining(member_id, request)
        later: Deferred[JoinResponse] = Deferred()
        group.add(member, later)
        # A new member sends no heartbeats while it waits, and a client that gave up looks the same: it has to repeat
        # its request from time to time.
        self._rebalance.keep_alive(group, member, self._limits.new_member_ms)
        return self._rebalance.begin_or_complete(group, f"member {member_id} joins"), later

    def _rejoin(self, group: Group, member: Member, request: JoinRequest) -> JoinOutcome:
        unchanged = member.protocols == request.protocols
        leads = member.member_id == group.leader_id
        if group.is_in(GroupState.COMPLETING) and unchanged:
            # The member did not receive its response, so it is sent again.
            return [], group.joined(member.member_id, with_members=leads)
        if group.is_in(GroupState.STABLE) and unchanged and not leads:
            return [], group.joined(member.member_id)
        if group.is_in(GroupState.EMPTY, GroupState.DEAD):
            raise UnknownMember(f"group {group.group_id!r} has no member {member.member_id!r}")
        # A leader that joins again requests a rebalance: partitions may have been added, unknown to its metadata.
        later = self._update_member(group, member, request)
        return self._rebalance.begin_or_complete(group, f"member {member.member_id} joins again"), later

    def _update_member(self, group: Group, member: Member, request: JoinRequest) -> Deferred[JoinResponse]:
        group.update(member, request.protocols)
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.session_timeout_ms = request.session_timeout_ms
        later: Deferred[JoinResponse] = Deferred()
        group.park_join(member, later)
        return later

    def _replace_static(self, group: Group, old_id: str, new_id: str, request: JoinRequest) -> JoinOutcome:
        old_leader_id = group.leader_id
        self._rebalance.forget_session(group, old_id)
        member = group.replace_static(old_id, new_id)
        later = self._update_member(group, member, request)
        self._rebalance.keep_alive(group, member)
        if group.is_in(GroupState.STABLE):
            if group.select_protocol() == group.protocol_name:
                return self._keep_generation(group, member, request, old_leader_id), later
            reason = f"static member {new_id} changed the protocol"
            return self._rebalance.begin_or_complete(group, reason), later
        if group.is_in(GroupState.COMPLETING):
            # The leader may be assigning partitions to the old id right now, which would leave the new one without any.
            return self._rebalance.prepare(group, f"static member {new_id} took the place of {old_id}"), later
        return self._rebalance.complete_join_if_all(group), later

    def _keep_generation(
        self, group: Group, member: Member, request: JoinRequest, old_leader_id: str | None
    ) -> Records:
        """Keep the generation of a static member that returned unchanged; only its new id is written."""
        leads = member.member_id == group.leader_id
        if request.supports_skip_assignment:
            result = group.joined(member.member_id, with_members=leads, skip_assignment=leads)
        else:
            # An older client must not believe that it leads, or it would assign partitions again.
            result = group.joined(member.member_id, leader_id=old_leader_id)
        group.respond_to_join(member, result)
        assignments = {known.member_id: known.assignment for known in group.members.values()}
        return [group_record(group.group_id, group.stored(assignments))]


_SWEEP: Final = "sweep"
_SWEEP_PAUSE_MS: Final = 10
_SWEEP_OFFSETS: Final = 2000
"""The approximate number of offsets that one step of a sweep examines."""


class GroupShard:
    def __init__(
        self,
        timers: Timers,
        *,
        limits: GroupLimits,
        clock: Clock,
        topic_id_of: TopicIds,
        topics: ConsumerTopics,
        new_suffix: Callable[[], str] = random_suffix,
    ) -> None:
        self._timers = timers
        self._limits = limits
        self._clock = clock
        self._topic_id_of = topic_id_of
        self._offsets = Offsets(topic_id_of)
        self.transactional = TransactionalOffsets(clock)
        self._groups = Registry(self._offsets, groups_max=limits.groups_max)
        self._rebalance = Rebalance(self._groups, timers, limits, clock)
        self._join = Join(self._rebalance, limits, new_suffix=new_suffix)
        self.consumers = ConsumerShard(
            self._groups,
            timers,
            limits=limits,
            clock=clock,
            topics=topics,
            new_suffix=new_suffix,
            rebalance_classic=self._rebalance_downgraded,
        )
        self.shares = ShareShard(
            timers,
            limits=limits,
            topics=topics.topics,
            is_taken=lambda group_id: self._group_using(group_id) is not None,
            check_room=lambda: self._groups.check_room(len(self.shares)),
        )
        self._loaded = False
        self._to_sweep: list[str] = []

    @property
    def groups(self) -> Registry:
        return self._groups

    def consumer_heartbeat(self, request: ConsumerHeartbeat) -> Outcome[HeartbeatResult]:
        self._check_not_shared(request.group_id)
        return self.consumers.heartbeat(request)

    # Membership

    def committed(self) -> Iterable[tuple[str, str, int, int]]:
        """Return every committed offset as group, topic, partition and offset; read-only."""
        for key, committed in self._offsets.current():
            yield key.group_id, key.topic, key.partition, committed.offset

    def offsets_of_transactional_groups(self, topics: Mapping[str, UUID | None]) -> Iterable[tuple[OffsetKey, int]]:
        return self._offsets.of_transactional_groups(topics)

    def join(self, request: JoinRequest) -> Outcome[JoinResponse]:
        consumers = self.consumers.get_with_members(request.group_id)
        if consumers is not None:
            return self.consumers.join(consumers, request)
        if self.shares.get(request.group_id) is not None:
            raise InconsistentProtocol(f"{request.group_id!r} is a share group; its members are share consumers")
        group = self._groups.get(request.group_id)
        replaced = self.consumers.delete_if_empty(request.group_id)
        if group is None:
            if request.member_id:
                raise UnknownMember(f"group {request.group_id!r} has no member {request.member_id!r}")
            if not replaced:
                self._groups.check_room()
            group = self._groups.put(Group(request.group_id, now_ms=self._clock.now_ms()))
        try:
            records, response = self._join.run(group, request)
        except MillstreamError:
            if replaced:
                self._groups.drop(request.group_id)
            raise
        finally:
            self._groups.drop_if_unused(group)
        return [*replaced, *records], response

    def sync(self, request: SyncRequest) -> Outcome[SyncResponse]:
        """Return a member's assignment, or accept the assignments from the leader."""
        who = request.member
        consumers = self.consumers.get_with_members(who.group_id)
        if consumers is not None:
            return self.consumers.classic.sync(consumers, request)
        group = self._group_with_members(who)
        member = group.check_member(who.member_id, who.instance_id)
        _check_generation(group, who.generation)
        _check_protocol(group, request)
        if group.is_in(GroupState.PREPARING):
            raise RebalanceInProgress(f"group {group.group_id!r} is rebalancing")
        self._rebalance.synced(group, member.member_id)
        if group.is_in(GroupState.STABLE):
            return [], _sync_response(group, member)
        deferred: Deferred[SyncResponse] = Deferred()
        member.park_sync(deferred)
        if member.member_id != group.leader_id:
            return [], deferred
        return self._store_assignment(group, member, dict(request.assignments)), deferred

    def heartbeat(self, who: MemberRef) -> Outcome[None]:
        consumers = self.consumers.get_with_members(who.group_id)
        if consumers is not None:
            return self.consumers.classic.heartbeat(consumers, who)
        group = self._group_with_members(who)
        member = group.check_member(who.member_id, who.instance_id)
        _check_generation(group, who.generation)
        self._rebalance.keep_alive(group, member)
        if group.is_in(GroupState.PREPARING):
            return [], Deferred.refused(RebalanceInProgress(f"group {group.group_id!r} is rebalancing"))
        return [], None

    def leave(self, group_id: str, leavers: Iterable[LeavingMember]) -> Outcome[list[LeaveResult]]:
        consumers = self.consumers.get(group_id)
        if consumers is not None:
            return self.consumers.classic.leave(consumers, leavers)
        group = self._groups.get(group_id)
        if group is None:
            unknown = UnknownMember(f"there is no group {group_id!r}")
            return [], [LeaveResult(leaver, unknown) for leaver in leavers]
        results = [self._remove_member(group, leaver) for leaver in leavers]
        left_members = [
            result.leaver.member_id or result.leaver.instance_id or "" for result in results if result.error is None
        ]
        records = (
            self._rebalance.rebalance_after_leaving(group, f"{', '.join(left_members)} left") if left_members else []
        )
        self._groups.drop_if_unused(group)
        return records, results

    # Offsets

    def commit(self, request: CommitRequest) -> Outcome[CommitResult]:
        """Store offsets. The state changes when the records are replayed, not before."""
        self._check_not_shared(request.member.group_id)
        self._check_commit(request)
        return self._commit_records(request, offset_record)

    def commit_in_transaction(self, request: CommitRequest, producer: Producer) -> Outcome[CommitResult]:
        """Store offsets that take effect when the transaction commits."""
        self._check_not_shared(request.member.group_id)
        self._check_transactional_commit(request)
        return self._commit_records(request, self.transactional.recorder(producer))

    def _commit_records(self, request: CommitRequest, as_record: AsRecord) -> Outcome[CommitResult]:
        now_ms = self._clock.now_ms()
        expire_ms = NO_TIME_MS if request.retention_ms is None else now_ms + request.retention_ms
        records: Records = []
        result: dict[str, dict[int, MillstreamError | None]] = {}
        for topic, commits in request.topics.items():
            topic_id = self._topic_id_of(topic)
            by_partition = result[topic] = {}
            for commit in commits:
                error = self._check_metadata(commit)
                by_partition[commit.partition] = error
                if error is None:
                    key = OffsetKey(request.member.group_id, topic, commit.partition)
                    before = self._offsets.get(key)
                    committed = CommittedOffset(
                        offset=commit.offset,
                        leader_epoch=commit.leader_epoch,
                        metadata=commit.metadata or "",
                        commit_ms=now_ms,
                        expire_ms=expire_ms,
                        topic_id=topic_id,
                        is_transactional=before is not None and before.is_transactional,
                    )
                    records.append(as_record(key, committed))
        return records, result

    def fetch(
        self,
        group_id: str,
        partitions: Mapping[str, Iterable[int]] | None,
        *,
        member_id: str | None = None,
        epoch: int = -1,
        require_stable: bool = True,
    ) -> Outcome[FetchedOffsets]:
        """Return committed offsets of some partitions, or of all if `partitions` is None.

        With `require_stable`, offsets that an open transaction is about to change are marked, and all includes those
        whose first offset it is about to commit; otherwise, pending offsets are ignored.
        """
        self._check_not_shared(group_id)
        self.consumers.check_fetch(group_id, member_id, epoch)
        fetched = self._offsets.fetch_all(group_id) if partitions is None else self._offsets.fetch(group_id, partitions)
        if not require_stable:
            return [], fetched
        pending = self.transactional.pending
        return [], pending.with_stability(
            group_id, pending.with_uncommitted(group_id, fetched) if partitions is None else fetched
        )

    def delete_offsets(
        self, group_id: str, unwanted: Mapping[str, Iterable[int]]
    ) -> Outcome[dict[str, dict[int, MillstreamError | None]]]:
        """Delete offsets, except those of topics that the group consumes."""
        group = self._require(group_id)
        if isinstance(group, Group) and not group.is_empty and not group.uses_consumer_protocol:
            raise GroupNotEmpty(f"group {group_id!r} has members whose topics are unknown")
        records: Records = []
        result: dict[str, dict[int, MillstreamError | None]] = {}
        for topic, partitions in unwanted.items():
            consumed = SubscribedToTopic(f"group {group_id!r} consumes {topic!r}") if group.consumes(topic) else None
            result[topic] = dict.fromkeys(partitions, consumed)
            keys = [OffsetKey(group_id, topic, partition) for partition in result[topic]]
            if consumed is None:
                records += [offset_tombstone(key) for key in keys if self._offsets.get(key) is not None]
        return records, result

    # Groups

    def list_groups(self) -> Outcome[list[GroupListing]]:
        classic = (group.listing() for group in self._groups)
        return [], [*classic, *self.consumers.listings(), *self.shares.listings()]

    def describe(self, group_id: str) -> Outcome[GroupDescription]:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownGroup(f"there is no classic group {group_id!r}")
        return [], group.description()

    def delete(self, group_id: str) -> Outcome[bool]:
        """Delete an empty group, a limited number of offsets at a time; return False if more are left."""
        share_group = self.shares.get(group_id)
        group = share_group or self._require(group_id)
        if not group.is_empty:
            raise GroupNotEmpty(f"group {group_id!r} has members")
        if share_group is not None:
            return self.shares.deletion_records(share_group), True
        places = list(self._offsets.of_group(group_id))
        limit = self._limits.tombstones_max
        records = [offset_tombstone(OffsetKey(group_id, *place)) for place in places[:limit]]
        done = len(places) <= limit
        if done:
            records += map(pending_tombstone, self.transactional.pending.of_group(group_id))
            records += (
                [group_tombstone(group_id)] if isinstance(group, Group) else self.consumers.delete_if_empty(group_id)
            )
        return records, done

    # The fold

    def replay(self, record: StateRecord) -> None:
        key = read_key(record.key)
        if isinstance(key, OffsetKey):
            self._replay_offset(key, record)
        elif isinstance(key, GroupKey):
            self._replay_group(key.group_id, record)
        else:
            self._replay_other(record)

    def loaded(self) -> None:
        """Restart the sessions of all members, and the sweep for expired offsets."""
        self._loaded = True
        for group in self._groups:
            self._rebalance.restored(group)
        self.consumers.restored()
        self.shares.restored()
        self.sweep_soon()

    def unload(self) -> None:
        """Refuse all parked requests with NOT_COORDINATOR."""
        moved = NotCoordinator("the state of this group is read back from the log")
        for group in self._groups:
            for member in group.members.values():
                group.refuse_join(member, moved)
                member.refuse_sync(moved)
            group.move_to(GroupState.DEAD, self._clock.now_ms())

    def durable_keys(self) -> list[Hashable]:
        stored = [GroupKey(group.group_id) for group in self._groups if group.stored_value is not None]
        pending = self.transactional.pending.durable_keys()
        groups = (*self.consumers.durable_keys(), *self.shares.durable_keys())
        return [*stored, *groups, *self._offsets.all_keys(), *pending]

    def durable_record(self, key: Hashable) -> StateRecord | None:
        if isinstance(key, GroupKey):
            group = self._groups.get(key.group_id)
            value = None if group is None else group.stored_value
            return None if value is None else stored_group_record(key.group_id, value)
        if isinstance(key, OffsetKey):
            committed = self._offsets.get(key)
            return None if committed is None else offset_record(key, committed)
        if isinstance(key, PendingKey | MarkerKey):
            return self.transactional.pending.durable_record(key)
        if isinstance(key, ShareKey):
            return self.shares.durable_record(key)
        return self.consumers.durable_record(key) if isinstance(key, ConsumerKey) else None

    def sweep_soon(self) -> None:
        """Sweep all groups for offsets that have expired or whose topic was deleted."""
        self._to_sweep = self._groups.ids()
        self._timers.schedule(_SWEEP, 0, self._sweep, pure=True)

    # Internals

    def _group_with_members(self, who: MemberRef) -> Group:
        group = self._groups.get(who.group_id)
        if group is None or group.is_in(GroupState.EMPTY):
            raise UnknownMember(f"group {who.group_id!r} has no member {who.member_id!r}")
        return group

    def _group_using(self, group_id: str) -> Group | ConsumerGroup | None:
        """Return the classic or consumer group that uses an id."""
        return self._groups.get(group_id) or self.consumers.get(group_id)

    def _require(self, group_id: str) -> Group | ConsumerGroup:
        group = self._group_using(group_id)
        if group is None:
            raise UnknownGroup(f"there is no group {group_id!r}")
        return group

    def _store_assignment(self, group: Group, leader: Member, assignments: dict[str, bytes]) -> Records:
        """Store the leader's assignment; members get a response when the record is replayed."""
        record = group_record(group.group_id, group.stored(assignments))
        size_bytes = len(record.value or b"")
        if size_bytes > self._limits.generation_bytes_max:
            leader.refuse_sync(BatchTooLarge(f"a generation of {size_bytes} bytes is too large to be kept"))
            return self._rebalance.prepare(group, "the assignment is too large to be kept")
        return [record]

    def _remove_member(self, group: Group, leaver: LeavingMember) -> LeaveResult:
        left = UnknownMember(f"the member left group {group.group_id!r}")
        member_id = leaver.member_id
        if not member_id and leaver.instance_id in group.static_members:
            # An operator removes a static member by its instance id; its current member id is internal.
            member_id = group.static_members[leaver.instance_id]
        elif member_id not in group.pending_members:
            try:
                group.check_member(member_id, leaver.instance_id)
            except MillstreamError as error:
                return LeaveResult(leaver, error)
        self._rebalance.remove(group, member_id, left)
        return LeaveResult(leaver)

    def _check_not_shared(self, group_id: str) -> None:
        if self.shares.get(group_id) is not None:
            raise UnknownGroup(f"{group_id!r} is a share group, which commits no offsets")

    def _check_commit(self, request: CommitRequest) -> None:
        who = request.member
        consumers = self.consumers.get(who.group_id)
        if consumers is not None:
            self.consumers.check_commit(consumers, request)
            return
        group = self._groups.get(who.group_id)
        if group is None:
            if who.generation < 0:
                self._groups.check_room()
                return
            message = f"there is no group {who.group_id!r}"
            raise UnknownGroup(message) if request.supports_unknown_group else IllegalGeneration(message)
        if who.generation < 0 and group.is_in(GroupState.EMPTY):
            return
        if who.generation < 0 and not who.member_id and who.instance_id is None:
            raise UnknownMember(f"group {who.group_id!r} has members; only they can commit its offsets")
        member = group.check_member(who.member_id, who.instance_id)
        _check_generation(group, who.generation)
        if group.is_in(GroupState.COMPLETING):
            raise RebalanceInProgress(f"group {group.group_id!r} is rebalancing")
        self._rebalance.keep_alive(group, member)

    def _check_transactional_commit(self, request: CommitRequest) -> None:
        """Check a transactional commit like other commits, except that producers of old clients name no member, and a
        rebalance does not block them.
        """
        who = request.member
        if who.generation < 0 and not who.member_id and who.instance_id is None:
            return
        try:
            self._check_commit(request)
        except RebalanceInProgress:
            return
        except (StaleMemberEpoch, UnknownGroup) as error:
            raise IllegalGeneration(str(error)) from None

    def _check_metadata(self, commit: PartitionCommit) -> MillstreamError | None:
        limit = self._limits.offset_metadata_max
        if len(commit.metadata or "") <= limit:
            return None
        return MetadataTooLarge(f"offset metadata is limited to {limit} characters")

    def _replay_other(self, record: StateRecord) -> None:
        pending_key = read_pending_key(record.key)
        if pending_key is not None:
            self.transactional.pending.replay(pending_key, record)
            return
        consumer_key = read_consumer_key(record.key)
        if consumer_key is not None:
            self.consumers.replay(consumer_key, record)
            return
        share_key = read_share_key(record.key)
        if share_key is not None:
            self.shares.replay(share_key, record)

    def _replay_offset(self, key: OffsetKey, record: StateRecord) -> None:
        group = self._groups.get(key.group_id)
        if record.value is not None:
            self._offsets.put(key, read_offset(record))
            # A consumer that assigns partitions itself has a group without protocol and members.
            self._groups.keep_owner(key.group_id)
            return
        self._offsets.remove(key)
        if group is not None:
            self._groups.drop_if_unused(group)

    def _replay_group(self, group_id: str, record: StateRecord) -> None:
        group = self._groups.get(group_id)
        if record.value is None:
            if group is not None:
                self._rebalance.forget(group)
                group.refuse_all(RebalanceInProgress(f"group {group_id!r} is deleted or becomes a consumer group"))
                self._drop_stored(group)
            return
        stored = read_group(record)
        if group is None or not self._loaded:
            group = self._groups.put(Group.restored(group_id, stored))
        elif group.is_in(GroupState.COMPLETING) and stored.generation == group.generation:
            self._deliver_assignments(group, stored)
        group.stored_value = record.value

    def _drop_stored(self, group: Group) -> None:
        self._groups.drop(group.group_id)
        if self._offsets.of_group(group.group_id):
            # Another broker wrote this: Millstream deletes the offsets first. They stay unchanged.
            self._groups.put(Group(group.group_id))

    def _deliver_assignments(self, group: Group, stored: StoredGroup) -> None:
        group.move_to(GroupState.STABLE, self._clock.now_ms())
        for share_group in stored.members:
            member = group.members[share_group.member_id]
            member.assignment = share_group.assignment
            if member.respond_to_sync(_sync_response(group, member)):
                self._rebalance.keep_alive(group, member)

    def _rebalance_downgraded(self, group_id: str) -> Records:
        """Rebalance a group that has just become a classic one."""
        group = self._groups.get(group_id)
        if group is None or not group.is_in(GroupState.STABLE):
            return []
        self._rebalance.restored(group)
        return self._rebalance.prepare(group, "its last member of the consumer protocol has left")

    def _sweep(self) -> Records:
        """Sweep some groups; the next step follows shortly, the next round after a pause."""
        records: Records = []
        looked_at = 0
        now_ms = self._clock.now_ms()
        while self._to_sweep and looked_at < _SWEEP_OFFSETS and len(records) < self._limits.tombstones_max:
            group_id = self._to_sweep.pop()
            group = self._groups.get(group_id) or self.consumers.get(group_id)
            if group is not None:
                looked_at += 1 + len(self._offsets.of_group(group.group_id))
                records += self._expire_offsets(group, now_ms)
        if self._to_sweep:
            self._timers.schedule(_SWEEP, _SWEEP_PAUSE_MS, self._sweep, pure=True)
        else:
            self._timers.schedule(_SWEEP, self._limits.sweep_ms, self._begin_sweep, pure=True)
        return records

    def _begin_sweep(self) -> Records:
        self._to_sweep = self._groups.ids()
        forgotten = self.transactional.expired_markers(self._limits.offsets_retention_ms)
        return [*islice(forgotten, self._limits.tombstones_max), *self._sweep()]

    def _expire_offsets(self, group: Group | ConsumerGroup, now_ms: int) -> Records:
        expired = self._offsets.expired(group, now_ms, self._limits.offsets_retention_ms)
        keys = [key for key in expired if not self.transactional.pending.is_pending(key)]
        limit = self._limits.tombstones_max
        if len(keys) > limit:
            self._to_sweep.append(group.group_id)
        records = [offset_tombstone(key) for key in keys[:limit]]
        remaining = len(self._offsets.of_group(group.group_id)) - len(records)
        if isinstance(group, ConsumerGroup):
            some_expired = bool(records)
            return records + self.consumers.expire_if_unused(
                group, now_ms, offsets_left=remaining, some_expired=some_expired
            )
        # A group that has only just become empty may be one whose consumers restart.
        idle = bool(records) or now_ms - group.state_since_ms >= self._limits.sweep_ms
        if idle and remaining == 0 and group.is_in(GroupState.EMPTY) and not group.pending_members:
            records.append(group_tombstone(group.group_id))
        return records


def _check_generation(group: Group, generation: int) -> None:
    if generation != group.generation:
        raise IllegalGeneration(f"group {group.group_id!r} is at generation {group.generation}, not {generation}")


def _check_protocol(group: Group, request: SyncRequest) -> None:
    pairs = ((request.protocol_type, group.protocol_type), (request.protocol_name, group.protocol_name))
    if any(theirs is not None and ours is not None and theirs != ours for theirs, ours in pairs):
        raise InconsistentProtocol(f"group {group.group_id!r} uses {group.protocol_type}/{group.protocol_name}")


def _sync_response(group: Group, member: Member) -> SyncResponse:
    return SyncResponse(group.protocol_type, group.protocol_name, member.assignment)
