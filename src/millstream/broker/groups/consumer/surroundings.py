"""What the consumer groups of one shard have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream.broker.groups.consumer.expression import Expressions
from millstream.broker.groups.consumer.sessions import Sessions
from millstream.broker.groups.consumer.topic_view import TopicView
from millstream.broker.groups.requests import GroupLimits
from millstream.core.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The topics, the clock, and the bounds that groups live by."""

    topics: TopicView
    expressions: Expressions
    sessions: Sessions
    limits: GroupLimits
    clock: Clock
    new_suffix: Callable[[], str]
    """What makes a member id unique."""
