"""JSON Schema: which changes are compatible, by table."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.protocol.schemas.formats import InvalidSchema, SchemaText, parse
from millstream.protocol.schemas.json_schema import JsonSchema, compare


def kinds(reader: Any, writer: Any) -> list[str]:
    parsed = [JsonSchema.parse(json.dumps(schema)) for schema in (reader, writer)]
    return [difference.kind for difference in compare(*parsed)]


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def object_of(closed: bool = False, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    return {**made, "additionalProperties": False} if closed else made


LIST = {"$defs": {"n": object_of(next={"$ref": "#/$defs/n"}, v=INTEGER)}, "$ref": "#/$defs/n"}
LONGER = {"$defs": {"n": object_of(next={"$ref": "#/$defs/n"}, v=STRING)}, "$ref": "#/$defs/n"}

TABLE: list[tuple[Any, Any, list[str]]] = [
    (NUMBER, INTEGER, []),
    (INTEGER, NUMBER, ["TYPE_NARROWED"]),
    (STRING, INTEGER, ["TYPE_CHANGED"]),
    ({}, STRING, []),
    (STRING, {}, ["TYPE_CHANGED"]),
    (True, STRING, []),
    (STRING, False, []),
    ({**STRING, "maxLength": 5}, STRING, ["MAX_LENGTH_ADDED"]),
    ({**STRING, "maxLength": 5}, {**STRING, "maxLength": 4}, []),
    ({**STRING, "minLength": 5}, {**STRING, "minLength": 4}, ["MIN_LENGTH_INCREASED"]),
    ({**STRING, "pattern": "a"}, {**STRING, "pattern": "b"}, ["PATTERN_CHANGED"]),
    ({**NUMBER, "maximum": 5}, {**NUMBER, "maximum": 6}, ["MAXIMUM_DECREASED"]),
    ({**NUMBER, "multipleOf": 2}, {**NUMBER, "multipleOf": 4}, []),
    ({**NUMBER, "multipleOf": 4}, {**NUMBER, "multipleOf": 2}, ["MULTIPLE_OF_EXPANDED"]),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, []),
    ({"enum": ["a"]}, {"enum": ["a", "b"]}, ["ENUM_ARRAY_NARROWED"]),
    ({**STRING, "enum": ["a", "b"]}, {**STRING, "enum": ["a"]}, []),
    (object_of(a=STRING, b=STRING), object_of(a=STRING), ["PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"]),
    (object_of(a=STRING, b={}), object_of(a=STRING), []),
    (object_of(a=STRING), object_of(a=STRING, b=STRING), []),
    (object_of(True, a=STRING, b=STRING), object_of(True, a=STRING), []),
    (
        object_of(True, ("b",), a=STRING, b=STRING),
        object_of(True, a=STRING),
        ["REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL"],
    ),
    (object_of(True, ("b",), b={**STRING, "default": ""}), object_of(True), []),
    (object_of(True), object_of(True, a=STRING), ["PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"]),
    (object_of(False, ("a",), a=STRING), object_of(a=STRING), ["REQUIRED_ATTRIBUTE_ADDED"]),
    (object_of(a=STRING), object_of(False, ("a",), a=STRING), []),
    (object_of(True), object_of(), ["ADDITIONAL_PROPERTIES_REMOVED"]),
    ({"type": "array", "items": NUMBER}, {"type": "array", "items": INTEGER}, []),
    ({"type": "array", "items": INTEGER}, {"type": "array", "items": NUMBER}, ["TYPE_NARROWED"]),
    ({"type": "array", "uniqueItems": True}, {"type": "array"}, ["UNIQUE_ITEMS_ADDED"]),
    ({"oneOf": [STRING, INTEGER]}, {"oneOf": [STRING]}, []),
    ({"oneOf": [STRING]}, {"oneOf": [STRING, INTEGER]}, ["SUM_TYPE_NARROWED"]),
    ({"anyOf": [STRING, INTEGER]}, STRING, []),
    ({"type": ["string", "null"]}, STRING, []),
    ({"anyOf": [STRING, INTEGER]}, {"oneOf": [INTEGER, STRING]}, []),
    ({"allOf": [STRING, {"maxLength": 3}]}, {"allOf": [STRING]}, ["PRODUCT_TYPE_EXTENDED"]),
    ({"not": STRING}, {"not": STRING}, []),
    ({"not": {}}, {"not": STRING}, ["NOT_TYPE_EXTENDED"]),
    (LIST, LIST, []),
    (LONGER, LIST, ["TYPE_CHANGED"]),
]


@pytest.mark.parametrize(("reader", "writer", "expected"), TABLE)
def test_changes(reader: Any, writer: Any, expected: list[str]) -> None:
    assert kinds(reader, writer) == expected


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "2019-09", "2020-12"])
def test_every_draft_is_read(draft: str) -> None:
    folder = "draft/" if draft[0] == "2" else ""
    schema = {"$schema": f"http{'s' if folder else ''}://json-schema.org/{folder}{draft}/schema", "type": "object"}
    wider = {**schema, "properties": {"a": {"type": "string"}}}
    assert kinds(schema, wider) == []
    with pytest.raises(InvalidSchema):
        JsonSchema.parse(json.dumps({**schema, "type": "thing"}))


SIMPLE = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "number", "boolean", "null"])},
    optional={"maxLength": st.integers(0, 3), "minimum": st.integers(-2, 2), "enum": st.just([1, "a", None, True])},
)


def _describes_required(schema: Any) -> bool:
    """Confluent's rules look at required properties only where they are described."""
    return set(schema.get("required", ())) <= set(schema["properties"])


OBJECTS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from("ab"), SIMPLE, max_size=2),
        "additionalProperties": st.booleans(),
    },
    optional={"required": st.lists(st.sampled_from("ab"), unique=True, max_size=2)},
).filter(_describes_required)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text("ab", max_size=4))
DOCUMENTS = st.one_of(VALUES, st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.one_of(SIMPLE, OBJECTS), st.one_of(SIMPLE, OBJECTS), st.lists(DOCUMENTS, max_size=8))
def test_a_compatible_reader_accepts_what_the_writer_accepts(reader: Any, writer: Any, documents: list[Any]) -> None:
    """Confluent's rules allow a required property if it has a default, which no document here relies on."""
    if not kinds(reader, writer):
        for document in documents:
            if jsonschema_rs.is_valid(writer, document):
                assert jsonschema_rs.is_valid(reader, document), document


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"pattern": "(["}, "#/pattern"),
        (object_of(a={**STRING, "pattern": "(["}), "#/properties/a/pattern"),
        ({"patternProperties": {"([": {}}}, "#/patternProperties/(["),
        ({"propertyNames": {"pattern": "(["}}, "#/propertyNames/pattern"),
    ],
)
def test_an_invalid_regular_expression_cannot_be_registered(schema: Any, place: str) -> None:
    with pytest.raises(InvalidSchema, match="regex") as caught:
        parse(SchemaText(schema_type="JSON", text=json.dumps(schema)))
    assert place in str(caught.value)
    text = json.dumps(schema).replace("([", r"^\\p{L}(?!x)")
    parse(SchemaText(schema_type="JSON", text=text))


def test_a_schema_cannot_make_a_node_read_a_file_or_an_address(tmp_path: Path) -> None:
    (tmp_path / "draft.json").write_text('{"const": "content"}', encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for draft in ((tmp_path / "draft.json").as_uri(), f"http://127.0.0.1:{server.getsockname()[1]}/draft.json"):
            parse(SchemaText(schema_type="JSON", text=json.dumps({"$schema": draft, "type": "object"})))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
