"""How the gateway settles leases: each at its leader, again when that moves, and nothing that was told is lost."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from millstream.core.errors import BrokerUnreachable, InvalidRecordState, MillstreamError, NotLeader
from millstream.core.ids import NodeId
from millstream.core.verb import Verb
from millstream.gateway.api import settling
from millstream.gateway.api.settling import Lease, Verdict, settle
from millstream.protocol.private.delivery_state import DELIVERY_STATE_KEY, DeliveryStateAnswer, DeliveryStateRequest
from millstream.protocol.private.subscription_messages import SettleAnswer, SettleRequest
from millstream.protocol.wire.client import Client

OK, NOT_LEADER, NOT_HELD = 0, 6, 121


class Cluster:
    """In place of a client: node 1 leads all, and answers for each partition with the codes that it is given."""

    def __init__(self, codes: dict[int, list[int]]) -> None:
        self.codes = codes
        self.asked: list[list[int]] = []
        self.refreshed = 0
        self.states: dict[int, str] = {}

    async def leader_of(self, _topic: str, _partition: int) -> NodeId:
        return NodeId(1)

    async def metadata(self, _topics: Any) -> None:
        self.refreshed += 1
        raise BrokerUnreachable("away")

    async def call_leader(self, _topic: str, _partition: int, attempt: Any) -> Any:
        return await attempt(NodeId(1))

    async def private(self, _node: NodeId, key: int, body: bytes, **_: Any) -> memoryview:
        if key == DELIVERY_STATE_KEY:
            asked = msgspec.msgpack.decode(body, type=DeliveryStateRequest)
            state = self.states[asked.partition]
            return memoryview(msgspec.msgpack.encode(DeliveryStateAnswer(0, None, state)))
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        self.asked.append([part.partition for part in request.partitions])
        results = [[(self.codes[part.partition].pop(0), None)] for part in request.partitions]
        return memoryview(msgspec.msgpack.encode(SettleAnswer(0, None, cast("Any", results))))


async def settled(cluster: Cluster) -> list[MillstreamError | None]:
    verdicts = [Verdict(Lease("orders", partition, 3, 1, "http/w"), Verb.ACCEPT) for partition in cluster.codes]
    return await settle(cast("Client", cluster), "billing", verdicts)


async def test_settlements_are_kept_while_no_leader_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PAUSE_S", 0.0)
    cluster = Cluster({0: [OK], 1: [NOT_LEADER, OK]})
    assert await settled(cluster) == [None, None]
    assert (cluster.asked, cluster.refreshed) == ([[0, 1], [1]], 1)


async def test_what_could_not_be_settled_in_time_is_reported_beside_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLE_S", 0.0)
    first, second = await settled(Cluster({0: [OK], 1: [NOT_LEADER]}))
    assert first is None
    assert isinstance(second, NotLeader)


async def test_what_was_accepted_by_a_leader_whose_answer_was_lost_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PAUSE_S", 0.0)
    cluster = Cluster({0: [NOT_LEADER, NOT_HELD], 1: [NOT_LEADER, NOT_HELD], 2: [NOT_HELD]})
    cluster.states = {0: "accepted", 1: "leased"}
    first, second, third = await settled(cluster)
    assert first is None
    assert isinstance(second, InvalidRecordState)
    assert isinstance(third, InvalidRecordState), "nobody asks about what was said once"
