"""Confluent's own registry client and serialisers, unmodified, against a real server."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from confluent_kafka import Consumer, Producer, schema_registry
from confluent_kafka.schema_registry import (
    dual_schema_id_deserializer,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from millstream_testing.server import Server

# Their constructors are made by attrs, which mypy does not see.
Schema: Any = schema_registry.Schema
SchemaReference: Any = schema_registry.SchemaReference

ORDER = (
    '{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"id","type":"long"},'
    '{"name":"note","type":["null","string"],"default":null}]}'
)


@pytest.fixture(scope="module")
def rest(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}/registry", timeout=60) as client:
        yield client


def context_of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_avro_messages_round_trip_through_a_topic(server: Server, registry: Any, topic: str) -> None:
    serializer = AvroSerializer(registry, ORDER)
    producer = Producer({"bootstrap.servers": server.kafka})
    producer.produce(topic, serializer({"id": 7, "note": "now"}, context_of(topic)))
    assert producer.flush(30) == 0
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": f"of-{topic}", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None
        value = message.value()
    finally:
        consumer.close()
    assert AvroDeserializer(registry)(value, context_of(topic)) == {"id": 7, "note": "now"}
    latest = registry.get_latest_version(f"{topic}-value")
    assert latest.version == 1
    assert value is not None
    assert value[:5] == b"\0" + (latest.schema_id or 0).to_bytes(4, "big")


def test_json_messages_are_validated_with_their_references(registry: Any, topic: str) -> None:
    address = (
        '{"$id":"http://shop/address.json","type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
    )
    registry.register_schema(f"{topic}-address", Schema(address, "JSON"))
    order = (
        '{"$id":"http://shop/order.json","type":"object","title":"Order","properties":'
        '{"id":{"type":"integer"},"to":{"$ref":"http://shop/address.json"}}}'
    )
    reference = SchemaReference("http://shop/address.json", f"{topic}-address", 1)
    schema = Schema(order, "JSON", [reference])
    serializer = JSONSerializer(schema, registry)
    value = serializer({"id": 1, "to": {"city": "Bonn"}}, context_of(topic))
    assert JSONDeserializer(schema, schema_registry_client=registry)(value, context_of(topic)) == {
        "id": 1,
        "to": {"city": "Bonn"},
    }
    version = registry.get_latest_version(f"{topic}-value")
    assert version.schema.schema_type == "JSON"
    assert version.schema.references == [reference]
    assert registry.get_referenced_by(f"{topic}-address", 1) == [version.schema_id]


def test_protobuf_messages_travel_with_imports(registry: Any, rest: httpx.Client, topic: str) -> None:
    order = order_class()
    serializer = ProtobufSerializer(order, registry, {"use.deprecated.format": False})
    value = serializer(order(id=3, to={"city": "Bonn"}), context_of(topic))
    read = ProtobufDeserializer(order, {"use.deprecated.format": False}, schema_registry_client=registry)(
        value, context_of(topic)
    )
    assert (read.id, read.to.city) == (3, "Bonn")
    version = registry.get_latest_version(f"{topic}-value")
    assert version.schema.references == [SchemaReference("shop_address.proto", "shop_address.proto", 1)]
    assert 'import "shop_address.proto";' in version.schema.schema_str
    # A schema sent as a descriptor is found as text, and the other way round.
    text = Schema(version.schema.schema_str, "PROTOBUF", version.schema.references)
    assert registry.lookup_schema(f"{topic}-value", text).schema_id == version.schema_id
    serialized = rest.get(f"/subjects/{topic}-value/versions/1", params={"format": "serialized"}).json()["schema"]
    assert FileDescriptorProto.FromString(b64decode(serialized)).message_type[0].name == "Order"


def order_class() -> Any:
    """A message that uses one of another file."""
    pool = DescriptorPool()
    address = FileDescriptorProto(name="shop_address.proto", package="shop", syntax="proto3")
    city = address.message_type.add(name="Address").field.add(name="city", number=1)
    city.type, city.label = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.LABEL_OPTIONAL
    order = FileDescriptorProto(
        name="shop_order.proto", package="shop", syntax="proto3", dependency=["shop_address.proto"]
    )
    message = order.message_type.add(name="Order")
    for name, number, kind in (
        ("id", 1, FieldDescriptorProto.TYPE_INT64),
        ("to", 2, FieldDescriptorProto.TYPE_MESSAGE),
    ):
        field = message.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if name == "to":
            field.type_name = ".shop.Address"
    for file in (address, order):
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def test_a_serializer_without_auto_registration_needs_the_schema(registry: Any, topic: str) -> None:
    serializer = AvroSerializer(registry, ORDER, conf={"auto.register.schemas": False})
    with pytest.raises(SchemaRegistryError) as refused:
        serializer({"id": 1}, context_of(topic))
    assert refused.value.error_code == 40401
    registered = registry.register_schema(f"{topic}-value", Schema(ORDER, "AVRO"))
    assert serializer({"id": 1}, context_of(topic))[1:5] == registered.to_bytes(4, "big")


def test_the_latest_version_is_used_on_request(registry: Any, topic: str) -> None:
    wider = ORDER.replace('"fields":[', '"fields":[{"name":"extra","type":"int","default":0},')
    for text in (ORDER, wider):
        registry.register_schema(f"{topic}-value", Schema(text, "AVRO"))
    serializer = AvroSerializer(registry, ORDER, conf={"auto.register.schemas": False, "use.latest.version": True})
    value = serializer({"id": 1, "note": None, "extra": 5}, context_of(topic))
    assert value[1:5] == registry.get_latest_version(f"{topic}-value").schema_id.to_bytes(4, "big")


def test_ids_in_headers_are_guids(registry: Any, topic: str) -> None:
    headers: dict[str, str | bytes | None] = {}
    where = SerializationContext(topic, MessageField.VALUE, headers)
    serializer = AvroSerializer(registry, ORDER, conf={"schema.id.serializer": header_schema_id_serializer})
    value = serializer({"id": 9, "note": "in a header"}, where)
    assert set(headers) == {"__value_schema_id"}
    read = AvroDeserializer(registry, conf={"schema.id.deserializer": dual_schema_id_deserializer})
    assert read(value, where) == {"id": 9, "note": "in a header"}
    guid = registry.get_latest_version(f"{topic}-value").guid
    assert registry.get_schema_by_guid(guid).schema_str == ORDER


def record(*fields: str, name: str = "R") -> str:
    """An Avro record with int fields; `f=0` has a default."""
    pairs = [field.partition("=") for field in fields]
    texts = [
        f'{{"name":"{field}","type":"int"{f",{DEFAULT}{value}" if equals else ""}}}' for field, equals, value in pairs
    ]
    return f'{{"type":"record","name":"{name}","fields":[{",".join(texts)}]}}'


DEFAULT = '"default":'


def register(rest: httpx.Client, subject: str, schema: str, **more: Any) -> httpx.Response:
    return rest.post(f"/subjects/{quote(subject, safe='')}/versions", json={"schema": schema, **more})


def latest(rest: httpx.Client, subject: str) -> dict[str, Any]:
    return dict(rest.get(f"/subjects/{subject}/versions/latest").json())


def refusal(response: httpx.Response) -> tuple[int, int]:
    document = response.json()
    assert set(document) == {"error_code", "message"}
    assert response.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
    return response.status_code, document["error_code"]


def test_versions_and_lookups(rest: httpx.Client, topic: str) -> None:
    schema = record("a", name="Versions")
    made = register(rest, topic, schema)
    assert made.status_code == 200
    assert made.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
    number, guid = made.json()["id"], made.json()["guid"]
    assert made.json() == {"id": number, "version": 1, "guid": guid}
    # The same schema keeps its id, under another subject, too; spaces do not matter.
    assert register(rest, topic, schema.replace(",", " , ")).json()["id"] == number
    assert register(rest, f"{topic}-other", schema).json()["id"] == number
    assert register(rest, topic, record("a", "b=1", name="Versions")).json()["version"] == 2
    assert rest.get(f"/subjects/{topic}/versions").json() == [1, 2]
    first = {"subject": topic, "version": 1, "id": number, "guid": guid, "schema": schema}
    assert rest.get(f"/subjects/{topic}/versions/1").json() == first
    assert rest.post(f"/subjects/{topic}", json={"schema": schema}).json() == first
    assert rest.get(f"/subjects/{topic}/versions/1/schema").text == schema
    assert rest.get(f"/schemas/ids/{number}").json() == {"schema": schema, "guid": guid}
    assert rest.get(f"/schemas/guids/{guid}").json()["schema"] == schema
    assert rest.get(f"/schemas/ids/{number}/subjects").json() == [topic, f"{topic}-other"]
    assert {"subject": topic, "version": 1} in rest.get(f"/schemas/ids/{number}/versions").json()
    assert rest.get("/schemas/types").json() == ["JSON", "PROTOBUF", "AVRO"]
    assert topic in rest.get("/subjects").json()
    assert rest.get("/subjects", params={"subjectPrefix": f"{topic}-o"}).json() == [f"{topic}-other"]


def test_refusals_have_the_registrys_codes(rest: httpx.Client, topic: str) -> None:
    assert refusal(rest.get(f"/subjects/{topic}/versions")) == (404, 40401)
    assert refusal(rest.get("/schemas/ids/2000000000")) == (404, 40403)
    assert refusal(rest.get("/schemas/guids/00000000-0000-0000-0000-000000000000")) == (404, 40403)
    register(rest, topic, record("a"))
    assert refusal(rest.get(f"/subjects/{topic}/versions/7")) == (404, 40402)
    assert refusal(rest.get(f"/subjects/{topic}/versions/none")) == (422, 42202)
    assert refusal(rest.post(f"/subjects/{topic}", json={"schema": record("z")})) == (404, 40403)
    assert refusal(register(rest, topic, '{"type":"nothing"}')) == (422, 42201)
    assert refusal(register(rest, f"{topic}-new", "")) == (422, 42201)
    assert refusal(register(rest, f"{topic}-new", '{"pattern":"(["}', schemaType="JSON")) == (422, 42201)
    assert refusal(register(rest, topic, record("a"), schemaType="XML")) == (422, 42201)
    assert refusal(register(rest, topic, record("a", "b"))) == (409, 409)
    assert refusal(register(rest, topic, record("c"), id=5)) == (422, 42205)
    assert refusal(register(rest, f":.{topic}:", record("a"))) == (422, 42208)
    assert refusal(register(rest, f"{topic}\x01", record("a"))) == (422, 42208)
    for nothing in ({"compatibility": "SOMETIMES"}, {}, {"compatibility": None}):
        assert refusal(rest.put(f"/config/{topic}", json=nothing)) == (422, 42203)
    assert refusal(rest.put(f"/mode/{topic}", json={"mode": "SLEEPING"})) == (422, 42204)
    assert refusal(rest.get(f"/config/{topic}")) == (404, 40408)
    assert refusal(rest.get(f"/mode/{topic}")) == (404, 40409)
    assert refusal(rest.get("/nowhere")) == (404, 404)
    assert refusal(rest.put(f"/subjects/{topic}/versions")) == (405, 405)
    assert refusal(rest.get("/subjects", headers={"accept": "text/html"})) == (406, 406)
    plain = rest.post(f"/subjects/{topic}", content="x", headers={"content-type": "text/plain"})
    assert refusal(plain) == (415, 415)
    assert rest.get("/subjects", headers={"accept": "application/json"}).headers["content-type"] == "application/json"


def test_the_level_decides_what_is_compatible(rest: httpx.Client, topic: str) -> None:
    register(rest, topic, record("a"))
    check = f"/compatibility/subjects/{topic}/versions"
    reported = rest.post(f"{check}/latest?verbose=true", json={"schema": record("a", "b")}).json()
    assert reported["is_compatible"] is False
    assert "READER_FIELD_MISSING_DEFAULT_VALUE" in reported["messages"][0]
    assert rest.post(f"{check}/1", json={"schema": record("a", "b=0")}).json() == {"is_compatible": True}
    assert reported["messages"][-1] == "{validateFields: 'false', compatibility: 'BACKWARD'}"
    invalid = rest.post(f"{check}/latest?verbose=true", json={"schema": "{"}).json()
    assert (invalid["is_compatible"], len(invalid["messages"])) == (False, 1)
    assert refusal(rest.post(f"{check}/latest", json={"schema": "{"})) == (422, 42201)
    assert refusal(rest.post(f"{check}/9", json={"schema": record("a")})) == (404, 40402)
    unknown = f"/compatibility/subjects/{topic}-unknown/versions"
    assert refusal(rest.post(f"{unknown}/1", json={"schema": record("a")})) == (404, 40402)
    assert rest.post(unknown, json={"schema": record("a")}).json() == {"is_compatible": True}
    assert rest.put(f"/config/{topic}", json={"compatibility": "FORWARD"}).json() == {"compatibility": "FORWARD"}
    assert rest.get(f"/config/{topic}").json() == {"compatibilityLevel": "FORWARD"}
    assert register(rest, topic, record("a", "b")).status_code == 200
    rest.put(f"/config/{topic}", json={"compatibility": "FULL_TRANSITIVE"})
    assert refusal(register(rest, topic, record("a", "c=0"))) == (409, 409)
    rest.put(f"/config/{topic}", json={"compatibility": "NONE"})
    assert register(rest, topic, '"string"').json()["version"] == 3
    assert rest.delete(f"/config/{topic}").json() == {"compatibilityLevel": "NONE"}
    assert rest.get(f"/config/{topic}?defaultToGlobal=true").json() == {"compatibilityLevel": "BACKWARD"}
    assert rest.get("/config").json() == {"compatibilityLevel": "BACKWARD"}
    assert rest.delete("/config").json() == {"compatibilityLevel": "BACKWARD"}


def test_deletion_is_soft_first(rest: httpx.Client, topic: str) -> None:
    first = record("a", name="Deleted")
    number = register(rest, topic, first).json()["id"]
    register(rest, topic, record("a", "b=0", name="Deleted"))
    assert refusal(rest.delete(f"/subjects/{topic}/versions/1?permanent=true")) == (404, 40407)
    assert rest.delete(f"/subjects/{topic}/versions/1").json() == 1
    assert refusal(rest.delete(f"/subjects/{topic}/versions/1")) == (404, 40406)
    assert rest.get(f"/subjects/{topic}/versions").json() == [2]
    assert rest.get(f"/subjects/{topic}/versions?deleted=true").json() == [1, 2]
    assert rest.get(f"/schemas/ids/{number}").json()["schema"] == first
    register(rest, topic, record("a", "b=0", "c=0", name="Deleted"))
    rest.delete(f"/subjects/{topic}/versions/latest")
    assert rest.get(f"/subjects/{topic}/versions/latest?deleted=true").json()["version"] == 2
    assert rest.delete(f"/subjects/{topic}/versions/3?permanent=true").json() == 3
    assert refusal(rest.delete(f"/subjects/{topic}?permanent=true")) == (404, 40405)
    assert rest.delete(f"/subjects/{topic}").json() == [2]
    assert refusal(rest.delete(f"/subjects/{topic}")) == (404, 40404)
    assert topic not in rest.get("/subjects").json()
    assert topic in rest.get("/subjects?deleted=true").json()
    # A deleted schema that is registered again keeps its id, as a new version.
    again = register(rest, topic, first).json()
    assert (again["id"], again["version"]) == (number, 3)
    rest.delete(f"/subjects/{topic}")
    # It has replaced the deleted one.
    assert rest.delete(f"/subjects/{topic}?permanent=true").json() == [2, 3]
    assert refusal(rest.get(f"/schemas/ids/{number}")) == (404, 40403)
    renewed = register(rest, topic, first).json()
    assert renewed["version"] == 1
    assert renewed["id"] > number


def test_a_referenced_schema_is_not_deleted(rest: httpx.Client, topic: str) -> None:
    register(rest, f"{topic}-inner", record("a", name="Inner"))
    outer = '{"type":"record","name":"Outer","fields":[{"name":"in","type":"Inner"}]}'
    references = [{"name": "Inner", "subject": f"{topic}-inner", "version": 1}]
    assert refusal(register(rest, topic, outer)) == (422, 42201)
    number = register(rest, topic, outer, references=references).json()["id"]
    schema = rest.get(f"/schemas/ids/{number}").json()
    assert (schema["schema"], schema["references"]) == (outer, references)
    assert "Inner" in rest.get(f"/schemas/ids/{number}?format=resolved").json()["schema"].replace('"type":"Inner"', "")
    assert rest.get(f"/subjects/{topic}-inner/versions/1/referencedby").json() == [number]
    assert refusal(rest.delete(f"/subjects/{topic}-inner")) == (422, 42206)
    rest.delete(f"/subjects/{topic}")
    assert rest.delete(f"/subjects/{topic}-inner").json() == [1]


def test_contexts_have_separate_ids(rest: httpx.Client, topic: str) -> None:
    context = f".{topic}"
    qualified = f":{context}:orders"
    made = register(rest, qualified, record("a")).json()
    assert (made["id"], made["version"]) == (1, 1)
    assert rest.get(f"/contexts/{context}/subjects").json() == [qualified]
    assert rest.get(f"/contexts/{context}/schemas/ids/1").json()["schema"] == record("a")
    assert rest.get("/schemas/ids/1", params={"subject": qualified}).json()["schema"] == record("a")
    assert (
        rest.post(f"/contexts/{context}/subjects/orders", json={"schema": record("a")}).json()["subject"] == qualified
    )
    assert context in rest.get("/contexts").json()


def test_import_mode_keeps_ids(rest: httpx.Client, topic: str) -> None:
    subject = f":.import-{topic}:orders"
    path = quote(subject, safe="")
    assert rest.put(f"/mode/{path}", json={"mode": "IMPORT"}).json() == {"mode": "IMPORT"}
    assert refusal(register(rest, subject, record("a"))) == (422, 42205)
    assert register(rest, subject, record("a"), id=700, version=3).json()["id"] == 700
    assert rest.put(f"/mode/{path}", json={"mode": "IMPORT"}).status_code == 200
    assert register(rest, subject, record("a"), id=700, version=3).json()["version"] == 3
    assert refusal(register(rest, subject, record("b"), id=700, version=4)) == (422, 42205)
    assert rest.delete(f"/mode/{path}").json() == {"mode": "IMPORT"}
    assert register(rest, subject, record("a", "b=0")).json()["id"] == 701
    assert refusal(rest.put(f"/mode/{path}", json={"mode": "IMPORT"})) == (422, 42205)
    rest.put(f"/mode/{path}", json={"mode": "READONLY"})
    assert refusal(register(rest, subject, record("a", "c=0"))) == (422, 42205)
    assert rest.get(f"/subjects/{path}/versions").json() == [3, 4]
    rest.delete(f"/mode/{path}")
    rest.delete(f"/subjects/{path}")
    # Deleted versions are replaced by imported ones.
    assert rest.put(f"/mode/{path}", json={"mode": "IMPORT"}).status_code == 200
    assert refusal(rest.get(f"/subjects/{path}/versions", params={"deleted": True})) == (404, 40401)


def test_imported_ids_leave_room_for_others(rest: httpx.Client, topic: str) -> None:
    context = f":.crowded-{topic}:"
    path = quote(f"{context}orders", safe="")
    rest.put(f"/mode/{path}", json={"mode": "IMPORT"})
    assert refusal(register(rest, f"{context}orders", record("a"), id=2**31 - 1)) == (422, 42205)
    assert refusal(register(rest, f"{context}orders", record("a"), id=10**20)) == (422, 422)
    for version in (-2, 2**31):
        assert refusal(register(rest, f"{context}orders", record("a"), id=1, version=version)) == (422, 42202)
    assert register(rest, f"{context}orders", record("a"), id=2**30).status_code == 200
    made = register(rest, f"{context}others", record("b")).json()["id"]
    assert made == 2**30 + 1
    response = rest.get(f"/schemas/ids/{made}", params={"subject": f"{context}others"})
    assert response.status_code == 200
    # Numbers of thousands of digits are not converted.
    assert rest.get(f"/schemas/ids/{'9' * 5000}").status_code == 404
    assert refusal(rest.get(f"/subjects/{path}/versions/{'9' * 5000}")) == (422, 42202)


def test_metadata_and_rules_are_stored(rest: httpx.Client, topic: str) -> None:
    metadata = {"properties": {"owner": "shop"}, "tags": {"R.a": ["PII"]}, "sensitive": ["owner"]}
    rule = {"name": "check", "kind": "CONDITION", "type": "CEL", "expr": "true", "mode": "WRITE"}
    rules = {"domainRules": [rule], "enableAt": "CLIENT"}
    register(rest, topic, record("a"), metadata=metadata, ruleSet=rules)
    version = rest.get(f"/subjects/{topic}/versions/latest").json()
    assert version["metadata"] == metadata
    # The defaults of a rule are written out, and sending them is the same as leaving them out.
    assert version["ruleSet"] == {**rules, "domainRules": [{**rule, "disabled": False}]}
    assert register(rest, topic, record("a"), metadata=metadata, ruleSet=version["ruleSet"]).json()["version"] == 1
    by_metadata = rest.get(f"/subjects/{topic}/metadata", params={"key": "owner", "value": "shop"}).json()
    assert by_metadata["version"] == 1
    assert register(rest, topic, record("a", "b=0")).json()["version"] == 2
    assert rest.get(f"/subjects/{topic}/versions/2").json()["metadata"] == metadata


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"domainRules": [{"name": "1st", "type": "CEL"}]}, 42210),
        ({"domainRules": [{"name": "a b", "type": "CEL"}]}, 42210),
        ({"domainRules": [{"name": "", "type": "CEL"}]}, 42210),
        ({"domainRules": [{"name": "a" * 65, "type": "CEL"}]}, 42210),
        ({"domainRules": [{"type": "CEL"}]}, 42210),
        ({"domainRules": [{"name": "a"}]}, 42210),
        ({"domainRules": [{"name": "a", "type": "CEL", "mode": "UPGRADE"}]}, 42210),
        ({"migrationRules": [{"name": "a", "type": "JSONATA"}]}, 42210),
        ({"domainRules": [{"name": "a", "type": "CEL", "mode": "READ", "onFailure": "NONE,ERROR"}]}, 42210),
        (
            {
                "migrationRules": [{"name": "a", "type": "JSONATA", "mode": "UPDOWN"}],
                "encodingRules": [{"name": "a", "type": "CEL"}],
            },
            42210,
        ),
        ({"domainRules": [{"name": "a", "type": "CEL", "kind": "GUESS"}]}, 400),
        ({"domainRules": "none"}, 400),
    ],
)
def test_invalid_rules_are_refused(rest: httpx.Client, topic: str, rules: dict[str, Any], code: int) -> None:
    expected = (int(str(code)[:3]), code)
    assert refusal(register(rest, topic, record("a"), ruleSet=rules)) == expected
    for name in ("defaultRuleSet", "overrideRuleSet"):
        assert refusal(rest.put(f"/config/{topic}", json={name: rules})) == expected
    assert refusal(rest.get(f"/subjects/{topic}/versions")) == (404, 40401)


def test_values_of_another_type_are_refused(rest: httpx.Client, topic: str) -> None:
    rest.put(f"/config/{topic}", json={"compatibilityGroup": "major"})
    register(rest, topic, record("a"))
    wrong_metadata: list[Any] = [{"properties": 5}, {"tags": {"R.a": "PII"}}, {"sensitive": {}}]
    for metadata in wrong_metadata:
        assert refusal(register(rest, topic, record("b"), metadata=metadata)) == (400, 400)
        assert refusal(rest.put(f"/config/{topic}", json={"defaultMetadata": metadata})) == (400, 400)
    wrong_settings: list[Any] = [{"normalize": "maybe"}, {"alias": 7}, {"compatibilityGroup": []}]
    for config in wrong_settings:
        assert refusal(rest.put(f"/config/{topic}", json=config)) == (400, 400)
    assert refusal(register(rest, topic, record("a"), metadata="none")) == (400, 400)
    assert refusal(rest.post(f"/subjects/{topic}/versions", json={"schema": {"type": "int"}})) == (400, 400)
    broken = rest.post(f"/subjects/{topic}/versions", content="{", headers={"content-type": "application/json"})
    assert refusal(broken) == (400, 400)
    assert refusal(rest.post(f"/subjects/{topic}/versions")) == (422, 422)
    # A separate group: without a version to be compatible with.
    assert register(rest, topic, '"string"', metadata={"properties": {"major": 2}}).json()["version"] == 2
    assert latest(rest, topic)["metadata"] == {"properties": {"major": "2"}}


def test_settings_are_reset_by_null_and_unknown_ones_are_not_kept(rest: httpx.Client, topic: str) -> None:
    sent = {"compatibility": "FULL", "normalize": True, "alias": "x", "colour": "red"}
    assert rest.put(f"/config/{topic}", json=sent).json() == {key: sent[key] for key in list(sent)[:3]}
    assert rest.put(f"/config/{topic}", json={"alias": None}).json() == {"alias": None}
    assert rest.get(f"/config/{topic}").json() == {"compatibilityLevel": "FULL", "normalize": True}


def test_defaults_and_overrides_are_added_to_what_is_registered(rest: httpx.Client, topic: str) -> None:
    register(rest, topic, record("a"))
    rest.put(f"/config/{topic}", json={"defaultMetadata": {"properties": {"owner": "shop", "tier": "1"}}})
    rest.put(f"/config/{topic}", json={"overrideMetadata": {"properties": {"tier": "2"}}})
    register(rest, topic, record("a"), metadata={"properties": {"owner": "sales", "tier": "3"}})
    made = latest(rest, topic)
    assert (made["version"], made["metadata"]) == (2, {"properties": {"owner": "sales", "tier": "2"}})
    # Empty metadata is not the same as none, which takes over those of the latest version.
    assert register(rest, topic, record("a")).json()["version"] == 2
    assert register(rest, topic, record("a"), metadata={}).json()["version"] == 3
    assert latest(rest, topic)["metadata"]["properties"]["owner"] == "shop"


def test_metadata_alone_makes_a_version(rest: httpx.Client, topic: str) -> None:
    changed = {"metadata": {"properties": {"owner": "shop"}}}
    assert refusal(rest.post(f"/subjects/{topic}/versions", json=changed)) == (422, 42201)
    register(rest, topic, record("a"))
    assert rest.post(f"/subjects/{topic}/versions", json=changed).json()["version"] == 2
    made = latest(rest, topic)
    assert (made["version"], made["schema"], made["metadata"]) == (2, record("a"), changed["metadata"])
    # Without metadata, the version that has none is the same schema.
    assert register(rest, topic, record("a")).json()["version"] == 1
    assert rest.post(f"/subjects/{topic}", json={"schema": record("a")}).json()["version"] == 1


def test_a_version_can_be_requested_by_number(rest: httpx.Client, topic: str) -> None:
    assert register(rest, topic, record("a"), version=1).json()["version"] == 1
    assert latest(rest, topic)["metadata"] == {"properties": {"confluent:version": "1"}}
    assert refusal(register(rest, topic, record("a", "b=0"), version=5)) == (422, 42201)
    # Once a version states its number, the following ones do.
    assert register(rest, topic, record("a", "b=0")).json()["version"] == 2
    assert latest(rest, topic)["metadata"] == {"properties": {"confluent:version": "2"}}
    for version in (None, -1):
        assert register(rest, topic, record("a", "b=0"), version=version).json()["version"] == 2
    assert register(rest, topic, record("a", "b=0"), version=3).json()["version"] == 3


def test_a_schema_with_its_references_inline_is_the_same(rest: httpx.Client, topic: str) -> None:
    """Java's generated classes know their whole schema, and no references."""
    register(rest, f"{topic}-inner", record("a", name="Inner"))
    outer = '{"type":"record","name":"Outer","fields":[{"name":"in","type":"Inner"}]}'
    references = [{"name": "Inner", "subject": f"{topic}-inner", "version": 1}]
    made = register(rest, topic, outer, references=references).json()
    inline = outer.replace('"Inner"}', record("a", name="Inner") + "}")
    assert rest.post(f"/subjects/{topic}", json={"schema": inline}).json()["version"] == 1
    assert register(rest, topic, inline).json() == made


def test_deleting_the_last_version_resets_the_subject(rest: httpx.Client, topic: str) -> None:
    rest.put(f"/config/{topic}", json={"compatibility": "NONE"})
    rest.put(f"/mode/{topic}", json={"mode": "READWRITE"})
    for schema in ('"int"', '"string"'):
        register(rest, topic, schema)
    rest.delete(f"/subjects/{topic}/versions/1")
    assert rest.get(f"/config/{topic}").json() == {"compatibilityLevel": "NONE"}
    rest.delete(f"/subjects/{topic}/versions/2")
    assert refusal(rest.get(f"/config/{topic}")) == (404, 40408)
    assert refusal(rest.get(f"/mode/{topic}")) == (404, 40409)


def test_an_id_is_looked_up_in_the_context_of_its_subject(rest: httpx.Client, topic: str) -> None:
    mine, other = f":.{topic}:{topic}-a", f":.{topic}:{topic}-b"
    assert register(rest, mine, record("a", name="Mine")).json()["id"] == 1
    assert register(rest, other, record("a", name="Other")).json()["id"] == 2

    def found(subject: str) -> tuple[int, Any]:
        response = rest.get("/schemas/ids/1", params={"subject": subject})
        return response.status_code, response.json().get("schema")

    in_context = found(f":.{topic}:")
    assert json.loads(in_context[1])["name"] == "Mine"
    assert found(mine) == found(f"{topic}-a") == in_context
    # A subject named with its context has to use the schema.
    assert refusal(rest.get("/schemas/ids/1", params={"subject": other})) == (404, 40403)
    # Any other subject refers to the default context, whatever its id 1 is there.
    assert found(f"{topic}-c") == found("")
    version = rest.get(f"/subjects/{topic}-b/versions/latest").json()
    assert (version["subject"], version["id"]) == (other, 2)
    looked_up = rest.post(f"/subjects/{topic}-b", json={"schema": record("a", name="Other")}).json()
    assert looked_up == version
    assert refusal(rest.get(f"/subjects/{topic}-b/versions")) == (404, 40401)


def test_lists_name_aliases_as_what_they_are(rest: httpx.Client, topic: str) -> None:
    for subject in ("a", "b"):
        register(rest, f"{topic}-{subject}", record(subject, name=subject.upper()))
    rest.put(f"/config/{topic}-a", json={"alias": f"{topic}-b"})
    assert rest.get(f"/subjects/{topic}-a/versions/1").json()["subject"] == f"{topic}-b"
    schemas = rest.get("/schemas", params={"subjectPrefix": topic}).json()
    assert [schema["subject"] for schema in schemas] == [f"{topic}-a", f"{topic}-b"]
    assert rest.get("/schemas", params={"subjectPrefix": topic, "limit": 0}).json() == schemas


def test_a_read_only_subject_keeps_its_settings(rest: httpx.Client, topic: str) -> None:
    rest.put(f"/mode/{topic}", json={"mode": "READONLY"})
    assert refusal(rest.put(f"/config/{topic}", json={"compatibility": "NONE"})) == (422, 42205)
    rest.delete(f"/mode/{topic}")
    assert rest.put(f"/config/{topic}", json={"compatibility": "NONE"}).status_code == 200


def test_normalized_schemas_are_equal(rest: httpx.Client, topic: str) -> None:
    one, other = '{"type":"object","title":"t"}', '{"title":"t","type":"object"}'
    made = [
        rest.post(f"/subjects/{topic}/versions?normalize=true", json={"schema": text, "schemaType": "JSON"}).json()
        for text in (one, other)
    ]
    assert made[0] == made[1]


def test_concurrent_registrations_get_one_id_per_schema(rest: httpx.Client, topic: str) -> None:
    def registered(number: int) -> tuple[int, int]:
        schema = record(*(f"f{index}=0" for index in range(number % 10)), name="Shared")
        return number % 10, register(rest, f"{topic}-{number % 5}-{number % 10}", schema).json()["id"]

    with ThreadPoolExecutor(50) as pool:
        ids = set(pool.map(registered, range(100)))
    assert len(ids) == 10
    assert len({number for _schema, number in ids}) == 10


HOSTILE = {
    "deeply nested": ("AVRO", '{"type":"array","items":' * 5000 + '"int"' + "}" * 5000),
    "a megabyte": ("AVRO", record(*(f"field{number}" for number in range(60_000)))),
    "recursive references": (
        "JSON",
        '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/c"}',
    ),
    "nested messages": ("PROTOBUF", 'syntax="proto3";' + "message A{" * 3000 + "}" * 3000),
    "a huge default": (
        "AVRO",
        '{"type":"record","name":"D","fields":[{"name":"f","type":{"type":"array","items":"int"},"default":['
        + ",".join(["1"] * 400_000)
        + ',"x"]}]}',
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_schemas_get_an_error(rest: httpx.Client, topic: str, kind: str) -> None:
    schema_type, text = HOSTILE[kind]
    status, code = refusal(register(rest, topic, text, schemaType=schema_type))
    assert (status, code) in ((422, 42201), (422, 42209))
    assert rest.get("/schemas/types").status_code == 200


def test_a_catastrophic_pattern_does_not_block(rest: httpx.Client, topic: str) -> None:
    """The patterns of a schema are matched with the names that are removed from it."""
    name = "a" * 64
    before = {"type": "object", "properties": {name: {"type": "string"}}, "additionalProperties": False}
    after = {"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False}
    made = register(rest, topic, json.dumps(before), schemaType="JSON")
    assert made.status_code == 200
    assert register(rest, topic, json.dumps(after), schemaType="JSON").status_code == 200


def test_metadata_and_settings_are_bounded(rest: httpx.Client, topic: str) -> None:
    large = {"properties": {"text": "x" * 1024 * 1024}}
    assert refusal(register(rest, topic, '"int"', metadata=large)) == (422, 42209)
    assert refusal(rest.put(f"/config/{topic}", json={"defaultMetadata": large})) == (422, 42209)
    half = {"properties": {"half": "x" * 600 * 1024}}
    assert rest.put(f"/config/{topic}", json={"defaultMetadata": half}).status_code == 200
    other = {"properties": {"other": "x" * 600 * 1024}}
    assert refusal(register(rest, topic, '"int"', metadata=other)) == (422, 42209)
    assert register(rest, topic, '"int"').status_code == 200


def test_many_references_are_refused(rest: httpx.Client, topic: str) -> None:
    references = [{"name": f"N{number}", "subject": f"{topic}-n", "version": 1} for number in range(10_000)]
    register(rest, f"{topic}-n", record("a", name="N0"))
    assert refusal(register(rest, topic, '"string"', references=references)) == (422, 42201)
