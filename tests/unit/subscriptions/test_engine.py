"""The queues of a node: opened and closed with partitions, declarations and topics, independently of each other."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.membership import Node as ClusterMember
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.subscription_apis import SubscriptionSeek
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.net.budget import Budget
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions import engine as opening
from millstream.broker.subscriptions.dead_letters import DeadLetterAppender
from millstream.broker.subscriptions.engine import Dependencies, Engine
from millstream.broker.subscriptions.filter_cache import FilterCache
from millstream.broker.subscriptions.filter_worker import FilterWorker
from millstream.broker.subscriptions.frame import FrameHeader, write_frame
from millstream.broker.subscriptions.lease import Settlement
from millstream.broker.subscriptions.receiving import receive
from millstream.broker.subscriptions.snapshot import read_snapshot
from millstream.broker.subscriptions.state_store import QueueWrite
from millstream.core.errors import (
    CoordinatorUnavailable,
    CorruptState,
    InvalidRecordState,
    NotLeader,
    PartitionClosed,
    StorageFailure,
    UnknownSubscription,
)
from millstream.core.ids import NodeId, Offset, PartitionIndex, ProducerId
from millstream.core.subscription import FILTER, ORDERED, QueueKey, Subscription, SubscriptionSettings, Verb, start_key
from millstream.core.topic import Topic
from millstream.protocol.private.subscription_messages import SeekSubscriptionRequest
from millstream_testing.queue_bench import TOPIC, Workbench, demand_for, offsets, turns
from millstream_testing.waiting import until

WAIT_S = 60.0
SHARE = Subscription(name="share", subscription_id=UUID(int=1), topics=(), overrides={}, created_ms=0)
BILLING = Subscription(
    name="billing",
    subscription_id=UUID(int=2),
    topics=("orders",),
    overrides={},
    created_ms=0,
    starts={start_key(TOPIC.name, TOPIC.topic_id): (0, 0, 0, 0)},
)


class KnownTopics:
    """Topics that the test creates and deletes."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[Topic, list[Partition]]] = {}
        self.deletions: list[Callable[[Topic], None]] = []
        self.leaderships: dict[str, list[Callable[[int, object], None]]] = {}

    def get(self, name: str) -> Topic | None:
        return self.by_name[name][0] if name in self.by_name else None

    def partitions_of(self, topic: Topic) -> list[Partition]:
        return self.by_name[topic.name][1]

    def led_of(self, names: Iterable[str]) -> list[Partition]:
        return [
            partition
            for name in names
            if name in self.by_name
            for partition in self.by_name[name][1]
            if partition.is_leader
        ]

    def on_deletion(self, listener: Callable[[Topic], None]) -> None:
        self.deletions.append(listener)

    def on_leadership_change(self, name: str, listener: Callable[[int, object], None]) -> None:
        self.leaderships.setdefault(name, []).append(listener)

    def show(self, *partitions: Partition) -> None:
        topic = partitions[0].topic
        self.by_name[topic.name] = topic, list(partitions)
        for listener in self.leaderships.get(topic.name, ()):
            for partition in partitions:
                listener(partition.index, partition)

    def remove(self, name: str) -> None:
        topic, partitions = self.by_name.pop(name)
        for partition in partitions:
            partition.close()
        for listener in self.deletions:
            listener(topic)


class Declared:
    """Subscriptions that the test declares."""

    def __init__(self) -> None:
        self.ones: dict[UUID, Subscription] = {}
        self.listeners: list[Callable[[], None]] = []

    def all(self) -> list[Subscription]:
        return list(self.ones.values())

    async def find(self, name: str) -> Subscription:
        return next(subscription for subscription in self.ones.values() if subscription.name == name)

    def by_id(self, subscription_id: UUID) -> Subscription | None:
        return self.ones.get(subscription_id)

    def settings_of(self, subscription: Subscription) -> SubscriptionSettings:
        return self.ones[subscription.subscription_id].settings

    def is_deleted(self, subscription_id: UUID) -> bool:
        return False

    def on_change(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def declare(self, subscription: Subscription, **changes: object) -> Subscription:
        made = dataclasses.replace(subscription, **changes)  # type: ignore[arg-type]
        self.ones[made.subscription_id] = made
        self.notify()
        return made

    def notify(self) -> None:
        for listener in self.listeners:
            listener()


class Node:
    """An engine with its surroundings."""

    def __init__(self) -> None:
        self.bench = Workbench()
        self.topics = KnownTopics()
        self.declared = Declared()
        self.forgotten: list[Callable[[QueueKey], bool]] = []
        membership = Membership("cluster", ClusterMember(node_id=NodeId(1), host="", port=0))
        self.engine = Engine(
            Dependencies(
                topics=cast("Topics", self.topics),
                subscriptions=cast("Subscriptions", self.declared),
                store=self.bench.store,
                clock=self.bench.clock,
                random=Random(1),
                appender=DeadLetterAppender(cast("Topics", self.topics), membership),
                next_producer_id=_no_id,
                filter_cache=FilterCache(FilterWorker()),
                forget=self._forget,
            )
        )

    async def _forget(self, is_gone: Callable[[QueueKey], bool]) -> None:
        self.forgotten.append(is_gone)

    async def opened(self, count: int) -> None:
        await until(lambda: self.engine.open_count == count)


def _no_id() -> Awaitable[ProducerId]:
    raise CoordinatorUnavailable("there are no ids here")


@pytest.fixture
async def node() -> Node:
    made = Node()
    made.engine.start()
    return made


async def test_a_topic_created_after_the_subscription_is_delivered_from_its_start(node: Node) -> None:
    node.declared.declare(BILLING, starts={})
    await turns()
    node.bench.publish("a")
    node.topics.show(node.bench.partition)
    await node.opened(1)
    (delivery,) = node.engine.deliveries
    assert offsets(delivery.try_receive(demand_for(5))) == [0]
    node.topics.show(node.bench.partition, node.bench.make_partition(1))
    await node.opened(2)
    await node.engine.close()


async def test_a_recreated_topic_is_delivered_from_its_start(node: Node) -> None:
    node.bench.publish("a", "b", "c")
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING, starts={start_key(TOPIC.name, TOPIC.topic_id): (3,)})
    await node.opened(1)
    old = TOPIC.topic_id
    node.topics.remove("orders")
    await node.opened(0)
    await turns()
    assert any(gone(QueueKey(BILLING.subscription_id, old, PartitionIndex(0))) for gone in node.forgotten)
    node.bench.partition = node.bench.make_partition(0, dataclasses.replace(TOPIC, topic_id=UUID(int=70)))
    node.bench.publish("new", "and", "so", "on")
    node.topics.show(node.bench.partition)
    await node.opened(1)
    (delivery,) = node.engine.deliveries
    assert offsets(delivery.try_receive(demand_for(5))) == [0, 1, 2, 3]
    await node.engine.close()


async def test_a_share_group_starts_at_the_end(node: Node) -> None:
    node.bench.publish("a", "b")
    node.topics.show(node.bench.partition)
    share = node.declared.declare(SHARE)
    assert node.engine.open_count == 0
    delivery = await node.engine.delivery(share, node.bench.partition)
    node.bench.publish("c")
    assert offsets(delivery.try_receive(demand_for(5))) == [2]
    await node.engine.close()


@pytest.mark.parametrize("ordered", ["false", "true"])
async def test_a_queue_whose_partition_has_lost_messages_moves_back(
    node: Node, caplog: pytest.LogCaptureFixture, ordered: str
) -> None:
    node.bench.publish("a")
    node.bench.publish("b")
    node.topics.show(node.bench.partition)
    billing = node.declared.declare(dataclasses.replace(BILLING, overrides={ORDERED: ordered}))
    delivery = await node.engine.delivery(billing, node.bench.partition)
    assert offsets(delivery.try_receive(demand_for(5))) == [0, 1]
    assert await delivery.settle("one", [Settlement(Offset(1), Offset(1), Verb.ACCEPT)]) == [None]
    delivery.close(NotLeader("a crash"))
    node.bench.partition.log.truncate_to(1)
    node.bench.partition.high_watermark = Offset(1)
    again = await node.engine.delivery(billing, node.bench.partition)
    node.bench.publish("other")
    assert offsets(again.try_receive(demand_for(5))) == [0, 1]
    assert "moves back" in caplog.text
    await node.engine.close()


async def test_a_queue_that_cannot_be_opened_is_retried(node: Node) -> None:
    node.bench.store.error = StorageFailure("away")
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING)
    await turns()
    assert node.engine.open_count == 0
    node.bench.store.error = None
    await node.opened(1)
    await node.engine.close()


async def test_a_seek_replaces_an_unreadable_state(node: Node) -> None:
    bench = node.bench
    bench.publish(*"abcde")
    key = QueueKey(BILLING.subscription_id, TOPIC.topic_id, bench.partition.index)
    epoch = bench.partition.leader_epoch
    await bench.store.load(key, epoch)
    unreadable = write_frame(FrameHeader(key, epoch, 7, 0), [])
    await bench.store.write(QueueWrite(key, epoch, 0, unreadable))
    node.topics.show(bench.partition)
    node.declared.declare(BILLING)
    with pytest.raises(CorruptState, match="millstream subscription seek billing --topic orders --partition 0 --to"):
        await node.engine.delivery(BILLING, bench.partition)
    service = SimpleNamespace(
        declared=node.declared, topics=node.topics, engine=partial(asyncio.sleep, 0, result=node.engine)
    )
    seek = SubscriptionSeek(cast("SubscriptionService", service))
    request = SeekSubscriptionRequest("billing", "offset:3", "orders", None)
    await asyncio.gather(seek.handle(request), seek.handle(request))
    opened = await node.engine.delivery(BILLING, bench.partition)
    (grant,) = await receive([opened], demand_for(10), Budget(1 << 20), wait_s=WAIT_S)
    assert offsets(grant.received) == [3, 4]
    await opened.durable()
    stored = await bench.store.load(key, epoch)
    assert stored.snapshot is not None
    assert read_snapshot(stored.snapshot).oldest == 3
    await node.engine.close()


async def test_a_queue_that_is_slow_to_open_does_not_block_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_WAIT_S", 0.01)
    share = node.declared.declare(SHARE)
    first = await node.engine.delivery(share, node.bench.partition)
    node.bench.store.loading.clear()
    slow = node.bench.make_partition(1)
    assert await node.engine.deliveries_of(share, [slow, node.bench.partition]) == [first]
    alone = asyncio.ensure_future(node.engine.deliveries_of(share, [slow]))
    await asyncio.sleep(0.05)
    assert not alone.done()
    node.bench.store.loading.set()
    assert [message.partition for message in await alone] == [slow]
    node.bench.partition.close()
    with pytest.raises(NotLeader):
        await node.engine.deliveries_of(share, [node.bench.partition])
    assert await node.engine.deliveries_of(share, []) == []
    await node.engine.close()


async def test_a_failed_queue_is_reopened_automatically(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "REOPEN_S", 0.01)
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING)
    await node.opened(1)
    (before,) = node.engine.deliveries
    node.bench.publish("a")
    node.bench.store.error = StorageFailure("the disk is full")
    before.try_receive(demand_for())
    await node.opened(0)
    for _ in range(20):
        node.declared.notify()
        await turns()
    assert node.engine.tasks < 20
    node.bench.store.error = None
    await node.opened(1)
    (after,) = node.engine.deliveries
    assert after is not before
    assert offsets(after.try_receive(demand_for())) == [0]
    await node.engine.close()


async def test_waiters_are_notified_of_added_queues_and_of_the_end(node: Node) -> None:
    node.topics.show(node.bench.partition)
    billing = node.declared.declare(BILLING)
    await node.opened(1)
    further = node.engine.next_opening(billing)
    assert node.engine.next_opening(billing) is further
    (here,) = node.engine.deliveries
    waiting = asyncio.ensure_future(receive([here], demand_for(), Budget(1 << 30), wait_s=WAIT_S, interrupt=further))
    nowhere = asyncio.ensure_future(receive([], demand_for(), Budget(1 << 30), wait_s=WAIT_S, interrupt=further))
    await turns()
    assert not further.done()
    node.topics.show(node.bench.partition, node.bench.make_partition(1))
    assert (await waiting, await nowhere) == ([], [])
    deleted = node.engine.next_opening(billing)
    node.declared.ones.clear()
    node.declared.notify()
    assert deleted.done()
    last = node.engine.next_opening(billing)
    await node.engine.close()
    assert last.done()
    with pytest.raises(PartitionClosed):
        node.engine.next_opening(billing)


async def test_stopping_while_queues_open_leaves_nothing_behind(node: Node) -> None:
    node.bench.store.loading.clear()
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING)
    await turns()
    await node.engine.close()
    node.bench.store.loading.set()
    await turns()
    assert node.engine.open_count == 0


async def test_leadership_lost_while_a_queue_opens_closes_it(node: Node) -> None:
    share = node.declared.declare(SHARE)
    node.bench.store.loading.clear()
    asking = asyncio.ensure_future(node.engine.delivery(share, node.bench.partition))
    await turns()
    node.bench.partition.close()
    node.bench.store.loading.set()
    with pytest.raises((NotLeader, PartitionClosed)):
        await asking
    assert node.engine.open_count == 0
    await node.engine.close()


async def test_a_subscription_deleted_while_its_queue_opens_closes_it(node: Node) -> None:
    share = node.declared.declare(SHARE)
    node.bench.store.loading.clear()
    asking = asyncio.ensure_future(node.engine.delivery(share, node.bench.partition))
    await turns()
    node.declared.ones.clear()
    node.declared.notify()
    node.bench.store.loading.set()
    with pytest.raises(UnknownSubscription):
        await asking
    await node.engine.close()


async def test_a_changed_ordering_restarts_the_queue_and_keeps_its_state(node: Node) -> None:
    node.topics.show(node.bench.partition)
    billing = node.declared.declare(BILLING)
    await node.opened(1)
    (before,) = node.engine.deliveries
    node.bench.publish("a", "b", key=b"k")
    before.try_receive(demand_for())
    waiting = asyncio.ensure_future(receive([before], demand_for(1, "two"), Budget(1 << 30), wait_s=WAIT_S))
    await turns()
    changed = node.declared.declare(billing, overrides={ORDERED: "true"})
    await waiting
    after = await node.engine.delivery(changed, node.bench.partition)
    assert after is not before
    assert offsets(after.try_receive(demand_for(5, "three"))) == []
    with pytest.raises(NotLeader):
        before.settle_now("one", [Settlement(Offset(0), Offset(0), Verb.ACCEPT)])
    assert after.settle_now("one", [Settlement(Offset(0), Offset(0), Verb.ACCEPT)]) == [None]
    await node.engine.close()


async def test_an_invalid_filter_closes_only_its_queue(node: Node) -> None:
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING)
    other = node.declared.declare(BILLING, subscription_id=UUID(int=3), name="other")
    await node.opened(2)
    node.declared.declare(other, overrides={FILTER: "((("})
    await node.opened(1)
    await node.engine.close()


async def test_a_topic_removed_from_a_subscription_closes_its_queues(node: Node) -> None:
    node.topics.show(node.bench.partition)
    node.declared.declare(BILLING)
    await node.opened(1)
    node.declared.declare(BILLING, topics=("others",))
    await node.opened(0)
    await node.engine.close()


async def test_the_messages_of_a_dead_worker_go_to_others(node: Node) -> None:
    share = node.declared.declare(SHARE)
    delivery = await node.engine.delivery(share, node.bench.partition)
    node.bench.publish("a")
    delivery.try_receive(demand_for())
    node.engine.release_worker(share, "one")
    assert offsets(delivery.try_receive(demand_for(1, "two"))) == [0]
    (late,) = delivery.settle_now("one", [Settlement(Offset(0), Offset(0), Verb.ACCEPT)])
    assert isinstance(late, InvalidRecordState)
    node.engine.close_queues(share.subscription_id, TOPIC.topic_id)
    assert node.engine.open_count == 0
    await node.engine.close()
