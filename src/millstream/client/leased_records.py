"""Messages out of the batches in which a broker gives them: those that are leased are read, others stepped over.

In plain Python, since a batch holds too few messages to pay for compiled code and a client's start must not wait for
it. Headers are kept as bytes and read when somebody asks for them.
"""

from __future__ import annotations

from typing import Final

from millstream.client.lease import Lease
from millstream.client.message import Message
from millstream.core.errors import CorruptBatch
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.aborted_batches import Aborted, AbortedBatches
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader, check_crc, iterate_whole_headers
from millstream.protocol.records.raw_record import records_section

_VARINT_BYTES_MAX: Final = 10
_NULL: Final = 0x01


def read_leased(
    batches: bytes, leased_ranges: list[LeasedRange], lease: Lease, *, aborted: Aborted = ()
) -> list[Message]:
    """The messages of the leases, in their order; the ranges ascend."""
    messages: list[Message] = []
    left_out = AbortedBatches(aborted)
    waiting = list(reversed(leased_ranges))
    for header in iterate_whole_headers(batches):
        if left_out.holds(header.last_offset, header.attributes, header.producer_id):
            continue
        while waiting and waiting[-1].last < header.base_offset:
            waiting.pop()
        if not waiting:
            break
        if waiting[-1].first > header.last_offset or header.is_control:
            continue
        check_crc(batches, header)
        section = records_section(batches, header)
        try:
            _read_batch(section, header, waiting, lease, messages)
        except IndexError:
            raise CorruptBatch("a record batch ends within a record") from None
    return messages


def _read_batch(
    section: bytes, header: BatchHeader, waiting: list[LeasedRange], lease: Lease, messages: list[Message]
) -> None:
    if header.record_count != header.last_offset_delta + 1:
        _read_sparse(section, header, waiting, lease, messages)
        return
    # Nothing of the batch is missing, so a record's place in it gives its offset.
    offset, at = int(header.base_offset), 0
    while waiting and waiting[-1].first <= header.last_offset:
        leased_range = waiting[-1]
        while offset < leased_range.first:
            length, at = _number(section, at)
            at += length
            offset += 1
        last = min(leased_range.last, header.last_offset)
        at = _read_run(section, header, at, range(offset, last + 1), lease, leased_range.attempt, messages)
        offset = last + 1
        if leased_range.last > header.last_offset:
            return
        waiting.pop()


def _read_run(
    section: bytes,
    header: BatchHeader,
    at: int,
    offsets: range,
    lease: Lease,
    attempt: int,
    messages: list[Message],
) -> int:
    """Read consecutive records; says where the next begins.

    Most numbers take one or two bytes: these are read here, since a call costs more than all the rest.
    """
    base_ms, append_ms = header.base_timestamp_ms, _append_ms(header)
    size, add = len(section), messages.append
    for offset in offsets:
        byte = section[at]
        if byte < 0x80:
            at += 1
            end = at + (byte >> 1)
        elif (second := section[at + 1]) < 0x80:
            at += 2
            end = at + ((byte & 0x7F | second << 7) >> 1)
        else:
            length, at = _number(section, at)
            end = at + length
        byte = section[at + 1]
        at += 2
        if byte == 0:
            delta_ms = 0
        elif byte < 0x80:
            delta_ms = (byte >> 1) ^ -(byte & 1)
        else:
            delta_ms, at = _number(section, at - 1)
        while section[at] > 0x7F:
            at += 1
        byte = section[at + 1]
        at += 2
        if byte == _NULL:
            key = None
        else:
            length = byte >> 1
            if byte > 0x7F:
                length, at = _number(section, at - 1)
            key = section[at : at + length]
            at += length
        byte = section[at]
        if byte == _NULL:
            value, at = None, at + 1
        else:
            if byte < 0x80:
                at += 1
                stop = at + (byte >> 1)
            elif (second := section[at + 1]) < 0x80:
                at += 2
                stop = at + ((byte & 0x7F | second << 7) >> 1)
            else:
                length, at = _number(section, at)
                stop = at + length
            value = section[at:stop]
            at = stop
        if at >= end or end > size:
            raise CorruptBatch(f"the record at offset {offset} is longer than it says")
        timestamp_ms = base_ms + delta_ms if append_ms is None else append_ms
        add(Message(lease, offset, timestamp_ms, key, value, section[at:end], attempt))
        at = end
    return at


def _read_sparse(
    section: bytes, header: BatchHeader, waiting: list[LeasedRange], lease: Lease, messages: list[Message]
) -> None:
    """Read a batch from which compaction has taken records."""
    at, append_ms = 0, _append_ms(header)
    for _ in range(header.record_count):
        length, at = _number(section, at)
        end = at + length
        delta_ms, at = _number(section, at + 1)
        offset_delta, at = _number(section, at)
        offset = header.base_offset + offset_delta
        while waiting and offset > waiting[-1].last:
            waiting.pop()
        if not waiting:
            return
        if offset >= waiting[-1].first:
            key, at = _field(section, at)
            value, at = _field(section, at)
            if at >= end or end > len(section):
                raise CorruptBatch(f"the record at offset {offset} is longer than it says")
            timestamp_ms = header.base_timestamp_ms + delta_ms if append_ms is None else append_ms
            messages.append(Message(lease, offset, timestamp_ms, key, value, section[at:end], waiting[-1].attempt))
        at = end


def _append_ms(header: BatchHeader) -> int | None:
    return header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else None


def _field(section: bytes, at: int) -> tuple[bytes | None, int]:
    length, at = _number(section, at)
    return (None, at) if length < 0 else (section[at : at + length], at + length)


def _number(section: bytes, at: int) -> tuple[int, int]:
    """A zigzag number and the place after it."""
    byte = section[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    second = section[at + 1]
    if second < 0x80:
        value = byte & 0x7F | second << 7
        return (value >> 1) ^ -(value & 1), at + 2
    value, shift = byte & 0x7F | (second & 0x7F) << 7, 14
    for place in range(at + 2, at + _VARINT_BYTES_MAX):
        byte = section[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), place + 1
        shift += 7
    raise CorruptBatch("a number takes more than 64 bits")
