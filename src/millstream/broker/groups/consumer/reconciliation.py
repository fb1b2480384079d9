"""Handles one request of one member: computes everything that it changes, and the records of these changes.

The group itself changes only when the records are replayed. In order, as in Kafka:

    the member sends its metadata        → its subscription; the topics of its expression
    a subscription or topics changed     → the group's epoch is incremented
    the epoch is newer than the target's → a new target for all members
    the member has not reached its target → its next step towards it
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from millstream.broker.coordination.state_machine import Outcome, StateRecord, Timers
from millstream.broker.groups.consumer.assignor import (
    TopicView,
    compute_target,
    metadata_hash,
    names_of,
    preferred_assignor,
    topic_ids_of,
)
from millstream.broker.groups.consumer.group import Choice, ConsumerGroup
from millstream.broker.groups.consumer.member import (
    AWAY_EPOCH,
    NO_PARTITIONS,
    NOTHING,
    Assignment,
    ConsumerMember,
    MemberState,
    Position,
    Subscription,
    is_within,
    overlaps,
    union,
)
from millstream.broker.groups.consumer.records import (
    ConsumerKey,
    Kind,
    Resolved,
    expression_record,
    group_epoch_record,
    member_tombstones,
    position_record,
    subscription_record,
    target_epoch_record,
    target_record,
    tombstone,
)
from millstream.broker.groups.requests import ConsumerHeartbeat, GroupLimits, HeartbeatResult
from millstream.core.clock import Clock
from millstream.core.errors import FencedMemberEpoch, GroupFull, InvalidRegex, UnreleasedInstance
from millstream.core.regex import compile_regex

_logger = logging.getLogger(__name__)

EXPRESSIONS_KEPT_MAX: Final = 256


@dataclass(slots=True, eq=False)
class _ExpressionMatches:
    """An expression, and the names that it was matched against."""

    compiled: Any
    matched: set[str] = field(default_factory=set)
    position: int = 0


class Expressions:
    """The expressions of all groups. A name is matched against an expression once, not each time topics change.

    An expression must match the whole name. As in Kafka, it can match internal topics.
    """

    def __init__(self, topics: TopicView) -> None:
        self._topics = topics
        self._version: int | None = None
        # Every name ever seen, in order; the position of an expression says how many it was matched against.
        self._names: list[str] = []
        self._matched_topics: set[str] = set()
        self._cached: OrderedDict[str, _ExpressionMatches] = OrderedDict()

    def check(self, expression: str) -> None:
        """Raise `InvalidRegex` for an invalid expression."""
        self._find_matches(expression)

    def matches(self, expression: str) -> frozenset[str]:
        """Return the topics that an expression matches now."""
        self._catch_up()
        known = self._find_matches(expression)
        for name in self._names[known.position :]:
            if known.compiled.fullmatch(name) is not None:
                known.matched.add(name)
        known.position = len(self._names)
        return frozenset(name for name in known.matched if self._topics.get(name) is not None)

    def _find_matches(self, expression: str) -> _ExpressionMatches:
        known = self._cached.get(expression)
        if known is None:
            known = self._cached[expression] = _ExpressionMatches(compile_regex(expression))
            if len(self._cached) > EXPRESSIONS_KEPT_MAX:
                self._cached.popitem(last=False)
        else:
            self._cached.move_to_end(expression)
        return known

    def _catch_up(self) -> None:
        """Add new topic names; start over when most of the known ones were deleted."""
        if self._version == self._topics.version:
            return
        self._version = self._topics.version
        present = [topic.name for topic in self._topics.all()]
        if len(self._names) > 2 * len(present) + EXPRESSIONS_KEPT_MAX:
            self._names.clear()
            self._matched_topics.clear()
            for known in self._cached.values():
                known.matched.clear()
                known.position = 0
        new = [name for name in present if name not in self._matched_topics]
        self._names += new
        self._matched_topics.update(new)


Late = Callable[[ConsumerMember], bool]
"""Returns whether a member has still not met its deadline."""

Expire = Callable[[str, str, str, Late], list[StateRecord]]
"""Removes a member of a group that missed a deadline, for a reason; returns the records."""

_KINDS = ("consumer-session", "consumer-rebalance", "consumer-join", "consumer-sync")
_SESSION, _REBALANCE, _JOIN, _SYNC = _KINDS
_RETRY_MS = 1000


class Sessions:
    """The timers of all members of one shard's consumer groups.

    A member that misses a deadline is removed. If the log refuses the record, as with a full disk, the deadline is set
    again, so that no member stays forever because of one refused append.
    """

    def __init__(self, timers: Timers, *, session_of: Callable[[str], int], expire: Expire) -> None:
        self._timers = timers
        self._session_of = session_of
        self._expire = expire

    def keep_alive(self, group_id: str, member: ConsumerMember) -> None:
        """Restart the member's session."""
        classic = member.subscription.classic
        delay_ms = self._session_of(group_id) if classic is None else classic.session_timeout_ms
        self._schedule(_SESSION, group_id, member.member_id, delay_ms, "sent no heartbeat in time")

    def await_revocation(self, group_id: str, member: ConsumerMember) -> None:
        """Start the rebalance timeout of a member that must revoke partitions."""
        epoch = member.epoch
        reason = "did not revoke its partitions in time"
        delay_ms = max(0, member.subscription.rebalance_timeout_ms)

        def late(now: ConsumerMember) -> bool:
            return now.epoch == epoch and now.position.state is MemberState.UNREVOKED

        self._schedule(_REBALANCE, group_id, member.member_id, delay_ms, reason, late)

    def await_join(self, group_id: str, member: ConsumerMember) -> None:
        """Start the rebalance timeout of a classic member that was asked to rejoin, unless it is running."""
        if (_JOIN, group_id, member.member_id) not in self._timers:
            delay_ms = max(0, member.subscription.rebalance_timeout_ms)
            self._schedule(_JOIN, group_id, member.member_id, delay_ms, "did not join in time")

    def await_sync(self, group_id: str, member: ConsumerMember) -> None:
        """Start the timeout in which a classic member that has joined must send SyncGroup."""
        self._timers.cancel((_JOIN, group_id, member.member_id))
        delay_ms = max(0, member.subscription.rebalance_timeout_ms)
        self._schedule(_SYNC, group_id, member.member_id, delay_ms, "did not sync in time")

    def synced(self, group_id: str, member_id: str) -> None:
        """Cancel that timeout: the member has sent SyncGroup."""
        self._timers.cancel((_SYNC, group_id, member_id))

    def forget(self, group_id: str, member_id: str) -> None:
        for kind in _KINDS:
            self._timers.cancel((kind, group_id, member_id))

    def _schedule(
        self, kind: str, group_id: str, member_id: str, delay_ms: int, reason: str, late: Late = lambda _: True
    ) -> None:
        def due() -> list[StateRecord]:
            records = self._expire(group_id, member_id, reason, late)
            if records:
                self._schedule(kind, group_id, member_id, max(delay_ms, _RETRY_MS), reason, late)
            return records

        self._timers.schedule((kind, group_id, member_id), delay_ms, due, pure=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The topics, the clock and the limits of groups."""

    topics: TopicView
    expressions: Expressions
    sessions: Sessions
    limits: GroupLimits
    clock: Clock
    new_suffix: Callable[[], str]
    """Returns a unique suffix for a member id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTarget:
    epoch: int
    target: Assignment
    topics: Set[UUID]
    """The subscribed topics; others are not assigned, even if the target contains them."""
    is_taken: Callable[[UUID, int], bool]
    """Returns whether another member owns a partition."""


def next_position(
    position: Position, goal: MemberTarget, owned: Assignment | None, *, topics_changed: bool = False
) -> Position:
    """Return the position after a heartbeat in which the member reports what it owns; None if it is unchanged.

    With `topics_changed`, the member has just changed its topics: partitions of topics that it left are revoked at
    once, even if the target is not new.
    """
    reached = _next_position(position, goal, owned, topics_changed=topics_changed)
    return (
        position if reached is position else dataclasses.replace(reached, since=_assignment_epochs(position, reached))
    )


def _assignment_epochs(before: Position, after: Position) -> dict[UUID, dict[int, int]]:
    """Return the epoch in which each partition was assigned: the recorded one, and the newest for new partitions."""
    epochs: dict[UUID, dict[int, int]] = {}
    for topic_id, numbers in union(after.assigned, after.pending).items():
        known = before.since.get(topic_id, {})
        held = before.assigned.get(topic_id, NO_PARTITIONS) | before.pending.get(topic_id, NO_PARTITIONS)
        epochs[topic_id] = {
            number: known.get(number, before.epoch) if number in held else after.epoch for number in sorted(numbers)
        }
    return epochs


def _next_position(
    position: Position, goal: MemberTarget, owned: Assignment | None, *, topics_changed: bool
) -> Position:
    if position.state is MemberState.UNREVOKED:
        if _may_hold(owned, position.pending):
            return _revoke_unwanted(position, goal, owned) if topics_changed else position
        return _advance(position, goal, owned)
    if position.state is MemberState.UNRELEASED:
        return _advance(position, goal, owned)
    if position.state is MemberState.UNKNOWN:
        if owned is None or owned:
            raise FencedMemberEpoch("the state of the member is unknown; it has to rejoin")
        return _advance(position.at(goal.epoch), goal, owned)
    if position.epoch != goal.epoch:
        return _advance(position, goal, owned)
    return _revoke_unwanted(position, goal, owned) if topics_changed else position


def _may_hold(owned: Assignment | None, pending: Assignment) -> bool:
    """Return whether the member may still own some of these partitions; it may if it does not report what it owns."""
    return bool(pending) and (owned is None or overlaps(pending, owned))


def _revoke_unwanted(position: Position, goal: MemberTarget, owned: Assignment | None) -> Position:
    kept = {topic_id: numbers for topic_id, numbers in position.assigned.items() if topic_id in goal.topics}
    if len(kept) == len(position.assigned):
        return position
    revoked = {topic_id: numbers for topic_id, numbers in position.assigned.items() if topic_id not in goal.topics}
    pending = union(position.pending, revoked)
    if _may_hold(owned, pending):
        return dataclasses.replace(position, state=MemberState.UNREVOKED, assigned=kept, pending=pending)
    return dataclasses.replace(position, assigned=kept)


def _advance(position: Position, goal: MemberTarget, owned: Assignment | None) -> Position:
    kept: dict[UUID, frozenset[int]] = {}
    revoked: dict[UUID, frozenset[int]] = {}
    missing: dict[UUID, frozenset[int]] = {}
    for topic_id in {*goal.target, *position.assigned}:
        target = goal.target.get(topic_id, NO_PARTITIONS) if topic_id in goal.topics else NO_PARTITIONS
        has = position.assigned.get(topic_id, NO_PARTITIONS)
        _set_if_any(kept, topic_id, has & target)
        _set_if_any(revoked, topic_id, has - target)
        _set_if_any(missing, topic_id, target - has)
    if _may_hold(owned, revoked):
        return dataclasses.replace(position, state=MemberState.UNREVOKED, assigned=kept, pending=revoked)
    free = {topic_id: _free_partitions(topic_id, numbers, goal) for topic_id, numbers in missing.items()}
    waits = any(len(free[topic_id]) < len(numbers) for topic_id, numbers in missing.items())
    return dataclasses.replace(
        position.at(goal.epoch),
        state=MemberState.UNRELEASED if waits else MemberState.STABLE,
        assigned=union(kept, free),
        pending=NOTHING,
    )


def _free_partitions(topic_id: UUID, numbers: frozenset[int], goal: MemberTarget) -> frozenset[int]:
    return frozenset(number for number in numbers if not goal.is_taken(topic_id, number))


def _set_if_any(into: dict[UUID, frozenset[int]], topic_id: UUID, numbers: frozenset[int]) -> None:
    if numbers:
        into[topic_id] = numbers


REFRESH_MS = 1000
"""The minimum interval at which new topics are matched against a group's expressions, so that many new topics cause one
change."""

RIGHTS_REFRESH_MS = 600_000
"""How often expressions are matched again although there is no new topic: access rules may have changed."""

EXPRESSIONS_AT_ONCE_MAX = 8
"""The number of expressions refreshed per heartbeat; later heartbeats of any member refresh the rest."""

EXPRESSIONS_MAX = 100
"""The number of different expressions per group, whose matches are all stored."""

TARGET_AT_ONCE_MEMBERS_MAX = 50

TARGET_PAUSE_MS_MAX = 1000
"""A small group computes its target at once. A large group, whose members may all join together, computes it at most
once in as many milliseconds as it has members, up to this."""


class Reconciliation:
    """The changes that one request makes in a group."""

    def __init__(
        self,
        group: ConsumerGroup,
        *,
        before: ConsumerMember,
        after: ConsumerMember,
        context: GroupContext,
        records: list[StateRecord],
        may_describe: Callable[[str], bool] | None = None,
    ) -> None:
        """`before` is the member as it was, or the static member that it replaces."""
        self.group = group
        self.member = after
        self.records = records
        self._before = before
        self._context = context
        self._may_describe = may_describe
        self._now_ms = context.clock.now_ms()
        self._resolved: Mapping[str, Resolved] = group.resolved
        instance_id = after.instance_id
        self._replaced = None if instance_id is None else group.find_static(instance_id)
        if self._replaced is not None and self._replaced.member_id == after.member_id:
            self._replaced = None
        self._epoch = group.epoch
        self._target_epoch = group.target_epoch
        self._target = group.target_of(after)
        self._topics_changed = False

    def run(self, owned: Assignment | None) -> ConsumerMember:
        """Compute all changes; return the new version of the member."""
        names_changed = self._record_subscription()
        choice_changed = self._record_expression() or names_changed
        self._topics_changed = choice_changed
        matches_changed = self._refresh_expressions()
        self._raise_epoch(must=self.group.epoch == 0 or choice_changed or matches_changed)
        if self._epoch > self.group.target_epoch and self._may_compute_target():
            self._compute_target()
        self._next_position(owned)
        return self.member

    # The subscription of the member

    def _record_subscription(self) -> bool:
        before, after = self._before.subscription, self.member.subscription
        is_new = self.member.member_id not in self.group.members
        if is_new or before != after:
            self.records.append(subscription_record(self.group.group_id, self.member.member_id, after))
        return before.topics != after.topics

    def _record_expression(self) -> bool:
        old, new = self._before.subscription.expression, self.member.subscription.expression
        if old == new:
            return False
        if new and not self.group.users_of(new):
            if len(self.group.resolved) >= EXPRESSIONS_MAX:
                raise InvalidRegex(f"group {self.group.group_id!r} uses {EXPRESSIONS_MAX} others already")
            self._context.expressions.check(new)
        if old and self.group.users_of(old) <= 1:
            self.records.append(tombstone(ConsumerKey(Kind.EXPRESSION, self.group.group_id, old)))
            self._resolved = {name: known for name, known in self._resolved.items() if name != old}
        return True

    def _refresh_expressions(self) -> bool:
        """Match topics that the member may describe against the group's expressions; return whether matches changed."""
        group = self.group
        version = self._context.topics.version, self._now_ms // RIGHTS_REFRESH_MS
        used = [expression for _, expression in self._current_choices() if expression]
        checked = group.checked_expressions
        stale = [
            expression
            for expression in dict.fromkeys(used)
            if expression not in self._resolved or checked.get(expression) != version
        ]
        due = self._now_ms - group.refreshed_ms >= REFRESH_MS
        stale = [expression for expression in stale if due or expression not in self._resolved]
        own = self.member.subscription.expression
        changed = False
        for expression in sorted(stale, key=lambda expression: (expression != own, expression in self._resolved))[
            :EXPRESSIONS_AT_ONCE_MAX
        ]:
            changed = self._refresh(expression, version) or changed
        return changed

    def _refresh(self, expression: str, version: tuple[int, int]) -> bool:
        matching = self._context.expressions.matches(expression)
        if self._may_describe is not None:
            matching = frozenset(filter(self._may_describe, matching))
        known = self._resolved.get(expression)
        # Also if they changed: another member may have other rights, and must not change them back.
        self.group.checked_expressions[expression] = version
        if known is not None and known.topics == matching:
            return False
        resolved = Resolved(matching, version[0], self._now_ms)
        self.records.append(expression_record(self.group.group_id, expression, resolved))
        self._resolved = {**self._resolved, expression: resolved}
        self.group.refreshed_ms = self._now_ms
        return True

    def _current_choices(self) -> Counter[Choice]:
        """Return the subscriptions of all members, including the new one of this member."""
        choices = Counter(self.group.choices)
        counted = self._replaced or self.group.members.get(self.member.member_id)
        if counted is not None:
            choices[counted.subscription.topics, counted.subscription.expression] -= 1
        choices[self.member.subscription.topics, self.member.subscription.expression] += 1
        return +choices

    # Consequences for the group

    def _raise_epoch(self, *, must: bool) -> None:
        group, version = self.group, self._context.topics.version
        if not must and group.checked_version == version:
            return
        names = {name for choice in self._current_choices() for name in names_of(choice, self._resolved)}
        hashed = metadata_hash(self._context.topics, names)
        if not must and hashed == group.metadata_hash:
            group.checked_version = version
            return
        self._epoch = group.epoch + 1
        self.records.append(group_epoch_record(group.group_id, self._epoch, hashed))
        _logger.info("group rebalances", extra={"group": group.group_id, "epoch": self._epoch})

    def _may_compute_target(self) -> bool:
        """Whether to compute a target now; otherwise the next heartbeat of any member does."""
        members = len(self.group.members)
        pause_ms = min(members, TARGET_PAUSE_MS_MAX) if members > TARGET_AT_ONCE_MEMBERS_MAX else 0
        return self.group.target_epoch == 0 or self._now_ms - self.group.target_computed_ms >= pause_ms

    def _compute_target(self) -> None:
        """Compute a new target assignment, and record what changes."""
        group = self.group
        group.target_computed_ms = self._now_ms
        members = {**group.members, self.member.member_id: self.member}
        had = {**group.targets, self.member.member_id: self._target}
        if self._replaced is not None:
            del members[self._replaced.member_id]
        targets = compute_target(members.values(), had, self._resolved, self._context.topics, self._select_assignor())
        for member_id, target in targets.items():
            if member_id not in group.targets or group.targets[member_id] != target:
                self.records.append(target_record(group.group_id, member_id, target))
        self.records.append(target_epoch_record(group.group_id, self._epoch))
        self._target_epoch = self._epoch
        self._target = targets.get(self.member.member_id, NOTHING)

    def _select_assignor(self) -> str:
        votes = Counter(self.group.assignors)
        counted = self._replaced or self.group.members.get(self.member.member_id)
        if counted is not None and counted.subscription.assignor is not None:
            votes[counted.subscription.assignor] -= 1
        if self.member.subscription.assignor is not None:
            votes[self.member.subscription.assignor] += 1
        return preferred_assignor(+votes)

    # Consequences for the member

    def _next_position(self, owned: Assignment | None) -> None:
        group, member = self.group, self.member
        position = member.position
        if self._topics_changed or not position.is_reconciled_to(self._target_epoch):
            position = next_position(position, self._build_goal(), owned, topics_changed=self._topics_changed)
        known = group.members.get(member.member_id)
        if known is not None and known.position == position:
            return
        self.member = member.at(position)
        self.records.append(position_record(group.group_id, member.member_id, position))
        # Classic members have separate deadlines: to join, and to sync.
        if position.state is MemberState.UNREVOKED and not member.speaks_classic:
            self._context.sessions.await_revocation(group.group_id, self.member)

    def _build_goal(self) -> MemberTarget:
        subscription = self.member.subscription
        # A member that replaces a static member owns its partitions.
        owner = self.member.member_id if self._replaced is None else self._replaced.member_id
        return MemberTarget(
            epoch=self._target_epoch,
            target=self._target,
            topics=topic_ids_of((subscription.topics, subscription.expression), self._resolved, self._context.topics),
            is_taken=lambda topic_id, number: self.group.is_owned(topic_id, number, by_other_than=owner),
        )


Downgrade = Callable[[ConsumerGroup, Collection[str]], list[StateRecord]]
"""Returns the records that downgrade a group without these members; none if some of the others are not classic."""


class Departure:
    def __init__(self, context: GroupContext, downgrade: Downgrade) -> None:
        self._context = context
        self._downgrade = downgrade

    def leave(self, group: ConsumerGroup, request: ConsumerHeartbeat) -> Outcome[HeartbeatResult]:
        member = group.find_sender(request.member_id, request.instance_id)
        response = HeartbeatResult(member_id=member.member_id, epoch=request.epoch)
        if request.epoch != AWAY_EPOCH:
            return self.remove(group, [member], "left"), response
        # It owns its partitions until its session ends, except those that it was asked to revoke.
        position = dataclasses.replace(member.position, epoch=AWAY_EPOCH, pending=NOTHING)
        return [position_record(group.group_id, member.member_id, position)], response

    def remove(self, group: ConsumerGroup, members: Collection[ConsumerMember], reason: str) -> list[StateRecord]:
        """Remove members; the next heartbeat of any member reassigns their partitions."""
        if not members:
            return []
        member_ids = [member.member_id for member in members]
        _logger.info(
            "members leave", extra={"group": group.group_id, "members": ", ".join(member_ids), "reason": reason}
        )
        records = self._downgrade(group, member_ids)
        if records:
            return records
        for member_id in member_ids:
            records += member_tombstones(group.group_id, member_id)
        choices = Counter(group.choices)
        choices.subtract((member.subscription.topics, member.subscription.expression) for member in members)
        remaining = +choices
        used = {expression for _, expression in remaining}
        unused = [expression for expression in group.resolved if expression not in used]
        records += [tombstone(ConsumerKey(Kind.EXPRESSION, group.group_id, expression)) for expression in unused]
        names = {name for choice in remaining for name in names_of(choice, group.resolved)}
        hashed = metadata_hash(self._context.topics, names)
        return [*records, group_epoch_record(group.group_id, group.epoch + 1, hashed)]


FindGroup = Callable[[str, bool], tuple[ConsumerGroup, list[StateRecord]]]
"""Returns the group with an id and the records that create it; it is created only if the flag is set."""


class Heartbeats:
    def __init__(self, context: GroupContext, find_group: FindGroup) -> None:
        self._context = context
        self._find_group = find_group

    def run(self, request: ConsumerHeartbeat) -> Outcome[HeartbeatResult]:
        """Handle a heartbeat; the records contain everything that it changes."""
        joins = request.epoch == 0
        group, records = self._find_group(request.group_id, joins)
        member_id = request.member_id or self._context.new_suffix()
        before = self._find_or_create_member(group, member_id, request, records)
        after = before.with_subscription(_updated_subscription(before.subscription, request))
        check_room(group, after, self._context)
        reconciliation = Reconciliation(
            group,
            before=before,
            after=after,
            context=self._context,
            records=records,
            may_describe=request.may_describe,
        )
        member = reconciliation.run(request.owned)
        self._context.sessions.keep_alive(group.group_id, member)
        # A member that joins, or sends everything, may not know its assignment.
        include_assignment = joins or request.is_full or member.position.assigned != before.position.assigned
        response = HeartbeatResult(
            member_id=member_id,
            epoch=member.epoch,
            heartbeat_ms=self._context.limits.heartbeat_of(group.group_id),
            assignment=member.position.assigned if include_assignment else None,
        )
        return records, response

    def _find_or_create_member(
        self, group: ConsumerGroup, member_id: str, request: ConsumerHeartbeat, records: list[StateRecord]
    ) -> ConsumerMember:
        """Return the member that sent the heartbeat; a new one if it joins."""
        if request.epoch != 0:
            member = group.find_sender(member_id, request.instance_id)
            _check_epoch(member, request.epoch, request.owned)
            return member
        known = group.members.get(member_id) or ConsumerMember(member_id=member_id)
        if request.instance_id is None:
            return known
        static = group.find_static(request.instance_id)
        if static is None or static.member_id == member_id:
            return known
        if not static.speaks_classic and static.epoch != AWAY_EPOCH:
            raise UnreleasedInstance(
                f"instance {request.instance_id!r} of group {group.group_id!r} belongs to member {static.member_id!r}"
            )
        return replace_static_member(group, static, member_id, records)


def replace_static_member(
    group: ConsumerGroup, static: ConsumerMember, member_id: str, records: list[StateRecord]
) -> ConsumerMember:
    """Replace a static member by a new process, which inherits its assignment."""
    records += member_tombstones(group.group_id, static.member_id)
    records.append(target_record(group.group_id, member_id, group.target_of(static)))
    position = dataclasses.replace(static.position, epoch=0, previous_epoch=0)
    return ConsumerMember(member_id=member_id, subscription=static.subscription, position=position)


def check_room(group: ConsumerGroup, member: ConsumerMember, context: GroupContext) -> None:
    """Raise `GroupFull` if there is no room for a member or its metadata."""
    limits = context.limits
    known = group.members.get(member.member_id)
    if known is None and member.instance_id is not None:
        known = group.find_static(member.instance_id)
    if known is None and len(group.members) >= limits.members_max:
        raise GroupFull(f"group {group.group_id!r} has {limits.members_max} members, which is the maximum")
    added_bytes = member.subscription.size_bytes - (0 if known is None else known.subscription.size_bytes)
    if added_bytes > 0 and group.members_bytes + added_bytes > limits.members_bytes_max:
        raise GroupFull(f"the members of group {group.group_id!r} send more metadata than is stored")


def _updated_subscription(before: Subscription, request: ConsumerHeartbeat) -> Subscription:
    """Return the updated subscription; fields that are left out stay as they were."""
    updated = dataclasses.replace(
        before,
        instance_id=before.instance_id if request.instance_id is None else request.instance_id,
        rack_id=before.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=before.topics if request.topics is None else request.topics,
        expression=before.expression if request.expression is None else request.expression,
        rebalance_timeout_ms=(
            before.rebalance_timeout_ms if request.rebalance_timeout_ms is None else request.rebalance_timeout_ms
        ),
        assignor=before.assignor if request.assignor is None else request.assignor,
        classic=None,
    )
    return before if updated == before else updated


def _check_epoch(member: ConsumerMember, epoch: int, owned: Assignment | None) -> None:
    known = member.position
    if epoch == known.epoch:
        return
    # The response with the newer epoch may have been lost; the member then has no partition of another member.
    missed = epoch == known.previous_epoch and owned is not None and is_within(owned, known.assigned)
    if epoch > known.epoch or not missed:
        raise FencedMemberEpoch(
            f"member {member.member_id!r} is in epoch {known.epoch}, not {epoch}; it has to join again"
        )
