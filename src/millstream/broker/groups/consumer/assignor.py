"""How partitions are shared out among the members of a group: what an assignor is given and gives back.

An assignor is a plain function. It is told who wants which topics and what each was given last time, and says what
each shall have; every partition of a topic that somebody wants goes to exactly one of those who want it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from millstream.broker.groups.consumer.assignment import Assignment, nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one member wants, and what it was given last time."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[UUID]
    had: Assignment = field(default_factory=nothing)


Partitions = Mapping[UUID, int]
"""How many partitions each topic has; at least the topics that are wished for are in it."""

Assignor = Callable[[Sequence[Wish], Partitions], dict[str, Assignment]]
"""Shares out; the answer has an entry for every member."""


def wanted_by(wishes: Sequence[Wish]) -> dict[UUID, list[Wish]]:
    """Who wants each topic, in the order of the members."""
    found: dict[UUID, list[Wish]] = {}
    for wish in wishes:
        for topic_id in wish.topics:
            found.setdefault(topic_id, []).append(wish)
    return found
