"""A member of a consumer group as small as it can be: it joins, reads what it is given, commits and leaves."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from millstream.client.admin.groups import assigned_partitions, committed_offsets
from millstream.core.ids import NodeId, Offset
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.primitives import Writer
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.fetching import FetchLimits
from millstream.protocol.wire.refusal import refusal

PROTOCOL_TYPE = "consumer"
STRATEGY = "range"
_SESSION = timedelta(seconds=10)
_FETCH = FetchLimits(1024 * 1024, 100)
_OK = 0
_MEMBER_ID_REQUIRED = 79
_REJOIN = frozenset({22, 25, 27})
"""Illegal generation, unknown member, rebalance in progress: the group goes on with a new generation."""


class DemoMember:
    """Reads one topic for a group. `run` does the work until `stop` is called and tells `changed` of its progress."""

    def __init__(self, client: Client, group: str, topic: str, *, partitions: int, changed: asyncio.Condition) -> None:
        self._client = client
        self._group = group
        self._topic = topic
        self._partitions = partitions
        self._member_id = ""
        self._generation = -1
        self._positions: dict[TopicPartition, Offset] = {}
        self._stopping = False
        self._changed = changed
        self.read: list[tuple[int, Record]] = []

    @property
    def held(self) -> list[int]:
        """The partitions that are this member's now."""
        return sorted(where.partition for where in self._positions)

    async def run(self) -> None:
        """Join, read until told to stop, commit and leave."""
        coordinator = await self._client.coordinator(self._group)
        while not self._stopping:
            await self._join(coordinator)
            while not self._stopping and await self._beat(coordinator):
                await self._fetch()
        await self._commit(coordinator)
        await self._leave(coordinator)

    def stop(self) -> None:
        """Have `run` end in order."""
        self._stopping = True

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _join(self, coordinator: NodeId) -> None:
        """Take part in generations of the group until one of them stands."""
        while True:
            joined = await self._ask_to_join(coordinator)
            if joined.error_code == _MEMBER_ID_REQUIRED:
                self._member_id = joined.member_id
                continue
            if joined.error_code in _REJOIN:
                self._member_id = ""
                continue
            self._check(joined, "join")
            self._member_id, self._generation = joined.member_id, joined.generation_id
            synced = await self._ask_for_assignment(coordinator, joined)
            if synced.error_code in _REJOIN:
                continue
            self._check(synced, "sync")
            break
        committed = await committed_offsets(self._client, self._group)
        given = assigned_partitions(synced.assignment)
        self._positions = {where: Offset(committed.get(where, 0)) for where in given}
        await self._tell()

    async def _ask_to_join(self, coordinator: NodeId) -> Any:
        from kio.schema.join_group.v9 import request

        messages: Any = request
        protocol = messages.JoinGroupRequestProtocol(name=STRATEGY, metadata=_subscription(self._topic))
        asked = messages.JoinGroupRequest(
            group_id=self._group,
            session_timeout=_SESSION,
            rebalance_timeout=_SESSION,
            member_id=self._member_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=(protocol,),
        )
        return await self._client.send(coordinator, asked)

    async def _ask_for_assignment(self, coordinator: NodeId, joined: Any) -> Any:
        """The leader of the group shares the partitions out; the others send nothing and get their share."""
        from kio.schema.sync_group.v5 import request

        messages: Any = request
        shares = []
        if joined.leader == joined.member_id:
            members = sorted(member.member_id for member in joined.members)
            for number, member_id in enumerate(members):
                share = list(range(number, self._partitions, len(members)))
                shares.append(
                    messages.SyncGroupRequestAssignment(member_id=member_id, assignment=_assignment(self._topic, share))
                )
        asked = messages.SyncGroupRequest(
            group_id=self._group,
            generation_id=self._generation,
            member_id=self._member_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=joined.protocol_name,
            assignments=tuple(shares),
        )
        return await self._client.send(coordinator, asked)

    async def _beat(self, coordinator: NodeId) -> bool:
        """Tell the group that this member lives; False when the group is being shared out anew."""
        from kio.schema.heartbeat.v4 import request

        messages: Any = request
        asked = messages.HeartbeatRequest(
            group_id=self._group, generation_id=self._generation, member_id=self._member_id
        )
        answer = await self._client.send(coordinator, asked)
        if answer.error_code in _REJOIN:
            await self._commit(coordinator)
            return False
        self._check(answer, "heartbeat")
        return True

    async def _fetch(self) -> None:
        if not self._positions:
            await asyncio.sleep(_FETCH.max_wait_ms / 1000)
            return
        for where, answer in (await self._client.fetch_many(self._positions, _FETCH)).items():
            records = [one for one in decode_records(answer.records) if one.offset >= self._positions[where]]
            if records:
                self._positions[where] = Offset(records[-1].offset + 1)
                self.read.extend((where.partition, record) for record in records)
        await self._tell()

    async def _commit(self, coordinator: NodeId) -> None:
        from kio.schema.offset_commit.v9 import request

        messages: Any = request
        wanted = tuple(
            messages.OffsetCommitRequestPartition(
                partition_index=where.partition, committed_offset=offset, committed_metadata=""
            )
            for where, offset in self._positions.items()
        )
        asked = messages.OffsetCommitRequest(
            group_id=self._group,
            generation_id_or_member_epoch=self._generation,
            member_id=self._member_id,
            topics=(messages.OffsetCommitRequestTopic(name=self._topic, partitions=wanted),),
        )
        for topic in (await self._client.send(coordinator, asked)).topics:
            for answer in topic.partitions:
                if answer.error_code not in _REJOIN:
                    self._check(answer, "commit")

    async def _leave(self, coordinator: NodeId) -> None:
        from kio.schema.leave_group.v5 import request

        messages: Any = request
        me = messages.MemberIdentity(member_id=self._member_id)
        answer = await self._client.send(coordinator, messages.LeaveGroupRequest(group_id=self._group, members=(me,)))
        self._check(answer, "leave")

    def _check(self, answer: Any, verb: str) -> None:
        if answer.error_code != _OK:
            raise refusal(answer.error_code, None, about=f"{verb} group {self._group!r}")


def _subscription(topic: str) -> bytes:
    """What a member of a group of consumers says when it joins: the topics it wants."""
    writer = Writer(flexible=False)
    writer.int16(0)
    writer.array_length(1)
    writer.string(topic)
    writer.blob(None)
    return bytes(writer.buffer)


def _assignment(topic: str, partitions: list[int]) -> bytes:
    """What the leader of a group gives to a member: the partitions that are its own."""
    writer = Writer(flexible=False)
    writer.int16(0)
    writer.array_length(1)
    writer.string(topic)
    writer.int32_array(partitions)
    writer.blob(None)
    return bytes(writer.buffer)
