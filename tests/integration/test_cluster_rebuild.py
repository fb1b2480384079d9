"""etcd loses everything, without a snapshot: the cluster state is rebuilt from the folders of the nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.command import call_command
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import ServerFailed, ServerGroup
from millstream_testing.waiting import wait_until

WAIT_S = 60.0
TOPIC = "orders"


def produce(cluster: ServerGroup, values: list[bytes]) -> None:
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": cluster.kafka, "log_level": 0, "enable.idempotence": True})
    for value in values:
        producer.produce(TOPIC, value, key=value, on_delivery=delivered)
    assert producer.flush(WAIT_S) == 0
    assert failed == []


def read(cluster: ServerGroup, number: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": cluster.kafka, "log_level": 0, "group.id": "unused"})
    consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(3)])
    values: list[bytes] = []

    def enough() -> bool:
        values.extend(message.value() or b"" for message in consumer.consume(1000, 0.2) if message.error() is None)
        return len(values) >= number

    wait_until(enough)
    consumer.close()
    return values


def in_sync(admin: AdminClient) -> list[int]:
    described = admin.list_topics(TOPIC, timeout=WAIT_S).topics[TOPIC].partitions.values()
    return [len(partition.isrs) for partition in described]


@pytest.mark.trial
def test_every_acknowledged_record_survives_a_rebuild_of_etcd(tmp_path: Path, postgres: PostgresServer) -> None:
    values = [b"%d" % number for number in range(600)]
    catalog = postgres.new_database()
    with EtcdServer() as lost:
        cluster = ServerGroup(tmp_path, lost.url, catalog, settings={"lease-ms": 1000})
        with cluster:
            admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
            admin.create_topics([NewTopic(TOPIC, 3, 3)], operation_timeout=WAIT_S)[TOPIC].result()
            produce(cluster, values[:300])
            # Its log ends in an earlier epoch than the others.
            cluster[1].kill()
            produce(cluster, values[300:])
            cluster[2].stop()
    with EtcdServer() as empty:
        for node in cluster:
            node.settings["etcd"] = empty.url
        with pytest.raises(ServerFailed, match="was part of a cluster"):
            cluster[2].start()
        reported = tmp_path / "node-3.json"
        inventory = call_command(["cluster", "inventory", "--data", str(cluster[3].data), "--json"])
        reported.write_text(inventory.out)
        shared = ["--etcd", empty.url, "--catalog", catalog, "--cluster", str(cluster[1].settings["cluster"])]
        rebuild = ["cluster", "rebuild", "--json", *shared, "--from", str(reported)]
        some = call_command([*rebuild, "--data", str(cluster[1].data)])
        assert (some.code, "--accept-loss" in some.err) == (1, True)
        whole = [*rebuild, "--data", str(cluster[1].data), "--data", str(cluster[2].data)]
        assert call_command([*whole, "--dry-run"]).document["written"] is False
        done = call_command(whole)
        assert (done.code, done.err) == (0, "")
        assert (done.document["nodes"], done.document["incomplete"], done.document["missing"]) == ([1, 2, 3], [], [])
        again = call_command(whole)
        assert (again.code, "nothing to rebuild" in again.err) == (5, True)
        with cluster:
            admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
            wait_until(lambda: in_sync(admin) == [3, 3, 3])
            assert sorted(read(cluster, len(values))) == sorted(values)
            produce(cluster, [b"more"])


@pytest.mark.trial
def test_a_node_that_lost_its_folder_with_etcd_gets_new_replicas(tmp_path: Path, postgres: PostgresServer) -> None:
    values = [b"%d" % number for number in range(300)]
    catalog = postgres.new_database()
    with EtcdServer() as lost:
        cluster = ServerGroup(tmp_path, lost.url, catalog, settings={"lease-ms": 1000})
        with cluster:
            admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
            for name, copies in ((TOPIC, 3), ("single", 1)):
                admin.create_topics([NewTopic(name, 3, copies)], operation_timeout=WAIT_S)[name].result()
            produce(cluster, values)
    shutil.rmtree(cluster[3].data)
    with EtcdServer() as empty:
        for node in cluster:
            node.settings["etcd"] = empty.url
        shared = ["--etcd", empty.url, "--catalog", catalog, "--cluster", str(cluster[1].settings["cluster"])]
        flags = ["--data", str(cluster[1].data), "--data", str(cluster[2].data), "--replace", "3"]
        rebuild = ["cluster", "rebuild", *shared, *flags]
        refused = call_command(rebuild)
        assert (refused.code, "--accept-loss" in refused.err) == (1, True)
        assert "this is refused without --accept-loss" in call_command([*rebuild, "--dry-run"]).out
        done = call_command([*rebuild, "--accept-loss", "--json"])
        assert (done.code, done.document["nodes"], done.document["fewer_replicas"]) == (0, [1, 2], [])
        assert len(done.document["missing"]) == 1
        assert {f"{TOPIC}-{index}" for index in range(3)} <= set(done.document["incomplete"])
        with cluster:
            admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
            wait_until(lambda: in_sync(admin) == [3, 3, 3])
            assert sorted(read(cluster, len(values))) == sorted(values)
            produce(cluster, [b"more"])
            wait_until(lambda: len(admin.list_topics("single", timeout=WAIT_S).topics["single"].partitions) == 3)
            assert "does not know" not in cluster[2].log.read_text()
