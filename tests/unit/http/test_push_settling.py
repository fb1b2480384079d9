"""Settlements of the push process: batched, sent to this node, and to the new leader after a partition has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest

from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.subscription import Verb
from millstream.gateway.push import pusher as settling
from millstream.gateway.push.pusher import Settler
from millstream.protocol.private.subscription_messages import SettleRequest, SettleResponse
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.record import Record
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata
from millstream_testing.waiting import until

OK, NOT_LEADER, NOT_HELD = 0, 6, 121
LEADER = NodeId(2)
INDEXES = [PartitionIndex(index) for index in range(3)]


def message(offset: int, partition: int = 0) -> LeasedMessage:
    return LeasedMessage(None, "orders", UUID(int=7), partition, 1, 0, Record(Offset(offset), 0, None, b"", ()))


class Node:
    """A node that records requests, and responds for each partition."""

    def __init__(self) -> None:
        self.requests: list[SettleRequest] = []
        self.codes: dict[int, int] = {}
        self.error = 0
        self.is_away = False
        self.may_respond = asyncio.Event()
        self.may_respond.set()

    async def ask(self, _key: int, body: bytes) -> memoryview:
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        self.requests.append(request)
        await self.may_respond.wait()
        if self.is_away:
            raise BrokerUnreachable("away")
        results = [[(self.codes.get(part.partition, OK), None)] * len(part.verbs) for part in request.partitions]
        return memoryview(msgspec.msgpack.encode(SettleResponse(self.error, None, cast("Any", results))))

    def offsets(self) -> list[list[int]]:
        return [
            [offset for part in request.partitions for verb in part.verbs for offset in range(verb.start, verb.end)]
            for request in self.requests
        ]


class Others:
    """A client that knows the current leader."""

    def __init__(self, leader: Node) -> None:
        self.leader = leader

    async def metadata(self, topics: list[str]) -> ClusterMetadata:
        assert topics == ["orders"]
        partitions = {
            index: PartitionMetadata(
                partition=index, leader_id=LEADER, leader_epoch=Epoch(0), replicas=(LEADER,), in_sync=(LEADER,)
            )
            for index in INDEXES
        }
        topic = TopicMetadata(name="orders", topic_id=UUID(int=7), is_internal=False, partitions=partitions)
        return ClusterMetadata(cluster_id="c", controller_id=LEADER, nodes={}, topics={"orders": topic}, errors={})

    async def call_leader(self, _topic: str, _partition: int, attempt: Callable[[NodeId], Awaitable[Any]]) -> Any:
        raise BrokerUnreachable("nobody can be asked")

    async def private(self, node: NodeId, key: int, body: bytes) -> memoryview:
        assert node == LEADER
        return await self.leader.ask(key, body)


class SettlingNodes:
    """A settler, with its own node and another one."""

    def __init__(self) -> None:
        self.here, self.there = Node(), Node()
        self.settler = Settler("billing", "push/1", self.here.ask, cast("Client", Others(self.there)))

    def accept(self, offset: int, partition: int = 0) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self.settler.settle(message(offset, partition), Verb.ACCEPT))


@pytest.fixture
async def nodes() -> SettlingNodes:
    return SettlingNodes()


async def test_settlements_made_during_a_request_are_batched(nodes: SettlingNodes) -> None:
    nodes.here.may_respond.clear()
    first = [nodes.accept(0), nodes.accept(1)]
    await until(lambda: nodes.here.requests)
    later = [nodes.accept(2), nodes.accept(3, partition=1), nodes.accept(4)]
    await asyncio.sleep(0)
    nodes.here.may_respond.set()
    assert await asyncio.gather(*first, *later) == [True] * 5
    assert nodes.here.offsets() == [[0, 1], [2, 4, 3]]
    assert nodes.here.requests[0].worker == "push/1"


async def test_a_release_carries_its_delay_and_reason(nodes: SettlingNodes) -> None:
    assert await nodes.settler.settle(message(3), Verb.RELEASE, delay_ms=700, reason="the endpoint returned 503")
    (verb,) = nodes.here.requests[0].partitions[0].verbs
    assert (verb.start, verb.verb, verb.delay_ms, verb.reason) == (3, Verb.RELEASE, 700, "the endpoint returned 503")
    assert verb.attempt == 1


async def test_a_lost_lease_is_not_retried_at_another_node(nodes: SettlingNodes) -> None:
    nodes.here.codes = {0: NOT_HELD}
    assert [*await asyncio.gather(nodes.accept(0), nodes.accept(0, partition=1))] == [False, True]
    assert not nodes.there.requests


async def test_a_partition_that_has_moved_is_settled_at_its_leader(nodes: SettlingNodes) -> None:
    nodes.here.codes = {0: NOT_LEADER}
    assert [*await asyncio.gather(nodes.accept(0), nodes.accept(1, partition=1), nodes.accept(2))] == [True] * 3
    assert nodes.there.offsets() == [[0, 2]]


@pytest.mark.parametrize("error", [NOT_LEADER, None])
async def test_a_silent_node_is_replaced_by_the_leader(nodes: SettlingNodes, error: int | None) -> None:
    nodes.here.is_away = error is None
    nodes.here.error = error or 0
    assert await nodes.accept(0)
    assert nodes.there.offsets() == [[0]]


async def test_without_any_response_the_lease_expires(nodes: SettlingNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLE_S", 0.05)
    nodes.here.is_away = True
    nodes.there.may_respond.clear()
    assert await nodes.accept(0) is False
    nodes.there.is_away = True
    nodes.there.may_respond.set()
    assert await nodes.accept(0) is False


async def test_an_unexpected_response_blocks_nothing(nodes: SettlingNodes, caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(_key: int, _body: bytes) -> memoryview:
        raise ZeroDivisionError("a defect")

    nodes.settler._send_request, ask = breaks, nodes.settler._send_request
    assert await nodes.accept(0) is False
    assert "could not be settled" in caplog.text
    nodes.settler._send_request = ask
    assert await nodes.accept(1) is True


async def test_a_hanging_leader_does_not_block_other_partitions(nodes: SettlingNodes) -> None:
    nodes.here.codes = {0: NOT_LEADER, 1: NOT_LEADER}
    nodes.there.may_respond.clear()
    moved = [nodes.accept(0), nodes.accept(0, partition=1)]
    await until(lambda: nodes.there.requests)
    assert await nodes.accept(1, partition=2) is True
    assert not any(task.done() for task in moved)
    nodes.there.may_respond.set()
    assert await asyncio.gather(*moved) == [True, True]
