"""The records of `__subscriptions`: snapshots of queues, and the deltas that follow them."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from uuid import UUID

from millstream.broker.coordination.state import StateRecord
from millstream.core.errors import CorruptState
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.subscription import QueueKey

SNAPSHOT: Final = 0
DELTAS: Final = 1

_KEY: Final = struct.Struct(">B16s16si")
_HEAD: Final = struct.Struct(">iq")


class QueueRecord(NamedTuple):
    """A snapshot or some deltas of a queue, with the write that they came by."""

    kind: int
    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    content: bytes | None
    """None when the queue is gone."""


def write_record(record: QueueRecord) -> StateRecord:
    """Lay a record out."""
    subscription_id, topic_id, partition = record.key
    key = _KEY.pack(record.kind, subscription_id.bytes, topic_id.bytes, partition)
    if record.content is None:
        return StateRecord(key, None)
    return StateRecord(key, _HEAD.pack(record.leader_epoch, record.sequence) + record.content)


def read_record(record: StateRecord) -> QueueRecord:
    """Read a record; raise `CorruptState` for what is none."""
    try:
        kind, subscription, topic, partition = _KEY.unpack(record.key)
        key = QueueKey(UUID(bytes=subscription), UUID(bytes=topic), PartitionIndex(partition))
        if kind not in (SNAPSHOT, DELTAS):
            raise CorruptState(f"a record of kind {kind} is not known; a newer Millstream may have written it")
        if record.value is None:
            return QueueRecord(kind, key, Epoch(-1), -1, None)
        epoch, sequence = _HEAD.unpack_from(record.value)
    except struct.error as error:
        raise CorruptState(f"a record of a queue cannot be read: {error}") from error
    return QueueRecord(kind, key, Epoch(epoch), sequence, record.value[_HEAD.size :])
