"""Groups on a real data folder, with the broker's own log, journal and catalog."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.shard import Shard
from millstream.broker.coordination.state_machine import StateRecord, Timers
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.records import GroupKey, OffsetKey, read_group, read_key, read_offset
from millstream.broker.groups.requests import (
    CommitRequest,
    GroupLimits,
    JoinRequest,
    MemberRef,
    PartitionCommit,
    SyncRequest,
)
from millstream.broker.groups.shard import GroupShard
from millstream.core.clock import SystemClock
from millstream.core.config import Config
from millstream.core.ids import Offset
from millstream.core.topic import CONSUMER_OFFSETS
from millstream.protocol.records.record import Record, decode_records
from millstream_testing.node_group import single_node
from millstream_testing.state_log import MemoryTopics

CONFIG = Config(group_initial_delay_ms=0, offsets_partitions=2)


def commit(offset: int, group_id: str = "g", member_id: str = "", generation: int = -1) -> CommitRequest:
    return CommitRequest(
        member=MemberRef(group_id=group_id, member_id=member_id, generation=generation),
        topics={"orders": (PartitionCommit(partition=0, offset=offset),)},
    )


def everything_in(topics: Topics) -> list[Record]:
    topic = topics.get(CONSUMER_OFFSETS)
    assert topic is not None
    return [
        record
        for partition in topics.partitions_of(topic)
        for record in decode_records(partition.read(partition.log_start, max_bytes=1 << 30))
    ]


async def test_a_stable_group_and_its_offsets_survive_a_restart(tmp_path: Path) -> None:
    request = JoinRequest(
        group_id="g",
        member_id="",
        client_id="app",
        client_host="/127.0.0.1",
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        protocol_type="consumer",
        protocols=(("range", b""),),
        supports_member_id_required=False,
    )
    async with single_node(tmp_path, CONFIG) as topics:
        await topics.create("orders")
        groups = GroupCoordinator(topics, CONFIG, SystemClock())
        await groups.start()
        joined = await groups.join(request)
        member_id = joined.member_id
        who = MemberRef(group_id="g", member_id=member_id, generation=1)
        await groups.sync(SyncRequest(member=who, assignments={member_id: b"mine"}))
        await groups.commit(commit(42, member_id=member_id, generation=1))
        await groups.close()

    async with single_node(tmp_path, CONFIG) as topics:
        groups = GroupCoordinator(topics, CONFIG, SystemClock())
        await groups.start()
        await groups.wait_loaded()
        await groups.heartbeat(who)
        described = await groups.describe("g")
        assert (described.state, described.members[0].assignment) == ("Stable", b"mine")
        assert (await groups.fetch("g", None))["orders"][0].offset == 42
        await groups.close()
        records = everything_in(topics)

    kept_records = {read_key(record.key or b""): StateRecord(record.key or b"", record.value) for record in records}
    assert set(kept_records) == {GroupKey("g"), OffsetKey("g", "orders", 0)}
    assert read_group(kept_records[GroupKey("g")]).members[0].member_id == member_id
    assert read_offset(kept_records[OffsetKey("g", "orders", 0)]).offset == 42


async def test_a_busy_log_is_rewritten_and_stays_short(tmp_path: Path) -> None:
    def state(timers: Timers) -> GroupShard:
        limits = GroupLimits(
            session_min_ms=1, session_max_ms=1, initial_delay_ms=0, members_max=1, offsets_retention_ms=10**12
        )
        return GroupShard(
            timers,
            limits=limits,
            clock=SystemClock(),
            topic_id_of=lambda _: None,
            topics=ConsumerTopics.of(MemoryTopics()),
        )

    async def loaded(topics: Topics) -> Shard[GroupShard]:
        partition = topics.partition(CONSUMER_OFFSETS, 0)
        gate = asyncio.Semaphore(1)
        shard = Shard("offsets-0", partition, state, clock=SystemClock(), load_slot=gate, rewrite_records_min=100)
        shard.open()
        await shard.wait_loaded()
        return shard

    async with single_node(tmp_path, CONFIG) as topics:
        await topics.create(CONSUMER_OFFSETS, partitions=1, overrides={"cleanup.policy": "compact"}, internal=True)
        shard = await loaded(topics)
        await shard.run(lambda groups: groups.commit(commit(7, "quiet")))
        for offset in range(350):
            await shard.run(lambda groups, offset=offset: groups.commit(commit(offset, "busy")))  # type: ignore[misc]
        await shard.close()
        log_start = shard.partition.log_start
        assert log_start > Offset(200)

    async with single_node(tmp_path, CONFIG) as topics:
        assert topics.partition(CONSUMER_OFFSETS, 0).log_start == log_start
        shard = await loaded(topics)
        fetched = [shard.submit(lambda groups, name=name: groups.fetch(name, None)) for name in ("quiet", "busy")]  # type: ignore[misc]
        offsets = [(await response)["orders"][0].offset for response in fetched]
        assert offsets == [7, 349]
        await shard.close()
