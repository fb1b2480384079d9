"""Removing members: because they leave, leave temporarily, or miss a deadline."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection

from millstream.broker.coordination.state_machine import Outcome, StateRecord
from millstream.broker.groups.consumer.assignor import metadata_hash, names_of
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import AWAY_EPOCH, NOTHING, ConsumerMember
from millstream.broker.groups.consumer.reconciliation import GroupContext
from millstream.broker.groups.consumer.records import (
    ConsumerKey,
    Kind,
    group_epoch_record,
    member_tombstones,
    position_record,
    tombstone,
)
from millstream.broker.groups.consumer.requests import ConsumerHeartbeat, HeartbeatAnswer

_logger = logging.getLogger(__name__)

Downgrade = Callable[[ConsumerGroup, Collection[str]], list[StateRecord]]
"""Returns the records that downgrade a group without these members; none if some of the others are not classic."""


class Departure:
    """Removes members."""

    def __init__(self, context: GroupContext, downgrade: Downgrade) -> None:
        self._context = context
        self._downgrade = downgrade

    def leave(self, group: ConsumerGroup, request: ConsumerHeartbeat) -> Outcome[HeartbeatAnswer]:
        """Handle a member that leaves."""
        member = group.find_sender(request.member_id, request.instance_id)
        answer = HeartbeatAnswer(member_id=member.member_id, epoch=request.epoch)
        if request.epoch != AWAY_EPOCH:
            return self.remove(group, [member], "left"), answer
        # It owns its partitions until its session ends, except those that it was asked to revoke.
        position = dataclasses.replace(member.position, epoch=AWAY_EPOCH, pending=NOTHING)
        return [position_record(group.group_id, member.member_id, position)], answer

    def remove(self, group: ConsumerGroup, members: Collection[ConsumerMember], reason: str) -> list[StateRecord]:
        """Remove members; the next heartbeat of any member reassigns their partitions."""
        if not members:
            return []
        gone = [member.member_id for member in members]
        _logger.info("members go", extra={"group": group.group_id, "members": ", ".join(gone), "reason": reason})
        records = self._downgrade(group, gone)
        if records:
            return records
        for member_id in gone:
            records += member_tombstones(group.group_id, member_id)
        choices = Counter(group.choices)
        choices.subtract((member.subscription.topics, member.subscription.expression) for member in members)
        remaining = +choices
        used = {expression for _, expression in remaining}
        unused = [expression for expression in group.resolved if expression not in used]
        records += [tombstone(ConsumerKey(Kind.EXPRESSION, group.group_id, one)) for one in unused]
        names = {name for choice in remaining for name in names_of(choice, group.resolved)}
        hashed = metadata_hash(self._context.topics, names)
        return [*records, group_epoch_record(group.group_id, group.epoch + 1, hashed)]
