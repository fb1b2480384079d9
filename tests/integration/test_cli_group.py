from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer

from millstream_testing.command import CommandLine

PATIENCE_S = 60.0


@contextmanager
def consuming(millstream: CommandLine, group: str, topic: str, number: int) -> Iterator[None]:
    """A member of a group that has read and committed a number of messages."""
    settings = {
        "bootstrap.servers": millstream.brokers,
        "group.id": group,
        "client.id": "reader",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        for _ in range(number):
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            assert message.error() is None
            consumer.commit(message=message, asynchronous=False)
        yield
    finally:
        consumer.close()


def fill(millstream: CommandLine, topic: str, number: int) -> None:
    millstream("topic", "create", topic)
    lines = "\n".join(map(str, range(number))).encode()
    assert millstream.process("publish", topic, stdin=lines).code == 0


def test_a_group_is_described_with_its_member_and_its_lag(millstream: CommandLine) -> None:
    fill(millstream, "seen", 10)
    with consuming(millstream, "seers", "seen", 4):
        described = millstream("group", "describe", "seers", "--json").document
        assert (described["group"], described["state"], described["lag"]) == ("seers", "Stable", 6)
        assert described["type"] == "classic"
        (member,) = described["members"]
        assert (member["client"], member["partitions"]) == ("reader", [["seen", 0]])
        assert described["offsets"] == [
            {
                "topic": "seen",
                "partition": 0,
                "committed": 4,
                "start": 0,
                "end": 10,
                "lag": 6,
                "member": member["member"],
            }
        ]
        shown = millstream("group", "describe", "seers")
        assert shown.lines[0] == "seers  (Stable, 1 member, 6 messages behind)"
        assert shown.lines[-1].split()[:5] == ["seen", "0", "4", "10", "6"]
        groups = [
            group for group in millstream("group", "list", "--json").document["groups"] if group["group"] == "seers"
        ]
        assert [(group["type"], group["state"], group["members"], group["lag"]) for group in groups] == [
            ("classic", "Stable", 1, 6)
        ]

        for command in (("reset", "seers", "--to", "start"), ("delete", "seers")):
            refused = millstream("group", *command)
            assert (refused.code, refused.out) == (5, "")
            assert "stop its consumers first" in refused.err


def test_a_group_is_moved_to_the_given_position(millstream: CommandLine) -> None:
    fill(millstream, "moved", 10)
    with consuming(millstream, "movers", "moved", 5):
        pass
    planned = millstream("group", "reset", "movers", "--to", "start", "--dry-run", "--json").document
    assert planned == {
        "group": "movers",
        "dry_run": True,
        "offsets": [{"topic": "moved", "partition": 0, "before": 5, "after": 0}],
    }
    assert millstream("group", "describe", "movers", "--json").document["lag"] == 5
    for to, committed in (("start", 0), ("7", 7), ("end", 10), ("1h", 0), ("99", 10)):
        reset = millstream("group", "reset", "movers", "--to", to, "--topic", "moved", "--json")
        assert (reset.code, reset.document["dry_run"]) == (0, False)
        (progress,) = millstream("group", "describe", "movers", "--json").document["offsets"]
        assert (progress["committed"], progress["lag"]) == (committed, 10 - committed)
    with consuming(millstream, "movers", "moved", 0):
        pass


def test_a_group_can_be_prepared_before_its_first_member(millstream: CommandLine) -> None:
    fill(millstream, "prepared", 3)
    assert millstream("group", "reset", "newcomers", "--to", "end", "--topic", "prepared").code == 0
    described = millstream("group", "describe", "newcomers", "--json").document
    assert (described["state"], described["lag"]) == ("Empty", 0)


def test_a_group_is_deleted(millstream: CommandLine) -> None:
    fill(millstream, "short", 1)
    millstream("group", "reset", "short-lived", "--to", "start", "--topic", "short")
    assert millstream("group", "delete", "short-lived", "--json").document == {"group": "short-lived", "deleted": True}
    assert millstream("group", "describe", "short-lived").code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (("describe", "nobody"), 3, "group 'nobody' does not exist"),
        (("delete", "nobody"), 3, "group 'nobody' does not exist"),
        (("reset", "nobody", "--to", "start"), 3, "group 'nobody' does not exist"),
        (("reset", "nobody", "--to", "start", "--topic", "no-such-topic"), 3, "does not exist"),
        (("reset", "nobody", "--to", "someday"), 2, "is not a position"),
        (("reset", "nobody"), 2, "--to"),
    ],
)
def test_invalid_group_commands_are_refused(
    millstream: CommandLine, arguments: tuple[str, ...], code: int, output: str
) -> None:
    refused = millstream("group", *arguments)
    assert (refused.code, refused.out) == (code, "")
    assert output in refused.err
