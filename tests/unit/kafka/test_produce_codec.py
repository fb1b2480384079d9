"""The fast Produce codec against the generic one, in every version and for malformed bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.produce_codec import (
    FIRST_WITH_TOPIC_IDS,
    Portion,
    Request,
    read_any,
    read_plain,
    write,
    write_any,
)
from millstream.broker.log.log import AppendedRange
from millstream.core.errors import ProtocolViolation
from millstream.core.ids import Offset
from millstream.protocol.messages.codec import (
    RequestHeader,
    is_flexible,
    read_any_request_header,
    read_request_header,
    read_response,
    request_head,
)
from millstream.protocol.messages.primitives import Writer

versions = st.integers(3, 13)
names = st.text(min_size=1, max_size=200)
records = st.binary(max_size=300)
topics = st.lists(
    st.tuples(names, st.uuids(), st.lists(st.tuples(st.integers(0, 2**31 - 1), records), max_size=4)), max_size=4
)
offsets = st.integers(-1, 2**63 - 1)


def header_of(version: int, body_at: int = 0) -> RequestHeader:
    return RequestHeader(0, version, 7, "c", body_at, is_flexible(0, version))


def request_body(version: int, topic_data: Any, *, transactional_id: str | None = None, acks: int = -1) -> bytes:
    writer = Writer(flexible=is_flexible(0, version))
    writer.string(transactional_id)
    writer.int16(acks)
    writer.int32(30_000)
    writer.array_length(len(topic_data))
    for name, topic_id, partitions in topic_data:
        if version >= FIRST_WITH_TOPIC_IDS:
            writer.uuid(topic_id)
        else:
            writer.string(name)
        writer.array_length(len(partitions))
        for index, content in partitions:
            writer.int32(index)
            writer.blob(content)
            writer.no_tags()
        writer.no_tags()
    writer.no_tags()
    return bytes(writer.buffer)


def reported(request: Request | None) -> Any:
    """The content of a request, comparable."""
    if request is None:
        return None
    portions = [
        (portion.topic, portion.index, None if portion.records is None else bytes(portion.records))
        for portion in request.portions
    ]
    return request.transactional_id, request.acks, request.timeout_ms, portions


def outcome(read_it: Callable[[], Any]) -> Any:
    """The decoded request, or the error."""
    try:
        return read_it()
    except ProtocolViolation as refused:
        return str(refused)


@given(version=versions, topic_data=topics, acks=st.integers(-2, 2), transactional_id=st.none() | st.text(max_size=200))
def test_ordinary_requests_take_the_fast_path_and_decode_equally(
    version: int, topic_data: Any, acks: int, transactional_id: str | None
) -> None:
    frame = memoryview(request_body(version, topic_data, acks=acks, transactional_id=transactional_id))
    header = header_of(version)
    assert reported(read_plain(frame, header)) == reported(read_any(frame, header))


@given(version=versions, topic_data=topics, data=st.data())
def test_malformed_requests_decode_or_fail_equally(version: int, topic_data: Any, data: st.DataObject) -> None:
    transactional_id = data.draw(st.none() | st.text(max_size=3))
    content = bytearray(request_body(version, topic_data, transactional_id=transactional_id))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    frame = memoryview(content)[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    header = header_of(version)
    expected = outcome(lambda: reported(read_any(frame, header)))
    plain = reported(read_plain(frame, header))
    assert plain is None or plain == expected
    assert outcome(lambda: reported(read_plain(frame, header) or read_any(frame, header))) == expected


@given(version=versions, content=st.binary(max_size=80))
def test_arbitrary_bytes_decode_or_fail_equally(version: int, content: bytes) -> None:
    frame, header = memoryview(content), header_of(version)
    plain = reported(read_plain(frame, header))
    assert plain is None or plain == outcome(lambda: reported(read_any(frame, header)))


@given(
    version=versions,
    topic=st.tuples(names, st.uuids()),
    index=st.integers(0, 2**31 - 1),
    appended=st.none() | st.tuples(offsets, offsets, offsets, offsets, st.booleans()),
    code=st.sampled_from([ErrorCode.none, ErrorCode.request_timed_out]),
    throttle_ms=st.integers(0, 2**31 - 1),
)
def test_the_response_for_one_partition_is_encoded_equally(
    version: int, topic: tuple[str, UUID], index: int, appended: Any, code: ErrorCode, throttle_ms: int
) -> None:
    portion = Portion(topic[version >= FIRST_WITH_TOPIC_IDS], index, None)
    portion.appended = None if appended is None else AppendedRange(*appended)
    portion.code = code
    header = header_of(version)
    expected = b"".join(write_any(header, [portion], throttle_ms))
    assert b"".join(write(header, [portion], throttle_ms)) == expected
    assert b"".join(write(header, [portion], throttle_ms)) == expected


@given(version=versions, message=st.text(max_size=20) | st.just("é" * 40_000))
def test_every_response_follows_the_protocol(version: int, message: str) -> None:
    topic_id = UUID(int=9)
    topic: str | UUID = topic_id if version >= FIRST_WITH_TOPIC_IDS else "t"
    good, bad = Portion(topic, 3, None), Portion(topic, 4, None)
    good.appended = AppendedRange(Offset(10), Offset(12), 1000, Offset(5), False)
    bad.fail(ErrorCode.kafka_storage_error, message)
    response = read_response(0, version, b"".join(write(header_of(version), [good, bad], 17))[4:])
    (responded,) = response.responses
    stored, failed = responded.partition_responses
    assert (stored.index, stored.error_code, stored.base_offset) == (3, ErrorCode.none, 10)
    assert (failed.index, failed.error_code, failed.base_offset) == (4, ErrorCode.kafka_storage_error, -1)
    if version >= 8:
        assert failed.error_message is not None
        assert message.startswith(failed.error_message)


@given(
    key=st.sampled_from([0, 1, 3, 17, 18, 22]),
    version=st.integers(0, 14),
    client_id=st.none() | st.text(max_size=40),
    rest=st.binary(max_size=5),
    data=st.data(),
)
def test_request_headers_decode_or_fail_equally(
    key: int, version: int, client_id: str | None, rest: bytes, data: st.DataObject
) -> None:
    frame = bytearray(request_head(key, version, 5, client_id) + rest)
    for _ in range(data.draw(st.integers(0, 2))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame)) | st.just(len(frame))) :]
    expected = outcome(lambda: read_any_request_header(memoryview(frame)))
    assert outcome(lambda: read_request_header(memoryview(frame))) == expected


def test_a_length_beyond_28_bits_is_left_to_the_generic_codec() -> None:
    body = b"\0" + struct.pack(">hi", -1, 1) + b"\x02" + b"\x80\x80\x80\x80\x01"
    assert read_plain(memoryview(body), header_of(9)) is None
