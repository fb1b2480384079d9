"""Offsets committed by transactions: they apply or vanish with the marker, and late ones are fenced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.broker.coordination.state_machine import Deferred, StateRecord, Timers
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import CommitRequest, FetchedOffset, GroupLimits, MemberRef, PartitionCommit
from millstream.broker.groups.shard import GroupShard
from millstream.broker.groups.transactional_offsets import Guard, MarkerKey, PendingOffsets, Producer, read_pending_key
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.errors import (
    FencedProducer,
    IllegalGeneration,
    InvalidTransactionState,
    NotCoordinator,
    TransactionCoordinatorFenced,
)
from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.core.topic import TopicPartition
from millstream.protocol.records.control import Marker
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryTopics

GROUP = "g"
TOPIC = "t"


def request(offset: int, *, partition: int = 0, generation: int = -1, member: str = "") -> CommitRequest:
    who = MemberRef(group_id=GROUP, member_id=member, instance_id=None, generation=generation)
    commit = PartitionCommit(partition=partition, offset=offset, leader_epoch=-1, metadata="")
    return CommitRequest(member=who, topics={TOPIC: (commit,)})


def marker(producer: int, epoch: int, *, commit: bool, coordinator: int = 0, bumps: bool = False) -> Marker:
    return Marker(
        producer_id=ProducerId(producer),
        producer_epoch=ProducerEpoch(epoch),
        commit=commit,
        coordinator_epoch=coordinator,
        bumps_epoch=bumps,
    )


async def admitted(partition: TopicPartition) -> None:
    assert partition.topic == "__consumer_offsets"


@pytest.fixture
async def groups() -> AsyncIterator[GroupCoordinator]:
    topics = MemoryTopics()
    topics.add(TOPIC, partitions=2)
    made = GroupCoordinator(topics, Config(offsets_partitions=1), SystemClock())
    yield made
    await made.close()


async def commit(groups: GroupCoordinator, offset: int, *, producer: int = 7, epoch: int = 0) -> None:
    await groups.commit_in_transaction(request(offset), ProducerId(producer), epoch, admit=admitted)


async def offset_of(groups: GroupCoordinator) -> tuple[int, bool]:
    fetched = (await groups.fetch(GROUP, {TOPIC: [0]}))[TOPIC][0]
    return fetched.offset, fetched.is_stable


async def test_offsets_apply_with_the_commit_marker(groups: GroupCoordinator) -> None:
    await commit(groups, 5)
    assert await offset_of(groups) == (-1, False)
    await groups.end_transaction(0, marker(7, 0, commit=True))
    assert await offset_of(groups) == (5, True)
    await groups.end_transaction(0, marker(7, 0, commit=True))
    await commit(groups, 9)
    await groups.end_transaction(0, marker(7, 0, commit=False))
    assert await offset_of(groups) == (5, True)
    with pytest.raises(NotCoordinator):
        await groups.end_transaction(3, marker(7, 0, commit=True))


async def test_a_group_is_transactional_from_the_first_offset_that_a_transaction_has_committed(
    groups: GroupCoordinator,
) -> None:
    def found(topic_id: UUID | None = None, limit: int = 1, topic: str = TOPIC) -> Any:
        return groups.transactional_groups({topic: topic_id}, limit)

    assert found() == ({}, False)
    await groups.commit(request(1))
    await commit(groups, 5)
    await groups.end_transaction(0, marker(7, 0, commit=False))
    assert found() == ({0: {}}, False)
    await commit(groups, 5)
    await groups.end_transaction(0, marker(7, 0, commit=True))
    await groups.commit(request(6))
    assert found() == ({0: {GROUP: {TOPIC: {0: 6}}}}, False)
    # Too many, of another topic, and of another topic that had the same name.
    assert found(limit=0) == ({0: {}}, True)
    assert found(limit=0, topic="other") == found(UUID(int=99)) == ({0: {}}, False)
    await groups.delete(GROUP)
    await groups.commit(request(1))
    assert found() == ({0: {}}, False)


async def test_a_pending_first_offset_is_reported_when_all_offsets_are_requested(
    groups: GroupCoordinator,
) -> None:
    await commit(groups, 5)
    assert await groups.fetch(GROUP, None) == {TOPIC: {0: FetchedOffset(is_stable=False)}}
    assert await groups.fetch("another", None) == {}
    assert await groups.fetch(GROUP, None, require_stable=False) == {}
    await groups.end_transaction(0, marker(7, 0, commit=True))
    assert await groups.fetch(GROUP, None) == {TOPIC: {0: FetchedOffset(5)}}


async def test_late_commits_and_markers_are_fenced(groups: GroupCoordinator) -> None:
    await commit(groups, 5, epoch=3)
    await groups.end_transaction(0, marker(7, 4, commit=False, coordinator=2, bumps=True))
    with pytest.raises(FencedProducer):
        await commit(groups, 6, epoch=3)
    await commit(groups, 6, epoch=4)
    with pytest.raises(FencedProducer):
        await groups.end_transaction(0, marker(7, 4, commit=True, coordinator=2, bumps=True))
    with pytest.raises(TransactionCoordinatorFenced):
        await groups.end_transaction(0, marker(7, 5, commit=True, coordinator=1, bumps=True))
    await groups.end_transaction(0, marker(7, 5, commit=True, coordinator=2, bumps=True))
    assert await offset_of(groups) == (6, True)


async def test_a_marker_without_offsets_fences_older_coordinators_too(groups: GroupCoordinator) -> None:
    await commit(groups, 5)
    await groups.end_transaction(0, marker(7, 0, commit=True, coordinator=1))
    await groups.end_transaction(0, marker(7, 0, commit=True, coordinator=2))
    await commit(groups, 6)
    with pytest.raises(TransactionCoordinatorFenced):
        await groups.end_transaction(0, marker(7, 0, commit=True, coordinator=1))
    assert await offset_of(groups) == (5, False)


async def test_a_marker_between_the_verification_and_the_append_breaks_the_guard(groups: GroupCoordinator) -> None:
    async def ended_meanwhile(partition: TopicPartition) -> None:
        await groups.end_transaction(0, marker(7, 0, commit=False))

    with pytest.raises(InvalidTransactionState):
        await groups.commit_in_transaction(request(5), ProducerId(7), 0, admit=ended_meanwhile)
    assert await offset_of(groups) == (-1, True)


async def test_offsets_that_are_not_admitted_are_not_stored(groups: GroupCoordinator) -> None:
    async def refused(partition: TopicPartition) -> None:
        raise InvalidTransactionState("not part of it")

    with pytest.raises(InvalidTransactionState):
        await groups.commit_in_transaction(request(5), ProducerId(7), 0, admit=refused)
    asked = request(5, generation=3, member="m")
    with pytest.raises(IllegalGeneration):
        await groups.commit_in_transaction(asked, ProducerId(7), 0, admit=admitted)
    assert await offset_of(groups) == (-1, True)


def shard_of(clock: ManualClock) -> GroupShard:
    limits = GroupLimits(
        session_min_ms=1,
        session_max_ms=10**6,
        initial_delay_ms=0,
        members_max=10,
        offsets_retention_ms=1000,
        new_member_ms=1000,
        sweep_ms=500,
    )
    topics = ConsumerTopics.of(MemoryTopics())
    return GroupShard(Timers(clock), limits=limits, clock=clock, topic_id_of=lambda _: None, topics=topics)


def kept(shard: GroupShard, asked: CommitRequest, producer: int, epoch: int) -> Sequence[StateRecord]:
    _, guard = shard.transactional.acquire_guard(ProducerId(producer))
    assert isinstance(guard, Guard)
    return shard.commit_in_transaction(asked, Producer(ProducerId(producer), epoch, guard))[0]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 2), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("plain"), st.just(0), st.just(0), st.integers(0, 1)),
        st.tuples(st.sampled_from(["end", "abort"]), st.integers(1, 2), st.integers(0, 3), st.just(0)),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(steps)
@example([("commit", 1, 0, 0), ("end", 1, 0, 0), ("plain", 0, 0, 0)])
def test_a_reload_after_every_step_changes_nothing(taken: list[tuple[str, int, int, int]]) -> None:
    clock = ManualClock()
    shard = shard_of(clock)
    model: dict[int, int] = {}
    pending: dict[int, dict[int, int]] = {}
    is_transactional = False
    for number, (kind, producer, epoch, partition) in enumerate(taken):
        try:
            if kind == "commit":
                records = kept(shard, request(number, partition=partition), producer, epoch)
                pending.setdefault(producer, {})[partition] = number
            elif kind == "plain":
                records, _ = shard.commit(request(number, partition=partition))
                model[partition] = number
            else:
                records, _ = shard.transactional.end(marker(producer, epoch, commit=kind == "end"))
                ended = pending.pop(producer, {})
                model.update(ended if kind == "end" else {})
                is_transactional |= kind == "end" and bool(ended)
        except FencedProducer:
            continue
        for record in records:
            shard.replay(record)
        names = shard.durable_keys()
        again = shard_of(clock)
        for name in names:
            record_now = shard.durable_record(name)
            assert record_now is not None
            again.replay(record_now)
        assert [again.durable_record(name) for name in names] == [shard.durable_record(name) for name in names]
        assert set(again.durable_keys()) == set(names)
        transactional = {key.group_id for key, _ in again.offsets_of_transactional_groups({TOPIC: None})}
        assert transactional == ({GROUP} if is_transactional else set())
        shard = again
    _, fetched = shard.fetch(GROUP, {TOPIC: [0, 1]})
    assert not isinstance(fetched, Deferred)
    reported = fetched[TOPIC]
    assert {index: committed.offset for index, committed in reported.items() if committed.offset >= 0} == model
    unstable = {index for index, committed in reported.items() if not committed.is_stable}
    assert unstable == {partition for offsets in pending.values() for partition in offsets}


def test_idle_producers_expire() -> None:
    clock = ManualClock()
    shard = shard_of(clock)
    for record in kept(shard, request(4), 1, 0):
        shard.replay(record)
    for record in shard.transactional.end(marker(1, 0, commit=True))[0]:
        shard.replay(record)
    assert ProducerId(1) in shard.transactional.pending._markers
    clock.advance_ms(2000)
    for record in list(shard.transactional.expired_markers(1000)):
        shard.replay(record)
    assert ProducerId(1) not in shard.transactional.pending._markers


def test_keys_of_other_kinds_are_ignored() -> None:
    assert read_pending_key(b"\x00\x01\x00\x01g\x00\x01t\x00\x00\x00\x00") is None
    offsets = PendingOffsets()
    assert offsets.durable_record(MarkerKey(ProducerId(1))) is None
    assert len(offsets) == 0
    assert list(offsets.durable_keys()) == []
