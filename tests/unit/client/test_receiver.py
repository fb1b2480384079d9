"""A receiver polls every node within its credit, and tracks the messages that it holds."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client import receiver as module
from millstream.client import settling
from millstream.client.message import Lease
from millstream.client.message_stream import MessageStream
from millstream.client.receiver import Receiver
from millstream.client.settling import AcceptedRanges
from millstream.core.errors import BrokerUnreachable, InvalidRecordState
from millstream.core.ids import NodeId, OffsetRange
from millstream.core.subscription import Verb
from millstream.protocol.private.leasing import LeaseResponse
from millstream.protocol.private.subscription_messages import (
    LeasedRange,
    PartitionMessages,
    ReceiveResponse,
    SettledRange,
    SettleRequest,
    SettleResponse,
)
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.waiting import until

HANG_S = 60
INVALID_RECORD_STATE = 121


class Cluster:
    """Nodes that deliver scripted messages and record how many were requested."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = set(nodes)
        self.requested: dict[int, list[int]] = {node: [] for node in nodes}
        self._responses: dict[int, asyncio.Queue[list[PartitionMessages]]] = {}
        self._offset = 0
        self._hung_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.settled: list[tuple[int, int]] = []
        """Verbs and offsets, as they were received."""
        self.extended_ms: list[int | None] = []
        self.attempts: list[int | None] = []
        """Which deliveries were settled."""
        self.done: set[int] = set()
        """Messages that are not leased."""
        self.responding = asyncio.Event()
        """While it is not set, settlements are carried out and without a response."""
        self.responding.set()

    async def metadata(self, topics: object) -> Any:
        return SimpleNamespace(nodes={NodeId(node): None for node in self.nodes}, topics={})

    async def ask(self, node: NodeId, count: int) -> LeaseResponse:
        self.requested.setdefault(node, []).append(count)
        sent_at = monotonic()
        waiting = asyncio.ensure_future(self._queue(node).get())
        ends: list[asyncio.Future[Any]] = [waiting, self._hung_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise BrokerUnreachable("closed by the broker")
        return LeaseResponse(ReceiveResponse(0, None, waiting.result()), sent_at)

    def hang_up(self) -> None:
        if not self._hung_up.done():
            self._hung_up.set_result(None)

    async def private(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
        request = msgspec.msgpack.decode(body, type=SettleRequest)
        results: list[list[tuple[int, str | None]]] = []
        for part in request.partitions:
            results.append([self._result(verb) for verb in part.verbs])
            self.extended_ms += [verb.delay_ms for verb in part.verbs if verb.verb == Verb.EXTEND]
            for verb in part.verbs:
                self.settled += [(verb.verb, offset) for offset in range(verb.start, verb.end)]
                if verb.verb != Verb.EXTEND:
                    self.attempts.append(verb.attempt)
                    self.done |= {*range(verb.start, verb.end)}
        await self.responding.wait()
        return memoryview(msgspec.msgpack.encode(SettleResponse(0, None, results)))

    def _result(self, settled_range: SettledRange) -> tuple[int, str | None]:
        is_held = not self.done & {*range(settled_range.start, settled_range.end)}
        return (0, None) if is_held else (INVALID_RECORD_STATE, "not held")

    def deliver(self, node: int, count: int, lease_ms: int | None = None, *, attempt: int = 1) -> None:
        """Respond to the next request of a node."""
        parts = [leased(self._offset, count, node, lease_ms=lease_ms, attempt=attempt)] if count else []
        self._offset += count
        self._queue(node).put_nowait(parts)

    def redeliver(self, node: int, first: int, count: int = 1, *, attempt: int = 1) -> None:
        """Deliver messages again, as a node does that has lost its leases."""
        self._queue(node).put_nowait([leased(first, count, node, attempt=attempt)])

    def _queue(self, node: int) -> asyncio.Queue[list[PartitionMessages]]:
        return self._responses.setdefault(node, asyncio.Queue())


def leased(
    first: int,
    count: int,
    partition: int,
    *,
    lease_ms: int | None = None,
    attempt: int = 1,
    topic_id: bytes = b"0" * 16,
) -> PartitionMessages:
    leases = [LeasedRange(first, first + count, attempt, 0)]
    records = [NewRecord(None, b"%d" % number) for number in range(count)]
    batches = bytes(encode_batch(records, base_offset=first))
    return PartitionMessages("orders", topic_id, partition, leases, batches, lease_ms)


@asynccontextmanager
async def receiving(cluster: Cluster, **options: Any) -> AsyncIterator[Receiver]:
    client: Any = cluster
    receiver = Receiver(client, "billing", "worker", **{"credit": 1000, "lease_s": 30.0, **options})
    receiver._polls._send_receive = cluster.ask  # type: ignore[method-assign]
    receiver._polls._requests.withdraw = cluster.hang_up  # type: ignore[method-assign]
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.close()


def started(receiver: Receiver) -> Callable[[], Awaitable[Receiver]]:
    async def start() -> Receiver:
        return receiver

    return start


@pytest.mark.parametrize(("credit", "ahead"), [(1000, 1), (1, 1), (2, 2)])
async def test_every_node_is_polled_even_with_little_credit(credit: int, ahead: int) -> None:
    cluster = Cluster(1, 2, 3)
    async with receiving(cluster, credit=credit, ahead=ahead) as receiver:
        waiting = asyncio.create_task(receiver.wait_for_message())
        await until(lambda: all(cluster.requested.values()))
        assert sum(map(sum, cluster.requested.values())) <= ahead + 2
        for _ in range(5):
            # An empty response is followed by another poll, and no node waits for ever behind another.
            count = sum(map(len, cluster.requested.values()))
            for node in cluster.nodes:
                cluster.deliver(node, 0)
            await until(lambda asked=count: sum(map(len, cluster.requested.values())) == asked + 3)  # type: ignore[misc]
        assert len({len(requests) for requests in cluster.requested.values()}) == 1
        cluster.deliver(3, 1)
        await waiting
        message = receiver.take()
        assert message is not None
        assert message.partition == 3


async def test_without_waiting_callers_no_more_than_the_credit_is_requested() -> None:
    cluster = Cluster(1, 2, 3)
    async with receiving(cluster, credit=2, ahead=2):
        await until(lambda: sum(map(len, cluster.requested.values())) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(map(sum, cluster.requested.values())) == 2


async def test_polls_get_credit_in_order() -> None:
    cluster = Cluster(1, 2, 3)
    async with receiving(cluster, credit=1, ahead=1):
        settlement: list[int] = []
        for _ in range(6):
            await until(lambda: sum(map(len, cluster.requested.values())) == len(settlement) + 1)
            (node,) = (node for node in cluster.nodes if len(cluster.requested[node]) > settlement.count(node))
            settlement.append(node)
            cluster.deliver(node, 0)
        assert settlement == [1, 2, 3, 1, 2, 3]


async def test_a_busy_node_does_not_starve_one_added_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NODES_S", 0.0)
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        await until(lambda: cluster.requested[1])
        cluster.nodes.add(2)
        cluster.deliver(1, 1)
        await until(lambda: cluster.requested.get(2))
        assert receiver.take() is not None


async def test_a_cancelled_waiter_is_forgotten() -> None:
    cluster = Cluster(1)
    async with receiving(cluster) as receiver:
        first, second = (asyncio.create_task(receiver.wait_for_message()) for _ in range(2))
        third = asyncio.create_task(receiver.wait_for_message())
        await until(lambda: len(receiver._idle) == 3)
        third.cancel()
        await asyncio.wait([third])
        assert len(receiver._idle) == 2
        cluster.deliver(1, 1)
        await until(lambda: len(receiver._idle) == 1)
        # It is woken for a message and cancelled in the same loop turn: another waiter gets the message.
        first.cancel()
        async with asyncio.timeout(HANG_S):
            await second


async def test_settling_a_list_with_lost_leases_is_an_error_and_reports_the_others() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 4)
        await receiver.wait_for_message()
        messages = receiver.take_many(4)
        receiver.done(messages[1])
        stream = MessageStream(started(receiver))
        with pytest.raises(InvalidRecordState, match="1 of 4 messages"):
            await stream.ack(messages)
        assert cluster.settled == [(Verb.ACCEPT, 0), (Verb.ACCEPT, 2), (Verb.ACCEPT, 3)]
        with pytest.raises(InvalidRecordState, match="4 of 4 messages"):
            await stream.ack(messages)
        cluster.deliver(1, 2)
        await receiver.wait_for_message()
        first, second = receiver.take_many(2)
        await stream.ack([first, second, second])


async def test_a_message_settled_on_hand_out_may_be_acknowledged() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10, delivery="at-most-once") as receiver:
        cluster.deliver(1, 2)
        await receiver.wait_for_message()
        await MessageStream(started(receiver)).ack(receiver.take_many(2))
        assert cluster.settled == []


async def test_an_unsettled_message_is_dropped_when_its_lease_expires() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, credit=5, ahead=5) as receiver:
        cluster.deliver(1, 5)
        await receiver.wait_for_message()
        first, *others = receiver.take_many(5)
        assert len(cluster.requested[1]) == 1
        first._lease.valid_until = monotonic()
        for message in [first, *others]:
            receiver.stop_renewing(message)
        extended = others[-1]
        extending = asyncio.create_task(extended.extend(HANG_S))
        await extending
        await until(lambda: len(cluster.requested[1]) == 2 and all(other.is_settled for other in others[:-1]))
        # The message with the extended lease is still held.
        assert [other.is_settled for other in others] == [True, True, True, False]
        with pytest.raises(InvalidRecordState):
            await first.ack()
        await extended.ack()


async def test_a_batch_is_no_longer_renewed_when_the_next_is_requested() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, credit=5, ahead=5) as receiver:
        cluster.deliver(1, 5)
        batches = MessageStream(started(receiver)).batches(2)
        first = await anext(batches)
        second = await anext(batches)
        assert set(first) == set(receiver._not_renewed)
        await second[0].ack()
        assert len(await anext(batches)) == 1
        assert set(receiver._not_renewed) == {*first, second[1]}


async def test_settled_messages_are_not_kept() -> None:
    def held_leases() -> int:
        gc.collect()
        return sum(type(lease) is Lease and lease.settler is receiver for lease in gc.get_objects())

    cluster = Cluster(1)
    async with receiving(cluster, ahead=100) as receiver:
        for _ in range(3):
            cluster.deliver(1, 100)
            await receiver.wait_for_message()
            for message in receiver.take_many(100):
                receiver.accept(message)
        del message
        await receiver.settling.flush()
        assert held_leases() == 0


async def test_messages_keep_their_order_across_deliveries() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        records = [NewRecord(None, b"%d" % number) for number in range(4)]
        leases = [LeasedRange(0, 1, 1, 0), LeasedRange(1, 3, 3, 0), LeasedRange(3, 4, 1, 0)]
        part = PartitionMessages("orders", b"0" * 16, 0, leases, bytes(encode_batch(records, base_offset=0)))
        receiver._receive(NodeId(1), LeaseResponse(ReceiveResponse(0, None, [part]), monotonic()))
        messages = receiver.take_many(4)
        assert [(message.offset, message.attempt, message._lease.attempt) for message in messages] == [
            (0, 1, 1),
            (1, 3, 3),
            (2, 3, 3),
            (3, 1, 1),
        ]


async def test_a_changed_lease_duration_is_applied() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10, lease_s=30.0) as receiver:
        cluster.deliver(1, 1)
        cluster.deliver(1, 1, lease_ms=5000)
        await until(lambda: len(receiver._buffer) == 2)
        old, new = receiver.take_many(2)
        assert (old._lease.lease_s, new._lease.lease_s) == (30.0, 5.0)
        assert new._lease.valid_until <= monotonic() + 5
        for message in (old, new):
            receiver._renew(message._lease)
        await receiver.settling.flush()
        assert cluster.extended_ms == [30_000, 5000]
        assert old._lease.valid_until > monotonic() + 5 >= new._lease.valid_until


@pytest.mark.parametrize(("delivery", "kept"), [("at-least-once", 0), ("at-most-once", 3)])
async def test_buffered_messages_are_returned_unless_they_would_not_be_redelivered(delivery: str, kept: int) -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10, delivery=delivery) as receiver:
        cluster.deliver(1, 2)
        await receiver.wait_for_message()
        await until(lambda: len(cluster.requested[1]) == 2)
        receiver.return_buffered()
        # The response to a poll in flight arrives all the same.
        cluster.deliver(1, 1)
        await receiver.stop()
        await receiver.settling.flush()
        assert len(receiver.take_many(10)) == kept
        assert cluster.settled == ([] if kept else [(Verb.RETURN, 0), (Verb.RETURN, 1), (Verb.RETURN, 2)])
        assert len(cluster.requested[1]) == 2


async def test_a_leaving_worker_may_still_settle_its_messages() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 4)
        await receiver.wait_for_message()
        first, second = receiver.take_many(2)
        leaving = asyncio.create_task(receiver.leave())
        await until(lambda: len(cluster.settled) == 2)
        assert cluster.settled == [(Verb.RETURN, 2), (Verb.RETURN, 3)]
        await first.ack()
        assert not leaving.done()
        # The lease of the other message has expired.
        receiver.done(second)
        async with asyncio.timeout(HANG_S):
            await leaving


# -- redelivery ------------------------------------------------------------------------------------------------


async def arrived(receiver: Receiver) -> None:
    """Wait until a response was processed, even if no message in it is handed out."""
    await until(lambda: len(receiver._waiting_polls) + receiver._polls.requested)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_message_being_processed_that_is_leased_again_is_not_delivered_twice() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 3)
        await receiver.wait_for_message()
        messages = receiver.take_many(1)
        cluster.redeliver(1, 0, 3, attempt=2)
        await arrived(receiver)
        messages += receiver.take_many(10)
        assert [message.offset for message in messages] == [0, 1, 2]
        assert (receiver._in_flight, len(receiver._leases)) == (3, 1)
        for message in messages:
            await message.ack()
        assert cluster.settled == [(Verb.ACCEPT, offset) for offset in range(3)]
        assert cluster.attempts == [2, 2, 2]
        assert (receiver._in_flight, len(receiver._leases)) == (0, 0)


async def test_a_message_being_processed_with_a_lost_lease_resumes_when_leased_again() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 2)
        await receiver.wait_for_message()
        first, second = receiver.take_many(2)
        cluster.done = {0, 1}
        receiver._renew(first._lease)
        await until(lambda: first.is_settled and second.is_settled)
        # The second message is no longer being processed, so any worker may receive it.
        receiver.accept(second)
        cluster.done.clear()
        cluster.redeliver(1, 0, 2, attempt=2)
        await receiver.wait_for_message()
        (again,) = receiver.take_many(10)
        assert (again.offset, again.attempt) == (1, 2)
        await first.ack()
        await again.ack()
        assert (cluster.attempts, receiver._in_flight, receiver._lost_in_progress) == ([2, 2], 0, {})


async def test_a_message_accepted_while_it_is_leased_again_is_not_redelivered() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 2)
        await receiver.wait_for_message()
        first, second = receiver.take_many(2)
        # The accept of the first has no response yet when it is redelivered; the second was requested before its
        # accept.
        await until(lambda: len(cluster.requested[1]) == 2)
        await second.ack()
        cluster.responding.clear()
        accepted = asyncio.create_task(first.ack())
        await until(lambda: 0 in cluster.done)
        cluster.redeliver(1, 0, 2)
        await until(lambda: receiver._unconfirmed)
        cluster.responding.set()
        await accepted
        await until(lambda: not receiver._unconfirmed)
        assert receiver.take() is None
        assert (receiver._in_flight, len(receiver._leases)) == (0, 0)
        # Messages requested later are redelivered for a reason, such as a seek.
        await until(lambda: len(cluster.requested[1]) == 3)
        cluster.deliver(1, 0)
        await until(lambda: len(cluster.requested[1]) == 4)
        cluster.done.clear()
        cluster.redeliver(1, 0, 2)
        await receiver.wait_for_message()
        assert [lease.offset for lease in receiver.take_many(10)] == [0, 1]


async def test_a_message_redelivered_after_its_accept_is_found_to_be_leased() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 1)
        await receiver.wait_for_message()
        (first,) = receiver.take_many(1)
        await until(lambda: len(cluster.requested[1]) == 2)
        await first.ack()
        # A seek: the waiting poll gets the accepted messages.
        cluster.done.clear()
        cluster.redeliver(1, 0)
        async with asyncio.timeout(HANG_S):
            await receiver.wait_for_message()
        (again,) = receiver.take_many(1)
        assert (again.offset, again is not first) == (0, True)
        await again.ack()


async def test_unsettled_messages_are_redelivered() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.deliver(1, 1)
        await receiver.wait_for_message()
        (first,) = receiver.take_many(1)
        receiver.stop_renewing(first)
        cluster.redeliver(1, 0, attempt=2)
        await receiver.wait_for_message()
        (again,) = receiver.take_many(1)
        assert (again.offset, again.attempt, first.is_settled) == (0, 2, True)
        await again.ack()


async def test_a_recreated_topic_has_distinct_messages() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        for topic_id in (b"0" * 16, b"1" * 16):
            response = ReceiveResponse(0, None, [leased(0, 2, 0, topic_id=topic_id)])
            receiver._receive(NodeId(1), LeaseResponse(response, monotonic()))
        assert len(receiver.take_many(10)) == 4


# -- leases that may have passed to another worker --------------------------------------------------------------


def late(lease_ms: int, *, waited_ms: int = 0, ago_s: float = 1.0) -> LeaseResponse:
    """Two messages that were requested a while ago."""
    response = ReceiveResponse(0, None, [leased(0, 2, 0, lease_ms=lease_ms)], waited_ms=waited_ms)
    return LeaseResponse(response, monotonic() - ago_s)


@pytest.mark.parametrize(("waited_ms", "is_asked"), [(0, True), (60_000, False)])
async def test_a_response_in_transit_for_longer_than_its_lease_is_confirmed_first(
    waited_ms: int, is_asked: bool
) -> None:
    cluster = Cluster(1)
    # Another worker has accepted the first message.
    cluster.done = {0} if is_asked else set()
    async with receiving(cluster, ahead=10) as receiver:
        cluster.responding.clear()
        receiver._receive(NodeId(1), late(30_000, waited_ms=waited_ms, ago_s=60.0))
        if is_asked:
            await until(lambda: cluster.settled)
            assert receiver.take() is None
            cluster.responding.set()
            await receiver.wait_for_message()
            assert (cluster.settled[0], set(cluster.extended_ms)) == ((Verb.EXTEND, 0), {30_000})
        assert [lease.offset for lease in receiver.take_many(10)] == ([1] if is_asked else [0, 1])


async def test_a_message_buffered_for_longer_than_its_lease_is_confirmed_first() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        receiver._receive(NodeId(1), late(30_000))
        (first,) = receiver.take_many(1)
        # Extensions were sent without a response: whether the broker received them is unknown.
        cluster.responding.clear()
        receiver._renew(first._lease)
        first._lease.fresh_until = monotonic()
        assert receiver.take() is None
        cluster.done = {1}
        cluster.responding.set()
        await until(lambda: not receiver._unconfirmed)
        assert receiver.take() is None
        assert (receiver._in_flight, len(receiver._buffer)) == (1, 0)
        await first.ack()


async def test_an_extension_counts_from_its_sending_once_it_is_confirmed() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        receiver._receive(NodeId(1), late(30_000))
        lease = receiver.take_many(1)[0]._lease
        before, deadline_ms = lease.fresh_until, lease.deadline_ms
        cluster.responding.clear()
        sent_at = monotonic()
        receiver._renew(lease)
        await until(lambda: cluster.extended_ms)
        assert lease.fresh_until == before
        cluster.responding.set()
        await receiver.settling.flush()
        assert before < lease.fresh_until < sent_at + 30
        assert (lease.deadline_ms or 0) > (deadline_ms or 0)


async def test_unconfirmed_messages_are_returned_when_the_worker_stops() -> None:
    cluster = Cluster(1)
    async with receiving(cluster, ahead=10) as receiver:
        cluster.responding.clear()
        receiver._receive(NodeId(1), late(30_000, ago_s=60.0))
        await until(lambda: cluster.settled)
        stopping = asyncio.create_task(receiver.stop_and_return())
        await until(lambda: not receiver._unconfirmed)
        cluster.responding.set()
        await stopping
        assert [settlement for settlement in cluster.settled if settlement[0] == Verb.RETURN] == [
            (Verb.RETURN, 0),
            (Verb.RETURN, 1),
        ]
        assert receiver._in_flight == 0


HERE, THERE = (b"a", 0), (b"a", 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3)),
        st.tuples(st.just("response"), st.integers(0, 3)),
        st.tuples(st.just("accept"), st.sampled_from([HERE, THERE]), st.integers(0, 40), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 8))
def test_messages_accepted_during_an_open_poll_are_known_or_in_doubt(
    steps: list[tuple[Any, ...]], ranges_max: int
) -> None:
    polls: dict[int, float] = {}
    accepted: list[tuple[float, tuple[bytes, int], int]] = []
    ranges = AcceptedRanges(lambda: min(polls.values(), default=math.inf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "RANGES_MAX", ranges_max)
        for now, (kind, *rest) in enumerate(steps):
            if kind == "send":
                polls.setdefault(rest[0], float(now))
            elif kind == "accept":
                where, first, more = rest
                ranges.add(float(now), where, OffsetRange(first, first + more + 1))
                accepted += [(float(now), where, offset) for offset in range(first, first + more + 1)]
                assert len(ranges) <= ranges_max
            elif (asked := polls.pop(rest[0], None)) is not None:
                for where in (HERE, THERE):
                    offsets = ranges.since(asked, where, range(50))
                    assert {offset for time, place, offset in accepted if place == where and time >= asked} <= offsets
                    if offsets != {*range(50)}:
                        # A message right before a range accepted since is in doubt too.
                        assert offsets <= {offset for _, place, offset in accepted if place == where}


def test_ranges_that_no_open_poll_needs_are_dropped_first() -> None:
    open_since = [0.0]
    ranges = AcceptedRanges(lambda: open_since[0])
    for at in range(settling.RANGES_MAX):
        ranges.add(float(at), (HERE, THERE)[at % 2], OffsetRange(at, at + 1))
    open_since[0] = 990.0
    ranges.add(1000.0, HERE, OffsetRange(5000, 5001))
    assert len(ranges) == 11
    assert ranges.since(990.0, HERE, range(6000)) == {990, 992, 994, 996, 998, 5000}
    # A poll that stays open while too many ranges are accepted: all its messages are in doubt; later polls are not.
    for at in range(1001, 2001):
        ranges.add(float(at), (HERE, THERE)[at % 2], OffsetRange(at, at + 1))
    assert ranges.since(990.0, HERE, [7, 8]) == {7, 8}
    assert ranges.since(1999.0, HERE, range(6000)) == {2000}
