"""The leader's side of replication: fetch sessions, their responses and when they are sent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.follower_fetch import BYTES_MIN, FollowerFetch
from millstream.broker.log.log import Log
from millstream.broker.net.budget import Budget
from millstream.broker.replication.partition import ACKS_LEADER, Partition
from millstream.core.errors import NotLeader, ProtocolViolation, UnknownTopicId
from millstream.core.ids import NO_EPOCH, Epoch, NodeId, Offset, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.wire.replica_fetch import (
    CLOSED_SESSION_EPOCH,
    FETCH_KEY,
    VERSION,
    PartitionKey,
    ReplicaFetch,
    ReplicaPosition,
    ReplicaResponses,
    next_session_epoch,
    read_replica_responses,
    write_replica_fetch,
)
from millstream_testing.batches import encode_values
from millstream_testing.clock import ManualClock
from millstream_testing.logs import memory_store

ME, FOLLOWER, STRANGER = NodeId(1), NodeId(2), NodeId(8)
TOPIC = Topic(name="orders", topic_id=UUID(int=5), partitions=4, replication=2, overrides={}, created_ms=0)
STATE = PartitionState(replicas=(ME, FOLLOWER), leader=ME, leader_epoch=Epoch(4), in_sync=(ME, FOLLOWER))


def key(index: int) -> PartitionKey:
    return TOPIC.topic_id, PartitionIndex(index)


class Leader:
    """A node that leads some partitions, and counts partition look-ups."""

    def __init__(
        self,
        partitions: int = TOPIC.partitions,
        *,
        budget_bytes: int = 1 << 26,
        registrations: dict[NodeId, int] | None = None,
    ) -> None:
        self.store = memory_store(journal_bytes=1 << 20)
        self.partitions = [self._open(index) for index in range(partitions)]
        self.lookups = 0
        self.budget = Budget(budget_bytes)
        ids = iter(range(100, 10_000))
        self.fetch = FollowerFetch(
            self,
            self.budget,
            bytes_max=1 << 22,
            new_id=lambda: next(ids),
            may_follow=lambda node, number: registrations is None or registrations.get(node) == number,
        )

    def _open(self, index: int) -> Partition:
        where = TopicPartition(TOPIC.name, PartitionIndex(index))
        log = self.store.open_log(TOPIC.topic_id, where, TopicSettings(flush="os"))
        partition = Partition(TOPIC, where.partition, log, self.store, alone=False, clock=ManualClock())
        partition.apply(Versioned(STATE, 1), me=ME)
        return partition

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        self.lookups += 1
        if topic_id != TOPIC.topic_id or index >= len(self.partitions):
            raise UnknownTopicId("no such topic")
        return self.partitions[index]

    def write(self, index: int, size: int = 10) -> None:
        self.partitions[index].write(encode_values(b"x" * size), acks=ACKS_LEADER)


class TestStrangers:
    """A fetch reports the follower's position, so only the process that is registered as that node may send it."""

    async def test_an_unregistered_process_gets_nothing_and_no_session(self) -> None:
        leader = Leader(1, registrations={FOLLOWER: 7})
        leader.write(0)
        for node, registration in ((FOLLOWER, 6), (FOLLOWER, -1), (STRANGER, 7)):
            responses = await Fetcher(leader, node, registration=registration).ask({0: at(0)}, wait_ms=60_000)
            assert (responses.session_id, responses.partitions[key(0)].code) == (0, ErrorCode.not_leader_or_follower)
            assert not responses.partitions[key(0)].records
        assert not len(leader.fetch)
        leader.store.close_now()

    async def test_a_follower_keeps_its_session_when_another_process_claims_its_id(self) -> None:
        leader = Leader(1, registrations={FOLLOWER: 7})
        leader.write(0)
        fetcher = Fetcher(leader, registration=7)
        await fetcher.ask({0: at(1, last_epoch=4)})
        await Fetcher(leader, registration=8).ask({0: at(0)})
        assert leader.partitions[0].high_watermark == 1
        leader.write(0)
        assert (await fetcher.ask()).partitions[key(0)].records
        leader.store.close_now()

    async def test_the_session_of_a_replaced_process_ends(self) -> None:
        """An idle follower names no partition; an empty response would make it poll without a pause for ever."""
        registrations = {FOLLOWER: 7}
        leader = Leader(1, registrations=registrations)
        fetcher = Fetcher(leader, registration=7)
        await fetcher.ask({0: at(0)})
        registrations[FOLLOWER] = 8
        assert (await fetcher.ask(wait_ms=60_000)).code == ErrorCode.fetch_session_id_not_found
        leader.store.close_now()


class Fetcher:
    """A follower's session, as encoded on the wire."""

    def __init__(self, leader: Leader, node: NodeId = FOLLOWER, *, registration: int = 1) -> None:
        self.leader = leader
        self.registration = registration
        self.node = node
        self.session_id = 0
        self.epoch = 0
        self.client = ClientInfo(connection_id=1, host="127.0.0.1")

    async def ask(
        self,
        positions: dict[int, ReplicaPosition] | None = None,
        *,
        wait_ms: int = 0,
        forgotten: tuple[int, ...] = (),
        max_bytes: int = 1 << 22,
    ) -> ReplicaResponses:
        fetch = ReplicaFetch(
            node=self.node,
            registration=self.registration,
            session_id=self.session_id,
            session_epoch=self.epoch,
            max_wait_ms=wait_ms,
            max_bytes=max_bytes,
            positions={key(index): position for index, position in (positions or {}).items()},
            forgotten=[key(index) for index in forgotten],
        )
        header = RequestHeader(FETCH_KEY, VERSION, 1, None, 0, True)
        response = self.leader.fetch.handle_frame(memoryview(write_replica_fetch(fetch)), header, self.client)
        pieces = await response if inspect.isawaitable(response) else response
        assert isinstance(pieces, list)
        responses = read_replica_responses(memoryview(b"".join(map(bytes, pieces)))[4:])
        if not responses.code:
            self.session_id, self.epoch = responses.session_id, next_session_epoch(self.epoch)
        return responses


def at(offset: int, *, last_epoch: int = NO_EPOCH, leader_epoch: int = 4) -> ReplicaPosition:
    return ReplicaPosition(Offset(offset), Epoch(last_epoch), Epoch(leader_epoch), Offset(0), 1 << 20)


@pytest.fixture
def leader() -> Iterator[Leader]:
    started = Leader()
    yield started
    started.store.close_now()


class TestResponses:
    async def test_records_up_to_the_log_end_are_returned(self, leader: Leader) -> None:
        leader.write(0)
        leader.write(0)
        assert leader.partitions[0].high_watermark == 0
        responses = await Fetcher(leader).ask({0: at(0)})
        response = responses.partitions[key(0)]
        assert [header.base_offset for header in iterate_headers(response.records)] == [0, 1]
        assert response.high_watermark == 0

    async def test_the_fetch_offset_is_the_followers_position(self, leader: Leader) -> None:
        leader.write(0)
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        responses = await fetcher.ask({0: at(1, last_epoch=4)})
        assert leader.partitions[0].high_watermark == 1
        assert responses.partitions[key(0)].high_watermark == 1

    @pytest.mark.parametrize(
        ("position", "code"),
        [
            (at(0, leader_epoch=3), ErrorCode.fenced_leader_epoch),
            (at(0, leader_epoch=-1), ErrorCode.fenced_leader_epoch),
            (at(0, leader_epoch=5), ErrorCode.unknown_leader_epoch),
        ],
    )
    async def test_only_the_current_epoch_is_accepted(
        self, leader: Leader, position: ReplicaPosition, code: ErrorCode
    ) -> None:
        leader.write(0)
        responses = await Fetcher(leader).ask({0: position})
        assert responses.partitions[key(0)].code == code
        in_sync = leader.partitions[0].in_sync
        assert in_sync is not None
        assert [follower.offset for follower in in_sync.followers] == [-1]

    async def test_a_node_without_a_replica_is_refused(self, leader: Leader) -> None:
        leader.write(0)
        responses = await Fetcher(leader, STRANGER).ask({0: at(0)})
        assert responses.partitions[key(0)].code == ErrorCode.not_leader_or_follower
        assert not responses.partitions[key(0)].records

    async def test_a_diverged_follower_gets_the_diverging_epoch_and_does_not_count(self, leader: Leader) -> None:
        partition = leader.partitions[0]
        leader.write(0)
        partition.apply(Versioned(replace(STATE, leader_epoch=Epoch(7)), 2), me=ME)
        leader.write(0)
        leader.write(0)
        responses = await Fetcher(leader).ask({0: at(3, last_epoch=5, leader_epoch=7)})
        assert responses.partitions[key(0)].diverging == (4, 1)
        responses = await Fetcher(leader).ask({0: at(9, last_epoch=7, leader_epoch=7)})
        assert responses.partitions[key(0)].diverging == (7, 3)
        responses = await Fetcher(leader).ask({0: at(2, last_epoch=9, leader_epoch=7)})
        assert responses.partitions[key(0)].diverging == (7, 3)
        assert partition.high_watermark == 0

    async def test_an_offset_below_the_log_start_is_reported_with_the_log_start(self, leader: Leader) -> None:
        leader.write(0)
        leader.write(0)
        leader.partitions[0].log.delete_before(2)
        responses = await Fetcher(leader).ask({0: at(0)})
        response = responses.partitions[key(0)]
        assert (response.code, response.log_start) == (ErrorCode.offset_out_of_range, 2)

    async def test_one_bad_partition_does_not_block_the_others(self, leader: Leader) -> None:
        leader.write(1)
        responses = await Fetcher(leader).ask({0: at(0, leader_epoch=9), 1: at(0), 99: at(0)})
        assert responses.partitions[key(99)].code == ErrorCode.unknown_topic_id
        assert responses.partitions[key(1)].records

    async def test_only_the_first_partition_may_exceed_the_limit_and_the_others_come_next(self, leader: Leader) -> None:
        for index in range(3):
            leader.write(index, size=1000)
        fetcher = Fetcher(leader)
        positions: dict[int, ReplicaPosition] | None = {index: at(0) for index in range(3)}
        served = []
        for _ in range(3):
            # A fetch that waited for an append would never get a response.
            async with asyncio.timeout(60):
                responses = await fetcher.ask(positions, max_bytes=1500, wait_ms=600_000)
            with_records = [key for key, response in responses.partitions.items() if response.records]
            assert sum(len(response.records) for response in responses.partitions.values()) <= 1500
            served += [index for _, index in with_records]
            positions = {index: at(1, last_epoch=4) for _, index in with_records}
        assert served == [0, 1, 2]

    async def test_a_repair_keeps_to_its_limit_beyond_its_first_partition_too(self, leader: Leader) -> None:
        for index in range(3):
            leader.write(index, size=1000)
        fetcher = Fetcher(leader)
        for max_bytes, count in ((1, 1), (1500, 1), (2500, 2), (9999, 3)):
            fetcher.epoch = CLOSED_SESSION_EPOCH
            positions = {index: at(0, last_epoch=4, leader_epoch=NO_EPOCH) for index in range(3)}
            responses = await fetcher.ask(positions, max_bytes=max_bytes)
            assert [bool(partition.records) for partition in responses.partitions.values()] == [True] * count + [
                False
            ] * (3 - count)

    async def test_an_exhausted_memory_budget_does_not_block_followers(self) -> None:
        leader = Leader(budget_bytes=1000)
        leader.budget.reserve(5000)
        leader.write(0, size=BYTES_MIN // 2)
        responses = await Fetcher(leader).ask({0: at(0)})
        assert len(responses.partitions[key(0)].records) > BYTES_MIN // 2
        leader.store.close_now()

    def test_old_versions_are_refused(self, leader: Leader) -> None:
        with pytest.raises(ProtocolViolation):
            leader.fetch.handle_frame(memoryview(b""), RequestHeader(FETCH_KEY, 12, 1, None, 0, True))


class TestSessions:
    async def test_an_incremental_fetch_names_only_changed_partitions(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        first = await fetcher.ask({index: at(0) for index in range(4)})
        assert len(first.partitions) == 4
        assert not (await fetcher.ask()).partitions
        leader.write(2)
        assert list((await fetcher.ask()).partitions) == [key(2)]
        # The same records are not sent again before the follower has reported its position.
        assert not (await fetcher.ask()).partitions
        assert (await fetcher.ask({2: at(0)})).partitions[key(2)].records

    async def test_idle_partitions_cost_nothing(self) -> None:
        leader = Leader(500)
        fetcher = Fetcher(leader)
        await fetcher.ask({index: at(0) for index in range(500)})
        leader.lookups = 0
        with patch.object(Partition, "read_for_follower", autospec=True, side_effect=NotLeader("looked at")) as read:
            for number in range(5):
                leader.write(7)
                await fetcher.ask({7: at(number, last_epoch=4 if number else -1)})
        # A partition is looked up once; later, only changed ones are visited.
        assert (leader.lookups, read.call_count) == (0, 5)
        leader.store.close_now()

    async def test_a_pipelined_fetch_ends_the_wait_of_the_previous_one(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        first = asyncio.ensure_future(fetcher.ask(wait_ms=60_000))
        await asyncio.sleep(0)
        other = Fetcher(leader)
        other.session_id, other.epoch = fetcher.session_id, fetcher.epoch + 1
        leader.write(0)
        responses = [await other.ask({0: at(0)}), await first]
        assert sorted(len(response.partitions) for response in responses) == [1, 1]

    async def test_two_followers_at_the_same_position_share_a_read(self) -> None:
        leader, third = Leader(1), NodeId(3)
        state = replace(STATE, replicas=(ME, FOLLOWER, third))
        leader.partitions[0].apply(Versioned(state, 2), me=ME)
        for _ in range(3):
            leader.write(0, 1000)
        log = leader.partitions[0].log
        with patch.object(Log, "read", autospec=True, side_effect=Log.read) as read:
            contents = [
                bytes((await Fetcher(leader, node).ask({0: at(0)})).partitions[key(0)].records)
                for node in (FOLLOWER, third, FOLLOWER)
            ]
        assert contents == [bytes(log.read(0, max_bytes=1 << 20, up_to=3))] * 3
        # A third fetch of the same records reads from the disk again.
        assert read.call_count == 2
        leader.store.close_now()

    async def test_a_forgotten_partition_is_not_reported(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0), 1: at(0)})
        await fetcher.ask(forgotten=(0,))
        leader.write(0)
        leader.write(1)
        assert list((await fetcher.ask()).partitions) == [key(1)]

    async def test_a_session_with_a_wrong_epoch_restarts(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        fetcher.epoch += 1
        assert (await fetcher.ask()).code == ErrorCode.invalid_fetch_session_epoch
        other = Fetcher(leader)
        await other.ask({0: at(0)})
        assert (await fetcher.ask()).code == ErrorCode.fetch_session_id_not_found
        assert len(leader.fetch) == 1

    async def test_records_that_do_not_fit_are_sent_next_time(self, leader: Leader) -> None:
        for index in range(4):
            leader.write(index, size=1000)
        fetcher = Fetcher(leader)
        seen: set[PartitionKey] = set()
        responses = await fetcher.ask({index: at(0) for index in range(4)}, max_bytes=1500)
        for _ in range(4):
            seen |= {partition for partition, response in responses.partitions.items() if response.records}
            responses = await fetcher.ask(max_bytes=1500)
        assert seen == {key(index) for index in range(4)}


class TestWaiting:
    async def waits(self, fetcher: Fetcher, then: Callable[[], object]) -> ReplicaResponses:
        """Return the response of a waiting fetch after an event."""
        waiting = asyncio.ensure_future(fetcher.ask(wait_ms=60_000))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        then()
        async with asyncio.timeout(60):
            return await waiting

    async def test_an_append_ends_the_wait(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0), 1: at(0)})
        responses = await self.waits(fetcher, lambda: leader.write(1))
        assert responses.partitions[key(1)].records

    async def test_an_advanced_high_watermark_ends_the_wait(self, leader: Leader) -> None:
        state = replace(STATE, replicas=(ME, FOLLOWER, STRANGER), in_sync=(ME, FOLLOWER, STRANGER))
        leader.partitions[0].apply(Versioned(state, 2), me=ME)
        leader.write(0)
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        await fetcher.ask({0: at(1, last_epoch=4)})

        def other_catches_up() -> None:
            leader.partitions[0].read_for_follower(
                STRANGER, offset=Offset(1), last_epoch=4, leader_epoch=4, max_bytes=0
            )

        responses = await self.waits(fetcher, other_catches_up)
        assert responses.partitions[key(0)].high_watermark == 1
        assert not responses.partitions[key(0)].records

    async def test_a_leader_change_ends_the_wait(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        elected = Versioned(STATE.elected(FOLLOWER), 5)
        responses = await self.waits(fetcher, lambda: leader.partitions[0].apply(elected, me=ME))
        assert responses.partitions[key(0)].code == ErrorCode.not_leader_or_follower

    async def test_a_stopping_node_ends_the_wait(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        assert not (await self.waits(fetcher, leader.fetch.stop)).partitions
        assert not (await fetcher.ask(wait_ms=60_000)).partitions

    async def test_a_new_session_ends_the_wait_of_the_old_one(self, leader: Leader) -> None:
        fetcher = Fetcher(leader)
        await fetcher.ask({0: at(0)})
        waiting = asyncio.ensure_future(fetcher.ask(wait_ms=60_000))
        await asyncio.sleep(0.01)
        await Fetcher(leader).ask({0: at(0)})
        async with asyncio.timeout(60):
            assert (await waiting).code == ErrorCode.fetch_session_id_not_found


async def test_a_departed_follower_is_not_waited_for(leader: Leader) -> None:
    fetcher = Fetcher(leader)
    await fetcher.ask({0: at(0)})
    waiting = asyncio.create_task(fetcher.ask(wait_ms=300_000))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fetcher.client.presence.leave()
    assert not (await asyncio.wait_for(waiting, 60)).partitions
    # The requests that it sent before get a response without a wait as well.
    assert not (await asyncio.wait_for(fetcher.ask(wait_ms=300_000), 60)).partitions
