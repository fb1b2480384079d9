"""docs/cli.md lists every command with its flags and its `--json` output: every field, by name.

Undocumented fields are found too, unless an ellipsis on the page says that there are more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from millstream.cli.app import build_app
from millstream.cli.connection import FLAGS, SWITCHES
from millstream.cli.options import SHARED
from millstream.embedded import EmbeddedBroker
from millstream_testing.command import PATIENCE_S, TIMEOUT_VARIABLE, Outcome, call_command
from millstream_testing.security import declare_security

PAGE: Final = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
TOKEN: Final = re.compile(r'"[^"]*"|[{}\[\],:…]|[^\s{}\[\],:"…]+')
MORE: Final = "…"

Run = Callable[..., Outcome]

# The commands of the page's tables, in an order that works, each with arguments in place of its placeholders.
STEPS: Final = {
    "topic create": "topic create orders --partitions 2",
    "topic list": "topic list",
    "topic describe": "topic describe orders",
    "topic alter": "topic alter orders --owner shop",
    "group reset": "group reset reports --to start --topic orders",
    "group list": "group list",
    "group describe": "group describe reports",
    "group delete": "group delete reports",
    "subscription create": "subscription create billing --topic orders --start start --attempts 1",
    "subscription list": "subscription list",
    "subscription describe": "subscription describe billing",
    "subscription leases": "subscription leases billing",
    "subscription update": "subscription update billing --lease 20",
    "subscription pause": "subscription pause billing",
    "subscription resume": "subscription resume billing",
    "dlq list": "dlq list",
    "dlq redrive NAME [--filter CONDITION] [-n N] [--to-topic TOPIC] --dry-run": "dlq redrive billing --dry-run",
    "dlq purge NAME [--filter CONDITION] [-n N] --dry-run": "dlq purge billing --dry-run",
    "dlq redrive NAME --to-topic TOPIC": "dlq redrive billing --to-topic orders -n 1",
    "dlq redrive NAME [--filter CONDITION] [-n N]": "dlq redrive billing -n 1",
    "dlq purge": "dlq purge billing",
    "subscription seek": "subscription seek billing --to start",
    "subscription delete": "subscription delete billing",
    "schema register": "schema register orders-value order.avsc",
    "schema list": "schema list",
    "schema check": "schema check orders-value order.avsc",
    "schema compatibility": "schema compatibility orders-value --set full",
    "schema export": "schema export --topic _schemas",
    "schema import": "schema import --topic _schemas --context .copy",
    "schema delete": "schema delete orders-value",
    "pipeline create land": "pipeline create land landed --topic orders --stopped",
    "pipeline create transform": "pipeline create transform shouted --sql @orders.sql --into loud --stopped",
    "pipeline create route": "pipeline create route routed --stopped",
    "pipeline create ledger": "pipeline create ledger outcomes --stopped",
    "pipeline list": "pipeline list",
    "pipeline describe": "pipeline describe landed",
    "pipeline update": "pipeline update landed --set every.ms=500",
    "pipeline start": "pipeline start landed",
    "pipeline stop": "pipeline stop landed",
    "pipeline delete": "pipeline delete landed",
    "pipeline rule put": "pipeline rule put routed first --topic orders --to other",
    "pipeline rule load": "pipeline rule load routed rules.json",
    "pipeline rule list": "pipeline rule list routed",
    "pipeline rule delete": "pipeline rule delete routed first",
    "transaction list [--state S]… [--longer-than DURATION]": "transaction list",
    "transaction list --hanging": "transaction list --hanging",
    "certs init": "certs init --dir certs",
    "certs client": "certs client alice --dir certs",
    "user create": "user create alice --password-file password",
    "user password": "user password alice --password-file password",
    "user list": "user list",
    "acl allow": "acl allow User:alice read topic:orders",
    "acl deny": "acl deny User:alice write topic:orders",
    "acl grant": "acl grant User:alice reader topic:orders",
    "acl list": "acl list",
    "acl explain": "acl explain User:alice read topic:orders",
    "acl revoke": "acl revoke User:alice reader topic:orders",
    "acl remove": "acl remove User:alice write topic:orders",
    "quota set": "quota set user:alice --produce 1000 --consume 1000",
    "quota list": "quota list",
    "quota remove": "quota remove user:alice",
    "user delete": "user delete alice",
    "secrets init": "secrets init --file secrets.keys",
    "secrets rotate": "secrets rotate --file secrets.keys",
    "secrets list": "secrets list",
    "secrets reseal": "secrets reseal",
    "topic delete": "topic delete orders",
}
ELSEWHERE: Final = {
    "pipeline run": "integration/test_pipeline_runtime.py",
    "pipeline runs": "unit/pipelines/test_jobs_child.py",
    "pipeline logs": "unit/pipelines/test_jobs_child.py",
    "pipeline trigger": "unit/pipelines/test_jobs_child.py",
    "pipeline cancel": "unit/pipelines/test_jobs_child.py",
    "pipeline create job": "unit/pipelines/test_jobs_child.py",
    "… with": "integration/test_landing.py",
    "replay": "integration/test_replay.py",
    "transaction describe": "integration/test_cli_transaction.py",
    "transaction abort": "integration/test_cli_transaction.py",
}
"""Commands that need Spark, jobs or an open transaction, with the tests that run them."""


class Shape:
    """The documented shape of a JSON document: the names of an object's fields with the shape of each."""

    def __init__(self, text: str) -> None:
        self._tokens = TOKEN.findall(text)
        self.value = self._read()

    def _read(self) -> Any:
        """Read one value: a dictionary for an object, a list for an array, None for everything else."""
        found: Any = None
        while self._tokens and self._tokens[0] not in ",]}":
            token = self._tokens.pop(0)
            if token == "{":
                found = dict(self._items("}"))
            elif token == "[":
                found = [value for _, value in self._items("]")]
        return found

    def _items(self, end: str) -> Iterator[tuple[str, Any]]:
        while self._tokens[0] != end:
            name = self._tokens[0]
            if end == "}":
                self._tokens.pop(0)
                has_value = self._tokens[0] == ":"
                yield name.strip('"') if name[0] == '"' else MORE, (self._read() if has_value else None)
            else:
                yield "", self._read()
            if self._tokens[0] == ",":
                self._tokens.pop(0)
        self._tokens.pop(0)


def differences(shape: Any, document: Any, where: str = "") -> Iterator[str]:
    if isinstance(shape, list) and shape and isinstance(document, list):
        for item in document:
            yield from differences(shape[0], item, f"{where}[]")
    elif isinstance(shape, Mapping) and document is not None:
        if not isinstance(document, dict):
            yield f"{where} is {document!r}"
            return
        named = shape.keys() - {MORE}
        yield from (f"{where}.{name} is not printed" for name in named - document.keys())
        if MORE not in shape:
            yield from (f"{where}.{name} is not on the page" for name in document.keys() - named)
        for name in named & document.keys():
            yield from differences(shape[name], document[name], f"{where}.{name}")


def rows() -> Iterator[tuple[str, str]]:
    """The commands of the page's tables, each with its output."""
    before = ""
    for commands, printed in re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.replace("\\|", "/"), re.MULTILINE):
        shapes = re.findall(r"`([{\[].*?)`", printed)
        if printed == "the same":
            shapes = [before]
        names = re.findall(r"`([a-z]+ .*?)`", commands) if commands[0] == "`" else [commands]
        for number, name in enumerate(names):
            if shapes and name != "pipeline create":
                before = shapes[number] if len(shapes) == len(names) else shapes[0]
                yield name, before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Commands as the super user of a separate broker, in a separate folder."""
    folder = tmp_path_factory.mktemp("page")
    declare_security(folder / "data", {"admin": "admin-password"})
    broker = EmbeddedBroker(folder / "data", settings={"auth": "required", "super-users": "admin"})
    broker.start_and_wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_USER", "admin")
        patch.setenv("MILLSTREAM_PASSWORD", "admin-password")
        patch.setenv("MILLSTREAM_BROKERS", broker.kafka_address)
        patch.setenv(TIMEOUT_VARIABLE, PATIENCE_S)
        patch.chdir(folder)
        yield lambda *arguments: call_command([str(argument) for argument in arguments])
    broker.stop_and_wait()


def commands(of: Any, *names: str) -> Iterator[tuple[str, set[str]]]:
    for name, inner in getattr(of, "commands", {}).items():
        yield from commands(inner, *names, name)
    if not hasattr(of, "commands"):
        yield " ".join(names), {flag for param in of.params for flag in param.opts if flag.startswith("--")}


def test_the_page_has_every_command_with_its_flags() -> None:
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    everywhere = {*FLAGS, *SWITCHES, *SHARED, "--help", "--yes"}
    lacking = []
    for command, flags in commands(typer.main.get_command(build_app())):
        noun = command.split()[0]
        if noun == "serve" or noun.endswith("-reference"):
            continue  # Its flags are the settings, which have their own page.
        text = next((text for title, text in sections.items() if noun in title.split(", ")), "")
        # A plan has its kinds, one after the other.
        words = command.replace("plan balance", "plan drain").replace("plan remove", "plan drain")
        lacking += [command] if f"`{words}" not in PAGE and f"millstream {words}" not in PAGE else []
        lacking += [f"{command} {flag}" for flag in flags - everywhere if flag not in text]
    assert lacking == []


def test_every_command_of_the_tables_is_run() -> None:
    undescribed = [name for name, _ in rows() if not any(name.startswith(known) for known in (*STEPS, *ELSEWHERE))]
    assert undescribed == []
    for known in STEPS:
        assert any(name.startswith(known) for name, _ in rows()), known


def test_commands_print_the_documented_fields(run: Run) -> None:
    Path("password").write_text("a password of alice")
    Path("order.avsc").write_text('{"type": "record", "name": "order", "fields": []}')
    Path("rules.json").write_text('[{"name": "second", "topic": "orders", "targets": ["other"]}]')
    Path("orders.sql").write_text("SELECT upper(cast(value AS string)) AS value FROM orders")
    shapes = dict(rows())
    mismatches = []
    for known, command in STEPS.items():
        if known == "subscription leases":
            for number in range(3):
                assert run("publish", "orders", number, "--partition", 0).code == 0
            assert len(run("subscription", "pull", "billing", "-n", 1, "--wait", 60, "--json").documents) == 1
        if known == "dlq list":
            rejected = run("subscription", "pull", "billing", "-n", 3, "--wait", 60, "--reject", "no", "--json")
            assert len(rejected.documents) == 2
        ended = run(*command.split(), "--json")
        assert ended.code == 0, (command, ended.err)
        name = min((name for name in shapes if name.startswith(known)), key=len)
        mismatches += [
            f"{command}: {difference}" for difference in differences(Shape(shapes[name]).value, json.loads(ended.out))
        ]
    assert not mismatches, "\n".join(mismatches)
