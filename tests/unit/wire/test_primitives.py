"""The hand-written readers and writers round trip, and arbitrary bytes are harmless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidRequest, ProtocolViolation
from millstream.protocol.messages.primitives import Reader, Writer

INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}

VALUES: st.SearchStrategy[list[tuple[str, Any]]] = st.lists(
    st.one_of(
        *(
            st.tuples(st.just(name), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
            for name, bits in INTEGERS.items()
        ),
        st.tuples(st.just("uint32"), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("uvarint"), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("float64"), st.floats(allow_nan=False)),
        st.tuples(st.just("boolean"), st.booleans()),
        st.tuples(st.just("uuid"), st.uuids()),
        st.tuples(st.just("string"), st.text()),
        st.tuples(st.just("int32_array"), st.lists(st.integers(-(2**31), 2**31 - 1))),
    )
)


@given(values=VALUES, flexible=st.booleans())
def test_values_round_trip(values: list[tuple[str, Any]], flexible: bool) -> None:
    writer = Writer(flexible=flexible)
    for name, value in values:
        getattr(writer, name)(value)
    reader = Reader(writer.buffer, flexible=flexible)
    assert [(name, getattr(reader, name)()) for name, _ in values] == values
    assert reader.remaining == 0


@given(text=st.none() | st.text(), content=st.none() | st.binary(), flexible=st.booleans())
def test_nulls_round_trip(text: str | None, content: bytes | None, flexible: bool) -> None:
    writer = Writer(flexible=flexible)
    writer.string(text)
    writer.legacy_string(text)
    writer.blob(content)
    writer.array_length(-1)
    writer.no_tags()
    reader = Reader(writer.buffer, flexible=flexible)
    assert reader.nullable_string() == text
    assert reader.legacy_nullable_string() == text
    assert reader.blob() == content
    assert reader.array_length() == -1
    reader.skip_tags()
    assert reader.remaining == 0


READS: list[Callable[[Reader], object]] = [
    Reader.int8,
    Reader.int16,
    Reader.int32,
    Reader.int64,
    Reader.uint32,
    Reader.float64,
    Reader.boolean,
    Reader.uuid,
    Reader.uvarint,
    Reader.string,
    Reader.nullable_string,
    Reader.blob,
    Reader.array_length,
    Reader.int32_array,
    Reader.skip_tags,
    lambda reader: [(tag, inner.rest()) for tag, inner in reader.tags()],
]


@given(data=st.binary(max_size=64), flexible=st.booleans(), picks=st.lists(st.sampled_from(READS), max_size=20))
def test_arbitrary_bytes_give_values_or_a_violation(
    data: bytes, flexible: bool, picks: list[Callable[[Reader], object]]
) -> None:
    reader = Reader(data, flexible=flexible)
    try:
        for read in picks:
            read(reader)
    except ProtocolViolation:
        pass
    assert 0 <= reader.position <= len(data)


def test_a_reader_stops_at_its_end() -> None:
    reader = Reader(b"\0\0\0\1\0\0\0\2", end=4)
    assert reader.int32() == 1
    with pytest.raises(ProtocolViolation, match="4 bytes are needed, but only 0 are left"):
        reader.int32()


def test_an_array_longer_than_its_bytes_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolViolation, match="2147483647 items"):
        Reader(b"\x7f\xff\xff\xff" + bytes(100), flexible=False).array_length()
    with pytest.raises(ProtocolViolation, match="-2 items"):
        Reader(b"\xff\xff\xff\xfe" + bytes(100), flexible=False).array_length()
    with pytest.raises(ProtocolViolation, match="tagged fields"):
        Reader(b"\xff\xff\xff\xff\x0f").skip_tags()


def test_invalid_utf8_and_unexpected_null_are_violations() -> None:
    with pytest.raises(ProtocolViolation, match="UTF-8"):
        Reader(b"\x03\xff\xfe").string()
    with pytest.raises(ProtocolViolation, match="null"):
        Reader(b"\x00").string()
    with pytest.raises(ProtocolViolation, match="-7 bytes"):
        Reader(b"\xff\xf9", flexible=False).nullable_string()


def test_tags_are_read_one_by_one() -> None:
    reader = Reader(b"\x02\x00\x04\0\0\0\x05\x09\x01\xaa" + b"rest")
    assert [(tag, bytes(inner.rest())) for tag, inner in reader.tags()] == [(0, b"\0\0\0\5"), (9, b"\xaa")]
    assert bytes(reader.rest()) == b"rest"


def test_a_string_too_long_for_an_old_version_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="40000"):
        Writer(flexible=False).string("x" * 40_000)
    with pytest.raises(InvalidRequest, match="40000"):
        Writer().legacy_string("x" * 40_000)


def test_ids_are_sixteen_bytes() -> None:
    writer = Writer()
    writer.uuid(UUID(int=5))
    assert bytes(writer.buffer) == bytes(15) + b"\5"
