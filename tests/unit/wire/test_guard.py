"""The bounds check in front of kio agrees with kio on every message, and refuses harmful bytes."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.serial import entity_reader

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages import codec
from millstream.protocol.messages.guard import BoundedBuffer, guard_of
from millstream_testing.messages import api_keys, random_message, versions_of

METADATA, OFFSET_COMMIT, JOIN_GROUP = 3, 8, 11


def walked(message_class: Any, data: bytes) -> int:
    return guard_of(message_class)(BoundedBuffer(memoryview(data), items_max=1000), 0)


def classes_of(api_key: int) -> list[type[Any]]:
    loaders = (codec.load_request_class, codec.load_response_class)
    return [load(api_key, version) for version in versions_of(api_key) for load in loaders]


def test_it_skips_every_message_exactly_as_kio_reads_it() -> None:
    rng = random.Random(7)
    for api_key in api_keys():
        for message_class in classes_of(api_key):
            message = random_message(message_class, rng)
            data = codec.write_entity(message)
            read, size = entity_reader(message_class)(data, 0)
            assert walked(message_class, data) == size == len(data), message_class
            assert read == message


SERVED = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 32, 37, 42, 44, 47, 60]


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), api_key=st.sampled_from(SERVED))
def test_damaged_messages_are_decoded_or_refused(seed: int, api_key: int) -> None:
    rng = random.Random(seed)
    version = rng.choice(versions_of(api_key))
    message = random_message(codec.load_request_class(api_key, version), rng)
    data = bytearray(codec.write_entity(message))
    for _ in range(rng.randrange(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    del data[rng.randrange(len(data) // 2, len(data) + 1) :]
    with contextlib.suppress(ProtocolViolation):
        codec.read_request(api_key, version, bytes(data), 0)


@given(data=st.binary(max_size=80), api_key=st.sampled_from(SERVED), newest=st.booleans())
def test_random_bytes_are_decoded_or_refused(data: bytes, api_key: int, newest: bool) -> None:
    version = versions_of(api_key)[-1 if newest else 0]
    with contextlib.suppress(ProtocolViolation):
        codec.read_request(api_key, version, data, 0)


HOSTILE = {
    "an array of four billion, compact": (METADATA, 13, b"\xff\xff\xff\xff\x0f"),
    "an array of two billion, compact": (METADATA, 13, b"\xff\xff\xff\xff\x07"),
    "a varint without end": (METADATA, 13, b"\xff" * 12),
    "an array of two billion": (METADATA, 0, struct.pack(">i", 2**31 - 1)),
    "an array of minus two": (METADATA, 1, struct.pack(">i", -2)),
    "an array inside an array": (OFFSET_COMMIT, 8, b"\x02g\0\0\0\0\x02m\0\x02\x02t\xff\xff\xff\xff\x0f"),
    "a string of minus five": (METADATA, 1, struct.pack(">ih", 1, -5)),
    "a string beyond the end": (METADATA, 1, struct.pack(">ih", 1, 300) + b"short"),
    "a null where none may be": (METADATA, 1, struct.pack(">ih", 1, -1)),
    "a string that is not UTF-8": (METADATA, 1, struct.pack(">ih", 1, 2) + b"\xff\xfe"),
    "two billion tagged fields": (METADATA, 13, b"\0\0\0\xff\xff\xff\xff\x07"),
    "a tagged field of four billion": (METADATA, 13, b"\0\0\0\x01\x05\xff\xff\xff\xff\x0f"),
    "a time beyond what a clock can hold": (
        OFFSET_COMMIT,
        2,
        struct.pack(">h1sih1sqi", 1, b"g", 1, 1, b"m", 2**63 - 1, 0),
    ),
    "bytes of two billion": (
        JOIN_GROUP,
        0,
        struct.pack(">h1sih0sh1sih1si", 1, b"g", 1, 0, b"", 1, b"c", 1, 1, b"p", 2**31 - 1),
    ),
    "nothing at all": (METADATA, 1, b""),
    "half a length": (METADATA, 1, b"\0\0"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_frames_are_refused(what: str) -> None:
    api_key, version, data = HOSTILE[what]
    with pytest.raises(ProtocolViolation):
        codec.read_request(api_key, version, data, 0)


def test_a_tagged_field_must_have_its_stated_length() -> None:
    # ApiVersions v3 has an array in tagged field 0; the length says 5 bytes, its content takes 1.
    response = codec.load_response_class(18, 3)
    head = b"\0\0\x01\0\0\0\0"
    assert walked(response, head + b"\x01\x00\x01\x01") == len(head) + 4
    with pytest.raises(ProtocolViolation, match="not 5 bytes long"):
        walked(response, head + b"\x01\x00\x05\x01\x00\x00\x00\x00")


def test_too_many_items_are_refused_before_allocation() -> None:
    count = codec.REQUEST_LIMITS.items + 1
    with pytest.raises(ProtocolViolation, match="more items"):
        codec.read_request(METADATA, 1, struct.pack(">i", count) + bytes(2 * count), 0)


def test_an_oversized_body_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="at most"):
        codec.read_request(METADATA, 1, bytes(codec.REQUEST_LIMITS.body_bytes + 1), 0)
