"""What is told of messages reaches whoever waits for it: all of it, or the error."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from millstream.client.held import Held
from millstream.client.message import ACCEPT, Message
from millstream.client.settling import Awaited, Order, Settling
from millstream.model.errors import InvalidRecordState
from millstream.model.ids import NodeId
from millstream.wire.subscription_messages import SettleAnswer, SettledRange, SettleRequest

HANG_S = 60
INVALID_RECORD_STATE = 121


class NoSettler:
    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        raise NotImplementedError


class Node:
    """Takes ranges, save those in which there is a message that nobody holds."""

    def __init__(self, *lost: int) -> None:
        self.lost = set(lost)
        self.told: list[SettledRange] = []

    async def private(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        results = [[self._result(verb) for verb in part.verbs] for part in request.partitions]
        return memoryview(msgspec.msgpack.encode(SettleAnswer(0, None, results)))

    def _result(self, verb: SettledRange) -> tuple[int, str | None]:
        if self.lost & {*range(verb.first, verb.last + 1)}:
            return INVALID_RECORD_STATE, "not held"
        self.told.append(verb)
        return 0, None


def settling_at(node: Any, lost: list[int] | None = None) -> Settling:
    def note(order: Order) -> None:
        if lost is not None:
            lost.extend(order.offsets)

    return Settling(node, "billing", "worker", lost=note)


def held() -> Held:
    now = asyncio.get_running_loop().time()
    return Held("orders", b"0" * 16, 0, settler=NoSettler(), node=NodeId(1), received=now, lease_s=30.0)


def order_of(offsets: list[int]) -> tuple[Order, asyncio.Future[None]]:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Order(held(), offsets, ACCEPT, awaited=Awaited(answer)), answer


@pytest.mark.parametrize("offsets", [[1, 2, 3, 5], [5, 7, 8], [3, 4, 5, 6], [5]])
async def test_one_message_that_is_lost_is_an_error_and_the_others_are_told(offsets: list[int]) -> None:
    node, lost = Node(5), list[int]()
    settling = settling_at(node, lost)
    order, answer = order_of(list(offsets))
    settling.tell(order)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    with pytest.raises(InvalidRecordState, match="not held"):
        await answer
    assert lost == [5]
    told = [offset for one in node.told for offset in range(one.first, one.last + 1)]
    assert sorted(told) == [offset for offset in offsets if offset != 5]


async def test_all_parts_are_told_before_the_answer_comes() -> None:
    node = Node()
    settling = settling_at(node)
    order, answer = order_of([9, 1, 2, 5])
    settling.tell(order)
    async with asyncio.timeout(HANG_S):
        await answer
    assert [(one.first, one.last) for one in node.told] == [(1, 2), (5, 5), (9, 9)]
