"""Three nodes that replicate in one process: copying, failover, divergence and truncation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from millstream.broker.replication.partition import ACKS_ALL, ACKS_LEADER, Partition
from millstream.core.errors import NotEnoughReplicas, NotLeader
from millstream.core.ids import Epoch, NodeId, Offset
from millstream.core.partition_state import PartitionState
from millstream.core.topic import TopicSettings
from millstream.protocol.records.record import decode_records
from millstream_testing.batches import encode_values
from millstream_testing.replica_group import LAG_S, ReplicaGroup, content
from millstream_testing.waiting import until

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
FIRST = PartitionState(replicas=(ONE, TWO, THREE), leader=ONE, leader_epoch=Epoch(0), in_sync=(ONE, TWO, THREE))


def values(partition: Partition) -> list[bytes | None]:
    return [record.value for record in decode_records(content(partition))]


async def leads(group: ReplicaGroup, node: int) -> Partition:
    partition = group.partition(node)
    await until(lambda: partition.is_leader)
    return partition


@pytest.fixture(params=["os", "always"])
async def group(request: pytest.FixtureRequest) -> AsyncIterator[ReplicaGroup]:
    async with ReplicaGroup(settings=TopicSettings(flush=request.param, min_insync_replicas=2)) as started:
        started.set_state(FIRST)
        yield started


class TestCopying:
    async def test_acknowledged_records_are_on_every_replica_byte_for_byte(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        for number in range(50):
            await leader.append(encode_values(b"m%d" % number))
        for node in (2, 3):
            assert content(group.partition(node)) == content(leader)
            await until(lambda node=node: group.partition(node).high_watermark == 50)  # type: ignore[misc]

    async def test_acks_1_waits_only_for_the_leader(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        group.cut |= {(TWO, ONE), (THREE, ONE)}
        appended = await leader.append(encode_values(b"alone"), acks=ACKS_LEADER)
        assert appended.next_offset == 1
        assert leader.high_watermark == 0
        waiting = leader.acknowledged(appended)
        assert waiting is not None
        group.heal()
        await waiting
        assert leader.high_watermark == 1

    async def test_only_replicas_may_fetch_as_followers(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        with pytest.raises(NotLeader):
            leader.read_for_follower(NodeId(9), offset=Offset(0), last_epoch=-1, leader_epoch=0, max_bytes=100)

    async def test_followers_start_at_the_log_start_offset(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        await leader.append(encode_values(*(b"x" for _ in range(10))))
        leader.delete_before(Offset(6))
        await until(lambda: group.partition(2).log_start == 6 == group.partition(3).log_start)

    async def test_a_follower_behind_the_log_start_restarts_from_it(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        group.cut |= {(THREE, ONE)}
        await until(lambda: leader.state is not None and leader.log.end_offset == 0 and leader.is_leader)
        await leader.append(encode_values(b"a", b"b"), acks=ACKS_LEADER)
        await until(lambda: group.partition(2).log.end_offset == 2)
        leader.log.delete_before(2)
        await leader.append(encode_values(b"c"), acks=ACKS_LEADER)
        group.heal()
        await until(lambda: group.partition(3).log.end_offset == 3)
        assert group.partition(3).log_start == 2
        assert values(group.partition(3)) == [b"c"]


class TestInSync:
    async def test_an_unreachable_follower_is_dropped_from_the_in_sync_set_and_rejoins(
        self, group: ReplicaGroup
    ) -> None:
        leader = await leads(group, 1)
        group.cut |= {(THREE, ONE)}
        await leader.append(encode_values(b"a"))
        stored_state = group.stored_state()
        assert stored_state is not None
        assert stored_state.state.in_sync == (ONE, TWO)
        group.heal()
        await until(lambda: leader.state is not None and leader.state.in_sync == (ONE, TWO, THREE))

    async def test_below_min_isr_appends_are_refused_and_the_high_watermark_stays(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        await leader.append(encode_values(b"a"))
        group.cut |= {(TWO, ONE), (THREE, ONE)}
        pending = asyncio.ensure_future(leader.append(encode_values(b"b")))
        await until(lambda: leader.is_under_min_in_sync)
        assert leader.state is not None
        assert leader.state.eligible == (TWO, THREE)
        with pytest.raises(NotEnoughReplicas):
            leader.write(encode_values(b"c"), acks=ACKS_ALL)
        await leader.append(encode_values(b"d"), acks=ACKS_LEADER)
        assert leader.high_watermark == 1
        assert not pending.done()
        group.heal()
        await pending
        assert not leader.state.eligible

    async def test_followers_of_an_idle_log_stay_in_sync(self, group: ReplicaGroup) -> None:
        leader = await leads(group, 1)
        await leader.append(encode_values(b"a"))
        await until(lambda: not leader.has_lagging)
        await asyncio.sleep(2.5 * LAG_S)
        assert leader.state is not None
        assert leader.state.in_sync == (ONE, TWO, THREE)


class TestFailingOver:
    async def test_a_new_leader_has_every_acknowledged_record(self, group: ReplicaGroup) -> None:
        old = await leads(group, 1)
        await old.append(encode_values(b"a", producer_id=4, sequence=0))
        await old.append(encode_values(b"b", producer_id=4, sequence=1))
        group.isolate(1)
        group.set_state(replace(FIRST, leader=TWO, leader_epoch=Epoch(1), in_sync=(TWO, THREE)))
        new = await leads(group, 2)
        await new.settled()
        again = await new.append(encode_values(b"b", producer_id=4, sequence=1))
        assert again.duplicate
        assert again.base_offset == 1
        appended = await new.append(encode_values(b"c", producer_id=4, sequence=2))
        assert appended.base_offset == 2
        assert values(new) == [b"a", b"b", b"c"]

    async def test_an_isolated_leader_acknowledges_nothing_and_is_truncated(self, group: ReplicaGroup) -> None:
        old = await leads(group, 1)
        await old.append(encode_values(b"a"))
        group.isolate(1)
        lost = asyncio.ensure_future(old.append(encode_values(b"lost")))
        await asyncio.sleep(0)
        only_here = await old.append(encode_values(b"also lost"), acks=ACKS_LEADER)
        assert only_here.base_offset == 2
        group.set_state(replace(FIRST, leader=TWO, leader_epoch=Epoch(1), in_sync=(TWO, THREE)))
        new = await leads(group, 2)
        await new.append(encode_values(b"b"))
        await new.append(encode_values(b"c"))
        assert not lost.done()
        assert old.high_watermark == 1
        group.heal()
        with pytest.raises(NotLeader):
            await lost
        await until(lambda: old.log.end_offset == 3 and content(old) == content(new))
        assert values(old) == [b"a", b"b", b"c"]
        await until(lambda: new.state is not None and new.state.in_sync == (ONE, TWO, THREE))
        with pytest.raises(NotLeader):
            old.write(encode_values(b"no"), acks=ACKS_ALL)
        with pytest.raises(NotLeader):
            old.read(Offset(0), max_bytes=100)

    async def test_a_killed_leader_rejoins_as_a_follower(self, group: ReplicaGroup) -> None:
        old = await leads(group, 1)
        await old.append(encode_values(b"a"))
        await group.nodes[ONE].kill()
        group.set_state(replace(FIRST, leader=THREE, leader_epoch=Epoch(1), in_sync=(TWO, THREE)))
        new = await leads(group, 3)
        await new.append(encode_values(b"b"))
        await group.nodes[ONE].start()
        await until(lambda: values(group.partition(1)) == [b"a", b"b"])

    async def test_a_leadership_of_an_earlier_run_is_not_resumed(self, group: ReplicaGroup) -> None:
        await leads(group, 1)
        stored_state = group.stored_state()
        assert stored_state is not None
        late = group.nodes[ONE]
        await late.kill()
        await late.start()
        fresh = group.partition(1)
        fresh.apply(stored_state, me=ONE, inherited=True)
        assert not fresh.is_leader
        assert fresh.follows is None
        fresh.apply(stored_state._replace(revision=stored_state.revision + 1), me=ONE)
        assert not fresh.is_leader
        fresh.apply(
            stored_state._replace(state=stored_state.state.elected(ONE), revision=stored_state.revision + 2), me=ONE
        )
        assert fresh.is_leader


async def test_after_a_lost_response_both_in_sync_sets_count_until_the_set_is_read_back() -> None:
    async with ReplicaGroup() as group:
        group.set_state(replace(FIRST, in_sync=(ONE, TWO)))
        leader = await leads(group, 1)
        store = group.nodes[ONE].store
        group.cut |= {(THREE, ONE)}
        await leader.append(encode_values(b"a"))
        # The leader gets nothing from the store any more: neither the response to its change nor the change itself.
        store.block(requests_pass=True)
        group.cut.clear()
        await until(lambda: group.stored_state().state.in_sync == (ONE, TWO, THREE))  # type: ignore[union-attr]
        group.cut |= {(THREE, ONE)}
        pending = asyncio.ensure_future(leader.append(encode_values(b"b")))
        await until(lambda: group.partition(2).log.end_offset == 2)
        await asyncio.sleep(0.1)
        assert leader.high_watermark == 1
        assert not pending.done()
        store.unblock()
        group.cut.clear()
        await pending
        assert group.partition(3).log.end_offset == 2
        await until(lambda: leader.state is not None and leader.state.in_sync == (ONE, TWO, THREE))


async def test_many_partitions_share_one_fetch_and_one_change() -> None:
    count = 300
    topic = replace(ReplicaGroup().topic, partitions=count)
    async with ReplicaGroup(topic=topic) as group:
        for index in range(count):
            group.set_state(replace(FIRST, in_sync=(ONE,), leader_epoch=Epoch(3)), index)
        await until(lambda: all(len(group.stored_state(index).state.in_sync) == 3 for index in range(count)))  # type: ignore[union-attr]
        await asyncio.gather(*(group.partition(1, index).append(encode_values(b"x")) for index in range(count)))
        assert len(group.nodes[ONE].follower_fetch) == 2
        assert all(group.partition(2, index).log.end_offset == 1 for index in range(count))


async def test_records_lost_by_the_disk_of_a_follower_are_refetched(group: ReplicaGroup) -> None:
    leader = await leads(group, 1)
    for number in range(20):
        await leader.append(encode_values(b"value %d" % number))
    node = group.nodes[TWO]
    await node.kill()
    path = next(path for path in node.files.walk() if path.endswith(".log"))
    node.files.flip_bit(path, len(node.files.content(path)) // 2, 3)
    await node.start()
    damaged = group.partition(2)
    assert damaged.log.damaged_ranges
    await until(lambda: content(damaged) == content(leader) if not damaged.log.damaged_ranges else False)
    await until(lambda: leader.state is not None and set(leader.state.in_sync) == {ONE, TWO, THREE})
    assert (await leader.append(encode_values(b"after"))).base_offset == 20
