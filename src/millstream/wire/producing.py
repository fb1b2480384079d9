"""The Produce request as a client lays it: one partition, whose batches are sent as they are, uncopied."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.model.errors import MillstreamError, ProtocolViolation
from millstream.model.ids import Offset
from millstream.wire.codec import is_flexible, response_body_at
from millstream.wire.primitives import Buffer, Reader, Writer
from millstream.wire.refusal import refusal

PRODUCE_KEY: Final = 0
OLDEST: Final = 3
NEWEST: Final = 12
"""From 13 on topics go by id, which names nothing that a topic created anew would not refuse anyway."""


class Produced(NamedTuple):
    """Where the batches went. `append_time_ms` is -1 unless the topic stamps records itself."""

    base_offset: Offset
    append_time_ms: int


def write_produce(
    version: int,
    topic: str,
    partition: int,
    batches: Buffer,
    *,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None = None,
) -> list[Buffer]:
    """Lay the body of a request for one partition."""
    writer = Writer(flexible=is_flexible(PRODUCE_KEY, version))
    writer.string(transactional_id)
    writer.int16(acks)
    writer.int32(timeout_ms)
    writer.array_length(1)
    writer.string(topic)
    writer.array_length(1)
    writer.int32(partition)
    writer.blob_length(len(batches))
    # The tags of partition, topic and request.
    return [writer.buffer, batches, b"\0\0\0" if writer.flexible else b""]


def read_produced(version: int, frame: memoryview, *, about: str) -> tuple[Produced | MillstreamError, int]:
    """Read the answer for the one partition, and for how many milliseconds the broker asks to be left alone."""
    reader = Reader(frame, response_body_at(PRODUCE_KEY, version, frame), flexible=is_flexible(PRODUCE_KEY, version))
    if reader.array_length() != 1:
        raise ProtocolViolation("the answer to a produce request does not name its one topic")
    reader.string()
    if reader.array_length() != 1:
        raise ProtocolViolation("the answer to a produce request does not name its one partition")
    reader.int32()
    code = reader.int16()
    produced = Produced(Offset(reader.int64()), reader.int64())
    message = _message(version, reader)
    # The tags of the partition and of the topic.
    reader.skip_tags()
    reader.skip_tags()
    throttle_ms = reader.int32()
    return (refusal(code, message, about=about) if code else produced), throttle_ms


def _message(version: int, reader: Reader) -> str | None:
    if version >= 5:
        reader.int64()
    if version < 8:
        return None
    for _ in range(reader.array_length()):
        reader.int32()
        reader.nullable_string()
        reader.skip_tags()
    return reader.nullable_string()
