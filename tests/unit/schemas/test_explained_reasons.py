from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.client.admin.schemas import explain_reasons
from millstream.core.schema import AVRO, JSON_SCHEMA, PROTOBUF
from millstream.protocol.schemas.formats import SchemaText, check

A: Any = {"name": "a", "type": "long"}
B: Any = {"name": "b", "type": "long"}


def avro(*fields: Any, name: str = "Order") -> str:
    return json.dumps({"type": "record", "name": name, "fields": fields})


def nested(kind: str) -> str:
    return avro(
        {"name": "to", "type": {"type": "record", "name": "Place", "fields": [{"name": "street", "type": kind}]}}
    )


def objects(*required: str, **properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": required})


def message(fields: str) -> str:
    return f'syntax = "proto3"; message Order {{ {fields} }}'


@pytest.mark.parametrize(
    ("kind", "level", "old", "new", "output"),
    [
        (
            *(AVRO, "BACKWARD", avro(A), avro(A, B)),
            "Field b is new and has no default, and messages of version 3 do not have it.",
        ),
        (
            *(AVRO, "FORWARD", avro(A, B), avro(A)),
            "Field b is removed; version 3 has no default for it, and new messages do not have it.",
        ),
        (
            AVRO,
            "BACKWARD",
            nested("int"),
            nested("string"),
            "Field to.street has another type: string does not read int.",
        ),
        (
            *(AVRO, "BACKWARD", avro(A), avro(A, name="Parcel")),
            "The schema: the new schema has another name than the old one (Parcel instead of Order).",
        ),
        (
            *(JSON_SCHEMA, "BACKWARD", objects(a={"type": "string"}), objects("a", a={"type": "string"})),
            "Field a: the new schema has a keyword that the old one lacks (required attribute added).",
        ),
        (
            *(PROTOBUF, "BACKWARD", message("string a = 1; string b = 2;"), message("string a = 1; int32 b = 2;")),
            "Field 2 of Order: a scalar field of the new schema cannot read that of the old one "
            "(field scalar kind changed).",
        ),
    ],
)
def test_a_reason_names_the_field_and_the_change(kind: str, level: str, old: str, new: str, output: str) -> None:
    before, after = (SchemaText(text=text, schema_type=kind, references=(), version=3) for text in (old, new))
    reasons = explain_reasons(check(after, [before], level), new)
    assert reasons.changes == [output]
    assert reasons.rule.startswith(f"It is incompatible with version 3: with compatibility level {level}, ")


def test_another_type_of_schema_is_a_reason() -> None:
    before = SchemaText(text=avro(A), schema_type=AVRO, references=(), version=1)
    after = SchemaText(text=objects(), schema_type=JSON_SCHEMA, references=(), version=2)
    reasons = explain_reasons(check(after, [before], "FULL"), after.text)
    assert reasons.changes == ["Incompatible because of different schema type."]
