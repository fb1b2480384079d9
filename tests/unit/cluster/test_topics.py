"""Topics on a real data folder: declarations survive restarts, and deletions are final."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations, ProducerIds
from millstream.core.config import Config
from millstream.core.errors import (
    DataFolderInvalid,
    InvalidPartitions,
    InvalidReplication,
    InvalidSetting,
    InvalidTopicName,
    PolicyViolation,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.node_group import single_node
from millstream_testing.waiting import until


def batch(value: bytes) -> bytearray:
    return encode_batch([NewRecord(None, value, (), 1)])


async def test_topics_and_their_records_survive_a_restart(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("orders", partitions=3, overrides={"retention.ms": "5000"})
        await topics.partition("orders", 2).append(batch(b"kept"))
    async with single_node(tmp_path) as topics:
        again = topics.get("orders")
        assert again == topic
        assert topics.by_id(topic.topic_id) == topic
        assert topics.settings_of(topic).retention_ms == 5000
        partition = topics.partition_by_id(topic.topic_id, 2)
        assert partition.high_watermark == 1
        assert b"kept" in bytes(partition.read(partition.log_start, max_bytes=1000))


async def test_a_deleted_topic_is_gone_with_its_files(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("short-lived")
        partition = topics.partition("short-lived", 0)
        await partition.append(batch(b"x"))
        await topics.delete("short-lived")
        assert topics.get("short-lived") is None
        with pytest.raises(UnknownTopic):
            topics.partition("short-lived", 0)
        with pytest.raises(UnknownTopicId):
            topics.partition_by_id(topic.topic_id, 0)
        restarted = await topics.create("short-lived")
        assert restarted.topic_id != topic.topic_id
        assert topics.partition("short-lived", 0).high_watermark == 0
    # The space is freed shortly after the response, at the latest when the store is closed.
    assert not any(topic.topic_id.hex in path.as_posix().replace("-", "") for path in tmp_path.rglob("*.log"))


async def test_an_interrupted_deletion_is_finished_at_the_next_start(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("doomed")
        await topics.partition("doomed", 0).append(batch(b"x"))
    catalog = Catalog.open_folder(tmp_path)
    catalog.delete_topics([topic], now_ms=1)
    catalog.close()
    async with single_node(tmp_path) as topics:
        assert topics.all() == []
        catalog = Catalog.open_folder(tmp_path)
        await until(lambda: not catalog.deleted_topic_ids() and not any(tmp_path.rglob("*.log")))
        catalog.close()


def remove_catalog(data: Path) -> None:
    for leftover in data.glob("catalog.sqlite*"):
        leftover.unlink()


async def test_a_lost_catalog_is_restored_from_the_coordination_store(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("precious", overrides={"retention.ms": "5000"})
        await topics.partition("precious", 0).append(batch(b"x"))
    remove_catalog(tmp_path)
    async with single_node(tmp_path) as topics:
        assert topics.all() == [topic]
        assert topics.partition("precious", 0).high_watermark == 1
        await topics.alter("precious", {"retention.ms": "6000"})


async def test_lost_partition_states_are_derived_from_the_logs(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("precious", partitions=3)
        await topics.partition("precious", 1).append(batch(b"x"))
        epoch = topics.partition("precious", 1).leader_epoch
    (tmp_path / "coordination").unlink()
    async with single_node(tmp_path) as topics:
        assert topics.all() == [topic]
        partition = topics.partition("precious", 1)
        assert (partition.high_watermark, partition.leader_epoch > epoch) == (1, True)
        await partition.append(batch(b"y"))


async def test_a_node_with_a_changed_id_keeps_its_data(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("precious", partitions=3)
        await topics.partition("precious", 1).append(batch(b"x"))
    async with single_node(tmp_path, Config(node_id=7)) as topics:
        partition = topics.partition("precious", 1)
        assert (partition.high_watermark, partition.is_leader) == (1, True)


async def test_undeclared_files_are_left_untouched(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("precious")
        await topics.partition("precious", 0).append(batch(b"x"))
    remove_catalog(tmp_path)
    (tmp_path / "coordination").unlink()
    async with single_node(tmp_path) as topics:
        assert topics.all() == []
        assert any(tmp_path.rglob("*.log"))


async def test_topics_grow_but_never_shrink(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("t", partitions=2)
        await topics.add_partitions("t", 4, validate_only=True)
        with pytest.raises(UnknownTopic):
            topics.partition("t", 3)
        await topics.add_partitions("t", 4)
        await topics.partition("t", 3).append(batch(b"x"))
        with pytest.raises(InvalidPartitions):
            await topics.add_partitions("t", 4)


async def test_settings_change_while_running(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("t", overrides={"flush": "os"})
        await topics.alter("t", {"flush": None, "retention.ms": "77"})
        settings = topics.partition("t", 0).log.settings
        assert (settings.flush, settings.retention_ms) == ("always", 77)
        with pytest.raises(InvalidSetting, match="retention"):
            await topics.alter("t", {"retention.ms": "soon"})
        with pytest.raises(InvalidSetting, match="unknown"):
            await topics.alter("t", {"retention": "1"})


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("", {}, InvalidTopicName),
        ("..", {}, InvalidTopicName),
        ("a b", {}, InvalidTopicName),
        ("x" * 250, {}, InvalidTopicName),
        ("t", {"partitions": 0}, InvalidPartitions),
        ("t", {"partitions": 10**6}, InvalidPartitions),
        ("t", {"replication": 3}, InvalidReplication),
        ("t", {"overrides": {"flush": "sometimes"}}, InvalidSetting),
        ("t", {"overrides": {"cleanup.policy": "squeeze"}}, InvalidSetting),
        ("__consumer_offsets", {}, PolicyViolation),
    ],
)
async def test_invalid_changes_are_refused(
    tmp_path: Path, name: str, arguments: dict[str, object], error: type[Exception]
) -> None:
    async with single_node(tmp_path) as topics:
        with pytest.raises(error):
            await topics.create(name, **arguments)  # type: ignore[arg-type]
        assert topics.all() == []


async def test_names_that_metrics_cannot_distinguish_are_refused(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("a.b_c")
        with pytest.raises(InvalidTopicName, match=r"a\.b_c"):
            await topics.create("a_b.c")
        await topics.create("a-b-c")


async def test_the_brokers_own_topics_stay_compacted(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        await topics.create("__consumer_offsets", internal=True, overrides={"cleanup.policy": "compact"})
        with pytest.raises(PolicyViolation, match=r"cleanup\.policy"):
            await topics.alter("__consumer_offsets", {"cleanup.policy": None})
        await topics.alter("__consumer_offsets", {"segment.bytes": "2000000"})


async def test_concurrent_requests_for_a_missing_topic_create_one(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic_list = await asyncio.gather(*(topics.ensure("wanted") for _ in range(10)))
        assert len({topic.topic_id for topic in topic_list}) == 1
        with pytest.raises(TopicExists):
            await topics.create("wanted")


async def test_auto_creation_can_be_switched_off(tmp_path: Path) -> None:
    async with single_node(tmp_path, Config(auto_create_topics=False)) as topics:
        with pytest.raises(UnknownTopic, match="auto-create-topics"):
            await topics.ensure("wanted")


async def test_producer_ids_are_unique(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        catalog = Catalog.open_folder(tmp_path)
        ids = ProducerIds(CatalogDeclarations(catalog))
        seen.update(await asyncio.gather(*(ids.next() for _ in range(1500))))
        catalog.close()
    assert len(seen) == 4500


def test_a_catalog_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(DataFolderInvalid, match=r"catalog\.sqlite"):
        Catalog.open_folder(tmp_path)
