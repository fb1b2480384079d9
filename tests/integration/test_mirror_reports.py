"""What mirrors and their copies report: whatever is not mirrored, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from millstream.cli import mirror as mirror_commands
from millstream.core.acl import CLUSTER_NAME, Acl, Operation, PatternType, ResourceType
from millstream_testing.command import CommandLine, Outcome
from millstream_testing.security import ADMIN, declare_security, locked_server
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

PATIENCE_S = 60.0
SCHEMA = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'


class Admin(CommandLine):
    """Runs commands as the administrator of a locked broker."""

    def __init__(self, brokers: str, monkeypatch: pytest.MonkeyPatch, **access: object) -> None:
        super().__init__(brokers)
        self._monkeypatch = monkeypatch
        self._access = {"USER": ADMIN[0], "PASSWORD": ADMIN[1], **access}

    def __call__(self, *arguments: object) -> Outcome:
        with self._monkeypatch.context() as admin:
            for name, text in self._access.items():
                admin.setenv(f"MILLSTREAM_{name}", str(text))
            return super().__call__(*arguments)


@pytest.fixture(scope="module")
def paris(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    with Server(tmp_path_factory.mktemp("paris")) as server:
        yield CommandLine(server.kafka)


@pytest.fixture(scope="module")
def berlin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    with Server(tmp_path_factory.mktemp("berlin")) as server:
        yield CommandLine(server.kafka)


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Server]:
    """A broker whose clients authenticate, without access rules."""
    declare_security(tmp_path / "strict", dict((ADMIN,)))
    with Server(tmp_path / "strict", settings={"auth": "required", "super-users": ADMIN[0]}) as server:
        yield server


@pytest.fixture(autouse=True)
def _patient_create(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_commands, "START_S", PATIENCE_S)


def described(site: CommandLine, name: str) -> Any:
    return site("mirror", "describe", name, "--json").document


def listed(site: CommandLine, name: str) -> Any:
    return next(mirror for mirror in site("mirror", "list", "--json").document["mirrors"] if mirror["mirror"] == name)


def has(site: CommandLine, topic: str) -> bool:
    return bool(site("topic", "describe", topic).code == 0)


def test_a_copy_names_its_mirror_and_refuses_other_settings(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic, "--set", "retention.ms=1000000")
    berlin("mirror", "create", f"m-{topic}", "--from", paris.brokers, "--topics", topic, "--rename", "p.")
    wait_until(lambda: has(berlin, f"p.{topic}"))
    assert f"copy of      {topic} by mirror m-{topic}" in berlin("topic", "describe", f"p.{topic}").out
    document = berlin("topic", "describe", f"p.{topic}", "--json").document
    assert document["copy_of"] == {"mirror": f"m-{topic}", "topic": topic}
    assert paris("topic", "describe", topic, "--json").document["copy_of"] is None
    refused = berlin("topic", "alter", f"p.{topic}", "--set", "retention.ms=5")
    assert (refused.code, f"copy of mirror 'm-{topic}'" in refused.err) == (2, True), refused.err
    assert berlin("topic", "describe", f"p.{topic}", "--json").document["overrides"] == {"retention.ms": "1000000"}
    assert berlin("mirror", "failover", f"m-{topic}").code == 0
    assert berlin("topic", "alter", f"p.{topic}", "--set", "retention.ms=5").code == 0
    assert berlin("topic", "describe", f"p.{topic}", "--json").document["copy_of"] is None


def test_a_topic_deleted_at_the_source_stays_known_and_is_named(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    mirror, kept, gone = f"m-{topic}", f"{topic}-kept", f"{topic}-gone"
    for name in (kept, gone):
        paris("topic", "create", name, "--partitions", "2")
    berlin("mirror", "create", mirror, "--from", paris.brokers, "--topics", f"{topic}.*")
    wait_until(lambda: described(berlin, mirror)["lag"] == 0 and has(berlin, gone))
    paris("topic", "delete", gone, "--yes")

    def is_noted() -> bool:
        document = described(berlin, mirror)
        is_named = any("is gone from the source" in note for note in document["notes"])
        return is_named and (document["state"], document["lag_unknown"]) == ("running", 0)

    wait_until(is_noted)
    assert berlin("mirror", "update", mirror, "--set", "rate=100000000").code == 0
    states = set()

    def is_noted_again() -> bool:
        states.add((document := described(berlin, mirror))["state"])
        return is_noted() and document["settings"]["rate"] == "100000000"

    wait_until(is_noted_again)
    assert "retrying" not in states
    failed_over = berlin("mirror", "failover", mirror, "--json").document
    missing = {(partition["topic"], partition["missing"]) for partition in failed_over["partitions"]}
    assert (missing, failed_over["source_error"]) == ({(kept, 0), (gone, None)}, f"{gone} was deleted at the source")
    # Its first new record follows the mark at the cut.
    cuts = {
        (partition["topic"], partition["partition"]): partition["offset"] for partition in failed_over["partitions"]
    }
    published = berlin("publish", kept, "new", "--partition", "1", "--json").document
    assert published["offset"] == cuts[kept, 1] + 1


def test_a_topic_that_is_left_out_is_named_by_create_and_list(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic)
    first = berlin("mirror", "create", f"m-{topic}", "--from", paris.brokers, "--topics", topic, "--json").document
    assert first == {"mirror": f"m-{topic}", "notes": []}
    wait_until(lambda: has(berlin, topic))
    assert berlin("mirror", "failover", f"m-{topic}").code == 0
    assert (listed(berlin, f"m-{topic}")["state"], listed(berlin, f"m-{topic}")["topics"]) == ("failed over", 0)
    made = paris("mirror", "create", f"r-{topic}", "--from", berlin.brokers, "--topics", topic, "--rename", "z.")
    assert (made.code, f"topic '{topic}': its records came from this cluster" in made.err) == (0, True), made.err
    row = listed(paris, f"r-{topic}")
    assert (row["state"], row["topics"], "came from this cluster" in row["error"]) == ("running", 0, True), row
    assert paris("mirror", "delete", f"r-{topic}").code == 0


def test_access_rules_are_mirrored_only_between_sides_that_enforce_them(
    paris: CommandLine, strict: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--topics", "none", "--acls")
    refused = paris("mirror", "create", topic, "--from", strict.kafka, *flags)
    assert (refused.code, "--auth required" in refused.err) == (2, True), refused.err
    berlin = Admin(strict.kafka, monkeypatch)
    made = berlin("mirror", "create", topic, "--from", paris.brokers, *flags)
    assert (made.code, "its clients need not authenticate" in made.err) == (0, True), made.err
    assert "its clients need not authenticate" in listed(berlin, topic)["error"]
    assert berlin("mirror", "update", topic, "--set", "acls=false").code == 0
    wait_until(lambda: not listed(berlin, topic)["error"])


def may_read(principal: str) -> Acl:
    return Acl(resource_type=ResourceType.TOPIC, resource_name="*", principal=principal, operation=Operation.READ)


def test_a_locked_source_with_its_schemas_and_access_rules(
    strict: Server, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights = {
        (ResourceType.TOPIC, "*"): (Operation.READ, Operation.DESCRIBE_CONFIGS),
        (ResourceType.GROUP, "*"): (Operation.READ,),
        (ResourceType.CLUSTER, CLUSTER_NAME): (Operation.DESCRIBE,),
    }
    rules = frozenset(
        Acl(resource_type=kind, resource_name=name, pattern=PatternType.LITERAL, principal="User:mirror", operation=op)
        for (kind, name), operations in rights.items()
        for op in operations
    ) | {may_read("User:guest")}
    declare_security(tmp_path / "data", {"mirror": "mirror-password"}, rules)
    (tmp_path / "password").write_text("mirror-password")
    (tmp_path / "wrong").write_text("another-password")
    (tmp_path / "order.avsc").write_text(SCHEMA)
    name, subject = f"m-{topic}", f"{topic}-value"
    berlin = Admin(strict.kafka, monkeypatch)

    def rules_of(principal: str) -> int:
        return len(berlin("acl", "list", "--principal", principal, "--json").document["acls"])

    with locked_server(tmp_path) as locked:
        tls = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": ADMIN[0],
            "sasl.password": ADMIN[1],
            "ssl.ca.location": str(locked.certificates.ca),
        }
        paris = Admin(locked.server.kafka, monkeypatch, TLS_CA=locked.certificates.ca)
        assert paris("publish", topic, "secret").code == 0
        group = Consumer({"bootstrap.servers": locked.server.kafka, "group.id": f"{topic}-group", **tls})
        group.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        group.close()
        registered = paris("schema", "register", subject, tmp_path / "order.avsc", "--json")
        flags = ["--source-user", "mirror", "--source-tls-ca", locked.certificates.ca, "--schemas", "--acls"]
        wrong = ["--topics", topic, *flags, "--source-password-file", tmp_path / "wrong"]
        assert berlin("mirror", "create", name, "--from", locked.server.kafka, *wrong).code == 0
        wait_until(lambda: "password is wrong" in described(berlin, name)["error"])
        assert berlin("topic", "describe", topic).code != 0
        assert berlin("mirror", "update", name, "--set", f"password=@{tmp_path / 'password'}").code == 0

        def has_all() -> bool:
            codes = [
                berlin("schema", "show", subject, "--json").code,
                berlin("group", "describe", f"{topic}-group", "--json").code,
            ]
            return codes == [0, 0] and (rules_of("User:mirror"), rules_of("User:guest")) == (len(rules) - 1, 1)

        wait_until(has_all)
        assert "secret" in berlin("tail", topic, "--from", "start").out
        assert berlin("schema", "show", subject, "--json").document["id"] == registered.document["id"]
        assert "mirror-password" not in berlin("mirror", "describe", name, "--json").out
        for change in ("from=127.0.0.1:1", "sasl.mechanism=PLAIN"):
            elsewhere = berlin("mirror", "update", name, "--set", change)
            assert "password is not sent elsewhere" in elsewhere.err, "who changes the source does not learn it"
            assert elsewhere.code != 0
        refused = berlin("mirror", "create", f"{name}-2", "--from", locked.server.kafka, *wrong)
        assert "registry here has" in refused.err

        # A rule revoked while berlin is down is deleted there afterwards; one of berlin's own is not.
        strict.kill()
        declare_security(strict.data, {}, frozenset({may_read("User:berlin")}))
        assert paris("acl", "remove", "User:guest", "read", "topic:*").code == 0
        strict.start()
        wait_until(lambda: rules_of("User:guest") == 0)
        assert (rules_of("User:mirror"), rules_of("User:berlin")) == (len(rules) - 1, 1)
