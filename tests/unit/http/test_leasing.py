from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from millstream.core.errors import BrokerUnreachable, NotFound, QuotaExceeded, RequestTimedOut
from millstream.core.subscription import Verb
from millstream.gateway.api import services as module
from millstream.gateway.api.record_reader import RecordReader
from millstream.gateway.api.services import Leasing
from millstream.protocol.private.leasing import LeaseRequests
from millstream.protocol.private.subscription_messages import (
    SETTLE_KEY,
    LeasedRange,
    PartitionMessages,
    ReceiveRequest,
    ReceiveResponse,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.channel import Pool
from millstream.protocol.wire.client import Client
from millstream_testing.waiting import until

HEADER = b"\0\0\0\0\0"
NOT_FOUND = 69


class Node:
    """A node of a fake cluster: returns its messages, or withholds its response."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages = 0
        self.error: Exception | int | None = None
        self.asked: list[ReceiveRequest] = []
        self.came = asyncio.Event()
        self.hung_up = 0
        self.hangs = False
        self.throttle_ms = 0
        self.address = f"node-{number}:9092"
        self.lease_ms: int | None = None
        self.waits_no_more = asyncio.Event()
        """The client has ended its half of the connection."""
        self.returned: list[SettleRequest] = []

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Node]:
        yield self

    async def exchange(self, key: int, version: int, body: list[bytes], *, timeout_s: float) -> memoryview:
        if key == SETTLE_KEY:
            self.returned.append(msgspec.msgpack.decode(body[0], type=SettleRequest))
            return memoryview(HEADER)
        request = msgspec.msgpack.decode(body[0], type=ReceiveRequest)
        self.asked.append(request)
        if isinstance(self.error, Exception):
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        if request.wait_ms and not self.messages:
            ends = [asyncio.ensure_future(self.came.wait()), asyncio.ensure_future(self.waits_no_more.wait())]
            await asyncio.wait(ends, timeout=request.wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if self.waits_no_more.is_set() and not self.messages:
                raise BrokerUnreachable("closed by the broker")
        return memoryview(HEADER + msgspec.msgpack.encode(self._respond(request)))

    def end_writing(self) -> None:
        self.hung_up += 1
        self.waits_no_more.set()

    async def shared(self) -> Node:
        return self

    def _respond(self, request: ReceiveRequest) -> ReceiveResponse:
        if isinstance(self.error, int):
            return ReceiveResponse(self.error, "no such subscription")
        count = min(self.messages, request.max_records)
        self.messages -= count
        if not count:
            return ReceiveResponse(0, None, [], self.throttle_ms)
        batch = bytes(encode_batch([NewRecord(None, b"x", (), 1)] * count))
        lease = LeasedRange(0, count, 1, 1000)
        return ReceiveResponse(0, None, [PartitionMessages("t", bytes(16), self.number, [lease], batch, self.lease_ms)])


class Cluster:
    """The client as seen by `Leasing`."""

    def __init__(self, nodes: int) -> None:
        self.nodes = {number: Node(number) for number in range(1, nodes + 1)}
        self.released: list[SettleRequest] = []

    async def metadata(self, topics: Any = None) -> Any:
        return SimpleNamespace(nodes=self.nodes)

    async def pool_for(self, node: int) -> Node:
        return self.nodes[node]

    async def private(self, node: int, key: int, body: bytes, **_: Any) -> memoryview:
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        self.released.append(request)
        return memoryview(msgspec.msgpack.encode(SettleResponse(0, None, [[(0, None)]] * len(request.partitions))))


def leasing(cluster: Cluster) -> Leasing:
    return Leasing(cast("Client", cluster), RecordReader())


def request(**changes: int) -> ReceiveRequest:
    return msgspec.structs.replace(ReceiveRequest("s", "w", 10, 1000, 60_000), **changes)


@pytest.fixture
def second_node_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with the second node instead of a random one."""
    monkeypatch.setattr(module, "randrange", lambda _nodes: 1)


async def test_available_messages_are_leased_from_one_node_after_another() -> None:
    cluster = Cluster(3)
    for node in cluster.nodes.values():
        node.messages = 4
    messages = await leasing(cluster).receive(request())
    assert len(messages) == 10
    assert sum(node.messages for node in cluster.nodes.values()) == 2
    assert not cluster.released


async def test_small_requests_get_messages_of_every_node_independently_of_others() -> None:
    cluster = Cluster(2)
    for node in cluster.nodes.values():
        node.messages = 1000
    asking, served = leasing(cluster), set()
    for _ in range(100):
        await asking.receive(request(max_records=1))
        served |= {message.partition for message in await asking.receive(request(max_records=1))}
    assert served == {1, 2}


async def test_all_nodes_together_return_at_most_the_requested_bytes() -> None:
    cluster = Cluster(3)
    for node in cluster.nodes.values():
        node.messages = 2
    await leasing(cluster).receive(request(max_bytes=4))
    bounds = [(node.asked[0].max_bytes, node.asked[0].at_least_one) for node in cluster.nodes.values() if node.asked]
    assert sorted(bounds) == [(2, False), (4, True)]


async def test_messages_beyond_the_requested_bytes_are_returned() -> None:
    """A compressed batch decompresses to more than its size."""
    cluster = Cluster(1)
    for wait_ms in (0, 60_000):
        cluster.nodes[1].messages = 5
        assert len(await leasing(cluster).receive(request(max_bytes=3, wait_ms=wait_ms))) == 3
        (released,) = cluster.released
        assert [(verb.start, verb.end, verb.verb) for verb in released.partitions[0].verbs] == [(3, 5, 5)]
        cluster.released.clear()


async def test_a_long_poll_gets_messages_of_any_node_and_cancels_the_others() -> None:
    cluster = Cluster(3)
    waiting = asyncio.create_task(leasing(cluster).receive(request()))
    await until(lambda: waiting.done() or all(len(node.asked) == 2 for node in cluster.nodes.values()))
    cluster.nodes[2].messages = 1
    cluster.nodes[2].came.set()
    (message,) = await waiting
    assert message.node == 2
    assert [node.hung_up for node in cluster.nodes.values()] == [1, 0, 1]


@pytest.mark.parametrize("wait_ms", [0, 1])
async def test_a_throttled_worker_is_notified_unless_another_node_has_messages(wait_ms: int) -> None:
    cluster = Cluster(2)
    cluster.nodes[1].throttle_ms = 5000
    with pytest.raises(QuotaExceeded) as refused:
        await leasing(cluster).receive(request(wait_ms=wait_ms))
    assert refused.value.wait_s == 5
    cluster.nodes[2].messages = 1
    assert len(await leasing(cluster).receive(request(wait_ms=wait_ms))) == 1


async def test_messages_beyond_the_requested_number_are_returned() -> None:
    cluster = Cluster(2)
    waiting = asyncio.create_task(leasing(cluster).receive(request(max_records=1)))
    await until(lambda: waiting.done() or all(len(node.asked) == 2 for node in cluster.nodes.values()))
    for node in cluster.nodes.values():
        node.messages = 1
        node.came.set()
    assert len(await waiting) == 1
    assert [(release.worker, len(release.partitions)) for release in cluster.released] in ([], [("w", 1)])


async def test_a_single_node_is_asked_once() -> None:
    cluster = Cluster(1)
    cluster.nodes[1].messages = 1
    assert len(await leasing(cluster).receive(request())) == 1
    assert len(cluster.nodes[1].asked) == 1


async def test_an_unavailable_node_does_not_block_the_others() -> None:
    cluster = Cluster(2)
    cluster.nodes[1].error = BrokerUnreachable("gone")
    cluster.nodes[2].messages = 1
    assert len(await leasing(cluster).receive(request())) == 1
    cluster.nodes[2].error = BrokerUnreachable("gone, too")
    with pytest.raises(BrokerUnreachable):
        await leasing(cluster).receive(request(wait_ms=0))


async def test_a_missing_subscription_is_reported() -> None:
    cluster = Cluster(2)
    for node in cluster.nodes.values():
        node.error = NOT_FOUND
    with pytest.raises(NotFound, match="no such subscription"):
        await leasing(cluster).receive(request())


async def test_a_request_waits_no_longer_than_its_timeout() -> None:
    assert await leasing(Cluster(2)).receive(request(wait_ms=20)) == []


@pytest.mark.usefixtures("second_node_first")
async def test_a_client_that_disconnects_while_a_node_hangs_leaves_nothing_leased() -> None:
    cluster = Cluster(2)
    cluster.nodes[2].messages = 4
    cluster.nodes[1].hangs = True
    asking = asyncio.create_task(leasing(cluster).receive(request()))
    await until(lambda: cluster.nodes[1].asked)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (released,) = cluster.released
    assert [part.partition for part in released.partitions] == [2]
    assert [(verb.start, verb.end, verb.verb) for verb in released.partitions[0].verbs] == [(0, 4, 5)]


@pytest.mark.usefixtures("second_node_first")
async def test_messages_of_one_node_are_returned_when_another_refuses() -> None:
    cluster = Cluster(2)
    cluster.nodes[2].messages = 4
    cluster.nodes[1].error = NOT_FOUND
    with pytest.raises(NotFound):
        await leasing(cluster).receive(request())
    assert [part.partition for release in cluster.released for part in release.partitions] == [2]


@pytest.mark.usefixtures("second_node_first")
async def test_a_hanging_node_does_not_block_the_others_and_is_skipped_for_a_while() -> None:
    cluster = Cluster(2)
    cluster.nodes[2].error = RequestTimedOut("nothing within 15 s")
    cluster.nodes[1].messages = 2
    asks = leasing(cluster)
    for _ in range(2):
        assert len(await asks.receive(request(max_records=1))) == 1
    assert len(cluster.nodes[2].asked) == 1
    cluster.nodes[1].error = RequestTimedOut("nothing within 15 s")
    with pytest.raises(RequestTimedOut):
        await asks.receive(request(wait_ms=0))


async def test_a_long_poll_without_available_nodes_is_reported() -> None:
    cluster = Cluster(2)
    for node in cluster.nodes.values():
        node.error = BrokerUnreachable("gone")
    with pytest.raises(BrokerUnreachable):
        await leasing(cluster).receive(request(wait_ms=20))


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_messages_that_arrive_after_the_client_disconnected_are_returned(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(1)
    node = cluster.nodes[1]
    node.lease_ms = 30_000
    asks = leasing(cluster)
    if not is_cancelled:
        monkeypatch.setattr(module, "RESPONSE_S", -0.9)
    asking = asyncio.create_task(asks.receive(request(wait_ms=1000)))
    await until(lambda: node.asked)
    # They are leased in the moment in which the request is cancelled.
    node.messages = 4
    if is_cancelled:
        asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() if is_cancelled else isinstance(asking.exception(), RequestTimedOut)
    await asks.close()
    (returned,) = node.returned
    assert (returned.subscription, returned.worker) == ("s", "w")
    assert [(verb.start, verb.end, verb.verb, verb.attempt) for verb in returned.partitions[0].verbs] == [(0, 4, 5, 1)]


async def test_a_request_that_fails_after_the_program_gave_up_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(1)
    node = cluster.nodes[1]
    requests = LeaseRequests()
    asking = asyncio.create_task(
        requests.receive(cast("Pool", node), ReceiveRequest("s", "w", 1, 1, 1000), timeout_s=60)
    )
    await until(lambda: node.asked)
    (pending,) = requests._open
    asking.cancel()
    await asyncio.wait([asking])
    for returning in requests._returning:
        returning.cancel()
    await asyncio.wait([pending.task])
    del pending, asking, returning
    gc.collect()
    assert caplog.messages == []


async def test_a_response_in_transit_for_longer_than_its_lease_is_confirmed_first() -> None:
    cluster = Cluster(1)
    cluster.nodes[1].messages, cluster.nodes[1].lease_ms = 3, 0
    asks = leasing(cluster)
    # Even the extension gets no response before the lease expires, so the messages are not delivered.
    assert await asks.receive(request(wait_ms=0)) == []
    assert [part.verbs[0].verb for release in cluster.released for part in release.partitions] == [
        Verb.EXTEND,
        Verb.RETURN,
    ]
