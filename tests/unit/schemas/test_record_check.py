"""Which records conform to a schema rule: the compiled and the plain check agree for any batch."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from millstream.core.errors import SchemaMismatch
from millstream.protocol.records.batch import HEADER_BYTES, read_header
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.schemas.codec import Codec, codec_of
from millstream.protocol.schemas.formats import COMPILED, SchemaText, render
from millstream.protocol.schemas.framing import (
    VALUE_HEADER,
    Framed,
    prefix,
    read_indexes,
    unframe,
    write_indexes,
)
from millstream.protocol.schemas.record_check import FieldRule, check_content, check_ids, have_known_ids

GUID = "00000000-0000-0000-0000-00000000000a"
RULE = FieldRule(subject="orders-value", context=".", guids={7: GUID, 300: "b"})
GUID_HEADER = ((VALUE_HEADER, b"\1" + bytes(15) + b"\x0a"),)

payloads = some.one_of(
    some.none(),
    some.binary(max_size=8),
    some.sampled_from([7, 8, 300, 2**31]).map(prefix),
    some.binary(max_size=4).map(lambda rest: prefix(7) + rest),
)
headers = some.sampled_from(
    [(), (("a", b"b"),), GUID_HEADER, ((VALUE_HEADER, b"\0\0\0\0\7"),), ((VALUE_HEADER, b"?"),)]
)
records = some.lists(some.builds(NewRecord, payloads, payloads, headers, some.integers(0, 5)), min_size=1, max_size=12)


def is_fine(record: NewRecord) -> bool:
    for payload, is_value in ((record.key, False), (record.value, True)):
        if payload is None:
            continue
        named = dict(record.headers).get(VALUE_HEADER) if is_value else None
        if named is not None:
            if named not in (GUID_HEADER[0][1], prefix(7)):
                return False
        elif payload[:5] not in (prefix(7), prefix(300)):
            return False
    return True


@given(records, some.booleans())
def test_exactly_the_invalid_records_are_named(given_records: list[NewRecord], with_keys: bool) -> None:
    batch = bytes(encode_batch(given_records))
    header, section = read_header(batch), batch[HEADER_BYTES:]
    rules = {"key": RULE, "value": RULE} if with_keys else {"value": RULE}
    plain = given_records if with_keys else [record._replace(key=None) for record in given_records]
    wrong = [index for index, record in enumerate(plain) if not is_fine(record)]
    assert [error.batch_index for error in check_ids(section, header, rules)] == wrong
    # The compiled check may be in doubt, and then refuses; it never accepts an invalid record.
    if have_known_ids(section, header, rules):
        assert not wrong
    elif not any(VALUE_HEADER in dict(record.headers) for record in given_records):
        assert wrong


@given(some.lists(some.integers(0, 2**20), min_size=1, max_size=6))
def test_message_indexes_round_trip(indexes: list[int]) -> None:
    written = write_indexes(indexes)
    assert read_indexes(written + b"rest") == (tuple(indexes), len(written))


@pytest.mark.parametrize("broken", [b"", b"\x02", b"\xff" * 9, b"\x01", b"\xfe\xff\xff\xff\x0f"])
def test_malformed_message_indexes_are_refused(broken: bytes) -> None:
    with pytest.raises(SchemaMismatch):
        read_indexes(broken)


@pytest.mark.parametrize("payload", [b"", b"\0\0\0\0", b"\1\0\0\0\1", b"{}   "])
def test_a_payload_without_a_prefix_names_no_schema(payload: bytes) -> None:
    with pytest.raises(SchemaMismatch, match="schema id"):
        unframe(payload)


AVRO = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "a", "type": "long"},
        {"name": "s", "type": ["null", "string"]},
        {"name": "r", "type": ["null", "R"]},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["X", "Y"]}},
        {"name": "m", "type": {"type": "map", "values": "double"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
JSON = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}
PROTO = 'syntax = "proto3"; message R { int64 a = 1; string s = 2; R r = 3; message In { bytes b = 1; } }'


def codec(kind: str, text: str) -> Codec:
    return codec_of(kind, render(SchemaText(schema_type=kind, text=text), COMPILED))


CODECS = {
    "AVRO": codec("AVRO", json.dumps(AVRO)),
    "JSON": codec("JSON", json.dumps(JSON)),
    "PROTOBUF": codec("PROTOBUF", PROTO),
}
VALUES: dict[str, dict[str, Any]] = {
    "AVRO": {"a": 1, "s": "x", "r": None, "e": "Y", "m": {"k": 1.0}, "at": 10**15},
    "JSON": {"a": 1},
    "PROTOBUF": {"a": 1, "s": "x"},
}


@pytest.mark.parametrize("kind", CODECS)
@given(some.binary(max_size=60))
def test_any_bytes_are_accepted_or_refused_with_a_reason(kind: str, content: bytes) -> None:
    # Anything but this error fails the test.
    with suppress(SchemaMismatch):
        CODECS[kind].check(Framed(1, None, content, None))


@pytest.mark.parametrize("kind", CODECS)
def test_encoded_values_are_accepted_and_changed_bytes_are_not(kind: str) -> None:
    body = CODECS[kind].encode(VALUES[kind])
    rule = FieldRule(subject="s", context=".", guids={7: GUID})
    batch = bytes(
        encode_batch([NewRecord(None, prefix(7) + body), NewRecord(None, prefix(7) + body[:-1]), NewRecord(None, None)])
    )
    section, header = batch[HEADER_BYTES:], read_header(batch)
    wrong = check_content(section, header, {"value": rule}, lambda _rule, _id: CODECS[kind])
    assert [error.batch_index for error in wrong] == [1]
    with pytest.raises(SchemaMismatch):
        CODECS[kind].encode({"a": "no number"})


@pytest.mark.parametrize("value", [4.5, True, 2**63, None, "4"])
def test_avro_does_not_change_a_value_that_does_not_fit(value: object) -> None:
    with pytest.raises(SchemaMismatch, match="does not fit"):
        CODECS["AVRO"].encode({**VALUES["AVRO"], "a": value})


def test_a_time_beyond_the_calendar_is_valid_avro() -> None:
    avro = CODECS["AVRO"]
    avro.check(Framed(1, None, avro.encode({**VALUES["AVRO"], "at": 2**60}), None))


def test_a_schema_that_refers_to_the_network_is_refused_when_it_is_used() -> None:
    remote = codec_of("JSON", json.dumps([{"properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}}, {}]))
    with pytest.raises(SchemaMismatch, match="not among its references"):
        remote.check(Framed(1, None, b'{"a": 1}', None))


def test_a_catastrophic_pattern_terminates() -> None:
    exploding = codec_of("JSON", json.dumps([{"type": "string", "pattern": "^(a|a?)+(?!b)$"}, {}]))
    with pytest.raises(SchemaMismatch):
        exploding.check(Framed(1, None, json.dumps("a" * 5000 + "!").encode(), None))


def test_json_follows_protobufs_mapping_without_losing_precision() -> None:
    text = """syntax = "proto3";
    message Bill { int64 bill_id = 1; double rate = 2; Bill of = 3; google.protobuf.Any any = 4; int32 n = 5; }"""
    text = text.replace(";", ';\nimport "google/protobuf/any.proto";', 1)
    codec = codec_of("PROTOBUF", render(SchemaText(schema_type="PROTOBUF", text=text), COMPILED))
    shown = {"billId": "9007199254740993", "rate": "-Infinity", "n": 0}
    for document in (shown, {**shown, "rate": "NaN"}):
        content = codec.encode(codec.from_json(document))
        assert json.loads(codec.decode_json(Framed(1, None, content, None))) == document
    unknown = codec.encode({"any": {"type_url": "x/not.Here", "value": b"1"}})
    assert json.loads(codec.decode_json(Framed(1, None, unknown, None)))["any"]["type_url"] == "x/not.Here"
    source = '{"type":"array","items":["null","double"]}'
    avro = codec_of("AVRO", render(SchemaText(schema_type="AVRO", text=source), COMPILED))
    encoded = avro.encode([float("nan"), float("inf"), None, 1.5])
    assert json.loads(avro.decode_json(Framed(1, None, encoded, None))) == ["NaN", "Infinity", None, 1.5]
    with pytest.raises(SchemaMismatch, match="'NaN'"):
        avro.encode(avro.from_json(["NaN"]))


MANY_NULLS = [{"name": f"n{at}", "type": "null"} for at in range(20)]
NESTED = {"type": "record", "name": "Nested", "fields": [{"name": "inner", "type": ["null", "Nested"]}]}


def test_a_recursive_avro_value_decodes_up_to_a_depth() -> None:
    nested = codec_of("AVRO", json.dumps(NESTED))
    assert nested.decode(Framed(1, None, b"\x02\x02\x00", None)) == {"inner": {"inner": {"inner": None}}}
    # In a process of its own, which the compiled decoder of fastavro would crash.
    code = (
        "from millstream.core.errors import SchemaMismatch\n"
        "from millstream.protocol.schemas.codec import codec_of\n"
        "from millstream.protocol.schemas.framing import Framed\n"
        f"codec = codec_of('AVRO', {json.dumps(NESTED)!r})\n"
        "try: codec.decode(Framed(1, None, b'\\x02' * 100_000 + b'\\x00', None))\n"
        "except SchemaMismatch as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not decode as Avro" in done.stdout


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": "null"},
        {"type": "array", "items": {"type": "record", "name": "A", "fields": [{"name": "a", "type": "null"}]}},
        [
            {"type": "record", "name": "B", "fields": []},
            {"type": "map", "values": {"type": "array", "items": "B"}},
        ],
        {"type": "record", "name": "C", "fields": [{"name": "c", "type": "C"}]},
        {"type": "array", "items": ["null", {"type": "record", "name": "D", "fields": MANY_NULLS}]},
        {"type": "map", "values": {"type": "record", "name": "E", "fields": MANY_NULLS}},
        {"type": "record", "name": "G", "fields": [*MANY_NULLS, {"name": "g", "type": {"type": "map", "values": "G"}}]},
    ],
)
def test_an_avro_schema_whose_items_take_no_bytes_is_not_used(schema: Any) -> None:
    with pytest.raises(SchemaMismatch, match="could take all memory"):
        codec_of("AVRO", json.dumps(schema)).decode(Framed(1, None, b"\x04\x00", None))


TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "name", "type": "string"}, {"name": "children", "type": {"type": "array", "items": "Tree"}}],
}
OPTIONAL = {
    "type": "record",
    "name": "Optional",
    "fields": [{"name": f"o{at}", "type": ["null", "string"], "default": None} for at in range(10)],
}
BINARY = {
    "type": "record",
    "name": "Binary",
    "fields": [{"name": f"b{at}", "type": ["null", "Binary"], "default": None} for at in range(9)],
}
BRANCH = {"type": "record", "name": "Branch", "fields": [{"name": "twigs", "type": {"type": "array", "items": "Wood"}}]}
WOOD = {"type": "record", "name": "Wood", "fields": [{"name": "branches", "type": {"type": "array", "items": BRANCH}}]}


@pytest.mark.parametrize(
    ("schema", "content", "value"),
    [
        (
            TREE,
            b"\x02a\x02\x02b\x00\x00",
            {"name": "a", "children": [{"name": "b", "children": []}]},
        ),
        (
            {
                "type": "array",
                "items": {"type": "record", "name": "H", "fields": [{"name": "h", "type": ["null", OPTIONAL]}]},
            },
            b"\x02\x02" + bytes(10) + b"\x00",
            [{"h": {f"o{at}": None for at in range(10)}}],
        ),
        ({"type": "array", "items": BINARY}, b"\x02" + bytes(9) + b"\x00", [{f"b{at}": None for at in range(9)}]),
        (WOOD, b"\x02\x02\x00\x00\x00", {"branches": [{"twigs": [{"branches": []}]}]}),
        ({"type": "map", "values": "null"}, b"\x02\x02a\x00", {"a": None}),
        ({"type": "array", "items": ["null"]}, b"\x02\x00\x00", [None]),
        ({"type": "array", "items": {"type": "array", "items": "int"}}, b"\x02\x02\x0e\x00\x00", [[7]]),
        ({"type": "record", "name": "F", "fields": MANY_NULLS}, b"", {f"n{at}": None for at in range(20)}),
    ],
)
def test_an_avro_schema_whose_items_take_bytes_is_used(schema: Any, content: bytes, value: Any) -> None:
    assert codec_of("AVRO", json.dumps(schema)).decode(Framed(1, None, content, None)) == value
