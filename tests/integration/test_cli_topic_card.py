"""The owner, description and contract of a topic: set and shown by the commands and by Kafka tools."""

from __future__ import annotations

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 60.0
CONTRACT = "https://contracts.example/orders.yaml"


def card(millstream: CommandLine, topic: str) -> tuple[str | None, str | None, str | None]:
    described = millstream("topic", "describe", topic, "--json").document
    return described["owner"], described["description"], described["contract"]


def test_a_card_is_written_shown_and_changed(millstream: CommandLine, topic: str) -> None:
    flags = ("--owner", "team-billing", "--description", "Orders as they come in.", "--contract", CONTRACT)
    assert millstream("topic", "create", topic, *flags).code == 0
    assert card(millstream, topic) == ("team-billing", "Orders as they come in.", CONTRACT)
    shown = millstream("topic", "describe", topic).lines
    assert "owner        team-billing" in shown
    assert f"contract     {CONTRACT}" in shown
    assert not any("millstream." in line for line in shown)

    assert millstream("topic", "alter", topic, "--owner", "team-orders", "--description", "").code == 0
    assert card(millstream, topic) == ("team-orders", None, CONTRACT)
    assert millstream("topic", "alter", topic, "--unset", "millstream.contract", "--set", "flush=os").code == 0
    assert card(millstream, topic) == ("team-orders", None, None)
    assert "description" not in " ".join(millstream("topic", "describe", topic).lines)


def test_a_topic_without_a_card_has_none(millstream: CommandLine, topic: str) -> None:
    assert millstream("topic", "create", topic, "--owner", "").code == 0
    assert card(millstream, topic) == (None, None, None)
    assert millstream("topic", "describe", topic, "--json").document["overrides"] == {}


def test_invalid_text_is_refused(millstream: CommandLine, topic: str) -> None:
    refused = millstream("topic", "create", topic, "--owner", "two\nlines")
    assert refused.code == 2
    assert "millstream.owner must be one line of printable text" in refused.err


def test_kafka_tools_read_and_write_the_card(server: Server, millstream: CommandLine, topic: str) -> None:
    assert millstream("topic", "create", topic, "--owner", "team-billing").code == 0
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    (described,) = admin.describe_configs([resource]).values()
    assert described.result(WAIT_S)["millstream.owner"].value == "team-billing"
    entry = ConfigEntry("millstream.description", "From elsewhere", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    (altered,) = admin.incremental_alter_configs([changed]).values()
    altered.result(WAIT_S)
    assert card(millstream, topic) == ("team-billing", "From elsewhere", None)


def test_the_card_survives_a_restart(start_server: object) -> None:
    assert callable(start_server)
    server: Server = start_server()
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", "kept-card", "--owner", "me").code == 0
    server.restart(clean=False)
    assert card(millstream, "kept-card") == ("me", None, None)
