"""Control batches: the markers that end transactions, in Kafka's format.

Key: version i16 | type i16 (0 abort, 1 commit). Value: version i16 | coordinator epoch i32. One record to a batch,
which has the producer's id and epoch, no sequence, and both the transactional and the control flag. Kinds that only a
quorum of controllers writes are skipped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

from millstream.core.errors import BatchRejected, CorruptBatch, TransactionCoordinatorFenced, UnknownLeaderEpoch
from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.protocol.records.batch import BatchHeader, Buffer
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch

ANY_COORDINATOR: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Commits or aborts a producer's transaction."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    commit: bool
    coordinator_epoch: int
    """The epoch of the coordinator that decided; markers of earlier epochs are rejected."""
    bumps_epoch: bool = False
    """Whether the epoch is above that of the transaction's records, as under transaction version 2 (KIP-890).

    A marker with the epoch of an open transaction is then a late copy of the previous one, and is rejected.
    """
    latest_coordinator: int = ANY_COORDINATOR
    """The latest coordinator epoch that exists, as far as the partition's node knows."""

    def admitted(self, held: int) -> Marker:
        """Return the marker to write on a partition whose last marker of this producer has the coordinator epoch
        `held`.

        An epoch that no coordinator can have yet is rejected until it is known, so that a forged request cannot fence
        the real coordinators. If the partition already holds such an epoch, it is ignored: it was forged, or predates a
        restore of the coordination store from an older copy. Tools that end hanging transactions repeat the held epoch
        and are admitted.
        """
        latest = self.latest_coordinator
        if self.coordinator_epoch > latest:
            if self.coordinator_epoch != held:
                raise UnknownLeaderEpoch(
                    f"no known coordinator has the epoch {self.coordinator_epoch}; the latest has {latest}"
                )
            return replace(self, coordinator_epoch=latest)
        if self.coordinator_epoch < held <= latest:
            raise TransactionCoordinatorFenced(
                f"a coordinator of epoch {held} has ended a transaction of producer {self.producer_id} here; "
                f"the coordinator of epoch {self.coordinator_epoch} is fenced"
            )
        return self


_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_VERSION = 0
_ABORT, _COMMIT = 0, 1


def encode_marker(marker: Marker, now_ms: int) -> bytearray:
    """Encode the batch that ends a transaction."""
    key = _KEY.pack(_VERSION, _COMMIT if marker.commit else _ABORT)
    value = _VALUE.pack(_VERSION, marker.coordinator_epoch)
    return encode_batch(
        [NewRecord(key, value, (), now_ms)],
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        transactional=True,
        control=True,
    )


def read_marker(batch: Buffer, header: BatchHeader) -> Marker | None:
    """Return the marker in a control batch; None for other kinds, and for a batch emptied by compaction."""
    if not header.is_control:
        raise CorruptBatch(f"the batch at offset {header.base_offset} holds no transaction marker")
    try:
        record = next(decode_batch(batch, header), None)
        if record is None:
            return None
        _version, kind = _KEY.unpack_from(record.key or b"")
        if kind not in (_ABORT, _COMMIT):
            return None
        _version, coordinator_epoch = _VALUE.unpack_from(record.value or b"")
    except (BatchRejected, struct.error) as error:
        raise CorruptBatch(f"the control batch at offset {header.base_offset} cannot be read: {error}") from error
    return Marker(
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        commit=kind == _COMMIT,
        coordinator_epoch=coordinator_epoch,
    )
