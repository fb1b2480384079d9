"""Settling leases in the gateway: each at its leader, retried when leadership moves, and none lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest

from millstream.core.errors import BrokerUnreachable, InvalidRecordState, MillstreamError, RequestTimedOut, UnknownTopic
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.subscription import Verb
from millstream.gateway.api.routes import pulling
from millstream.gateway.api.routes.pulling import Lease, Verdict, settle
from millstream.protocol.private.subscription_messages import SettleRequest, SettleResponse
from millstream.protocol.private.subscriptions import DeliveryStateRequest, DeliveryStateResponse
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata

OK, NOT_LEADER, NOT_HELD = 0, 6, 121


class Cluster:
    """A client stand-in: node 1 leads everything, and responds for each partition with the given codes."""

    def __init__(self, codes: dict[int, list[int]]) -> None:
        self.codes = codes
        self.asked: list[list[int]] = []
        self.refreshed = 0
        self.ranges: list[list[tuple[int, int]]] = []
        self.states: dict[int, str] = {}

    async def leader_of(self, topic: str, _partition: int) -> NodeId:
        if topic == "gone":
            raise UnknownTopic(topic)
        return NodeId(1)

    async def metadata(self, topics: Iterable[str]) -> ClusterMetadata:
        self.refreshed += 1
        if self.refreshed == 1:
            raise BrokerUnreachable("away")
        partitions = {
            PartitionIndex(number): PartitionMetadata(
                partition=PartitionIndex(number), leader_id=NodeId(1), leader_epoch=Epoch(1), replicas=(), in_sync=()
            )
            for number in self.codes
        }
        found_topics = {
            name: TopicMetadata(name=name, topic_id=UUID(int=1), is_internal=False, partitions=partitions)
            for name in topics
        }
        return ClusterMetadata(cluster_id="c", controller_id=NodeId(1), nodes={}, topics=found_topics, errors={})

    async def call_leader(self, _topic: str, _partition: int, attempt: Any) -> Any:
        return await attempt(NodeId(1))

    async def private(self, _node: NodeId, key: int, body: bytes, **_: Any) -> memoryview:
        if key == DeliveryStateRequest.KEY:
            asked = msgspec.msgpack.decode(body, type=DeliveryStateRequest)
            state = self.states[asked.partition]
            return memoryview(msgspec.msgpack.encode(DeliveryStateResponse(0, None, state)))
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        self.asked.append([part.partition for part in request.partitions])
        self.ranges += [[(verb.start, verb.end) for verb in part.verbs] for part in request.partitions]
        results = [[(self.codes[part.partition].pop(0), None) for _ in part.verbs] for part in request.partitions]
        return memoryview(msgspec.msgpack.encode(SettleResponse(0, None, cast("Any", results))))


async def settled(cluster: Cluster) -> list[MillstreamError | None]:
    verdicts = [Verdict(Lease("orders", partition, 3, 1, "http/w"), Verb.ACCEPT) for partition in cluster.codes]
    return await settle(cast("Client", cluster), "billing", verdicts)


async def test_settlements_are_kept_while_no_leader_is_known() -> None:
    cluster = Cluster({0: [OK], 1: [NOT_LEADER, OK]})
    assert await settled(cluster) == [None, None]
    assert (cluster.asked, cluster.refreshed) == ([[0, 1], [1]], 2)


async def test_settlements_that_time_out_are_reported_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "SETTLE_S", 1.0)
    first, second = await settled(Cluster({0: [OK], 1: [NOT_LEADER] * 1000}))
    assert first is None
    assert isinstance(second, RequestTimedOut)


async def test_an_accept_whose_response_was_lost_is_found_to_be_accepted() -> None:
    cluster = Cluster({0: [NOT_LEADER, NOT_HELD], 1: [NOT_LEADER, NOT_HELD], 2: [NOT_HELD]})
    cluster.states = {0: "accepted", 1: "leased"}
    first, second, third = await settled(cluster)
    assert first is None
    assert isinstance(second, InvalidRecordState)
    assert isinstance(third, InvalidRecordState), "the state of a message that was settled once is not looked up"


async def test_messages_of_one_partition_are_settled_as_ranges_with_a_result_each() -> None:
    cluster = Cluster({0: [NOT_HELD, OK, OK, NOT_HELD]})
    verdicts = [Verdict(Lease("orders", 0, offset, 1, "http/w"), Verb.ACCEPT) for offset in (4, 3, 5)]
    outcomes = await settle(cast("Client", cluster), "billing", verdicts)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), InvalidRecordState]
    assert cluster.ranges == [[(3, 6)], [(3, 4), (4, 5), (5, 6)]]


async def test_a_partition_without_a_leader_is_the_result_of_its_leases() -> None:
    cluster = Cluster({0: [OK]})
    verdicts = [Verdict(Lease(topic, 0, 3, 1, "http/w"), Verb.ACCEPT) for topic in ("orders", "gone")]
    first, second = await settle(cast("Client", cluster), "billing", verdicts)
    assert first is None
    assert isinstance(second, UnknownTopic)
