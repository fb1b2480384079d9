"""Requests between nodes for the states of queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from millstream.broker.subscriptions.state_store import QueueWrite
from millstream.core.errors import InvalidRequest
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.protocol.private.message import encode

LOAD_KEY: Final = 32020
WRITE_KEY: Final = 32021


class LoadQueue(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a queue's state on behalf of its leader."""

    subscription_id: bytes
    topic_id: bytes
    partition: int
    leader_epoch: int

    @property
    def key(self) -> QueueKey:
        return _key(self.subscription_id, self.topic_id, self.partition)


class QueueLoaded(msgspec.Struct, frozen=True, array_like=True):
    """The state; `error` is Kafka's code, 0 for success."""

    error: int
    message: str | None
    snapshot: bytes | None = None
    sequence: int = -1


class QueueWriteMessage(msgspec.Struct, frozen=True, array_like=True):
    """One write."""

    subscription_id: bytes
    topic_id: bytes
    partition: int
    leader_epoch: int
    sequence: int
    deltas: bytes

    def read(self) -> QueueWrite:
        """Convert to the store's type."""
        key = _key(self.subscription_id, self.topic_id, self.partition)
        return QueueWrite(key, Epoch(self.leader_epoch), self.sequence, self.deltas)


class WriteQueues(msgspec.Struct, frozen=True, array_like=True):
    """Writes to one partition of the state topic, in order."""

    state_partition: int
    writes: list[QueueWriteMessage]


class QueuesWritten(msgspec.Struct, frozen=True, array_like=True):
    """The results once the writes are durable: one error for all, or one per write."""

    error: int
    message: str | None
    errors: Sequence[tuple[int, str | None]] = ()


def encode_load(key: QueueKey, leader_epoch: Epoch) -> bytes:
    """Encode a request for a queue's state."""
    return encode(LoadQueue(key.subscription_id.bytes, key.topic_id.bytes, key.partition, leader_epoch))


def encode_writes(index: PartitionIndex, writes: Sequence[QueueWrite]) -> bytes:
    content = [
        QueueWriteMessage(
            write.key.subscription_id.bytes,
            write.key.topic_id.bytes,
            write.key.partition,
            write.leader_epoch,
            write.sequence,
            write.deltas,
        )
        for write in writes
    ]
    return encode(WriteQueues(index, content))


def _key(subscription_id: bytes, topic_id: bytes, partition: int) -> QueueKey:
    if len(subscription_id) != 16 or len(topic_id) != 16:
        raise InvalidRequest("the id of a subscription or topic must have 16 bytes")
    return QueueKey(UUID(bytes=subscription_id), UUID(bytes=topic_id), PartitionIndex(partition))
