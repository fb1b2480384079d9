"""The outcome of each settlement, success or error, reaches its caller."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from millstream.client.message import Lease, Message
from millstream.client.settling import Completion, Settlement, Settler
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidRecordState,
    NotLeader,
    ProtocolViolation,
    RequestTimedOut,
)
from millstream.core.ids import NodeId
from millstream.core.subscription import Verb
from millstream.protocol.private.subscription_messages import SettledRange, SettleRequest, SettleResponse
from millstream.protocol.private.subscriptions import DeliveryStateRequest, DeliveryStateResponse
from millstream_testing.waiting import until

HANG_S = 60
INVALID_RECORD_STATE = 121


class InertSettler:
    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        raise NotImplementedError


class Node:
    """A node that accepts ranges, except those with a message that is not leased."""

    def __init__(self, *on_lost: int) -> None:
        self.on_lost = set(on_lost)
        self.settled: list[SettledRange] = []

    async def private(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        results = [[self._result(verb) for verb in part.verbs] for part in request.partitions]
        return memoryview(msgspec.msgpack.encode(SettleResponse(0, None, results)))

    def _result(self, verb: SettledRange) -> tuple[int, str | None]:
        if self.on_lost & {*range(verb.start, verb.end)}:
            return INVALID_RECORD_STATE, "not held"
        self.settled.append(verb)
        return 0, None


def settling_at(node: Any, on_lost: list[int] | None = None) -> Settler:
    def note(settlement: Settlement) -> None:
        if on_lost is not None:
            on_lost.extend(settlement.offsets)

    return Settler(node, "billing", "worker", on_lost=note, oldest_sent=lambda: math.inf)


def lease() -> Lease:
    now = time.monotonic()
    return Lease("orders", b"0" * 16, 0, settler=InertSettler(), node=NodeId(1), received=now, lease_s=30.0)


def order_of(offsets: list[int]) -> tuple[Settlement, asyncio.Future[None]]:
    response: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Settlement(lease(), offsets, Verb.ACCEPT, completion=Completion(response)), response


@pytest.mark.parametrize("offsets", [[1, 2, 3, 5], [5, 7, 8], [3, 4, 5, 6], [5]])
async def test_one_lost_lease_is_an_error_and_the_other_results_are_reported(offsets: list[int]) -> None:
    node, on_lost = Node(5), list[int]()
    settling = settling_at(node, on_lost)
    settlement, response = order_of(list(offsets))
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    with pytest.raises(InvalidRecordState, match="not held"):
        await response
    assert on_lost == [5]
    settled = [offset for settlement in node.settled for offset in range(settlement.start, settlement.end)]
    assert sorted(settled) == [offset for offset in offsets if offset != 5]


async def test_all_refusals_of_a_response_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    on_lost = list[int]()
    settling = settling_at(Node(*range(200)), on_lost)
    settling.enqueue(Settlement(lease(), list(range(100)), Verb.ACCEPT))
    settling.enqueue(Settlement(lease(), list(range(100, 200)), Verb.ACCEPT))
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    await asyncio.sleep(0)
    assert len(on_lost) == 200
    (line,) = caplog.messages
    assert line == "200 messages of orders-0 from offset 0 may not be settled: not held"


async def test_all_ranges_of_a_settlement_are_sent_before_its_caller_returns() -> None:
    node = Node()
    settling = settling_at(node)
    settlement, response = order_of([9, 1, 2, 5])
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await response
    assert [(settlement.start, settlement.end) for settlement in node.settled] == [(1, 3), (5, 6), (9, 10)]


class Failing(Node):
    """Fails with the given errors, then works; it knows the delivery state of messages."""

    def __init__(self, *failures: BaseException, state: str = "accepted") -> None:
        super().__init__(5)
        self._failures = list(failures)
        self._state = state

    async def private(self, node: NodeId | None, key: int, body: bytes, **options: object) -> memoryview:
        if key == DeliveryStateRequest.KEY:
            return memoryview(msgspec.msgpack.encode(DeliveryStateResponse(0, None, self._state, 1, 0, True)))
        if self._failures:
            raise self._failures.pop(0)
        return await super().private(node, key, body)

    async def metadata(self, topics: object) -> Any:
        partition = SimpleNamespace(partition=0, leader_id=2)
        return SimpleNamespace(topics={"orders": SimpleNamespace(partitions={0: partition})})

    async def call_leader(self, topic: str, partition: int, attempt: Any) -> Any:
        return await attempt(NodeId(2))


async def test_an_unexpected_error_reaches_the_caller() -> None:
    settling = settling_at(Failing(ValueError("what is this")))
    settlement, response = order_of([1, 3])
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    with pytest.raises(ProtocolViolation, match="what is this"):
        await response


async def test_closing_wakes_pending_callers() -> None:
    class Silent(Node):
        async def private(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
            await asyncio.get_running_loop().create_future()
            raise NotImplementedError

    settling = settling_at(Silent())
    (first, sent), (second, waiting) = order_of([1]), order_of([2])
    settling.enqueue(first)
    await asyncio.sleep(0)
    settling.enqueue(second)
    await settling.close()
    for response in (sent, waiting):
        with pytest.raises(RequestTimedOut, match="is unknown"):
            await response


async def test_closing_wakes_callers_that_wait_for_a_leader() -> None:
    settling = settling_at(Failing(RequestTimedOut("lost")))
    settlement, response = order_of([1])
    settling.enqueue(settlement)
    await until(lambda: settling._moving)
    await settling.close()
    with pytest.raises(RequestTimedOut, match="is unknown"):
        await response


async def test_an_accept_with_a_lost_response_is_found_to_be_accepted() -> None:
    settling = settling_at(Failing(RequestTimedOut("lost")))
    settlement, response = order_of([4, 5, 6])
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await response


async def test_an_accept_after_the_lease_expired_is_an_error() -> None:
    settling = settling_at(Failing(RequestTimedOut("lost"), state="leased"))
    settlement, response = order_of([4, 5, 6])
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(InvalidRecordState, match="orders-0 at 5 is not leased, nor known to be accepted: leased"):
            await response


async def test_deliveries_of_the_same_message_are_distinguished() -> None:
    node = Node()
    settling = settling_at(node)
    for offset in range(1, 5):
        settlement, _ = order_of([offset])
        settlement.lease.attempt = 1 if offset < 3 else 2
        settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    assert [(settlement.start, settlement.end, settlement.attempt) for settlement in node.settled] == [
        (1, 3, 1),
        (3, 5, 2),
    ]


@pytest.mark.parametrize(("state", "reason"), [("accepted", None), ("waiting", "nor known to be accepted: waiting")])
async def test_the_outcome_of_a_lost_accept_is_looked_up_when_the_lease_expires(state: str, reason: str | None) -> None:
    settling = settling_at(Failing(BrokerUnreachable("lost"), state=state))
    settlement, response = order_of([4])
    settlement.lease.valid_until = 0.0
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        if reason is None:
            await response
        else:
            with pytest.raises(InvalidRecordState, match=reason):
                await response


async def test_failing_look_ups_run_concurrently() -> None:
    class Gone(Failing):
        asked = 0

        async def call_leader(self, topic: str, partition: int, attempt: Any) -> Any:
            self.asked += 1
            # By now, every caller whose request was lost waits here.
            await until(lambda: len(settling._unverified) >= 3)
            raise BrokerUnreachable("nobody there")

    node = Gone(*[BrokerUnreachable("lost")] * 3)
    settling = settling_at(node)
    settlements = [order_of([offset]) for offset in (1, 4, 7)]
    for settlement, _ in settlements:
        settlement.lease.valid_until = 0.0
        settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    for _, response in settlements:
        with pytest.raises(InvalidRecordState, match="nobody there"):
            await response
    assert node.asked == 1


async def test_settlements_sent_to_a_former_leader_are_resent_to_the_new_one() -> None:
    class Moved(Failing):
        asked: ClassVar[list[NodeId | None]] = []

        async def private(self, node: NodeId | None, key: int, body: bytes, **options: object) -> memoryview:
            self.asked.append(node)
            return await super().private(node, key, body, **options)

    node = Moved(NotLeader("another one leads"))
    settling = settling_at(node)
    settlement, response = order_of([1, 2])
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await response
    assert node.asked == [NodeId(1), NodeId(2)]
    assert [(settlement.start, settlement.end) for settlement in node.settled] == [(1, 3)]


async def test_an_outcome_without_a_waiting_caller_is_not_looked_up() -> None:
    class Asked(Failing):
        async def call_leader(self, topic: str, partition: int, attempt: Any) -> Any:
            raise NotImplementedError

    on_lost = list[int]()
    settling = settling_at(Asked(BrokerUnreachable("lost")), on_lost)
    settlement = Settlement(lease(), [4, 5, 6], Verb.ACCEPT)
    settlement.lease.valid_until = 0.0
    settling.enqueue(settlement)
    async with asyncio.timeout(HANG_S):
        await settling.flush()
    assert on_lost == [4, 5, 6]
