"""Opening a partition's log is retried until it succeeds or the node no longer hosts the partition."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.broker.cluster import topics as cluster_topics
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import StorageFailure
from millstream.core.ids import NodeId
from millstream_testing.node_group import NodeGroup


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of opens that fail from now on; the pauses are short."""
    countdown = [0]
    opened = LogStore.open_log

    def open_log(store: LogStore, *arguments: object) -> Log:
        if countdown[0]:
            countdown[0] -= 1
            raise StorageFailure("opening failed: no space left on device")
        return opened(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LogStore, "open_log", open_log)
    monkeypatch.setattr(cluster_topics, "REOPEN_S", 0.01)
    return countdown


async def test_the_log_is_opened_when_the_disk_works_again(
    tmp_path: Path, failures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with NodeGroup(tmp_path, nodes=1) as group:
        failures[0] = 4
        topic = await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        await group.until(lambda: len(group[1].topics.partitions_of(topic)) == 1)
        assert failures[0] == 0
        await group.until(lambda: group[1].topics.partition("orders", 0).is_leader)
        output = [record.levelname for record in caplog.records if "cannot be opened" in record.getMessage()]
        assert output.count("ERROR") == 1


async def test_opening_the_log_of_a_deleted_topic_is_not_retried(tmp_path: Path, failures: list[int]) -> None:
    async with NodeGroup(tmp_path, nodes=1) as group:
        failures[0] = 10**6
        await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        await group[1].topics.delete("orders")
        remaining = failures[0]
        other = await group[1].topics.create("other", replication=1, placement={0: (NodeId(1),)})
        await group.until(lambda: failures[0] < remaining - 3)
        failures[0] = 0
        await group.until(lambda: len(group[1].topics.partitions_of(other)) == 1)
