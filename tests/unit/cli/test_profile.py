"""Profiles: read from the user's file, chosen by flag or variable, and never printed with their secrets."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from millstream.cli import connection
from millstream.cli.app import call
from millstream.cli.connection import command_credentials, take_credentials
from millstream.cli.exit_code import CommandFailed
from millstream.client.connection import connect
from millstream.client.profile import load_profile, profile_file, read_profiles
from millstream.core.errors import InvalidRequest, InvalidSetting, NotFound
from millstream_testing.security import Certificates

WORD = "a-password-of-alice"
TOKEN = "a-token-of-ci"


@pytest.fixture(autouse=True)
def own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the flags of one test from leaking into the next."""
    monkeypatch.setattr(connection, "_given", {})


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two profiles: a user with a password, TLS and a certificate; and a token from a file."""
    certificates = Certificates(tmp_path / "certs")
    certificates.client("alice")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    path = tmp_path / "profiles.toml"
    path.write_text(
        f"""
        [prod]
        brokers = "prod.example:9092,other.example:9092"
        tls-ca = "certs/ca.pem"
        tls-cert = "certs/alice.pem"
        tls-key = "certs/alice.key"
        user = "alice"
        password = "{WORD}"

        [ci]
        brokers = "ci.example:9092"
        token-file = "token"
        """
    )
    path.chmod(0o600)
    for name in ("PROFILE", "BROKERS", "USER", "PASSWORD", "TOKEN", "TLS_CA"):
        monkeypatch.delenv(f"MILLSTREAM_{name}", raising=False)
    monkeypatch.setenv("MILLSTREAM_PROFILES", str(path))
    return path


def test_a_command_connects_by_its_profile(profiles: Path) -> None:
    assert take_credentials(["topic", "list", "--profile", "prod"]) == ["topic", "list"]
    credentials = command_credentials()
    assert (credentials.user, credentials.password) == ("alice", WORD)
    assert isinstance(credentials.tls_context, ssl.SSLContext)
    take_credentials(["--profile=ci", "topic", "list"])
    credentials = command_credentials()
    assert (credentials.user, credentials.tls_context) == ("", None)
    assert credentials.token is not None
    assert credentials.token() == TOKEN


@pytest.mark.parametrize("before", [[], ["--brokers", "serve"], ["--timeout=5", "--json"], ["--tls-cert", "user"]])
def test_the_callers_password_file_may_precede_a_command_that_has_its_own(tmp_path: Path, before: list[str]) -> None:
    (tmp_path / "word").write_text("with a space \n")
    mine, new = ["--user", "admin", "--password-file", str(tmp_path / "word")], ["--password-file", "new"]
    rest = take_credentials([*before, *mine, "user", "create", "alice", *new])
    assert rest == [
        *(argument for argument in before if argument not in ("--tls-cert", "user")),
        "user",
        "create",
        "alice",
        *new,
    ]
    if "--tls-cert" not in before:
        assert (command_credentials().user, command_credentials().password) == ("admin", "with a space ")


def test_the_callers_password_file_may_follow_other_user_commands(tmp_path: Path) -> None:
    (tmp_path / "word").write_text(WORD)
    mine = ["--user", "bob", "--password-file", str(tmp_path / "word")]
    assert take_credentials(["user", "--brokers", "create", "list", *mine]) == ["user", "--brokers", "create", "list"]
    assert (command_credentials().user, command_credentials().password) == ("bob", WORD)


@pytest.mark.parametrize("flag", ["--token-file", "--password-file"])
def test_a_command_with_an_empty_secret_does_not_use_another_identity(
    profiles: Path, tmp_path: Path, flag: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    take_credentials(["topic", "list", "--profile", "prod", flag, str(tmp_path / "empty")])
    with pytest.raises(CommandFailed, match="empty is empty"):
        command_credentials()
    (tmp_path / "token").write_text("")
    with pytest.raises(InvalidSetting, match="token is empty"):
        load_profile("ci").read_token()


def test_a_user_and_a_token_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    by_token = ["--token-file", str(tmp_path / "token")]
    take_credentials(["topic", "list", "--user", "bob", *by_token])
    with pytest.raises(CommandFailed, match=r"not both \(--user and --token-file\)"):
        command_credentials()
    monkeypatch.setenv("MILLSTREAM_USER", "bob")
    monkeypatch.setenv("MILLSTREAM_PASSWORD", WORD)
    take_credentials(["topic", "list", *by_token])
    token = command_credentials().token
    assert (command_credentials().user, token and token()) == ("", TOKEN)
    monkeypatch.setenv("MILLSTREAM_TOKEN", TOKEN)
    take_credentials(["topic", "list"])
    with pytest.raises(CommandFailed, match="MILLSTREAM_USER and MILLSTREAM_TOKEN"):
        command_credentials()
    take_credentials(["topic", "list", "--user", "carol"])
    assert (command_credentials().user, command_credentials().token) == ("carol", None)


def test_a_mistake_in_a_profile_affects_only_that_profile(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.write_text(profiles.read_text() + '[typo]\nbroker = "a:1"\n')
    assert load_profile("ci").brokers == "ci.example:9092"
    with pytest.raises(InvalidSetting, match="'broker'"):
        load_profile("typo")
    assert call(["profile", "list"]) == 0
    printed = capsys.readouterr()
    assert ("ci.example:9092" in printed.out, "profile 'typo' has an unknown key" in printed.err) == (True, True)


def test_a_flag_precedes_a_variable_and_that_the_profile(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PROFILE", "prod")
    monkeypatch.setenv("MILLSTREAM_PASSWORD", "another-password")
    take_credentials(["topic", "list"])
    assert (command_credentials().user, command_credentials().password) == ("alice", "another-password")
    monkeypatch.setenv("MILLSTREAM_USER", "bob")
    assert (command_credentials().user, command_credentials().password) == ("bob", "another-password")
    (tmp_path / "word").write_text("from-a-file")
    take_credentials(["topic", "list", "--user", "carol", "--password-file", str(tmp_path / "word")])
    assert (command_credentials().user, command_credentials().password) == ("carol", "from-a-file")
    take_credentials(["topic", "list", "--profile", "ci"])
    monkeypatch.delenv("MILLSTREAM_USER")
    monkeypatch.delenv("MILLSTREAM_PASSWORD")
    token = command_credentials().token
    assert token is not None
    assert token() == TOKEN


def test_the_brokers_of_a_profile_are_used_unless_others_are_given(
    profiles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profiles.with_name("plain.toml")
    path.write_text('[near]\nbrokers = "127.0.0.1:1"\n')
    monkeypatch.setenv("MILLSTREAM_PROFILES", str(path))

    def asked(*arguments: str) -> str:
        assert call(["topic", "list", "--timeout", "0.2", *arguments]) == 4
        return capsys.readouterr().err

    assert "127.0.0.1:1" in asked("--profile", "near")
    assert "127.0.0.1:2" in asked("--profile", "near", "--brokers", "127.0.0.1:2")
    monkeypatch.setenv("MILLSTREAM_BROKERS", "127.0.0.1:3")
    assert "127.0.0.1:3" in asked("--profile", "near")


def test_a_profile_is_shown_without_its_secrets(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["list"], ["list", "--json"], ["show", "prod"], ["show", "prod", "--json"], ["show", "ci"]):
        assert call(["profile", *command]) == 0
    shown = capsys.readouterr().out
    assert "prod.example:9092" in shown
    assert "user alice" in shown
    assert WORD not in shown
    assert TOKEN not in shown
    assert WORD not in repr(load_profile("prod")) + repr(read_profiles())


def test_a_file_with_a_secret_must_be_private(profiles: Path, tmp_path: Path) -> None:
    profiles.chmod(0o640)
    with pytest.raises(InvalidSetting, match="chmod 600"):
        load_profile("prod")
    profiles.write_text('[open]\nbrokers = "a:1"\n')
    profiles.chmod(0o644)
    assert load_profile("open").brokers == "a:1"
    profiles.write_text('[ci]\ntoken-file = "token"\n')
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(InvalidSetting, match="chmod 600"):
        load_profile("ci").read_token()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'[p]\nuser = "alice"\npassword = "{WORD}', "not valid TOML"),
        (f'[p]\npassword = "{WORD}"', "user"),
        (f'[p]\nuser = "a"\npassword = "{WORD}"\ntoken = "t"', "one of them"),
        ('[p]\ntls-cert = "a"', "tls-key"),
        (f'[p]\npasword = "{WORD}"', "password"),
        (f'[p]\nuser = "a"\npassword = ["{WORD}"]', "must be a string"),
        ("p = 1", r"\[p\]"),
    ],
)
def test_an_unusable_file_is_explained_without_its_secrets(profiles: Path, text: str, reason: str) -> None:
    profiles.write_text(text)
    with pytest.raises(InvalidSetting, match=reason) as refused:
        load_profile("p")
    assert WORD not in str(refused.value)


def test_an_unknown_profile_is_refused_with_the_known_ones(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="did you mean 'prod'"):
        load_profile("prdo")
    monkeypatch.setenv("MILLSTREAM_PROFILES", str(profiles.with_name("none.toml")))
    with pytest.raises(NotFound, match=r"none\.toml"):
        load_profile("prod")


def test_profiles_are_in_the_folder_of_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLSTREAM_PROFILES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert profile_file() == tmp_path / "millstream" / "profiles.toml"


def test_a_program_connects_by_a_profile(profiles: Path) -> None:
    by_profile = connect(profile="prod").client
    assert by_profile._credentials.user == "alice"
    assert by_profile._credentials.password == WORD
    assert isinstance(by_profile._credentials.tls_context, ssl.SSLContext)
    assert connect(profile="prod", user="bob", password="x" * 8).client._credentials.user == "bob"
    assert connect(profile="prod", user=None, token=None).client._credentials.user == "alice"
    assert connect(profile="prod", tls=False).client._credentials.tls_context is None
    token = connect("elsewhere:1", profile="ci").client._credentials.token
    assert token is not None
    assert token() == TOKEN
    profiles.write_text('[bare]\nuser = "a"\npassword = "b"\n')
    with pytest.raises(InvalidRequest, match="address"):
        connect(profile="bare")
