"""Control batches: the markers that end transactions, in Kafka's format.

Key: version i16 | type i16 (0 abort, 1 commit). Value: version i16 | coordinator epoch i32. One record to a batch,
which has the producer's id and epoch, no sequence, and both the transactional and the control flag. Kinds that only a
quorum of controllers writes are passed over.
"""

from __future__ import annotations

import struct

from millstream.core.errors import BatchRejected, CorruptBatch
from millstream.core.marker import Marker
from millstream.protocol.records.batch import BatchHeader, Buffer
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch

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
