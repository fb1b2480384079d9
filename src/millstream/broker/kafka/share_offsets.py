"""Where share groups are on their partitions, asked of and changed on the nodes that lead them."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from millstream.broker.cluster.membership import Membership
from millstream.broker.kafka.apis.subscription_forget import SubscriptionForget, Unwanted
from millstream.broker.kafka.apis.subscription_list import SubscriptionList, WantedSubscriptions
from millstream.broker.kafka.apis.subscription_seek import AT_OFFSET, Sought, SubscriptionSeek
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.errors import NotLeader
from millstream.core.topic import Topic
from millstream.protocol.wire.error_codes import error_from_code

UNKNOWN: Final = -1


class QueueOffset(NamedTuple):
    """Where a group is on one partition."""

    start: int
    backlog: int


class ShareOffsets:
    """The offsets of share groups in the whole cluster."""

    def __init__(self, service: SubscriptionService, membership: Membership) -> None:
        self._service = service
        self._membership = membership
        self._list = SubscriptionList(service)
        self._seek = SubscriptionSeek(service)
        self._forget = SubscriptionForget(service)

    async def of_group(self, name: str) -> dict[tuple[str, int], QueueOffset]:
        """Every partition on which a group has begun."""
        if self._service.declared.get(name) is None:
            return {}
        found, stored = await self._ask_all(name, set())
        closed = stored - found.keys()
        if closed:
            # Nobody has asked for them since their leader began to lead.
            found, _ = await self._ask_all(name, closed)
        return found

    async def _ask_all(
        self, name: str, to_open: set[tuple[str, int]]
    ) -> tuple[dict[tuple[str, int], QueueOffset], set[tuple[str, int]]]:
        """What all nodes tell of a group: its queues that are open, and those whose states they keep."""
        found: dict[tuple[str, int], QueueOffset] = {}
        stored: set[tuple[str, int]] = set()
        for node in self._membership.nodes():
            if node.node_id == self._membership.me.node_id:
                response = await self._list.handle(WantedSubscriptions([name], sorted(to_open)))
            else:
                body = {"names": [name], "open": sorted(to_open)}
                response = await self._send(node.node_id, SubscriptionList.key, body)
            for subscription in response["subscriptions"]:
                stored |= {(topic, partition) for topic, partition in subscription["kept"]}
                for queue in subscription["queues"]:
                    found[queue["topic"], queue["partition"]] = QueueOffset(queue["oldest"], queue["backlog"])
        return found, stored

    async def declare(self, name: str) -> None:
        """Make sure that a group has its subscription."""
        await self._service.declared.ensure(name)

    async def move(self, name: str, topic: Topic, partition: int, offset: int) -> None:
        """Have a group go on at an offset of one partition."""
        state = self._service.topics.state_of(topic, partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"nobody leads {topic.name}-{partition} now")
        to = f"{AT_OFFSET}{offset}"
        if state.leader == self._membership.me.node_id:
            await self._seek.handle(Sought(name, to, topic.name, partition))
            return
        body = {"name": name, "to": to, "topic": topic.name, "partition": partition}
        await self._send(state.leader, SubscriptionSeek.key, body)

    async def forget(self, name: str, topic: Topic) -> None:
        """Forget where a group is on a topic: it begins there as if for the first time."""
        # First nobody writes any more, then what was written goes.
        for keeps in (True, False):
            for node in self._membership.nodes():
                if node.node_id == self._membership.me.node_id:
                    await self._forget.handle(Unwanted(name, topic.name, keeps))
                else:
                    body = {"name": name, "topic": topic.name, "only_close": keeps}
                    await self._send(node.node_id, SubscriptionForget.key, body)

    async def _send(self, node: Any, key: int, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(bytes(await self._service.ask_node(node, key, json.dumps(body).encode())))
        if answer["error"]:
            raise error_from_code(answer["error"], answer["message"])
        return answer
