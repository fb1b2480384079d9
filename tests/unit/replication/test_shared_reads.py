"""A read for one follower is shared with the other."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from millstream.broker.log.log import Log
from millstream.broker.replication.shared_reads import SharedReads
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream_testing.logs import memory_store


@pytest.fixture
def logs() -> Iterator[list[Log]]:
    store = memory_store()
    yield [
        store.open_log(UUID(int=1), TopicPartition("t", PartitionIndex(index)), TopicSettings(flush="os"))
        for index in range(2)
    ]
    store.close_now()


def test_a_read_is_shared_once_for_the_same_log_epoch_and_offset(logs: list[Log]) -> None:
    reads = SharedReads()
    reads.keep(logs[0], 1, 5, b"abc")
    assert reads.take(logs[1], 1, 5, 100) is None
    assert reads.take(logs[0], 2, 5, 100) is None
    assert reads.take(logs[0], 1, 6, 100) is None
    assert reads.take(logs[0], 1, 5, 100) == b"abc"
    assert reads.take(logs[0], 1, 5, 100) is None
    assert not len(reads)


def test_a_read_beyond_the_limit_is_not_shared(logs: list[Log]) -> None:
    reads = SharedReads()
    reads.keep(logs[0], 1, 5, b"abc")
    assert reads.take(logs[0], 1, 5, 2) is None
    assert not len(reads)


def test_the_oldest_reads_are_evicted_beyond_the_total_limit(logs: list[Log]) -> None:
    reads = SharedReads(10)
    for offset in range(5):
        reads.keep(logs[0], 1, offset, b"abc")
        reads.keep(logs[0], 1, offset, b"abcd")
        assert len(reads) <= 10
    assert reads.take(logs[0], 1, 2, 100) is None
    assert reads.take(logs[0], 1, 4, 100) == b"abcd"
    reads.keep(logs[0], 1, 9, b"x" * 11)
    assert not len(reads)
