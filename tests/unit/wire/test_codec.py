"""Headers and frames, checked against kio's own headers."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.create_topics.v7 import request as create_topics
from kio.schema.types import TopicName
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages import codec
from millstream_testing.api_requests import write_request
from millstream_testing.messages import api_keys, random_message, versions_of


def test_flexible_versions_are_those_of_the_schema() -> None:
    for api_key in api_keys():
        for version in versions_of(api_key):
            request = codec.load_request_class(api_key, version)
            response = codec.load_response_class(api_key, version)
            flexible = codec.is_flexible(api_key, version)
            assert request.__flexible__ == response.__flexible__ == flexible, (api_key, version)
            assert request.__header_schema__.__version__ == (2 if flexible else 1)
            expected = 1 if flexible and api_key != codec.API_VERSIONS_KEY else 0
            assert response.__header_schema__.__version__ == expected


@pytest.mark.parametrize("api_key", [0, 3, 18, 47])
@pytest.mark.parametrize("client_id", [None, "", "librdkafka"])
def test_request_headers_are_decoded_as_kio_encodes_them(api_key: int, client_id: str | None) -> None:
    for version in versions_of(api_key):
        header_class = codec.load_request_class(api_key, version).__header_schema__
        buffer = io.BytesIO()
        written = header_class(
            request_api_key=i16(api_key), request_api_version=i16(version), correlation_id=i32(77), client_id=client_id
        )
        entity_writer(header_class)(buffer, written)
        header = codec.read_request_header(buffer.getvalue() + b"body")
        flexible = codec.is_flexible(api_key, version)
        assert header == (api_key, version, 77, client_id, len(buffer.getvalue()), flexible)
        assert codec.request_head(api_key, version, 77, client_id) == buffer.getvalue()


def test_a_request_is_built_from_plain_values_and_defaults() -> None:
    topic = {"name": "orders", "num_partitions": 3, "configs": [{"name": "retention.ms", "value": None}]}
    built = codec.build_request("create_topics", 7, topics=[topic])
    config = create_topics.CreatableTopicConfig(name="retention.ms", value=None)
    assert built.topics == (
        create_topics.CreatableTopic(
            name=TopicName("orders"),
            num_partitions=i32(3),
            replication_factor=i16(0),
            assignments=(),
            configs=(config,),
        ),
    )
    assert not built.validate_only
    assert codec.build_request("describe_log_dirs", 4).topics is None
    with pytest.raises(KeyError, match="topic"):
        codec.build_request("create_topics", 7, topic="orders")


def test_unknown_versions_and_private_keys_have_readable_headers() -> None:
    head = codec.request_head(codec.API_VERSIONS_KEY, 99, 5, "new client")
    assert codec.read_request_header(head).version == 99
    private = codec.read_request_header(codec.request_head(codec.PRIVATE_KEY_MIN, 0, 6, None))
    assert private.flexible
    assert private.client_id is None


@pytest.mark.parametrize(
    "frame", [b"", b"\0\x03\0\x0d\0\0\0", b"\0\x03\0\x0d\0\0\0\1\0\5abc", b"\0\x03\0\x0d\0\0\0\1\xff\xff"]
)
def test_truncated_headers_are_violations(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        codec.read_request_header(frame)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), api_key=st.sampled_from([2, 3, 8, 11, 18, 19, 32, 47, 60]))
def test_whole_frames_round_trip(seed: int, api_key: int) -> None:
    rng = random.Random(seed)
    for version in versions_of(api_key):
        request = random_message(codec.load_request_class(api_key, version), rng)
        frame = write_request(3, "c", request)
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        header = codec.read_request_header(frame[4:])
        assert header[:4] == (api_key, version, 3, "c")
        assert codec.read_request(api_key, version, frame[4:], header.body_at) == request

        response = random_message(codec.load_response_class(api_key, version), rng)
        encoded = codec.write_response(api_key, version, 4, response)
        assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
        assert codec.read_correlation_id(encoded[4:]) == 4
        assert codec.read_response(api_key, version, encoded[4:]) == response
        header_class = codec.load_response_class(api_key, version).__header_schema__
        assert entity_reader(header_class)(encoded[4:], 0)[0].correlation_id == 4


def test_bodies_are_decoded_from_writable_buffers_too() -> None:
    request = codec.load_request_class(3, 1)(topics=None)
    body = memoryview(bytearray(codec.write_entity(request)))
    assert codec.read_request(3, 1, body, 0) == request


def test_requests_unknown_to_kio_are_violations() -> None:
    with pytest.raises(ProtocolViolation, match="no version 99"):
        codec.load_request_class(3, 99)
    with pytest.raises(ProtocolViolation, match="API 999"):
        codec.load_response_class(999, 0)
    with pytest.raises(ProtocolViolation, match="too short"):
        codec.read_correlation_id(b"\0")


def test_unknown_tags_in_a_response_header_are_skipped() -> None:
    response = codec.load_response_class(12, 4)
    body = codec.write_entity(random_message(response, random.Random(1)))
    frame = b"\0\0\0\1" + b"\x01\x07\x02ab" + body
    assert codec.write_entity(codec.read_response(12, 4, frame)) == body
