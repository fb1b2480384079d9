"""Messages out of the batches in which a broker gives them: those that are leased are read, others stepped over.

In plain Python, since a batch holds too few messages to pay for compiled code and a client's start must not wait for
it. Headers are kept as bytes and read when somebody asks for them.
"""

from __future__ import annotations

from typing import Final

from millstream.client.held import Held
from millstream.client.message import Message
from millstream.model.errors import CorruptBatch
from millstream.records.aborted_batches import Aborted, AbortedBatches
from millstream.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader, check_crc, iterate_whole_headers
from millstream.records.raw_record import records_section
from millstream.wire.subscription_messages import LeasedRange

_VARINT_BYTES_MAX: Final = 10
_NULL: Final = 0x01


def read_leased(batches: bytes, leases: list[LeasedRange], held: Held, *, aborted: Aborted = ()) -> list[Message]:
    """The messages of the leases, in their order; the ranges ascend."""
    messages: list[Message] = []
    left_out = AbortedBatches(aborted)
    waiting = list(reversed(leases))
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
            _read_batch(section, header, waiting, held, messages)
        except IndexError:
            raise CorruptBatch("a record batch ends within a record") from None
    held.messages += messages
    held.left += len(messages)
    return messages


def _read_batch(
    section: bytes, header: BatchHeader, waiting: list[LeasedRange], held: Held, messages: list[Message]
) -> None:
    first, last, attempt, _ = _fields(waiting[-1])
    base_offset, base_ms = header.base_offset, header.base_timestamp_ms
    append_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else None
    at = 0
    for _ in range(header.record_count):
        # Most numbers take one or two bytes: these are read here, since a call costs more than all the rest.
        byte = section[at]
        if byte < 0x80:
            end, at = at + 1 + (byte >> 1), at + 1
        elif (second := section[at + 1]) < 0x80:
            end, at = at + 2 + ((byte & 0x7F | second << 7) >> 1), at + 2
        else:
            length, at = _number(section, at)
            end = at + length
        byte = section[at + 1]
        if byte < 0x80:
            delta_ms, place = (byte >> 1) ^ -(byte & 1), at + 2
        else:
            delta_ms, place = _number(section, at + 1)
        byte = section[place]
        if byte < 0x80:
            offset, place = base_offset + (byte >> 1), place + 1
        else:
            delta, place = _number(section, place)
            offset = base_offset + delta
        at = end
        if offset < first:
            continue
        while offset > last:
            waiting.pop()
            if not waiting:
                return
            first, last, attempt, _ = _fields(waiting[-1])
        if offset < first:
            continue
        byte = section[place]
        if byte == _NULL:
            key, place = None, place + 1
        else:
            length, place = (byte >> 1, place + 1) if byte < 0x80 else _number(section, place)
            key = section[place : place + length]
            place += length
        byte = section[place]
        if byte == _NULL:
            value, place = None, place + 1
        else:
            if byte < 0x80:
                length, place = byte >> 1, place + 1
            elif (second := section[place + 1]) < 0x80:
                length, place = (byte & 0x7F | second << 7) >> 1, place + 2
            else:
                length, place = _number(section, place)
            value = section[place : place + length]
            place += length
        if place >= end or end > len(section):
            raise CorruptBatch(f"the record at offset {offset} is longer than it says")
        timestamp_ms = base_ms + delta_ms if append_ms is None else append_ms
        messages.append(Message(held, offset, timestamp_ms, key, value, section[place:end], attempt))


def _fields(lease: LeasedRange) -> tuple[int, int, int, int]:
    return lease.first, lease.last, lease.attempt, lease.deadline_ms


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
