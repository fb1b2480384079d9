"""Replicas restore lost ranges from each other in place, whichever node leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest

from millstream.broker.cluster.replicas import DamageRepair
from millstream.broker.log.damage import LostRange
from millstream.broker.log.range_repair import RangeRepair
from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.core.errors import DamagedRange, NotLeader, RepairPending
from millstream.core.ids import Epoch, NodeId, Offset
from millstream.core.partition_state import PartitionState
from millstream.core.topic import TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.batches import encode_values
from millstream_testing.replica_group import ReplicaGroup, content
from millstream_testing.waiting import until

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
FIRST = PartitionState(replicas=(ONE, TWO, THREE), leader=ONE, leader_epoch=Epoch(0), in_sync=(ONE, TWO, THREE))
SETTINGS = TopicSettings(flush="os", min_insync_replicas=2, segment_bytes=2000, index_interval_bytes=400)
COUNT = 60


@pytest.fixture
async def group() -> AsyncIterator[ReplicaGroup]:
    async with ReplicaGroup(settings=SETTINGS) as started:
        started.set_state(FIRST)
        leader = started.partition(1)
        await until(lambda: leader.is_leader)
        for number in range(COUNT):
            await leader.append(encode_values(b"%0100d" % number))
        await until(lambda: all(started.partition(node).high_watermark == COUNT for node in (1, 2, 3)))
        yield started


def place_of(partition: Partition, offset: int) -> tuple[str, int]:
    log = partition.log
    segment = log.segments.containing(offset)
    return segment.path, log.reader.locate(segment, offset)


def harm(group: ReplicaGroup, node: int, offset: int) -> None:
    """Corrupt a byte of one batch of a replica on its disk, and run the scrub until it is found."""
    path, position = place_of(group.partition(node), offset)
    group.nodes[NodeId(node)].files.overwrite(path, position + 120, b"?")


def scrub(group: ReplicaGroup, *nodes: int) -> None:
    for node in nodes:
        while group.nodes[NodeId(node)].logs.scrub_once():
            pass


def are_whole(group: ReplicaGroup) -> bool:
    return not any(group.partition(node).log.damage for node in (1, 2, 3))


def is_in_sync(group: ReplicaGroup) -> bool:
    stored_state = group.stored_state()
    return stored_state is not None and set(stored_state.state.in_sync) == {ONE, TWO, THREE}


async def check_repaired(group: ReplicaGroup) -> None:
    await until(lambda: are_whole(group) and is_in_sync(group))
    contents = {content(group.partition(node)) for node in (1, 2, 3)}
    assert len(contents) == 1
    assert all(b"%0100d" % number in next(iter(contents)) for number in range(COUNT))
    assert (await group.partition(1).append(encode_values(b"%0100d" % COUNT))).base_offset == COUNT


@pytest.mark.parametrize("node", [1, 2])
@pytest.mark.parametrize("offset", [0, 17, COUNT - 1])
async def test_a_lost_batch_is_restored_in_its_place(group: ReplicaGroup, node: int, offset: int) -> None:
    harmed = group.partition(node)
    harm(group, node, offset)
    segments = list(harmed.log.segments)
    scrub(group, node)
    assert harmed.log.damaged_ranges == ((offset, offset + 1),)
    await check_repaired(group)
    # No later batch was fetched again.
    assert harmed.log.segments[: len(segments)] == segments


async def test_replicas_that_lost_different_ranges_repair_each_other(group: ReplicaGroup) -> None:
    for node in (1, 2, 3):
        for offset in range(node, COUNT, 12):
            harm(group, node, offset)
    scrub(group, 1, 2, 3)
    assert all(group.partition(node).log.damage for node in (1, 2, 3))
    await check_repaired(group)


async def test_damage_found_by_a_read_is_repaired_before_readers_are_refused(group: ReplicaGroup) -> None:
    leader = group.partition(1)
    harm(group, 1, 17)
    with pytest.raises(RepairPending):
        leader.read(Offset(17), max_bytes=1)

    def read() -> bytes | None:
        with suppress(RepairPending):
            return bytes(leader.read(Offset(17), max_bytes=1))
        return None

    assert b"%0100d" % 17 in await until(read)


async def test_removed_files_are_restored(group: ReplicaGroup) -> None:
    """One replica detects it while it runs, one when it starts."""
    running, stopped = group.partition(1), group.nodes[THREE]
    removed = running.log.segments[1]
    group.nodes[ONE].files.remove(removed.path)
    first, second = (segment.path for segment in group.partition(3).log.segments[2:4])
    await stopped.stop()
    stopped.files.remove(first)
    descriptor = stopped.files.open(second)
    stopped.files.truncate(descriptor, 500)
    stopped.files.close(descriptor)
    await stopped.start()
    scrub(group, 1, 3)
    assert running.log.damaged_ranges == ((removed.base_offset, removed.next_offset),)
    assert group.partition(3).log.damage
    await check_repaired(group)
    await group.nodes[ONE].stop()
    await group.nodes[ONE].start()
    assert not group.partition(1).log.damage


async def test_a_range_lost_on_every_replica_is_reported_and_blocks_nothing(group: ReplicaGroup) -> None:
    for node in (1, 2, 3):
        harm(group, node, 17)
    harm(group, 2, 30)
    scrub(group, 1, 2, 3)
    leader = group.partition(1)
    await until(lambda: all(group.partition(node).log.damaged_ranges == ((17, 18),) for node in (1, 2, 3)))
    await until(lambda: all(not group.partition(node).log.damage.repairable for node in (1, 2, 3)))
    with pytest.raises(DamagedRange):
        leader.read(Offset(17), max_bytes=1)
    await until(lambda: is_in_sync(group))
    assert (await leader.append(encode_values(b"%0100d" % COUNT))).base_offset == COUNT


async def test_a_range_is_not_given_up_while_a_replica_that_may_hold_it_is_down(group: ReplicaGroup) -> None:
    leader = group.partition(1)
    group.cut |= {(ONE, TWO), (ONE, THREE)}
    harm(group, 1, 17)
    scrub(group, 1)
    for _ in range(20):
        await asyncio.sleep(0.01)
        with pytest.raises(RepairPending):
            leader.read(Offset(17), max_bytes=1)
    group.heal()
    await check_repaired(group)


async def test_only_replicas_may_fetch_lost_ranges(group: ReplicaGroup) -> None:
    follower = group.partition(2)
    assert follower.read_for_repair(THREE, offset=Offset(17), leader_epoch=-1, max_bytes=1).records
    with pytest.raises(NotLeader):
        follower.read_for_repair(NodeId(4), offset=Offset(17), leader_epoch=-1, max_bytes=1)


async def test_unacknowledged_records_are_served_only_by_the_leader_in_its_epoch(group: ReplicaGroup) -> None:
    group.cut |= {(TWO, ONE), (THREE, ONE)}
    leader = group.partition(1)
    leader.write(encode_values(b"%0100d" % COUNT), acks=1)
    assert leader.high_watermark == COUNT
    given = [
        bool(leader.read_for_repair(TWO, offset=Offset(COUNT), leader_epoch=epoch, max_bytes=1).records)
        for epoch in (-1, 0, 1)
    ]
    assert given == [False, True, False]


async def test_a_log_that_diverged_where_it_is_damaged_is_truncated(group: ReplicaGroup) -> None:
    group.cut |= {(TWO, ONE), (THREE, ONE), (ONE, TWO), (ONE, THREE)}
    former = group.partition(1)
    for number in range(COUNT, COUNT + 4):
        former.write(encode_values(b"never acknowledged %060d" % number), acks=1)
    harm(group, 1, COUNT + 1)
    harm(group, 1, COUNT)
    scrub(group, 1)
    assert former.log.damage
    group.set_state(replace(FIRST, leader=TWO, leader_epoch=Epoch(1), in_sync=(TWO, THREE)))
    leader = group.partition(2)
    await until(lambda: leader.is_leader)
    for number in range(COUNT, COUNT + 6):
        await leader.append(encode_values(b"%0100d" % number))
    group.heal()
    await until(lambda: are_whole(group) and is_in_sync(group))
    assert len({content(group.partition(node)) for node in (1, 2, 3)}) == 1
    assert b"never acknowledged" not in content(former)


async def test_a_leader_that_cannot_write_to_its_disk_hands_over(group: ReplicaGroup) -> None:
    files, harmed = group.nodes[ONE].files, group.partition(1)
    harm(group, 1, 17)
    files.fail_next_writes(*[".log"] * 3)
    scrub(group, 1)
    await until(lambda: group.partition(2).is_leader)
    assert b"%0100d" % 17 in bytes(group.partition(2).read(Offset(17), max_bytes=1))
    await until(lambda: are_whole(group) and is_in_sync(group))
    assert not harmed.is_leader
    assert (await group.partition(2).append(encode_values(b"%0100d" % COUNT))).base_offset == COUNT


NOT_YET = "lost offsets are not repaired yet; retrying"


def attempts(caplog: pytest.LogCaptureFixture) -> int:
    """The number of failed repair attempts."""
    return sum(record.message == NOT_YET for record in caplog.records)


async def test_acknowledged_records_are_not_truncated_when_no_response_fits(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The records behind the lost range may be the last copy."""
    follower = group.partition(2)
    too_long = encode_batch([NewRecord(None, b"%d" % number, (), 1000) for number in range(3)])
    too_long[:8] = (16).to_bytes(8, "big")
    too_long[12:16] = bytes(4)

    async def fetch_misfit(*_: object) -> bytes:
        return bytes(too_long)

    generation = follower.log.generation
    with monkeypatch.context() as patched:
        patched.setattr(DamageRepair, "_fetch", fetch_misfit)
        harm(group, 2, 17)
        scrub(group, 2)
        await until(lambda: attempts(caplog) >= 2 and not is_in_sync(group))
        await group.partition(1).append(encode_values(b"%0100d" % COUNT))
        await until(lambda: attempts(caplog) >= 3)
        assert follower.log.damaged_ranges == ((17, 18),)
    await until(lambda: are_whole(group) and is_in_sync(group))
    assert follower.log.generation == generation
    assert len({content(group.partition(node)) for node in (1, 2, 3)}) == 1


@pytest.mark.parametrize("reason", ["the responses are damaged", "the log changes meanwhile"])
async def test_a_leader_keeps_leading_when_a_repair_fails_for_another_reason_than_its_disk(
    group: ReplicaGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    fetch, repair_range = DamageRepair._fetch, LogStore.repair_range

    async def fetch_damaged(repair: DamageRepair, partition: Partition, node: NodeId, lost: LostRange) -> bytes:
        batches = await fetch(repair, partition, node, lost)
        return batches[:120] + b"?" + batches[121:]

    async def repair_changed(store: LogStore, repair: RangeRepair) -> None:
        repair.log.segments.replace(list(repair.log.segments))
        await repair_range(store, repair)

    with monkeypatch.context() as patched:
        if reason == "the responses are damaged":
            patched.setattr(DamageRepair, "_fetch", fetch_damaged)
        else:
            patched.setattr(LogStore, "repair_range", repair_changed)
        harm(group, 1, 17)
        scrub(group, 1)
        await until(lambda: attempts(caplog) >= 2)
        assert group.partition(1).log.damaged_ranges == ((17, 18),)
    await check_repaired(group)
    stored_state = group.stored_state()
    assert stored_state is not None
    assert (stored_state.state.leader, stored_state.state.leader_epoch) == (ONE, 0)


async def test_a_repaired_leader_does_not_hand_over(group: ReplicaGroup) -> None:
    leader, files = group.partition(1), group.nodes[ONE].files
    path, position = place_of(leader, 17)
    files.flip_bit(path, position + 120, 1)
    scrub(group, 1)
    leader.hand_over()
    change = leader.in_sync_change(lag_s=60)
    assert change is not None
    assert change.state.leader == TWO
    files.flip_bit(path, position + 120, 1)
    scrub(group, 1)
    assert not leader.log.damage
    assert leader.in_sync_change(lag_s=60) is None
