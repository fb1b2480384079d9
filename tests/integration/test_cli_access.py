"""`millstream user`, `acl` and `quota` against a locked broker."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedBroker
from millstream_testing.command import CommandLine, Outcome
from millstream_testing.security import declare_security

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Commands as the super user `admin`."""
    data: Path = tmp_path_factory.mktemp("access") / "data"
    declare_security(data, {"admin": "admin-password"})
    broker = EmbeddedBroker(data, settings={"auth": "required", "super-users": "admin"})
    broker.start_and_wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_USER", "admin")
        patch.setenv("MILLSTREAM_PASSWORD", "admin-password")
        yield CommandLine(broker.kafka_address)
    broker.stop_and_wait()


def test_an_operator_lists_all_groups_and_describes_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own", "others"):
        assert run("topic", "create", f"{name}-topic").code == 0
        assert run("group", "reset", f"{name}-group", "--to", "start", "--topic", f"{name}-topic").code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("oper-password"))
    assert run("user", "create", "oper", "--password-stdin").code == 0
    assert run("acl", "grant", "User:oper", "operator", "topic:own-topic", "group:own-group", "cluster").code == 0
    monkeypatch.setenv("MILLSTREAM_USER", "oper")
    monkeypatch.setenv("MILLSTREAM_PASSWORD", "oper-password")
    groups = run("group", "list", "--json").document["groups"]
    numbers = {group["group"]: (group["members"], group["lag"]) for group in groups}
    assert (numbers["own-group"], numbers["others-group"]) == ((0, 0), (None, None))
    refused = run("group", "describe", "others-group")
    assert refused.code != 0
    assert "needs DESCRIBE on group:others-group" in refused.err
    monkeypatch.setattr("sys.stdin", io.StringIO("a-password"))
    assert "creating a user needs" in run("user", "create", "another", "--password-stdin").err


def test_a_role_grants_the_rules_that_it_prints(run: Run) -> None:
    granted = run("acl", "grant", "User:ann", "worker", "topic:orders", "group:billing")
    assert granted.lines == [
        "allow User:ann read topic:orders (literal)",
        "allow User:ann read group:billing (literal)",
        "allow User:ann describe_configs group:billing (literal)",
    ]
    assert run("acl", "explain", "User:ann", "read", "topic:orders").lines == [
        "allowed: allow User:ann read topic:orders"
    ]
    assert run("acl", "explain", "User:ann", "write", "topic:orders").lines == ["denied: no rule allows it"]
    assert run("acl", "revoke", "User:ann", "worker", "topic:orders", "group:billing").lines == ["3 rules removed."]
    assert run("acl", "list", "--principal", "User:ann", "--json").document == {"acls": []}


def test_deleting_a_user_counts_the_rules_that_remain(run: Run, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("a-long-password")
    for allow in (True, False):
        assert run("user", "create", "gil", "--password-file", tmp_path / "password").code == 0
        rule = ("User:gil", "read", "topic:orders")
        assert run("acl", *(("allow", *rule) if allow else ("remove", *rule))).code == 0
        deleted = run("user", "delete", "gil", "--yes", "--json").document
        assert deleted["deleted"]
        assert [note.split(",")[0] for note in deleted["notes"]] == ["User:gil still has 1 access rule"] * allow


def test_revoking_a_role_leaves_deny_rules(run: Run) -> None:
    run("acl", "deny", "User:dan", "read", "topic:payroll")
    run("acl", "grant", "User:dan", "reader", "topic:payroll")
    assert run("acl", "explain", "User:dan", "read", "topic:payroll").lines == [
        "denied: deny User:dan read topic:payroll"
    ]
    run("acl", "revoke", "User:dan", "reader", "topic:payroll")
    (rule,) = run("acl", "list", "--principal", "User:dan", "--json").document["acls"]
    assert (rule["permission"], rule["operation"]) == ("deny", "read")


def test_one_of_two_opposite_rules_is_removed(run: Run) -> None:
    rule = ("User:ron", "read", "topic:rents")
    for permission in ("allow", "deny"):
        assert run("acl", permission, *rule).code == 0
    refused = run("acl", "remove", *rule, "--only", "grant")
    assert (refused.code, "--only takes allow or deny, not 'grant'" in refused.err) == (2, True)
    assert run("acl", "remove", *rule, "--only", "allow").lines == ["1 rule removed."]
    (rule_left,) = run("acl", "list", "--principal", "User:ron", "--json").document["acls"]
    assert rule_left["permission"] == "deny"
    run("acl", "allow", *rule)
    assert run("acl", "remove", *rule).lines == ["2 rules removed."]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("boss", "topic:orders"), "the roles are reader, writer, worker, operator"),
        (("writer", "group:billing"), "a writer has no rights on a group, only on"),
    ],
)
def test_an_invalid_role_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    refused = run("acl", "grant", "User:ann", *arguments)
    assert refused.code != 0
    assert says in refused.err


def test_explain_knows_super_users(run: Run) -> None:
    assert run("acl", "explain", "User:admin", "alter", "cluster").lines == ["allowed: User:admin is a super user"]
    document = run("acl", "explain", "User:admin", "alter", "cluster", "--json").document
    assert document == {"allowed": True, "super_user": True, "rule": None}


def test_creating_a_topic_does_not_require_describe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _add_user(run, "erin", "allow User:erin create cluster")
    run("acl", "deny", "User:erin", "create", "topic:erins")
    assert run("acl", "explain", "User:erin", "create", "topic:erins").lines == [
        "allowed: allow User:erin create cluster:kafka-cluster"
    ]
    _become(monkeypatch, "erin")
    created = run("topic", "create", "erins")
    assert (created.code, created.lines) == (0, ["Created topic erins."])
    assert "You may not describe it." in created.err
    again = run("topic", "create", "erins", "--if-not-exists", "--json").document
    assert (again["created"], again["partitions"]) == (False, None)


def test_deleting_a_group_names_the_right_that_it_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _add_user(run, "gus", "allow User:gus read group:known")
    _become(monkeypatch, "gus")
    for group in ("known", "unknown"):
        refused = run("group", "delete", group)
        assert (refused.code, f"needs DELETE on group:{group}" in refused.err) == (1, True)
    _become(monkeypatch, "admin")
    assert "group 'known' does not exist" in run("group", "delete", "known").err


def test_a_name_that_looks_like_a_pattern_is_refused(run: Run) -> None:
    for resource in ("topic:ord*", "group:ord*"):
        refused = run("acl", "allow", "User:pat", "read", resource)
        assert refused.code != 0
        assert f"use --prefixed {resource.removesuffix('*')}" in refused.err
    assert run("acl", "allow", "User:pat", "read", "topic:*").lines == ["allow User:pat read topic:*"]
    assert run("acl", "deny", "User:pat", "read", "topic:ord", "--prefixed").lines == [
        "deny User:pat read topic:ord* (prefixed)"
    ]


def test_users_change_their_own_password_and_explain_their_own_rights(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add_user(run, "olga", "allow User:olga write topic:olgas")
    _become(monkeypatch, "olga")
    hidden = "showing which rule decides needs DESCRIBE on the cluster"
    assert run("acl", "explain", "User:olga", "write", "topic:olgas").lines == [f"allowed: {hidden}"]
    assert run("acl", "explain", "User:olga", "create", "topic:olgas").lines == [f"denied: {hidden}"]
    others = run("acl", "explain", "User:admin", "write", "topic:olgas").err
    assert "explaining the rights of others needs DESCRIBE on the cluster; you are User:olga" in others
    for arguments, says in (
        (("create", "new"), "creating a user needs DESCRIBE and ALTER on the cluster"),
        (("password", "admin"), "changing another user's password needs ALTER on the cluster"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("another-password\n"))
        refused = run("user", *arguments, "--password-stdin")
        assert (refused.code, says in refused.err) == (1, True), refused.err
    monkeypatch.setattr("sys.stdin", io.StringIO("another-password\n"))
    changed = run("user", "password", "olga", "--password-stdin")
    assert (changed.code, changed.lines) == (0, ["Changed the password of user olga."]), changed.err
    assert "authentication failed" in run("topic", "list").err
    monkeypatch.setenv("MILLSTREAM_PASSWORD", "another-password")
    token = run("token", "create", "--json").document["token"]
    for name in ("MILLSTREAM_USER", "MILLSTREAM_PASSWORD"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MILLSTREAM_TOKEN", token)
    monkeypatch.setattr("sys.stdin", io.StringIO("a-third-password\n"))
    assert "needs ALTER" in run("user", "password", "olga", "--password-stdin").err


def test_a_token_made_with_a_token_has_its_limits_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _add_user(run, "tom", "allow User:tom read topic:toms", "allow User:tom read topic:others")
    for topic in ("toms", "others", "theirs"):
        assert run("topic", "create", topic).code == 0
    _become(monkeypatch, "tom")
    scope = ("--allow", "read", "topic:toms", "--allow", "read", "topic:theirs")
    short = run("token", "create", "--expires", "1h", *scope)
    assert "Not valid for" not in short.err
    for name in ("MILLSTREAM_USER", "MILLSTREAM_PASSWORD"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MILLSTREAM_TOKEN", short.lines[0])
    child = run("token", "create", "--expires", "300d")
    assert "Not valid for 300d: it expires with the token that it was created with." in child.err
    parent_ms, child_ms = (
        listed_token["expires_ms"]
        for token in (short, child)
        for listed_token in run("token", "list", "--json").document["tokens"]
        if token.lines[0].startswith(listed_token["id"])
    )
    assert child_ms == parent_ms
    # It has what both its owner and the first token may do.
    monkeypatch.setenv("MILLSTREAM_TOKEN", child.lines[0])
    assert [topic["topic"] for topic in run("topic", "list", "--json").document["topics"]] == ["toms"]
    assert [run("tail", topic, "-n", 1).code for topic in ("toms", "others", "theirs")] == [0, 1, 1]


def _add_user(run: Run, name: str, *rules: str) -> None:
    for rule in rules:
        assert run("acl", *rule.split()).code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(f"{name}-password\n"))
        assert run("user", "create", name, "--password-stdin").code == 0


def _become(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MILLSTREAM_USER", name)
    monkeypatch.setenv("MILLSTREAM_PASSWORD", f"{name}-password")


def test_quotas_are_set_listed_and_removed(run: Run) -> None:
    assert run("quota", "set", "user:eve", "--produce", 1024).code == 0
    assert run("quota", "set", "user", "client-id:app", "--consume", 2048).code == 0
    quotas = run("quota", "list", "--json").document["quotas"]
    assert {"entity": {"user": "eve"}, "producer_byte_rate": 1024.0} in quotas
    assert {"entity": {"user": None, "client-id": "app"}, "consumer_byte_rate": 2048.0} in quotas
    assert run("quota", "remove", "user:eve").code == 0
    assert run("quota", "remove", "user", "client-id:app").code == 0
    assert run("quota", "list").lines == ["No quotas."]


@pytest.mark.parametrize(
    "arguments", [("--produce", "5"), ("user:a",), ("team:a", "--produce", "5"), ("user:a", "user:b", "--produce", "5")]
)
def test_an_incomplete_quota_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("quota", "set", *arguments).code == 2


@pytest.mark.parametrize("rate", ["1MB", "0", "nan"])
def test_a_rate_is_a_number_of_bytes_per_second(run: Run, rate: str) -> None:
    refused = run("quota", "set", "user:a", "--produce", rate)
    assert (refused.code, f"'{rate}' is not a number of bytes per second" in refused.err) == (2, True)


def test_a_resource_without_its_type_is_refused_with_the_form(run: Run) -> None:
    refused = run("acl", "grant", "User:bob", "writer", "jsn")
    assert (refused.code, "must be written as TYPE:NAME, as in topic:orders, not 'jsn'" in refused.err) == (2, True)


def test_the_audit_log_is_printed_by_tail(run: Run) -> None:
    run("topic", "create", "access-audited")
    printed = run("tail", "__audit", "--from", "start", "-n", 3)
    assert printed.code == 0, printed.err
    assert '"class_name":"Authentication"' in printed.out.replace(" ", "")
