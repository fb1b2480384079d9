"""`millstream schema` against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli.exit_code import ExitCode
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

PROTO = 'syntax = "proto3";\n\nmessage Paid {\n  int64 id = 1;\n}\n'


@pytest.fixture(scope="module")
def millstream(server: Server) -> CommandLine:
    return CommandLine(server.kafka)


def avro(path: Path, *fields: str) -> str:
    described = ",".join(f'{{"name":"{name}","type":"int","default":0}}' for name in fields)
    path.write_text(f'{{"type":"record","name":"Paid","fields":[{described}]}}')
    return str(path)


def test_schemas_are_registered_shown_compared_and_deleted(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    subject, file = f"{topic}-value", tmp_path / "paid.avsc"
    made = millstream("schema", "register", subject, avro(file, "a"), "--json").document
    assert made["version"] == 1
    assert "version 2" in millstream("schema", "register", subject, avro(file, "a", "b")).out
    (listed,) = [one for one in millstream("schema", "list", "--json").document["schemas"] if one["subject"] == subject]
    assert (listed["version"], listed["type"]) == (2, "AVRO")
    assert subject in millstream("schema", "list", "--prefix", topic).out
    assert '"name": "Paid"' in millstream("schema", "show", subject, "--version", "1").out
    assert '+      "name": "b"' in millstream("schema", "diff", subject, "1").out
    assert millstream("schema", "delete", subject, "--version", "1", "--json").document["versions"] == [1]
    assert millstream("schema", "delete", subject).code == 0
    assert millstream("schema", "delete", subject, "--permanent", "--json").document["versions"] == [1, 2]
    assert millstream("schema", "show", subject).code == ExitCode.NOT_FOUND


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


def test_mistakes_are_explained(millstream: CommandLine, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "paid.txt"
    file.write_text("{}")
    assert "--type" in millstream("schema", "register", topic, str(file)).err
    refused = millstream("schema", "register", topic, str(file), "--type", "avro", "--reference", "A=b")
    assert (refused.code, "NAME=SUBJECT:VERSION" in refused.err) == (ExitCode.USAGE, True)
    assert millstream("schema", "register", topic, str(file), "--type", "avro").code == ExitCode.USAGE
