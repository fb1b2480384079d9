"""The rows of the ledger: one per event and range of messages, decoded from the deltas in `__subscriptions`.

A delta whose messages differ in something that the ledger distinguishes, such as the time at which they were published,
becomes several rows. Records that repeat others, and queues without a ledger, have none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.subscriptions.frame import PUBLISHED, Frame, is_for_ledger, read_frame
from millstream.broker.subscriptions.lease import POSITION, Delta, DeltaKind
from millstream.broker.subscriptions.state_shard import DELTAS, OVERFLOW, SNAPSHOT, Overflow, QueueRecord, read_record
from millstream.core.errors import CorruptState
from millstream.protocol.records.decoder import UnreadableBatch

_logger = logging.getLogger(__name__)

DELETED: Final = "deleted"
"""The queue was deleted: with its subscription or topic, or to be recreated."""
OVERFLOWED: Final = "overflow"
"""Events were deleted before they had landed; offsets are those of `__subscriptions`."""
UNREADABLE: Final = "unreadable"
"""Records of `__subscriptions` could not be read or decoded; offsets are those of `__subscriptions`."""

_TIME: Final = pa.timestamp("us", tz="UTC")

EVENTS: Final = pa.schema(
    [
        pa.field("topic_id", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("end_offset", pa.int64()),
        pa.field("timestamp", _TIME),
        pa.field("kind", pa.string()),
        pa.field("subscription", pa.string()),
        pa.field("subscription_id", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("worker", pa.string()),
        pa.field("endpoint", pa.string()),
        pa.field("until", _TIME),
        pa.field("published", _TIME),
        pa.field("reason", pa.string()),
        pa.field("letter_topic", pa.string()),
        pa.field("letter_partition", pa.int32()),
        pa.field("letter_offset", pa.int64()),
        pa.field("filter_version", pa.int64()),
        pa.field("leader_epoch", pa.int32()),
        pa.field("sequence", pa.int64()),
        pa.field("row", pa.int32()),
        pa.field("window", pa.binary()),
        pa.field("state_partition", pa.int32()),
        pa.field("state_offset", pa.int64()),
        pa.field("append_day", pa.date32()),
        pa.field("append_hour", pa.int32()),
    ]
)
"""The columns of the table. A range is [offset, end_offset)."""

_FILE: Final = pa.schema([field for field in EVENTS if not field.name.startswith("append_")])
_NAMES: Final = _FILE.names
_LEASES: Final = (DeltaKind.ACQUIRED, DeltaKind.EXTENDED, DeltaKind.RELEASED, DeltaKind.EXPIRED, DeltaKind.PARKED)
_WITHOUT_ROW: Final = frozenset({DeltaKind.LEFT_BEHIND, DeltaKind.LETTER_CLOSED, DeltaKind.PLANNED})
"""Bookkeeping of a queue's storage, which changes no message."""

Row = dict[str, Any]


def decode_events(records: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    rows: list[Row] = []
    columns = (records.column(name).to_pylist() for name in ("offset", "timestamp", "key", "value"))
    for offset, timestamp, key, value in zip(*columns, strict=True):
        place = {"state_partition": partition, "state_offset": offset}
        try:
            decoded = list(_rows_of(read_record(StateRecord(key or b"", value)), timestamp))
        except CorruptState as error:
            _logger.warning("record %d of partition %d is not in the ledger: %s", offset, partition, error)
            decoded = [{"kind": UNREADABLE, "offset": offset, "end_offset": offset + 1, "reason": str(error)}]
            decoded[0] |= {"partition": partition, "topic_id": "", "timestamp": timestamp}
        rows += [row | place for row in decoded]
    return _batch_of(rows)


def unreadable_event(lost: UnreadableBatch, partition: int) -> pa.RecordBatch:
    """Return the event for unreadable offsets of `__subscriptions`; its time is now if theirs is unknown."""
    known = lost.timestamp_ms >= 0
    row = {
        "kind": UNREADABLE,
        "topic_id": "",
        "partition": partition,
        "offset": lost.start,
        "end_offset": lost.end,
        "timestamp": _time(lost.timestamp_ms) if known else datetime.now(UTC),
        "reason": lost.reason,
        "state_partition": partition,
        "state_offset": lost.start,
    }
    return _batch_of([row])


def _batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(name) for row in rows], _FILE.field(name).type) for name in _NAMES]
    return pa.RecordBatch.from_arrays(arrays, schema=_FILE)


def _rows_of(record: QueueRecord, timestamp: Any) -> Iterable[Row]:
    if record.kind == OVERFLOW and record.content is not None:
        overflow = Overflow.read(record.content)
        return [
            {
                "kind": OVERFLOWED,
                "topic_id": "",
                "partition": record.key.partition,
                "offset": overflow.start,
                "end_offset": overflow.end,
                "timestamp": _time(overflow.time_ms),
                "reason": "events were deleted before they had landed",
            }
        ]
    if record.kind == SNAPSHOT and record.content is None:
        key = {"subscription_id": str(record.key.subscription_id), "topic_id": str(record.key.topic_id)}
        whole = {"partition": record.key.partition, "offset": 0, "end_offset": 0, "timestamp": timestamp}
        return [{"kind": DELETED, **key, **whole}]
    if record.kind == DELTAS and record.content and is_for_ledger(record.content):
        return _frame_rows(read_frame(record.content))
    return ()


def _frame_rows(frame: Frame) -> Iterator[Row]:
    header, names = frame.header, frame.names
    shared: Row = {
        "topic_id": str(header.key.topic_id),
        "partition": header.key.partition,
        "subscription": "" if names is None else names.subscription,
        "subscription_id": str(header.key.subscription_id),
        "topic": "" if names is None else names.topic,
        "filter_version": header.filter_version,
        "leader_epoch": header.leader_epoch,
        "sequence": header.sequence,
    }
    number = 0
    for delta in frame.deltas:
        if delta.kind in _WITHOUT_ROW:
            continue
        for row in _delta_rows(delta):
            yield shared | row | {"row": number}
            number += 1
    if not number:
        # A frame without events still has a number, whose absence would be a finding.
        time = frame.deltas[-1].time_ms if frame.deltas else 0
        yield shared | {"kind": "frame", "offset": 0, "end_offset": 0, "timestamp": _time(time), "row": 0}


def _delta_rows(delta: Delta) -> Iterator[Row]:
    row: Row = {
        "kind": delta.kind.name.lower(),
        "offset": delta.first,
        "end_offset": delta.last + 1,
        "timestamp": _time(delta.time_ms),
        "attempt": delta.attempt,
    }
    if delta.worker:
        row |= {"worker": delta.worker, "endpoint": delta.worker.partition("/")[0]}
    if delta.reason:
        row["reason"] = delta.reason
    if delta.kind in _LEASES and delta.due_ms > delta.time_ms:
        row["until"] = _time(delta.due_ms)
    if delta.kind == DeltaKind.SCANNED and delta.extra:
        yield from _published_rows(delta, row)
    elif delta.kind in (DeltaKind.FILTERED, DeltaKind.ABSENT) and delta.extra:
        for start, end in _bit_ranges(delta):
            yield row | {"offset": start, "end_offset": end}
    elif delta.kind == DeltaKind.DEAD_LETTERED and len(delta.extra) >= POSITION.size:
        partition, offset = POSITION.unpack_from(delta.extra)
        topic = delta.extra[POSITION.size :].decode("utf-8", "replace")
        yield row | {"letter_topic": topic, "letter_partition": partition, "letter_offset": offset}
    elif delta.kind == DeltaKind.WINDOW:
        yield row | {"window": delta.extra, "end_offset": delta.first}
    elif delta.kind in (DeltaKind.SOUGHT, DeltaKind.START):
        # `offset` is where the queue continues; the end of a seek is where its scan had reached.
        yield row | {"end_offset": delta.last}
    else:
        yield row


def _published_rows(delta: Delta, row: Row) -> Iterator[Row]:
    """Split scanned messages where the time of their batches differs; offsets without a message have no time."""
    start, after = delta.first, delta.last + 1
    run: Row | None = None
    for end, time_ms in PUBLISHED.iter_unpack(delta.extra):
        end = min(end, after)
        if end <= start:
            continue
        time = _time(time_ms) if time_ms >= 0 else None
        if run is not None and run["published"] == time:
            run["end_offset"] = end
        else:
            if run is not None:
                yield run
            run = row | {"offset": start, "end_offset": end, "published": time}
        start = end
    if run is not None:
        yield run
    if start < after:
        yield row | {"offset": start, "end_offset": after}


def _bit_ranges(delta: Delta) -> list[tuple[int, int]]:
    count = delta.last - delta.first + 1
    bits = np.unpackbits(np.frombuffer(delta.extra, np.uint8), count=count, bitorder="little")
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bits, [0])).astype(np.int8))) + delta.first
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _time(time_ms: int) -> int:
    return time_ms * 1000
