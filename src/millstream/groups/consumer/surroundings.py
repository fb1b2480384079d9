"""What the consumer groups of one shard have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream.groups.consumer.expression import Expressions
from millstream.groups.consumer.sessions import Sessions
from millstream.groups.consumer.topic_view import TopicView
from millstream.groups.requests import GroupLimits
from millstream.model.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The topics, the clock, and the bounds that groups live by."""

    topics: TopicView
    expressions: Expressions
    sessions: Sessions
    limits: GroupLimits
    clock: Clock
    new_suffix: Callable[[], str]
    """What makes a member id unique."""
