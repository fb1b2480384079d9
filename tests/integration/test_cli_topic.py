from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from millstream_testing.command import CommandLine, call_command
from millstream_testing.server import Server


def test_a_topic_from_create_to_delete(millstream: CommandLine) -> None:
    created = millstream("topic", "create", "life", "--partitions", 3, "--set", "retention.ms=1000", "--json")
    assert created.code == 0
    output = {"topic": "life", "id": "", "partitions": 3, "replication": 1, "created": True, "notes": []}
    assert {**created.document, "id": ""} == output
    assert created.err == "", "one node is meant to have one copy"

    described = millstream("topic", "describe", "life", "--json").document
    assert described["id"] == created.document["id"]
    assert described["overrides"] == {"retention.ms": "1000"}
    assert described["settings"]["flush"] == "always"
    assert [
        (partition["partition"], partition["start"], partition["end"]) for partition in described["partitions"]
    ] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
    ]

    assert (
        millstream("topic", "alter", "life", "--set", "flush=os", "--unset", "retention.ms", "--partitions", 4).code
        == 0
    )
    described = millstream("topic", "describe", "life", "--json").document
    assert described["overrides"] == {"flush": "os"}
    assert len(described["partitions"]) == 4

    assert millstream("topic", "delete", "life").out == "Deleted topic life.\n"
    assert millstream("topic", "describe", "life").code == 3


def test_topics_are_listed_without_internal_ones(millstream: CommandLine) -> None:
    millstream("topic", "create", "listed-b")
    millstream("topic", "create", "listed-a", "--partitions", 2)
    mine = [
        topic
        for topic in millstream("topic", "list", "--json").document["topics"]
        if topic["topic"].startswith("listed")
    ]
    assert [(topic["topic"], topic["partitions"], topic["replication"], topic["internal"]) for topic in mine] == [
        ("listed-a", 2, 1, False),
        ("listed-b", 1, 1, False),
    ]
    text = millstream("topic", "list")
    assert text.lines[0].split() == ["TOPIC", "PARTITIONS", "REPLICATION"]
    assert "__consumer_offsets" not in text.out


def test_a_description_is_readable(millstream: CommandLine) -> None:
    millstream("topic", "create", "shown", "--set", "segment.ms=5000")
    shown = millstream("topic", "describe", "shown")
    assert shown.lines[0] == "shown  (1 partition, 0 messages)"
    rows = [line.split() for line in shown.lines]
    assert ["PARTITION", "LEADER", "REPLICAS", "IN", "SYNC", "START", "END", "MESSAGES"] in rows
    assert ["0", "1", "1", "1", "0", "0", "0"] in rows
    assert any(line.split() == ["segment.ms", "5000", "this", "topic"] for line in shown.lines)


def test_an_existing_topic_is_a_conflict_unless_allowed(millstream: CommandLine) -> None:
    millstream("topic", "create", "twice")
    again = millstream("topic", "create", "twice")
    assert (again.code, again.out) == (5, "")
    assert "already exists" in again.err
    fine = millstream("topic", "create", "twice", "--if-not-exists", "--json")
    assert (fine.code, fine.document["created"]) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (("describe", "missing"), 3, "millstream topic list shows those that do"),
        (("delete", "missing"), 3, "does not exist"),
        (("alter", "missing", "--set", "flush=os"), 3, "does not exist"),
        (("create", "no spaces allowed"), 2, "may hold only letters"),
        (("create", "odd", "--set", "no.such.setting=1"), 2, "unknown setting 'no.such.setting' of a topic"),
        (("create", "odd", "--set", "retention.ms=soon"), 2, "must be a whole number"),
        (("create", "odd", "--set", "retention.ms"), 2, "--set takes NAME=VALUE"),
        (("create", "odd", "--replication", "3"), 2, "needs as many machines"),
        (("create", "odd", "--partitions", "0"), 2, "see millstream topic create --help"),
        (("alter", "odd"), 2, "nothing to change"),
    ],
)
def test_invalid_topics_are_refused_in_one_sentence(
    millstream: CommandLine, arguments: tuple[str, ...], code: int, output: str
) -> None:
    refused = millstream("topic", *arguments)
    assert (refused.code, refused.out) == (code, "")
    assert output in refused.err
    assert refused.err.startswith("millstream: ")
    assert refused.err.count("\n") == 1


def test_an_unknown_setting_cannot_be_unset(millstream: CommandLine) -> None:
    millstream("topic", "create", "spelled")
    refused = millstream("topic", "alter", "spelled", "--unset", "retention.sm")
    assert (refused.code, refused.out) == (2, "")
    assert "topics have no setting 'retention.sm'; did you mean 'retention.ms'?" in refused.err
    assert millstream("topic", "alter", "spelled", "--unset", "retention.ms").code == 0


@pytest.mark.parametrize("command", [("delete", "--yes"), ("describe",), ("alter", "--set", "retention.ms=1")])
def test_changing_a_missing_topic_does_not_advise_creating_it(
    millstream: CommandLine, command: tuple[str, ...]
) -> None:
    refused = millstream("topic", command[0], "never-made", *command[1:])
    assert (refused.code, refused.out) == (3, "")
    assert "topic 'never-made' does not exist; millstream topic list shows those that do" in refused.err


def test_a_declined_confirmation_exits_with_1_and_changes_nothing(millstream: CommandLine) -> None:
    millstream("topic", "create", "kept")
    terminal, theirs = pty.openpty()
    try:
        os.write(terminal, b"n\n")
        command = [sys.executable, "-m", "millstream.cli.main", "topic", "delete", "kept"]
        environment = {**os.environ, "MILLSTREAM_BROKERS": millstream.brokers}
        declined = subprocess.run(
            command, stdin=theirs, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
    finally:
        os.close(terminal)
        os.close(theirs)
    assert declined.returncode == 1
    assert declined.stderr.splitlines()[-1].endswith("cancelled; nothing was changed")
    assert millstream("topic", "describe", "kept").code == 0


def test_a_topic_never_shrinks(millstream: CommandLine) -> None:
    millstream("topic", "create", "grown", "--partitions", 2)
    refused = millstream("topic", "alter", "grown", "--partitions", 1)
    assert refused.code == 2
    assert "has 2 partitions" in refused.err


def test_an_unreachable_broker_is_reported_with_advice() -> None:
    refused = CommandLine("127.0.0.1:1")("topic", "list", "--timeout", 1)
    assert (refused.code, refused.out) == (4, "")
    assert "start one with `millstream serve`" in refused.err


@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:9092", "127.0.0.1 :9092"])
def test_an_invalid_address_is_a_usage_error(address: str) -> None:
    refused = CommandLine(address)("topic", "list")
    assert refused.code == 2
    assert "HOST:PORT" in refused.err


def test_the_address_of_http_is_recognized(server: Server) -> None:
    refused = CommandLine(server.http)("topic", "list")
    assert (refused.code, refused.out) == (4, "")
    assert "an HTTP server responds there; use the Kafka address" in refused.err


def test_the_brokers_may_be_given_before_the_command(server: Server) -> None:
    result = call_command(["--brokers", server.kafka, "topic", "list"])
    assert (result.code, result.err) == (0, "")
