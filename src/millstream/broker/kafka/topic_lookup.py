"""Look up the topics and check the placements that requests name, within the time that a request allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.core.errors import InvalidAssignment, RequestTimedOut, UnknownTopic, UnknownTopicId
from millstream.core.topic import Topic

_S_MIN: Final = 1.0

_S_MAX: Final = 120.0


class RequestDeadline:
    """The end of the time that a request allows for all it asks for; some clients send 0 and expect the usual."""

    def __init__(self, timeout: timedelta) -> None:
        self._time = asyncio.get_running_loop().time
        self._end = self._time() + min(max(timeout.total_seconds(), _S_MIN), _S_MAX)

    def left_s(self, what: str) -> float:
        """The time that is left for a change; raise `RequestTimedOut` if it cannot begin any more."""
        left = self._end - self._time()
        if left <= 0:
            raise RequestTimedOut(f"{what}: not begun within the time that the request allows; send it again")
        return left


def check_replicas(replicas: Sequence[int], membership: Membership) -> None:
    """Raise `InvalidAssignment` unless the list names nodes of the cluster, each once."""
    if not replicas:
        raise InvalidAssignment("the assignment has an empty list of nodes")
    if len(set(replicas)) < len(replicas):
        raise InvalidAssignment(f"the assignment names a node twice: {list(replicas)}")
    known = sorted(node.node_id for node in membership.nodes())
    for replica in replicas:
        if replica not in known:
            raise InvalidAssignment(f"the assignment names node {replica}; the nodes of this cluster are {known}")


def check_assignments(assignments: Sequence[Sequence[int]], membership: Membership) -> int:
    """Check the lists of all partitions and return the replication factor that they agree on."""
    for replicas in assignments:
        check_replicas(replicas, membership)
    factors = {len(replicas) for replicas in assignments}
    if len(factors) > 1:
        raise InvalidAssignment(f"the assignment gives partitions different numbers of replicas: {sorted(factors)}")
    return factors.pop()


def topic_named(topics: Topics, name: str) -> Topic:
    """Find a topic by its name."""
    topic = topics.get(name)
    if topic is None:
        raise UnknownTopic(f"topic {name!r} does not exist")
    return topic


def topic_with_id(topics: Topics, topic_id: UUID) -> Topic:
    """Find a topic by its id."""
    topic = topics.by_id(topic_id)
    if topic is None:
        raise UnknownTopicId(f"no topic has the id {topic_id}")
    return topic
