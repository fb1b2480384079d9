"""Messages encoded and decoded by registered schemas, on every endpoint, against a real server."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

import millstream
from millstream.core.errors import InvalidBatch, PublishFailed, SchemaMismatch
from millstream_testing.command import CommandLine, Outcome
from millstream_testing.server import Server

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "ref", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
PROTO = """syntax = "proto3";
import "google/protobuf/timestamp.proto";
message Paid { int64 id = 1; google.protobuf.Timestamp at = 2; map<string, double> parts = 3; Kind kind = 4; }
enum Kind { CARD = 0; CASH = 1; }
"""
MOMENT = datetime.datetime(2026, 11, 16, 12, 0, tzinfo=datetime.UTC)
VALUE = {
    "id": 7,
    "total": Decimal("12.50"),
    "day": datetime.date(2026, 11, 16),
    "at": MOMENT,
    "ref": UUID(int=5),
    "note": None,
}


@pytest.fixture(scope="module")
def command(server: Server) -> CommandLine:
    return CommandLine(server.kafka)


@pytest.fixture
def subject(command: CommandLine, topic: str, tmp_path: Path) -> str:
    return register(command, tmp_path / "order.avsc", f"{topic}-value", json.dumps(ORDER))


def ran(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome
    return outcome


def register(command: CommandLine, file: Path, subject: str, text: str) -> str:
    file.write_text(text)
    ran(command("schema", "register", subject, file))
    return subject


def test_the_sdk_encodes_by_subject_and_decodes_by_id(server: Server, command: CommandLine, subject: str) -> None:
    topic = subject.removesuffix("-value")
    ran(command("topic", "create", topic, "--partitions", "1", "--schema", f"value={subject}", "--validate", "content"))

    async def run() -> list[Any]:
        async with millstream.connect(server.kafka) as ms:
            stream = ms.subscription(topic, name=f"of-{topic}", start="earliest")
            await ms.publish(topic, {key: VALUE[key] for key in VALUE if key != "note"}, schema=subject)
            await ms.publish_many(topic, [VALUE, {**VALUE, "id": 8}], schema=subject)
            await ms.publish(topic, {**VALUE, "id": 9}, schema=subject, id="nine", deduplicate=True)
            await ms.publish(topic, None, key="k", schema=subject)
            with pytest.raises(SchemaMismatch, match="on field id"):
                await ms.publish(topic, {"id": "x"}, schema=subject)
            with pytest.raises(
                InvalidBatch, match=r"does not start with a schema id .*; encode messages with a serializer"
            ):
                await ms.publish(topic, {"id": 1}, id="plain", deduplicate=True)
            with pytest.raises(PublishFailed) as caught:
                await ms.publish_many(
                    topic, [millstream.NewMessage({**VALUE, "id": 10}, schema=subject), millstream.NewMessage("no")]
                )
            # An invalid message does not fail the others.
            assert [type(outcome).__name__ for outcome in caught.value.outcomes] == ["Receipt", "InvalidBatch"]
            found = []
            async for message in stream:
                found.append(await message.decode())
                await message.ack()
                if len(found) == 6:
                    break
            return found

    decoded = asyncio.run(run())
    assert decoded[0] == VALUE
    assert [None if message is None else message["id"] for message in decoded] == [7, 7, 8, 9, None, 10]


def test_http_encodes_json_by_subject(server: Server, subject: str) -> None:
    topic = subject.removesuffix("-value")
    order = {
        "id": 1,
        "total": "12.50",
        "day": "2026-11-16",
        "at": "2026-11-16T12:00:00Z",
        "ref": str(UUID(int=5)),
    }
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=60) as http:
        url = f"/topics/{topic}/messages"
        stored = http.post(url, params={"schema": subject}, json=order)
        assert stored.status_code == 201, stored.text
        batch = {"messages": [{"json": {**order, "id": 2}}, {"json": {**order, "id": 3}}]}
        many = http.post(
            url,
            params={"schema": subject},
            content=json.dumps(batch),
            headers={"content-type": "application/vnd.millstream.messages+json"},
        )
        assert many.status_code == 201, many.text
        wrong = http.post(url, params={"schema": subject}, json={"id": 1})
        assert (wrong.status_code, subject in wrong.json()["detail"]) == (422, True)
        unknown = http.post(url, params={"schema": f"{subject}-none"}, json=order)
        assert (unknown.status_code, unknown.json()["detail"]) == (404, f"Subject '{subject}-none' not found.")
        shown = http.get(f"/topics/{topic}/partitions/{stored.json()['partition']}/messages/{stored.json()['offset']}")
        payload = shown.json()["base64"]
    with SchemaRegistryClient({"url": f"http://{server.http}/registry"}) as registry:
        import base64

        context = SerializationContext(topic, MessageField.VALUE)
        value = AvroDeserializer(registry)(base64.b64decode(payload), context)
    assert value == {**VALUE, "id": 1}


def test_http_decodes_on_request(server: Server, subject: str) -> None:
    topic = subject.removesuffix("-value")
    order = {"id": 1, "total": "12.50", "day": "2026-11-16", "at": "2026-11-16T12:00:00Z", "ref": str(UUID(int=5))}
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=60) as http:
        made = http.post("/subscriptions", json={"name": f"of-{topic}", "topics": [topic], "start": "start"})
        assert made.status_code == 201, made.text
        at = http.post(f"/topics/{topic}/messages", params={"schema": subject}, json=order).json()
        http.post(f"/topics/{topic}/messages", content=b"\0\0\0\0\0none").raise_for_status()
        path = f"/topics/{topic}/partitions/{at['partition']}/messages/{at['offset']}"
        assert "decoded" not in http.get(path).json()
        shown = http.get(path, params={"decode": "schema"}).json()
        pulled: list[dict[str, Any]] = []
        while len(pulled) < 2:
            query = {"max": 10, "wait_ms": 20_000, "decode": "schema"}
            pulled += http.post(f"/subscriptions/of-{topic}/messages:pull", json=query).json()["messages"]
        with http.stream("GET", f"/topics/{topic}/events", params={"from": "start", "decode": "schema"}) as events:
            data = (line.removeprefix("data: ") for line in events.iter_lines() if line.startswith("data: "))
            listened = [json.loads(next(data)) for _ in range(2)]
        assert http.get(path, params={"decode": "guess"}).status_code == 422
    for documents in ([shown], pulled, listened):
        decoded = [document for document in documents if "decoded" in document]
        assert [(message["decoded"], message["schema"].isdigit()) for message in decoded] == [
            ({**order, "note": None}, True)
        ]
        assert all("base64" in message for message in decoded)


def test_a_value_that_decodes_to_much_more_is_not_decoded(
    server: Server, command: CommandLine, topic: str, tmp_path: Path
) -> None:
    fields = " ".join(f"int64 n{number} = {number};" for number in range(1, 1001))
    wide = f'syntax = "proto3"; message Wide {{ repeated Part parts = 1; message Part {{ {fields} }} }}'
    register(command, tmp_path / "wide.proto", f"{topic}-value", wide)
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=60) as http:
        schema = httpx.get(f"http://{server.http}/registry/subjects/{topic}-value/versions/latest").json()["id"]
        payload = b"\0" + schema.to_bytes(4, "big") + b"\0" + b"\x0a\0" * 8000
        placed = http.post(f"/topics/{topic}/messages", content=payload).json()
        path = f"/topics/{topic}/partitions/{placed['partition']}/messages/{placed['offset']}"
        shown = http.get(path, params={"decode": "schema"})
        assert shown.status_code == 200
        assert "decoded" not in shown.json()
        with http.stream("GET", f"/topics/{topic}/events", params={"from": "start", "decode": "schema"}) as events:
            line = next(line for line in events.iter_lines() if line.startswith("data:"))
        assert "decoded" not in json.loads(line[5:])


def test_the_command_line_publishes_and_shows_decoded_messages(
    command: CommandLine, topic: str, tmp_path: Path
) -> None:
    subject = register(command, tmp_path / "paid.proto", f"{topic}-value", PROTO)
    document = '{"id": 5, "at": "2026-11-16T12:00:00Z", "parts": {"a": 1.5}, "kind": "CASH"}'
    ran(command("topic", "create", topic, "--partitions", "1"))
    ran(command("publish", topic, document, "--schema", subject))
    (shown,) = ran(command("tail", topic, "--json")).documents
    assert shown["decoded"] == {"id": "5", "at": "2026-11-16T12:00:00Z", "parts": {"a": 1.5}, "kind": "CASH"}
    assert shown["schema"].isdigit()
    text = ran(command("tail", topic)).out
    assert '"kind": "CASH"' in text
    assert f"schema={shown['schema']}" in text
    refused = command("publish", topic, '{"ids": 5}', "--schema", subject)
    assert (refused.code, "ids" in refused.err) == (2, True)
    assert command("publish", topic, "not json", "--schema", subject).code == 2
    missing = command("publish", topic, "{}", "--schema", f"{subject}x")
    assert (missing.code, "millstream schema list shows those that do" in missing.err) == (3, True)


def test_a_topic_is_described_with_its_schema_and_its_readers(command: CommandLine, subject: str) -> None:
    topic = subject.removesuffix("-value")
    assert ran(command("topic", "create", topic, "--schema", f"value={subject}", "--validate", "content")).err == ""
    ran(command("subscription", "create", f"of-{topic}", "--topic", topic))
    described = ran(command("topic", "describe", topic, "--json")).document
    assert described["schema"]["validate"] == "content"
    assert (described["schema"]["value"]["subject"], described["schema"]["value"]["versions"]) == (subject, [1])
    assert described["readers"] == [{"kind": "subscription", "name": f"of-{topic}"}]
    text = ran(command("topic", "describe", topic)).out
    assert f"{subject}, AVRO (versions 1; validate content)" in text
    assert f"subscription of-{topic}" in text


def test_a_new_schema_is_tried_on_stored_messages(command: CommandLine, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    fields = [{"name": "id", "type": "int"}, {"name": "kind", "type": ["int", "string"]}]
    old = {"type": "record", "name": "Order", "fields": fields}
    subject = register(command, file, f"{topic}-value", json.dumps(old))
    ran(command("topic", "create", topic, "--partitions", "1"))
    for kind in ("1", '"a"', "2"):
        ran(command("publish", topic, f'{{"id": 1, "kind": {kind}}}', "--schema", subject))
    ran(command("publish", topic, "without a schema"))
    wider = {**old, "fields": [{"name": "id", "type": "long"}, *fields[1:], {"name": "n", "type": "int", "default": 0}]}
    file.write_text(json.dumps(wider))
    good = ran(command("schema", "check", subject, file, "--topic", topic, "--since", "7d", "--json")).document
    assert good == {
        "compatible": True,
        "reasons": [],
        "messages": 4,
        "unreadable": 0,
        "without_schema": 1,
        "first": [],
    }
    narrow = {**old, "fields": [fields[0], {"name": "kind", "type": "int"}]}
    file.write_text(json.dumps(narrow))
    bad = command("schema", "check", subject, file, "--topic", topic, "--json")
    assert bad.code == 5
    document = bad.document
    assert (document["compatible"], document["messages"], document["unreadable"]) == (False, 4, 1)
    assert document["first"][0]["offset"] == 1
    assert "incompatible" in command("schema", "check", subject, file, "--topic", topic).out
    # A subject that does not exist yet is compatible with anything valid.
    assert ran(command("schema", "check", f"{subject}-new", file, "--json")).document["compatible"] is True


@pytest.fixture(scope="module", autouse=True)
def _no_colour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        yield


def test_a_schema_rule_without_a_schema_is_noted(command: CommandLine, subject: str) -> None:
    missing, topic = f"{subject}-missing", f"{subject}-noted"
    noted = f"Subject {missing} has no schema yet: {topic} refuses messages until one is registered.\n"
    assert ran(command("topic", "create", topic, "--schema", f"value={missing}")).err == noted
    assert ran(command("topic", "alter", topic, "--validate", "off", "--schema", f"value={missing}")).err == ""
    assert ran(command("topic", "alter", topic, "--schema", f"value={missing}")).err == ""
    assert ran(command("topic", "alter", topic, "--validate", "id")).err == noted
