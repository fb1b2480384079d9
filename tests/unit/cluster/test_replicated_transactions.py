"""Transactions on three replicas: a marker takes effect once it is acknowledged, and may be truncated until then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from millstream.broker.replication.partition import ACKS_ALL, Partition
from millstream.core.errors import NotLeader
from millstream.core.ids import Epoch, NodeId, Offset, ProducerEpoch, ProducerId
from millstream.core.partition_state import PartitionState
from millstream.core.topic import TopicSettings
from millstream.protocol.records.control import Marker
from millstream_testing.batches import encode_values
from millstream_testing.replica_group import ReplicaGroup, content
from millstream_testing.waiting import until

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
FIRST = PartitionState(replicas=(ONE, TWO, THREE), leader=ONE, leader_epoch=Epoch(0), in_sync=(ONE, TWO, THREE))
SEVEN = 7


def marker(epoch: int = 1, *, commit: bool = True) -> Marker:
    return Marker(
        producer_id=ProducerId(SEVEN),
        producer_epoch=ProducerEpoch(epoch),
        commit=commit,
        coordinator_epoch=0,
        bumps_epoch=True,
    )


async def leads(group: ReplicaGroup, node: int) -> Partition:
    partition = group.partition(node)
    await until(lambda: partition.is_leader)
    return partition


async def write(leader: Partition, sequence: int, *, epoch: int = 0) -> None:
    guard = leader.start_transaction(SEVEN, epoch, sequence, bumps_epoch=True)
    batch = encode_values(producer_id=SEVEN, producer_epoch=epoch, sequence=sequence, transactional=True)
    acknowledged = leader.acknowledged(leader.write(batch, acks=ACKS_ALL, guard=guard))
    if acknowledged is not None:
        await acknowledged


async def end(leader: Partition, transaction_marker: Marker) -> None:
    acknowledged = leader.acknowledged(leader.write_marker(transaction_marker))
    if acknowledged is not None:
        await acknowledged


@pytest.fixture(params=["os", "always"])
async def group(request: pytest.FixtureRequest) -> AsyncIterator[ReplicaGroup]:
    async with ReplicaGroup(settings=TopicSettings(flush=request.param, min_insync_replicas=2)) as started:
        started.set_state(FIRST)
        yield started


async def test_followers_know_open_and_aborted_transactions(group: ReplicaGroup) -> None:
    leader = await leads(group, 1)
    await write(leader, 0)
    await end(leader, marker(commit=False))
    await write(leader, 0, epoch=1)
    assert leader.last_stable_offset == 2
    for node in (2, 3):
        follower = group.partition(node)
        assert content(follower) == content(leader)
        assert follower.aborted_in(Offset(0), Offset(3)) == [(SEVEN, 0)]
        assert follower.has_open_transaction(SEVEN, 1)


async def test_a_marker_takes_effect_once_it_is_acknowledged(group: ReplicaGroup) -> None:
    leader = await leads(group, 1)
    await write(leader, 0)
    group.cut |= {(TWO, ONE), (THREE, ONE)}
    ending = asyncio.ensure_future(end(leader, marker()))
    await until(lambda: leader.log.end_offset == 2)
    assert not leader.has_open_transaction(SEVEN, 0)
    assert leader.last_stable_offset == 0
    group.heal()
    await ending
    assert leader.last_stable_offset == 2


async def test_an_unreplicated_marker_is_truncated_and_can_be_written_again(group: ReplicaGroup) -> None:
    leader = await leads(group, 1)
    await write(leader, 0)
    group.isolate(1)
    ending = asyncio.ensure_future(end(leader, marker(commit=False)))
    await until(lambda: leader.log.end_offset == 2)
    group.set_state(replace(FIRST, leader=TWO, leader_epoch=Epoch(1), in_sync=(TWO, THREE)))
    new = await leads(group, 2)
    assert new.has_open_transaction(SEVEN, 0)
    await write(new, 1)
    group.heal()
    with pytest.raises(NotLeader):
        await ending
    await until(lambda: content(leader) == content(new))
    assert leader.has_open_transaction(SEVEN, 0)
    assert leader.aborted_in(Offset(0), Offset(9)) == []

    await end(new, marker())
    await until(lambda: new.last_stable_offset == 3)
    await until(lambda: content(leader) == content(new))
    for node in (1, 2, 3):
        assert group.partition(node).open_transactions() == []
        known = group.partition(node).log.producers.get(SEVEN)
        assert known is not None
        assert known.epoch == 1
