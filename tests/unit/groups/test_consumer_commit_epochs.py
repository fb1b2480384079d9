"""A member that does not know its newest epoch yet may commit the partitions it has owned since the epoch it knows."""

from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.groups.consumer import records
from millstream.broker.groups.consumer.member import MemberState, Position, assignment_of
from millstream.broker.groups.requests import CommitRequest, MemberRef, PartitionCommit
from millstream.core.errors import IllegalGeneration, MillstreamError, StaleMemberEpoch
from millstream_testing.consumer_trial import ClassicConsumer, ConsumerTrial, SimulatedConsumer
from millstream_testing.group_trial import GROUP

ONE, TWO = UUID(int=1), UUID(int=2)


@pytest.fixture
def trial() -> ConsumerTrial:
    trial = ConsumerTrial()
    trial.add_topic("orders", 4)
    return trial


def commit(trial: ConsumerTrial, partition: int, epoch: int, member_id: str = "m0") -> MillstreamError | None:
    response = trial.commit(partition + 10, member_id=member_id, generation=epoch, partition=partition)
    return response.error or response.result()["orders"][partition]


def partitions_of(trial: ConsumerTrial, consumer: SimulatedConsumer) -> frozenset[int]:
    return consumer.owned[trial.id_of("orders")]


def test_a_kept_partition_is_committed_with_any_epoch_since_its_assignment(trial: ConsumerTrial) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    trial.settle(first)
    alone = first.epoch
    trial.settle(first, second)
    assert first.epoch > alone
    kept = partitions_of(trial, first)
    given = partitions_of(trial, second)
    assert (len(kept), len(given)) == (2, 2)
    for partition in kept:
        assert commit(trial, partition, alone) is None
        assert commit(trial, partition, first.epoch) is None
        assert isinstance(commit(trial, partition, alone - 1), StaleMemberEpoch)
        assert isinstance(commit(trial, partition, first.epoch + 1), StaleMemberEpoch)
    for partition in given:
        assert isinstance(commit(trial, partition, alone), StaleMemberEpoch)
        assert isinstance(commit(trial, partition, second.epoch - 1, "m1"), StaleMemberEpoch)
        assert commit(trial, partition, second.epoch, "m1") is None
    assert isinstance(commit(trial, 3, -1), StaleMemberEpoch)


def test_a_commit_with_an_older_epoch_succeeds_as_a_whole_or_fails(trial: ConsumerTrial) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    trial.settle(first)
    alone = first.epoch
    trial.settle(first, second)
    kept, given = min(partitions_of(trial, first)), min(partitions_of(trial, second))
    request = CommitRequest(
        member=MemberRef(group_id=GROUP, member_id="m0", generation=alone),
        topics={"orders": tuple(PartitionCommit(partition=number, offset=7) for number in (kept, given))},
        knows_unknown_group=True,
    )
    assert isinstance(trial.run(lambda shard: shard.commit(request)).error, StaleMemberEpoch)
    assert trial.committed(partition=kept) == -1
    assert trial.committed(partition=given) == -1


def test_a_returned_partition_counts_from_its_last_assignment(trial: ConsumerTrial) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    trial.settle(first)
    alone = first.epoch
    trial.settle(first, second)
    lent = min(partitions_of(trial, second))
    trial.leave(second)
    trial.settle(first)
    assert lent in partitions_of(trial, first)
    assert isinstance(commit(trial, lent, alone), StaleMemberEpoch)
    assert commit(trial, lent, first.epoch) is None


def test_assignment_epochs_survive_a_restart(trial: ConsumerTrial) -> None:
    first, second = SimulatedConsumer("m0", "orders"), SimulatedConsumer("m1", "orders")
    trial.settle(first)
    alone = first.epoch
    trial.settle(first, second)
    kept, given = min(partitions_of(trial, first)), min(partitions_of(trial, second))
    trial.reload()
    assert commit(trial, kept, alone) is None
    assert isinstance(commit(trial, given, alone), StaleMemberEpoch)


def test_a_classic_member_must_be_in_the_newest_generation(trial: ConsumerTrial) -> None:
    newer, classic = SimulatedConsumer("m1", "orders"), ClassicConsumer(trial, "orders")
    trial.settle(newer)
    classic.join()
    for _ in range(5):
        trial.settle(newer)
        classic.go_on()
    generation = classic.generation
    assert commit(trial, 0, generation, classic.member_id) is None
    assert isinstance(commit(trial, 0, generation - 1, classic.member_id), IllegalGeneration)
    assert isinstance(commit(trial, 0, generation + 1, classic.member_id), IllegalGeneration)


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
