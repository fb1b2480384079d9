"""Conversion of messages between versions."""

from __future__ import annotations

import importlib
import random
import uuid
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from millstream.protocol.messages.codec import load_request_class, load_response_class, write_entity
from millstream.protocol.messages.shape import default_of, reshape
from millstream_testing.messages import random_message, versions_of


@dataclass(frozen=True)
class MismatchedMessage:
    """A message whose field is a text where others have a list."""

    groups: str = field(default="", metadata={"kafka_type": "string"})


OFFSET_COMMIT = 8
"""Its newest version names topics by id only, so names do not come back."""

LOADERS = [load_request_class, load_response_class]
# Every API except those whose versions differ in structure, which convert themselves.
RESHAPED = [2, 3, 8, 12, 14, 15, 16, 18, 19, 21, 22, 23, 32, 37, 42, 44, 60]


def shared(message: Any, other: Any) -> None:
    """Assert that fields of the same name are equal at every depth; a null may have become a default."""
    for declared in fields(message):
        if not hasattr(other, declared.name):
            continue
        mine, theirs = getattr(message, declared.name), getattr(other, declared.name)
        if mine is None and theirs is not None:
            assert theirs == default_of(next(field for field in fields(other) if field.name == declared.name))
        elif isinstance(mine, tuple):
            assert len(mine) == len(theirs)
            for own, other_part in zip(mine, theirs, strict=True):
                if is_dataclass(own):
                    shared(own, other_part)
                else:
                    assert own == other_part
        elif is_dataclass(mine):
            shared(mine, theirs)
        else:
            assert mine == theirs


@given(seed=st.integers(0, 2**32), api_key=st.sampled_from(RESHAPED), load=st.sampled_from(LOADERS))
def test_every_pair_of_versions_keeps_common_fields(seed: int, api_key: int, load: Any) -> None:
    rng = random.Random(seed)
    versions = versions_of(api_key)
    source, target = load(api_key, rng.choice(versions)), load(api_key, rng.choice(versions))
    message = random_message(source, rng)
    reshaped = reshape(message, target)
    assert type(reshaped) is target
    shared(message, reshaped)
    # The result can be encoded: nothing is null that may not be.
    write_entity(reshaped)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), api_key=st.sampled_from([key for key in RESHAPED if key != OFFSET_COMMIT]))
def test_an_old_request_survives_conversion_up_and_down(seed: int, api_key: int) -> None:
    rng = random.Random(seed)
    for version in versions_of(api_key):
        old, new = load_request_class(api_key, version), load_request_class(api_key, versions_of(api_key)[-1])
        if {field.name for field in fields(old)} <= {field.name for field in fields(new)}:
            message = random_message(old, rng)
            again = reshape(reshape(message, new), old)
            shared(message, again)


def test_the_same_class_is_unchanged() -> None:
    message = load_request_class(3, 13)(topics=None, include_topic_authorized_operations=False)
    assert reshape(message, type(message)) is message


def test_missing_fields_get_the_defaults_of_the_schema() -> None:
    old = load_request_class(3, 0)(topics=())
    new = reshape(old, load_request_class(3, 13))
    assert new.allow_auto_topic_creation is True
    assert new.include_topic_authorized_operations is False
    assert new.topics == ()


def test_nested_messages_are_converted() -> None:
    newest: Any = importlib.import_module("kio.schema.metadata.v13.response")
    partition = newest.MetadataResponsePartition(
        error_code=ErrorCode.none, partition_index=0, leader_id=1, replica_nodes=(1,), isr_nodes=(1,)
    )
    topic = newest.MetadataResponseTopic(
        error_code=ErrorCode.unknown_topic_id, name=None, topic_id=uuid.uuid4(), partitions=(partition,)
    )
    response = newest.MetadataResponse(
        throttle_time=default_of(fields(newest.MetadataResponse)[0]),
        brokers=(),
        topics=(topic,),
        error_code=ErrorCode.none,
    )
    old = reshape(response, load_response_class(3, 0))
    assert old.topics[0].name == ""
    assert old.topics[0].partitions[0].isr_nodes == (1,)
    assert not hasattr(old.topics[0], "topic_id")


def test_a_change_of_structure_is_refused() -> None:
    with pytest.raises(TypeError, match="the API must convert it itself"):
        reshape(load_response_class(15, 0)(groups=()), MismatchedMessage)
