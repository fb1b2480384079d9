"""Our encoder produces the same bytes as kio."""

from __future__ import annotations

import importlib
import io
import random
from datetime import timedelta
from typing import Any

import pytest
from kio.serial import entity_writer

from millstream.core.errors import InvalidRequest
from millstream.protocol.messages import codec
from millstream_testing.messages import api_keys, random_message, versions_of


def written_by_kio(message: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(message))(buffer, message)
    return buffer.getvalue()


def test_every_version_of_every_message_is_encoded_as_by_kio() -> None:
    rng = random.Random(11)
    for api_key in api_keys():
        for version in versions_of(api_key):
            for load in (codec.load_request_class, codec.load_response_class):
                message = random_message(load(api_key, version), rng)
                assert codec.write_entity(message) == written_by_kio(message), type(message)


def test_long_strings_and_lists_have_long_lengths() -> None:
    metadata: Any = importlib.import_module("kio.schema.metadata.v13.request")
    for count, length in ((126, 127), (127, 128), (300, 20_000)):
        topics = tuple(metadata.MetadataRequestTopic(topic_id=None, name="x" * length) for _ in range(count))
        message = metadata.MetadataRequest(topics=topics, include_topic_authorized_operations=True)
        assert codec.write_entity(message) == written_by_kio(message)


def test_a_value_that_does_not_fit_is_the_callers_error() -> None:
    request_class = codec.load_request_class(20, 3)
    with pytest.raises(InvalidRequest, match="DeleteTopicsRequest does not fit into version 3"):
        codec.write_entity(request_class(topic_names=("x" * 40_000,), timeout=timedelta(0)))
    with pytest.raises(InvalidRequest, match="does not fit"):
        codec.write_entity(request_class(topic_names=(), timeout=timedelta(days=400)))
