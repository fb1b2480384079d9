"""Three nodes as one cluster, with etcd, PostgreSQL and an unmodified client: nodes die, stop and return."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic
from playwright.sync_api import expect

import millstream
from millstream.gateway.api import services as gateway_services
from millstream.gateway.api.dispatch import Api
from millstream.gateway.api.routes.publishing import MESSAGES
from millstream.gateway.app import ROUTES
from millstream.gateway.origin_check import OriginCheck
from millstream_testing.browser import check_appearance, chromium, open_page, running_browser, save_screenshot
from millstream_testing.command import CommandLine, run_command
from millstream_testing.committed_messages import committed_messages
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.producer_load import ProducerLoad
from millstream_testing.server import Server, ServerGroup
from millstream_testing.waiting import until, wait_until

WAIT_S = 120.0
SETTINGS = {"group-initial-delay-ms": 100, "leader-balance-ms": 500, "lease-ms": 2000, "group-session-min-ms": 1000}


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> Iterator[ServerGroup]:
    """One cluster for all tests of this module."""
    folder = tmp_path_factory.mktemp("cluster")
    with ServerGroup(folder, etcd.url, postgres.new_database(), settings=SETTINGS) as started:
        yield started


@pytest.fixture
def cluster(running: ServerGroup) -> ServerGroup:
    running.start()
    # Each node has to know, since tests use any.
    for node in running:
        admin = AdminClient({"bootstrap.servers": node.kafka, "log_level": 0})
        wait_until(lambda admin=admin: len(admin.list_topics(timeout=WAIT_S).brokers) == 3)  # type: ignore[misc]
    return running


def create(cluster: ServerGroup, topic: str, partitions: int = 3) -> AdminClient:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 3)], operation_timeout=WAIT_S)[topic].result()
    return admin


def leader_of(cluster: ServerGroup, topic: str, partition: int = 0) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    return int(admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions[partition].leader)


def in_sync(admin: AdminClient, topic: str) -> bool:
    described = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions.values()
    return all(len(partition.isrs) == 3 and partition.leader >= 0 for partition in described)


def check_nothing_lost_or_duplicated(cluster: ServerGroup, topic: str, load: ProducerLoad) -> None:
    load.finish()
    assert load.errors == []
    assert Counter(committed_messages(cluster.kafka, topic)) == Counter(load.acknowledged)


def test_nothing_is_lost_or_duplicated_when_the_leader_is_killed(cluster: ServerGroup, topic: str) -> None:
    admin = create(cluster, topic)
    load = ProducerLoad(cluster.kafka, topic)
    load.more(200)
    killed = leader_of(cluster, topic)
    cluster[killed].kill()
    load.more(500)
    assert leader_of(cluster, topic) != killed
    cluster[killed].start()
    load.run(lambda: in_sync(admin, topic))
    load.more(200)
    check_nothing_lost_or_duplicated(cluster, topic, load)


def test_a_rolling_restart_causes_no_client_errors(cluster: ServerGroup, topic: str) -> None:
    admin = create(cluster, topic)
    load = ProducerLoad(cluster.kafka, topic)
    load.more(100)
    for node in cluster:
        assert node.stop() == 0
        load.more(100)
        node.start()
        load.run(lambda: in_sync(admin, topic))
    check_nothing_lost_or_duplicated(cluster, topic, load)


def test_a_group_continues_when_its_coordinator_is_killed(cluster: ServerGroup, topic: str) -> None:
    admin = create(cluster, topic)
    load = ProducerLoad(cluster.kafka, topic)
    load.more(200)
    settings = {
        "bootstrap.servers": cluster.kafka,
        "log_level": 0,
        "group.id": f"{topic}-group",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 10_000,
    }
    member = Consumer(settings)
    member.subscribe([topic])
    seen: list[bytes] = []

    def take() -> int:
        seen.extend(message.value() or b"" for message in member.consume(500, 0.2) if message.error() is None)
        return len(set(seen))

    wait_until(lambda: take() >= 200)
    member.commit(asynchronous=False)
    described = admin.describe_consumer_groups([f"{topic}-group"])[f"{topic}-group"].result()
    coordinator = described.coordinator.id
    cluster[coordinator].kill()
    load.more(300)
    wait_until(lambda: take() >= 500)
    wait_until(lambda: take() and _commits(member))
    load.finish()

    def has_committed_all() -> bool:
        # A member whose session expired rejoins in a poll, and has to read uncommitted messages again.
        take()
        return _commits(member) and _committed(member, topic) == len(load.acknowledged)

    wait_until(has_committed_all)
    assert take() >= len(load.acknowledged)
    member.close()
    cluster[coordinator].start()

    again = Consumer({**settings, "auto.offset.reset": "error"})
    assert _committed(again, topic) == len(load.acknowledged)
    again.close()
    assert load.errors == []


def _commits(member: Consumer) -> bool:
    try:
        member.commit(asynchronous=False)
    except KafkaException as error:
        # Until the new coordinator has loaded its state. Where there is nothing to commit, everything is.
        return bool(error.args[0].code() == KafkaError._NO_OFFSET)
    return True


def _committed(member: Consumer, topic: str) -> int:
    places = member.committed([TopicPartition(topic, partition) for partition in range(3)], timeout=WAIT_S)
    return sum(max(0, place.offset) for place in places)


def test_topics_are_administered_through_any_node(cluster: ServerGroup, topic: str) -> None:
    doors = [AdminClient({"bootstrap.servers": node.kafka, "log_level": 0}) for node in cluster]
    doors[0].create_topics([NewTopic(topic, 2, 3)], operation_timeout=WAIT_S)[topic].result()
    for door in doors:
        wait_until(lambda door=door: topic in door.list_topics(timeout=WAIT_S).topics)  # type: ignore[misc]
    doors[1].create_partitions([NewPartitions(topic, 5)], operation_timeout=WAIT_S)[topic].result()
    wait_until(lambda: len(doors[2].list_topics(topic, timeout=WAIT_S).topics[topic].partitions) == 5)
    entry = ConfigEntry("retention.ms", "123456", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    doors[2].incremental_alter_configs([resource])[resource].result()
    asked = ConfigResource(ResourceType.TOPIC, topic)

    def settings() -> dict[str, str]:
        return {name: entry.value for name, entry in doors[0].describe_configs([asked])[asked].result().items()}

    wait_until(lambda: settings()["retention.ms"] == "123456")
    assert settings()["min.insync.replicas"] == "2"
    assert settings()["flush"] == "os"
    described = doors[0].list_topics(topic, timeout=WAIT_S).topics[topic].partitions
    assert {partition.leader for partition in described.values()} <= {1, 2, 3}
    assert doors[0].list_topics(timeout=WAIT_S).controller_id in (1, 2, 3)
    doors[1].delete_topics([topic], operation_timeout=WAIT_S)[topic].result()
    for door in doors:
        wait_until(lambda door=door: topic not in door.list_topics(timeout=WAIT_S).topics)  # type: ignore[misc]


def test_a_cluster_node_is_not_started_standalone(cluster: ServerGroup, tmp_path: Path) -> None:
    free = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0")
    new = ("serve", "--data", str(tmp_path / "new"), *free)
    catalog = run_command([*new, "--catalog", "postgresql://nowhere/none"])
    assert (catalog.code, "--etcd" in catalog.err) == (2, True)
    etcd = run_command([*new, "--etcd", str(cluster[1].settings["etcd"])])
    assert (etcd.code, "--catalog" in etcd.err) == (2, True)
    strange = run_command([*new, "--etcd", str(cluster[1].settings["etcd"]), "--catalog", "mysql://nowhere/none"])
    assert (strange.code, "postgresql://" in strange.err) == (2, True)
    cluster[3].kill()
    alone = run_command(["serve", "--data", str(cluster[3].data), *free])
    assert (alone.code, "of a cluster" in alone.err) == (5, True)


def test_the_folder_of_a_standalone_node_is_refused_by_a_cluster(cluster: ServerGroup, tmp_path: Path) -> None:
    with Server(tmp_path / "alone"):
        pass
    shared = [f"--{name}={cluster[1].settings[name]}" for name in ("etcd", "catalog")]
    free = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0")
    taken = run_command(["serve", "--data", str(tmp_path / "alone"), "--node-id", "9", *shared, *free])
    assert (taken.code, "cluster adopt" in taken.err) == (5, True)
    with Server(tmp_path / "alone"):
        pass


def get(cluster: ServerGroup, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{cluster[1].http}{path}", timeout=WAIT_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return str(error.read().decode())
    except OSError as error:
        # The gateway starts a little after the node.
        return str(error)


def test_a_subscription_is_usable_through_any_node_once_declared(cluster: ServerGroup, topic: str) -> None:
    create(cluster, topic)
    millstream = CommandLine(cluster.kafka)
    lines = "".join(f"k{number}:v{number}\n" for number in range(60))
    assert millstream.process("publish", topic, "--key-separator", ":", stdin=lines.encode()).code == 0
    name = f"of-{topic}"
    # Letters go from the leaders of one topic to those of the other, and are exempt from its schema rule.
    create(cluster, f"{topic}-d")
    assert millstream("topic", "alter", f"{topic}-d", "--schema", f"value={topic}").code == 0
    dead = ("--dead-letter", f"{topic}-d")
    assert millstream("subscription", "create", name, "--topic", topic, "--start", "start", *dead).code == 0
    assert len(millstream("subscription", "pull", name, "-n", "1", "--wait", "60", "--json").documents) == 1
    taken = millstream("subscription", "pull", name, "-n", "7", "--wait", "60", "--reject", "no", "--json").documents
    assert 1 <= len(taken) <= 7

    def letters() -> int:
        topics = millstream("dlq", "list", "--json").document["dead_letters"]
        return sum(entry["letters"] for entry in topics if entry["topic"] == f"{topic}-d")

    wait_until(lambda: letters() == len(taken))
    shown = millstream("dlq", "show", name, "--json")
    assert shown.code == 0, shown.err
    assert len(shown.documents) == len(taken)


@pytest.mark.trial
def test_no_letter_is_lost_or_duplicated_when_a_node_is_killed_during_a_redrive(
    cluster: ServerGroup, topic: str
) -> None:
    create(cluster, topic, partitions=1)
    create(cluster, f"{topic}-d", partitions=1)
    millstream, number = CommandLine(cluster.kafka), 100
    options = ("--start", "start", "--dead-letter", f"{topic}-d", "--delivery", "exactly-once")
    assert millstream("subscription", "create", topic, "--topic", topic, *options).code == 0
    values = [b"%d" % index for index in range(number)]
    assert millstream.process("publish", topic, stdin=b"\n".join(values)).code == 0
    rejected = 0
    while rejected < number:
        taken = millstream("subscription", "pull", topic, "-n", number, "--wait", 60, "--reject", "no", "--json")
        rejected += len(taken.documents)
    wait_until(lambda: len(committed_messages(cluster.kafka, f"{topic}-d")) == number)

    def is_revived() -> bool:
        reported = millstream("subscription", "describe", topic, "--json").document
        return any(queue["backlog"] for queue in reported["queues"])

    with ThreadPoolExecutor(1) as pool:
        redriving = pool.submit(millstream.process, "dlq", "redrive", topic, "--json", "--timeout", WAIT_S)
        wait_until(lambda: redriving.done() or is_revived())
        cluster[leader_of(cluster, topic)].kill()
        redriven = redriving.result()
    assert redriven.code == 0, redriven.err
    assert redriven.document["redriven"] == number
    # Letters that the failover may have left open are reported; another redrive delivers nothing twice.
    assert len(millstream("dlq", "show", topic, "-n", number, "--json").documents) <= redriven.document["uncertain"]
    assert millstream("dlq", "redrive", topic, "--timeout", WAIT_S).code == 0
    again: list[str] = []
    while len(again) < number:
        pulled = millstream("subscription", "pull", topic, "-n", number, "--wait", 60, "--accept", "--json")
        again += [message["value"] for message in pulled.documents]
    assert Counter(again) == Counter(value.decode() for value in values)
    assert millstream("subscription", "pull", topic, "--json").documents == []
    assert len(committed_messages(cluster.kafka, topic)) == number, "nothing was published"


def test_letters_that_cannot_be_counted_during_a_failover_are_not_deleted(cluster: ServerGroup, topic: str) -> None:
    admin = create(cluster, topic, partitions=1)
    millstream, dead = CommandLine(cluster.kafka), f"{topic}-d"
    assert millstream("topic", "create", dead, "--partitions", 1, "--replication", 1).code == 0
    options = ("--start", "start", "--dead-letter", dead)
    assert millstream("subscription", "create", topic, "--topic", topic, *options).code == 0
    assert millstream.process("publish", topic, stdin=b"bad\n").code == 0
    pulled = millstream("subscription", "pull", topic, "--wait", WAIT_S, "--reject", "no", "--json")
    assert len(pulled.documents) == 1
    wait_until(lambda: len(millstream("dlq", "show", topic, "--json").documents) == 1)
    cluster[leader_of(cluster, dead)].kill()
    wait_until(lambda: len(admin.list_topics(timeout=WAIT_S).brokers) == 2 and leader_of(cluster, dead) < 0)
    for command in (("subscription", "delete", topic), ("topic", "delete", dead)):
        refused = millstream(*command, "--yes")
        assert (refused.code != 0, "cannot be counted" in refused.err) == (True, True), refused
    cluster.start()
    wait_until(lambda: "1 open dead letter " in millstream("topic", "delete", dead, "--yes").err)


def test_a_topic_with_fewer_replicas_than_the_default_is_reported(cluster: ServerGroup, topic: str) -> None:
    millstream = CommandLine(cluster.kafka)
    assert millstream("topic", "create", topic).err == ""
    cluster[3].kill()
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    wait_until(lambda: len(admin.list_topics(timeout=WAIT_S).brokers) == 2)
    created = millstream("topic", "create", f"{topic}-few")
    assert (created.code, "It has 2 copies instead of 3" in created.err) == (0, True), created
    asked_for = millstream("topic", "create", f"{topic}-two", "--replication", 2)
    assert (asked_for.code, asked_for.err) == (0, "")


def test_messages_are_published_and_pulled_over_http_through_any_node(cluster: ServerGroup, topic: str) -> None:
    create(cluster, topic)
    name = f"of-{topic}"
    first, second, third = (httpx.Client(base_url=f"http://{node.http}/v1", timeout=WAIT_S) for node in cluster)
    with first, second, third:
        assert first.post("/subscriptions", json={"name": name, "topics": [topic]}).status_code == 201
        with ThreadPoolExecutor(1) as pool:
            # A pull that waits at one node gets messages from any.
            waiting = pool.submit(second.post, f"/subscriptions/{name}/messages:pull", json={"wait_ms": 50_000})
            for number, node in enumerate((first, second, third) * 10):
                partition = {"message-partition": str(number % 3), "message-id": f"m-{number}"}
                reported = node.post(f"/topics/{topic}/messages", content=b"x", headers=partition)
                assert (reported.status_code, reported.json()["partition"]) == (201, number % 3)
            taken = waiting.result().json()["messages"]
        while len(taken) < 30:
            taken += first.post(f"/subscriptions/{name}/messages:pull", json={"wait_ms": 50_000}).json()["messages"]
        assert Counter(message["id"] for message in taken) == Counter(f"m-{number}" for number in range(30))
        settled = third.post(
            f"/subscriptions/{name}/messages:settle", json={"accept": [message["lease"] for message in taken]}
        )
        assert settled.json()["failed"] == 0
        assert sum(queue["accepted"] for queue in first.get(f"/subscriptions/{name}").json()["queues"]) == 30


def test_single_pulls_get_messages_of_every_node(cluster: ServerGroup, topic: str) -> None:
    """Each command starts over, and every partition has more messages than are pulled."""
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    placed = NewTopic(topic, 3, replica_assignment=[[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    admin.create_topics([placed], operation_timeout=WAIT_S)[topic].result()
    wait_until(lambda: {leader_of(cluster, topic, index) for index in range(3)} == {1, 2, 3})
    millstream = CommandLine(cluster.kafka)
    assert millstream("subscription", "create", topic, "--topic", topic, "--start", "start").code == 0
    lines = b"".join(b"%d\n" % number for number in range(100))
    for index in range(3):
        assert millstream.process("publish", topic, "--partition", index, stdin=lines).code == 0
    seen: set[int] = set()
    for _ in range(100):
        seen |= {
            document["partition"] for document in millstream("subscription", "pull", topic, "-n", 1, "--json").documents
        }
        if len(seen) == 3:
            break
    assert seen == {0, 1, 2}


async def test_a_publish_over_http_is_unavailable_while_too_few_replicas_are_in_sync(
    cluster: ServerGroup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    strict = NewTopic(topic, 1, 3, config={"min.insync.replicas": "3"})
    admin.create_topics([strict], operation_timeout=WAIT_S)[topic].result()
    cluster[3].kill()

    def is_led_by_two() -> bool:
        described = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions[0]
        return described.leader in (1, 2) and sorted(described.isrs) == [1, 2]

    wait_until(is_led_by_two)
    batch = {"messages": [{"value": "never"}, {"value": "never"}]}
    requests: tuple[dict[str, Any], ...] = (
        {"content": b"never"},
        {"content": json.dumps(batch), "headers": {"content-type": MESSAGES}},
        {"content": b"never", "params": {"deduplicate": "true"}, "headers": {"message-id": "m-1"}},
    )
    path, reason = f"/v1/topics/{topic}/messages", "min.insync.replicas requires 3"
    # A gateway in this process is less patient than that of a node, which retries for half a minute.
    monkeypatch.setattr(gateway_services, "PUBLISH_S", 2.0)
    monkeypatch.setattr(gateway_services, "TIMEOUT_S", 2.0)
    services = gateway_services.Services(cluster[1].kafka)
    api: Any = Api(ROUTES, services, OriginCheck())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url=f"http://{cluster[1].http}") as http:

        async def publish(request: dict[str, Any]) -> httpx.Response:
            # On a slow machine the time may expire during an attempt, whose outcome is unknown, or before the first.
            while True:
                response = await http.post(path, **request)
                if response.status_code != 504 and reason in response.json()["detail"]:
                    return response

        async with asyncio.timeout(WAIT_S):
            refused = await asyncio.gather(*map(publish, requests))
    await services.close()
    for response in refused:
        assert (response.status_code, response.headers.get("retry-after")) == (503, "1"), response.text
    await asyncio.to_thread(cluster.start)
    await asyncio.to_thread(wait_until, lambda: in_sync(admin, topic))
    later = await asyncio.to_thread(httpx.post, f"http://{cluster[1].http}{path}", content=b"later", timeout=WAIT_S)
    assert later.status_code == 201, later.text
    # The status confirms that nothing was stored.
    assert committed_messages(cluster.kafka, topic) == [b"later"]


def test_schemas_are_registered_through_any_node_while_one_is_killed(cluster: ServerGroup, topic: str) -> None:
    """Fifty clients register ten schemas; each continues at another node when its own is gone."""
    urls = [f"http://{node.http}/registry" for node in (cluster[1], cluster[2], cluster[3])]
    http = httpx.Client(timeout=WAIT_S)

    def registered(number: int) -> tuple[int, int]:
        body = {"schema": f'{{"type":"record","name":"Of{number % 10}","fields":[]}}'}
        deadline = time.monotonic() + WAIT_S
        for url in itertools.cycle(urls[number % 3 :] + urls[: number % 3]):
            assert time.monotonic() < deadline
            with suppress(httpx.TransportError):
                response = http.post(f"{url}/subjects/{topic}-{number}/versions", json=body)
                if response.status_code == 200:
                    return number % 10, response.json()["id"]
                assert response.status_code >= 500, response.text
        raise AssertionError

    with http, ThreadPoolExecutor(50) as pool:
        registering = [pool.submit(registered, number) for number in range(50)]
        registering[1].result()
        cluster[2].kill()
        ids = {future.result() for future in registering}
        assert len(ids) == len({number for _schema, number in ids}) == 10
        for schema, number in ids:
            for url in (urls[0], urls[2]):
                assert f'"Of{schema}"' in http.get(f"{url}/schemas/ids/{number}").json()["schema"]


async def test_the_sdk_settles_its_messages_wherever_the_partition_is_led(cluster: ServerGroup, topic: str) -> None:
    create(cluster, topic)
    handled: Counter[str] = Counter()
    gate = asyncio.Event()

    async def handle(message: millstream.Message) -> None:
        handled[message.text] += 1
        await gate.wait()

    async with asyncio.timeout(WAIT_S), millstream.connect(*cluster.kafka.split(",")) as ms:
        receipts = [await ms.publish(topic, f"m-{number}", partition=number % 3) for number in range(9)]
        await ms.subscribe(topic, handle, name=topic, start="earliest", concurrency=20, lease=600)
        await until(lambda: len(handled) >= 9)
        await asyncio.to_thread(cluster[leader_of(cluster, topic)].stop)
        gate.set()
        receipts.append(await ms.publish(topic, "last", partition=0))
        for receipt in receipts:
            assert (await ms.delivery(receipt, subscription=topic, wait=WAIT_S)).state == "accepted"
    assert handled == Counter([*(f"m-{number}" for number in range(9)), "last"])


def test_a_pipeline_declared_on_one_node_is_known_to_all(cluster: ServerGroup, topic: str) -> None:
    first, second, third = (CommandLine(node.kafka) for node in cluster)
    create = ("pipeline", "create", "route", topic, "--stopped")
    assert first(*create).code == 0
    assert second(*create).code == 5
    assert third("pipeline", "rule", "put", topic, "large", "--topic", topic, "--to", f"{topic}-2").code == 0
    # Every node returns the newest version, even before it has been notified.
    assert [rule["name"] for rule in second("pipeline", "rule", "list", topic, "--json").document] == ["large"]
    assert second("pipeline", "update", topic, "--set", "decode=none").code == 0
    reported = first("pipeline", "describe", topic, "--json").document
    assert (reported["state"], reported["overrides"], reported["version"]) == ("stopped", {"decode": "none"}, 2)
    assert third("pipeline", "delete", topic).code == 0
    assert first("pipeline", "describe", topic).code == 3
    # The next test may check the status of nodes.
    wait_until(lambda: "millstream_pipeline" not in get(cluster, "/metrics"))


def test_health_reports_the_state_of_the_cluster(cluster: ServerGroup, topic: str) -> None:
    create(cluster, topic)
    wait_until(lambda: get(cluster, "/readyz").startswith('{"status":"ready"'))
    # A node reports metrics of subscriptions after the first request for one.
    assert CommandLine(cluster.kafka)("subscription", "create", f"{topic}-queue", "--topic", topic).code == 0
    assert CommandLine(cluster.kafka)("subscription", "pull", f"{topic}-queue").code == 0
    # On a busy machine a node may have lost its lease for a moment.
    expected_metrics = ("subscription_backlog", "nodes 3.0", "node_fenced 0.0", "partitions_without_leader 0.0")
    wait_until(lambda: all(f"millstream_{metric}" in get(cluster, "/metrics") for metric in expected_metrics))
    metrics = get(cluster, "/metrics")
    docs = Path(__file__).parents[2] / "docs"
    names = ("operating.md", "cluster.md", "subscriptions.md")
    pages = "".join((docs / name).read_text(encoding="utf-8") for name in names)
    documented = set(re.findall(r"`((?:millstream|process)_\w+)`", pages))
    served = set(re.findall(r"^# HELP (\S+)", metrics, re.MULTILINE))
    assert documented == served, "the pages list every metric"


def test_the_console_shows_the_cluster_through_every_node(cluster: ServerGroup, topic: str) -> None:
    create(cluster, topic)
    with httpx.Client(timeout=WAIT_S) as client:
        made = client.post(
            f"http://{cluster[1].http}/v1/subscriptions", json={"name": topic, "topics": [topic], "start": "start"}
        )
        assert made.status_code == 201, made.text
        for number in range(30):
            url = f"http://{cluster[1 + number % 3].http}/v1/topics/{topic}/messages"
            client.post(url, json={"number": number}, headers={"message-key": str(number)}).raise_for_status()

        def shown(node: Server, path: str) -> str:
            page = client.get(f"http://{node.http}/console{path}")
            assert page.status_code == 200, (path, page.text)
            return page.text

        def all_messages(node: Server) -> bool:
            # Until the partitions of a dead node have new leaders, the page reports them as unreachable.
            page = client.get(f"http://{node.http}/console/topics/{topic}/messages")
            return page.status_code == 200 and page.text.count("&#34;number&#34;") == 30

        for node in cluster:
            assert re.search(rf"{topic}.*?<td class=\"num\">30</td>", shown(node, f"/topics?search={topic}"), re.DOTALL)
            found_page = shown(node, f"/topics/{topic}/messages?filter=payload.number+%3E%3D+20&from=start")
            assert "10 found in 30 of 30 messages." in found_page
            assert all_messages(node)
            # On a busy machine a node may have lost its lease for a moment.
            wait_until(lambda node=node: '<span class="chip good">in sync</span>' in shown(node, f"/topics/{topic}"))  # type: ignore[misc]
            assert re.search(r"Waiting</span><span class=\"value\">30", shown(node, f"/subscriptions/{topic}"))
            wait_until(lambda node=node: shown(node, "/cluster").count(">ready<") == 3)  # type: ignore[misc]
            for path in (
                "",
                "/cluster/plan",
                "/subscriptions",
                "/dead-letters",
                "/groups",
                "/pipelines",
                "/transactions",
            ):
                shown(node, path)
        page = client.get(f"http://{cluster[2].http}/console/cluster/plan")
        found_token = re.search(r'name="csrf" value="(\w+)"', page.text)
        assert found_token is not None
        csrf = found_token[1]
        computed = client.post(page.url, data={"csrf": csrf, "kind": "drain", "node": "3"})
        assert computed.status_code == 200, computed.text
        (plan,) = set(re.findall(r'name="plan" value="([^"]+)"', computed.text))
        assert "Takes about" in computed.text
        cancelled = client.post(f"{page.url}/cancel", data={"csrf": csrf, "plan": plan, "confirm": plan})
        assert cancelled.status_code == 303, cancelled.text
        cluster[3].kill()
        remaining = [cluster[1], cluster[2]]
        wait_until(lambda: all("Needs attention" in shown(node, "") for node in remaining), timeout_s=WAIT_S)
        wait_until(lambda: all("Partitions in trouble" in shown(node, "/cluster") for node in remaining))
        for node in remaining:
            wait_until(partial(all_messages, node))
            wait_until(lambda node=node: "catching up" in shown(node, f"/topics/{topic}"))  # type: ignore[misc]
            wait_until(lambda node=node: re.search(r">(unreachable|away)<", shown(node, "/cluster")))  # type: ignore[misc]


def test_a_node_is_drained_in_the_browser(cluster: ServerGroup, topic: str) -> None:
    chromium()
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    # On one node each, and on the drained node too.
    admin.create_topics([NewTopic(topic, 6, 1)], operation_timeout=WAIT_S)[topic].result()
    (drained, *_) = [leader for number in range(6) if (leader := leader_of(cluster, topic, number)) != 1]
    with running_browser() as browser:
        watched = open_page(browser, f"http://{cluster[1].http}/console/cluster")
        page = watched.page
        check_appearance(page, "cluster-of-three")
        page.get_by_role("link", name="Drain or balance nodes").click()
        page.locator("summary").filter(has_text="Compute a plan").click()
        page.get_by_label("What").select_option("drain")
        page.get_by_label("Node (").fill(str(drained))
        page.get_by_role("button", name="Compute").click()
        expect(page.locator(".head .chip")).to_have_text("proposed")
        expect(page.get_by_role("row").filter(has_text=topic).first).to_contain_text("proposed")
        check_appearance(page, "plan-proposed")
        save_screenshot(page, "plan")
        page.locator("summary").filter(has_text="Apply the plan").click()
        page.get_by_role("button", name="Apply").click()
        expect(page.get_by_role("status")).to_contain_text("millstream cluster apply")
        check_appearance(page, "plan-running")
        expect(page.locator(".stat").filter(has_text="Moving")).to_contain_text("0", timeout=WAIT_S * 1000)
        expect(page.locator(".head .chip")).to_have_text("done", timeout=WAIT_S * 1000)
        check_appearance(page, "plan-done")
        assert all(leader_of(cluster, topic, number) != drained for number in range(6))
        page.locator("summary").filter(has_text="Undrain a node").click()
        page.get_by_role("button", name="Undrain").click()
        expect(page.get_by_role("status")).to_contain_text(f"millstream cluster undrain {drained}")
        assert watched.problems == []
    admin.delete_topics([topic], operation_timeout=WAIT_S)[topic].result()
