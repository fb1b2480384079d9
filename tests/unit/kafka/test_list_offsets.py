"""ListOffsets and OffsetForLeaderEpoch: offsets by timestamp and by epoch."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.list_offsets import (
    EARLIEST,
    EARLIEST_LOCAL,
    EARLIEST_PENDING_UPLOAD,
    LATEST,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    ListOffsets,
)
from millstream.broker.kafka.apis.offset_for_leader_epoch import OffsetForLeaderEpoch
from millstream.core.ids import Epoch
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import send_in_version, send_request

VERSIONS = range(1, 12)
NEWEST: Any = importlib.import_module("kio.schema.list_offsets.v11.request")
EPOCHS: Any = importlib.import_module("kio.schema.offset_for_leader_epoch.v4.request")


def request(*requested: tuple[int, int], topic: str = "orders", isolation: int = 0, epoch: int = -1) -> Any:
    partitions = tuple(
        NEWEST.ListOffsetsPartition(partition_index=index, timestamp=time_ms, current_leader_epoch=epoch)
        for index, time_ms in requested
    )
    topics = (NEWEST.ListOffsetsTopic(name=topic, partitions=partitions),)
    return NEWEST.ListOffsetsRequest(
        replica_id=-1, isolation_level=isolation, topics=topics, timeout=timedelta(seconds=1)
    )


@pytest.fixture
async def api(topics: Topics) -> ListOffsets:
    """Partition 0 holds five records at times 100, 200, 500, 300, 400; partition 1 nothing."""
    await topics.create("orders", partitions=2)
    partition = topics.partition("orders", 0)
    await partition.append(encode_batch([NewRecord(None, b"v", (), time_ms) for time_ms in (100, 200)]))
    await partition.append(encode_batch([NewRecord(None, b"v", (), time_ms) for time_ms in (500, 300, 400)]))
    return ListOffsets(topics)


async def looked_up(api: ListOffsets, version: int, time_ms: int, *, partition: int = 0) -> tuple[Any, ...]:
    response = await send_in_version(api, version, request((partition, time_ms)))
    (found_partition,) = response.topics[0].partitions
    return found_partition.error_code, found_partition.offset, found_partition.timestamp


@pytest.mark.parametrize("version", VERSIONS)
async def test_earliest_and_latest_offsets(api: ListOffsets, version: int) -> None:
    assert await looked_up(api, version, EARLIEST) == (ErrorCode.none, 0, -1)
    assert await looked_up(api, version, LATEST) == (ErrorCode.none, 5, -1)
    assert await looked_up(api, version, EARLIEST, partition=1) == (ErrorCode.none, 0, -1)
    assert await looked_up(api, version, LATEST, partition=1) == (ErrorCode.none, 0, -1)


@pytest.mark.parametrize(
    ("time_ms", "offset", "found_ms"),
    [(0, 0, 100), (100, 0, 100), (101, 1, 200), (201, 2, 500), (450, 2, 500), (500, 2, 500), (501, -1, -1)],
)
async def test_a_timestamp_finds_the_first_record_not_older(
    api: ListOffsets, time_ms: int, offset: int, found_ms: int
) -> None:
    for version in (1, 5, 11):
        assert await looked_up(api, version, time_ms) == (ErrorCode.none, offset, found_ms)
    assert await looked_up(api, 7, time_ms, partition=1) == (ErrorCode.none, -1, -1)


@pytest.mark.parametrize(
    ("special", "first", "expected"),
    [
        (MAX_TIMESTAMP, 7, (ErrorCode.none, 2, 500)),
        (EARLIEST_LOCAL, 8, (ErrorCode.none, 0, -1)),
        (LATEST_TIERED, 9, (ErrorCode.none, -1, -1)),
        (EARLIEST_PENDING_UPLOAD, 11, (ErrorCode.none, -1, -1)),
        (-7, 99, None),
        (-(2**63), 99, None),
    ],
)
async def test_special_timestamps_require_their_version(
    api: ListOffsets, special: int, first: int, expected: Any
) -> None:
    unsupported = (ErrorCode.unsupported_version, -1, -1)
    for version in VERSIONS:
        assert await looked_up(api, version, special) == (expected if version >= first else unsupported)


async def test_an_empty_partition_has_no_max_timestamp(api: ListOffsets) -> None:
    assert await looked_up(api, 7, MAX_TIMESTAMP, partition=1) == (ErrorCode.none, -1, -1)


async def test_leader_epochs_are_checked_and_reported(api: ListOffsets) -> None:
    async def code(epoch: int) -> ErrorCode:
        response = await send_request(api, request((0, LATEST), epoch=epoch))
        found_code: ErrorCode = response.topics[0].partitions[0].error_code
        return found_code

    assert await code(-1) is ErrorCode.none
    assert await code(0) is ErrorCode.none
    assert await code(1) is ErrorCode.unknown_leader_epoch
    for time_ms in (101, LATEST, EARLIEST, MAX_TIMESTAMP):
        response = await send_request(api, request((0, time_ms)))
        assert response.topics[0].partitions[0].leader_epoch == 0


async def test_the_earliest_offset_has_the_epoch_that_wrote_it(api: ListOffsets, topics: Topics) -> None:
    async def epoch(partition: int) -> int:
        response = await send_request(api, request((partition, EARLIEST)))
        found_epoch: int = response.topics[0].partitions[0].leader_epoch
        return found_epoch

    for index in range(2):
        topics.partition("orders", index).leader_epoch = Epoch(3)
    await topics.partition("orders", 0).append(encode_batch([NewRecord(None, b"v", (), 600)]))
    assert await epoch(0) == 0
    # The partition is empty, so the current leader will write the first record.
    assert await epoch(1) == 3
    await topics.partition("orders", 1).append(encode_batch([NewRecord(None, b"v", (), 600)]))
    assert await epoch(1) == 3


async def test_read_committed_reads_up_to_the_last_stable_offset(api: ListOffsets) -> None:
    response = await send_request(api, request((0, LATEST), isolation=1))
    assert response.topics[0].partitions[0].offset == 5


async def test_missing_partitions_are_reported(api: ListOffsets) -> None:
    response = await send_request(api, request((7, LATEST)))
    assert response.topics[0].partitions[0].error_code is ErrorCode.unknown_topic_or_partition
    response = await send_request(api, request((0, LATEST), topic="nope"))
    assert response.topics[0].partitions[0].error_code is ErrorCode.unknown_topic_or_partition


async def test_a_partition_named_twice_is_refused(api: ListOffsets) -> None:
    response = await send_request(api, request((0, LATEST), (0, EARLIEST), (1, LATEST)))
    codes = [partition.error_code for partition in response.topics[0].partitions]
    assert codes == [ErrorCode.invalid_request, ErrorCode.none]


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_the_end_of_an_epoch(api: ListOffsets, topics: Topics, version: int) -> None:
    def requested(partition: int, epoch: int, current: int = -1) -> Any:
        return EPOCHS.OffsetForLeaderPartition(partition=partition, leader_epoch=epoch, current_leader_epoch=current)

    partitions = (requested(0, 0), requested(0, 3), requested(0, -1), requested(0, 0, current=4), requested(9, 0))
    topic = EPOCHS.OffsetForLeaderTopic(topic="orders", partitions=partitions)
    epochs = OffsetForLeaderEpoch(topics)
    response = await send_in_version(epochs, version, EPOCHS.OffsetForLeaderEpochRequest(topics=(topic,)))
    ends = [
        (partition.error_code, partition.leader_epoch, partition.end_offset)
        for partition in response.topics[0].partitions
    ]
    assert ends == [
        (ErrorCode.none, 0, 5),
        (ErrorCode.none, -1, -1),
        (ErrorCode.none, -1, -1),
        (ErrorCode.unknown_leader_epoch, -1, -1),
        (ErrorCode.unknown_topic_or_partition, -1, -1),
    ]
