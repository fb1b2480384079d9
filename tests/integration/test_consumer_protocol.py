"""The newer group protocol (KIP-848) with confluent-kafka: members join, leave and die, and the broker restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from millstream_testing.command import CommandLine
from millstream_testing.group_members import ALL, PARTITIONS, WAIT_S, Member, create, evenly, send, step_until, total
from millstream_testing.server import Server

SETTINGS = {
    "group-initial-delay-ms": 100,
    "group-session-min-ms": 1000,
    "group-consumer-heartbeat-ms": 200,
    "group-consumer-session-ms": 8000,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with short heartbeat intervals and session timeouts."""
    with Server(tmp_path_factory.mktemp("consumer-groups") / "data", settings=SETTINGS) as started:
        yield started


def joined(server: Server, topic: str, **settings: Any) -> Member:
    return Member(server, topic, **{"group.protocol": "consumer", **settings})


def read_by(partition: int, *members: Member) -> set[int]:
    return {offset for member in members for offset in member.read[partition]}


def type_of(server: Server, group: str) -> str:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    groups = admin.list_consumer_groups().result(WAIT_S)
    return {listing.group_id: str(listing.type.name) for listing in groups.valid}[group]


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_members_join_and_leave(server: Server, topic: str, assignor: str) -> None:
    create(server, topic)
    send(server, topic, 20)
    settings = {"group.remote.assignor": assignor}
    first = joined(server, topic, **settings)
    step_until(lambda: first.partitions == ALL and total(first) == 20 * PARTITIONS, first)
    first.commit()
    second, third = joined(server, topic, **settings), joined(server, topic, **settings)
    step_until(evenly(first, second, third), first, second, third)
    send(server, topic, 20)
    step_until(lambda: total(first, second, third) == 40 * PARTITIONS, first, second, third)
    for member in (first, second, third):
        member.commit()
    second.close()
    step_until(evenly(first, third), first, third)
    first.close()
    step_until(lambda: third.partitions == ALL, third)
    send(server, topic, 20)
    step_until(lambda: total(first, second, third) == 60 * PARTITIONS, third)
    for partition in ALL:
        assert sorted(first.read[partition] + second.read[partition] + third.read[partition]) == list(range(60))
    third.close()


def test_the_next_member_continues_at_the_committed_offset(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 10)
    first = joined(server, topic)
    step_until(lambda: total(first) == 10 * PARTITIONS, first)
    first.commit()
    first.close()
    send(server, topic, 5)
    second = joined(server, topic)
    step_until(lambda: total(second) == 5 * PARTITIONS, second)
    assert {partition: list(range(10, 15)) for partition in ALL} == dict(second.read)
    second.close()


MEMBER_PROGRAM = """
import sys
from confluent_kafka import Consumer
address, topic = sys.argv[1:]
client = Consumer({
    "bootstrap.servers": address, "group.id": topic + "-group", "group.protocol": "consumer",
    "auto.offset.reset": "earliest", "enable.auto.commit": False,
})
client.subscribe([topic])
while True:
    client.poll(0.1)
"""


def test_a_member_dies(server: Server, topic: str) -> None:
    create(server, topic)
    first = joined(server, topic)
    step_until(lambda: first.partitions == ALL, first)
    with subprocess.Popen([sys.executable, "-c", MEMBER_PROGRAM, server.kafka, topic]) as other:
        try:
            step_until(lambda: len(first.partitions) == 2, first)
            send(server, topic, 20)
            os.kill(other.pid, signal.SIGKILL)
            step_until(lambda: first.partitions == ALL, first)
            step_until(lambda: set(first.read) == ALL and total(first) >= 20 * PARTITIONS, first)
        finally:
            other.kill()
    assert all(sorted(set(offsets)) == list(range(20)) for offsets in first.read.values())
    first.close()


def test_a_static_member_returns_to_its_partitions(server: Server, topic: str) -> None:
    create(server, topic)
    one = joined(server, topic, **{"group.instance.id": "one"})
    two = joined(server, topic, **{"group.instance.id": "two"})
    step_until(evenly(one, two), one, two)
    kept, held = set(one.held), set(two.held)
    two.close()
    again = joined(server, topic, **{"group.instance.id": "two"})
    step_until(lambda: again.held == held, one, again)
    assert one.held == kept
    one.close()
    again.close()


def test_topics_grow_and_match_an_expression(server: Server, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    create(server, topic, 1)
    member = joined(server, f"^{topic}(-more)?$", **{"group.id": f"{topic}-group"})
    step_until(lambda: member.held == {(topic, 0)}, member)
    for grown in admin.create_partitions([NewPartitions(topic, 2)]).values():
        grown.result(WAIT_S)
    step_until(lambda: member.held == {(topic, 0), (topic, 1)}, member)
    create(server, f"{topic}-more", 1)
    step_until(lambda: member.held == {(topic, 0), (topic, 1), (f"{topic}-more", 0)}, member)
    for deleted in admin.delete_topics([topic]).values():
        deleted.result(WAIT_S)
    step_until(lambda: member.held == {(f"{topic}-more", 0)}, member)
    member.close()


def test_a_live_group_migrates_to_the_new_protocol_and_back(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 10)
    classic: dict[str, Any] = {"group.protocol": "classic", "heartbeat.interval.ms": 200, "session.timeout.ms": 60_000}
    old = joined(server, topic, **classic)
    step_until(lambda: old.partitions == ALL and total(old) == 10 * PARTITIONS, old)
    old.commit()
    new = joined(server, topic)
    step_until(evenly(old, new), old, new)
    assert type_of(server, f"{topic}-group") == "CONSUMER"
    send(server, topic, 10)
    step_until(lambda: all(len(read_by(p, old, new)) == 20 for p in ALL), old, new)
    old.commit()
    new.commit()
    new.close()
    step_until(lambda: old.partitions == ALL, old)
    assert type_of(server, f"{topic}-group") == "CLASSIC"
    send(server, topic, 10)
    step_until(lambda: all(len(read_by(p, old, new)) == 30 for p in ALL), old)
    old.close()


def test_the_commands_show_the_group_type(server: Server, topic: str) -> None:
    millstream = CommandLine(server.kafka)
    create(server, topic)
    send(server, topic, 3)
    member = joined(server, topic, **{"client.id": "reader"})
    step_until(lambda: total(member) == 3 * PARTITIONS, member)
    member.commit()
    group = f"{topic}-group"
    groups = [
        listed_group
        for listed_group in millstream("group", "list", "--json").document["groups"]
        if listed_group["group"] == group
    ]
    assert [(group["type"], group["state"], group["members"], group["lag"]) for group in groups] == [
        ("consumer", "Stable", 1, 0)
    ]
    row = next(line.split() for line in millstream("group", "list").lines if line.startswith(group))
    assert row == [group, "consumer", "Stable", "1", "0"]
    described = millstream("group", "describe", group, "--json").document
    assert (described["type"], described["protocol"], described["lag"]) == ("consumer", "uniform", 0)
    (found_member,) = described["members"]
    assert found_member["client"] == "reader"
    assert sorted(found_member["partitions"]) == [[topic, index] for index in sorted(ALL)]
    shown = millstream("group", "describe", group)
    assert shown.lines[0] == f"{group}  (Stable, consumer group, 1 member, 0 messages behind)"
    for command in (("reset", group, "--to", "start"), ("delete", group)):
        assert millstream("group", *command).code == 5
    member.close()
    assert millstream("group", "reset", group, "--to", "start", "--topic", topic).code == 0
    assert millstream("group", "describe", group, "--json").document["lag"] == 3 * PARTITIONS
    assert millstream("group", "delete", group).code == 0
    assert millstream("group", "describe", group).code == 3


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_the_broker_restarts_while_members_read(start_server: Callable[..., Server], topic: str, crash: bool) -> None:
    server = start_server(**{name.replace("-", "_"): value for name, value in SETTINGS.items()})
    create(server, topic)
    send(server, topic, 20)
    members = [joined(server, topic) for _ in range(2)]
    step_until(evenly(*members), *members)
    # The first member may have read some of it before the other got the partition and reads it again.
    step_until(lambda: all(len(read_by(partition, *members)) == 20 for partition in ALL), *members)
    for member in members:
        member.commit()
    held = [set(member.held) for member in members]
    for _ in range(2):
        if crash:
            server.kill()
        else:
            server.stop()
        server.start()
        for member in members:
            member.step()
    send(server, topic, 20)
    step_until(lambda: all(len(read_by(partition, *members)) == 40 for partition in ALL), *members)
    # The earlier members are there again, with their partitions.
    assert [set(member.held) for member in members] == held
    joining = joined(server, topic)
    step_until(evenly(*members, joining), *members, joining)
    for member in (*members, joining):
        member.commit()
        member.close()
    late = joined(server, topic)
    send(server, topic, 1)
    step_until(lambda: total(late) >= PARTITIONS, late)
    assert {partition: [40] for partition in ALL} == dict(late.read)
    late.close()
