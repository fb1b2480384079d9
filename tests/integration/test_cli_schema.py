"""`millstream schema` against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import Producer

from millstream.cli.exit_code import ExitCode
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

PROTO = 'syntax = "proto3";\n\nmessage Paid {\n  int64 id = 1;\n}\n'


def avro(path: Path, *fields: str) -> str:
    described = ",".join(f'{{"name":"{name}","type":"int","default":0}}' for name in fields)
    path.write_text(f'{{"type":"record","name":"Paid","fields":[{described}]}}')
    return str(path)


def test_schemas_are_registered_shown_compared_and_deleted(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    subject, file = f"{topic}-value", tmp_path / "paid.avsc"
    made = millstream("schema", "register", subject, avro(file, "a"), "--json").document
    assert made["version"] == 1
    assert "version 2" in millstream("schema", "register", subject, avro(file, "a", "b")).out
    (schema,) = [
        schema for schema in millstream("schema", "list", "--json").document["schemas"] if schema["subject"] == subject
    ]
    assert (schema["version"], schema["type"]) == (2, "AVRO")
    assert subject in millstream("schema", "list", "--prefix", topic).out
    assert '"name": "Paid"' in millstream("schema", "show", subject, "--version", "1").out
    assert '+      "name": "b"' in millstream("schema", "diff", subject, "1").out
    assert millstream("schema", "delete", subject, "--version", "1", "--json").document["versions"] == [1]
    assert millstream("schema", "delete", subject).code == 0
    assert millstream("schema", "delete", subject, "--permanent", "--json").document["versions"] == [1, 2]
    gone = millstream("schema", "show", subject)
    assert (gone.code, "millstream schema list shows those that do" in gone.err) == (ExitCode.NOT_FOUND, True)
    file.write_text('{"type": "recor"}')
    refused = millstream("schema", "register", subject, file)
    assert (refused.code, refused.err.startswith(f"millstream: {file} is not a valid schema: ")) == (2, True)


def test_the_level_is_set_and_reset(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "paid.proto"
    file.write_text(PROTO)
    assert millstream("schema", "register", topic, str(file)).code == 0
    assert millstream("schema", "show", topic).out == PROTO
    file.write_text(PROTO.replace("int64", "string"))
    assert millstream("schema", "register", topic, str(file)).code == ExitCode.CONFLICT
    assert millstream("schema", "compatibility", topic).out == "BACKWARD\n"
    assert millstream("schema", "compatibility", topic, "--set", "none").out == "NONE\n"
    assert millstream("schema", "register", topic, str(file)).code == 0
    assert millstream("schema", "compatibility", topic, "--set", "default").out == "BACKWARD\n"
    assert millstream("schema", "compatibility", topic, "--set", "never").code == ExitCode.USAGE


def test_errors_are_explained(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "paid.txt"
    file.write_text("{}")
    assert "--type" in millstream("schema", "register", topic, str(file)).err
    refused = millstream("schema", "register", topic, str(file), "--type", "avro", "--reference", "A=b")
    assert (refused.code, "NAME=SUBJECT:VERSION" in refused.err) == (ExitCode.USAGE, True)
    assert millstream("schema", "register", topic, str(file), "--type", "avro").code == ExitCode.USAGE


def test_an_incompatible_schema_is_explained_in_sentences(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    subject, file = f"{topic}-value", tmp_path / "paid.avsc"
    millstream("schema", "register", subject, avro(file, "a"))
    file.write_text(file.read_text().replace('"int","default":0', '"string"'))
    checked = millstream("schema", "check", subject, file)
    assert (checked.code, "errorType" in checked.out) == (ExitCode.CONFLICT, False)
    assert "Field a has another type" in checked.out


def test_a_registrys_topic_is_imported_with_its_ids_and_exported(
    server: Server, millstream: CommandLine, topic: str
) -> None:
    """As written by Confluent's registry: compacted, with configurations, deletions and irrelevant records."""
    inner, outer = '{"type":"record","name":"In","fields":[]}', '{"type":"array","items":"In"}'
    reference = [{"name": "In", "subject": "in", "version": 1}]
    stored: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
        ({"keytype": "NOOP", "magic": 0}, None),
        ({"keytype": "CONFIG", "subject": None, "magic": 0}, {"compatibilityLevel": "FULL"}),
        (
            {"keytype": "CONFIG", "subject": "out", "magic": 0},
            {"subject": "out", "alias": "in", "normalize": True, "defaultMetadata": {"properties": {"a": "b"}}},
        ),
        ({"keytype": "MODE", "subject": "in", "magic": 0}, {"subject": "in", "mode": "READONLY"}),
        (schema_key("in", 1), {"subject": "in", "version": 1, "id": 40, "schema": inner, "deleted": False}),
        (
            schema_key("out", 3),
            {"subject": "out", "version": 3, "id": 41, "references": reference, "schema": outer, "deleted": False},
        ),
        (schema_key("old", 1), {"subject": "old", "version": 1, "id": 7, "schema": '"int"', "deleted": False}),
        ({"keytype": "DELETE_SUBJECT", "subject": "old", "magic": 0}, {"subject": "old", "version": 1}),
    ]
    producer = Producer({"bootstrap.servers": server.kafka})
    for key, value in stored:
        producer.produce(topic, key=json.dumps(key), value=None if value is None else json.dumps(value))
    assert producer.flush(60) == 0
    context = f".{topic}"
    made = millstream("schema", "import", "--topic", topic, "--context", context, "--json").document
    assert made == {"versions": 3, "context": context}
    with httpx.Client(base_url=f"http://{server.http}/registry") as registry:
        config = {"alias": "in", "normalize": True, "defaultMetadata": {"properties": {"a": "b"}}}
        assert registry.get(f"/config/:{context}:out").json() == config
        assert registry.get(f"/mode/:{context}:in").json() == {"mode": "READONLY"}
        registry.put(f"/config/:{context}:out", json={"alias": None})
    shown = millstream("schema", "show", f":{context}:out", "--json").document
    assert (shown["id"], shown["version"], shown["references"]) == (41, 3, reference)
    assert millstream("schema", "show", f":{context}:old").code == ExitCode.NOT_FOUND
    assert millstream("schema", "compatibility", f":{context}:in").out == "FULL\n"
    again = millstream("schema", "import", "--topic", topic, "--context", context)
    assert (again.code, "empty" in again.err) == (ExitCode.CONFLICT, True)

    absent = millstream("schema", "import", "--topic", f"{topic}-absent", "--context", f".{topic}-new")
    assert (absent.code, "--from" in absent.err, "topic create" in absent.err) == (ExitCode.NOT_FOUND, True, False)

    exported = f"{topic}-exported"
    other = millstream("schema", "export", "--topic", f"{topic}-other", "--context", f".{topic}-none")
    assert all(text in other.out for text in ("Exported 0 versions", "Not exported: the contexts .", context))
    made = millstream("schema", "export", "--topic", exported, "--context", context, "--json").document
    assert (made["versions"], context in made["other_contexts"]) == (3, False)
    assert millstream("schema", "export", "--topic", exported, "--context", context).code == ExitCode.CONFLICT
    written = [json.loads(line) for line in millstream("tail", exported, "--from", "start", "--raw").out.splitlines()]
    assert {"subject": f":{context}:in", "version": 1, "id": 40, "schema": inner, "deleted": False} in written
    del config["alias"]
    assert {"subject": f":{context}:out", **config} in written
    assert {"subject": f":{context}:in", "mode": "READONLY"} in written
    assert [version["deleted"] for version in written if version.get("subject") == f":{context}:old"] == [True]


def schema_key(subject: str, version: int) -> dict[str, Any]:
    return {"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1}
