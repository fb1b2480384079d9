"""Share groups with an unmodified client: each message goes to one consumer, and is acknowledged one by one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import (
    AcknowledgeType,
    KafkaException,
    Message,
    Producer,
    ShareConsumer,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from kio.schema.describe_share_group_offsets.v1.request import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
    DescribeShareGroupOffsetsRequestTopic,
)
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32

from millstream.core.subscription import ATTEMPTS, DELIVERY, EXACTLY_ONCE, LEASE, START
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.child_process import child_process
from millstream_testing.command import CommandLine
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup
from millstream_testing.waiting import wait_until

WAIT_S = 60.0
ACCEPT = 1
QUIET_S = 0.5
CLUSTER = {"group-initial-delay-ms": 100, "leader-balance-ms": 500, "lease-ms": 2000, "subscriptions-partitions": 3}
# Receives messages, reports it, and never acknowledges them.
DIES = """
import sys, time
from confluent_kafka import ShareConsumer
consumer = ShareConsumer({"bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "log_level": 0})
consumer.subscribe([sys.argv[3]])
while True:
    taken = [message for message in consumer.poll(1) if message.error() is None]
    if taken:
        print(len(taken), flush=True)
        time.sleep(600)
"""
_names = count()


class Work:
    """A topic and a share group of the same name on a broker."""

    def __init__(self, address: str, settings: Mapping[str, str] | None = None, *, replication: int = 1) -> None:
        self.address = address
        self.name = f"work-{next(_names)}"
        self.admin = AdminClient(self._config())
        topic = NewTopic(self.name, 1, replication)
        self.admin.create_topics([topic], operation_timeout=WAIT_S)[self.name].result()
        self.set({START: "earliest", **(settings or {})})

    def set(self, settings: dict[str, str]) -> None:
        """Change settings of the group as Kafka's tools do."""
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, self.name, incremental_configs=changes)
        self.admin.incremental_alter_configs([resource])[resource].result()

    def publish(self, *values: str, partition: int = 0) -> None:
        producer = Producer({**self._config(), "linger.ms": 0})
        for value in values:
            producer.produce(self.name, value.encode(), partition=partition)
        assert producer.flush(WAIT_S) == 0

    def consumer(self, *, explicit: bool = False) -> ShareConsumer:
        mode = "explicit" if explicit else "implicit"
        made = ShareConsumer({**self._config(), "group.id": self.name, "share.acknowledgement.mode": mode})
        made.subscribe([self.name])
        return made

    def _config(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "log_level": 0}


def poll(consumer: ShareConsumer, timeout: float = 0.2) -> list[Message]:
    """Poll for messages, without the client's own events."""
    return [message for message in consumer.poll(timeout) if message.error() is None]


def take(consumer: ShareConsumer, number: int) -> list[Message]:
    """The next messages; with implicit acknowledgement those of earlier polls are accepted."""
    taken: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(taken) < number:
        assert time.monotonic() < deadline, f"only {texts(taken)} came"
        taken += poll(consumer)
    return taken


def texts(messages: list[Message]) -> list[str]:
    return [(message.value() or b"").decode() for message in messages]


def numbers(first: int, end: int) -> list[str]:
    return [str(number) for number in range(first, end)]


def committed(consumer: ShareConsumer) -> None:
    """Send the acknowledgements, and check that they were accepted."""
    for place, error in consumer.commit_sync(WAIT_S).items():
        assert error is None, f"{place}: {error}"


def test_messages_of_a_poll_are_accepted_by_the_next(server: Server) -> None:
    work = Work(server.kafka)
    work.publish(*numbers(0, 10))
    with closing(work.consumer()) as consumer:
        assert texts(take(consumer, 10)) == numbers(0, 10)
        work.publish("later")
        assert texts(take(consumer, 1)) == ["later"]
        committed(consumer)
    with closing(work.consumer()) as other:
        assert poll(other, QUIET_S) == []


def test_accept_release_and_reject_of_single_messages(server: Server) -> None:
    work = Work(server.kafka)
    work.publish(*numbers(0, 6))
    reported: list[Any] = []
    with closing(work.consumer(explicit=True)) as consumer:
        consumer.set_acknowledgement_commit_callback(lambda offsets, error: reported.append((offsets, error)))
        messages = take(consumer, 6)
        for message in messages[:2]:
            consumer.acknowledge(message)
        consumer.acknowledge(messages[2], AcknowledgeType.RELEASE)
        consumer.acknowledge(messages[3], AcknowledgeType.REJECT)
        consumer.acknowledge_offset(work.name, 0, messages[4].offset() or 0, AcknowledgeType.RELEASE)
        consumer.acknowledge_offset(work.name, 0, messages[5].offset() or 0)
        committed(consumer)
        again = take(consumer, 2)
        assert texts(again) == ["2", "4"]
        for message in again:
            consumer.acknowledge(message)
        consumer.commit_async()
        wait_until(lambda: bool(poll(consumer, 0.05) or sum(map(acknowledged, reported)) >= 8))
        assert [error for _, error in reported if error is not None] == []
    with closing(work.consumer()) as other:
        assert poll(other, QUIET_S) == []


async def pulled(address: str, name: str) -> tuple[list[str], list[str]]:
    """The topics of a group as shown, and the messages that another kind of worker gets."""
    async with Client.connect(address) as client:
        subscriptions = SubscriptionClient(client)
        (reported,) = await subscriptions.describe([name])
        messages = await subscriptions.receive(name, "test", max_records=10, wait_ms=int(WAIT_S * 1000))
        await subscriptions.settle(name, "test", messages, ACCEPT)
    return reported["topics"], [(message.record.value or b"").decode() for message in messages]


def test_a_group_declared_by_its_members_is_shown_with_their_topics_and_can_be_pulled(server: Server) -> None:
    work = Work(server.kafka)
    work.publish("a", "b")
    with closing(work.consumer()) as consumer:
        assert len(take(consumer, 2)) == 2
    assert asyncio.run(pulled(server.kafka, work.name)) == ([work.name], ["a", "b"])


def acknowledged(reported: tuple[Any, Any]) -> int:
    return sum(map(len, reported[0].values()))


def test_several_consumers_of_one_partition_share_its_messages(server: Server) -> None:
    work = Work(server.kafka)
    seen: Counter[str] = Counter()
    with ExitStack() as stack:
        consumers = [stack.enter_context(closing(work.consumer())) for _ in range(3)]
        busy: set[int] = set()
        published = 0
        deadline = time.monotonic() + WAIT_S
        # Continues until each has received something, so that all are in the group.
        while len(busy) < 3 or seen.total() < published:
            assert time.monotonic() < deadline, f"{busy} of three got {seen.total()} of {published} messages"
            if len(busy) < 3:
                work.publish(*numbers(published, published + 20))
                published += 20
            for number, consumer in enumerate(consumers):
                values = texts(poll(consumer, 0.1))
                seen.update(values)
                busy |= {number} if values else set()
    assert seen == Counter(numbers(0, published))


def test_messages_held_by_a_killed_consumer_are_redelivered_at_once(server: Server) -> None:
    work = Work(server.kafka, {LEASE: "60000"})
    work.publish(*numbers(0, 5))
    command = [sys.executable, "-c", DIES, server.kafka, work.name, work.name]
    with child_process(command, stdout=subprocess.PIPE, text=True) as dies:
        assert dies.stdout is not None
        assert dies.stdout.readline() == "5\n"
        with closing(work.consumer(explicit=True)) as lives:
            assert poll(lives, QUIET_S) == []
            dies.kill()
            # Long before the lease of a minute expires.
            messages = take(lives, 5)
            assert texts(messages) == numbers(0, 5)
            assert {message.delivery_count() for message in messages} == {2}
            for message in messages:
                lives.acknowledge(message)


def test_expired_leases_and_exhausted_deliveries(server: Server) -> None:
    work = Work(server.kafka, {LEASE: "1000", ATTEMPTS: "2"})
    work.publish("poison")
    with closing(work.consumer(explicit=True)) as slow, closing(work.consumer(explicit=True)) as other:
        (held,) = take(slow, 1)
        # The next delivery is settled in time, however busy the machine is.
        work.set({LEASE: "60000"})
        (again,) = take(other, 1)
        assert [held.delivery_count(), again.delivery_count()] == [1, 2]
        slow.acknowledge(held)
        assert [error is not None for error in slow.commit_sync(WAIT_S).values()] == [True]
        other.acknowledge(again, AcknowledgeType.RELEASE)
        committed(other)
        work.publish("fine")
        messages = [*poll(slow), *poll(other)]
        while not messages:
            messages = [*poll(slow), *poll(other)]
        assert texts(messages) == ["fine"]


def test_invalid_settings_are_refused(server: Server) -> None:
    work = Work(server.kafka)
    for settings in ({LEASE: "1"}, {START: "never"}, {"share.nothing": "1"}):
        with pytest.raises(KafkaException):
            work.set(settings)


def test_only_later_messages_are_delivered_by_default(server: Server) -> None:
    work = Work(server.kafka)
    work.set({START: "latest"})
    work.publish("before")
    with closing(work.consumer()) as consumer:
        assert poll(consumer, 2) == []
        work.publish("after")
        assert texts(take(consumer, 1)) == ["after"]


def test_aborted_messages_are_not_delivered(server: Server) -> None:
    work = Work(server.kafka)
    work.set({"share.isolation.level": "read_committed"})
    producer = Producer({"bootstrap.servers": server.kafka, "transactional.id": work.name, "log_level": 0})
    producer.init_transactions(WAIT_S)
    for name in ("aborted", "committed", "aborted", "committed"):
        producer.begin_transaction()
        for number in range(3):
            producer.produce(work.name, f"{name}-{number}".encode())
        producer.flush(WAIT_S)
        if name == "committed":
            producer.commit_transaction(WAIT_S)
        else:
            producer.abort_transaction(WAIT_S)
    with closing(work.consumer(explicit=True)) as consumer:
        messages = take(consumer, 6)
        assert texts(messages) == [f"committed-{number}" for number in range(3)] * 2
        for message in messages:
            consumer.acknowledge(message)
        committed(consumer)
        assert poll(consumer, QUIET_S) == []


def test_after_a_kill_nothing_is_lost_and_no_accepted_message_is_redelivered(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        work = Work(server.kafka, {DELIVERY: EXACTLY_ONCE, LEASE: "2000"})
        work.publish(*numbers(0, 20))
        with closing(work.consumer(explicit=True)) as consumer:
            messages = take(consumer, 20)
            for message in messages[:10]:
                consumer.acknowledge(message)
            committed(consumer)
            accepted = Counter(texts(messages[:10]))
            server.restart(clean=False)
            for message in messages[10:]:
                consumer.acknowledge(message)
            accept_until(consumer, accepted, 20)
    assert accepted == Counter(numbers(0, 20))


def accept_until(consumer: ShareConsumer, accepted: Counter[str], number: int) -> None:
    """Accept what comes until so many were."""
    deadline = time.monotonic() + WAIT_S
    while accepted.total() < number:
        assert time.monotonic() < deadline, f"only {accepted} were accepted"
        messages = poll(consumer)
        for message in messages:
            consumer.acknowledge(message)
        results = consumer.commit_sync(WAIT_S)
        if messages and all(error is None for error in results.values()):
            accepted.update(texts(messages))


def test_commands_and_pages_about_groups_include_share_groups(server: Server) -> None:
    millstream = CommandLine(server.kafka)
    work = Work(server.kafka)
    work.publish(*numbers(0, 5))
    with closing(work.consumer(explicit=True)) as consumer:
        first, *_ = take(consumer, 5)
        consumer.acknowledge(first)
        committed(consumer)
        until_at(server.kafka, work.name, 1)
        reported = millstream("group", "list", "--json")
        assert reported.code == 0, reported.err
        (group,) = [group for group in reported.document["groups"] if group["group"] == work.name]
        assert (group["type"], group["state"], group["members"], group["lag"]) == ("share", "Stable", 1, 4)
        described = millstream("group", "describe", work.name, "--json").document
        assert (described["type"], [offset["committed"] for offset in described["offsets"]]) == ("share", [1])
        pages = httpx.get(f"http://{server.http}/v1/groups", timeout=WAIT_S).json()["groups"]
        assert group in pages
    refused = millstream("group", "reset", work.name, "--to", "start")
    assert (refused.code, "millstream subscription seek" in refused.err) == (2, True)
    deleted = millstream("group", "delete", work.name, "--yes")
    assert deleted.code == 0, deleted.err
    assert millstream("group", "describe", work.name).code == 3


async def start_of(address: str, name: str) -> int:
    """The offset of a share group on the only partition of its topic, as one node reports it."""
    topic = DescribeShareGroupOffsetsRequestTopic(topic_name=TopicName(name), partitions=(i32(0),))
    group = DescribeShareGroupOffsetsRequestGroup(group_id=GroupId(name), topics=(topic,))
    async with Client.connect(address) as client:
        response = await client.send(None, DescribeShareGroupOffsetsRequest(groups=(group,)))
    (reported,) = response.groups
    return int(reported.topics[0].partitions[0].start_offset) if reported.topics else -1


def until_at(address: str, name: str, offset: int) -> None:
    wait_until(lambda: asyncio.run(start_of(address, name)) == offset)


def test_another_node_continues_the_queue(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> None:
    folder = tmp_path_factory.mktemp("share-cluster")
    with ServerGroup(folder, etcd.url, postgres.new_database(), settings=CLUSTER) as cluster:
        settings = {DELIVERY: EXACTLY_ONCE, LEASE: "2000"}
        work = Work(cluster.kafka, settings, replication=3)
        work.publish(*numbers(0, 10))
        seen: Counter[str] = Counter()
        with closing(work.consumer(explicit=True)) as consumer:
            messages = take(consumer, 10)
            for message in messages[:5]:
                consumer.acknowledge(message)
            for message in messages[5:]:
                consumer.acknowledge(message, AcknowledgeType.RELEASE)
            committed(consumer)
            leader = work.admin.list_topics(work.name, timeout=WAIT_S).topics[work.name].partitions[0].leader
            cluster[leader].kill()
            work.publish("after")
            accept_until(consumer, seen, 6)
        assert seen == Counter([*numbers(5, 10), "after"])
        cluster.start()
        # From any node, although no member fetches any more.
        for node in cluster:
            until_at(node.kafka, work.name, 11)
        work.publish("pulled")
        assert asyncio.run(pulled(cluster.kafka, work.name)) == ([work.name], ["pulled"])
