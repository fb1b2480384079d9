"""Share groups of one partition of `__consumer_offsets`: their members, and the partitions that these fetch (KIP-932).

Operations only produce records; groups change when these are replayed. State that an operation changes directly is
soft: timers, and the last responses of members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from millstream.broker.coordination.state_machine import Outcome, StateRecord, Timers
from millstream.broker.groups.consumer.assignor import TopicView, with_names
from millstream.broker.groups.requests import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    GroupLimits,
    GroupListing,
    HeartbeatResult,
)
from millstream.broker.groups.share.group import (
    GROUP_TYPE,
    JOIN_EPOCH,
    LEFT_EPOCH,
    NO_EPOCH,
    Assignment,
    ReportedState,
    ShareGroup,
    ShareHeartbeat,
    ShareKey,
    ShareKind,
    ShareMember,
    group_record,
    hash_of,
    member_record,
    read_group,
    read_member,
    target_of,
    tombstone,
)
from millstream.core.errors import FencedMemberEpoch, GroupFull, InvalidRequest, UnknownGroup, UnknownMember

Records = list[StateRecord]

_SESSION = "share-session"
_RETRY_MS = 1000


class ShareShard:
    def __init__(
        self,
        timers: Timers,
        *,
        limits: GroupLimits,
        topics: TopicView,
        is_taken: Callable[[str], bool],
        check_room: Callable[[], None],
    ) -> None:
        """`is_taken` returns whether another kind of group uses an id; `check_room` raises if there are too many
        groups.
        """
        self._timers = timers
        self._limits = limits
        self._topics = topics
        self._is_taken = is_taken
        self._check_room = check_room
        self._groups: dict[str, ShareGroup] = {}
        # Not stored, and separate from the groups: the first member gets a response before its group exists.
        self._reported: dict[tuple[str, str], ReportedState] = {}

    def __iter__(self) -> Iterator[ShareGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group_id: str) -> ShareGroup | None:
        return self._groups.get(group_id)

    def heartbeat(self, request: ShareHeartbeat) -> Outcome[HeartbeatResult]:
        group = self._find_or_create(request)
        known = group.members.get(request.member_id)
        if request.epoch == LEFT_EPOCH:
            return self._leave(group, request)
        if known is None and request.epoch != JOIN_EPOCH:
            raise UnknownMember(f"share group {request.group_id!r} has no member {request.member_id!r}")
        reported = self._reported.get((request.group_id, request.member_id)) or ReportedState()
        if request.epoch != JOIN_EPOCH:
            _check_epoch(group, request, reported)
        member = self._updated_member(group, known, request)
        members = {**group.members, member.member_id: member}
        records, epoch = self._update_records(group, known, member, members)
        target = group.target(self._topics) if not records else target_of(members, self._topics)
        assignment = target.get(member.member_id, {})
        self._restart_session(request.group_id, member.member_id, request.session_ms)
        response = HeartbeatResult(
            member_id=member.member_id,
            epoch=epoch,
            heartbeat_ms=request.heartbeat_ms,
            # A member that sends its topics again may have missed a response; Kafka's clients do so after an error.
            assignment=assignment if request.topics is not None or assignment != reported.assignment else None,
        )
        self._record_reported(request.group_id, member.member_id, epoch, assignment)
        return records, response

    def describe(self, group_id: str) -> Outcome[ConsumerGroupDescription]:
        group = self._require(group_id)
        target = group.target(self._topics)
        members = tuple(
            ConsumerMemberDescription(
                member_id=member.member_id,
                rack_id=member.rack_id,
                epoch=max(0, self._reported.get((group_id, member.member_id), ReportedState()).epoch),
                client_id=member.client_id,
                client_host=member.client_host,
                topics=member.topics,
                assigned=with_names(self._topics, target.get(member.member_id, {})),
            )
            for member in group.members.values()
        )
        return [], _description(group, members)

    def open(self, group_id: str) -> Outcome[ConsumerGroupDescription]:
        """Describe a group, creating an empty one if it does not exist."""
        if group_id in self._groups:
            return self.describe(group_id)
        self._check_free(group_id)
        made = ShareGroup(group_id)
        return [group_record(group_id, made.epoch, hash_of({}, self._topics))], _description(made, ())

    def listings(self) -> Iterator[GroupListing]:
        for group in self:
            yield GroupListing(
                group_id=group.group_id,
                protocol_type=GROUP_TYPE,
                state=group.state.value,
                group_type=GROUP_TYPE,
            )

    def deletion_records(self, group: ShareGroup) -> Records:
        return [tombstone(ShareKey(ShareKind.GROUP, group.group_id))]

    # The fold

    def replay(self, key: ShareKey, record: StateRecord) -> None:
        group = self._groups.get(key.group_id)
        if record.value is None:
            if group is not None:
                self._replay_removal(group, key)
            return
        if group is None:
            group = self._groups[key.group_id] = ShareGroup(key.group_id)
        if key.kind is ShareKind.GROUP:
            group.epoch, group.metadata_hash = read_group(record)
        else:
            group.members[key.member_id] = read_member(key, record)

    def restored(self) -> None:
        for group in self:
            for member_id in group.members:
                self._restart_session(group.group_id, member_id, self._limits.consumer_session_ms)

    def durable_keys(self) -> Iterator[ShareKey]:
        for group in self:
            yield ShareKey(ShareKind.GROUP, group.group_id)
            for member_id in group.members:
                yield ShareKey(ShareKind.MEMBER, group.group_id, member_id)

    def durable_record(self, key: ShareKey) -> StateRecord | None:
        group = self._groups.get(key.group_id)
        if group is None:
            return None
        if key.kind is ShareKind.GROUP:
            return group_record(group.group_id, group.epoch, group.metadata_hash)
        member = group.members.get(key.member_id)
        return None if member is None else member_record(group.group_id, member)

    # Internals

    def _find_or_create(self, request: ShareHeartbeat) -> ShareGroup:
        group = self._groups.get(request.group_id)
        if group is not None:
            return group
        if request.epoch != JOIN_EPOCH:
            raise UnknownGroup(f"there is no share group {request.group_id!r}")
        self._check_free(request.group_id)
        return ShareGroup(request.group_id)

    def _check_free(self, group_id: str) -> None:
        if self._is_taken(group_id):
            raise UnknownGroup(f"{group_id!r} is a group of another type")
        self._check_room()

    def _require(self, group_id: str) -> ShareGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownGroup(f"there is no share group {group_id!r}")
        return group

    def _updated_member(self, group: ShareGroup, known: ShareMember | None, request: ShareHeartbeat) -> ShareMember:
        if known is None:
            if len(group.members) >= self._limits.members_max:
                raise GroupFull(f"share group {group.group_id!r} has {len(group.members)} members already")
            if not request.topics:
                raise InvalidRequest("a member that joins must send its topics")
            return ShareMember(
                member_id=request.member_id,
                rack_id=request.rack_id,
                client_id=request.client_id,
                client_host=request.client_host,
                topics=request.topics,
            )
        return dataclasses.replace(
            known,
            rack_id=known.rack_id if request.rack_id is None else request.rack_id,
            topics=known.topics if request.topics is None else request.topics,
            client_id=request.client_id,
            client_host=request.client_host,
        )

    def _update_records(
        self,
        group: ShareGroup,
        known: ShareMember | None,
        member: ShareMember,
        members: dict[str, ShareMember],
    ) -> tuple[Records, int]:
        records: Records = [member_record(group.group_id, member)] if member != known else []
        topics_changed = known is None or known.topics != member.topics
        if not topics_changed and group.checked_version == self._topics.version:
            return records, group.epoch
        topics_hash = hash_of(members, self._topics)
        if not topics_changed and topics_hash == group.metadata_hash:
            group.checked_version = self._topics.version
            return records, group.epoch
        records.append(group_record(group.group_id, group.epoch + 1, topics_hash))
        return records, group.epoch + 1

    def _leave(self, group: ShareGroup, request: ShareHeartbeat) -> Outcome[HeartbeatResult]:
        if request.member_id not in group.members:
            raise UnknownMember(f"share group {request.group_id!r} has no member {request.member_id!r}")
        response = HeartbeatResult(
            member_id=request.member_id, epoch=LEFT_EPOCH, heartbeat_ms=request.heartbeat_ms, assignment=None
        )
        return self._removal_records(group, request.member_id), response

    def _removal_records(self, group: ShareGroup, member_id: str) -> Records:
        remaining = {known: member for known, member in group.members.items() if known != member_id}
        return [
            tombstone(ShareKey(ShareKind.MEMBER, group.group_id, member_id)),
            group_record(group.group_id, group.epoch + 1, hash_of(remaining, self._topics)),
        ]

    def _replay_removal(self, group: ShareGroup, key: ShareKey) -> None:
        if key.kind is ShareKind.GROUP:
            for member_id in group.members:
                self._forget_member(group.group_id, member_id)
            del self._groups[key.group_id]
            return
        group.members.pop(key.member_id, None)
        self._forget_member(group.group_id, key.member_id)

    def _forget_member(self, group_id: str, member_id: str) -> None:
        self._reported.pop((group_id, member_id), None)
        self._timers.cancel((_SESSION, group_id, member_id))

    def _restart_session(self, group_id: str, member_id: str, session_ms: int) -> None:
        self._timers.schedule(
            (_SESSION, group_id, member_id), session_ms, lambda: self._expire(group_id, member_id), pure=True
        )

    def _expire(self, group_id: str, member_id: str) -> Records:
        group = self._groups.get(group_id)
        if group is None or member_id not in group.members:
            # The member got its response, but the append was refused.
            self._reported.pop((group_id, member_id), None)
            return []
        # Set again, in case the log refuses the record.
        self._restart_session(group_id, member_id, _RETRY_MS)
        return self._removal_records(group, member_id)

    def _record_reported(self, group_id: str, member_id: str, epoch: int, assignment: Assignment) -> None:
        reported = self._reported.setdefault((group_id, member_id), ReportedState())
        if reported.epoch != epoch:
            reported.previous_epoch, reported.epoch = reported.epoch, epoch
        reported.assignment = assignment


def _check_epoch(group: ShareGroup, request: ShareHeartbeat, reported: ReportedState) -> None:
    if reported.epoch == NO_EPOCH:
        is_known = request.epoch <= group.epoch
    else:
        is_known = request.epoch in (reported.epoch, reported.previous_epoch)
    if not is_known:
        raise FencedMemberEpoch(
            f"member {request.member_id!r} is in epoch {reported.epoch}, not {request.epoch}; it has to join again"
        )


def _description(group: ShareGroup, members: tuple[ConsumerMemberDescription, ...]) -> ConsumerGroupDescription:
    return ConsumerGroupDescription(
        group_id=group.group_id,
        state=group.state.value,
        epoch=group.epoch,
        target_epoch=group.epoch,
        assignor="simple",
        members=members,
    )
