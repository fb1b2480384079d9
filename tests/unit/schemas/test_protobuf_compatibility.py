"""Protobuf: the printed text, and which changes are compatible."""

from __future__ import annotations

import pytest

from millstream.protocol.schemas.formats import InvalidSchema
from millstream.protocol.schemas.protobuf import ProtobufSchema, compare

SHOP = """syntax = "proto3";
package shop;

import "google/protobuf/timestamp.proto";
import "confluent/meta.proto";
import "address.proto";

option java_package = "com.shop";

message Order {
  reserved 9, 20 to 30;
  reserved "old";
  string id = 1 [(confluent.field_meta) = { doc: "the key" tags: "PII" }];
  optional int32 count = 2;
  repeated double prices = 3 [packed = false];
  map<string, Line> lines = 4;
  oneof payment {
    string card = 5;
    Line voucher = 6;
  }
  google.protobuf.Timestamp at = 7;
  post.Address to = 8;
  message Line {
    State state = 1 [json_name = "STATE"];
  }
  enum State {
    NEW = 0;
    DONE = 1;
  }
}

service Orders {
  rpc Place (Order) returns (stream Order.Line);
}
"""
ADDRESS = ("address.proto", 'syntax = "proto3"; package post; message Address { string city = 1; }')
OLD = """syntax = "proto2";

message Order {
  extensions 100 to max;
  required int32 id = 1 [default = 5];
  optional group Line = 2 {
    optional string text = 1 [default = "a\\"b"];
  }
}
extend Order {
  optional int32 more = 100;
}
"""


def test_text_round_trips_through_the_descriptor() -> None:
    schema = ProtobufSchema.parse(SHOP, [ADDRESS])
    printed = schema.canonical()
    assert printed == SHOP
    again = ProtobufSchema.parse(printed, [ADDRESS])
    assert again.canonical() == printed
    assert again.file == schema.file
    assert ProtobufSchema.parse(schema.serialized(), [ADDRESS]).canonical() == printed


def test_proto2_round_trips_through_the_descriptor() -> None:
    schema = ProtobufSchema.parse(OLD)
    assert schema.canonical() == OLD
    assert ProtobufSchema.parse(schema.serialized()).file == schema.file


@pytest.mark.parametrize(
    "text", ["message", "syntax = 'proto3'; message A { Missing a = 1; }", 'import "none.proto";', "Zm9v"]
)
def test_schemas_that_protoc_rejects_are_rejected(text: str) -> None:
    with pytest.raises(InvalidSchema):
        ProtobufSchema.parse(text)


@pytest.mark.parametrize("name", ["../up.proto", "/etc/passwd", "", ".", "x" * 300])
def test_references_stay_in_their_folder(name: str) -> None:
    with pytest.raises(InvalidSchema):
        ProtobufSchema.parse('syntax = "proto3";', [(name, ADDRESS[1])])


TABLE = [
    ("message A { int64 a = 1; }", "message A { int32 a = 1; }", []),
    ("message A { sint32 a = 1; }", "message A { int32 a = 1; }", ["FIELD_SCALAR_KIND_CHANGED"]),
    ("message A { bytes a = 1; }", "message A { string a = 1; }", []),
    ("message A { string a = 1; }", "message A { int32 a = 1; }", ["FIELD_SCALAR_KIND_CHANGED"]),
    ("message A { B a = 1; } message B {}", "message A { int32 a = 1; } message B {}", ["FIELD_KIND_CHANGED"]),
    ("message A { int32 b = 1; }", "message A { int32 a = 1; }", []),
    ("message A { int32 a = 1; int32 b = 2; }", "message A { int32 a = 1; }", []),
    ("message A {}", "message A { int32 a = 1; }", []),
    ("message A {}", "message A {} message B {}", ["MESSAGE_REMOVED"]),
    ("message B {} message A {}", "message A {}", []),
    ("message A { repeated string a = 1; }", "message A { string a = 1; }", []),
    ("message A { repeated int32 a = 1; }", "message A { int32 a = 1; }", ["FIELD_NUMERIC_LABEL_CHANGED"]),
    ("message A { optional int32 a = 1; }", "message A { int32 a = 1; }", []),
    ("message A { oneof o { int32 a = 1; } }", "message A { int32 a = 1; }", []),
    (
        "message A { oneof o { int32 a = 1; int32 b = 2; } }",
        "message A { int32 a = 1; int32 b = 2; }",
        ["MULTIPLE_FIELDS_MOVED_TO_ONEOF"],
    ),
    (
        "message A { oneof o { int32 a = 1; int32 b = 2; } }",
        "message A { oneof o { int32 a = 1; } int32 b = 2; }",
        ["FIELD_MOVED_TO_EXISTING_ONEOF"],
    ),
    (
        "message A { oneof o { int32 a = 1; } }",
        "message A { oneof o { int32 a = 1; int32 b = 2; } }",
        ["ONEOF_FIELD_REMOVED"],
    ),
    ("message A { map<string, int32> a = 1; }", "message A { map<string, int64> a = 1; }", []),
    (
        "message A { map<string, int32> a = 1; }",
        "message A { map<int32, int32> a = 1; }",
        ["FIELD_SCALAR_KIND_CHANGED"],
    ),
    ("package x; message A {}", "package y; message A {}", ["PACKAGE_CHANGED"]),
    ("enum E { Z = 0; } message A { E a = 1; }", "enum E { Z = 0; B = 1; } message A { int32 a = 1; }", []),
    ("message A { A a = 1; }", "message A { A a = 1; int32 b = 2; }", []),
]


@pytest.mark.parametrize(("reader", "writer", "expected"), TABLE)
def test_changes(reader: str, writer: str, expected: list[str]) -> None:
    parsed = [ProtobufSchema.parse(f'syntax = "proto3"; {text}') for text in (reader, writer)]
    assert [difference.kind for difference in compare(*parsed)] == expected


def test_required_fields_are_neither_added_nor_removed() -> None:
    with_one = ProtobufSchema.parse('syntax = "proto2"; message A { required int32 a = 1; }')
    without = ProtobufSchema.parse('syntax = "proto2"; message A {}')
    assert [difference.kind for difference in compare(with_one, without)] == ["REQUIRED_FIELD_ADDED"]
    assert [difference.kind for difference in compare(without, with_one)] == ["REQUIRED_FIELD_REMOVED"]


def test_imported_messages_are_compared() -> None:
    text = 'syntax = "proto3"; import "address.proto"; message A { post.Address a = 1; }'
    other = (ADDRESS[0], ADDRESS[1].replace("string city", "int32 city"))
    reader, writer = ProtobufSchema.parse(text, [other]), ProtobufSchema.parse(text, [ADDRESS])
    assert "FIELD_NAMED_TYPE_CHANGED" in [difference.kind for difference in compare(reader, writer)]
    assert compare(writer, writer) == []
