"""The encoding of ordinary ShareFetch messages, written out: a consumer sends one for every few messages.

`read_plain` reads a request of one topic that continues a session and forgets nothing, and returns None for any other;
`write_plain` encodes a response without errors. The generic codec handles the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from uuid import UUID

from millstream.broker.net.response import Buffers
from millstream.broker.subscriptions.lease import Lease
from millstream.protocol.messages.codec import RequestHeader, response_head

_IDS_REMEMBERED: Final = 1024
_ONE_BYTE_MAX: Final = 0x7F
_LIMITS: Final = struct.Struct(">iiiiii")
_ACQUIRE: Final = struct.Struct(">bB")
_INT32: Final = struct.Struct(">i")
_RANGE: Final = struct.Struct(">qq")
_START: Final = struct.Struct(">ihBi")
_PARTITION: Final = struct.Struct(">ihBhBiiB")
_ACQUIRED: Final = struct.Struct(">qqhB")
_UUID_BYTES: Final = 16
_FIRST_WITH_RENEWALS: Final = 2


class AcknowledgedRange(NamedTuple):
    """Acknowledgements of consecutive offsets: one type for all, or one for each."""

    first_offset: int
    last_offset: int
    acknowledge_types: Sequence[int]


class PlainShareFetch(NamedTuple):
    """A request that continues a session."""

    group_id: str
    member_id: str
    epoch: int
    max_wait_ms: int
    max_bytes: int
    max_records: int
    acquire_mode: int
    partitions: list[tuple[UUID, int]]
    acknowledged: dict[tuple[UUID, int], Sequence[AcknowledgedRange]]


def read_plain(frame: memoryview, header: RequestHeader) -> PlainShareFetch | None:
    """Read an ordinary request; None for any other and for a broken one."""
    try:
        return _read(frame, header)
    except (struct.error, IndexError, ValueError):
        return None


def _read(frame: memoryview, header: RequestHeader) -> PlainShareFetch | None:
    group_id, at = _read_name(frame, header.body_at)
    member_id, at = _read_name(frame, at)
    epoch, max_wait_ms, _min_bytes, max_bytes, max_records, _batch_size = _LIMITS.unpack_from(frame, at)
    at += _LIMITS.size
    acquire_mode = is_renewal = 0
    if header.version >= _FIRST_WITH_RENEWALS:
        acquire_mode, is_renewal = _ACQUIRE.unpack_from(frame, at)
        at += _ACQUIRE.size
    topics, at = _read_count(frame, at)
    if is_renewal or topics > 1:
        return None
    partitions: list[tuple[UUID, int]] = []
    acknowledged: dict[tuple[UUID, int], Sequence[AcknowledgedRange]] = {}
    tags = 0
    for _ in range(topics):
        topic_id = _uuid(bytes(frame[at : at + _UUID_BYTES]))
        if not topic_id.int:
            return None
        partition_count, at = _read_count(frame, at + _UUID_BYTES)
        for _ in range(partition_count):
            (index,) = _INT32.unpack_from(frame, at)
            count, at = _read_count(frame, at + 4)
            ranges: list[AcknowledgedRange] = []
            for _ in range(count):
                first, last = _RANGE.unpack_from(frame, at)
                types, at = _read_count(frame, at + _RANGE.size)
                ranges.append(AcknowledgedRange(first, last, list(frame[at : at + types])))
                at += types
                tags |= frame[at]
                at += 1
            partitions.append((topic_id, index))
            if ranges:
                acknowledged[topic_id, index] = ranges
            tags |= frame[at]
            at += 1
        tags |= frame[at]
        at += 1
    forgotten, at = _read_count(frame, at)
    if tags or forgotten or frame[at] or at + 1 != len(frame):
        return None
    return PlainShareFetch(
        group_id, member_id, epoch, max_wait_ms, max_bytes, max_records, acquire_mode, partitions, acknowledged
    )


def _read_count(frame: memoryview, at: int) -> tuple[int, int]:
    """Return the length of a short compact array and where it ends; `ValueError` for null and for a longer one."""
    value = frame[at]
    if not 0 < value <= _ONE_BYTE_MAX:
        raise ValueError
    return value - 1, at + 1


def _read_name(frame: memoryview, at: int) -> tuple[str, int]:
    length, at = _read_count(frame, at)
    return str(frame[at : at + length], "utf-8"), at + length


@lru_cache(maxsize=_IDS_REMEMBERED)
def _uuid(content: bytes) -> UUID:
    return UUID(bytes=content)


def write_plain(
    header: RequestHeader,
    lease_ms: int,
    places: Sequence[tuple[UUID, int]],
    leases: Mapping[tuple[UUID, int], Sequence[Lease]],
    records: Mapping[tuple[UUID, int], bytes],
) -> Buffers:
    """Encode a response without errors about some partitions of one topic, each with what was acquired of it."""
    out = bytearray(_START.pack(0, 0, 0, lease_ms))
    out += b"\x02" + places[0][0].bytes + _compact(len(places)) if places else b"\x01"
    for place in places:
        batches, acquired = records.get(place, b""), leases.get(place, ())
        out += _PARTITION.pack(place[1], 0, 0, 0, 0, -1, -1, 0)
        out += _compact(len(batches)) + batches + _compact(len(acquired))
        for lease in acquired:
            out += _ACQUIRED.pack(lease.first, lease.last, lease.attempt, 0)
        out.append(0)
    # The tags of the topic; no other nodes; the tags of the response.
    out += b"\0\x01\0" if places else b"\x01\0"
    return [response_head(header.api_key, header.version, header.correlation_id, len(out)), out]


def _compact(length: int) -> bytes:
    """Encode a compact length, which is one more than there are."""
    value = length + 1
    if value <= _ONE_BYTE_MAX:
        return value.to_bytes(1, "big")
    encoded = bytearray()
    while value > _ONE_BYTE_MAX:
        encoded.append(value & _ONE_BYTE_MAX | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
