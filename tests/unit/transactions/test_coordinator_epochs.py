"""The latest coordinator epoch known to a node, which markers are checked against."""

from __future__ import annotations

import pytest

from millstream.broker.kafka.transaction_service import PartitionMarkers
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import TransactionCoordinatorFenced, UnknownLeaderEpoch
from millstream.core.ids import Epoch, NodeId, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.partition_state import PartitionState
from millstream.core.topic import CONSUMER_OFFSETS, TRANSACTION_STATE, Topic, TopicPartition
from millstream.protocol.records.control import Marker
from millstream_testing.state_log import MemoryTopics, single_replica_state


class Ids:
    async def next(self) -> ProducerId:
        return ProducerId(1)


class KnownTopics(MemoryTopics):
    """Topics whose partitions have leader epochs set by a test; those without one have no agreed state."""

    epochs: tuple[int | None, ...] = ()

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        epoch = self.epochs[index]
        return None if epoch is None else single_replica_state(NodeId(1), Epoch(epoch))


class Offsets:
    """Groups that only check the marker against the epoch of a producer."""

    held = -1

    async def end_transaction(self, index: int, marker: Marker) -> None:
        self.held = marker.admitted(self.held).coordinator_epoch


def made(topics: KnownTopics) -> TransactionCoordinator:
    return TransactionCoordinator(topics, Config(), SystemClock(), Ids())


def test_without_the_topic_only_the_first_epoch_exists() -> None:
    assert made(KnownTopics()).latest_epoch() == 0


def test_the_latest_epoch_of_all_partitions_counts() -> None:
    topics = KnownTopics()
    topics.add(TRANSACTION_STATE, partitions=3)
    topics.epochs = (4, None, 7)
    assert made(topics).latest_epoch() == 7
    topics.epochs = (None, None, None)
    assert made(topics).latest_epoch() == 0


async def test_markers_are_checked_against_the_epochs_known_on_arrival() -> None:
    topics, offsets = KnownTopics(), Offsets()
    topics.add(TRANSACTION_STATE, partitions=1)
    topics.epochs = (4,)
    markers = PartitionMarkers(topics, offsets, made(topics).latest_epoch)  # type: ignore[arg-type]

    async def write(epoch: int) -> int:
        marker = Marker(
            producer_id=ProducerId(7), producer_epoch=ProducerEpoch(0), commit=True, coordinator_epoch=epoch
        )
        await markers.write(marker, TopicPartition(CONSUMER_OFFSETS, PartitionIndex(0)))
        return offsets.held

    assert await write(4) == 4
    with pytest.raises(UnknownLeaderEpoch):
        await write(5)
    topics.epochs = (5,)
    assert await write(5) == 5
    with pytest.raises(TransactionCoordinatorFenced):
        await write(4)
    # The coordination store was restored from an older backup, so the later epochs are unknown.
    topics.epochs = (2,)
    assert await write(2) == 2
