"""The target of a group: which partitions each member shall have, worked out by the assignor that most members want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final
from uuid import UUID

from millstream.broker.groups.consumer.assignment import NOTHING, Assignment
from millstream.broker.groups.consumer.assignor import Assignor, MemberSubscription, assign_ranges, assign_uniformly
from millstream.broker.groups.consumer.group import Choice
from millstream.broker.groups.consumer.member import ConsumerMember
from millstream.broker.groups.consumer.records import Resolved
from millstream.broker.groups.consumer.topic_view import TopicView, existing, partitions_of

DEFAULT_ASSIGNOR: Final = "uniform"
ASSIGNORS: Final[Mapping[str, Assignor]] = {DEFAULT_ASSIGNOR: assign_uniformly, "range": assign_ranges}


def preferred_assignor(votes: Counter[str]) -> str:
    """The assignor with the most votes; the first by name wins a tie, and without votes it is the default."""
    return min(votes, key=lambda name: (-votes[name], name), default=DEFAULT_ASSIGNOR)


def names_of(choice: Choice, resolved: Mapping[str, Resolved]) -> frozenset[str]:
    """The topics that somebody who chose this wants; an expression that is not resolved yet matches none."""
    names, expression = choice
    found = resolved.get(expression) if expression else None
    return names if found is None else names | found.topics


def topic_ids_of(choice: Choice, resolved: Mapping[str, Resolved], topics: TopicView) -> frozenset[UUID]:
    """The same, of topics that there are, by id."""
    return frozenset(topic.topic_id for topic in existing(topics, names_of(choice, resolved)))


def compute_target(
    members: Collection[ConsumerMember],
    previous: Mapping[str, Assignment],
    resolved: Mapping[str, Resolved],
    topics: TopicView,
    assignor: str,
) -> dict[str, Assignment]:
    """What every member shall have, given what each shall have had so far."""
    chosen = {(member.subscription.topics, member.subscription.expression) for member in members}
    ids = {choice: topic_ids_of(choice, resolved, topics) for choice in chosen}
    names = {name for choice in chosen for name in names_of(choice, resolved)}
    subscriptions = [
        MemberSubscription(
            member_id=member.member_id,
            instance_id=member.instance_id,
            topics=ids[member.subscription.topics, member.subscription.expression],
            previous=previous.get(member.member_id, NOTHING),
        )
        for member in members
    ]
    assign = ASSIGNORS.get(assignor, assign_uniformly)
    return assign(subscriptions, partitions_of(existing(topics, names)))
