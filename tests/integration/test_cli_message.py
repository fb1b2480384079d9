"""`millstream message show` against a real broker."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 60.0


@pytest.fixture
def written(server: Server, millstream: CommandLine, topic: str) -> str:
    """A topic with one compressed batch of an idempotent producer."""
    assert millstream("topic", "create", topic).code == 0
    settings = {"bootstrap.servers": server.kafka, "enable.idempotence": True, "compression.type": "zstd"}
    producer = Producer({**settings, "linger.ms": 500, "log_level": 0})
    for number in range(3):
        headers: list[tuple[str, str | bytes | None]] = [("region", b"eu"), ("raw", b"\xff"), ("empty", None)]
        body = json.dumps({"order": number, "text": "x" * 50}).encode()
        producer.produce(topic, body, key=f"customer-{number}", headers=headers, timestamp=1_700_000_000_000)
    producer.produce(topic, None, key="gone", timestamp=1_700_000_000_000)
    assert producer.flush(WAIT_S) == 0
    return topic


def test_a_message_is_shown_with_its_batch(millstream: CommandLine, written: str) -> None:
    shown = millstream("message", "show", written, 0, 1, "--json")
    assert shown.code == 0
    assert millstream("message", "show", f"{written}/0/1", "--json") == shown
    assert millstream("message", "show", shown.document["id"], "--json") == shown
    assert millstream("message", "show", written, 0).code == 2
    document = shown.document
    assert (document["topic"], document["partition"], document["offset"]) == (written, 0, 1)
    assert document["key"] == "customer-1"
    assert json.loads(document["value"])["order"] == 1
    assert document["headers"] == [["region", "eu"], ["raw", {"base64": "/w=="}], ["empty", None]]
    assert (document["timestamp_ms"], document["timestamp_type"]) == (1_700_000_000_000, "CreateTime")
    batch = document["batch"]
    assert batch["first_offset"] <= 1 <= batch["last_offset"]
    assert batch["records"] == batch["last_offset"] - batch["first_offset"] + 1
    assert (batch["compression"], batch["transactional"], batch["control"]) == ("zstd", False, False)
    assert batch["producer_id"] >= 0
    assert batch["last_sequence"] - batch["first_sequence"] == batch["records"] - 1


def test_the_default_output_is_readable(millstream: CommandLine, written: str) -> None:
    shown = millstream("message", "show", written, 0, 0)
    assert shown.lines[0] == f"{written}/0@0"
    assert "key       customer-0" in shown.lines
    assert "header    region = eu" in shown.lines
    assert "header    raw = \\xff" in shown.lines
    assert any(line.startswith("batch     offsets 0 to ") and "checksum right" in line for line in shown.lines)
    assert any(line.startswith("producer  id ") for line in shown.lines)
    assert '  "order": 0,' in shown.lines
    deletion = millstream("message", "show", written, 0, 3)
    assert any(line.startswith("value     null") for line in deletion.lines)


def test_only_the_value_is_printed_on_request(millstream: CommandLine, written: str) -> None:
    shown = millstream.process("message", "show", written, 0, 2, "--raw")
    assert json.loads(shown.out)["order"] == 2
    assert not shown.out.endswith("\n")
    assert millstream("message", "show", written, 0, 2, "--raw", "--json").code == 2


def test_a_missing_message_is_reported(millstream: CommandLine, written: str) -> None:
    at_the_end = millstream("message", "show", written, 0, 4)
    beyond = millstream("message", "show", written, 0, 99)
    for outcome in (at_the_end, beyond):
        assert outcome.code == 3
        assert "holds offsets 0 to 3" in outcome.err
    assert millstream("message", "show", written, 7, 0).code == 3
    nowhere = millstream("message", "show", "no-such-topic", 0, 0)
    assert nowhere.code == 3
    assert millstream("topic", "create", f"{written}-empty").code == 0
    assert "the partition is empty" in millstream("message", "show", f"{written}-empty", 0, 0).err


def test_a_trace_shows_the_history_of_a_message_in_every_subscription(
    server: Server, millstream: CommandLine, topic: str
) -> None:
    assert millstream("topic", "create", topic).code == 0
    for name, condition in ((f"{topic}-all", None), (f"{topic}-eu", "key = 'eu'"), (f"{topic}-late", None)):
        flags = ("--filter", condition) if condition else ()
        assert millstream("subscription", "create", name, "--topic", topic, *flags).code == 0
    assert millstream("publish", topic, "--key", "us", "hello").code == 0
    pulled = millstream("subscription", "pull", f"{topic}-all", "--reject", "not an order")
    assert pulled.code == 0
    assert millstream("subscription", "pull", f"{topic}-eu", "--wait", 0.2).code == 0
    assert millstream("subscription", "pull", f"{topic}-late").code == 0

    def traced(position: str) -> dict[str, dict[str, object]]:
        result = millstream("message", "trace", position, "--json")
        assert result.code == 0
        assert result.document["published_ms"] > 0
        return {
            subscription["subscription"].removeprefix(f"{topic}-"): subscription
            for subscription in result.document["subscriptions"]
        }

    deadline = time.monotonic() + WAIT_S
    while (lives := traced(f"{topic}/0/0"))["all"]["state"] != "dead-lettered":
        assert time.monotonic() < deadline
    assert lives["all"]["reason"] == "not an order"
    assert lives["all"]["dead_letter"] == {"topic": f"{topic}-all-dlq", "partition": 0, "offset": 0}
    assert lives["eu"]["state"] == "filtered"
    assert (lives["late"]["state"], lives["late"]["attempts"]) == ("leased", 1)
    shown = millstream("message", "trace", f"{topic}/0/0")
    assert any(line.startswith(f"{topic}-all: dead-lettered by ") for line in shown.lines)
    assert any(line.startswith(f"{topic}-late: leased by ") for line in shown.lines)
    assert millstream("message", "trace", f"{topic}/0@0").out == shown.out
    by_id = millstream("message", "trace", millstream("message", "trace", f"{topic}/0/0", "--json").document["id"])
    assert by_id.code == 0
    refused = millstream("message", "trace", f"{topic}/0")
    assert refused.code == 2
    assert "is not TOPIC/PARTITION/OFFSET, as in orders/0/4711; to find a message by its id" in refused.err
    missing = millstream("message", "trace", f"{topic}/0/99")
    assert (missing.code, f"there is no message at {topic}/0/99" in missing.err) == (3, True)


def test_a_ledger_has_the_history_of_a_message_after_a_crash(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        command = CommandLine(server.kafka)
        assert command("topic", "create", "orders").code == 0
        assert command("subscription", "create", "billing", "--topic", "orders", "--ledger").code == 0
        assert command("publish", "orders", "hello").code == 0
        assert command("subscription", "pull", "billing", "--accept").code == 0
        (before,) = command("message", "trace", "orders/0/0", "--json").document["subscriptions"]
        server.restart(clean=False)
        (after,) = command("message", "trace", "orders/0/0", "--json").document["subscriptions"]
    assert [event["kind"] for event in after["events"]] == ["acquired", "accepted"]
    # Only the address of the worker was in memory.
    assert after == {**before, "client_id": "", "address": ""}
