from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import crc32c
import pytest

from millstream.protocol.records.batch import COMPRESSION_GZIP
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.child_process import child_process
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

CHECKED_FROM = 21
"""Where the part of a batch begins that its checksum covers, with the attributes in front."""


def values(millstream: CommandLine, topic: str, *arguments: object) -> list[str]:
    return millstream("tail", topic, "--raw", *arguments).lines


def test_a_message_round_trips_with_all_fields(millstream: CommandLine) -> None:
    millstream("topic", "create", "whole")
    published = millstream(
        "publish", "whole", "hello", "-k", "customer-7", "-H", "region=eu", "-H", "region=de", "--json"
    )
    assert published.code == 0
    topic_id = millstream("topic", "describe", "whole", "--json").document["id"]
    assert published.document == {"id": f"{topic_id}/0/0", "topic": "whole", "partition": 0, "offset": 0}
    (message,) = millstream("tail", "whole", "--json").documents
    assert message.pop("timestamp").endswith("Z")
    assert message.pop("timestamp_ms") > 1_600_000_000_000
    assert message == {
        "topic": "whole",
        "partition": 0,
        "offset": 0,
        "id": f"{topic_id}/0/0",
        "key": "customer-7",
        "value": "hello",
        "headers": [["region", "eu"], ["region", "de"]],
    }


def test_an_explicit_id_is_kept(millstream: CommandLine) -> None:
    assert millstream("publish", "named", "x", "--header", "message-id=order-1").out == "order-1\n"
    assert millstream("tail", "named", "--json").document["id"] == "order-1"


def test_lines_of_standard_input_are_messages(millstream: CommandLine) -> None:
    published = millstream.process("publish", "lines", stdin=b"one\n\nthree")
    created = "Topic lines did not exist; the broker created it.\n"
    assert (published.code, published.err) == (0, f"{created}Published 3 messages to lines.\n")
    assert [line.rpartition("/")[2] for line in published.lines] == ["0", "1", "2"]
    assert values(millstream, "lines") == ["one", "", "three"]


def test_a_large_file_is_published_once_and_in_order(millstream: CommandLine, tmp_path: Path) -> None:
    lines = [f"{number}-{'x' * 100}" for number in range(20_000)]
    (tmp_path / "input").write_text("\n".join(lines))
    millstream("topic", "create", "large")
    published = millstream("publish", "large", "--file", tmp_path / "input", "--no-ids", "--compression", "lz4")
    assert (published.code, published.out) == (0, "")
    assert published.err == "Published 20,000 messages to large.\n"
    assert values(millstream, "large", "--from", "start") == lines


def test_messages_larger_than_a_batch_of_the_topic_are_split(millstream: CommandLine, tmp_path: Path) -> None:
    millstream("topic", "create", "narrow", "--set", "max.message.bytes=2000")
    lines = [str(number) * 100 for number in range(10)] * 10
    (tmp_path / "input").write_text("\n".join(lines))
    assert millstream("publish", "narrow", "-f", tmp_path / "input", "--no-ids").code == 0
    assert values(millstream, "narrow", "--from", "start") == lines
    refused = millstream("publish", "narrow", "x" * 3000)
    assert refused.code == 1
    assert refused.err.startswith("millstream: publish to narrow-0:")
    assert "raise the topic's max.message.bytes" in refused.err


def test_keys_decide_the_partition_and_keep_their_order(millstream: CommandLine) -> None:
    millstream("topic", "create", "keyed", "--partitions", 4)
    lines = [f"key-{number % 8}:{number}" for number in range(64)]
    millstream.process("publish", "keyed", "--key-separator", ":", stdin="\n".join(lines).encode())
    by_key: dict[str, list[tuple[int, int]]] = {}
    for message in millstream("tail", "keyed", "--from", "start", "--json").documents:
        by_key.setdefault(message["key"], []).append((message["partition"], int(message["value"])))
    for key, found_values in by_key.items():
        assert len({partition for partition, _ in found_values}) == 1
        assert [number for _, number in found_values] == [n for n in range(64) if f"key-{n % 8}" == key]
    assert len({values[0][0] for values in by_key.values()}) > 1


def test_a_partition_can_be_chosen(millstream: CommandLine) -> None:
    millstream("topic", "create", "chosen", "--partitions", 3)
    assert millstream("publish", "chosen", "x", "-k", "k", "-p", 2, "--json").document["partition"] == 2
    assert values(millstream, "chosen", "-p", 2) == ["x"]
    assert values(millstream, "chosen", "-p", 0, "-p", 1) == []
    refused = millstream("publish", "chosen", "x", "--partition", 3)
    assert (refused.code, "has no partition 3" in refused.err) == (3, True)
    assert millstream("tail", "chosen", "-p", 9).code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (("x", "--file", "f"), 2, "not both"),
        (("x", "--key", "a", "--key-separator", ":"), 2, "not both"),
        (("--file", "no-such-file"), 3, "cannot read no-such-file: No such file or directory"),
        (("--file", "/"), 1, "/ is a folder; pass a file"),
        (("x", "--header", "nothing"), 2, "--header takes NAME=VALUE"),
        (("x", "--compression", "zip"), 2, "zip"),
    ],
)
def test_an_invalid_publish_is_refused(
    millstream: CommandLine, arguments: tuple[str, ...], code: int, output: str
) -> None:
    refused = millstream("publish", "mistaken", *arguments)
    assert (refused.code, refused.out) == (code, "")
    assert output in refused.err


def test_an_invalid_name_is_refused_with_the_rule(millstream: CommandLine) -> None:
    refused = millstream("publish", "not a name", "x")
    assert (refused.code, "publish to 'not a name': a topic name has at most 249" in refused.err) == (2, True)


def test_a_line_without_its_key_stops_and_reports_what_is_stored(millstream: CommandLine) -> None:
    refused = millstream.process("publish", "broken", "--key-separator", "=", stdin=b"a=1\nb")
    assert refused.code == 1
    assert "line 2 of the input has no '=' between key and value: 'b'" in refused.err
    assert "(stored: at least the first 1 message of the input)" in refused.err
    assert "(stored: nothing)" in millstream.process("publish", "broken", "--key-separator", "=", stdin=b"b\n").err


def test_a_line_that_is_too_large_is_named(millstream: CommandLine) -> None:
    millstream("topic", "create", "narrower", "--set", "max.message.bytes=1000")
    refused = millstream.process("publish", "narrower", "--no-ids", stdin=b"one\ntwo\n" + b"x" * 2000 + b"\nfour\n")
    assert refused.code != 0
    assert refused.err.startswith("millstream: line 3 of the input: ")


def test_a_delayed_message_is_delivered_later(millstream: CommandLine, topic: str) -> None:
    millstream("topic", "create", topic)
    millstream("subscription", "create", topic, "--topic", topic)
    assert millstream("publish", topic, "late", "--delay", 3600).code == 0
    assert millstream("publish", topic, "at once", "--delay", 0).code == 0
    late, at_once = millstream("tail", topic, "--json").documents
    due = {
        message["value"]: int(dict(message["headers"])["deliver-at"]) - message["timestamp_ms"]
        for message in (late, at_once)
    }
    assert 3_590_000 < due["late"] <= 3_610_000
    pulled = millstream("subscription", "pull", topic, "--wait", 30, "--json").documents
    assert [message["value"] for message in pulled] == ["at once"]


def test_tail_skips_a_batch_that_it_cannot_decompress(server: Server, millstream: CommandLine) -> None:
    millstream("topic", "create", "garbled")
    millstream("publish", "garbled", "before")
    batch = encode_batch([NewRecord(None, b"no gzip", (), 1)] * 2)
    struct.pack_into(">h", batch, CHECKED_FROM, COMPRESSION_GZIP)
    struct.pack_into(">I", batch, CHECKED_FROM - 4, crc32c.crc32c(bytes(batch[CHECKED_FROM:])))

    async def append() -> None:
        async with Client.connect(server.kafka, client_id="garbling") as client:
            await client.produce("garbled", 0, batch)

    asyncio.run(append())
    millstream("publish", "garbled", "behind")
    for position in ((), ("--from", "start")):
        reported = millstream("tail", "garbled", "--raw", *position)
        assert (reported.code, reported.lines) == (1, ["before", "behind"])
        assert "garbled-0: the batch at offsets 1 to 2 cannot be read (" in reported.err
        assert "; continuing at 3. Move a group past it with: " in reported.err
        assert "millstream: not everything could be shown: garbled-0: the batch at offsets 1 to 2" in reported.err


def test_topic_names_are_completed(server: Server, millstream: CommandLine) -> None:
    for name in ("completed-one", "completed-two", "other"):
        millstream("topic", "create", name)

    def complete(words: str) -> list[str]:
        environment = {
            "_MILLSTREAM_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(
            [sys.executable, "-m", "millstream.cli.main"], env=os.environ | environment, capture_output=True, text=True
        )
        return done.stdout.split()

    for command in ("tail", "publish", "topic describe", "subscription create s --topic"):
        assert complete(f"millstream --brokers {server.kafka} {command} comp") == ["completed-one", "completed-two"]
    assert complete("millstream --brokers 127.0.0.1:1 tail comp") == []


def test_tail_shows_the_last_messages_of_all_partitions(millstream: CommandLine) -> None:
    millstream("topic", "create", "last", "--partitions", 3)
    for number in range(15):
        millstream("publish", "last", number, "-p", number % 3)
    assert values(millstream, "last") == [str(number) for number in range(5, 15)]
    assert values(millstream, "last", "-n", 2) == ["13", "14"]
    assert values(millstream, "last", "-n", 0) == []


def test_tail_starts_at_the_given_position(millstream: CommandLine) -> None:
    for number in range(5):
        millstream("publish", "positions", number)
    assert values(millstream, "positions", "--from", "start") == ["0", "1", "2", "3", "4"]
    assert values(millstream, "positions", "--from", "start", "-n", 2) == ["0", "1"]
    assert values(millstream, "positions", "--from", "3") == ["3", "4"]
    assert values(millstream, "positions", "--from", "end") == []
    assert values(millstream, "positions", "--from", "1h") == ["0", "1", "2", "3", "4"]
    third = millstream("tail", "positions", "--from", "2", "-n", 1, "--json").document["timestamp"]
    assert values(millstream, "positions", "--from", third)[-3:] == ["2", "3", "4"]
    beyond = millstream("tail", "positions", "--from", "99", "--raw")
    assert (beyond.code, beyond.out) == (0, "")
    assert "does not contain offset 99; starting at 5" in beyond.err
    assert millstream("tail", "positions", "--from", "noon").code == 2


def test_json_is_on_one_line_in_a_pipe_and_control_characters_are_escaped(millstream: CommandLine) -> None:
    millstream("publish", "pretty", '{"b":[1,2],"a":"ü"}', "-k", "k", "-H", "h=v")
    millstream("publish", "pretty", "plain \x1b[2J text")
    shown = millstream("tail", "pretty").out
    assert '\n{"b": [1, 2], "a": "ü"}\n' in shown
    assert shown.splitlines()[0].startswith("pretty/0@0  20")
    assert shown.splitlines()[0].endswith("  key=k  h=v")
    assert "plain \\x1b[2J text" in shown


def test_binary_values_survive_json(millstream: CommandLine) -> None:
    millstream.process("publish", "binary", stdin=b"\xff\xfe\n")
    assert millstream("tail", "binary", "--json").document["value"] == {"base64": "//4="}


def test_follow_prints_new_messages(millstream: CommandLine) -> None:
    millstream("publish", "followed", "before")
    command = [sys.executable, "-m", "millstream.cli.main", "tail", "followed", "-f", "--json", "--brokers"]
    with child_process([*command, millstream.brokers], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        try:
            assert json.loads(tail.stdout.readline())["value"] == "before"
            millstream("publish", "followed", "after")
            assert json.loads(tail.stdout.readline())["value"] == "after"
        finally:
            tail.terminate()


def test_follow_ends_after_the_requested_number(millstream: CommandLine) -> None:
    millstream("publish", "counted", "one")
    command = [
        sys.executable,
        "-m",
        "millstream.cli.main",
        "tail",
        "counted",
        "--from",
        "start",
        "-n",
        "2",
        "-f",
        "--raw",
    ]
    with child_process([*command, "--brokers", millstream.brokers], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"one\n"
        millstream("publish", "counted", "two")
        assert tail.stdout.read() == b"two\n"
        assert tail.wait() == 0


def test_a_closed_pipe_is_not_an_error(millstream: CommandLine) -> None:
    millstream.process("publish", "cut", stdin=b"x\n" * 5000)
    command = f"{sys.executable} -m millstream.cli.main tail cut --from start --brokers {millstream.brokers} | head -1"
    cut = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (cut.returncode, cut.stderr) == (0, "")


def test_a_missing_topic_is_not_found(millstream: CommandLine) -> None:
    refused = millstream("tail", "never-made")
    assert (refused.code, refused.out) == (3, "")
    assert "millstream topic create never-made" in refused.err
