"""A member that does not know its newest epoch yet may commit the partitions it has owned since the epoch it knows."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.groups.consumer import records
from millstream.broker.groups.consumer.member import MemberState, Position, assignment_of
from millstream.broker.groups.requests import CommitRequest, MemberRef, PartitionCommit
from millstream.core.errors import IllegalGeneration, MillstreamError, StaleMemberEpoch
from millstream_testing.consumer_harness import ClassicConsumer, ConsumerHarness, SimulatedConsumer
from millstream_testing.group_harness import GROUP

ONE, TWO = UUID(int=1), UUID(int=2)


@pytest.fixture
def harness() -> ConsumerHarness:
    harness = ConsumerHarness()
    harness.add_topic("orders", 4)
    return harness


def commit(harness: ConsumerHarness, partition: int, epoch: int, member_id: str = "m0") -> MillstreamError | None:
    response = harness.commit(partition + 10, member_id=member_id, generation=epoch, partition=partition)
    return response.error or response.result()["orders"][partition]


def partitions_of(harness: ConsumerHarness, consumer: SimulatedConsumer) -> frozenset[int]:
    return consumer.owned[harness.id_of("orders")]


def test_a_kept_partition_is_committed_with_any_epoch_since_its_assignment(harness: ConsumerHarness) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    harness.settle(first)
    alone = first.epoch
    harness.settle(first, second)
    assert first.epoch > alone
    kept = partitions_of(harness, first)
    given = partitions_of(harness, second)
    assert (len(kept), len(given)) == (2, 2)
    for partition in kept:
        assert commit(harness, partition, alone) is None
        assert commit(harness, partition, first.epoch) is None
        assert isinstance(commit(harness, partition, alone - 1), StaleMemberEpoch)
        assert isinstance(commit(harness, partition, first.epoch + 1), StaleMemberEpoch)
    for partition in given:
        assert isinstance(commit(harness, partition, alone), StaleMemberEpoch)
        assert isinstance(commit(harness, partition, second.epoch - 1, "m1"), StaleMemberEpoch)
        assert commit(harness, partition, second.epoch, "m1") is None
    assert isinstance(commit(harness, 3, -1), StaleMemberEpoch)


def test_a_commit_with_an_older_epoch_succeeds_as_a_whole_or_fails(harness: ConsumerHarness) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    harness.settle(first)
    alone = first.epoch
    harness.settle(first, second)
    kept, given = min(partitions_of(harness, first)), min(partitions_of(harness, second))
    request = CommitRequest(
        member=MemberRef(group_id=GROUP, member_id="m0", generation=alone),
        topics={"orders": tuple(PartitionCommit(partition=number, offset=7) for number in (kept, given))},
        supports_unknown_group=True,
    )
    assert isinstance(harness.run(lambda shard: shard.commit(request)).error, StaleMemberEpoch)
    assert harness.committed(partition=kept) == -1
    assert harness.committed(partition=given) == -1


def test_a_returned_partition_counts_from_its_last_assignment(harness: ConsumerHarness) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    harness.settle(first)
    alone = first.epoch
    harness.settle(first, second)
    borrow = min(partitions_of(harness, second))
    harness.leave(second)
    harness.settle(first)
    assert borrow in partitions_of(harness, first)
    assert isinstance(commit(harness, borrow, alone), StaleMemberEpoch)
    assert commit(harness, borrow, first.epoch) is None


def test_assignment_epochs_survive_a_restart(harness: ConsumerHarness) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    harness.settle(first)
    alone = first.epoch
    harness.settle(first, second)
    kept, given = min(partitions_of(harness, first)), min(partitions_of(harness, second))
    harness.reload()
    assert commit(harness, kept, alone) is None
    assert isinstance(commit(harness, given, alone), StaleMemberEpoch)


def test_a_classic_member_must_be_in_the_newest_generation(harness: ConsumerHarness) -> None:
    newer, classic = SimulatedConsumer("m1", "orders"), ClassicConsumer(harness, "orders")
    harness.settle(newer)
    classic.join()
    for _ in range(5):
        harness.settle(newer)
        classic.rejoin_if_needed()
    generation = classic.generation
    assert commit(harness, 0, generation, classic.member_id) is None
    assert isinstance(commit(harness, 0, generation - 1, classic.member_id), IllegalGeneration)
    assert isinstance(commit(harness, 0, generation + 1, classic.member_id), IllegalGeneration)


POSITION = Position(
    epoch=4,
    previous_epoch=3,
    state=MemberState.UNREVOKED,
    assigned=assignment_of([(ONE, [0, 2])]),
    pending=assignment_of([(TWO, [5])]),
    since={ONE: {0: 2, 2: 4}, TWO: {5: 3}},
)


def test_epochs_are_encoded_as_by_kafka_and_read_back() -> None:
    record = records.position_record("g", "m", POSITION)
    assert record.value is not None
    # The encoding of the same content by the message classes of Kafka 4.3.1.
    assert record.value.hex() == (
        "0000000000040000000301"
        "02" + ONE.bytes.hex() + "03" + "00000000" + "00000002" + "01" + "00" + "09" + "03" + "00000002" + "00000004"
        "02" + TWO.bytes.hex() + "02" + "00000005" + "01" + "00" + "05" + "02" + "00000003"
        "00"
    )
    read = records.read_position(record)
    assert read == POSITION
    assert read.since == POSITION.since


def test_records_without_epochs_count_from_the_newest() -> None:
    bare = Position(epoch=4, assigned=assignment_of([(ONE, [0])]))
    read = records.read_position(records.position_record("g", "m", bare))
    assert read.has_since(ONE, 0) == 4
    assert read.has_since(ONE, 1) is None
    assert read.has_since(TWO, 0) is None
