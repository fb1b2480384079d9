"""Where share groups are on their partitions, asked of and changed on the nodes that lead them."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import msgspec

from millstream.broker.cluster.membership import Membership
from millstream.broker.kafka.apis.subscription_apis import (
    AT_OFFSET,
    SubscriptionForget,
    SubscriptionList,
    SubscriptionSeek,
)
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.errors import NotLeader
from millstream.core.ids import NodeId
from millstream.core.topic import Topic
from millstream.protocol.private.message import Response, decode, encode
from millstream.protocol.private.subscription_messages import (
    ForgetSubscriptionRequest,
    ListSubscriptionsRequest,
    ListSubscriptionsResponse,
    SeekSubscriptionRequest,
    SeekSubscriptionResponse,
)
from millstream.protocol.wire.error_codes import error_from_code

UNKNOWN: Final = -1

R = TypeVar("R", bound=Response)


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
            # They were not opened since their leader took over.
            found, _ = await self._ask_all(name, closed)
        return found

    async def _ask_all(
        self, name: str, to_open: set[tuple[str, int]]
    ) -> tuple[dict[tuple[str, int], QueueOffset], set[tuple[str, int]]]:
        """Ask all nodes for the open queues of a group, and for those whose states they store."""
        found: dict[tuple[str, int], QueueOffset] = {}
        stored: set[tuple[str, int]] = set()
        request = ListSubscriptionsRequest([name], sorted(to_open))
        for node in self._membership.nodes():
            if node.node_id == self._membership.me.node_id:
                response = await self._list.handle(request)
            else:
                response = await self._send(node.node_id, SubscriptionList.key, request, ListSubscriptionsResponse)
            for subscription in response.subscriptions:
                stored |= {(topic, partition) for topic, partition in subscription["kept"]}
                for queue in subscription["queues"]:
                    found[queue["topic"], queue["partition"]] = QueueOffset(queue["oldest"], queue["backlog"])
        return found, stored

    async def declare(self, name: str) -> None:
        """Declare the subscription of a group if it does not exist."""
        await self._service.declared.ensure(name)

    async def move(self, name: str, topic: Topic, partition: int, offset: int) -> None:
        """Move a group to an offset of one partition."""
        state = self._service.topics.state_of(topic, partition)
        if state is None or not state.has_leader:
            raise NotLeader(f"{topic.name}-{partition} has no leader")
        request = SeekSubscriptionRequest(name, f"{AT_OFFSET}{offset}", topic.name, partition)
        if state.leader == self._membership.me.node_id:
            await self._seek.handle(request)
        else:
            await self._send(state.leader, SubscriptionSeek.key, request, SeekSubscriptionResponse)

    async def forget(self, name: str, topic: Topic) -> None:
        """Discard a group's state on a topic, so that it starts as if for the first time."""
        # First all queues stop writing, then their states are deleted.
        for only_close in (True, False):
            request = ForgetSubscriptionRequest(name, topic.name, only_close)
            for node in self._membership.nodes():
                if node.node_id == self._membership.me.node_id:
                    await self._forget.handle(request)
                else:
                    await self._send(node.node_id, SubscriptionForget.key, request, Response)

    async def _send(self, node: NodeId, key: int, request: msgspec.Struct, kind: type[R]) -> R:
        response = decode(await self._service.ask_node(node, key, encode(request)), kind)
        if response.error:
            raise error_from_code(response.error, response.message)
        return response
