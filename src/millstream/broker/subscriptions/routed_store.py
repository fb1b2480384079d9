"""The state store as a queue sees it: wherever its state is kept, on this node or on another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Final, TypeVar

import msgspec

from millstream.broker.subscriptions.state_coordinator import StateCoordinator
from millstream.broker.subscriptions.state_lane import PASSING, StateLane
from millstream.broker.subscriptions.state_messages import (
    LOAD_KEY,
    WRITE_KEY,
    QueueLoaded,
    QueuesWritten,
    write_load,
    write_writes,
)
from millstream.broker.subscriptions.state_shard import WriteResult
from millstream.broker.subscriptions.state_store import QueueWrite, StoredQueue
from millstream.broker.transactions.peers import Peers
from millstream.core.backoff import Backoff
from millstream.core.errors import CoordinatorUnavailable, FencedLeaderEpoch, ProtocolViolation
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.protocol.wire.refusal import refusal

T = TypeVar("T")

LOAD_S: Final = 30.0
LOADS_AT_ONCE: Final = 16
CLOSE_S: Final = 5.0


class RoutedStateStore:
    """Finds the node that keeps a queue's state, and speaks to it."""

    def __init__(self, local: StateCoordinator, peers: Peers, random: Random, *, me: NodeId) -> None:
        self._local = local
        self._peers = peers
        self._random = random
        self._me = me
        self._lanes: dict[PartitionIndex, StateLane] = {}
        # A node may begin with thousands of queues. Those that wait for a node to come back are not counted.
        self._gate = asyncio.Semaphore(LOADS_AT_ONCE)

    async def close(self) -> None:
        """Let what was written become durable, for a bounded time."""
        await asyncio.gather(*(lane.close(patience_s=CLOSE_S) for lane in self._lanes.values()))

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue back; tries again for a while when nobody answers."""
        backoff = Backoff(self._random)
        deadline = asyncio.get_running_loop().time() + LOAD_S
        while True:
            try:
                await self._local.ensure()
                await self._settled(key, deadline)
                async with self._gate:
                    return await self._load(key, leader_epoch)
            except FencedLeaderEpoch:
                raise
            except PASSING:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await backoff.pause()

    def write(self, write: QueueWrite) -> asyncio.Future[None]:
        """Write in the order of the calls."""
        return self._lane(write.key).write(write)

    def has_room(self, key: QueueKey) -> bool:
        """Whether more may be written."""
        return self._lane(key).has_room

    async def _load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        node = self._leader(self._local.partition_of(key))
        if node == self._me:
            return await self._local.load(key, leader_epoch)
        body = await self._peers.ask_privately(node, LOAD_KEY, write_load(key, leader_epoch))
        answer = _read(body, QueueLoaded)
        if answer.error:
            raise refusal(answer.error, answer.message, about="the state of a queue")
        return StoredQueue(answer.snapshot, answer.sequence)

    async def _settled(self, key: QueueKey, deadline: float) -> None:
        """What this node has written of a queue before has numbers too, so its state is read behind all of that."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._lane(key).settled(key)
        except TimeoutError:
            raise CoordinatorUnavailable("what was written of the queue before is still on its way") from None

    def _lane(self, key: QueueKey) -> StateLane:
        index = self._local.partition_of(key)
        lane = self._lanes.get(index)
        if lane is None:

            async def send(writes: Sequence[QueueWrite]) -> list[WriteResult]:
                return await self._send(index, writes)

            lane = self._lanes[index] = StateLane(send, Backoff(self._random))
        return lane

    async def _send(self, index: PartitionIndex, writes: Sequence[QueueWrite]) -> list[WriteResult]:
        node = self._leader(index)
        if node == self._me:
            return await self._local.write(index, writes)
        body = await self._peers.ask_privately(node, WRITE_KEY, write_writes(index, writes))
        answer = _read(body, QueuesWritten)
        if answer.error:
            raise refusal(answer.error, answer.message, about="the states of queues")
        if len(answer.errors) != len(writes):
            raise ProtocolViolation(f"{len(writes)} writes were answered by {len(answer.errors)}")
        return [refusal(code, message, about="a write of a queue") if code else None for code, message in answer.errors]

    def _leader(self, index: PartitionIndex) -> NodeId:
        node = self._local.leader_of(index)
        if node is None:
            raise CoordinatorUnavailable(f"nobody leads partition {index} of the subscriptions' state now")
        return node


def _read(body: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"the answer about a queue cannot be read: {error}") from error
