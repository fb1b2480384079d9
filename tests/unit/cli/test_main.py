from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millstream import __version__
from millstream.cli import app, topic
from millstream.cli.exit_code import CommandFailed, ExitCode, exit_code_of
from millstream.cli.options import Common
from millstream.core import errors
from millstream.core.config import Config
from millstream_testing.command import call_command

SLOW_TO_IMPORT = ("kio", "sqlalchemy", "numba", "numpy", "pyarrow", "rich", "uvloop", "uvicorn", "starlette")


def test_startup_imports_little() -> None:
    program = "import sys, millstream.cli.app; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & set(SLOW_TO_IMPORT) == set()


def test_a_command_imports_only_what_it_needs() -> None:
    program = (
        "import sys; from millstream.cli.app import call\n"
        "assert call(['topic', 'list', '--brokers', '127.0.0.1:1', '--timeout', '2.5', '--json']) == 4\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    imported = set(ended.stdout.split())
    assert "millstream.protocol.wire.client" in imported
    libraries = {"pydantic", "crc32c", "numpy", "rich", "sqlglot"}
    assert imported & libraries == set()
    own = {
        f"millstream.{name}" for name in ("cli.cluster", "client.connection", "protocol.records", "protocol.schemas")
    }
    own |= {f"millstream.core.{name}" for name in ("acl", "config", "credential", "pipeline", "schema", "subscription")}
    assert imported & own == set()


def test_a_server_does_not_import_the_test_helpers_of_kio() -> None:
    program = "import sys, millstream.broker.kafka.served_apis, millstream.broker.node; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "kio.schema.errors" in loaded
    assert "hypothesis" not in loaded


def test_the_version_is_reported() -> None:
    reported = call_command(["--version"])
    assert (reported.code, reported.out, reported.err) == (0, f"millstream {__version__}\n", "")


def test_every_command_has_help() -> None:
    result = call_command(["--help"])
    assert result.code == 0
    for command in app.ORDER:
        helped = call_command([command, "-h"])
        assert (helped.code, helped.err) == (0, "")
        assert helped.out.startswith(f"Usage: millstream {command}")
        assert (f"\n  {command} " in result.out) == (not command.endswith("-reference"))


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("publish", "TOPIC [VALUE]"),
        ("quota set", "TYPE:NAME..."),
        ("cluster apply", "[PLAN]"),
        ("pipeline run", "NAME|KIND [TOPIC...]"),
        ("pipeline rule delete", "NAME RULE..."),
    ],
)
def test_help_names_arguments_in_capitals_and_optional_ones_in_brackets(command: str, usage: str) -> None:
    helped = call_command([*command.split(), "--help"])
    assert helped.out.startswith(f"Usage: millstream {command} [OPTIONS] {usage}\n")
    for name in usage.split():
        assert f"\n  {name}  " in helped.out
    assert "<str>" not in helped.out


def test_every_command_names_its_arguments_and_options_in_its_help() -> None:
    remaining: list[tuple[list[str], Any]] = [([], get_command(app.build_app()))]
    seen = 0
    while remaining:
        path, command = remaining.pop()
        remaining += [([*path, name], one) for name, one in getattr(command, "commands", {}).items()]
        helped = call_command([*path, "--help"])
        assert helped.code == 0, (path, helped.err)
        assert "<str>" not in helped.out, path
        seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    "command", ["topic list", "doctor", "subscription update", "pipeline run", "pipeline create job"]
)
def test_commands_that_connect_say_that_they_take_an_identity(command: str) -> None:
    assert "It also takes --profile" in call_command([*command.split(), "--help"]).out


@pytest.mark.parametrize("arguments", [[], ["topic"], ["group"]])
def test_no_command_prints_help(arguments: list[str]) -> None:
    reported = call_command(arguments)
    assert (reported.code, reported.out) == (2, "")
    assert reported.err.startswith("Usage: millstream")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["launch"], "No such command 'launch'"),
        (["topic", "lst"], "Did you mean 'list'?"),
        (["tail"], "Missing argument 'TOPIC'"),
        (["tail", "x", "--nope"], "No such option: --nope"),
        (["tail", "x", "-n", "many"], "Invalid value for '-n' / '--number': 'many' is not a whole number ("),
        (["tail", "x", "-n", "-1"], "Invalid value for '-n' / '--number': -1 is below 0 ("),
        (["tail", "x", "-n", "1000000"], "Invalid value for '-n' / '--number': 1000000 is above 100000 ("),
        (
            ["publish", "x", "v", "--delay", "soon"],
            "Invalid value for '--delay': 'soon' is not a length of time such as 30s, 15m or 1h (",
        ),
        (
            ["publish", "x", "v", "--compression", "zip"],
            "'zip' is not one of 'none', 'gzip', 'snappy', 'lz4', 'zstd' (",
        ),
        (
            ["publish", "x", "v", "--delay", "inf"],
            "Invalid value for '--delay': 'inf' is not a length of time such as 30s",
        ),
        (["client", "list", "--interval", "2m"], "Invalid value for '--interval': 2m is above 60 s ("),
        (["message", "show", "x", "0", str(10**20)], f"Invalid value for 'OFFSET': {10**20} is too large ("),
        (["topic", "create", "x", "--partitions", str(10**11)], f"'--partitions': {10**11} is above 2147483647 ("),
        (["topic", "create", "x", "--replication", str(10**5)], f"'--replication': {10**5} is above 32767 ("),
        (["--brokers", "127.0.0.1:1", "launch"], "No such command 'launch'"),
        (["--brokers", "127.0.0.1:1", "serve"], "No such option: --brokers ("),
    ],
)
def test_usage_errors_are_one_sentence(arguments: list[str], output: str) -> None:
    reported = call_command(arguments)
    assert (reported.code, reported.out, reported.err.count("\n")) == (2, "", 1)
    assert output in reported.err
    assert "--help)" in reported.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--brokers", "host:1", "--timeout", "3", "--json", "topic", "list"],
        ["--brokers=host:1", "topic", "--timeout=3", "--json", "list"],
        ["--brokers", "other:1", "topic", "list", "--brokers", "host:1", "--timeout", "3", "--json"],
    ],
)
def test_shared_options_may_precede_the_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def note(*values: object) -> list[object]:
        asked.append(values[0])
        return []

    monkeypatch.setattr(topic, "call_broker", note)
    reported = call_command(arguments)
    assert (reported.code, reported.document) == (0, {"topics": []})
    assert asked == [Common(as_json=True, brokers="host:1", timeout=3.0)]


def test_serve_has_a_flag_for_every_setting() -> None:
    shown = call_command(["serve", "--help"]).out
    for name in Config.declared():
        assert f"  --{name} " in shown


def test_an_unexpected_error_shows_a_traceback_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(topic, "call_broker", broken)
    reported = call_command(["topic", "list"])
    assert reported.code == 1
    assert reported.err.startswith("millstream: ZeroDivisionError: by accident (this is a bug in Millstream;")
    assert reported.err.count("\n") == 1
    monkeypatch.setenv("MILLSTREAM_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in call_command(["topic", "list"]).err


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(topic, "call_broker", interrupted)
    reported = call_command(["topic", "list"])
    assert (reported.code, reported.out, reported.err) == (130, "", "")


def test_an_interrupt_while_a_command_is_imported_is_quiet() -> None:
    program = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from millstream.cli.main import run
run()
"""
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (reported.returncode, reported.stdout, reported.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidSetting("x"), 2),
        (errors.UnknownTopic("x"), 3),
        (errors.UnknownGroup("x"), 3),
        (errors.BrokerUnreachable("x"), 4),
        (errors.TopicExists("x"), 5),
        (errors.GroupNotEmpty("x"), 5),
        (errors.DataFolderInUse("x"), 5),
        (errors.RequestTimedOut("x"), 6),
        (errors.StorageFailure("x"), 1),
        (CommandFailed("x"), 1),
        (CommandFailed("x", ExitCode.NOT_FOUND), 3),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(("reason", "code"), [(errno.EADDRINUSE, 5), (errno.EADDRNOTAVAIL, 1)])
def test_only_an_address_in_use_is_a_conflict(reason: int, code: int) -> None:
    error = errors.AddressTaken("x")
    error.__cause__ = OSError(reason, "x")
    assert exit_code_of(error) == code


def test_shell_completion_is_offered() -> None:
    assert "--install-completion" in call_command(["--help"]).out


def test_shell_completion_knows_the_commands() -> None:
    environment = {"_MILLSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "millstream topic cr", "COMP_CWORD": "2"}
    program = [sys.executable, "-m", "millstream.cli.main"]
    reported = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert reported.stdout.split() == ["create"]


def test_an_invalid_inventory_file_is_named(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.json"
    garbage.write_text("[1, 2]")
    stores = ["--etcd", "http://127.0.0.1:1", "--catalog", "postgresql://nobody@127.0.0.1:1/none"]
    reported = call_command(["cluster", "rebuild", *stores, "--from", str(garbage)])
    assert (reported.code != 0, str(garbage) in reported.err, "cluster inventory" in reported.err) == (True, True, True)


def test_the_help_of_every_command_describes_the_command() -> None:
    """It must not show the docstring of an imported constant of the same name."""
    commands = call_command(["--help"]).out.partition("Commands:\n")[2].partition("\n\n")[0]
    summaries = [
        line.split(maxsplit=1)[1] for line in commands.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    assert len(summaries) > 10
    assert [summary for summary in summaries if not summary[0].isupper()] == []


def test_the_summaries_of_commands_are_whole_sentences() -> None:
    def summaries(*command: str) -> list[str]:
        commands = call_command([*command, "--help"]).out.partition("Commands:\n")[2].partition("\n\n")[0]
        return [line for line in commands.splitlines() if line.startswith("  ") and line[2] != " "]

    nouns = [line.split()[0] for line in summaries()]
    shown = [*summaries(), *(line for noun in nouns for line in summaries(noun))]
    assert len(shown) > 100
    assert [line for line in shown if line.endswith("...")] == []


def test_a_missing_optional_package_is_named_with_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ModuleNotFoundError("No module named 'aetcd'", name="aetcd")

    assert app.run_reporting(work) == ExitCode.FAILED
    assert "aetcd is not installed; run pip install '.[cluster]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["user", "create", "alice", "--password-file", "{password}"], "pass --catalog-password-file instead"),
        (["cluster", "rebuild", "--data", "{missing}"], "set catalog in the file of --config instead"),
    ],
)
def test_a_password_among_the_arguments_is_pointed_out(tmp_path: Path, arguments: list[str], instead: str) -> None:
    (tmp_path / "password").write_text("password-of-alice")
    named = {"password": str(tmp_path / "password"), "missing": str(tmp_path / "missing")}
    words = [argument.format_map(named) for argument in arguments]
    catalog = "postgresql://millstream:pass-of-url@127.0.0.1:1/millstream"
    failed = call_command([*words, "--catalog", catalog])
    assert failed.code != 0
    assert f"--catalog holds a password, and every user of this machine can see it; {instead}" in failed.err
    assert "pass-of-url" not in failed.err + failed.out
    assert "holds a password" not in call_command([*words, "--catalog", catalog.replace(":pass-of-url", "")]).err
