"""Settlement by the client: consecutive messages as one range, and individually where a range is refused."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from millstream.core.errors import BrokerUnreachable, MillstreamError
from millstream.core.ids import NodeId, Offset
from millstream.core.subscription import Verb
from millstream.protocol.private.subscription_messages import SettleRequest, SettleResponse
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.records.record import Record

REFUSED = 121


class Broker:
    """A client stand-in that accepts every range without a lost message."""

    def __init__(self, *lost: int, unreachable: int = -1) -> None:
        self.lost = set(lost)
        self.unreachable = unreachable
        self.asked: list[list[tuple[str, int, int, int]]] = []
        self.attempts: list[int | None] = []

    async def private(self, node: NodeId | None, _key: int, body: bytes, **_given: Any) -> memoryview:
        if node == self.unreachable:
            raise BrokerUnreachable("gone")
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        self.asked.append(
            [
                (part.topic, part.partition, verb.start, verb.end - 1)
                for part in request.partitions
                for verb in part.verbs
            ]
        )
        self.attempts += [verb.attempt for part in request.partitions for verb in part.verbs]
        results: list[list[tuple[int, str | None]]] = [
            [
                (REFUSED, "not yours") if self.lost & set(range(verb.start, verb.end)) else (0, None)
                for verb in part.verbs
            ]
            for part in request.partitions
        ]
        return memoryview(msgspec.msgpack.encode(SettleResponse(0, None, results)))


def leased(offset: int, *, partition: int = 0, node: int = 1, attempt: int = 1) -> LeasedMessage:
    """A message held by the worker."""
    record = Record(Offset(offset), 0, None, b"", ())
    return LeasedMessage(NodeId(node), "orders", UUID(int=1), partition, attempt, 0, record)


async def settled(broker: Broker, *messages: LeasedMessage) -> list[MillstreamError | None]:
    client: Any = broker
    return await SubscriptionClient(client).settle("billing", "one", messages, Verb.ACCEPT)


async def test_consecutive_messages_are_one_range() -> None:
    broker = Broker()
    messages = [leased(3), leased(4), leased(5), leased(7), leased(8, partition=1), leased(9, partition=1)]
    assert await settled(broker, *messages) == [None] * 6
    assert broker.asked == [[("orders", 0, 3, 5), ("orders", 0, 7, 7), ("orders", 1, 8, 9)]]


async def test_a_range_has_one_attempt_and_names_it() -> None:
    broker = Broker()
    await settled(broker, leased(3), leased(4), leased(5, attempt=2), leased(6, attempt=2))
    assert broker.asked == [[("orders", 0, 3, 4), ("orders", 0, 5, 6)]]
    assert broker.attempts == [1, 2]


async def test_the_messages_of_a_refused_range_are_settled_individually() -> None:
    broker = Broker(4)
    results = await settled(broker, leased(3), leased(4), leased(5))
    assert [error is None for error in results] == [True, False, True]
    assert broker.asked[1] == [("orders", 0, 3, 3), ("orders", 0, 4, 4), ("orders", 0, 5, 5)]


@pytest.mark.parametrize("unreachable", [1, 2])
async def test_an_unavailable_node_does_not_prevent_settling_at_others(unreachable: int) -> None:
    broker = Broker(unreachable=unreachable)
    results = await settled(broker, leased(3, node=1), leased(4, node=1), leased(5, node=2))
    assert [isinstance(error, BrokerUnreachable) for error in results] == [
        unreachable == 1,
        unreachable == 1,
        unreachable == 2,
    ]


async def test_without_messages_nothing_is_sent() -> None:
    broker = Broker()
    assert await settled(broker) == []
    assert broker.asked == []
