"""Mirrors between two real brokers: identical bytes and offsets, failover, and failback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.mirror_messages import AdoptRequest, AdoptResponse
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.committed_messages import committed_messages
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

PATIENCE_S = 60.0


class Sites:
    """Two brokers: paris, and berlin, which mirrors it."""

    def __init__(self, folder: Path) -> None:
        self.paris = Server(folder / "paris", settings={"retention-check-ms": 200})
        self.berlin = Server(folder / "berlin", settings={"retention-check-ms": 200})

    def start(self) -> None:
        self.both(Server.start)

    def both(self, work: Callable[[Server], object]) -> None:
        """Do something with both concurrently."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (self.paris, self.berlin)))

    def stop(self) -> None:
        self.both(Server.stop)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    made = Sites(tmp_path_factory.mktemp("sites"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def paris(sites: Sites) -> CommandLine:
    return CommandLine(sites.paris.kafka)


@pytest.fixture
def berlin(sites: Sites) -> CommandLine:
    return CommandLine(sites.berlin.kafka)


def publish(brokers: str, topic: str, values: list[str], **settings: object) -> None:
    errors: list[Any] = []
    producer = Producer({"bootstrap.servers": brokers, **settings})
    for value in values:
        producer.produce(topic, value, key=value, on_delivery=lambda error, _: errors.append(error) if error else None)
    assert producer.flush(PATIENCE_S) == 0
    assert not errors, errors


def read(brokers: str, topic: str, count: int, *, isolation: str = "read_committed") -> list[tuple[int, int, str]]:
    """Read so many messages of a topic, or fail."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"reader-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "isolation.level": isolation,
        }
    )
    try:
        records: list[tuple[int, int, str]] = []
        deadline = time.monotonic() + PATIENCE_S
        while not (partitions := consumer.list_topics(topic, PATIENCE_S).topics[topic].partitions):
            assert time.monotonic() < deadline, f"{topic} is not there"
            time.sleep(0.1)
        # Not as a member of a group, which would wait for others.
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        while len(records) < count and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            # The client may have requested the topic before it existed, and reports that now.
            if message is not None and message.error() is None:
                records.append((message.partition() or 0, message.offset() or 0, (message.value() or b"").decode()))
        assert len(records) >= count, f"{len(records)} of {count} messages"
        return sorted(records)
    finally:
        consumer.close()


def commit(brokers: str, group: str, offset: TopicPartition) -> None:
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": group, "enable.auto.commit": False})
    consumer.commit(offsets=[offset], asynchronous=False)
    consumer.close()


def committed(site: CommandLine, group: str) -> list[int]:
    """Return the committed offsets of a group in the partitions of its only topic."""
    result = site("group", "describe", group, "--json")
    offsets = [offset["committed"] for offset in result.document["offsets"]] if result.code == 0 else []
    return [offset for offset in offsets if offset is not None]


def lag_of(berlin: CommandLine, name: str) -> int | None:
    described = berlin("mirror", "describe", name, "--json").document
    return None if described["lag"] is None else int(described["lag"])


def caught_up(berlin: CommandLine, name: str, topic: str, paris: CommandLine) -> bool:
    """Whether a copy is exposed up to the end of the original."""
    original = paris("topic", "describe", topic, "--json").document
    copy = berlin("topic", "describe", topic, "--json")
    if copy.code != 0:
        return False
    ends = [(partition["partition"], partition["end"]) for partition in original["partitions"]]
    return ends == [(partition["partition"], partition["end"]) for partition in copy.document["partitions"]]


def ids_of(site: CommandLine, topics: Iterable[str]) -> list[UUID]:
    return [UUID(site("topic", "describe", topic, "--json").document["id"]) for topic in topics]


def cuts_of(site: CommandLine, mirror: str) -> dict[str, dict[int, int]]:
    """Return where copies were cut by a failover."""
    cuts = described(site, mirror)["cuts"]
    return {topic: {int(index): offset for index, offset in offsets.items()} for topic, offsets in cuts.items()}


def check_repeated(
    site: CommandLine, mirror: str, cuts: dict[str, dict[int, int]], topic_ids: list[UUID], removed: list[Any]
) -> None:
    """Repeat a reverse whose response was lost: it names the same records, and none copied since."""
    settings = described(site, mirror)["overrides"]
    request = AdoptRequest(name=mirror, step="follow", settings=settings, cuts=cuts, topic_ids=topic_ids)
    ranges = [
        (removed_range.topic, removed_range.start, removed_range.end) for removed_range in adopt(site, request).removed
    ]
    assert ranges == [
        (removed_range["topic"], removed_range["start"], removed_range["end"]) for removed_range in removed
    ]


def check_refused(paris: CommandLine, berlin: CommandLine, mirror: str, topic: str) -> None:
    """Request invalid ways for paris to follow, none of which changes anything."""
    for address in ("127.0.0.1:1", paris.brokers):
        unreached = berlin("mirror", "reverse", mirror, "--address", address)
        assert f"does not reach this cluster at {address}" in unreached.err
    assert "choose another topic" in berlin("mirror", "reverse", mirror, "--save-to", topic).err
    assert mirror not in {listing["mirror"] for listing in paris("mirror", "list", "--json").document["mirrors"]}


def adopt(site: CommandLine, request: AdoptRequest) -> AdoptResponse:
    """Ask an old source to follow, as the other side does."""

    async def ask() -> AdoptResponse:
        async with Client.connect(request.settings["from"]) as other:
            cluster_id = (await other.metadata([])).cluster_id
        changed = msgspec.structs.replace(request, cluster_id=cluster_id)
        async with Client.connect(site.brokers) as client:
            return decode(await client.private(None, changed.KEY, encode(changed)), AdoptResponse)

    return asyncio.run(ask())


def mirrored(paris: CommandLine, berlin: CommandLine, topic: str, *flags: str) -> str:
    """Mirror topics with a prefix from paris to berlin; return the mirror's name."""
    name = f"m-{topic}"
    made = berlin("mirror", "create", name, "--from", paris.brokers, "--topics", f"{topic}.*", *flags)
    assert made.code == 0, made.err
    return name


def test_a_copy_has_the_same_messages_at_the_same_offsets_and_takes_over(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic, "--partitions", "3", "--set", "retention.ms=86400000")
    publish(paris.brokers, topic, [f"before-{number}" for number in range(300)])
    name = mirrored(paris, berlin, topic)
    publish(paris.brokers, topic, [f"after-{number}" for number in range(300)], **{"compression.type": "lz4"})
    wait_until(lambda: caught_up(berlin, name, topic, paris))
    original = paris("topic", "describe", topic, "--json").document
    copy = berlin("topic", "describe", topic, "--json").document
    assert copy["id"] == original["id"]
    assert copy["overrides"] == original["overrides"]
    assert read(berlin.brokers, topic, 600) == read(paris.brokers, topic, 600)

    with pytest.raises(AssertionError, match="POLICY_VIOLATION"):
        publish(berlin.brokers, topic, ["refused"])
    refused = berlin.process("publish", topic, stdin=b"refused")
    assert name in refused.err, refused.err

    report = berlin("mirror", "failover", name, "--json").document
    assert [partition["missing"] for partition in report["partitions"]] == [0, 0, 0]
    again = berlin("mirror", "failover", name, "--json").document
    assert [partition["offset"] for partition in again["partitions"]] == [
        partition["offset"] for partition in report["partitions"]
    ]
    publish(berlin.brokers, topic, ["mine"])
    assert len(read(berlin.brokers, topic, 601)) == 601
    epochs = {partition["epoch"] for partition in report["partitions"]}
    assert min(epochs) > 0
    assert berlin("mirror", "delete", name, "--force").code == 0


def test_a_mirror_resumes_after_both_sides_were_killed(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic, "--partitions", "2")
    publish(paris.brokers, topic, [f"a-{number}" for number in range(500)])
    name = mirrored(paris, berlin, topic)
    wait_until(lambda: caught_up(berlin, name, topic, paris))
    commit(paris.brokers, f"{topic}-group", TopicPartition(topic, 0, 9))
    wait_until(lambda: committed(berlin, f"{topic}-group") == [9])
    sites.berlin.kill()
    publish(paris.brokers, topic, [f"b-{number}" for number in range(500)])
    sites.paris.kill()
    sites.start()
    publish(paris.brokers, topic, [f"c-{number}" for number in range(500)])
    wait_until(lambda: caught_up(berlin, name, topic, paris))
    assert read(berlin.brokers, topic, 1500) == read(paris.brokers, topic, 1500)
    # The mirror applied it, so it follows back too.
    commit(paris.brokers, f"{topic}-group", TopicPartition(topic, 0, 5))
    wait_until(lambda: committed(berlin, f"{topic}-group") == [5])
    berlin("mirror", "failover", name)
    sites.berlin.kill()
    sites.berlin.start()
    publish(berlin.brokers, topic, ["mine"])
    assert berlin("mirror", "delete", name, "--force").code == 0


def test_a_cutover_of_one_topic_does_not_need_a_copy_that_cannot_be_continued(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    stuck = f"{topic}-stuck"
    for name in (topic, stuck):
        paris("topic", "create", name, "--partitions", "1")
        publish(paris.brokers, name, ["a", "b"])
    mirror = mirrored(paris, berlin, topic)
    for name in (topic, stuck):
        wait_until(lambda name=name: caught_up(berlin, mirror, name, paris))  # type: ignore[misc]
    # Recreated, it has a partition that the copy never gets.
    paris("topic", "delete", stuck, "--yes")
    assert paris("topic", "create", stuck, "--partitions", "8").code == 0
    publish(paris.brokers, stuck, [f"{number}" for number in range(100)])
    commit(paris.brokers, f"{topic}-group", TopicPartition(topic, 0, 1))
    cut = berlin("mirror", "cutover", mirror, "--topics", topic, "--idle", "0", "--yes", "--json")
    assert cut.code == 0, cut.err
    assert [partition["offset"] for partition in cut.document["partitions"]] == [2]
    assert committed(berlin, f"{topic}-group") == [1]
    assert described(berlin, mirror)["topics"] == [stuck]
    assert berlin("mirror", "failover", mirror).code == 0
    assert berlin("mirror", "delete", mirror, "--force").code == 0


def values_in(site: CommandLine, topic: str) -> list[str]:
    """Return all messages of a topic with one partition, which has not been cut."""
    result = site("topic", "describe", topic, "--json")
    count = result.document["partitions"][0]["end"] if result.code == 0 else 0
    return [value for _, _, value in read(site.brokers, topic, count)] if count else []


def recreate(site: CommandLine, topic: str, values: list[str]) -> None:
    """Delete a topic, create it again, and publish to it."""
    site("topic", "delete", topic, "--yes")
    assert site("topic", "create", topic, "--partitions", "1").code == 0
    publish(site.brokers, topic, values)


@pytest.mark.parametrize("prefix", ["", "x."])
def test_nothing_of_a_recreated_topic_is_copied_into_the_copy_of_the_old_one(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str, prefix: str
) -> None:
    other, group, copy = f"{topic}-other", f"{topic}-group", prefix + topic
    for name in (topic, other):
        paris("topic", "create", name, "--partitions", "1")
        publish(paris.brokers, name, ["t1"])
    mirror = mirrored(paris, berlin, topic, *(("--rename", prefix) if prefix else ()))
    commit(paris.brokers, group, TopicPartition(topic, 0, 0))
    wait_until(lambda: all(values_in(berlin, copied_topic) == ["t1"] for copied_topic in (copy, prefix + other)))
    wait_until(lambda: committed(berlin, group) == [0])
    recreate(paris, topic, ["t2", "t3", "t4"])
    commit(paris.brokers, group, TopicPartition(topic, 0, 1))
    wait_until(lambda: "created again" in described(berlin, mirror)["error"])
    # Groups of other topics do not wait for it, and once their offsets are here, those of the new one would be too.
    commit(paris.brokers, f"{group}-2", TopicPartition(other, 0, 1))
    wait_until(lambda: committed(berlin, f"{group}-2") == [1])
    assert committed(berlin, group) == [0]
    assert values_in(berlin, copy) == ["t1"]
    assert [partition["topic"] for partition in described(berlin, mirror)["partitions"] if partition["error"]] == [copy]
    assert f'millstream_mirror_failing{{mirror="{mirror}"}} 1.0' in sites.berlin.metrics()
    assert berlin("topic", "delete", copy, "--yes").code == 0
    wait_until(lambda: values_in(berlin, copy) == ["t2", "t3", "t4"])
    wait_until(lambda: committed(berlin, group) == [1])
    assert berlin("mirror", "failover", mirror).code == 0
    assert berlin("mirror", "delete", mirror, "--force").code == 0


def test_a_switch_refuses_and_a_reverse_names_a_topic_that_was_recreated(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        paris("topic", "create", name, "--partitions", "1")
        publish(paris.brokers, name, ["t1"])
    mirror = mirrored(paris, berlin, topic, "--exclude", ".*-saved")
    wait_until(lambda: all(values_in(berlin, name) == ["t1"] for name in (topic, other)))
    recreate(paris, topic, ["t2", "t3", "t4"])
    wait_until(lambda: "created again" in described(berlin, mirror)["error"])
    assert f"{topic} was deleted on the source and created again" in berlin("mirror", "switch", mirror).err
    publish(paris.brokers, other, ["t2"])
    wait_until(lambda: values_in(berlin, other) == ["t1", "t2"])
    report = berlin("mirror", "failover", mirror, "--json").document
    cuts = {partition["topic"]: (partition["offset"], partition["missing"]) for partition in report["partitions"]}
    assert cuts == {topic: (1, None), other: (2, 0)}
    assert f"{topic} was deleted at the source and created again" in report["source_error"]
    reversal = berlin("mirror", "reverse", mirror, "--save-to", f"{topic}-saved", "--json")
    assert f"does not follow in {topic}:" in reversal.err
    assert (reversal.code, reversal.document["recreated"], reversal.document["removed"]) == (1, [topic], [])
    # The old source follows in the other topic, and its own new one is as it was.
    publish(berlin.brokers, other, ["t3"])
    wait_until(lambda: caught_up(paris, mirror, other, berlin))
    assert [value for _, _, value in read(paris.brokers, other, 3)] == ["t1", "t2", "t3"]
    publish(paris.brokers, topic, ["t5"])
    assert values_in(paris, topic) == ["t2", "t3", "t4", "t5"]
    assert [value for _, _, value in read(berlin.brokers, topic, 1)] == ["t1"]
    wait_until(lambda: "already exists here" in str(described(paris, mirror)["notes"]))
    assert paris("mirror", "failover", mirror).code == 0
    assert paris("mirror", "delete", mirror, "--force").code == 0


def transact(brokers: str, name: str, topics: list[str], values: list[str], *, ends: bool = True) -> Producer:
    """Publish to all topics in one transaction."""
    producer = Producer({"bootstrap.servers": brokers, "transactional.id": name})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for value in values:
        for topic in topics:
            producer.produce(topic, value)
    producer.flush(PATIENCE_S)
    if ends:
        producer.commit_transaction(PATIENCE_S)
    return producer


def transform(brokers: str, group: str, source: str, target: str, count: int, until: int) -> None:
    """Consume, transform and produce up to an offset, in transactions of so many messages with a group's offsets."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": group, "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": brokers, "transactional.id": group})
    producer.init_transactions(PATIENCE_S)
    (start,) = consumer.committed([TopicPartition(source, 0)], PATIENCE_S)
    position = max(start.offset, 0)
    # Not as a member: offsets of groups with members are not mirrored.
    consumer.assign([TopicPartition(source, 0, position)])
    try:
        while position < until:
            messages = [message for message in consumer.consume(count, 0.2) if message.error() is None]
            if messages:
                producer.begin_transaction()
                for message in messages:
                    producer.produce(target, b"out-" + (message.value() or b""))
                position = (messages[-1].offset() or 0) + 1
                offsets = [TopicPartition(source, 0, position)]
                producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), PATIENCE_S)
                producer.commit_transaction(PATIENCE_S)
    finally:
        consumer.close()


def committed_values(brokers: str, topic: str) -> list[str]:
    return [value.decode() for value in committed_messages(brokers, topic)]


def test_an_application_repeats_no_transaction_after_an_unplanned_failover(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    source, target, group = f"{topic}-in", f"{topic}-out", f"{topic}-group"
    for site_topic in (source, target):
        paris("topic", "create", site_topic)
    name = mirrored(paris, berlin, topic)
    values = [f"{number:04}" for number in range(2000)]
    publish(paris.brokers, source, values)
    wait_until(lambda: caught_up(berlin, name, source, paris))
    # Another process: a commit that waits for a killed broker cannot be ended in a thread.
    running = get_context("spawn").Process(
        target=transform, args=(paris.brokers, group, source, target, 3, len(values)), daemon=True
    )
    running.start()
    try:
        wait_until(lambda: any(committed(berlin, group)))
        sites.paris.kill()
    finally:
        running.kill()
        running.join()
    try:
        assert berlin("mirror", "failover", name).code == 0
        done = committed_values(berlin.brokers, target)
        assert done
        assert committed(berlin, group) == [len(done)]
        transform(berlin.brokers, group, source, target, 100, len(values))
        assert committed_values(berlin.brokers, target) == [f"out-{value}" for value in values]
    finally:
        sites.paris.start()
    assert berlin("mirror", "delete", name, "--force").code == 0


def subscribe(site: CommandLine, name: str, topic: str, *flags: str) -> None:
    """Create a subscription that begins with the first message."""
    earliest = ("--set", "share.auto.offset.reset=earliest")
    made = site("subscription", "create", name, "--topic", topic, *earliest, *flags)
    assert made.code == 0, made.err


def switch_back(paris: CommandLine, berlin: CommandLine, mirror: str, topic: str) -> None:
    """Switch back to paris as planned, while berlin holds a to d."""
    publish(berlin.brokers, topic, ["e"])
    switched = paris("mirror", "switch", mirror, "--json")
    assert switched.code == 0, switched.err
    assert switched.document["removed"] == []
    publish(paris.brokers, topic, ["f"])
    wait_until(lambda: caught_up(berlin, mirror, topic, paris))
    values = ["a", "b", "c", "d", "e", "f"]
    assert [value for _, _, value in read(berlin.brokers, topic, len(values))] == values


def test_state_is_mirrored_and_failback_names_the_records_it_drops(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        paris("topic", "create", name)
    subscribe(paris, f"{topic}-workers", topic)
    subscribe(paris, f"{topic}-failing", topic, "--dead-letter", f"{topic}-dead", "--backoff", "0:0")
    transact(paris.brokers, f"{topic}-t1", [topic, other], ["a", "b"])
    mirror = mirrored(paris, berlin, topic, "--exclude", ".*-saved")
    transact(paris.brokers, f"{topic}-t2", [topic, other], ["c"])
    hanging = transact(paris.brokers, f"{topic}-t3", [topic, other], ["open"], ends=False)
    late = transact(paris.brokers, f"{topic}-t4", [topic, other], ["late"], ends=False)

    commit(paris.brokers, f"{topic}-group", TopicPartition(topic, 0, 2))
    taken = paris("subscription", "pull", f"{topic}-workers", "-n", "2", "--accept", "--json")
    assert taken.code == 0, taken.err
    # Another worker releases two messages, which have then failed once, and rejects one, which becomes a dead letter.
    failing = ("subscription", "pull", f"{topic}-failing", "--wait", "20", "--json", "-n")
    assert [document["attempt"] for document in paris(*failing, "2", "--release").documents] == [1, 1]
    assert [document["value"] for document in paris(*failing, "1", "--reject", "bad").documents] == ["a"]

    wait_until(lambda: caught_up(berlin, mirror, topic, paris))
    wait_until(lambda: caught_up(berlin, mirror, other, paris))
    assert [value for _, _, value in read(berlin.brokers, topic, 3)] == ["a", "b", "c"]

    wait_until(lambda: committed(berlin, f"{topic}-group") == [2])
    wait_until(lambda: described(berlin, mirror)["queues"] > 1)
    wait_until(lambda: backlog_of(berlin, f"{topic}-failing") == 2)
    assert [value for _, _, value in read(berlin.brokers, f"{topic}-dead", 1)] == ["a"]
    refused = berlin("subscription", "pull", f"{topic}-workers", "-n", "1", "--json")
    assert mirror in refused.err

    report = berlin("mirror", "failover", mirror, "--json").document
    repeated = berlin("mirror", "failover", mirror, "--json").document
    for shown in (report, repeated):
        aborted = {partition["topic"]: partition["aborted"] for partition in shown["partitions"]}
        assert (aborted[topic], aborted[other]) == (2, 2)
    assert {partition["dropped"] for partition in repeated["partitions"]} == {None}
    publish(berlin.brokers, topic, ["d"])
    assert [value for _, _, value in read(berlin.brokers, topic, 4)] == ["a", "b", "c", "d"]
    # Messages accepted in paris are not redelivered, and new ones do not count as accepted.
    pulled = berlin("subscription", "pull", f"{topic}-workers", "--accept", "--wait", "20", "-n", "2", "--json")
    assert [document["value"] for document in pulled.documents] == ["c", "d"], pulled.out

    again = berlin(*failing, "1", "--accept")
    assert [(record["value"], record["attempt"]) for record in again.documents] == [("b", 2)], again.out + again.err

    # Paris did not notice, and has records that exist or were committed only there.
    hanging.abort_transaction(PATIENCE_S)
    late.commit_transaction(PATIENCE_S)
    publish(paris.brokers, topic, ["lost-1", "lost-2"])
    cuts = cuts_of(berlin, mirror)
    check_refused(paris, berlin, mirror, other)
    publish(paris.brokers, topic, ["lost-3"])
    reversed_ = berlin("mirror", "reverse", mirror, "--save-to", f"{topic}-saved", "--json")
    assert reversed_.code == 0, reversed_.err
    named = [(entry["topic"], entry["start"], entry["end"]) for entry in reversed_.document["removed"]]
    (torn,) = [(start, end) for name, start, end in named if name == other]
    assert torn == (cuts[other][0] - 1, cuts[other][0])
    assert next(end for name, _, end in named if name == topic) == cuts[topic][0]
    wait_until(lambda: caught_up(paris, mirror, topic, berlin))
    check_repeated(paris, mirror, cuts, ids_of(berlin, cuts), reversed_.document["removed"])
    assert read(paris.brokers, topic, 4) == read(berlin.brokers, topic, 4)
    saved = [value for _, _, value in read(paris.brokers, f"{topic}-saved", 5)]
    assert sorted(saved) == ["late", "late", "lost-1", "lost-2", "lost-3"]

    switch_back(paris, berlin, mirror, topic)
    berlin("mirror", "failover", mirror)
    assert berlin("mirror", "delete", mirror, "--force").code == 0


def backlog_of(site: CommandLine, name: str) -> int:
    """Return the backlog of a subscription; -1 if listing and description differ."""
    subscriptions = site("subscription", "list", "--internal", "--json").document["subscriptions"]
    shown = site("subscription", "describe", name, "--json")
    assert shown.code == 0, shown.err
    backlog: int = sum(queue["backlog"] for queue in shown.document["queues"])
    return (
        backlog
        if [subscription["backlog"] for subscription in subscriptions if subscription["subscription"] == name]
        == [backlog]
        else -1
    )


def letters_in(site: CommandLine, topic: str) -> int:
    topics = site("dlq", "list", "--json").document["dead_letters"]
    return sum(entry["letters"] for entry in topics if entry["topic"] == topic)


@pytest.mark.parametrize("is_tracked", [True, False], ids=["letters redriven at the source", "letters never looked at"])
def test_backlogs_and_letters_equal_those_of_the_source_before_and_after_a_failover(
    paris: CommandLine, berlin: CommandLine, topic: str, is_tracked: bool
) -> None:
    workers, dead = f"{topic}-workers", f"{topic}-dead"
    paris("topic", "create", topic)
    subscribe(paris, workers, topic, "--dead-letter", dead, "--backoff", "0:0")
    publish(paris.brokers, topic, ["a", "b", "c", "d", "e"])
    pull = ("subscription", "pull", workers, "--wait", "20", "--json")
    assert len(paris(*pull, "-n", "3", "--reject", "bad").documents) == 3
    wait_until(lambda: letters_in(paris, dead) == 3)
    # The letters are mirrored although their topic was not named.
    mirror = mirrored(paris, berlin, topic, "--topics", topic)
    for name in (topic, dead):
        wait_until(lambda name=name: caught_up(berlin, mirror, name, paris))  # type: ignore[misc]
    wait_until(lambda: described(berlin, mirror)["queues"] > 0)
    wait_until(lambda: backlog_of(berlin, workers) == backlog_of(paris, workers) == 2)
    remaining = 3
    if is_tracked:
        # Berlin was asked for letters first; what counts is which of them paris has closed.
        refused = berlin("dlq", "show", dead)
        assert mirror in refused.err
        for command in ("redrive", "purge"):
            refused = berlin("dlq", command, dead)
            assert mirror in refused.err
            assert "within a minute" not in refused.err
        redriven = paris("dlq", "redrive", workers, "--limit", "1")
        assert redriven.code == 0, redriven.err
        remaining = 2
        letters = f"__dlq/{dead}"
        wait_until(lambda: backlog_of(berlin, letters) == backlog_of(paris, letters) == 2)
        wait_until(lambda: backlog_of(berlin, workers) == 3)
    assert berlin("mirror", "failover", mirror, "--topics", topic).code == 0
    assert "here since a failover" in berlin("mirror", "describe", mirror).out
    assert letters_in(berlin, dead) == remaining
    wait_until(lambda: backlog_of(berlin, workers) == 5 - remaining)
    redriven = berlin("dlq", "redrive", dead, "--json")
    assert redriven.code == 0, redriven.err
    assert letters_in(berlin, dead) == 0
    pulled = berlin(*pull, "-n", "5", "--accept")
    assert sorted(document["value"] for document in pulled.documents) == ["a", "b", "c", "d", "e"]
    # Nothing keeps the topic of the letters any more; a mirror that runs would copy it again.
    assert berlin("mirror", "pause", mirror).code == 0
    assert berlin("topic", "delete", dead, "--yes").code == 0
    assert berlin("mirror", "delete", mirror, "--force").code == 0


def test_a_mirror_of_a_silent_source_is_created_with_a_warning(berlin: CommandLine, topic: str) -> None:
    made = berlin("mirror", "create", topic, "--from", "127.0.0.1:1")
    assert made.code == 0
    assert "not connected to its source yet" in made.err
    assert f"`millstream mirror describe {topic}` shows its current state" in made.err
    assert ("check that the source is running" in made.err, "millstream serve" in made.err) == (True, False), made.err
    assert f"`millstream mirror update {topic} --set from=HOST:PORT`" in described(berlin, topic)["error"]
    assert berlin("mirror", "delete", topic).code == 0


def test_a_copy_deleted_here_is_restored_with_its_state(paris: CommandLine, berlin: CommandLine, topic: str) -> None:
    workers, group = f"{topic}-workers", f"{topic}-group"
    paris("topic", "create", topic)
    publish(paris.brokers, topic, ["a", "b", "c"])
    subscribe(paris, workers, topic)
    assert paris("subscription", "pull", workers, "-n", "2", "--accept", "--wait", "20", "--json").code == 0
    commit(paris.brokers, group, TopicPartition(topic, 0, 2))
    mirror = mirrored(paris, berlin, topic)

    def is_whole() -> bool:
        if workers not in berlin("subscription", "list").out or committed(berlin, group) != [2]:
            return False
        document = described(berlin, mirror)
        return (document["groups"], document["queues"]) == (1, 1) and caught_up(berlin, mirror, topic, paris)

    wait_until(is_whole)
    moved = ("group", "reset", group, "--to", "3")
    refused = berlin(*moved)
    assert (refused.code, mirror in refused.err, committed(berlin, group)) == (2, True, [2]), refused.err
    assert berlin("mirror", "update", mirror, "--unset", "topcis").code == 2
    narrowed = berlin("mirror", "update", mirror, "--set", "topics=nothing", "--json")
    assert any(topic in note and "still copied" in note for note in narrowed.document["notes"]), narrowed.out
    widened = berlin("mirror", "update", mirror, "--set", f"topics={topic}.*", "--json")
    assert not any("still copied" in note for note in widened.document["notes"]), widened.out
    for what, name in (("topic", topic), ("group", group), ("subscription", workers)):
        deleted = berlin(what, "delete", name, "--yes")
        assert deleted.code == 0, deleted.err
        wait_until(is_whole)
    in_use = berlin("mirror", "delete", mirror, "--force")
    assert (in_use.code, f"still writes {topic};" in in_use.err) == (5, True), in_use.err
    assert berlin("mirror", "failover", mirror).code == 0
    pulled = berlin("subscription", "pull", workers, "--accept", "--wait", "20", "-n", "1", "--json")
    assert [document["value"] for document in pulled.documents] == ["c"], pulled.out
    assert berlin(*moved).code == 0
    assert committed(berlin, group) == [3]
    result = berlin("mirror", "delete", mirror, "--yes")
    assert (result.code, f"mirror reverse {mirror}" in result.err) == (5, True), result.err

    # So does the copy of a mirror that was reversed, although its records came from there.
    publish(berlin.brokers, topic, ["d"])
    assert berlin("mirror", "reverse", mirror).code == 0
    wait_until(lambda: caught_up(paris, mirror, topic, berlin))
    assert paris("topic", "delete", topic, "--yes").code == 0

    def is_restored() -> bool:
        if not caught_up(paris, mirror, topic, berlin) or committed(paris, group) != [3]:
            return False
        return (document := described(paris, mirror))["queues"] == 1 and not document["notes"]

    wait_until(is_restored)
    assert paris("mirror", "failover", mirror).code == 0
    pulled = paris("subscription", "pull", workers, "--accept", "--wait", "20", "-n", "1", "--json")
    assert [document["value"] for document in pulled.documents] == ["d"], pulled.out
    assert paris("mirror", "delete", mirror, "--force").code == 0


def test_two_sites_mirror_each_other_without_loops(paris: CommandLine, berlin: CommandLine, topic: str) -> None:
    paris("topic", "create", f"paris.{topic}")
    paris("topic", "create", f"paris.{topic}.skip")
    berlin("topic", "create", f"berlin.{topic}", "--partitions", "2")
    publish(paris.brokers, f"paris.{topic}", ["p"])
    publish(berlin.brokers, f"berlin.{topic}", ["b"])
    for site, other in ((paris, berlin), (berlin, paris)):
        flags = ("--topics", f".*{topic}.*", "--exclude", ".*skip", "--rate", "1000000")
        assert site("mirror", "create", f"m-{topic}", "--from", other.brokers, *flags).code == 0
    renaming = ("--topics", f"paris.{topic}", "--rename", "copy-of-")
    assert berlin("mirror", "create", f"r-{topic}", "--from", paris.brokers, *renaming).code == 0
    assert read(berlin.brokers, f"paris.{topic}", 1) == [(0, 0, "p")]
    assert [value for _, _, value in read(paris.brokers, f"berlin.{topic}", 1)] == ["b"]
    assert read(berlin.brokers, f"copy-of-paris.{topic}", 1) == [(0, 0, "p")]

    original = paris("topic", "describe", f"paris.{topic}", "--json").document
    assert berlin("topic", "describe", f"paris.{topic}", "--json").document["id"] == original["id"]
    assert berlin("topic", "describe", f"copy-of-paris.{topic}", "--json").document["id"] != original["id"]
    wait_until(lambda: any("not mirrored again" in note for note in described(paris, f"m-{topic}")["notes"]))
    there, here = (
        {
            listed_topic["topic"]
            for listed_topic in site("topic", "list", "--json").document["topics"]
            if topic in listed_topic["topic"]
        }
        for site in (paris, berlin)
    )
    both = {f"paris.{topic}", f"berlin.{topic}"}
    assert there == both | {f"paris.{topic}.skip"}
    assert here == both | {f"copy-of-paris.{topic}"}
    refused = berlin("mirror", "switch", f"r-{topic}")
    assert "other names" in refused.err

    # A topic deleted on the source stays, unless the mirror is set to delete it.
    paris("topic", "delete", f"paris.{topic}", "--yes")
    wait_until(lambda: any("is gone from the source" in note for note in described(berlin, f"m-{topic}")["notes"]))
    assert berlin("mirror", "update", f"m-{topic}", "--set", "deletions=true").code == 0
    wait_until(lambda: berlin("topic", "describe", f"paris.{topic}").code != 0)
    assert read(berlin.brokers, f"copy-of-paris.{topic}", 1) == [(0, 0, "p")]
    # Topics that berlin takes over came from paris, which does not copy them back, although its mirror matches the
    # name.
    berlin("mirror", "failover", f"r-{topic}")
    publish(berlin.brokers, f"copy-of-paris.{topic}", ["mine"])
    wait_until(lambda: any("came from this cluster" in note for note in described(paris, f"m-{topic}")["notes"]))
    assert paris("topic", "describe", f"copy-of-paris.{topic}").code != 0
    # Unless that is requested.
    assert paris("mirror", "update", f"m-{topic}", "--set", "returning=true").code == 0
    assert [value for _, _, value in read(paris.brokers, f"copy-of-paris.{topic}", 2)] == ["p", "mine"]
    paris("mirror", "failover", f"m-{topic}")
    for site, name in ((berlin, f"r-{topic}"), (paris, f"m-{topic}"), (berlin, f"m-{topic}")):
        deleted = site("mirror", "delete", name, "--force")
        assert deleted.code == 0, deleted.err


def described(site: CommandLine, name: str) -> Any:
    return site("mirror", "describe", name, "--json").document


def test_topic_changes_are_mirrored_and_reported_over_http_and_in_metrics(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    name = f"m-{topic}"
    paris("topic", "create", topic)
    with httpx.Client(base_url=f"http://{sites.berlin.http}", timeout=PATIENCE_S) as http:
        made = http.post(
            "/v1/mirrors", json={"name": name, "settings": {"from": paris.brokers, "topics": topic, "rate": 10_000_000}}
        )
        assert made.status_code == 201, made.text
        assert http.post("/v1/mirrors", json={"name": name, "settings": {"from": "x:1"}}).status_code == 409
        assert http.post("/v1/mirrors", json={"name": "bad", "settings": {"from": "nowhere"}}).status_code == 422
        itself = http.post("/v1/mirrors", json={"name": "itself", "settings": {"from": berlin.brokers}})
        assert (itself.status_code, "this cluster itself" in itself.text) == (422, True), itself.text
        publish(paris.brokers, topic, ["a"])
        assert read(berlin.brokers, topic, 1) == [(0, 0, "a")]
        assert http.post(f"/v1/mirrors/{name}/pause").json()["state"] == "paused"
        wait_until(lambda: http.get(f"/v1/mirrors/{name}").json()["lag_unknown"] == 1)
        paris("topic", "alter", topic, "--set", "retention.ms=1234567890", "--partitions", "3")
        # Settings are compared when a mirror starts, and every few seconds.
        assert http.patch(f"/v1/mirrors/{name}", json={"settings": {"rate": None}}).status_code == 200
        assert http.post(f"/v1/mirrors/{name}/resume").status_code == 200

        def grown() -> bool:
            copy = berlin("topic", "describe", topic, "--json").document
            return len(copy["partitions"]) == 3 and copy["overrides"] == {"retention.ms": "1234567890"}

        wait_until(grown)
        publish(paris.brokers, topic, [f"b{number}" for number in range(30)])
        wait_until(lambda: caught_up(berlin, name, topic, paris))
        wait_until(lambda: http.get(f"/v1/mirrors/{name}").json()["lag"] == 0)
        assert http.get(f"/v1/mirrors/{name}").json()["lag_unknown"] == 0
        assert name in {mirror["mirror"] for mirror in http.get("/v1/mirrors").json()["mirrors"]}
        metrics = sites.berlin.metrics()
        for metric in ("lag", "lag_seconds"):
            labels = f'{{mirror="{name}",partition="2",topic="{topic}"}}'
            assert f"millstream_mirror_{metric}{labels} 0.0" in metrics, metrics
        assert f'millstream_mirror_bytes_total{{mirror="{name}"}}' in metrics
        refused = http.post(f"/v1/mirrors/{name}/reverse", json={"address": berlin.brokers})
        assert refused.status_code == 422, refused.text
        assert "switch" in refused.text
        assert http.delete(f"/v1/mirrors/{name}").status_code == 409
        report = http.post(f"/v1/mirrors/{name}/failover", json={}).json()
        assert [partition["missing"] for partition in report["partitions"]] == [0, 0, 0]
        refused = http.delete(f"/v1/mirrors/{name}")
        assert (refused.status_code, "mirror reverse" in refused.text) == (409, True), refused.text
        assert http.delete(f"/v1/mirrors/{name}", params={"force": True}).status_code == 204
        assert http.get(f"/v1/mirrors/{name}").status_code == 404


def test_a_source_accepts_writes_again_when_the_new_primary_is_lost(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        paris("topic", "create", name)
    fence = AdoptRequest(
        name=topic, step="fence", settings={"from": berlin.brokers}, topic_ids=ids_of(paris, (topic, other))
    )
    publish(paris.brokers, topic, ["before"])
    assert adopt(paris, fence).ends == {topic: {0: 1}, other: {0: 0}}
    with pytest.raises(AssertionError, match="POLICY_VIOLATION"):
        publish(paris.brokers, topic, ["refused"])
    assert "taking over" in paris("mirror", "switch", topic).err
    assert "no copies that match nothing" in paris("mirror", "failover", topic, "--topics", "nothing").err
    freed = paris("mirror", "failover", topic, "--topics", topic, "--json").document
    assert [(partition["topic"], partition["offset"], partition["missing"]) for partition in freed["partitions"]] == [
        (topic, 1, 0)
    ]
    assert freed["source_error"] == ""
    publish(paris.brokers, topic, ["after"])
    assert [value for _, _, value in read(paris.brokers, topic, 2)] == ["before", "after"]
    with pytest.raises(AssertionError, match="POLICY_VIOLATION"):
        publish(paris.brokers, other, ["refused"])

    # The switch was only slow: its remainder does not drop what was written since.
    follow = msgspec.structs.replace(fence, step="follow", cuts={topic: {0: 1}, other: {0: 0}}, is_fenced=True)
    assert "accepts writers again" in (adopt(paris, follow).message or "")
    assert len(read(paris.brokers, topic, 2)) == 2
    assert paris("mirror", "failover", topic).code == 0
    publish(paris.brokers, other, ["after"])
    assert paris("mirror", "describe", topic).code != 0


def test_an_interrupted_switch_is_reported_on_both_sides_and_can_be_repeated(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic)
    publish(paris.brokers, topic, ["a"])
    mirror = mirrored(paris, berlin, topic)
    wait_until(lambda: caught_up(berlin, mirror, topic, paris))
    # Berlin is killed right after the first step.
    fence = AdoptRequest(name=mirror, step="fence", settings={"from": berlin.brokers}, topic_ids=ids_of(paris, [topic]))
    assert adopt(paris, fence).error == 0
    sites.berlin.kill()
    sites.berlin.start()

    def reports(site: CommandLine, text: str) -> bool:
        mirrors = site("mirror", "list", "--json").document["mirrors"]
        errors = [listed_mirror["error"] for listed_mirror in mirrors if listed_mirror["mirror"] == mirror]
        findings = [finding["detail"] for finding in site("doctor", "--json").document["findings"]]
        return len(errors) == 1 and text in errors[0] and any(errors[0] in detail for detail in findings)

    again = f"`millstream mirror switch {mirror}`"
    wait_until(lambda: reports(berlin, f"Run {again} again"))
    assert described(berlin, mirror)["notes"] == []
    assert reports(paris, f"run {again} there again")
    switched = berlin("mirror", "switch", mirror, "--address", berlin.brokers, "--json")
    assert switched.code == 0, switched.err
    publish(berlin.brokers, topic, ["b"])
    wait_until(lambda: caught_up(paris, mirror, topic, berlin))
    wait_until(lambda: described(paris, mirror)["error"] == "")
    assert paris("mirror", "failover", mirror).code == 0
    assert paris("mirror", "delete", mirror, "--force").code == 0


def test_a_switch_includes_topics_failed_over_before(paris: CommandLine, berlin: CommandLine, topic: str) -> None:
    early, late = f"{topic}-early", f"{topic}-late"
    for name in (early, late):
        paris("topic", "create", name)
        publish(paris.brokers, name, ["a"])
    mirror = mirrored(paris, berlin, topic)
    for name in (early, late):
        wait_until(lambda name=name: caught_up(berlin, mirror, name, paris))  # type: ignore[misc]
    assert berlin("mirror", "failover", mirror, "--topics", early).code == 0
    publish(berlin.brokers, early, ["b"])
    publish(paris.brokers, early, ["lost"])
    wait_until(lambda: described(berlin, mirror)["state"] == "running")
    refused = berlin("mirror", "switch", mirror)
    assert f"topic '{early}' was failed over before" in refused.err
    assert "offset 1)" in refused.err
    # Nothing has changed.
    publish(paris.brokers, late, ["b"])
    publish(paris.brokers, early, ["lost, too"])
    wait_until(lambda: caught_up(berlin, mirror, late, paris))

    # Paris gives up the records that only it has of one topic; then a switch includes both.
    assert berlin("mirror", "failover", mirror).code == 0
    reversed_ = berlin("mirror", "reverse", mirror, "--json")
    assert [
        (removed_range["topic"], removed_range["start"], removed_range["end"])
        for removed_range in reversed_.document["removed"]
    ] == [(early, 1, 3)]
    for name in (early, late):
        wait_until(lambda name=name: caught_up(paris, mirror, name, berlin))  # type: ignore[misc]
    assert paris("mirror", "failover", mirror, "--topics", early).code == 0
    publish(paris.brokers, early, ["c"])
    wait_until(lambda: described(paris, mirror)["state"] == "running")
    switched = paris("mirror", "switch", mirror, "--json")
    assert switched.code == 0, switched.err
    assert {partition["topic"] for partition in switched.document["partitions"]} == {late}
    assert switched.document["removed"] == []
    publish(paris.brokers, late, ["c"])
    for name in (early, late):
        wait_until(lambda name=name: caught_up(berlin, mirror, name, paris))  # type: ignore[misc]
        assert [value for _, _, value in read(berlin.brokers, name, 3)] == ["a", "b", "c"]
    berlin("mirror", "failover", mirror)
    assert berlin("mirror", "delete", mirror, "--force").code == 0


def test_offsets_of_groups_without_transactions_are_mirrored_after_a_failover_of_another_topic(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    output, plain, exact = f"{topic}-output", f"{topic}-plain", f"{topic}-exact"
    for name in (topic, output):
        paris("topic", "create", name, "--partitions", "1")
    publish(paris.brokers, topic, ["a", "b", "c"])
    consumer = Consumer({"bootstrap.servers": paris.brokers, "group.id": exact, "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": paris.brokers, "transactional.id": exact})
    producer.init_transactions(PATIENCE_S)

    def transform(offset: int) -> None:
        """Write a result, and commit the offset with it."""
        producer.begin_transaction()
        producer.produce(output, f"{offset}")
        read_until = [TopicPartition(topic, 0, offset)]
        producer.send_offsets_to_transaction(read_until, consumer.consumer_group_metadata(), PATIENCE_S)
        producer.commit_transaction(PATIENCE_S)

    transform(1)
    commit(paris.brokers, plain, TopicPartition(topic, 0, 1))
    mirror = mirrored(paris, berlin, topic)
    for group in (plain, exact):
        wait_until(lambda group=group: committed(berlin, group) == [1])  # type: ignore[misc]
    assert berlin("mirror", "failover", mirror, "--topics", output).code == 0
    transform(2)
    commit(paris.brokers, plain, TopicPartition(topic, 0, 2))
    wait_until(lambda: committed(berlin, plain) == [2])
    # Its later offsets depend on the transaction, whichever client commits them.
    commit(paris.brokers, exact, TopicPartition(topic, 0, 3))
    commit(paris.brokers, plain, TopicPartition(topic, 0, 3))
    wait_until(lambda: committed(berlin, plain) == [3])
    assert committed(berlin, exact) == [1]
    (note,) = [note for note in described(berlin, mirror)["notes"] if "not mirrored any more" in note]
    assert f"({exact}), because of the failover of {output}:" in note
    # A planned failover of the rest leaves it where it was, too.
    commit(paris.brokers, plain, TopicPartition(topic, 0, 1))
    cut = berlin("mirror", "cutover", mirror, "--idle", "0", "--yes", "--json")
    assert cut.code == 0, cut.err
    assert (committed(berlin, plain), committed(berlin, exact)) == ([1], [1])
    assert berlin("mirror", "delete", mirror, "--force").code == 0
    consumer.close()


COMPACTED = tuple(
    part
    # A last small record has to be compacted even if all those before it were, on a slow machine.
    for flag in ("cleanup.policy=compact", "segment.ms=100", "min.cleanable.dirty.ratio=0")
    for part in ("--set", flag)
)


def put_value(site: CommandLine, topic: str, *pairs: tuple[str, str]) -> None:
    """Publish values by key, each in its own batch."""
    producer = Producer({"bootstrap.servers": site.brokers, "linger.ms": 0})
    for key, value in pairs:
        producer.produce(topic, value, key=key)
        assert producer.flush(PATIENCE_S) == 0


def test_a_failover_cuts_where_no_value_of_a_compacted_topic_is_missing(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    """The source has removed a value that was not copied, because of a newer one that is not copied either."""
    paris("topic", "create", topic, *COMPACTED)
    put_value(paris, topic, ("key", "old"))
    mirror = mirrored(paris, berlin, topic)
    wait_until(lambda: caught_up(berlin, mirror, topic, paris))
    assert berlin("mirror", "pause", mirror).code == 0
    others = [(f"other-{number}", "x" * 2000) for number in range(40)]
    put_value(paris, topic, ("key", "newer"), *others, ("key", "newest"))
    wait_until(lambda: read(paris.brokers, topic, 41)[0][1] == 2)
    # So slow that it is interrupted in between.
    assert berlin("mirror", "update", mirror, "--set", "rate=3000").code == 0
    assert berlin("mirror", "resume", mirror).code == 0

    def has_some() -> bool:
        partitions = described(berlin, mirror)["partitions"]
        return bool(partitions) and 2 < partitions[0]["end"] < 40

    wait_until(has_some)
    assert berlin("mirror", "failover", mirror).code == 0
    assert cuts_of(berlin, mirror) == {topic: {0: 1}}
    put_value(berlin, topic, ("another", "value"))
    assert read(berlin.brokers, topic, 2) == [(0, 0, "old"), (0, 2, "value")]
    assert berlin("mirror", "reverse", mirror).code == 0
    wait_until(lambda: caught_up(paris, mirror, topic, berlin))
    assert read(paris.brokers, topic, 2) == [(0, 0, "old"), (0, 2, "value")]
    paris("mirror", "failover", mirror)
    assert paris("mirror", "delete", mirror, "--force").code == 0


def test_compaction_beyond_the_cut_loses_no_key_on_failback(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    """The old source has replaced a value that both sides had by one that it drops."""
    paris("topic", "create", topic, *COMPACTED)

    def put(site: CommandLine, key: str, value: str) -> None:
        put_value(site, topic, (key, value))

    put(paris, "first", "old")
    put(paris, "second", "old")
    mirror = mirrored(paris, berlin, topic)
    wait_until(lambda: caught_up(berlin, mirror, topic, paris))
    assert berlin("mirror", "failover", mirror).code == 0
    put(berlin, "third", "new")
    put(paris, "first", "lost")
    wait_until(lambda: read(paris.brokers, topic, 2)[0] == (0, 1, "old"))
    reversed_ = berlin("mirror", "reverse", mirror, "--json")
    assert reversed_.code == 0, reversed_.err
    wait_until(lambda: caught_up(paris, mirror, topic, berlin))
    everything = [(0, 0, "old"), (0, 1, "old"), (0, 3, "new")]
    assert read(berlin.brokers, topic, 3) == everything
    assert read(paris.brokers, topic, 3) == everything
    paris("mirror", "failover", mirror)
    assert paris("mirror", "delete", mirror, "--force").code == 0
