"""The group coordinator of this node: checks requests independently of the state, and finds the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol
from uuid import UUID

from millstream.broker.coordination.runtime import COMPACTED, Coordinator, Runtime, StateTopic, StateTopics
from millstream.broker.coordination.shard import RETRY_FIRST_S, Release
from millstream.broker.coordination.state_machine import Timers
from millstream.broker.groups.consumer.assignor import TopicView
from millstream.broker.groups.consumer.shard import ConsumerTopics
from millstream.broker.groups.requests import (
    CommitRequest,
    CommitResult,
    ConsumerGroupDescription,
    ConsumerHeartbeat,
    FetchedOffsets,
    GroupDescription,
    GroupLimits,
    GroupListing,
    HeartbeatResult,
    JoinRequest,
    JoinResponse,
    LeaveResult,
    LeavingMember,
    MemberRef,
    SettingsOf,
    SyncRequest,
    SyncResponse,
)
from millstream.broker.groups.shard import GroupShard
from millstream.broker.groups.share.group import JOIN_EPOCH, ShareHeartbeat
from millstream.broker.groups.transactional_offsets import PendingProducer, Producer
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import InvalidGroupId, InvalidSessionTimeout, MillstreamError
from millstream.core.ids import NodeId, PartitionIndex, ProducerId
from millstream.core.pipeline import GROUP_TYPE
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition
from millstream.protocol.records.control import Marker

GROUP_ID_CHARACTERS_MAX = 1024

Admit = Callable[[TopicPartition], Awaitable[None]]
"""Asks the coordinator of a transaction whether a partition belongs to it; raises if it does not."""


class GroupTopics(StateTopics, TopicView, Protocol):
    """The topics that the coordinator needs: the one that stores its state, and those that groups assign."""


class GroupCoordinator(Coordinator[GroupShard]):
    """Consumer groups and their offsets, stored in `__consumer_offsets`."""

    def __init__(
        self,
        topics: GroupTopics,
        config: Config,
        clock: Clock,
        *,
        pipeline_of: Callable[[str], str | None] = lambda _group_id: None,
        settings_of: SettingsOf = lambda _group_id: {},
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        """`pipeline_of` returns the pipeline whose group this is, if any; `settings_of` returns the group's own
        settings.
        """
        self._topics = topics
        self._pipeline_of = pipeline_of
        self._consumer_topics = ConsumerTopics.of(topics)
        self._clock = clock
        self._limits = GroupLimits(
            session_min_ms=config.group_session_min_ms,
            session_max_ms=config.group_session_max_ms,
            initial_delay_ms=config.group_initial_delay_ms,
            members_max=config.group_members_max,
            consumer_session_ms=config.group_consumer_session_ms,
            consumer_heartbeat_ms=config.group_consumer_heartbeat_ms,
            offsets_retention_ms=config.offsets_retention_ms,
            settings_of=settings_of,
        )
        topic = StateTopic(name=CONSUMER_OFFSETS, partitions=config.offsets_partitions, overrides=COMPACTED)
        self._runtime = Runtime(topics, topic, self._make_shard, clock=clock, retry_first_s=retry_first_s)

    def partition_of(self, group_id: str) -> PartitionIndex:
        return self._runtime.partition_of(group_id)

    def leader_of(self, group_id: str) -> NodeId | None:
        return self._runtime.leader_of(group_id)

    async def join(self, request: JoinRequest) -> JoinResponse:
        _check_group_id(request.group_id)
        if request.protocol_type != GROUP_TYPE:
            self._check_not_pipeline_group(request.group_id)
        limits = self._limits
        if not limits.session_min_ms <= request.session_timeout_ms <= limits.session_max_ms:
            raise InvalidSessionTimeout(
                f"a session timeout must be {limits.session_min_ms} to {limits.session_max_ms} ms, "
                f"not {request.session_timeout_ms}"
            )
        return await self._runtime.run(request.group_id, lambda shard: shard.join(request))

    def _check_not_pipeline_group(self, group_id: str) -> None:
        """Refuse a consumer in the group of a pipeline: it would move its offsets, and the pipeline would skip or
        repeat messages.
        """
        pipeline = self._pipeline_of(group_id)
        if pipeline is not None:
            raise InvalidGroupId(f"group {group_id!r} belongs to pipeline {pipeline!r}; consumers use another one")

    async def sync(self, request: SyncRequest) -> SyncResponse:
        """Return a member's assignment once the group leader has supplied it and it is durable."""
        _check_group_id(request.member.group_id)
        return await self._runtime.run(request.member.group_id, lambda shard: shard.sync(request))

    async def heartbeat(self, who: MemberRef) -> None:
        _check_group_id(who.group_id)
        await self._runtime.run(who.group_id, lambda shard: shard.heartbeat(who), pure=True)

    async def consumer_heartbeat(self, request: ConsumerHeartbeat) -> HeartbeatResult:
        _check_length(request.group_id)
        if request.epoch == JOIN_EPOCH:
            self._check_not_pipeline_group(request.group_id)
        return await self._runtime.run(request.group_id, lambda shard: shard.consumer_heartbeat(request), pure=True)

    async def share_heartbeat(self, request: ShareHeartbeat) -> HeartbeatResult:
        _check_length(request.group_id)
        if request.epoch == JOIN_EPOCH:
            self._check_not_pipeline_group(request.group_id)
        return await self._runtime.run(request.group_id, lambda shard: shard.shares.heartbeat(request), pure=True)

    async def describe_share_group(self, group_id: str) -> ConsumerGroupDescription:
        _check_group_id(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.shares.describe(group_id), pure=True)

    def share_topics(self, group_id: str) -> frozenset[str]:
        """Return the topics that the members of a share group subscribe to, if this node coordinates it."""
        states = [shard.state for shard in self._runtime.shards if shard.state is not None]
        groups = [group for state in states if (group := state.shares.get(group_id)) is not None]
        return frozenset().union(*(group.topics() for group in groups))

    async def open_share_group(self, group_id: str) -> ConsumerGroupDescription:
        """Describe a share group, creating an empty one if it does not exist."""
        _check_group_id(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.shares.open(group_id), pure=True)

    async def leave(self, group_id: str, leavers: Sequence[LeavingMember]) -> list[LeaveResult]:
        _check_group_id(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.leave(group_id, leavers))

    async def commit(self, request: CommitRequest) -> CommitResult:
        """Store offsets; return when they are durable."""
        # Kafka lets consumers outside any group commit under an empty id.
        _check_length(request.member.group_id)
        return await self._runtime.run(request.member.group_id, lambda shard: shard.commit(request), pure=True)

    def commit_now(self, request: CommitRequest, release: Release[CommitResult]) -> bool:
        """Store offsets, and pass on the response when they are durable; return False if `commit` must be awaited."""
        group_id = request.member.group_id
        _check_length(group_id)
        return self._runtime.call(group_id, lambda shard: shard.commit(request), release, pure=True)

    async def commit_in_transaction(
        self, request: CommitRequest, producer_id: ProducerId, epoch: int, *, admit: Admit, adds: bool = False
    ) -> CommitResult:
        """Store offsets that take effect when the transaction commits, provided that `admit` accepts it.

        `admit` is asked about the partition of the offsets topic, and raises if the transaction does not hold it. With
        `adds` it adds that partition, and may wait for the previous transaction to end first; the marker of this one
        would have a later epoch, so no guard is needed in the meantime.
        """
        group_id = request.member.group_id
        _check_group_id(group_id)
        await self._runtime.ensure()
        shard = self._runtime.shard_of(group_id)
        partition = TopicPartition(CONSUMER_OFFSETS, self._runtime.partition_of(group_id))
        if adds:
            await admit(partition)
        guard = await shard.run(lambda state: state.transactional.acquire_guard(producer_id), pure=True)
        try:
            if not adds:
                await admit(partition)
            producer = Producer(producer_id, epoch, guard)
            return await shard.run(lambda state: state.commit_in_transaction(request, producer), pure=True)
        finally:
            with suppress(MillstreamError):
                released = shard.submit(lambda state: state.transactional.release(guard), pure=True)
                released.add_done_callback(_ignore_result)

    async def end_transaction(self, index: int, marker: Marker) -> None:
        shard = self._runtime.shard_at(PartitionIndex(index))
        await shard.run(lambda state: state.transactional.end(marker), pure=True)

    async def pending_producers(self, index: int) -> list[PendingProducer]:
        """Return the producers with undecided transactions that have committed offsets in one partition of the offsets
        topic.
        """
        shard = self._runtime.shard_at(PartitionIndex(index))
        return await shard.run(lambda state: ([], state.transactional.pending.producers()), pure=True)

    async def fetch(
        self,
        group_id: str,
        partitions: Mapping[str, Iterable[int]] | None,
        *,
        member_id: str | None = None,
        epoch: int = -1,
        require_stable: bool = True,
    ) -> FetchedOffsets:
        """Return committed offsets, of all if `partitions` is None; see `GroupShard.fetch`."""
        _check_length(group_id)
        return await self._runtime.run(
            group_id,
            lambda shard: shard.fetch(
                group_id, partitions, member_id=member_id, epoch=epoch, require_stable=require_stable
            ),
            pure=True,
        )

    async def delete_offsets(
        self, group_id: str, unwanted: Mapping[str, Iterable[int]]
    ) -> Mapping[str, Mapping[int, MillstreamError | None]]:
        _check_group_id(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.delete_offsets(group_id, unwanted), pure=True)

    async def list_groups(self) -> list[GroupListing]:
        responses = [shard.submit(GroupShard.list_groups, pure=True) for shard in self._runtime.shards]
        return [listing for listings in await asyncio.gather(*responses) for listing in listings]

    async def describe(self, group_id: str) -> GroupDescription:
        _check_length(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.describe(group_id), pure=True)

    async def describe_consumer_group(self, group_id: str) -> ConsumerGroupDescription:
        _check_group_id(group_id)
        return await self._runtime.run(group_id, lambda shard: shard.consumers.describe(group_id), pure=True)

    async def delete(self, group_id: str) -> None:
        _check_length(group_id)
        done = False
        while not done:
            done = await self._runtime.run(group_id, lambda shard: shard.delete(group_id), pure=True)
            # Many offsets take many steps; other requests are served between them.
            await asyncio.sleep(0)

    def topic_deleted(self) -> None:
        """Delete the offsets of deleted topics, which are already ignored."""
        for shard in self._runtime.shards:
            if shard.state is not None:
                shard.submit(_sweep_soon, pure=True).add_done_callback(_ignore_result)

    def committed(self) -> Iterable[tuple[str, str, int, int]]:
        for shard in self._runtime.shards:
            if shard.state is not None:
                yield from shard.state.committed()

    def transactional_groups(
        self, topics: Mapping[str, UUID | None], limit: int
    ) -> tuple[dict[int, dict[str, dict[str, dict[int, int]]]], bool]:
        """Return the groups with offsets that transactions have committed, by partition of the offsets topic.

        For each group, return all offsets in some topics, by topic and partition. Topics are given with their ids;
        None stands for the topic that has the name now. If there are more offsets than the limit, none are returned,
        and the second value is True. Partitions that this node does not lead, or is still reading back, are missing.
        """
        states = {index: self._runtime.shard_at(PartitionIndex(index)).state for index, _ in self._runtime.led()}
        groups: dict[int, dict[str, dict[str, dict[int, int]]]] = {
            index: {} for index, state in states.items() if state is not None
        }
        count = 0
        for index, state in states.items():
            for key, offset in () if state is None else state.offsets_of_transactional_groups(topics):
                if count == limit:
                    return {group: {} for group in groups}, True
                groups[index].setdefault(key.group_id, {}).setdefault(key.topic, {})[key.partition] = offset
                count += 1
        return groups, False

    @property
    def partitions(self) -> int:
        """How many partitions the offsets topic has; 0 before the first group."""
        return self._runtime.partitions

    def _make_shard(self, timers: Timers) -> GroupShard:
        return GroupShard(
            timers,
            limits=self._limits,
            clock=self._clock,
            topic_id_of=self._topic_id_of,
            topics=self._consumer_topics,
        )

    def _topic_id_of(self, name: str) -> UUID | None:
        topic = self._topics.get(name)
        return None if topic is None else topic.topic_id


def _sweep_soon(shard: GroupShard) -> tuple[tuple[()], None]:
    shard.sweep_soon()
    return (), None


def _ignore_result(response: asyncio.Future[None]) -> None:
    """Retrieve the exception of a response that no caller awaits, so that asyncio does not log it."""
    if not response.cancelled():
        response.exception()


def _check_length(group_id: str) -> None:
    if len(group_id) > GROUP_ID_CHARACTERS_MAX:
        raise InvalidGroupId(f"a group id has at most {GROUP_ID_CHARACTERS_MAX} characters, not {len(group_id)}")


def _check_group_id(group_id: str) -> None:
    if not group_id:
        raise InvalidGroupId("a group id cannot be empty")
    _check_length(group_id)
