"""Subscriptions by command: leased messages, their workers, and errors for missing ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

import millstream as sdk
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

LEASE_S = 600


@pytest.fixture
def name(millstream: CommandLine, request: pytest.FixtureRequest) -> str:
    """A subscription on a topic of the same name, which has one partition."""
    name = str(request.node.name).replace("_", "-")[-40:].strip("-")
    assert millstream("topic", "create", name).code == 0
    assert millstream("subscription", "create", name, "--topic", name, "--start", "start").code == 0
    return name


def test_errors_use_the_names_that_were_typed(millstream: CommandLine, name: str) -> None:
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--lease", 0.01), "--lease (in seconds) must be at least 0.1, not 0.01"),
        (("--lease", "13h"), "--lease (in seconds) must be at most 43200, not 46800"),
        (("--attempts", 500), "--attempts must be at most 200, not 500"),
        (("--in-flight", 0), "--in-flight must be at least 1, not 0"),
        (("--expires", -2), "'--expires': '-2' is not a length of time"),
        (("--delivery", "twice"), "--delivery must be one of at-most-once, at-least-once, exactly-once, not 'twice'"),
        (("--backoff", "1m:1"), "--backoff MIN (60000 ms) is larger than --backoff MAX (1000 ms)"),
        (("--set", "share.delivery.count.limit=500"), "share.delivery.count.limit must be at most 200, not 500"),
    ]
    for flags, output in cases:
        for command in (("create", f"{name}-new", "--topic", name), ("update", name)):
            refused = millstream("subscription", *command, *flags)
            assert (refused.code != 0, refused.out) == (True, "")
            assert output in refused.err


def test_a_setting_that_does_not_exist_cannot_be_reset(millstream: CommandLine, server: Server, name: str) -> None:
    refused = millstream("subscription", "update", name, "--unset", "millstream.filtre")
    assert refused.code == 2
    assert "unknown setting 'millstream.filtre' of a subscription; did you mean 'millstream.filter'?" in refused.err
    # Kafka's tools remove settings of other versions.
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    change = ConfigEntry("millstream.filtre", "", incremental_operation=AlterConfigOpType.DELETE)
    resource = ConfigResource(ConfigResource.Type.GROUP, name, incremental_configs=[change])
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(60)


def test_a_seek_in_a_missing_partition_is_not_found(millstream: CommandLine, name: str) -> None:
    refused = millstream("subscription", "seek", name, "--to", "start", "--partition", 7)
    assert (refused.code, "has no queue there" in refused.err) == (3, True)
    assert millstream("subscription", "seek", name, "--to", "start", "--partition", 0).code == 0


def test_an_at_most_once_pull_leases_nothing(millstream: CommandLine, name: str) -> None:
    assert millstream("subscription", "update", name, "--delivery", "at-most-once").code == 0
    assert millstream.process("publish", name, stdin=b"a\n").code == 0
    output = millstream("subscription", "pull", name, "--wait", 60).err
    assert output == "1 message received at most once, and not delivered again.\n"


def test_a_pull_reports_the_outcome_of_its_messages(millstream: CommandLine, name: str) -> None:
    assert millstream.process("publish", name, stdin=b"a\nb\nc\n").code == 0
    pull = ("subscription", "pull", name, "--wait", 60)
    assert millstream(*pull, "-n", 1, "--release").err == "Released 1 message.\n"
    assert millstream(*pull, "-n", 1, "--reject", "no").err == "Rejected 1 message.\n"
    assert "1 message leased; it is redelivered" in millstream(*pull, "-n", 1).err
    assert millstream(*pull, "--accept").err == "Accepted 1 message.\n"
    assert millstream("subscription", "pull", name, "--accept").err == "No messages now.\n"
    assert millstream("subscription", "pull", name, "--accept", "--json").err == ""


def test_the_backlog_is_the_sum_of_its_states(millstream: CommandLine, name: str) -> None:
    """It includes messages that the queue has not scanned yet."""

    def counted() -> dict[str, int]:
        (queue,) = millstream("subscription", "describe", name, "--json").document["queues"]
        return {state: queue[state] for state in ("backlog", "available", "leased", "parked", "blocked", "rejecting")}

    assert millstream.process("publish", name, stdin=b"a\n" * 20).code == 0
    assert counted() == {"backlog": 20, "available": 20, "leased": 0, "parked": 0, "blocked": 0, "rejecting": 0}
    pull = ("subscription", "pull", name, "--wait", 60)
    assert millstream(*pull, "-n", 3).code == 0
    assert millstream(*pull, "-n", 2, "--release").code == 0
    counts = counted()
    assert (counts["backlog"], counts["leased"]) == (20, 3)
    assert sum(counts.values()) == 2 * counts["backlog"]


def test_every_interface_reports_the_holder_of_a_message(server: Server, millstream: CommandLine, name: str) -> None:
    assert millstream("subscription", "update", name, "--lease", LEASE_S).code == 0
    assert "No worker holds a message." in millstream("subscription", "leases", name).out
    assert millstream.process("publish", name, stdin=b"a\nb\nc\nd\n").code == 0
    assert "1 message leased; it is redelivered" in millstream("subscription", "pull", name, "--wait", 60, "-n", 1).err
    with httpx.Client(base_url=f"http://{server.http}/v1/subscriptions/{name}", timeout=60) as http:
        pull = http.post("/messages:pull", json={"max": 1, "wait_ms": 60_000, "worker": "till-7"})
        assert len(pull.json()["messages"]) == 1
        reached_from = pull.extensions["network_stream"].get_extra_info("client_addr")
        connected = sdk.connect_sync(server.kafka, client_id="packer-3")
        with connected as ms, ms.subscription(name, name=name) as messages:
            held = [next(messages), next(messages)]
            assert [message.offset for message in held] == [2, 3]
            by_sdk = ms.leases(name)
            by_http = http.get("/leases").json()
            by_command = json.loads(millstream("subscription", "leases", name, "--json").out)
            table = millstream("subscription", "leases", name).out
            cut = ms.leases(name, limit=1)
    assert (by_sdk.omitted, by_http["omitted"], by_command["omitted"]) == (0, 0, 0)
    # The last two may have come one by one, with different expiries.
    assert [offset for lease in by_sdk.leases for offset in range(lease.start, lease.end)] == [0, 1, 2, 3]
    assert all(
        lease.attempt == 1 and 0 < lease.remaining_ms <= LEASE_S * 1000 < lease.deadline_ms for lease in by_sdk.leases
    )
    cli, till, packer = by_sdk.leases[:3]
    assert cli.worker.startswith("cli/")
    assert (till.worker, till.address) == ("http/till-7", ":".join(map(str, reached_from)))
    assert (packer.worker.split("/")[0], packer.client_id) == ("packer-3", "packer-3")
    assert packer.address.startswith("127.0.0.1:")
    for reported in (by_http["leases"], by_command["leases"]):
        assert [_identity(queue) for queue in reported] == [_identity(lease._asdict()) for lease in by_sdk.leases]
    assert [line.split()[2] for line in table.splitlines()[1:4]] == ["0", "1", "2"]
    assert "packer-3" in table
    assert (len(cut.leases), cut.omitted) == (1, 3)


def _identity(lease: dict[str, Any]) -> tuple[object, ...]:
    keys = ("topic", "partition", "start", "end", "attempt", "worker", "client_id", "address")
    return tuple(lease[key] for key in keys)


def test_an_endpoint_that_no_node_pushes_to_is_reported(millstream: CommandLine, name: str) -> None:
    reported = "is a private address, to which node 1 does not push; allow it with --push-private-addresses true.\n"
    push = ("--push", "http://127.0.0.1:1/hook")
    assert millstream("subscription", "create", f"{name}-2", "--topic", name, *push).err == f"127.0.0.1 {reported}"
    changed = millstream("subscription", "update", name, "--push", "http://[::1]:1/hook", "--json")
    assert (changed.code, changed.err) == (0, f"::1 {reported}")
    for special in ("192.0.0.8", "168.63.129.16", "::7f00:1", "64:ff9b:1::a00:1", "::ffff:0:10.0.0.1", "fec0::1"):
        url = f"http://[{special}]/hook" if ":" in special else f"http://{special}/hook"
        assert millstream("subscription", "update", name, "--push", url).err == f"{special} {reported}"
    assert millstream("subscription", "update", name, "--push", "https://example.invalid/hook").err == ""
    for subscription in (name, f"{name}-2"):
        assert millstream("subscription", "delete", subscription, "--yes").code == 0


def test_a_group_that_only_has_settings_is_given_topics_by_an_update(
    server: Server, millstream: CommandLine, name: str
) -> None:
    group = f"{name}-set"
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    change = ConfigEntry("share.delivery.count.limit", "7", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=[change])
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(60)
    refused = millstream("subscription", "create", group, "--topic", name)
    assert refused.code == 5
    assert "give it topics with `millstream subscription update`" in refused.err
    assert millstream("subscription", "update", group, "--topic", name).code == 0
    described = millstream("subscription", "describe", group, "--json").document
    assert (described["topics"], described["settings"]["share.delivery.count.limit"]) == ([name], "7")


def test_if_not_exists_reports_differences_as_a_conflict(millstream: CommandLine) -> None:
    create = ("subscription", "create", "once", "--if-not-exists")
    assert millstream(*create, "--topic", "web", "--attempts", 3).code == 0
    again = millstream(*create, "--topic", "web", "--attempts", 3)
    assert (again.code, again.out) == (0, "There is already a subscription once on web.\n")
    assert millstream(*create, "--topic", "web", "--start", "start", "--json").document["created"] is False
    other = millstream(*create, "--topic", "mobile", "--attempts", 4)
    assert (other.code, other.out) == (5, "")
    assert "its topics are web, not mobile" in other.err
    assert "--attempts is '3', not '4'" in other.err
    named = millstream(*create, "--topic", "web", "--lease", 7, "--set", "share.delivery.count.limit=4")
    assert "share.delivery.count.limit is '3', not '4'; --lease is 30 s, not 7 s; change it" in named.err
