"""The Produce request of a client: batches are sent as they are, uncopied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from millstream.core.errors import InvalidBatch, InvalidTimestamp, MillstreamError, ProtocolViolation, RecordError
from millstream.core.ids import Offset
from millstream.protocol.messages.codec import is_flexible, response_body_at
from millstream.protocol.messages.primitives import Buffer, Reader, Writer
from millstream.protocol.wire.error_codes import error_from_code

PRODUCE_KEY: Final = 0
OLDEST: Final = 3
NEWEST: Final = 12
NEWEST_BY_ID: Final = 13
"""From 13 on topics are named by id, so that nothing is stored in a topic that was recreated under the same name."""


class Produced(NamedTuple):
    """The position of stored batches. `append_time_ms` is -1 unless the topic uses append time."""

    base_offset: Offset
    append_time_ms: int


class ProducedAt(NamedTuple):
    """The result for one partition's batches."""

    topic: str
    partition: int
    response: Produced | MillstreamError


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
    """Encode the body of a request for one partition."""
    return write_produce_many(
        version, {topic: [(partition, batches)]}, acks=acks, timeout_ms=timeout_ms, transactional_id=transactional_id
    )


def write_produce_many(
    version: int,
    topics: Mapping[str, Sequence[tuple[int, Buffer]]],
    *,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None = None,
    ids: Mapping[str, UUID] | None = None,
) -> list[Buffer]:
    """Encode the body of a request for partitions of one node, each with its batches; by topic id if the version has
    it.
    """
    flexible = is_flexible(PRODUCE_KEY, version)
    no_tags = b"\0" if flexible else b""
    writer = Writer(flexible=flexible)
    writer.string(transactional_id)
    writer.int16(acks)
    writer.int32(timeout_ms)
    writer.array_length(len(topics))
    body: list[Buffer] = []
    for topic, partitions in topics.items():
        if version >= NEWEST_BY_ID:
            writer.uuid((ids or {})[topic])
        else:
            writer.string(topic)
        writer.array_length(len(partitions))
        for partition, batches in partitions:
            writer.int32(partition)
            writer.blob_length(len(batches))
            body += (writer.buffer, batches)
            writer = Writer(flexible=flexible, buffer=bytearray(no_tags))
        writer.buffer += no_tags
    body.append(writer.buffer + no_tags)
    return body


def read_produce_response(version: int, frame: memoryview, *, about: str) -> tuple[Produced | MillstreamError, int]:
    """Decode the response for the one partition, and for how many milliseconds the broker throttles the client."""
    responses, throttle_ms = read_produce_responses(version, frame, about=about)
    if len(responses) != 1:
        raise ProtocolViolation("the response to a produce request does not name its one partition")
    return responses[0].response, throttle_ms


def read_produce_responses(
    version: int, frame: memoryview, *, about: str = "", ids: Mapping[str, UUID] | None = None
) -> tuple[list[ProducedAt], int]:
    """Decode the response for every partition, and for how many milliseconds the broker throttles the client."""
    names = {topic_id: name for name, topic_id in (ids or {}).items()} if version >= NEWEST_BY_ID else {}
    reader = Reader(frame, response_body_at(PRODUCE_KEY, version, frame), flexible=is_flexible(PRODUCE_KEY, version))
    results: list[ProducedAt] = []
    for _ in range(reader.array_length()):
        topic = names.get(reader.uuid(), "") if version >= NEWEST_BY_ID else reader.string()
        for _ in range(reader.array_length()):
            partition = reader.int32()
            code = reader.int16()
            produced = Produced(Offset(reader.int64()), reader.int64())
            message, records = _failure(version, reader)
            reader.skip_tags()
            subject = about or f"publish to {topic}-{partition}"
            error = error_from_code(code, message, about=subject) if code else None
            if records and isinstance(error, InvalidBatch | InvalidTimestamp):
                error.records = [RecordError(index, f"{subject}: {reason}") for index, reason in records]
            results.append(ProducedAt(topic, partition, error or produced))
        reader.skip_tags()
    return results, reader.int32()


def _failure(version: int, reader: Reader) -> tuple[str | None, list[RecordError]]:
    if version >= 5:
        reader.int64()
    if version < 8:
        return None, []
    records: list[RecordError] = []
    for _ in range(reader.array_length()):
        records.append(RecordError(reader.int32(), reader.nullable_string() or "the broker refused the record"))
        reader.skip_tags()
    return reader.nullable_string(), records
