"""Avro schema resolution: by table, and against Avro's own checker for generated pairs."""

from __future__ import annotations

import json
from typing import Any

import avro.compatibility
import avro.schema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.protocol.schemas.avro import AvroSchema, compare
from millstream.protocol.schemas.formats import InvalidSchema


def kinds(reader: Any, writer: Any) -> list[str]:
    parsed = [AvroSchema.parse(json.dumps(schema)) for schema in (reader, writer)]
    return [difference.kind for difference in compare(*parsed)]


def record(*fields: dict[str, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any = "int", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols), **more}


NODE = record(field("next", ["null", "R"]))

TABLE: list[tuple[Any, Any, list[str]]] = [
    ("long", "int", []),
    ("int", "long", ["TYPE_MISMATCH"]),
    ("double", "long", []),
    ("float", "double", ["TYPE_MISMATCH"]),
    ("string", "bytes", []),
    ("bytes", "string", []),
    ("boolean", "int", ["TYPE_MISMATCH"]),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, []),
    ({"type": "map", "values": "int"}, {"type": "map", "values": "string"}, ["TYPE_MISMATCH"]),
    (["null", "int"], "int", []),
    ("int", ["null", "int"], ["TYPE_MISMATCH"]),
    (["null", "int"], ["null", "int", "string"], ["MISSING_UNION_BRANCH"]),
    (["null", "long"], ["int"], []),
    (record(field("a")), record(), ["READER_FIELD_MISSING_DEFAULT_VALUE"]),
    (record(field("a", default=1)), record(), []),
    (record(), record(field("a")), []),
    (record(field("b", aliases=["a"])), record(field("a")), []),
    (record(name="A"), record(name="B"), ["NAME_MISMATCH"]),
    (record(name="A", aliases=["B"]), record(name="B"), []),
    (record(name="A", namespace="x"), record(name="A", namespace="y"), []),
    (enum("a", "b"), enum("a"), []),
    (enum("a"), enum("a", "b"), ["MISSING_ENUM_SYMBOLS"]),
    (enum("a", default="a"), enum("a", "b"), []),
    ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8}, ["FIXED_SIZE_MISMATCH"]),
    (NODE, NODE, []),
    (record(field("next", ["null", "R"]), field("v")), NODE, ["READER_FIELD_MISSING_DEFAULT_VALUE"]),
]


@pytest.mark.parametrize(("reader", "writer", "expected"), TABLE)
def test_resolution(reader: Any, writer: Any, expected: list[str]) -> None:
    assert kinds(reader, writer) == expected


def test_many_symbols_are_compared_in_linear_time() -> None:
    """With a step for each pair of symbols, this test would time out."""
    before, after = ([f"{letter}{number}" for number in range(60_000)] for letter in "AB")
    assert kinds(enum(*after), enum(*before)) == ["MISSING_ENUM_SYMBOLS"]
    assert kinds(enum(*after, *before), enum(*before)) == []


PRIMITIVES = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])
ENUMS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(lambda symbols: enum(*symbols))
FIXED = st.sampled_from([4, 8]).map(lambda size: {"type": "fixed", "name": "F", "size": size})


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = inner.map(lambda items: {"type": "array", "items": items})
    maps = inner.map(lambda values: {"type": "map", "values": values})
    unions = st.lists(PRIMITIVES, min_size=1, max_size=3, unique=True)
    return arrays | maps | unions


# Named types once each, since a schema cannot define a name twice.
TYPES = st.one_of(PRIMITIVES, _containers(PRIMITIVES), _containers(_containers(PRIMITIVES)))


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from("pqrs"), max_size=3, unique=True))
    made = []
    for index, name in enumerate(names):
        kind = draw(TYPES if index else st.one_of(TYPES, ENUMS, FIXED))
        made.append(field(name, kind, **({"default": None} if draw(st.booleans()) and kind == "null" else {})))
    return record(*made)


@settings(max_examples=400, deadline=None)
@given(reader=st.one_of(TYPES, ENUMS, FIXED, records()), writer=st.one_of(TYPES, ENUMS, FIXED, records()))
def test_decisions_agree_with_avros_own_library(reader: Any, writer: Any) -> None:
    theirs = avro.compatibility.ReaderWriterCompatibilityChecker().get_compatibility(  # type: ignore[no-untyped-call]
        avro.schema.make_avsc_object(reader), avro.schema.make_avsc_object(writer)
    )
    is_compatible = theirs.compatibility is avro.compatibility.SchemaCompatibilityType.compatible
    assert (not kinds(reader, writer)) == is_compatible


def test_text_is_printed_as_java_prints_it() -> None:
    text = """{"fields": [{"type": {"type": "string"}, "name": "a", "default": "x", "custom": 1},
        {"name": "b", "type": {"type": "enum", "name": "E", "namespace": "y", "symbols": ["Q"]}},
        {"name": "c", "type": ["null", "y.E", "x.R"], "doc": "d", "order": "ignore"}],
        "name": "R", "type": "record", "namespace": "x", "aliases": ["Old", "z.Older"], "doc": "it"}"""
    assert AvroSchema.parse(text).canonical() == (
        '{"type":"record","name":"R","namespace":"x","doc":"it","fields":[{"name":"a","type":"string","default":"x",'
        '"custom":1},{"name":"b","type":{"type":"enum","name":"E","namespace":"y","symbols":["Q"]}},{"name":"c",'
        '"type":["null","y.E","R"],"doc":"d","order":"ignore"}],"aliases":["Old","z.Older"]}'
    )


INVALID: list[Any] = [
    {"type": "record", "name": "1a", "fields": []},
    {"type": "record", "fields": []},
    {"type": "record", "name": "A"},
    record(field("a"), field("a")),
    record(field("a", "nothing")),
    record(field("a", default="one")),
    record(field("a", default=2**31)),
    record(field("a", ["null", "int"], default="x")),
    ["int", "int"],
    ["int", ["string"]],
    enum("a", "a"),
    enum("a", default="b"),
    {"type": "fixed", "name": "F", "size": -1},
    {"type": "array"},
    7,
]


@pytest.mark.parametrize("schema", INVALID)
def test_invalid_schemas_are_rejected(schema: Any) -> None:
    with pytest.raises(InvalidSchema):
        AvroSchema.parse(json.dumps(schema))
