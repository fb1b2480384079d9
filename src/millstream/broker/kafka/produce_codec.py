"""The encoding of Produce requests and responses, versions 3 to 13.

Ordinary requests have no tagged fields, and `read_plain` reads them with fixed structs, without a call per field. It
returns None for all others, which `read_any` reads or refuses. Likewise, `write` encodes the response for one partition
without a call per field, and leaves every other one to `write_any`. `PipelinedReader` and `write_pipelined` do the same
for many requests of one client that differ only in their records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from millstream.broker.log.log import AppendedRange
from millstream.broker.net.response import Buffers
from millstream.core.errors import RecordError
from millstream.protocol.messages.codec import RequestHeader, response_head
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.records.batch import COMPRESSION_MASK, CONTROL_FLAG, HEADER_BYTES, TRANSACTIONAL_FLAG

FIRST_WITH_LOG_START: Final = 5
FIRST_WITH_MESSAGES: Final = 8
FIRST_WITH_TOPIC_IDS: Final = 13
MESSAGE_CHARACTERS_MAX: Final = 8000
"""A longer error message is cut off, so that it fits into every version, regardless of its characters."""

_PRODUCE: Final = 0
_NULL: Final = -1
# Transactional id, acks, timeout and number of topics; with fixed and with compact lengths.
_START: Final = struct.Struct(">hhii")
_COMPACT_START: Final = struct.Struct(">BhiB")
# The same behind a transactional id.
_REST: Final = struct.Struct(">hii")
_COMPACT_REST: Final = struct.Struct(">hiB")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_PARTITION: Final = struct.Struct(">ii")
_OUTCOME: Final = struct.Struct(">ihqq")
_OUTCOME_WITH_START: Final = struct.Struct(">ihqqq")
# Size and correlation id of a response; the throttle time with the empty tags of the topic before and of all behind it.
_HEAD: Final = struct.Struct(">ii")
_TAGS_AND_THROTTLE: Final = struct.Struct(">xix")
_UUID_BYTES: Final = 16
FLAGS_AT: Final = 22
"""The lower byte of a batch's attributes, which holds the codec and all flags."""
NOT_PLAIN: Final = COMPRESSION_MASK | TRANSACTIONAL_FLAG | CONTROL_FLAG
PIPELINED_MAX: Final = 128
"""How many requests are handled in one step, at the most."""
# Where the fixed fields of a request's header are.
_CORRELATION_AT: Final = 4
_CLIENT_AT: Final = 8
# The tags of partition, topic and request.
_CLOSING_TAGS: Final = b"\0\0\0"
_ONE_BYTE_MAX: Final = 0x7F
_TOPICS_REMEMBERED: Final = 1000


class Portion:
    """The records of a request for one partition, and their outcome."""

    __slots__ = (
        "appended",
        "code",
        "flags",
        "index",
        "is_checked",
        "is_of_node",
        "message",
        "record_errors",
        "records",
        "topic",
    )

    def __init__(self, topic: str | UUID, index: int, records: memoryview | None) -> None:
        self.topic = topic
        self.index = index
        self.records = records
        self.flags = records[FLAGS_AT] if records is not None and len(records) > FLAGS_AT else 0
        """The codec and flags of the first batch; the log rejects a batch that is too short."""
        self.is_checked = False
        """Whether every record is known to have a key."""
        self.is_of_node = False
        """Whether a node of this cluster sends them, which may write to the audit log."""
        self.appended: AppendedRange | None = None
        self.code = ErrorCode.none
        self.message: str | None = None
        self.record_errors: Sequence[RecordError] = ()
        """The records for which the batch was refused, if it is only some of them."""

    def fail(self, code: ErrorCode, message: str) -> None:
        """Record why nothing was stored, or why the outcome is unknown."""
        self.code = code
        self.message = message[:MESSAGE_CHARACTERS_MAX]
        self.appended = None


class Request(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    portions: list[Portion]

    def keep_records(self) -> None:
        """Copy the records, as the memory of the request is used for another one once it has been handled."""
        for portion in self.portions:
            if portion.records is not None:
                portion.records = memoryview(bytearray(portion.records))


# -- reading ------------------------------------------------------------------------------------------------


# A request is read as a whole before anything is done, so that a malformed one leaves no trace.


def read_plain(frame: memoryview, header: RequestHeader) -> Request | None:
    """Read a request without tagged fields; None for any other and for a broken one."""
    try:
        if header.flexible:
            return _read_compact(frame, header.body_at, by_id=header.version >= FIRST_WITH_TOPIC_IDS)
        return _read_fixed(frame, header.body_at)
    except (struct.error, IndexError, ValueError):
        return None


def _read_fixed(frame: memoryview, at: int) -> Request | None:
    size = len(frame)
    length, acks, timeout_ms, topics = _START.unpack_from(frame, at)
    transactional_id: str | None = None
    if length == _NULL:
        at += _START.size
    else:
        name_at, at = at + 2, at + 2 + length
        acks, timeout_ms, topics = _REST.unpack_from(frame, at)
        transactional_id = str(frame[name_at:at], "utf-8")
        at += _REST.size
    if length < _NULL or topics < 0:
        return None
    portions: list[Portion] = []
    for _ in range(topics):
        (length,) = _INT16.unpack_from(frame, at)
        name_at, at = at + 2, at + 2 + length
        (count,) = _INT32.unpack_from(frame, at)
        if length < 0 or count < 0:
            return None
        topic = str(frame[name_at:at], "utf-8")
        at += 4
        for _ in range(count):
            index, length = _PARTITION.unpack_from(frame, at)
            records_at, at = at + 8, at + 8 + length
            if length < 0 or at > size:
                return None
            portions.append(Portion(topic, index, frame[records_at:at]))
    return Request(transactional_id, acks, timeout_ms, portions)


def _read_compact(frame: memoryview, at: int, *, by_id: bool) -> Request | None:
    size = len(frame)
    length, acks, timeout_ms, topics = _COMPACT_START.unpack_from(frame, at)
    # One more than there are, as for every compact length; 0 is null.
    transactional_id: str | None = None
    if not length:
        at += _COMPACT_START.size
    else:
        transactional_id, at = _read_name(frame, at)
        acks, timeout_ms, topics = _COMPACT_REST.unpack_from(frame, at)
        at += _COMPACT_REST.size
    if not 0 < topics <= _ONE_BYTE_MAX:
        return None
    tags = 0
    portions: list[Portion] = []
    for _ in range(topics - 1):
        topic, at = _read_topic_id(frame, at) if by_id else _read_name(frame, at)
        count, at = _read_length(frame, at)
        for _ in range(count):
            (index,) = _INT32.unpack_from(frame, at)
            length, records_at = _read_length(frame, at + 4)
            at = records_at + length
            if at >= size:
                return None
            portions.append(Portion(topic, index, frame[records_at:at]))
            tags |= frame[at]
            at += 1
        tags |= frame[at]
        at += 1
    return None if tags | frame[at] else Request(transactional_id, acks, timeout_ms, portions)


def _read_topic_id(frame: memoryview, at: int) -> tuple[str | UUID, int]:
    return _uuid(bytes(frame[at : at + _UUID_BYTES])), at + _UUID_BYTES


def _read_name(frame: memoryview, at: int) -> tuple[str, int]:
    length, at = _read_length(frame, at)
    return str(frame[at : at + length], "utf-8"), at + length


def _read_length(frame: memoryview, at: int) -> tuple[int, int]:
    """Return a compact length below 2**28 and where it ends; `ValueError` for null and for a larger one."""
    value = frame[at]
    at += 1
    if value > _ONE_BYTE_MAX:
        value &= _ONE_BYTE_MAX
        for shift in (7, 14, 21):
            byte = frame[at]
            at += 1
            value |= (byte & _ONE_BYTE_MAX) << shift
            if byte <= _ONE_BYTE_MAX:
                break
        else:
            raise ValueError
    if not value:
        raise ValueError
    return value - 1, at


@lru_cache(maxsize=_TOPICS_REMEMBERED)
def _uuid(content: bytes) -> UUID:
    return UUID(bytes=content)


def read_any(frame: memoryview, header: RequestHeader) -> Request:
    """Read any request, or raise `ProtocolViolation`."""
    reader = Reader(frame, header.body_at, flexible=header.flexible)
    by_id = header.version >= FIRST_WITH_TOPIC_IDS
    transactional_id = reader.nullable_string()
    acks = reader.int16()
    timeout_ms = reader.int32()
    portions: list[Portion] = []
    for _ in range(reader.array_length()):
        topic: str | UUID = reader.uuid() if by_id else reader.string()
        for _ in range(reader.array_length()):
            index = reader.int32()
            portions.append(Portion(topic, index, reader.blob()))
            reader.skip_tags()
        reader.skip_tags()
    reader.skip_tags()
    return Request(transactional_id, acks, timeout_ms, portions)


class PipelinedReader:
    """Reads a plain request with one portion, and those behind it that differ from it only in their records."""

    __slots__ = ("_at", "_data", "_flexible", "_frame", "_records_bytes", "correlation_ids", "ends")

    def __init__(self, frame: memoryview, header: RequestHeader, records_bytes: int, data: memoryview, at: int) -> None:
        self._frame = frame
        self._flexible = header.flexible
        self._records_bytes = records_bytes
        self._data = data
        self._at = at - _INT32.size - len(frame)
        self.correlation_ids: list[int] = []
        self.ends: list[int] = []
        """Where each request that was read ends."""

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each request's records, which begin with one plain batch."""
        data, at, size = self._data, self._at, self._records_bytes
        correlation_ids, ends = self.correlation_ids, self.ends
        available, tags = len(data), _CLOSING_TAGS if self._flexible else b""
        records_at = len(self._frame) - len(tags) - size
        kind, shape = bytes(self._frame[:_CORRELATION_AT]), bytes(self._frame[_CLIENT_AT:records_at])
        length = self._encode_length(size)
        if size < HEADER_BYTES or not shape.endswith(length):
            # Bytes that nothing describes follow the request, or a number is longer than it has to be.
            return
        head, before = _pipelined_head(len(shape)), shape[: -len(length)]
        start_at, tags_bytes, last = _INT32.size + records_at, len(tags), available - head.size
        for _ in range(PIPELINED_MAX):
            if at > last:
                return
            frame_bytes, one_kind, correlation_id, one_shape = head.unpack_from(data, at)
            start = at + start_at
            at += _INT32.size + frame_bytes
            end = at - tags_bytes
            if end - start != size:
                size = end - start
                if size < HEADER_BYTES:
                    return
                shape = before + self._encode_length(size)
            if one_shape != shape or one_kind != kind or at > available or data[start + FLAGS_AT] & NOT_PLAIN:
                return
            if tags and data[end:at] != tags:
                return
            correlation_ids.append(correlation_id)
            ends.append(at)
            yield start, end

    def _encode_length(self, size: int) -> bytes:
        if not self._flexible:
            return _INT32.pack(size)
        writer = Writer(flexible=True)
        writer.array_length(size)
        return bytes(writer.buffer)


@lru_cache(maxsize=_TOPICS_REMEMBERED)
def _pipelined_head(shape_bytes: int) -> struct.Struct:
    """Return the size of a request, its API and version, its correlation id, and all that precedes its records."""
    return struct.Struct(f">i4si{shape_bytes}s")


# -- writing ------------------------------------------------------------------------------------------------


def write(header: RequestHeader, portions: list[Portion], throttle_ms: int) -> Buffers:
    portion = portions[0] if len(portions) == 1 else None
    if portion is None or portion.message is not None:
        return write_any(header, portions, throttle_ms)
    flexible = header.flexible
    body = _start_of_one(portion.topic, flexible) + _plain_outcome(header.version, portion)
    # Everything around it, including empty tags, is encoded here at a fraction of the cost of calls.
    if flexible:
        return [_HEAD.pack(len(body) + 11, header.correlation_id) + b"\0" + body + _TAGS_AND_THROTTLE.pack(throttle_ms)]
    return [_HEAD.pack(len(body) + 8, header.correlation_id) + body + _INT32.pack(throttle_ms)]


def write_pipelined(
    header: RequestHeader, portion: Portion, correlation_ids: Sequence[int], base_offsets: Sequence[int]
) -> Buffers:
    """Encode the responses to requests that differ only in their records; they differ only in two numbers."""
    (first,) = write(header, [portion], 0)
    base_at = (
        _HEAD.size + header.flexible + len(_start_of_one(portion.topic, header.flexible)) + _INT32.size + _INT16.size
    )
    size, between, rest = first[: _INT32.size], first[_HEAD.size : base_at], first[base_at + _INT64.size :]
    pack = _pipelined_response(len(between), len(rest)).pack
    return [b"".join(map(pack, repeat(size), correlation_ids, repeat(between), base_offsets, repeat(rest)))]


@lru_cache(maxsize=_TOPICS_REMEMBERED)
def _pipelined_response(between_bytes: int, rest_bytes: int) -> struct.Struct:
    return struct.Struct(f">4si{between_bytes}sq{rest_bytes}s")


@lru_cache(maxsize=_TOPICS_REMEMBERED)
def _start_of_one(topic: str | UUID, flexible: bool) -> bytes:
    """Return an array of one topic with an array of one partition, up to the partition."""
    writer = Writer(flexible=flexible)
    writer.array_length(1)
    _write_topic(writer, topic)
    writer.array_length(1)
    return bytes(writer.buffer)


def write_any(header: RequestHeader, portions: list[Portion], throttle_ms: int) -> Buffers:
    version = header.version
    writer = Writer(flexible=header.flexible)
    by_topic: dict[str | UUID, list[Portion]] = {}
    for portion in portions:
        by_topic.setdefault(portion.topic, []).append(portion)
    writer.array_length(len(by_topic))
    for topic, of_topic in by_topic.items():
        _write_topic(writer, topic)
        writer.array_length(len(of_topic))
        for portion in of_topic:
            if portion.message is None:
                writer.buffer += _plain_outcome(version, portion)
            else:
                _write_failure(writer, version, portion)
        writer.no_tags()
    writer.int32(throttle_ms)
    writer.no_tags()
    return [response_head(_PRODUCE, version, header.correlation_id, len(writer.buffer)), writer.buffer]


def _write_topic(writer: Writer, topic: str | UUID) -> None:
    if isinstance(topic, UUID):
        writer.uuid(topic)
    else:
        writer.string(topic)


def _plain_outcome(version: int, portion: Portion) -> bytes:
    """Encode the outcome of a partition without a message; what follows the numbers depends only on the version."""
    appended = portion.appended
    base, _, time_ms, start, _ = (-1, -1, -1, -1, False) if appended is None else appended
    if version >= FIRST_WITH_MESSAGES:
        # An empty list of bad records and no message.
        rest = b"\0\0\0\0\xff\xff" if version == FIRST_WITH_MESSAGES else b"\1\0\0"
        return _OUTCOME_WITH_START.pack(portion.index, portion.code, base, time_ms, start) + rest
    if version >= FIRST_WITH_LOG_START:
        return _OUTCOME_WITH_START.pack(portion.index, portion.code, base, time_ms, start)
    return _OUTCOME.pack(portion.index, portion.code, base, time_ms)


def _write_failure(writer: Writer, version: int, portion: Portion) -> None:
    writer.int32(portion.index)
    writer.int16(portion.code)
    writer.int64(_NULL)
    writer.int64(_NULL)
    if version >= FIRST_WITH_LOG_START:
        writer.int64(_NULL)
    if version >= FIRST_WITH_MESSAGES:
        writer.array_length(len(portion.record_errors))
        for index, message in portion.record_errors:
            writer.int32(index)
            writer.string(message)
            writer.no_tags()
        writer.string(portion.message)
    writer.no_tags()
