"""The errors that clients of a partition get while its disk is full."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.replication.partition import Partition
from millstream.core.errors import OutOfOrderSequence, StorageFailure
from millstream.core.ids import PartitionIndex
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream_testing.batches import encode_values
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=1, replication=1, overrides={}, created_ms=0)


async def test_a_batch_behind_one_refused_by_the_disk_gets_the_same_error() -> None:
    files, clock = MemoryFiles(open_files_max=64), ManualClock()
    store = memory_store(files, clock, journal_bytes=100_000, producer_expiry_ms=3_600_000)
    log = store.open_log(TOPIC.topic_id, TopicPartition("orders", PartitionIndex(0)), TopicSettings(flush="os"))
    partition = Partition(TOPIC, PartitionIndex(0), log, store)
    partition.write(encode_values(producer_id=1, sequence=0), acks=-1)
    files.capacity_bytes = sum(len(files.content(path)) for path in files.walk()) + 30
    with pytest.raises(StorageFailure):
        partition.write(encode_values(producer_id=1, sequence=1), acks=-1)
    with pytest.raises(StorageFailure, match="the disk refused an earlier write"):
        partition.write(encode_values(producer_id=1, sequence=2), acks=-1)

    files.capacity_bytes = None
    assert partition.write(encode_values(producer_id=1, sequence=1), acks=-1).base_offset == 1
    with pytest.raises(OutOfOrderSequence):
        partition.write(encode_values(producer_id=1, sequence=3), acks=-1)
    await store.close()
