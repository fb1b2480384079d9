"""The topics of share groups for which none are declared: what their members subscribe to, or have begun with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from uuid import UUID

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.subscriptions.state_coordinator import StateCoordinator
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.core.subscription import Subscription
from millstream.protocol.private.subscription_messages import LIST_KEY

KNOWN_S: Final = 1.0
"""For how long it is not asked again."""
KNOWN_MAX: Final = 1000

AskNode = Callable[[NodeId, int, bytes], Awaitable[memoryview]]


class ShareTopics:
    """What is delivered by subscriptions without topics of their own. Each node knows some of it."""

    def __init__(
        self, topics: Topics, states: StateCoordinator, membership: Membership, clock: Clock, ask_node: AskNode
    ) -> None:
        self.members: Callable[[str], frozenset[str]] = lambda _group: frozenset()
        """The topics of a group's members, if this node coordinates it."""
        self._topics = topics
        self._states = states
        self._membership = membership
        self._clock = clock
        self._ask_node = ask_node
        self._known: dict[UUID, tuple[float, tuple[str, ...]]] = {}

    def kept(self) -> dict[UUID, list[tuple[str, int]]]:
        """By subscription: the queues that have begun and whose states this node keeps."""
        kept: dict[UUID, list[tuple[str, int]]] = {}
        for key in self._states.written():
            topic = self._topics.by_id(key.topic_id)
            if topic is not None:
                kept.setdefault(key.subscription_id, []).append((topic.name, key.partition))
        return kept

    async def of(self, subscription: Subscription) -> tuple[str, ...]:
        """The topics of a subscription, as all nodes together know them."""
        if subscription.topics:
            return subscription.topics
        now_s = self._clock.monotonic()
        known = self._known.get(subscription.subscription_id)
        if known is not None and now_s < known[0]:
            return known[1]
        found = self.members(subscription.name) | {
            topic for topic, _ in self.kept().get(subscription.subscription_id, ())
        }
        body = json.dumps({"names": [subscription.name]}).encode()
        for node in self._membership.nodes():
            if node.node_id != self._membership.me.node_id:
                # What a node that is away knows is known again when it is back.
                with suppress(MillstreamError):
                    told = json.loads(bytes(await self._ask_node(node.node_id, LIST_KEY, body)))
                    found |= {topic for one in told.get("subscriptions", ()) for topic in one["topics"]}
        topics = tuple(sorted(found))
        if topics:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[subscription.subscription_id] = (now_s + KNOWN_S, topics)
        return topics
